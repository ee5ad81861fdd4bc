"""Rows beside other rows: kinds that can be compared, and values that are equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow
import pytest

from dualeval.columns import RaggedRows
from dualeval.engine.row_comparison import Difference, as_one_kind, right, same_entries, text_rows

NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([1.0, NAN, 2.0, NAN], [1.0, NAN, 3.0, 1.0], [True, True, False, False]),
        (["a", None, "b", None], ["a", None, "c", "d"], [True, True, False, False]),
        ([1, 2], ["1", "2"], [False, False]),
        ([True, False], [True, True], [True, False]),
        ([1, 2], [1.0, 2.5], [True, False]),
    ],
)
def test_equal_entries(one: list[Any], other: list[Any], same: list[bool]) -> None:
    assert same_entries(pyarrow.array(one), pyarrow.array(other)).tolist() == same


def test_kinds_that_can_be_compared() -> None:
    single, double = np.zeros((2, 3), np.float32), np.zeros((2, 3))
    pair = as_one_kind(single, double)
    assert pair is not None
    assert {rows.dtype for rows in map(np.asarray, pair)} == {np.dtype(np.float64)}
    assert as_one_kind(single, double[:, :2]) is None
    assert as_one_kind(single, single.astype(np.int32)) is None
    ragged = RaggedRows(np.zeros(2, np.float32), np.array([0, 2]))
    assert as_one_kind(ragged, RaggedRows(np.zeros(2), np.array([0, 2]))) is None


def test_no_text_is_not_the_empty_one() -> None:
    difference = Difference.of(text_rows([""]))
    assert difference.add(text_rows(["", "a"]), text_rows([None, "a"]), str).tolist() == [0]
    assert difference.to_json() == {"rows_differ": 1, "first": "0"}


def test_which_predictions_are_right() -> None:
    columns = {
        "prediction": np.array([1, 2]),
        "target": np.array([1, 3]),
        "exact_match": np.array([0.0, 1.0]),
    }
    found = right(columns, "prediction")
    assert found is not None
    assert found.tolist() == [True, False]
    found = right(columns, "answer")
    assert found is not None
    assert found.tolist() == [False, True]
    assert right({"prediction": np.array([0.5])}, "prediction") is None
