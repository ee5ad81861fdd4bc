"""EarlyStopping: when a training no longer gets better, decided alike on every rank.

All ranks keep rank 0's count and decide with rank 0's value, by the same comparisons of floats. So no rank
stops a training that the others go on with, whatever its own floats are.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dualeval.errors import DualevalError, UsageError
from dualeval.messages import did_you_mean
from dualeval.options.choices import check_choice, check_count, check_kind
from dualeval.result import Result, result_from
from dualeval.world.waiting import name_ranks, waiting

if TYPE_CHECKING:
    from dualeval.backends.base import Backend

_DIRECTIONS = ("higher", "lower")
_ALL_UPDATE = "Every rank has to call update, with its own result: not rank 0 alone."


@dataclass(frozen=True, kw_only=True)
class _Epochs:
    """What the updates so far have come to."""

    updates: int = 0
    # How many there were since the last one that was better by more than `min_delta`.
    waited: int = 0
    # The value of that one.
    reference: float | None = None
    # The best value, by however little.
    best_value: float | None = None
    # The number of its update, from 0.
    best_epoch: int | None = None

    def after(self, value: float | None, sign: int, min_delta: float) -> _Epochs:
        """What another update makes of it."""
        better = value is not None and (self.best_value is None or sign * (value - self.best_value) > 0)
        enough = value is not None and (self.reference is None or sign * (value - self.reference) > min_delta)
        return _Epochs(
            updates=self.updates + 1,
            waited=0 if enough else self.waited + 1,
            reference=value if enough else self.reference,
            best_value=value if better else self.best_value,
            best_epoch=self.updates if better else self.best_epoch,
        )


class EarlyStopping:
    """Says after each epoch whether a training is to stop, alike on every rank, and keeps the best result.

    A training stops when ``patience`` updates in a row were not better by more than ``min_delta`` than the
    last one that was. A value that is not finite (NaN, an infinity) is never better.

    Args:
        metric: its name in ``Result.metrics``.
        patience: so many updates in a row without an improvement stop the training; at least 1.
        min_delta: what is no larger is no improvement, in the metric's unit: 0.001 of a metric from 0 to 1 is
            a tenth of a percentage point. At least 0.
        direction: "higher" or "lower" is better; None takes the metric's own, from ``Result.directions``.
        backend: carries the ranks' values, as ``session.backend``; it stays open. None takes the group that
            the script (or its open session) has, or else joins the launcher's ranks for each update, as
            ``dualeval.evaluate`` does.

    Attributes:
        best: this rank's result of the best update, by however little it was better; of equal ones the first.
            None before any finite value.
        is_best: whether the last update was the best.

    Raises:
        UsageError: an argument has a value that it cannot have.
    """

    def __init__(
        self,
        metric: str,
        patience: int,
        min_delta: float = 0.0,
        *,
        direction: str | None = None,
        backend: Backend | None = None,
    ) -> None:
        check_kind("metric", metric, isinstance(metric, str) and bool(metric), "the name of a metric")
        check_kind("patience", patience, patience is not None, "a whole number of at least 1")
        check_count("patience", patience, 1)
        number = isinstance(min_delta, (int, float)) and not isinstance(min_delta, bool)
        fits = number and 0 <= min_delta < math.inf
        check_kind("min_delta", min_delta, fits, "a number of at least 0, in the metric's unit")
        if direction is not None:
            check_choice("direction", direction, _DIRECTIONS)
        if backend is not None:
            _check_backend(backend)
        self._metric = metric
        self._patience = patience
        self._min_delta = float(min_delta)
        self._direction = direction
        self._backend = backend
        self._epochs = _Epochs()
        self.best: Result | None = None
        self.is_best = False

    @property
    def best_epoch(self) -> int | None:
        """The number of the best update, from 0; None before any finite value."""
        return self._epochs.best_epoch

    @property
    def should_stop(self) -> bool:
        """Whether the training is to stop: what the last ``update`` has returned, also after a resume."""
        return self._epochs.waited >= self._patience

    def update(self, result: Result) -> bool:
        """Take the result of an epoch; returns whether the training is to stop, the same on every rank.

        A collective: every rank calls it once an epoch, with its own result. Rank 0's value decides.

        Args:
            result: what ``dualeval.evaluate``, ``session.evaluate`` or ``session.result`` has returned.

        Raises:
            UsageError: on some rank the result has no such metric, or one that is not a number, or it is not
                known what is better; or the ranks have different options. On all ranks, before anything is
                counted.
            BackendError: the ranks could not be reached.
        """
        with self._ranks() as backend:
            with waiting(backend.world, "the other ranks to call EarlyStopping.update", _ALL_UPDATE):
                reports = backend.all_gather_json(self._report(result))
            epochs = [report["progress"] for report in reports]
            if any(each != epochs[0] for each in epochs):
                # Rank 0 alone may have loaded a checkpoint.
                state = backend.broadcast_json(self.state_dict())
                if epochs[backend.world.rank] != epochs[0]:
                    self._take_over(state)
        # The ranks have left a group that they joined for this: all raise the same, and none is missed there.
        _refuse_problems([report["problem"] for report in reports])
        _refuse_differing([report["options"] for report in reports])
        sign = 1 if reports[0]["options"]["direction"] == "higher" else -1
        number = self._epochs.updates
        self._epochs = self._epochs.after(reports[0]["value"], sign, self._min_delta)
        self.is_best = self._epochs.best_epoch == number
        if self.is_best:
            self.best = result
        return self.should_stop

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to hold: JSON values, which ``torch.load(..., weights_only=True)`` takes."""
        return {
            "metric": self._metric,
            "progress": asdict(self._epochs),
            "is_best": self.is_best,
            "best": None if self.best is None else json.loads(self.best.to_json()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; patience, min_delta and direction are those of this object.

        No collective: it is enough that rank 0 loads it. The next ``update`` gives rank 0's to all ranks.

        Args:
            state: what ``state_dict`` has returned.

        Raises:
            UsageError: it is something else, or of another metric.
        """
        metric = state.get("metric") if isinstance(state, Mapping) else None
        if isinstance(metric, str) and metric != self._metric:
            raise UsageError(
                f"this state belongs to EarlyStopping({metric!r}, ...), and EarlyStopping({self._metric!r}, "
                "...) was asked to load it: values of different metrics cannot be compared. Make "
                f"EarlyStopping({metric!r}, ...), or do not load the state"
            )
        self._take_over(state)

    def _take_over(self, state: Mapping[str, Any]) -> None:
        try:
            epochs = _Epochs(**state["progress"])
            best = None if state["best"] is None else result_from(state["best"])
            is_best = bool(state["is_best"])
        except (TypeError, KeyError, ValueError, DualevalError) as error:
            raise UsageError(
                f"this is not a state of EarlyStopping ({type(error).__name__}: {error}): give "
                "load_state_dict what state_dict() has returned"
            ) from error
        self._epochs, self.best, self.is_best = epochs, best, is_best

    @contextmanager
    def _ranks(self) -> Iterator[Backend]:
        """The ranks that decide together."""
        if self._backend is not None:
            yield self._backend
            return
        from dualeval.backends import connect, group_of_caller, world_of_caller
        from dualeval.launch import examine

        caller, detection = group_of_caller(), examine(os.environ)
        world = detection.place if caller is None else world_of_caller(caller, detection.world)
        with connect(caller, world) as backend:
            yield backend

    def _report(self, result: Result) -> dict[str, Any]:
        """What this rank tells the others."""
        value, direction, problem = None, None, None
        try:
            value = self._value_of(result)
            direction = self._direction_of(result)
        except UsageError as error:
            problem = str(error)
        options = {"metric": self._metric, "patience": self._patience, "min_delta": self._min_delta}
        return {
            "value": value,
            "problem": problem,
            "options": {**options, "direction": direction},
            "progress": asdict(self._epochs),
        }

    def _value_of(self, result: Result) -> float | None:
        if not isinstance(result, Result):
            raise UsageError(
                f"update takes the Result that dualeval.evaluate returns, not a {type(result).__name__}"
            )
        if self._metric not in result.metrics:
            hint = did_you_mean(self._metric, result.metrics, cutoff=0.4)
            raise UsageError(
                f"the result has no metric {self._metric!r}: it has {', '.join(result.metrics)}.{hint}"
            )
        value = result.metrics[self._metric]
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise UsageError(
                f"the metric {self._metric!r} is a {type(value).__name__}, and EarlyStopping compares one "
                "number: take a metric that is one"
            )
        return float(value) if value is not None and math.isfinite(value) else None

    def _direction_of(self, result: Result) -> str:
        known = result.directions.get(self._metric)
        if known is None and self._direction is None:
            raise UsageError(
                f"the result does not say whether higher or lower is better for {self._metric!r}: pass "
                f"EarlyStopping({self._metric!r}, {self._patience}, direction='higher') or 'lower', or give "
                "the metric higher_is_better=True or False"
            )
        if known is not None and self._direction is not None and known != self._direction:
            raise UsageError(
                f"direction={self._direction!r}, but {known} is better for {self._metric!r} by the result's "
                "directions: leave out direction"
            )
        return self._direction or str(known)


def _check_backend(backend: object) -> None:
    from dualeval.backends.base import Backend

    check_kind("backend", backend, isinstance(backend, Backend), "a Backend, such as session.backend")


def _refuse_problems(problems: Sequence[str | None]) -> None:
    """Raise on all ranks what some of them have found."""
    ranks: dict[str, list[int]] = {}
    for rank, problem in enumerate(problems):
        if problem is not None:
            ranks.setdefault(problem, []).append(rank)
    for problem, of in ranks.items():
        raise UsageError(problem if len(of) == len(problems) else f"on {name_ranks(of)}: {problem}")


def _refuse_differing(options: Sequence[Mapping[str, Any]]) -> None:
    """Raise on all ranks where some have other options than rank 0."""
    for name, first in options[0].items():
        other = [rank for rank, each in enumerate(options) if each[name] != first]
        if other:
            raise UsageError(
                f"EarlyStopping has {name}={first!r} on rank 0 and {name}={options[other[0]][name]!r} on "
                f"{name_ranks(other)}: give all ranks the same"
            )
