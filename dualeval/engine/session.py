"""Session: everything that a run holds, opened in one place, and ended in one place.

``conclude`` is the one way in which a run ends early, whoever notices: the main thread that raises an error,
or the watch where the main thread does not come back.
"""

from __future__ import annotations

import difflib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from time import monotonic, sleep
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dualeval.engine.ending import say, spoken
from dualeval.engine.options import RunOptions
from dualeval.engine.signals import DEFAULT_SIGNALS, Signals
from dualeval.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    EXIT_USAGE,
    DualevalError,
    LibraryError,
    PeerError,
    Stopped,
    UsageError,
    exit_code_of,
)
from dualeval.launch.cores import Cores, own_cores, share_of_cores
from dualeval.waiting import STARTED, waiting

if TYPE_CHECKING:
    import torch

    from dualeval.backends.base import Backend
    from dualeval.engine.control.plane import ControlPlane
    from dualeval.engine.watch import Watch
    from dualeval.result import Result
    from dualeval.tasks import Task
    from dualeval.world import World

_LEAST_TIMEOUT_S = 1.0
_LONGEST_TIMEOUT_S = 1e6
ON_STALL = ("raise", "exit")
# Until rank 0 waits no longer for what the others have saved, and these no longer for rank 0 to write that
# down. Every rank has ended before 5 s.
_ALL_SAVED_WITHIN_S = 4.0
_STOPPED_WITHIN_S = 4.6
_FLUSH_WITHIN_S = 1.0
# srun loses words that it has not handed on when it ends the step.
_LAST_WORDS_S = 0.5


