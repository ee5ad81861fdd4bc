"""Session: everything that a run holds, opened in one place, and ended in one place.

``conclude`` is the one way in which a run ends early, whoever notices: the main thread that raises an error,
or the watch where the main thread does not come back.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, TypeVar

from dualeval.engine.end.process import conclude_quietly, say
from dualeval.engine.joining import Joined
from dualeval.engine.keywords import RunKeywords
from dualeval.engine.options import RunOptions, SessionOptions, run_options_of
from dualeval.errors import EXIT_DONE, BackendError, DualevalError, PeerError, Stopped, UsageError, text_of
from dualeval.options.fields import with_keywords
from dualeval.process_start import DEFAULT_SIGNALS

if TYPE_CHECKING:
    import torch
    from torch import nn
    from typing_extensions import Unpack

    from dualeval.backends.base import Backend
    from dualeval.engine.control.plane import ControlPlane
    from dualeval.engine.end.conclusion import Conclusion
    from dualeval.engine.end.watch import Watch
    from dualeval.engine.own_loop import OwnLoop
    from dualeval.engine.run_state import Run
    from dualeval.metrics import Metric, RowMetric
    from dualeval.result import Result
    from dualeval.tasks import Task
    from dualeval.world import World

_T = TypeVar("_T")

_LOOK_EVERY_S = 0.25


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
        forward_timeout: seconds after which a rank is given up that computes, with a batch in hand.
        stop_signals: names of the signals that stop a run and save what is finished; an owner's alone.
        on_stall: what follows where the main thread does not end by itself: "exit" ends the process, "raise"
            raises where Python runs. None is "exit" for an owner and "raise" for a guest.
        debug: an owner prints the whole traceback of an error, on every rank that meets one; without it the
            lines of the caller's own code. So does DUALEVAL_DEBUG=1 in the environment.
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
        forward_timeout: float = 1800.0,
        stop_signals: Sequence[str] = DEFAULT_SIGNALS,
        on_stall: str | None = None,
        debug: bool = False,
        stop: Callable[[], bool | str] | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        # All that was given, as its defaults stand above alone.
        given = {name: value for name, value in locals().items() if name != "self"}
        self._options = SessionOptions(**given)
        self.exit_code = EXIT_DONE
        self.is_concluded = False
        # From `open` on.
        self._joined: Joined | None = None
        self._is_closed = False
        self._is_attempt = False
        self._loop: OwnLoop | None = None

    @property
    def backend(self) -> Backend:
        """How the ranks reduce and gather; raises UsageError where the session is not open."""
        if self._joined is None or self._joined.backend is None:
            raise UsageError(
                "this session is not open: write 'with dualeval.Session() as session:' around its use"
            )
        return self._joined.backend

    @property
    def control(self) -> ControlPlane:
        """Where the ranks meet; likewise."""
        _ = self.backend
        assert self._joined is not None and self._joined.control is not None
        return self._joined.control

    @property
    def world(self) -> World:
        """This process's place among the ranks; likewise."""
        return self.backend.world

    @property
    def is_owner(self) -> bool:
        return self._joined is None or self._joined.is_owner

    @property
    def cores(self) -> int:
        return 1 if self._joined is None else self._joined.cores

    @property
    def _conclusion(self) -> Conclusion:
        _ = self.control
        assert self._joined is not None and self._joined.conclusion is not None
        return self._joined.conclusion

    @property
    def _watch(self) -> Watch:
        return self._conclusion.watch

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
        if self._joined is not None:
            raise UsageError("this session was opened before: make another one, dualeval.Session(...)")
        self._joined = Joined(self._options)
        try:
            self._joined.join()
        except BaseException as error:
            if self._joined.conclusion is not None:
                self.conclude(error)
            elif self.is_owner and isinstance(error, DualevalError):
                self._joined.say_failure(error)
                self.exit_code, self.is_concluded = error.exit_code, True
            self._close(failed=True)
            raise

    # -- evaluating --------------------------------------------------------------------------------

    @with_keywords(RunKeywords, RunOptions)
    def evaluate(
        self,
        task: Task,
        *,
        job: Mapping[str, Any] | None = None,
        show: Callable[[int, int], None] | None = None,
        started: float | None = None,
        loggers: Sequence[str] = (),
        step: int | None = None,
        report: bool = False,
        last: bool = False,
        puts_back: bool = True,
        **options: Unpack[RunKeywords],
    ) -> Result:
        """Evaluate a task; every rank calls this and gets the same metrics.

        Args:
            task: what is evaluated.
            job: the options as the caller wants them recorded in the result.
            show: progress display, called on rank 0 from a thread of its own with the samples done over all
                ranks, and the samples in all.
            started: ``perf_counter()`` at the start of the run, where that was before this call.
            puts_back: leave the model, random numbers and torch's settings as they were. Without it they may
                change: the process ends.
            loggers: where rank 0 logs the result when it is written, each as ``KIND:WHERE``, such as
                "tensorboard:runs/tb" (docs/loggers.md). A tracker that fails is a note.
            step: which step of a training the loggers record, such as the epoch.
            report: rank 0 also writes report.html into the output folder, once the result is there
                (docs/report.md). A page that cannot be made is a note.
            last: nothing follows it: a signal that comes when the result is written comes too late. The
                caller logs it once the session is closed.
            options: of ``RunOptions``, as ``out``, ``batch_size`` and ``precision``.

        Raises:
            UsageError: task, data, weights and options do not fit together.
            ExactlyOnceError: a sample was counted never, or more than once.
            PeerError: another rank failed first.
            Stopped: a signal, or ``stop``, has ended the run; what was finished is saved.
        """
        from dualeval.engine.run import evaluate
        from dualeval.report.loggers import check_installed, targets_of

        if report:
            from dualeval.report.page import check_report, write_at_end

        self._check_usable()
        run_options = run_options_of(**options)
        targets = targets_of(loggers, step)
        self._watch.begin()
        with self._concluding():
            if self.world.is_main:
                check_installed(targets)
            if report:
                check_report(run_options.out, is_main=self.world.is_main)
            run = self._run(run_options, job, show, guest=puts_back, cores=self.cores)
            run.started = perf_counter() if started is None else started
            result = evaluate(task, run)
        if last:
            self._watch.end()
        else:
            self._idle()
        if report and self.world.is_main:
            write_at_end(result, task, self.note)
        if last:
            return result
        self.say_warnings(result)
        if targets and self.world.is_main:
            from dualeval.report.loggers.log import log_result

            log_result(result, targets, step, self.note)
        return result

    def evaluate_share(
        self,
        task: Task,
        share: str,
        *,
        job: Mapping[str, Any] | None = None,
        command: Mapping[str, Any] | None = None,
        show: Callable[[int, int], None] | None = None,
        started: float | None = None,
        puts_back: bool = True,
        **options: Unpack[RunKeywords],
    ) -> None:
        """Evaluate one of several shares of a task, with no other share needed; a collective of its ranks.

        ``evaluate`` with the same ``out`` makes the result of all of them.

        Args:
            share: I/N, such as "3/100": chunks of the samples that only this share evaluates.
            command: the command that asks for it, for ``dualeval finish``.
            job, show, started, puts_back, options: as for ``evaluate``; ``out`` is the folder of all shares.

        Raises:
            UsageError: there is no ``out``, or it holds another job, or another number of shares.
            PeerError, Stopped: as for ``evaluate``; what was finished is saved.
        """
        from dualeval.engine.folder.layout import Share
        from dualeval.engine.run import evaluate_share

        self._check_usable()
        run_options = run_options_of(**options)
        if run_options.path is None:
            raise UsageError(f"share {share}: give out, a folder that all shares see")
        more = {"share": Share.of_text(share), "command": command, "guest": puts_back, "cores": self.cores}
        self._watch.begin()
        with self._concluding():
            run = self._run(run_options, job, show, **more)
            run.started = perf_counter() if started is None else started
            evaluate_share(task, run)
        self._idle()

    def try_out(
        self, task: Task, *, job: Mapping[str, Any] | None = None, **options: Unpack[RunKeywords]
    ) -> dict[str, Any]:
        """Do all that ``evaluate`` does before its loop, and write nothing; a collective.

        Returns:
            The options as the result would have them.
        """
        from dualeval.engine.reference import Reference
        from dualeval.engine.run import try_out

        self._check_usable()
        run_options = run_options_of(**options)
        self._watch.begin()
        with self._concluding():
            run = self._run(run_options, job, None, cores=self.cores)
            if run_options.reference is not None:
                Reference.open(run_options.reference)
            try_out(task, run)
        self._idle()
        return {**run.job, **task.options()}

    def _run(
        self,
        options: RunOptions,
        job: Mapping[str, Any] | None,
        show: Callable[[int, int], None] | None,
        **more: Any,
    ) -> Run:
        from dualeval.engine.run_state import Run

        return Run(
            backend=self.backend,
            control=self.control,
            options=options,
            watch=self._watch,
            device=self.backend.device,
            note=self.note,
            job=dict(job or {}),
            show=show,
            **more,
        )

    def attempt(
        self, work: Callable[[], _T], *, progress: str = "", last: bool = False
    ) -> tuple[_T | None, PeerError | None]:
        """Do one of several things, such as evaluating one of several models; a collective.

        An error of it, on one rank or on all, ends this attempt on every rank and not the session, as long as
        all ranks are there and none is in the midst of a collective: else the run ends, as it does where a
        signal stops it.

        Args:
            work: evaluates at most once, with ``last=True``.
            progress: how many are done, as a sentence; said where the run is stopped.
            last: nothing follows it: a signal that comes when the result is written comes too late.

        Returns:
            What came of it, and None; or None and the failure, the same on every rank.

        Raises:
            PeerError: another rank failed, and the run ends.
            Stopped: a signal, or ``stop``, has ended the run.
        """
        self._check_usable()
        self._conclusion.progress = progress
        self._watch.more_follows = not last
        self._watch.begin()
        self.control.progress.step("setup")
        self.control.check()
        done, problem = None, None
        self._is_attempt = True
        try:
            done = work()
        except BaseException as error:
            problem = self._cause(error, of_task=True)
            if not self._ends_attempt_only(problem):
                raise
        finally:
            self._is_attempt = False
        self._watch.end()
        failure = self._conclusion.of_attempt(problem if isinstance(problem, Exception) else None)
        # Its frames hold the model, and what was read.
        problem = None
        self._free_memory()
        if not last:
            self._idle()
        return (done, None) if failure is None else (None, failure)

    def _ends_attempt_only(self, error: BaseException) -> bool:
        """Whether an error ends an attempt, and not the run: no rank has failed, and the backend is whole."""
        return (
            not self.is_concluded
            and isinstance(error, Exception)
            and not isinstance(error, Stopped | BackendError)
            and self.control.failure is None
            and self.control.stopping is None
            and not self.control.is_missed
        )

    def _free_memory(self) -> None:
        """Give back the memory of an attempt that is over."""
        from dualeval.engine.accelerator import accelerator_of

        gc.collect()
        device = self.backend.device
        try:
            accelerator_of(device).release()
        except RuntimeError as error:
            raise DualevalError(f"{device} cannot be used any more: {text_of(error)}") from error

    @contextmanager
    def _concluding(self, *, of_task: bool = True) -> Iterator[None]:
        """Conclude the run where the block raises."""
        from dualeval.engine.end.watch import Interrupted

        try:
            yield
        except BaseException as error:
            if isinstance(error, GeneratorExit) and self._loop is not None and of_task:
                raise  # the caller has left its loop; whether that is an error shows later
            self._watch.end(was_raised=isinstance(error, Interrupted))
            cause = self._cause(error, of_task=of_task)
            if self._is_attempt and self._ends_attempt_only(cause):
                raise
            self.conclude(cause)
            if cause is error:
                raise
            raise cause from error

    def idle_until(self, look: Callable[[], _T | None], *, progress: str = "") -> _T:
        """Have rank 0 look, now and then, until there is something to do; a collective.

        Args:
            look: called on rank 0; returns plain values, None where there is nothing yet.
            progress: how many are done, as a sentence; said where the session is stopped meanwhile.

        Returns:
            What rank 0 has found, on every rank.

        Raises:
            PeerError: another rank failed.
            Stopped: a signal, or ``stop``, has ended the session.
        """
        self._check_usable()
        self._conclusion.progress = progress
        self._idle()
        found: _T | None = None
        while self.world.is_main and (found := look()) is None:
            self.control.check()
            sleep(_LOOK_EVERY_S)
        self.control.meet()
        shared: _T = self.backend.broadcast_json(found, src=0)
        return shared

    def _idle(self) -> None:
        """The caller may do anything now, for as long as it likes."""
        self._watch.end()
        self._watch.goes_on()
        self.control.progress.step("idle")

    def batches(
        self,
        dataset: Any,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        metrics: Sequence[Metric | RowMetric] | None = None,
        model: nn.Module | None = None,
        job: Mapping[str, Any] | None = None,
        show: Callable[[int, int], None] | None = None,
        **options: Unpack[RunKeywords],
    ) -> Iterator[Any]:
        """Evaluate in a loop of the caller's own: gives this rank's batches, on the CPU.

        Each sample is in one batch of one rank. Give the columns of each batch to ``add``, and ask for the
        ``result`` when the loop is through.

        Args:
            dataset: a tensor, a list, or a map-style data set.
            collate: makes a batch of a list of samples; torch's ``default_collate`` without it.
            metrics: what is measured; without them the mean of every column, under its name.
            model: joins the job's identity, so that a loop with other weights does not go on in ``out``.
            job: as for ``evaluate``, and ``show``.
            options: of ``RunOptions``, as ``out`` and ``batch_size``.

        Raises:
            UsageError: a batch was not added, or samples, columns, options and folder do not fit together.
            PeerError: another rank failed first.
            Stopped: a signal, or ``stop``, has ended the run; what was added is saved.
        """
        from dualeval.engine.own_loop import OwnLoop

        self._check_usable()
        run = self._run(run_options_of(**options), job, show, guest=True)
        self._loop = OwnLoop(dataset, run, collate=collate, metrics=metrics, model=model)
        self._watch.begin()
        return self._handed_out(self._loop.batches())

    def _handed_out(self, batches: Iterator[Any]) -> Iterator[Any]:
        with self._concluding():
            yield from batches

    def add(self, batch: Any, **columns: Any) -> None:
        """Give the columns of the batch in hand.

        Args:
            batch: what the loop has given last, or a part of it.
            columns: by name, one row a sample: tensors on any device, arrays or lists. For rows that differ
                in length a ``dualeval.Ragged`` or a list of tensors, for text a list of str. They are copied.

        Raises:
            UsageError: it is not that batch, it was added before, or a column is not as it must be.
        """
        self._current_loop().add(batch, **columns)

    def result(self) -> Result:
        """The result of the loop, when it is through; a collective.

        Raises:
            UsageError: this rank has left its loop before the end.
            ExactlyOnceError: a sample was counted never, or more than once.
            PeerError: another rank failed first.
        """
        loop = self._current_loop()
        with self._concluding():
            result = loop.result()
        self._loop = None
        self._idle()
        self.say_warnings(result)
        return result

    def _current_loop(self) -> OwnLoop:
        if self._loop is None:
            raise UsageError(
                "there is no loop without a result: write 'for batch in session.batches(dataset):' before, "
                "and keep what session.result() has returned"
            )
        return self._loop

    def note(self, sentence: str) -> None:
        """Pass a sentence for people on, once a session, or a script; called on rank 0."""
        noted = set() if self._joined is None else self._joined.noted
        if sentence in noted:
            return
        noted.add(sentence)
        if self._options.note is not None:
            self._options.note(sentence)
        else:
            say(f"dualeval: note: {sentence}")

    def say_warnings(self, result: Result) -> None:
        """Note what a reader of the numbers should know, for a caller who prints them alone."""
        from dualeval.engine.measured import rough_warnings

        of_intervals = rough_warnings(result.rough)
        for sentence in result.warnings if self.world.is_main else ():
            if sentence not in of_intervals:
                self.note(sentence)

    def _check_usable(self) -> None:
        if self.is_concluded:
            raise UsageError(
                f"this session has ended with exit code {self.exit_code}: open another one to evaluate again"
            )
        if self._loop is not None:
            raise UsageError("a loop of this session has no result yet: ask for session.result() first")
        _ = self.control

    def _cause(self, error: BaseException, *, of_task: bool) -> BaseException:
        """What the run ends with where an error is raised: the error itself, or what stands behind it."""
        from dualeval.engine.end.watch import Interrupted

        if isinstance(error, Interrupted):
            failure = self.control.failure
            return failure if failure is not None else Stopped(self.control.stopping or "stop()")
        if of_task and self.is_owner and isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit):
            # Signals are the session's: what is raised here is the task's own.
            said = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else type(error).__name__
            return DualevalError(f"the task's code raised {said} in the midst of the run")
        return error

    def conclude(self, error: BaseException) -> int:
        """End the run early, from the main thread, in whose hands the error is; returns the exit code.

        What is finished is saved, all ranks learn of the end, rank 0 writes it into status.json, and it is
        said once. A second call gives the same code.
        """
        if not self.is_concluded:
            self.exit_code = self._conclusion.conclude(error)
            self.is_concluded = True
            if self.is_owner:
                conclude_quietly(error, self.exit_code)
        return self.exit_code

    # -- closing -----------------------------------------------------------------------------------

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        left = None if isinstance(error, SystemExit) and not error.code else error
        if left is None and self._loop is not None:
            left = UsageError("the session was left before session.result() was asked for")
        try:
            if left is not None and not self.is_concluded:
                if self._loop is not None:
                    self._loop.close()
                with self._concluding(of_task=False):
                    raise left
        except BaseException as concluded:
            if concluded is not error:
                raise
        finally:
            self._close(failed=self.is_concluded)

    def _close(self, *, failed: bool) -> None:
        """Leave the ranks; a second call does nothing."""
        if not self._is_closed and self._joined is not None:
            self._is_closed = True
            self._joined.leave(failed=failed, is_concluded=self.is_concluded)
