"""Which rows of a column differ from those of another one: in any bit, or beyond a tolerance."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dualeval.columns import RaggedRows, Rows, values_of


def differing_rows(one: Rows, other: Rows, tolerance: float | None = None) -> npt.NDArray[np.intp]:
    """The places of the rows that differ, rising."""
    if isinstance(one, RaggedRows) and isinstance(other, RaggedRows):
        return _differing_ragged(one, other, tolerance)
    return np.flatnonzero(~_equal_rows(values_of(one), values_of(other), tolerance))


def _differing_ragged(one: RaggedRows, other: RaggedRows, tolerance: float | None) -> npt.NDArray[np.intp]:
    same_length = one.lengths == other.lengths
    of_one, of_other = one[same_length], other[same_length]
    row_of_value = np.repeat(np.flatnonzero(same_length), of_one.lengths)
    wrong = row_of_value[~_equal_rows(of_one.values, of_other.values, tolerance)]
    return np.union1d(np.flatnonzero(~same_length), wrong)


def _equal_rows(
    one: npt.NDArray[Any], other: npt.NDArray[Any], tolerance: float | None
) -> npt.NDArray[np.bool_]:
    if tolerance is None:
        return _same_bits(one, other)
    if one.dtype.kind == "f":
        equal = np.isclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    else:
        equal = np.asarray(one == other)
    return np.asarray(equal.all(axis=tuple(range(1, equal.ndim))))


def _same_bits(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which rows are equal in all their bytes."""
    rows = len(one)
    if not rows:
        return np.ones(0, np.bool_)
    bits = [np.ascontiguousarray(values).reshape(rows, -1).view(np.uint8) for values in (one, other)]
    equal: npt.NDArray[np.bool_] = (bits[0] == bits[1]).all(axis=1)
    return equal