class Session:
    """Everything of one or several evaluations by the same ranks; a context manager.

    Where no group of ranks was open before, the session is the **owner**, with all promises of the command
    line: signals and other ranks' failures end the process in time, with its exit code, whatever the main
    thread is in.

    Inside a script that has opened a process group of torch.distributed, or called ``hvd.init()``, it is a
    **guest**: it takes no signals and never ends the process; failures and stops are raised from
    ``evaluate``, and a rank that stands still is named on standard error and raised where Python runs. The
    model, random numbers and torch's settings are afterwards as they were.

    Args:
        backend: how the ranks talk: "single", "torch", "horovod" or "mpi"; None takes the caller's open
            group, or else the launcher's own.
        device: "cpu", "cuda" or "cuda:N"; None takes a GPU where there is one.
        launcher: who started the ranks; None finds out.
        allow_shared_gpu: let several ranks of a node share a GPU.
        mix_machines: let devices or versions differ between ranks.
        heartbeat_timeout: seconds without progress after which a rank is given up.
        stop_signals: names of the signals that stop a run and save what is finished; an owner's alone.
        on_stall: what follows where the main thread does not end by itself: "exit" ends the process, "raise"
            raises where Python runs. None is "exit" for an owner and "raise" for a guest.
        stop: called several times a second from another thread; true, or a text that says why, stops all
            ranks with what is finished saved.
        note: called with sentences for people, on rank 0 only; None writes them on standard error.

    Attributes:
        exit_code: what the run has come to: 0, or once it has been concluded that error's code.
        is_concluded: whether it has ended early: no evaluation follows.
        is_owner: whether it is the owner.
        cores: number of cores that are this rank's.

    Raises:
        UsageError: an option has a value that it cannot have.
    """

    def __init__(
        self,
        *,
        backend: str | None = None,
        device: str | torch.device | None = None,
        launcher: str | None = None,
        allow_shared_gpu: bool = False,
        mix_machines: bool = False,
        heartbeat_timeout: float = 60.0,
        stop_signals: Sequence[str] = DEFAULT_SIGNALS,
        on_stall: str | None = None,
        stop: Callable[[], bool | str] | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        check_timeout("heartbeat_timeout", heartbeat_timeout)
        if on_stall is not None and on_stall not in ON_STALL:
            raise UsageError(f"on_stall={on_stall!r}: expected {' or '.join(map(repr, ON_STALL))}, or None")
        self.exit_code = EXIT_DONE
        self.is_owner = True
        self.cores = 1
        self._backend_name = backend
        self._wanted_device = None if device is None else str(device)
        self._launcher = launcher
        self._allow_shared_gpu = allow_shared_gpu
        self._mix_machines = mix_machines
        self._heartbeat_timeout = heartbeat_timeout
        self._stop_signals = tuple(stop_signals)
        self._on_stall = on_stall
        self._stop = stop
        self._note = note
        self._backend: Backend | None = None
        self._control: ControlPlane | None = None
        self._watch: Watch | None = None
        self._signals: Signals | None = None
        self._concluding = threading.Lock()
        self.is_concluded = False
        self._is_closed = False
        # The error that the run was concluded by, whose end has been said.
        self._said: BaseException | None = None
        self._previous_hook: Any = None

    @property
    def backend(self) -> Backend:
        """How the ranks reduce and gather; raises UsageError where the session is not open."""
        if self._backend is None:
            raise UsageError(
                "this session is not open: write 'with dualeval.Session() as session:' around its use"
            )
        return self._backend

    @property
    def control(self) -> ControlPlane:
        """Where the ranks meet; likewise."""
        _ = self.backend
        assert self._control is not None
        return self._control

    @property
    def world(self) -> World:
        """This process's place among the ranks; likewise."""
        return self.backend.world

    # -- opening -----------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        self.open()
        return self

    def open(self) -> None:
        """Join the ranks, and watch them from here on. A collective.

        Raises:
            UsageError, LaunchError: the launcher, the backend or the device is not what it has to be.
            BackendError: the group could not be joined.
        """
        from dualeval.backends import group_of_caller

        caller = group_of_caller()
        self.is_owner = caller is None
        if self.is_owner:
            # Before any library has a thread: what is blocked then is blocked in all of them.
            self._signals = Signals(self._stop_signals)
            self._previous_hook, sys.excepthook = sys.excepthook, self._end_quietly
        world = None
        try:
            world = self._find_world(caller)
            self._join(caller, world)
        except BaseException as error:
            self._fail_to_open(error, world)
            raise

    def _find_world(self, caller: str | None) -> World:
        from dualeval.backends import world_of_caller
        from dualeval.launch import examine

        detection = examine(os.environ, self._launcher)
        if caller is not None:
            return world_of_caller(caller, detection.world)
        return detection.place

    def _join(self, caller: str | None, world: World) -> None:
        from dualeval.backends import choose_backend, connect
        from dualeval.devices import check_name, take_device
        from dualeval.engine.control.plane import open_control_plane
        from dualeval.engine.watch import Watch

        name = self._backend_name or caller
        choose_backend(name, world)
        check_name(self._wanted_device)
        self._backend = connect(name, world)
        self._control = open_control_plane(self._backend, self._heartbeat_timeout)
        ends_process = self._on_stall == "exit" or (self.is_owner and self._on_stall is None)
        self._watch = Watch(
            self._control, self._conclude_from_watch, ends_process=ends_process, stop=self._stop
        )
        if self._signals is not None:
            self._signals.tell(self._control.stop)
        self.cores = self._share_cores()
        take_device(
            self._backend,
            self._wanted_device,
            allow_shared_gpu=self._allow_shared_gpu,
            mix_machines=self._mix_machines,
        )

    def _share_cores(self) -> int:
        """Divide the cores of each node among its ranks; returns this rank's number of them.

        A collective. An owner uses as many threads, unless the user has set OMP_NUM_THREADS.
        """
        import torch

        own = own_cores()
        alone = self.world.size == 1
        with waiting(self.world, "the cores of all ranks", STARTED):
            everyone = (
                [own] if alone else [Cores(**cores) for cores in self.backend.all_gather_json(asdict(own))]
            )
        share = share_of_cores(own, everyone)
        # torch has counted the cores that a process may use, but no other ranks and no quota.
        chosen = "OMP_NUM_THREADS" in os.environ or (alone and torch.get_num_threads() <= share)
        if self.is_owner and not chosen:
            torch.set_num_threads(share)
        return share

    def _fail_to_open(self, error: BaseException, world: World | None) -> None:
        """Say what is wrong: perhaps it is this rank's alone, with no way yet to tell the others."""
        if self._watch is not None:
            self.conclude(error)
        elif self.is_owner and isinstance(error, DualevalError):
            self.exit_code = error.exit_code
            alone = world is None or world.size == 1
            # What a library lacks, every rank of a node says alike: the first one does.
            if world is None or not isinstance(error, LibraryError) or world.local_rank == 0:
                where = "" if alone or world is None else f" (on rank {world.rank})"
                say(f"dualeval: error: {error}{where}")
            if not alone:
                sleep(_LAST_WORDS_S)
            self._said = error
            self.is_concluded = True
        self._close(failed=True)

    # -- evaluating --------------------------------------------------------------------------------

    def evaluate(
        self,
        task: Task,
        *,
        job: Mapping[str, Any] | None = None,
        show: Callable[[int, int], None] | None = None,
        started: float | None = None,
        last: bool = False,
        **options: Any,
    ) -> Result:
        """Evaluate a task; every rank calls this and gets the same metrics.

        Args:
            task: what is evaluated.
            job: the options as the caller wants them recorded in the result.
            show: progress display, called on rank 0 from a thread of its own with the samples done over all
                ranks, and the samples in all.
            started: ``perf_counter()`` at the start of the run, where that was before this call.
            last: nothing follows it: a signal that comes when the result is written comes too late.
            options: of ``RunOptions``, as ``out``, ``batch_size`` and ``precision``.

        Raises:
            UsageError: task, data, weights and options do not fit together.
            ExactlyOnceError: a sample was counted never, or more than once.
            PeerError: another rank failed first.
            Stopped: a signal, or ``stop``, has ended the run; what was finished is saved.
        """
        from dualeval.engine.evaluator import Evaluator
        from dualeval.engine.watch import Interrupted

        self._require_going_on()
        run_options = _run_options(options)
        assert self._watch is not None
        self._watch.begin()
        try:
            result = Evaluator(
                task,
                self.backend,
                self.control,
                run_options,
                watch=self._watch,
                note=self.note,
                job=job,
                show=show,
                started=started,
                guest=not self.is_owner,
            ).run()
        except BaseException as error:
            self._watch.end(was_raised=isinstance(error, Interrupted))
            concluded = self._concluded(error)
            if concluded is error:
                raise
            raise concluded from error
        self._watch.end()
        if not last:
            self._watch.goes_on()
            self.control.progress.step("idle")
        return result

    def note(self, sentence: str) -> None:
        """Pass a sentence for people on; called on rank 0."""
        if self._note is not None:
            self._note(sentence)
        else:
            say(f"dualeval: note: {sentence}")

    def _require_going_on(self) -> None:
        if self.is_concluded:
            raise UsageError(
                f"this session has ended with exit code {self.exit_code}: open another one to evaluate again"
            )
        _ = self.control

    def _concluded(self, error: BaseException) -> BaseException:
        """Conclude the run after an error; returns what is to be raised."""
        from dualeval.engine.watch import Interrupted

        if isinstance(error, Interrupted):
            failure = self.control.failure
            error = failure if failure is not None else Stopped(self.control.stopping or "stop()")
        elif self.is_owner and isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit):
            # Signals are the session's: what is raised here is the task's own.
            said = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else type(error).__name__
            error = DualevalError(f"the task's code raised {said} in the midst of the run")
        self.conclude(error)
        self._said = error
        return error

    # -- the one way to end ------------------------------------------------------------------------

    def conclude(self, error: BaseException) -> int:
        """End the run early, from the main thread, in whose hands the error is; returns the exit code.

        What is finished is saved, all ranks learn of the end, rank 0 writes it into status.json, and it is
        said once. A second call gives the same code.
        """
        if self.is_concluded:
            return self.exit_code
        assert self._watch is not None
        self._watch.main_concludes(exit_code_of(error))
        if not self._concluding.acquire(blocking=False):
            # The watch was first, and ends the process.
            threading.Event().wait()
        stops = self.control.failure is None and (
            isinstance(error, Stopped) or self.control.stopping is not None
        )
        code = None
        if stops:
            # Whatever went wrong while ranks were ending: they were told to.
            self.control.stop(str(error))
            code = self._conclude_stop()
        failure = self.control.failure
        if code is None or (failure is not None and failure.where is not None):
            code = self._conclude_failure(error if failure is None or not stops else failure)
        self.is_concluded = True
        self.exit_code = code
        self._watch.main_concludes(code)
        self._let_go(code)
        return code

    def _conclude_from_watch(self) -> int:
        """The same from the watch's thread, where the main thread is in something that does not return."""
        if not self._concluding.acquire(blocking=False):
            threading.Event().wait(_ALL_SAVED_WITHIN_S)
            return self.exit_code or EXIT_FAILED
        control = self.control
        code = self._conclude_stop() if control.failure is None else None
        failure = control.failure
        # A failure that a rank has told of is why a launcher ends the others by a signal.
        if failure is not None and (code is None or failure.where is not None):
            self._save()
            say(spoken(failure, control.name.rank))
            # Where rank 0 is what failed, any other has to write it.
            if control.name.rank == 0 or failure.rank == 0:
                self._write_down(failure)
            code = failure.exit_code
        assert code is not None
        self.exit_code = code
        self._let_go(code)
        return code

    def _let_go(self, code: int) -> None:
        """Close what shows that this run is at work, and let the others end."""
        assert self._watch is not None
        if self._watch.folder is not None:
            self._watch.folder.close()
        # Nothing more is in hand, and the end is written down.
        self._watch.release(done=False)
        if self.control.name.rank == 0 and self.control.stopping is not None:
            self.control.tell_end(code)

    def _conclude_stop(self) -> int | None:
        """Have all ranks save what they have, and rank 0 write it down; returns the exit code.

        None where it turns out that a rank has failed.
        """
        assert self._watch is not None
        control, folder = self.control, self._watch.folder
        start = self._watch.since or monotonic()
        problem = self._save()
        if problem is None:
            recorder = self._watch.recorder
            control.saved(0 if recorder is None else recorder.chunks_saved)
        else:
            control.fail_to_save(problem)
        within_s = _ALL_SAVED_WITHIN_S if control.name.rank == 0 else _STOPPED_WITHIN_S
        control.all_saved.wait(max(0.0, within_s - (monotonic() - start)))
        if control.name.rank != 0:
            is_done = folder is not None and folder.shared and folder.is_done
            otherwise = EXIT_DONE if is_done else EXIT_STOPPED
            return otherwise if control.end_code is None else control.end_code
        if control.failure is not None and control.failure.where is not None:
            return None
        stop = Stopped(control.stopping or "")
        if folder is not None and folder.is_done:
            self._say(f"dualeval: {stop} came when the result was written: {folder.path}")
            return EXIT_DONE
        missing = ", ".join(control.missing[:8])
        if missing:
            message = f"stopped by {stop}, but nothing was heard of {missing}: killed, or hanging"
            self._write_down(DualevalError(message))
            self._say(f"dualeval: error: {message}")
            return EXIT_FAILED
        self._write_down(stop)
        where = "Type" if folder is None else f"What is finished is saved in {folder.path}: type"
        self._say(f"dualeval: stopped by {stop}. {where} the same command again to go on.")
        return EXIT_STOPPED

    def _conclude_failure(self, error: BaseException) -> int:
        """Tell every rank of a failure, say it, and leave together with one exit code."""
        assert self._watch is not None
        control = self.control
        self._save()
        first = error if isinstance(error, PeerError) else control.fail(error)
        self._watch.main_concludes(first.exit_code)
        rank = control.name.rank
        # Where rank 0 is what failed, any other has to write it.
        if rank == 0 or (isinstance(error, PeerError) and first.rank == 0):
            self._write_down(error)
        if not isinstance(error, DualevalError) and self.is_owner:
            traceback.print_exception(error)
        # What rank 0 met as well is no matter of one rank.
        everybodys = first.rank == 0 or str(first) == str(error)
        line = f"dualeval: error: {first}" if everybodys else spoken(first, 0)
        if first.exit_code == EXIT_USAGE:
            control.leave_after_message(lambda: self._say(line))
        elif first.rank == 0 and first.where is None and rank != 0:
            self._say(spoken(first, rank))
            # It may be gone at any moment, and says nothing any more.
            control.leave()
        elif rank != 0:
            self._say(spoken(first, rank))
            control.leave_after_message(lambda: None)
        else:
            control.leave_after_message(lambda: self._say(spoken(first, 0)))
        return first.exit_code

    def _say(self, line: str) -> None:
        """Say how the run ended; a guest raises it instead."""
        if self.is_owner:
            say(line)

    def _write_down(self, error: BaseException) -> None:
        """Write the end into status.json."""
        assert self._watch is not None
        folder = self._watch.folder
        if folder is not None and folder.shared:
            folder.note_end(error, self.control.saved_by_all if isinstance(error, Stopped) else None)

    def _save(self) -> str | None:
        """Save what is finished; returns what stands in the way."""
        assert self._watch is not None
        recorder = self._watch.recorder
        try:
            if recorder is None or recorder.flush(_FLUSH_WITHIN_S):
                return None
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        return "writing hangs"

    # -- closing -----------------------------------------------------------------------------------

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        left_in_order = error is None or (isinstance(error, SystemExit) and not error.code)
        if not self.is_concluded and not left_in_order:
            assert error is not None
            self.conclude(error)
            self._said = error
        self._close(failed=self.is_concluded)

    def _close(self, *, failed: bool) -> None:
        """Leave the ranks; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._control is not None and not failed:
            self._control.progress.step("end")
            self._control.leave()
        if self._backend is not None:
            self._backend.close(failed=failed)
        if self._watch is not None:
            self._watch.stop()
        if self._signals is not None:
            self._signals.close()
        if self._previous_hook is not None and not failed:
            sys.excepthook = self._previous_hook

    def _end_quietly(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> Any:
        """``sys.excepthook`` of a script that a session owns: what was said already is not said again."""
        if error is not self._said:
            self._previous_hook(kind, error, traceback)
            return
        sys.exit(self.exit_code)


def evaluate(task: Task, **options: Any) -> Result:
    """Evaluate a task once, in a session of its own; every rank calls this and gets the same metrics.

    Args:
        task: what is evaluated.
        options: of ``Session``, as ``backend`` and ``device``, and of ``RunOptions``, as ``out`` and
            ``batch_size``. Without ``out`` nothing is written.

    Raises:
        UsageError: an option, or task, data and weights are not as they have to be.
        PeerError: another rank failed first.
        Stopped: a signal has ended the run; what was finished is saved.
    """
    names = set(inspect.signature(Session).parameters)
    of_session = {name: value for name, value in options.items() if name in names}
    # What ranks may differ in concerns their devices and the folder alike.
    of_run = {name: value for name, value in options.items() if name not in names - {"mix_machines"}}
    with Session(**of_session) as session:
        return session.evaluate(task, last=True, **of_run)


def _run_options(options: Mapping[str, Any]) -> RunOptions:
    known = [field.name for field in fields(RunOptions)]
    unknown = [name for name in options if name not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f" Did you mean {near[0]}?" if near else f" There are {', '.join(known)}."
        raise UsageError(f"{unknown[0]!r} is no option of an evaluation.{hint}")
    return RunOptions(**options)


def check_timeout(option: str, seconds: float) -> None:
    """Raise UsageError where a timeout is none that ranks can be watched by."""
    if not _LEAST_TIMEOUT_S <= seconds <= _LONGEST_TIMEOUT_S:
        raise UsageError(
            f"{option} {seconds:g}: expected seconds, {_LEAST_TIMEOUT_S:g} to {_LONGEST_TIMEOUT_S:,.0f} (a "
            "rank reports twice a second how far it is)"
        )
