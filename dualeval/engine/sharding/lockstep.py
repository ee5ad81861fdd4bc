"""Lockstep: every rank computes one batch a round, for models whose forward holds collectives.

The forward of one rank then waits for those of all others, but ranks have different numbers of batches. So
there are as many rounds as the rank with the most batches needs, and a rank without a batch in a round
computes samples whose outputs are dropped. Before each round, all ranks agree on the host, in one small
message, whether to continue: a stop ends all after the same round, and a rank that fails leaves none waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import monotonic, perf_counter, sleep
from typing import Any, NoReturn

import torch
from torch import nn

from dualeval.engine.checks.repeatability import Lasting, as_before, differences, is_short
from dualeval.engine.checks.replay import EvaluatesBatch, StoredBatch
from dualeval.engine.control.plane import ControlPlane
from dualeval.engine.control.progress import Stage
from dualeval.engine.device.divided import check_sharded
from dualeval.engine.device.numerics import NumericSettings
from dualeval.engine.device.transfer import Pending
from dualeval.engine.folder.recorder import HandedBatch
from dualeval.engine.identity.model import ModelIdentity
from dualeval.engine.job.evaluation import Evaluation
from dualeval.engine.loop.forward import UnderWay, compute_of, evaluate_alone, of_first
from dualeval.engine.loop.loop import Loop
from dualeval.engine.loop.strategy import Strategy
from dualeval.engine.model.compute import Compute
from dualeval.engine.sharding.gathers import Gathers
from dualeval.engine.values.plan import EvalPlan
from dualeval.errors import BackendError, PeerError, Stopped, UsageError
from dualeval.options.choices import DYNAMIC, LOCKSTEP
from dualeval.result import TimedStage
from dualeval.tasks import Dataset

# A collective mostly fails because another rank has ended, and this news arrives a moment later.
_CAUSE_WITHIN_S = 3.0
_LOOK_EVERY_S = 0.02
_RANDOM = "forward or observe draws random numbers, or keeps something from one batch to the next"


class Lockstep(Strategy):
    """Of a run whose forward takes all ranks."""

    def prepare(
        self, dataset: Dataset, model: nn.Module, stack: ExitStack
    ) -> tuple[nn.Module, ModelIdentity]:
        self.settle_schedule(model)
        return super().prepare(dataset, model, stack)

    def settle_schedule(self, model: nn.Module) -> None:
        """Check the schedule that was asked for, and note the one in which the model is evaluated."""
        run = self._run
        check_sharded(model, run.backend.world)
        if run.options.schedule == DYNAMIC:
            raise UsageError(
                f"--schedule {DYNAMIC}: the model is sharded, so each forward of one rank waits for all "
                "other ranks: none can take more batches than another. Leave --schedule out."
            )
        shards = {} if run.options.shard is None else {"shard": run.options.shard}
        run.decide({"schedule": LOCKSTEP, **shards}, schedule=LOCKSTEP)

    @contextmanager
    def computing(self, model: nn.Module) -> Iterator[None]:
        run = self._run
        owned = run.options.shard is not None
        with Gathers(model, run.control, run.backend, owned=owned) as self._gathers:
            run.around_forward = self._gathers.forward
            try:
                yield
            finally:
                run.around_forward = None
                del self._gathers  # it holds the model

    def evaluate_again(self, evaluation: Evaluation, stored: Sequence[StoredBatch]) -> EvaluatesBatch:
        """Compute rank 0's stored batches on all ranks. A collective.

        The returned function holds no collective, and gives the columns of another forward at each call.
        """
        spans = [[batch.samples.start, batch.samples.stop] for batch in stored]
        shared = [range(*limits) for limits in evaluation.run.from_rank_0(spans)]
        # Twice: rank 0 may ask whether the model gives the same bits again.
        results = {samples: [evaluate_alone(evaluation, samples) for _ in range(2)] for samples in shared}
        return lambda samples: results[samples].pop()

    def evaluate_remaining(self, evaluation: Evaluation, loop: Loop, settings: NumericSettings) -> list[str]:
        """Compute one batch a round on every rank. A collective."""
        with loop.running(), compute_of(evaluation, 1) as compute:
            # Ranks that arrive early sleep here instead of spinning in the first collective.
            evaluation.run.control.meet()
            rounds = _Rounds(evaluation, loop, compute, self._gathers)
            lasting = Lasting(evaluation.model)
            try:
                rounds.run()
            except BackendError:
                if evaluation.run.control.has_peers:
                    wait_for_news(evaluation.run.control, lambda: False, within_s=_CAUSE_WITHIN_S)
                raise
        loop.times[TimedStage.COMPUTE] = rounds.under_way.compute_s
        if switched := lasting.warnings(evaluation.model):
            loop.unlike = [*(loop.unlike or []), *switched]
        return settings.check_after_loop(compute.changed_settings)


def rounds_of(plan: EvalPlan, remaining: Sequence[int], size: int) -> int:
    """Number of rounds: the batches of the rank with the most."""
    return max(sum(len(plan.chunk_batches(chunk)) for chunk in remaining[rank::size]) for rank in range(size))


def wait_for_news(
    control: ControlPlane, has_come: Callable[[], bool], *, within_s: float = float("inf")
) -> None:
    """Sleep until another rank's announced message has arrived."""
    limit = monotonic() + within_s
    with control.progress.inside(Stage.MEET):
        while True:
            control.raise_if_peer_failed()
            if has_come() or monotonic() > limit:
                return
            sleep(_LOOK_EVERY_S)


