"""Session: everything that a run holds, opened in one place, and ended in one place.

A run ends early only by ``conclude``, whether the main thread raises an error, or the watch finds that the
main thread does not come back.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, TypeVar

from dualeval.engine.control.progress import Stage
from dualeval.engine.joining import Joined
from dualeval.engine.values.keywords import RunKeywords
from dualeval.engine.values.options import RunOptions, SessionOptions, run_options_of
from dualeval.errors import EXIT_DONE, BackendError, DualevalError, PeerError, Stopped, UsageError, text_of
from dualeval.options.fields import with_keywords
from dualeval.process.speech import say
from dualeval.process.start import DEFAULT_SIGNALS
from dualeval.process.status_line import LINE
from dualeval.process.uncaught import conclude_quietly

if TYPE_CHECKING:
    import torch
    from torch import nn
    from typing_extensions import Unpack

    from dualeval.backends.base import Backend
    from dualeval.engine.control.plane import ControlPlane
    from dualeval.engine.end.conclusion import Conclusion
    from dualeval.engine.end.watch import Watch
    from dualeval.engine.job.run_state import Run
    from dualeval.engine.own_loop import OwnLoop
    from dualeval.metrics import Metric, RowMetric
    from dualeval.result import Result
    from dualeval.tasks import Task
    from dualeval.world import World

_T = TypeVar("_T")

_LOOK_EVERY_S = 0.25


class Session:
    """One or several evaluations by the same ranks; a context manager.

    If no group of ranks was open before, the session is the **owner** and keeps all promises of the command
    line: signals and other ranks' failures end the process in time, with its exit code, whatever the main
    thread is doing.

    Inside a script that has opened a process group of torch.distributed, or called ``hvd.init()``, it is a
    **guest**: it takes no signals and never ends the process. ``evaluate`` raises failures and stops, and a
    rank that stands still is named on standard error and raised as soon as Python runs. Afterwards the model,
    random numbers and torch's settings are as they were.

    Args:
        backend: how the ranks communicate: "single", "torch", "horovod" or "mpi"; None takes the caller's
            open group, or else the launcher's own.
        device: "cpu", "cuda" or "cuda:N"; None takes a GPU if there is one.
        launcher: the launcher that started the ranks; None detects it.
        allow_shared_gpu: let several ranks of a node share a GPU.
        mix_machines: let devices or versions differ between ranks.
        heartbeat_timeout: seconds without progress after which a rank is given up.
        forward_timeout: seconds after which a rank is given up while it computes a batch.
        stop_signals: names of the signals that stop a run and save what is finished; only for an owner.
        on_stall: what happens if the main thread does not end by itself: "exit" ends the process, "raise"
            raises as soon as Python runs. None is "exit" for an owner and "raise" for a guest.
        debug: an owner prints an error's whole traceback, on every rank that has one; without it, only the
            lines of the caller's own code. DUALEVAL_DEBUG=1 in the environment does the same.
        stop: called several times a second from another thread; if it returns true, or a text with the
            reason, all ranks stop and save what is finished.
        note: called with sentences for the user, on rank 0 only; None writes them to standard error.

    Attributes:
        exit_code: 0, or the exit code of the error that ended the run.
        is_concluded: whether the run has ended early: no evaluation can follow.
        is_owner: whether it is the owner.
        cores: number of this rank's cores.

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
        # By locals(), so that the defaults are written only above.
        given = {name: value for name, value in locals().items() if name != "self"}
        self._options = SessionOptions(**given)
        self.exit_code = EXIT_DONE
        self.is_concluded = False
        # Of a command, whose errors nobody catches.
        self.is_command = False
        # From `open` on.
        self._joined: Joined | None = None
        self._is_closed = False
        self._is_attempt = False
        self._loop: OwnLoop | None = None

    @property
    def backend(self) -> Backend:
        """How the ranks reduce and gather; raises UsageError if the session is not open."""
        if self._joined is None or self._joined.backend is None:
            raise UsageError(
                "this session is not open: write 'with dualeval.Session() as session:' around its use"
            )
        return self._joined.backend

    @property
    def control(self) -> ControlPlane:
        """Where the ranks meet; raises UsageError likewise."""
        _ = self.backend
        assert self._joined is not None and self._joined.control is not None
        return self._joined.control

    @property
    def world(self) -> World:
        """This process's place among the ranks; raises UsageError likewise."""
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
            UsageError, LaunchError: the launcher, the backend or the device does not fit.
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
            show: progress display, called on rank 0 from its own thread with the samples done on all ranks,
                and the total.
            started: ``perf_counter()`` at the start of the run, if that was before this call.
            puts_back: put back the model, random numbers and torch's settings afterwards; not needed if the
                process ends then.
            loggers: where rank 0 logs the result when it is written, each as ``KIND:WHERE``, such as
                "tensorboard:runs/tb" (docs/loggers.md). A tracker's failure is only noted.
            step: the step of a training that the loggers record, such as the epoch.
            report: rank 0 also writes report.html into the output folder, once the result is there
                (docs/report.md). A failure to write it is only noted.
            last: no evaluation follows: a signal after the result is written has no effect. The caller logs
                the result once the session is closed.
            options: of ``RunOptions``, as ``out``, ``batch_size`` and ``precision``.

        Raises:
            UsageError: task, data, weights and options do not fit together.
            ExactlyOnceError: a sample was counted never, or more than once.
            PeerError: another rank failed first.
            Stopped: a signal, or ``stop``, has ended the run; what was finished is saved.
        """
        from dualeval.engine.run import evaluate
        from dualeval.report.loggers.loggers import check_installed, targets_of

        if report:
            from dualeval.report.page.page import check_report, write_at_end

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
        """Evaluate one of several shares of a task, without the others. A collective of the share's ranks.

        ``evaluate`` with the same ``out`` makes the result of all shares.

        Args:
            share: I/N, such as "3/100": chunks of the samples that only this share evaluates.
            command: the command that asks for the share, for ``dualeval finish``.
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
        from dualeval.engine.job.reference import Reference
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
        from dualeval.engine.job.run_state import Run

        # A script that takes notes itself reads no standard error.
        LINE.speak(speaks=self.world.is_main and (self._options.note is None or LINE.is_of_command))
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
        """Do one of several pieces of work, such as evaluating one of several models. A collective.

        An error in it, on one rank or on all, ends this attempt on every rank, but not the session, if all
        ranks are there and none is inside a collective. Otherwise the run ends, as it does when a signal
        stops it.

        Args:
            work: evaluates at most once, with ``last=True``.
            progress: how many are done, as a sentence; shown if the run is stopped.
            last: no evaluation follows: a signal after the result is written has no effect.

            Returns:
                The result of ``work``, and None; or None and the failure, the same on every rank.

        Raises:
            PeerError: another rank failed, and the run ends.
            Stopped: a signal, or ``stop``, has ended the run.
        """
        self._check_usable()
        self._conclusion.progress = progress
        self._watch.more_follows = not last
        self._watch.begin()
        self.control.progress.step(Stage.SETUP)
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
        # The error's frames hold the model and its data.
        problem = None
        self._free_memory()
        if not last:
            self._idle()
        return (done, None) if failure is None else (None, failure)

    def _ends_attempt_only(self, error: BaseException) -> bool:
        """Whether an error ends only an attempt, not the run: no rank has failed, and the backend works."""
        return (
            not self.is_concluded
            and isinstance(error, Exception)
            and not isinstance(error, Stopped | BackendError)
            and self.control.failure is None
            and self.control.stopping is None
            and not self.control.is_missed
        )

    def _free_memory(self) -> None:
        """Free the memory of a finished attempt."""
        from dualeval.engine.device.accelerator import accelerator_of

        gc.collect()
        device = self.backend.device
        try:
            accelerator_of(device).release()
        except RuntimeError as error:
            raise DualevalError(f"{device} cannot be used any more: {text_of(error)}") from error

    @contextmanager
    def _concluding(self, *, of_task: bool = True) -> Iterator[None]:
        """Conclude the run if the block raises."""
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
        """Have rank 0 call ``look`` repeatedly until there is something to do. A collective.

        Args:
            look: called on rank 0; returns plain values, or None if there is nothing yet.
            progress: how many are done, as a sentence; shown if the session is stopped meanwhile.

            Returns:
                Rank 0's value, on every rank.

        Raises:
            PeerError: another rank failed.
            Stopped: a signal, or ``stop``, has ended the session.
        """
        self._check_usable()
        self._conclusion.progress = progress
        self._idle()
        if self.world.is_main:
            # It meets the others as soon as there is something: nobody is late.
            self.control.progress.step(Stage.MEET)
        found: _T | None = None
        while self.world.is_main and (found := look()) is None:
            self.control.check()
            sleep(_LOOK_EVERY_S)
        self.control.meet()
        shared: _T = self.backend.broadcast_json(found, src=0)
        return shared

    def _idle(self) -> None:
        """Set this rank to idle: the caller may now do anything, for as long as it likes."""
        self._watch.end()
        self._watch.goes_on()
        self.control.progress.step(Stage.IDLE)

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
        """Evaluate in the caller's own loop: yields this rank's batches, on the CPU.

        Each sample is in one batch of one rank. Pass the columns of each batch to ``add``, and call
        ``result`` after the loop.

        Args:
            dataset: a tensor, a list, or a map-style data set.
            collate: makes a batch of a list of samples; torch's ``default_collate`` without it.
            metrics: the metrics; without them, the mean of every column, under its name.
            model: part of the job's identity, so that a loop with other weights is not resumed in ``out``.
            job, show: as for ``evaluate``.
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
        self._watch.has_begun = True
        return self._handed_out(self._loop.batches())

    def _handed_out(self, batches: Iterator[Any]) -> Iterator[Any]:
        with self._concluding():
            yield from batches

    def add(self, batch: Any, **columns: Any) -> None:
        """Add the columns of the current batch.

        Args:
            batch: the loop's last batch, or a part of it.
            columns: by name, one row a sample: tensors on any device, arrays or lists. For rows that differ
                in length a ``dualeval.Ragged`` or a list of tensors, for text a list of str. They are copied.

        Raises:
            UsageError: it is not that batch, it was added before, or a column does not fit.
        """
        self._current_loop().add(batch, **columns)

    def result(self) -> Result:
        """The result of the finished loop. A collective.

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
        """Pass on a sentence for the user, once a session or script; called on rank 0."""
        noted = set() if self._joined is None else self._joined.noted
        if sentence in noted:
            return
        noted.add(sentence)
        if self._options.note is not None:
            self._options.note(sentence)
        else:
            say(f"dualeval: note: {sentence}")

    def say_warnings(self, result: Result) -> None:
        """Note the warnings about a result, for a caller who prints only its numbers."""
        from dualeval.engine.values.measured import rough_warnings

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
            raise UsageError("a loop of this session has no result yet: call session.result() first")
        _ = self.control

    def _cause(self, error: BaseException, *, of_task: bool) -> BaseException:
        """The error with which the run ends: the one that was raised, or its cause."""
        from dualeval.engine.end.watch import Interrupted

        if isinstance(error, Interrupted):
            failure = self.control.failure
            return failure if failure is not None else Stopped(self.control.stopping or "stop()")
        if of_task and self.is_owner and isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit):
            # The session handles signals, so the task's own code has raised this.
            said = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else type(error).__name__
            return DualevalError(f"the task's code raised {said} during the run")
        return error

    def conclude(self, error: BaseException) -> int:
        """End the run early, from the main thread, which has the error; returns the exit code.

        Finished work is saved, all ranks learn of the error, rank 0 writes it into status.json, and it is
        shown once. A second call returns the same code.
        """
        if not self.is_concluded:
            self._conclusion.is_command = self.is_command
            self.exit_code = self._conclusion.conclude(error)
            self.is_concluded = True
            if self.is_owner:
                conclude_quietly(error, self.exit_code)
        return self.exit_code

    # -- closing -----------------------------------------------------------------------------------

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        left = None if isinstance(error, SystemExit) and not error.code else error
        if left is None and self._loop is not None:
            left = UsageError("the session was left before session.result() was called")
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
