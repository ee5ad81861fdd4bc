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
from dualeval.engine.folder.finished import finished_run
from dualeval.engine.folder.stored_rows import StoredRows
from dualeval.engine.scoring.slices import is_of
from dualeval.engine.values.row_comparison import PREDICTION_COLUMNS
from dualeval.errors import UsageError
from dualeval.messages import listed, nearest
from dualeval.metrics.scores import Score, score_from
from dualeval.result import PREDICTIONS, Result, class_names

TARGET, PREDICTION, CONFIDENCE, LOSS = "target", "prediction", "confidence", "loss"
By = Literal["mistake", "loss", "any"]
_BINS = 15  # as of the metric ece
_NAMED = 12  # classes in a message
_A_TURN = 5  # flips of a pair of target and prediction
_FEW = 10_000  # ids of which the nearest ones to another are looked for

_Columns = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number of each sample by which one is worse than another."""

    name: str
    score: Score
    # Whether a higher number is worse.
    high: bool

    @property
    def said(self) -> tuple[str | None, ...]:
        """The columns that say no more than the number does."""
        of_both = (self.score.column, self.score.over) if self.score.transform is None else ()
        return (self.name, *of_both)

    def of(self, columns: _Columns) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """Each sample's number, and which samples have one."""
        y, x, counts = self.score.terms(columns)
        there = counts & (x != 0)
        return np.divide(y, x, out=np.zeros(len(y)), where=there), there


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


class Judged(NamedTuple):
    """How each row is judged, float64; NaN for what could not be read or has none."""

    # Those that judge: target, prediction, confidence.
    columns: dict[str, npt.NDArray[np.float64]]
    # 1 or 0.
    right: npt.NDArray[np.float64] | None
    # By the run's `measure`; and which rows have such a number, NaN or not.
    measured: npt.NDArray[np.float64] | None
    has_number: npt.NDArray[np.bool_]


class Listed(NamedTuple):
    """What a list of samples is called, and how these are chosen."""

    reason: str  # "mistake", "loss", "lost" or "gained"
    title: str
    by: By
    # The rows that may be chosen; None for all.
    among: npt.NDArray[np.bool_] | None = None