class _Rounds:
    """The rounds of one rank."""

    def __init__(self, evaluation: Evaluation, loop: Loop, compute: Compute, gathers: Gathers) -> None:
        self._evaluation = evaluation
        self._backend = evaluation.run.backend
        self._control = evaluation.run.control
        self._progress = evaluation.run.control.progress
        self._loop = loop
        self._compute = compute
        self._gathers = gathers
        # The batches that are being computed.
        self.under_way = UnderWay(evaluation, loop, compute)

    def run(self) -> None:
        """Compute all rounds, or those until all ranks stop."""
        rounds = rounds_of(self._evaluation.plan, self._loop.remaining, self._backend.world.size)
        stand_in = self._look(rounds)
        batches = self._loop.read(until_stopped=False)
        for _ in range(rounds):
            handed, data, problem = self._prepare(batches)
            if self._agree_to_stop(problem):
                break
            self._progress.step(Stage.FORWARD, None if handed is None else handed.chunk)
            self.under_way.start(handed, self._start, (data, stand_in))
            del data
        self.under_way.count()

    def _look(self, rounds: int) -> Any:
        """The first samples, which all ranks compute; a second time, too, if that takes little of the run."""
        # All ranks begin with a forward of the same samples, which sets the order of units for all others.
        stand_in = of_first(self._evaluation, lambda data, _: data)
        with as_before(self._evaluation.model, self._evaluation.task):
            self._progress.step(Stage.FORWARD)
            start = perf_counter()
            columns = self._compute.start(stand_in)()
            seconds = torch.tensor([perf_counter() - start], dtype=torch.float64)
            if is_short(self._backend.all_reduce(seconds, "max").item(), 1, rounds):
                again = of_first(self._evaluation, lambda data, _: data)
                computed = self._compute.start(again)()
                # The module that causes it is not searched: that would take forwards of all ranks.
                self._loop.unlike = differences(columns, computed, stand_in, again, lambda: _RANDOM)
        return stand_in

    def _start(self, batch: tuple[Any, Any]) -> Pending | None:
        """Start a batch; an error after its forward is raised when the other ranks know of it.

        ``batch`` holds its data, None if none of its samples could be read, and the data to compute instead.
        """
        data, stand_in = batch
        try:
            pending = self._compute.start(stand_in if data is None else data)
            # A batch without a readable sample has no columns to keep.
            return None if data is None else pending
        except Exception as error:
            if not self._gathers.is_complete:
                raise
            problem = error

        def failed() -> NoReturn:
            raise problem

        return None if data is None else failed

    def _prepare(
        self, batches: Iterator[tuple[HandedBatch, Any]]
    ) -> tuple[HandedBatch | None, Any, Exception | None]:
        """Record computed batches and read the next one; or return the error of this rank."""
        try:
            self.under_way.count(all_but=self._compute.ahead)
            handed, data = next(batches, (None, None))
        except (PeerError, Stopped, BackendError):
            raise
        except Exception as problem:  # noqa: BLE001 - raised when the other ranks know that this one leaves
            return None, None, problem
        return handed, data, None

    def _agree_to_stop(self, problem: Exception | None) -> bool:
        """Whether all ranks stop here; a collective."""
        flags = torch.tensor([self._control.stopping is not None, problem is not None], dtype=torch.int64)
        try:
            stops, fails = self._backend.all_reduce(flags, "max").tolist()
        except BackendError as error:
            raise (problem or error) from (None if problem is None else error)
        if problem is not None:
            raise problem
        if fails:
            # The other rank's message is the one to show.
            wait_for_news(self._control, lambda: False)
        if stops:
            wait_for_news(self._control, lambda: self._control.stopping is not None)
        return bool(stops)
