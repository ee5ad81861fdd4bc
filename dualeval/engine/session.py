"""Session: one or several evaluations by the same ranks, by tasks or in a caller's own loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from dualeval.engine.open_session import OpenSession
from dualeval.engine.values.keywords import RunKeywords
from dualeval.engine.values.options import RunOptions, SessionOptions, run_options_of
from dualeval.errors import UsageError
from dualeval.options.fields import with_keywords
from dualeval.process.start import DEFAULT_SIGNALS
from dualeval.process.status_line import LINE

if TYPE_CHECKING:
    import torch
    from torch import nn
    from typing_extensions import Unpack

    from dualeval.engine.job.run_state import Run
    from dualeval.engine.own_loop import OwnLoop
    from dualeval.metrics import Metric, RowMetric
    from dualeval.result import Result
    from dualeval.tasks import Task


class Session(OpenSession):
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
        options = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(SessionOptions(**options))

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

        if report:
            from dualeval.report.page.page import check_report, write_at_end

        self._check_usable()
        run_options = run_options_of(**options)
        targets: Sequence[Any] = ()
        if loggers != () or step is not None:
            from dualeval.report.loggers.loggers import check_installed, targets_of

            targets = targets_of(loggers, step)
        self._watch.begin()
        with self._concluding():
            if targets and self.world.is_main:
                check_installed(targets)
            if report:
                check_report(run_options.out, is_main=self.world.is_main)
            run = self._run(run_options, job, show, guest=puts_back)
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
        more = {"share": Share.of_text(share), "command": command, "guest": puts_back}
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
            run = self._run(run_options, job, None)
            if run_options.reference is not None:
                Reference.open(run_options.reference)  # refused before anything is built
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
            cores=self.cores,
            readers_cores=() if self._joined is None else self._joined.near_gpu,
            **more,
        )

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
