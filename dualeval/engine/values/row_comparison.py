"""Comparison of a column's rows from two runs, batches or machines: which differ, how far, which are right.

Replay, ``--reference``, the diagnosis of batch shapes and ``dualeval compare`` all use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from dualeval.columns.ragged import NumpyRows, RaggedRows, Text, kind_of, to_rows, values_of

# Names that tasks use for the column of their answers.
PREDICTION_COLUMNS = ("prediction", "answer")
_TARGET = "target"
# A column of tasks whose targets are not a single column: 1 if the answer is right.
_RIGHT = "exact_match"


def as_one_kind(one: NumpyRows, other: NumpyRows) -> tuple[NumpyRows, NumpyRows] | None:
    """Two columns, converted so that they can be compared; None if they cannot be."""
    (form, dtype, shape), (other_form, other_dtype, other_shape) = kind_of(one), kind_of(other)
    if (form, shape) != (other_form, other_shape):
        return None
    if dtype == other_dtype:
        return one, other
    if not isinstance(one, RaggedRows) and not isinstance(other, RaggedRows):
        for kinds, common in (("f", np.float64), ("iu", np.int64)):
            if dtype.kind in kinds and other_dtype.kind in kinds:
                return one.astype(common), other.astype(common)
    return None


def text_rows(texts: Iterable[str | None]) -> NumpyRows:
    """Texts as rows; None differs from the empty text."""
    return to_rows(Text("\0" if text is None else text for text in texts))


def differing_rows(one: NumpyRows, other: NumpyRows, tolerance: float | None = None) -> npt.NDArray[np.intp]:
    """The positions of the rows that differ in any bit, or by more than a tolerance, in ascending order."""
    if not isinstance(one, RaggedRows) or not isinstance(other, RaggedRows):
        return np.flatnonzero(~_equal_rows(values_of(one), values_of(other), tolerance))
    same_length = one.lengths == other.lengths
    of_one, of_other = one[same_length], other[same_length]
    row_of_value = np.repeat(np.flatnonzero(same_length), of_one.lengths)
    wrong = row_of_value[~_equal_rows(of_one.values, of_other.values, tolerance)]
    return np.union1d(np.flatnonzero(~same_length), wrong)


def _equal_rows(
    one: npt.NDArray[Any], other: npt.NDArray[Any], tolerance: float | None
) -> npt.NDArray[np.bool_]:
    if not len(one):
        return np.ones(0, np.bool_)
    if tolerance is None:
        one, other = (
            np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8) for rows in (one, other)
        )
    if tolerance is None or one.dtype.kind != "f":
        equal = np.asarray(one == other)
    else:
        equal = np.isclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    return np.asarray(equal.all(axis=tuple(range(1, equal.ndim))))


def same_entries(one: Any, other: Any) -> npt.NDArray[np.bool_]:
    """Which entries of two ``pyarrow.Array`` have equal values; null equals null, and NaN equals NaN."""
    import pyarrow.compute

    try:
        equal = pyarrow.compute.equal(one, other).fill_null(False)
    except pyarrow.ArrowNotImplementedError:  # a text and a number
        return np.zeros(len(one), np.bool_)
    absent = pyarrow.compute.and_(*(array.is_null(nan_is_null=True) for array in (one, other)))
    return np.asarray(pyarrow.compute.or_(equal, absent).to_numpy(zero_copy_only=False))


@dataclass
class Difference:
    """The differences in one column; for floats also their sizes, as the one value less the other."""

    is_float: bool
    rows_differ: int = 0
    first: str | None = None
    # Rows of floats whose difference is finite, including equal rows.
    finite: int = 0
    total: float = 0.0
    total_absolute: float = 0.0
    largest: float = 0.0
    largest_at: str | None = None
    not_finite: int = 0
    first_not_finite: str | None = None

    @classmethod
    def of(cls, rows: NumpyRows) -> Difference:
        """An empty one for a column of this kind."""
        form, dtype, _ = kind_of(rows)
        return cls(is_float=form == "plain" and dtype.kind == "f")

    def add(self, here: NumpyRows, there: NumpyRows, name: Callable[[int], str]) -> npt.NDArray[np.intp]:
        """Add pairs of rows; returns the positions of those that differ in any bit."""
        wrong = differing_rows(here, there)
        if self.is_float:
            self.finite += len(here) - len(wrong)
        if len(wrong):
            self.rows_differ += len(wrong)
            self.first = self.first or name(int(wrong[0]))
            self.measure(here[wrong], there[wrong], lambda row: name(int(wrong[row])))
        return wrong

    def measure(self, here: NumpyRows, there: NumpyRows, name: Callable[[int], str]) -> None:
        """Add the sizes of the differences between rows that differ, if the column holds floats."""
        if not self.is_float:
            return
        one, other = (values_of(rows).astype(np.float64).reshape(len(rows), -1) for rows in (here, there))
        # Two NaNs, or two equal infinities, are no difference, whatever their bits.
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.where(same, 0.0, one - other)
        finite = np.asarray(np.isfinite(apart).all(axis=1))
        self.finite += int(finite.sum())
        if not finite.all():
            self.not_finite += int((~finite).sum())
            self.first_not_finite = self.first_not_finite or name(int(finite.argmin()))
        apart = np.where(finite[:, None], apart, 0.0)
        # For a row of several values, their mean and their largest.
        self.total += float(apart.mean(axis=1).sum())
        self.total_absolute += float(np.abs(apart).mean(axis=1).sum())
        largest = np.abs(apart).max(axis=1)
        at = int(largest.argmax())
        if largest[at] > self.largest:
            self.largest, self.largest_at = float(largest[at]), name(at)

    def to_json(self) -> dict[str, Any]:
        """As result.json has it."""
        if not self.is_float:
            return {"rows_differ": self.rows_differ, "first": self.first}
        known = self.finite > 0
        return {
            "rows_differ": self.rows_differ,
            "mean": self.total / self.finite if known and math.isfinite(self.total) else None,
            "mean_absolute": (
                self.total_absolute / self.finite if known and math.isfinite(self.total_absolute) else None
            ),
            "largest": self.largest if known else None,
            "largest_at": self.largest_at,
            "not_finite": self.not_finite,
            "first_not_finite": self.first_not_finite,
        }


def right(columns: Mapping[str, NumpyRows], prediction: str) -> npt.NDArray[np.bool_] | None:
    """Which predictions are right; None if no column tells."""
    answers, targets, exact = (columns.get(name) for name in (prediction, _TARGET, _RIGHT))
    if _are_numbers(answers, "iub") and _are_numbers(targets, "iub"):
        return np.asarray(answers == targets)
    return np.asarray(exact == 1) if _are_numbers(exact) else None


def _are_numbers(rows: NumpyRows | None, kinds: str = "iubf") -> TypeGuard[npt.NDArray[Any]]:
    return isinstance(rows, np.ndarray) and rows.ndim == 1 and rows.dtype.kind in kinds
