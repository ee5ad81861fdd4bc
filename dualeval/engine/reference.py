"""Reference: another finished run over the same samples, and how this run's predictions differ from its.

Both runs' rows are read a window at a time, so memory does not grow with the number of samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from dualeval.columns import RaggedRows, Rows, Text, form_of, to_rows, values_of
from dualeval.engine.folder.stored_columns import RowsOfChunks
from dualeval.engine.folder.windows import WINDOW_ROWS, evaluated_of, windows_of
from dualeval.engine.parts import ids_of, texts_of
from dualeval.engine.plan import EvalPlan
from dualeval.engine.rescoring import finished_run
from dualeval.engine.row_differences import differing_rows
from dualeval.engine.stored_rows import StoredRows, Window
from dualeval.errors import DualevalError, UsageError
from dualeval.result import Result
from dualeval.tasks import Dataset, Task

# What a task calls its answer to a sample.
PREDICTION_COLUMNS = ("prediction", "answer")
LOSS = "loss"
_TARGET = "target"
# Of tasks whose targets are no single column: 1 where the answer is right.
_RIGHT = "exact_match"
# Ids that are listed; 'dualeval compare --flips' writes all.
_LISTED = 10
# Options that decide no number, or whose difference the data's fingerprints would show.
_NOT_NAMED = ("workers", "device", "data", "metric", "by", "bins", "keep")


def differing_fingerprints(one: Result | Mapping[str, Any], other: Result) -> str:
    """How two runs' data differ beyond the samples' ids, for a message; nothing where they do not."""
    data, job = (one.data, one.job) if isinstance(one, Result) else (one["data"], one["job"])
    found = []
    for name, said in (("fingerprint", "labels, sizes or texts"), ("contents", "contents")):
        here, there = data.get(name), other.data.get(name)
        # One run may have hashed whole files, the other their ends.
        ways = job.get("data_fingerprint"), other.job.get("data_fingerprint")
        if name == "contents" and (here is None or there is None or ways[0] != ways[1]):
            continue
        if here != there:
            found.append(f"{said} ({str(here)[:8]}, {str(there)[:8]})")
    return " and ".join(found)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A finished run with which another one is compared."""

    # Its folder, absolute.
    folder: Path
    # What its result.json says.
    result: Result
    rows: StoredRows

    @classmethod
    def open(cls, folder: str | Path) -> Reference:
        """Open a run."""
        try:
            result, rows = finished_run(Path(folder))
        except UsageError as error:
            raise UsageError(f"--reference: {error}") from error
        if not rows.names:
            raise UsageError(
                f"--reference {folder}: {rows.path} has no column of a task: nothing can be compared"
            )
        return cls(folder=Path(folder).absolute(), result=result, rows=rows)

    def check(
        self,
        dataset: Dataset,
        count: int,
        columns: Sequence[str],
        facts: Mapping[str, Any],
        step: Callable[[], None] = lambda: None,
    ) -> None:
        """Check, before anything is evaluated, that it is a run over the same samples of the same data."""
        start = 0
        for window in self.rows.windows(self.rows.names[:1], with_ids=True):
            samples = range(start, min(start + len(window.ids), count))
            for place, (here, there) in enumerate(
                zip(ids_of(dataset, samples), window.ids, strict=False), start
            ):
                if here != there:
                    self._refuse_samples(dataset, count, f"sample {place} is {there!r} there, {here!r} here")
            start += len(window.ids)
            step()
        if start != count:
            self._refuse_samples(dataset, count, f"{start:,} samples there, {count:,} here")
        if said := differing_fingerprints(facts, self.result):
            raise UsageError(
                f"--reference {self.folder} has the same ids, but over different data: the fingerprints "
                f"differ in {said}. Evaluate both over the same data, or compare the two runs afterwards: "
                f"'dualeval compare {self.folder} RUN --trust-ids'."
            )
        if not set(columns) & set(self.rows.names):
            raise UsageError(
                f"--reference {self.folder}: no column is in both runs. There: {', '.join(self.rows.names)}; "
                f"here: {', '.join(columns)}."
            )

    def _refuse_samples(self, dataset: Dataset, count: int, said: str) -> None:
        here = set(ids_of(dataset, range(count)))
        there = set(self.rows.whole("id").to_pylist())
        if here == there:
            raise UsageError(
                f"--reference {self.folder} has the same samples in another order: {said}. Both runs need "
                f"one order here; 'dualeval compare {self.folder} RUN' pairs samples by id afterwards."
            )
        raise UsageError(
            f"--reference {self.folder} is a run over other samples: {said}; {len(here & there):,} ids are "
            f"in both, {len(there - here):,} only there, {len(here - there):,} only here. Evaluate both over "
            "the same samples (--data, --limit, or --sample and --seed)."
        )

    def compare(
        self,
        windows: Iterator[Window],
        dataset: Dataset,
        facts: Mapping[str, Any],
        step: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Compare another run's rows with those of this one."""
        found = _Found()
        for own in windows:
            there = self.rows.batch(range(own.start, own.start + len(own.evaluated)))
            found.add(own, there, dataset)
            step()
        return {
            "folder": str(self.folder),
            "metrics_digest": self.result.metrics_digest,
            "fingerprint": self.result.fingerprint,
            "differs_in": self._differs_in(facts),
            **found.to_json(),
        }

    def unreadable(self, error: DualevalError) -> dict[str, Any]:
        """``reference`` of a result where this run could not be read any more at the end."""
        return {
            "folder": str(self.folder),
            "metrics_digest": self.result.metrics_digest,
            "fingerprint": self.result.fingerprint,
            "problem": str(error),
        }

    def _differs_in(self, facts: Mapping[str, Any]) -> dict[str, list[Any]]:
        """By option, its value in this run and in the other one, where they differ."""
        # A tuple of the job is a list in the file.
        there, here = self.result.job, json.loads(json.dumps(facts["job"]))
        found = {
            name: [there[name], here[name]]
            for name in there.keys() & here.keys() - {*_NOT_NAMED}
            if there[name] != here[name]
        }
        weights = self.result.weights.get("fingerprint"), facts["weights"].get("fingerprint")
        if weights[0] != weights[1]:
            found["weights_fingerprint"] = list(weights)
        return dict(sorted(found.items()))


def windows_of_chunks(
    files: Sequence[RowsOfChunks], plan: EvalPlan, task: Task, dataset: Dataset, kept: Sequence[str]
) -> Iterator[Window]:
    """The rows of a run that has just been evaluated, before they are written anywhere."""
    for start, rows in windows_of(files, plan, kept):
        evaluated = evaluated_of(rows)
        yield Window(
            start=start,
            evaluated=evaluated,
            columns={name: rows[name][evaluated] for name in kept},
            ids=[],
            indices=np.empty(0, np.int64),
            texts=texts_of(task, dataset, rows, start),
        )


def windows_of_file(rows: StoredRows, count: int) -> Iterator[Window]:
    """The rows of a finished run."""
    for start in range(0, count, WINDOW_ROWS):
        yield rows.batch(range(start, min(start + WINDOW_ROWS, count)))


@dataclass
class _Difference:
    """What is known of one column that both runs have: of floats, own value less that of the reference."""

    is_float: bool
    rows_differ: int = 0
    first: str | None = None
    finite: int = 0
    total: float = 0.0
    total_absolute: float = 0.0
    largest: float = 0.0
    largest_at: str | None = None
    not_finite: int = 0
    first_not_finite: str | None = None

    def add(self, own: Rows, there: Rows, name: Callable[[int], str]) -> npt.NDArray[np.intp]:
        """Add pairs of rows; returns the places of those that differ in any bit."""
        wrong = differing_rows(own, there)
        if len(wrong):
            self.rows_differ += len(wrong)
            self.first = self.first or name(int(wrong[0]))
        if self.is_float and not isinstance(own, RaggedRows) and not isinstance(there, RaggedRows):
            self._add_floats(own, there, wrong, name)
        return wrong

    def _add_floats(
        self,
        own: npt.NDArray[Any],
        there: npt.NDArray[Any],
        wrong: npt.NDArray[np.intp],
        name: Callable[[int], str],
    ) -> None:
        self.finite += len(own) - len(wrong)
        if not len(wrong):
            return
        one = own[wrong].astype(np.float64).reshape(len(wrong), -1)
        other = there[wrong].astype(np.float64).reshape(len(wrong), -1)
        # NaN beside NaN, an infinity beside the same one: no difference, whatever the bits.
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        with np.errstate(invalid="ignore", over="ignore"):
            differences = np.where(same, 0.0, one - other)
        finite = np.isfinite(differences).all(axis=1)
        self.finite += int(finite.sum())
        if not finite.all():
            self.not_finite += int((~finite).sum())
            self.first_not_finite = self.first_not_finite or name(int(wrong[~finite][0]))
        if not finite.any():
            return
        differences = differences[finite]
        # Of a row of several values the mean, and the largest.
        self.total += float(differences.mean(axis=1).sum())
        self.total_absolute += float(np.abs(differences).mean(axis=1).sum())
        largest = np.abs(differences).max(axis=1)
        at = int(largest.argmax())
        if largest[at] > self.largest:
            self.largest, self.largest_at = float(largest[at]), name(int(wrong[finite][at]))

    def to_json(self) -> dict[str, Any]:
        if not self.is_float:
            return {"rows_differ": self.rows_differ, "first": self.first}
        means = (_quotient(total, self.finite) for total in (self.total, self.total_absolute))
        return {
            "rows_differ": self.rows_differ,
            **dict(zip(("mean", "mean_absolute"), means, strict=True)),
            "largest": self.largest if self.finite else None,
            "largest_at": self.largest_at,
            "not_finite": self.not_finite,
            "first_not_finite": self.first_not_finite,
        }


def _quotient(total: float, count: int) -> float | None:
    return total / count if count and math.isfinite(total) else None


@dataclass
class _Found:
    """What the windows have shown so far."""

    samples: int = 0
    failed_here: int = 0
    failed_there: int = 0
    failed_both: int = 0
    columns: dict[str, _Difference] = field(default_factory=dict)
    not_compared: dict[str, str] = field(default_factory=dict)
    prediction: str | None = None
    changed: int = 0
    first_changed: list[str] = field(default_factory=list)
    knows_right: bool = False
    became_right: int = 0
    became_wrong: int = 0

    def add(self, own: Window, there: Window, dataset: Dataset) -> None:
        both = own.evaluated & there.evaluated
        self.failed_here += int((~own.evaluated & there.evaluated).sum())
        self.failed_there += int((own.evaluated & ~there.evaluated).sum())
        self.failed_both += int((~own.evaluated & ~there.evaluated).sum())
        places = np.flatnonzero(both)
        self.samples += len(places)
        if not len(places):
            return
        pairs = _pairs(own, there, both)
        for name in dict.fromkeys((*own.columns, *own.texts, *there.columns, *there.texts)):
            if name not in pairs:
                self.not_compared[name] = f"only in {'this run' if _has(own, name) else 'the reference'}"

        def name_at(place: int) -> str:
            return dataset.id(own.start + int(places[place]))

        wrong = {}
        for name, pair in pairs.items():
            if isinstance(pair, str):
                self.not_compared[name] = pair
                continue
            one, other = pair
            column = self.columns.setdefault(name, _Difference(is_float=_is_float(one)))
            wrong[name] = column.add(one, other, name_at)
        found = next((name for name in PREDICTION_COLUMNS if name in wrong), None)
        if found is not None:
            self._add_predictions(found, wrong[found], name_at)
            self._add_right(found, pairs)

    def _add_predictions(
        self, column: str, wrong: npt.NDArray[np.intp], name_at: Callable[[int], str]
    ) -> None:
        self.prediction = column
        self.changed += len(wrong)
        room = _LISTED - len(self.first_changed)
        self.first_changed += [name_at(int(place)) for place in wrong[:room]]

    def _add_right(self, prediction: str, pairs: Mapping[str, Any]) -> None:
        """Count the samples that became right or wrong, where the columns say which are right."""
        right = _right(prediction, pairs)
        if right is not None:
            self.knows_right = True
            self.became_right += int((right[0] & ~right[1]).sum())
            self.became_wrong += int((~right[0] & right[1]).sum())

    def to_json(self) -> dict[str, Any]:
        others = {name: column.to_json() for name, column in self.columns.items() if name != LOSS}
        agrees = self.prediction is not None and self.samples > 0
        right = self.knows_right
        return {
            "samples": self.samples,
            "failed": {"here": self.failed_here, "there": self.failed_there, "both": self.failed_both},
            "same_bits": not any(column.rows_differ for column in self.columns.values()),
            "prediction": self.prediction,
            "agreement": (self.samples - self.changed) / self.samples if agrees else None,
            "changed": self.changed if agrees else None,
            "became_right": self.became_right if right else None,
            "became_wrong": self.became_wrong if right else None,
            "first_changed": self.first_changed,
            "loss": self.columns[LOSS].to_json() if LOSS in self.columns else None,
            "columns": others,
            "not_compared": self.not_compared,
        }


def _has(window: Window, name: str) -> bool:
    return name in window.columns or name in window.texts


def _pairs(own: Window, there: Window, both: npt.NDArray[np.bool_]) -> dict[str, tuple[Rows, Rows] | str]:
    """The rows of each column that both have, or why they cannot be compared."""
    found: dict[str, tuple[Rows, Rows] | str] = {}
    for name in own.columns:
        if name in there.columns:
            rows = (window.columns[name][both[window.evaluated]] for window in (own, there))
            found[name] = _of_one_kind(*rows)
    chosen = np.flatnonzero(both).tolist()
    for name in own.texts:
        if name in there.texts:
            one, other = (_texts([window.texts[name][at] for at in chosen]) for window in (own, there))
            found[name] = one, other
    return found


def _texts(texts: Sequence[str | None]) -> Rows:
    # No text is not the empty one.
    return to_rows(Text("\0" if text is None else text for text in texts))


def _of_one_kind(one: Rows, other: Rows) -> tuple[Rows, Rows] | str:
    """Two columns as they can be compared, or why they cannot."""
    if form_of(one) != form_of(other):
        return f"{form_of(one)} in this run, {form_of(other)} in the reference"
    if isinstance(one, RaggedRows) or isinstance(other, RaggedRows):
        assert isinstance(one, RaggedRows)
        assert isinstance(other, RaggedRows)
        if one.values.dtype != other.values.dtype or one.values.shape[1:] != other.values.shape[1:]:
            return f"of {one.values.dtype} in this run, of {other.values.dtype} in the reference"
        return one, other
    if one.shape != other.shape:
        return f"rows of shape {one.shape[1:]} in this run, {other.shape[1:]} in the reference"
    if one.dtype == other.dtype:
        return one, other
    for kinds, common in (("f", np.float64), ("iu", np.int64)):
        if one.dtype.kind in kinds and other.dtype.kind in kinds:
            return one.astype(common), other.astype(common)
    return f"{one.dtype} in this run, {other.dtype} in the reference"


def _is_float(rows: Rows) -> bool:
    return not isinstance(rows, RaggedRows) and rows.dtype.kind == "f"


def _right(
    prediction: str, pairs: Mapping[str, tuple[Rows, Rows] | str]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]] | None:
    """Which predictions are right in the other run and in the reference; None where nobody knows."""
    answers, targets, right = pairs.get(prediction), pairs.get(_TARGET), pairs.get(_RIGHT)
    if isinstance(targets, tuple) and isinstance(answers, tuple) and _are_classes(targets, answers):
        one, other = (np.asarray(own == target) for own, target in zip(answers, targets, strict=True))
        return one, other
    if isinstance(right, tuple) and all(map(_are_numbers, right)):
        one, other = (np.asarray(values_of(rows) == 1) for rows in right)
        return one, other
    return None


def _are_classes(*pairs: tuple[Rows, Rows]) -> bool:
    return all(_are_numbers(rows) and rows.dtype.kind in "iub" for pair in pairs for rows in pair)


def _are_numbers(rows: Rows) -> TypeGuard[npt.NDArray[Any]]:
    return isinstance(rows, np.ndarray) and rows.ndim == 1
