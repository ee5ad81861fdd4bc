"""Which samples of a finished run to look at: confident mistakes, the highest losses, changed answers.

The rows are read a window at a time, and only columns of numbers; what is chosen is then read as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dualeval.comparison.compared import Comparison
from dualeval.comparison.estimates import Flips
from dualeval.engine.reference import PREDICTION_COLUMNS
from dualeval.engine.rescoring import finished_run
from dualeval.engine.stored_rows import StoredRows
from dualeval.errors import UsageError
from dualeval.metrics.scores import Score, score_from
from dualeval.result import PREDICTIONS, Result
from dualeval.wording import nearest

TARGET, PREDICTION, CONFIDENCE, LOSS = "target", "prediction", "confidence", "loss"
By = Literal["mistake", "loss", "any"]
_BINS = 15  # as of the metric ece

_Columns = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number of each sample by which one is worse than another."""

    name: str
    score: Score
    # Whether a higher number is worse.
    high: bool

    def of(self, columns: _Columns) -> npt.NDArray[np.float64]:
        """Each sample's number; NaN where it has none."""
        y, x, counts = self.score.terms(columns)
        values: npt.NDArray[np.float64] = np.divide(
            y, x, out=np.full(len(y), np.nan), where=counts & (x != 0)
        )
        return values

    def badness(self, columns: _Columns) -> npt.NDArray[np.float64]:
        """How bad each sample is: a NaN is the worst, and one that does not count is not bad."""
        values = self.of(columns)
        worst = np.where(np.isnan(values), np.inf, values if self.high else -values)
        y, x, counts = self.score.terms(columns)
        return np.where(counts & ((x != 0) | np.isnan(y)), worst, -np.inf)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One row, as Python values, and how it was judged."""

    # id, index, columns and texts.
    row: Mapping[str, Any]
    # In words: names of classes, where they are known.
    target: str | None
    prediction: str | None
    correct: bool | None
    confidence: float | None
    # By the run's `measure`.
    loss: float | None


class Chosen(NamedTuple):
    """Some rows by their places, of how many that would do."""

    places: list[int]
    of: int


class JudgedRows:
    """The rows of a finished run, and which of them are mistakes."""

    def __init__(self, folder: Path, result: Result) -> None:
        self.folder, self.result = folder, result
        self.rows = StoredRows(folder / PREDICTIONS)
        self._kinds = self.rows.kinds
        self.has_confidence = self._kinds.get(CONFIDENCE) == "f"
        scores = {name: score_from(content) for name, content in result.scores.items()}
        self._scores = {
            name: score
            for name, score in scores.items()
            if name in result.directions and all(self._kinds.get(column) for column in score.columns)
        }
        # Both are whole numbers: numbers of classes.
        self.has_classes = self._kinds.get(TARGET) == self._kinds.get(PREDICTION) == "i"
        self._right = None if self.has_classes else self._score_of_right()
        self.measure = self._measure()

    @classmethod
    def open(cls, folder: Path) -> JudgedRows:
        """Those in a folder, whose files are checked."""
        return cls(folder, finished_run(folder)[0])

    def _score_of_right(self) -> Score | None:
        """The first score that says of each sample whether it is right."""
        for name, score in self._scores.items():
            alone = score.weight is score.over is score.where is score.transform is None
            is_right = score.below == 1 or self._kinds[score.column] == "b"
            if alone and is_right and self.result.directions[name] == "higher":
                return score
        return None

    def _measure(self) -> Measure | None:
        """The loss, or else the first score that is more than right or wrong."""
        if self._kinds.get(LOSS) == "f":
            return Measure(name=LOSS, score=Score(column=LOSS), high=True)
        for name, score in self._scores.items():
            if score.below is None and self._kinds[score.column] == "f":
                named = f"{score.column} / {score.over}" if score.over else score.column
                return Measure(name=named, score=score, high=self.result.directions[name] == "lower")
        return None

    @property
    def judges(self) -> bool:
        """Whether it is known which samples are right."""
        return self.has_classes or self._right is not None

    @property
    def _columns(self) -> tuple[str, ...]:
        names = [TARGET, PREDICTION] if self.has_classes else []
        names += [CONFIDENCE] if self.has_confidence else []
        names += self._right.columns if self._right is not None else ()
        names += self.measure.score.columns if self.measure is not None else ()
        return tuple(dict.fromkeys(names))

    def _is_right(self, columns: _Columns) -> npt.NDArray[np.bool_] | None:
        if self.has_classes:
            return np.asarray(columns[TARGET] == columns[PREDICTION])
        return None if self._right is None else self._right.terms(columns)[0].astype(bool)

    def _windows(self) -> Iterator[tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[Any]]]]:
        """The places of the samples that were evaluated, and their columns."""
        if not self._columns:
            return
        for window in self.rows.windows(self._columns):
            places = np.flatnonzero(window.evaluated).astype(np.int64) + window.start
            yield places, {name: np.asarray(column) for name, column in window.columns.items()}

    def worst(
        self,
        by: By,
        count: int,
        *,
        among: npt.NDArray[np.bool_] | None = None,
        classes: Sequence[int] | None = None,
    ) -> Chosen:
        """The places of the worst samples, the worst first; of equal ones the first in the file.

        By "mistake" those that are wrong, the most confident first; by "loss" all, by the measure; by "any"
        all, the most confident first. ``among`` are the rows that may be chosen, ``classes`` their targets.
        """
        best_keys, best, number = np.empty(0), np.empty(0, np.int64), 0
        for places, columns in self._windows():
            keys = self._keys(by, columns)
            allowed = keys > -np.inf if by == "loss" else np.ones(len(keys), bool)
            if by == "mistake":
                allowed = ~self._known_right(columns)
            if among is not None:
                allowed &= among[places]
            if classes is not None:
                allowed &= np.isin(columns[TARGET], classes)
            number += int(allowed.sum())
            best_keys = np.concatenate([best_keys, keys[allowed]])
            best = np.concatenate([best, places[allowed]])
            order = np.lexsort((best, -best_keys))[:count]
            best_keys, best = best_keys[order], best[order]
        return Chosen(places=best.tolist(), of=number)

    def _known_right(self, columns: _Columns) -> npt.NDArray[np.bool_]:
        right = self._is_right(columns)
        assert right is not None
        return right

    def _keys(self, by: By, columns: _Columns) -> npt.NDArray[np.float64]:
        """What is higher of a sample that is to come first."""
        if by != "loss" and self.has_confidence:
            return np.nan_to_num(columns[CONFIDENCE].astype(np.float64))
        if self.measure is not None:
            return self.measure.badness(columns)
        return np.zeros(len(next(iter(columns.values()))))

    def samples(self, places: Sequence[int]) -> list[Sample]:
        """These rows, whole, in this order; no other group of rows is read."""
        found = {place: self._sample(row) for place, row in self.rows.at(places)}
        return [found[place] for place in places]

    def _sample(self, row: Mapping[str, Any]) -> Sample:
        columns = {name: np.array([row[name]]) for name in self._columns}
        right = self._is_right(columns)
        measured = None if self.measure is None else float(self.measure.of(columns)[0]) + 0.0  # no -0.0
        answer = next((name for name in (*PREDICTION_COLUMNS, "generated") if name in row), "")
        # Of choices the column "answer" is the right one.
        target = TARGET if TARGET in row or answer != PREDICTION else "answer"
        return Sample(
            row=row,
            target=self._named(row, target),
            prediction=self._named(row, answer),
            correct=None if right is None else bool(right[0]),
            confidence=float(row[CONFIDENCE]) if self.has_confidence else None,
            loss=measured,
        )

    def _named(self, row: Mapping[str, Any], column: str) -> str | None:
        """A target or prediction for people."""
        value = row.get(f"{column}_name")
        value = row.get(column) if value is None else value
        if isinstance(value, int) and self.has_classes:
            named = self.class_names[value] if 0 <= value < len(self.class_names) else None
            return ("NaN" if value < 0 else str(value)) if named is None else named
        return None if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)

    @property
    def data_names(self) -> Sequence[str]:
        """The columns that are the user's own."""
        return getattr(self.rows, "data_names", ())

    @property
    def score_columns(self) -> list[str]:
        """The columns of numbers that metrics follow from, but those that a sample has anyway."""
        scores = map(score_from, self.result.scores.values())
        names = (name for score in scores for name in score.columns if name in self.rows.names)
        return [name for name in dict.fromkeys(names) if name not in (TARGET, PREDICTION, CONFIDENCE, LOSS)]

    @property
    def class_names(self) -> Sequence[str | None]:
        """The names of the classes by index, as far as they are known."""
        return [*(self.result.labels.get("classes") or ())]

    def classes_called(self, name: str) -> list[int]:
        """The indices of the classes of a name, or the one of a number."""
        if not self.has_classes:
            raise UsageError(
                f"--class {name}: {self.folder} is a run whose samples have no single class as target and "
                "prediction. Leave it out."
            )
        found = [index for index, each in enumerate(self.class_names) if each == name]
        if found or name.isdecimal():
            return found or [int(name)]
        known = [each for each in self.class_names if each is not None]
        raise UsageError(
            f"--class {name}: {self.folder} has no such class.{nearest(name, known)} Give a name, or the "
            "class's number."
        )

    def calibration(self) -> list[dict[str, float]]:
        """Accuracy and mean confidence in 15 equal bins of confidence, as of the metric ece; [] without."""
        if not (self.has_confidence and self.judges):
            return []
        counts, right, sums = (np.zeros(_BINS) for _ in range(3))
        for _, columns in self._windows():
            confidence = columns[CONFIDENCE].astype(np.float64)
            there = np.isfinite(confidence)
            confidence = confidence[there]
            bins = np.clip(np.ceil(confidence * _BINS).astype(int) - 1, 0, _BINS - 1)
            counts += np.bincount(bins, minlength=_BINS)
            right += np.bincount(bins, self._known_right(columns)[there], minlength=_BINS)
            sums += np.bincount(bins, confidence, minlength=_BINS)
        return [
            {
                "low": place / _BINS,
                "high": (place + 1) / _BINS,
                "count": int(counts[place]),
                "accuracy": float(right[place] / counts[place]),
                "confidence": float(sums[place] / counts[place]),
            }
            for place in range(_BINS)
            if counts[place]
        ]

    def with_ids(self, ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Which rows have these ids."""
        import pyarrow
        import pyarrow.compute

        own = self.rows.whole("id")
        found = pyarrow.compute.is_in(own, value_set=pyarrow.array(ids, own.type))
        return np.asarray(found).astype(bool)


def flips_of(comparison: Comparison) -> Flips | None:
    """The samples that changed, by the first metric that is right or wrong of each sample."""
    return next((metric.flips for metric in comparison.metrics.values() if metric.flips is not None), None)