class JudgedRows:
    """The rows of a finished run, and which of them are mistakes."""

    def __init__(self, folder: Path, result: Result, metric: str | None = None) -> None:
        """``metric`` says by which number samples are judged, in place of the first one."""
        self.folder, self.result = folder, result
        self.rows = StoredRows(folder / PREDICTIONS)
        # The user's own columns, which judge nothing, whatever they are called.
        self.data_names = self.rows.data_names
        self.class_names = class_names(result)
        self._kinds = {name: kind for name, kind in self.rows.kinds.items() if name not in self.data_names}
        self.has_confidence = self._kinds.get(CONFIDENCE) == "f"
        scores = {name: score_from(content) for name, content in result.scores.items()}
        self.scores = {
            name: score
            for name, score in scores.items()
            if all(self._kinds.get(each) or each == score.where for each in score.columns)
        }
        if metric is not None and metric not in self.scores:
            raise UsageError(
                f"{folder} has no number of each sample for the metric {metric!r}."
                f"{nearest(metric, self.scores)} Those that have one: {listed(self.scores, _NAMED)}"
            )
        self.scores = {name: self.scores[name] for name in ([metric] if metric else self.scores)}
        # Both are whole numbers: numbers of classes.
        self.has_classes = self._kinds.get(TARGET) == self._kinds.get(PREDICTION) == "i"
        self._right = None if self.has_classes else next(self._scores_of_right(), None)
        # Whether it is known which samples are right.
        self.judges = self.has_classes or self._right is not None
        loss = Measure(name=LOSS, score=Score(column=LOSS), high=True)
        has_loss = metric is None and self._kinds.get(LOSS) == "f"
        self.measure = loss if has_loss else next(self._measures(), None)
        read = [TARGET, PREDICTION] if self.has_classes else []
        read += [CONFIDENCE] if self.has_confidence else []
        for score in (self._right, self.measure and self.measure.score):
            read += score.columns if score else ()
        self._columns = tuple(dict.fromkeys(read))

    @property
    def further(self) -> tuple[str, ...]:
        """The data's columns and those of the scores, without what is said of a sample in its own place."""
        scores = [
            name
            for score in self.scores.values()
            for name in (score.column, score.over, score.weight)
            if name is not None and self._kinds[name] != "b"
        ]
        apart = {TARGET, PREDICTION, CONFIDENCE, LOSS, "rank", *(self.measure.said if self.measure else ())}
        return (*self.data_names, *(name for name in dict.fromkeys(scores) if name not in apart))

    @classmethod
    def open(cls, folder: Path, metric: str | None = None) -> JudgedRows:
        """Those in a folder, whose files are checked."""
        return cls(folder, finished_run(folder)[0], metric)

    def _scores_of_right(self) -> Iterator[Score]:
        """The scores that say of each sample whether it is right."""
        for name, score in self.scores.items():
            alone = score.weight is score.over is score.where is score.transform is None
            is_right = score.below == 1 or self._kinds[score.column] == "b"
            if alone and is_right and self.result.directions.get(name) == "higher":
                yield score

    def _measures(self) -> Iterator[Measure]:
        """The scores that are more than right or wrong."""
        for name, score in self.scores.items():
            direction = self.result.directions.get(name)
            if direction is not None and score.below is None and self._kinds[score.column] == "f":
                named = f"{score.column} / {score.over}" if score.over else score.column
                if score.over and score.transform is None:
                    named = name
                if not isinstance(score.where_is, bool):
                    named += f" of {listed(score.where_is, 3)}"
                yield Measure(name=named, score=score, high=direction == "lower")

    def lists(
        self, comparison: Comparison | None = None, names: tuple[str, str] = ("A", "B")
    ) -> list[Listed]:
        """Mistakes and losses; or the samples that a comparison with this run as B says have changed.

        ``names`` are those of A and B.
        """
        if comparison is not None:
            flips, (a, b) = flips_of(comparison), names
            titles = {"lost": f"right in {a}, wrong in {b}", "gained": f"wrong in {a}, right in {b}"}
            return [
                Listed(change, title, "any", self._with_ids(getattr(flips, change)))
                for change, title in titles.items()
                if flips is not None
            ]
        title = "most confident mistakes" if self.has_confidence else "mistakes"
        lists = [Listed("mistake", title, "mistake")] if self.judges else []
        if self.measure is not None:
            lists.append(
                Listed("loss", f"{'highest' if self.measure.high else 'lowest'} {self.measure.name}", "loss")
            )
        return lists

    def _with_ids(self, ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        import pyarrow
        import pyarrow.compute

        kept = self.rows.whole("id")
        return np.asarray(pyarrow.compute.is_in(kept, value_set=pyarrow.array(ids, kept.type))).astype(bool)

    def _is_right(self, columns: _Columns) -> npt.NDArray[np.bool_]:
        if self._right is not None:
            return self._right.terms(columns)[0].astype(bool)
        return np.asarray(columns[TARGET] == columns[PREDICTION])

    def _windows(self) -> Iterator[tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[Any]]]]:
        """The places of the samples that were evaluated, and their columns."""
        for window in self.rows.windows(self._columns) if self._columns else ():
            places = np.flatnonzero(window.evaluated).astype(np.int64) + window.start
            yield places, {name: np.asarray(column) for name, column in window.columns.items()}

    def worst(self, listed: Listed, count: int, classes: Sequence[int] | None = None) -> Chosen:
        """The places of the worst samples, the worst first; of equal ones the first in the file.

        By "mistake" those that are wrong, the most confident first; by "loss" all, by the measure; by "any"
        all, the most confident first, and of classes ``_by_turns``. With ``classes`` those with such
        targets alone.
        """
        best_keys, best, number = np.empty(0), np.empty(0, np.int64), 0
        pairs = [np.empty((2, 0))]
        take_turns = listed.by == "any" and self.has_classes
        for places, columns in self._windows():
            keys = self._keys(listed.by, columns)
            allowed = ~self._is_right(columns) if listed.by == "mistake" else keys > -np.inf
            if listed.among is not None:
                allowed &= listed.among[places]
            if classes is not None:
                allowed &= np.isin(columns[TARGET], classes)
            number += int(allowed.sum())
            best_keys = np.concatenate([best_keys, keys[allowed]])
            best = np.concatenate([best, places[allowed]])
            if take_turns:
                pairs.append(np.stack([columns[TARGET][allowed], columns[PREDICTION][allowed]]))
                continue
            order = np.lexsort((best, -best_keys))[:count]
            best_keys, best = best_keys[order], best[order]
        if take_turns:
            order = np.lexsort((best, -best_keys))
            best = best[order][_by_turns(np.concatenate(pairs, axis=1)[:, order])[:count]]
        return Chosen(best.tolist(), number)

    def _keys(self, by: By, columns: _Columns) -> npt.NDArray[np.float64]:
        """What is higher of a sample that is to come first."""
        if by != "loss" and self.has_confidence:
            return np.nan_to_num(columns[CONFIDENCE].astype(np.float64))
        if self.measure is not None:
            # NaN is the worst; a sample without a number never comes.
            values, there = self.measure.of(columns)
            worst = np.where(np.isnan(values), np.inf, values if self.measure.high else -values)
            return np.where(there, worst, -np.inf)
        return np.zeros(len(next(iter(columns.values()))))

    def changed(self, other: JudgedRows) -> npt.NDArray[np.float64] | None:
        """By how much each row is worse than the other run's of the same id, NaN where there is none.

        None where the two are not judged by the same measure.
        """
        if self.measure is None or other.measure is None or self.measure.name != other.measure.name:
            return None
        here, there = self.judged().measured, other.judged().measured
        assert here is not None and there is not None
        # Of a place of -1 the last one, which is none.
        there = np.append(there, np.nan)[other.places_of(self.rows.whole("id"))]
        return (here - there) * (1 if self.measure.high else -1)

    def judged(self) -> Judged:
        """How each row is judged."""
        none = np.full(self.rows.count, np.nan)
        names = [name for name in (TARGET, PREDICTION, CONFIDENCE) if name in self._columns]
        columns = {name: none.copy() for name in names}
        right = none.copy() if self.judges else None
        measured = none.copy() if self.measure is not None else None
        has_number = np.zeros(self.rows.count, np.bool_)
        for places, window in self._windows():
            for name, column in columns.items():
                column[places] = window[name]
            if right is not None:
                right[places] = self._is_right(window)
            if measured is not None and self.measure is not None:
                values, there = self.measure.of(window)
                measured[places] = np.where(there, values, np.nan)
                has_number[places] = there
        return Judged(columns, right, measured, has_number)

    def evaluated(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of these rows could be read; a place of -1 is none."""
        there = np.asarray(self.rows.whole(self.rows.names[0]).is_valid())
        return np.append(there, False)[places]

    def places_of(self, ids: Any) -> npt.NDArray[np.int64]:
        """The rows of different ids, a ``pyarrow.Array``; -1 for those that are not there."""
        import pyarrow.compute

        kept = self.rows.whole("id")
        # The ids in the order of the rows: what is looked up in is made of those asked for, often a few.
        asked = pyarrow.compute.index_in(kept, value_set=ids.cast(kept.type)).fill_null(-1)
        of_rows = np.asarray(asked).astype(np.int64)
        there = np.flatnonzero(of_rows >= 0)
        places = np.full(len(ids), -1, np.int64)
        places[of_rows[there]] = there
        return places

    def place_of(self, name: str) -> int:
        """The row of an id; raises UsageError where there is none."""
        import pyarrow

        place = int(self.places_of(pyarrow.array([name]))[0])
        if place < 0:
            hint = nearest(name, self.rows.whole("id").to_pylist()) if self.rows.count < _FEW else ""
            raise UsageError(
                f"{self.folder} has no sample {name!r}.{hint} 'dualeval show {self.folder}' lists some."
            )
        return place

    def samples(self, places: Sequence[int]) -> list[Sample]:
        """These rows, whole, in this order; no other group of rows is read."""
        samples = {place: self._sample(row) for place, row in self.rows.at(places)}
        return [samples[place] for place in places]

    def _sample(self, row: Mapping[str, Any]) -> Sample:
        if row[self.rows.names[0]] is None:  # it could not be read
            nothing = dict.fromkeys(("target", "prediction", "correct", "confidence", "loss"))
            return Sample(row=row, **nothing)
        columns = {name: np.array([row[name]]) for name in self._columns}
        values, there = self.measure.of(columns) if self.measure is not None else ([0.0], [False])
        computed = {name: value for name, value in row.items() if name not in self.data_names}
        answer = next((name for name in (*PREDICTION_COLUMNS, "generated") if name in computed), "")
        # Of choices the column "answer" is the right one.
        target = TARGET if TARGET in computed or answer != PREDICTION else "answer"
        return Sample(
            row=row,
            target=self._named(computed, target),
            prediction=self._named(computed, answer),
            correct=bool(self._is_right(columns)[0]) if self.judges else None,
            confidence=float(row[CONFIDENCE]) if self.has_confidence else None,
            loss=float(values[0]) + 0.0 if there[0] else None,  # no -0.0
        )

    def _named(self, row: Mapping[str, Any], column: str) -> str | None:
        """A target or prediction for people."""
        value = row.get(f"{column}_name") or row.get(column)
        if isinstance(value, int) and self.has_classes:
            named = self.class_names[value] if 0 <= value < len(self.class_names) else None
            return ("NaN" if value < 0 else str(value)) if named is None else named
        return None if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)

    def slices_of(self, row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """The groups of the run that a sample is of, as ("scanner", "A")."""
        for by, groups in self.result.slices.items():
            for group in groups:
                if all(name in row and is_of(row[name], value) for name, value in group["group"].items()):
                    yield by, group["label"]

    def classes_called(self, name: str) -> list[int]:
        """The indices of the classes of a name, or the one of a number."""
        known = self.class_names
        indices = [index for index, each in enumerate(known) if each == name]
        if indices and self.has_classes:
            return indices
        if self.has_classes and name.isdecimal() and int(name) < (len(known) or self._classes_seen()):
            return [int(name)]
        if not self.has_classes:
            raise UsageError(
                f"--class {name}: the samples of {self.folder} have no single class, so leave it out. "
                "'dualeval report' finds what a task says of a sample, such as its classes."
            )
        there = [each for each in known if each is not None]
        hint = nearest(name, there) or (f" It has {', '.join(there[:_NAMED])}" if there else "")
        hint += (", ..." if len(there) > _NAMED else ".") if hint.startswith(" It has") else ""
        raise UsageError(
            f"--class {name}: {self.folder} has no such class.{hint} Give a class's name or number."
        )

    def _classes_seen(self) -> int:
        """How many classes there are at least, where nothing names them."""
        read = (each for _, columns in self._windows() for each in (columns[TARGET], columns[PREDICTION]))
        return 1 + max((int(each.max(initial=-1)) for each in read), default=-1)

    def calibration(self) -> list[dict[str, float]]:
        """Accuracy and mean confidence in 15 equal bins of confidence, as of the metric ece; [] without."""
        sums = np.zeros((3, _BINS))
        for _, columns in self._windows() if self.has_confidence and self.judges else ():
            confidence = columns[CONFIDENCE].astype(np.float64)
            there = np.isfinite(confidence)
            bins = np.clip(np.ceil(confidence[there] * _BINS).astype(int) - 1, 0, _BINS - 1)
            for place, weights in enumerate((None, self._is_right(columns)[there], confidence[there])):
                sums[place] += np.bincount(bins, weights, _BINS)
        return [
            {
                "low": place / _BINS,
                "high": (place + 1) / _BINS,
                "count": count,
                "accuracy": right / count,
                "confidence": total / count,
            }
            for place, (count, right, total) in enumerate(sums.T.tolist())
            if count
        ]


def highest(values: npt.NDArray[np.float64], count: int) -> Chosen:
    """The places of the highest values above 0; of equal ones the first."""
    above = np.flatnonzero(values > 0)
    return Chosen(above[np.argsort(-values[above], kind="stable")][:count].tolist(), len(above))


def _by_turns(pairs: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The order in which pairs take turns, the most frequent first: five of each, then five more."""
    _, of_pair, counts = np.unique(pairs, axis=1, return_inverse=True, return_counts=True)
    of_pair = of_pair.reshape(-1)
    before = np.empty(len(of_pair), np.int64)
    # How many of its pair come before each.
    before[np.argsort(of_pair, kind="stable")] = np.concatenate([np.arange(0), *map(np.arange, counts)])
    return np.lexsort((before, of_pair, -counts[of_pair], before // _A_TURN))


def flips_of(comparison: Comparison) -> Flips | None:
    """The samples that changed, by the first metric that is right or wrong of each sample."""
    return next((metric.flips for metric in comparison.metrics.values() if metric.flips is not None), None)
