"""The best answers of windows and of questions, against all pairs in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualeval.metrics.spans import Spans, best_of_windows, best_spans, columns_of

LARGEST = 3.4028234663852886e38  # of the float32 numbers
TINY = 2.0**-149
# Few, so that many are equal. Of the large ones, sums that differ are equal as float32, and some overflow.
VALUES = [-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 1.0 + 2.0**-23, 2.0**24, -(2.0**24), TINY, LARGEST, -LARGEST]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Answer(NamedTuple):
    """What ``Spans`` holds of a window or a question."""

    answered: bool
    start: int
    end: int
    score: float
    null_score: float
    nan: bool
    inf: bool


@dataclass(frozen=True, kw_only=True)
class Window:
    """One window as plain Python has it."""

    starts: list[float]  # its tokens' start logits
    ends: list[float]  # their end logits
    spans: list[tuple[int, int]]  # the characters of each token; (-1, -1) where it is not the context's
    null: int  # the place for no answer


def sum_of(one: float, other: float) -> float:
    """As float32."""
    with np.errstate(all="ignore"):
        return float(np.float32(one) + np.float32(other))


def best_by_hand(window: Window, n_best: int, most_tokens: int) -> Answer:
    logits = [*window.starts, *window.ends]
    null_score = sum_of(window.starts[window.null], window.ends[window.null])
    inf = any(map(math.isinf, logits))
    if any(map(math.isnan, logits)):
        return Answer(False, -1, -1, -math.inf, null_score, True, inf)
    context = [place for place, (start, _) in enumerate(window.spans) if start >= 0]
    firsts = sorted(context, key=lambda place: (-window.starts[place], place))[:n_best]
    lasts = sorted(context, key=lambda place: (-window.ends[place], place))[:n_best]
    pairs = []
    for first in firsts:
        for last in lasts:
            start, end = window.spans[first][0], window.spans[last][1]
            score = sum_of(window.starts[first], window.ends[last])
            if first <= last < first + most_tokens and start < end and score > -math.inf:
                pairs.append(
                    (-score, first, last - first, Answer(True, start, end, score, null_score, False, inf))
                )
    if not pairs:
        return Answer(False, -1, -1, -math.inf, null_score, False, inf)
    return min(pairs, key=lambda pair: pair[:3])[3]


def answers_of(spans: Spans) -> list[Answer]:
    whole, real = torch.int32, torch.float32
    types = (torch.bool, whole, whole, real, real, torch.bool, torch.bool)
    assert tuple(getattr(spans, name).dtype for name in Answer._fields) == types
    columns = [getattr(spans, name).tolist() for name in Answer._fields]
    return [Answer(*values) for values in zip(*columns, strict=True)]


def assert_same(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Equal, NaN to NaN; the sign of a zero is no part of it."""
    np.testing.assert_array_equal(np.array(found, dtype=np.float64), np.array(expected, dtype=np.float64))


# Random windows


@st.composite
def logits(draw: st.DrawFn, count: int, dtype: torch.dtype, odd: list[float]) -> list[float]:
    """So many logits as this dtype has them."""
    values = draw(st.lists(st.sampled_from(VALUES + odd), min_size=count, max_size=count))
    found: list[float] = torch.tensor(values, dtype=torch.float32).to(dtype).tolist()
    return found


@st.composite
def any_windows(draw: st.DrawFn, dtype: torch.dtype, most: int) -> list[Window]:
    # With an infinite or a NaN logit in every window little else would be tried.
    odd = draw(st.sampled_from([[], [], [math.inf, -math.inf], [-math.inf], [math.inf, math.nan]]))
    span = st.tuples(st.integers(0, 9), st.integers(0, 2)).map(lambda pair: (pair[0], sum(pair)))
    windows = []
    for _ in range(draw(st.integers(1, most))):
        count = draw(st.integers(1, 9))
        windows.append(
            Window(
                starts=draw(logits(count, dtype, odd)),
                ends=draw(logits(count, dtype, odd)),
                spans=draw(
                    st.lists(st.one_of(span, span, st.just((-1, -1))), min_size=count, max_size=count)
                ),
                null=draw(st.integers(0, count - 1)),
            )
        )
    return windows


def block_of(
    windows: Sequence[Window],
    dtype: torch.dtype,
    *,
    more: int = 0,
    left: bool = False,
    wild: Sequence[float] = (0.0,),
) -> dict[str, Any]:
    """Windows as ``best_spans`` takes them, padded to the longest and ``more``, with wild logits there."""
    width = max(len(window.starts) for window in windows) + more

    def padded(values: Sequence[Any], fill: Callable[[int], Any]) -> list[Any]:
        around = [fill(place) for place in range(width - len(values))]
        return [*around, *values] if left else [*values, *around]

    def of_wild(place: int) -> float:
        return wild[place % len(wild)]

    tensors: dict[str, Tensor] = {
        "start_logits": torch.tensor([padded(window.starts, of_wild) for window in windows]).to(dtype),
        "end_logits": torch.tensor([padded(window.ends, of_wild) for window in windows]).to(dtype),
        "mask": torch.tensor([padded([1] * len(window.starts), lambda _: 0) for window in windows]),
        "characters": torch.tensor(
            [padded(window.spans, lambda _: (-1, -1)) for window in windows], dtype=torch.int32
        ),
        "null": torch.tensor(
            [window.null + (width - len(window.starts) if left else 0) for window in windows]
        ),
    }
    return tensors


WILD = st.lists(
    st.sampled_from([math.nan, -math.nan, math.inf, -math.inf, 9e9, -9e9, 0.0]), min_size=1, max_size=4
)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=120, deadline=None)
@given(data=st.data(), n_best=st.integers(1, 6), most_tokens=st.integers(1, 8))
def test_best_spans_of_any_windows_are_those_by_hand(
    dtype: torch.dtype, data: st.DataObject, n_best: int, most_tokens: int
) -> None:
    windows = data.draw(any_windows(dtype, 4))
    block = block_of(
        windows, dtype, more=data.draw(st.integers(0, 3)), left=data.draw(st.booleans()), wild=data.draw(WILD)
    )
    before = {name: value.clone() for name, value in block.items()}
    found = best_spans(**block, n_best=n_best, most_tokens=most_tokens)
    assert_same(answers_of(found), [best_by_hand(window, n_best, most_tokens) for window in windows])
    for name, value in before.items():
        torch.testing.assert_close(block[name], value, rtol=0, atol=0, equal_nan=True)


# -- questions with any number of windows ----------------------------------------------------------------


def best_of_windows_by_hand(windows: Sequence[Answer]) -> Answer:
    nulls = [window.null_score for window in windows]
    null_score = math.nan if any(map(math.isnan, nulls)) else min(nulls, default=math.inf)
    nan = any(window.nan for window in windows)
    inf = any(window.inf for window in windows)
    found = [window for window in windows if window.answered]
    if nan or not found:
        return Answer(False, -1, -1, -math.inf, null_score, nan, inf)
    best = max(found, key=lambda window: window.score)  # the first of equal ones
    return Answer(True, best.start, best.end, best.score, null_score, False, inf)


def same_bits(one: Spans, other: Spans) -> bool:
    """Whether all is equal, NaN to NaN, dtypes too."""
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(Spans)]
    return all(
        a.dtype == b.dtype and np.array_equal(a.numpy(), b.numpy(), equal_nan=a.is_floating_point())
        for a, b in pairs
    )


@settings(max_examples=120, deadline=None)
@given(data=st.data(), n_best=st.integers(1, 6), most_tokens=st.integers(1, 8))
def test_best_spans_do_not_depend_on_how_windows_are_grouped(
    data: st.DataObject, n_best: int, most_tokens: int
) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    windows = data.draw(any_windows(dtype, 8))
    numbers = list(range(len(windows)))
    # Questions: consecutive windows, and some questions without any.
    cuts = sorted(data.draw(st.lists(st.integers(0, len(windows)), max_size=4)))
    questions = [numbers[a:b] for a, b in zip([0, *cuts], [*cuts, len(windows)], strict=True)]

    def arranged() -> Spans:
        order = data.draw(st.permutations(numbers))
        sizes = data.draw(st.sets(st.integers(1, len(windows))))
        bounds = [0, *sorted({*sizes, len(windows)})]
        groups = [order[a:b] for a, b in pairwise(bounds)]
        width = max(map(len, questions)) + data.draw(st.integers(0, 1))
        places = [
            [order.index(number) for number in question] + [-1] * (width - len(question))
            for question in questions
        ]
        left, wild = data.draw(st.booleans()), data.draw(WILD)
        parts = [
            best_spans(
                **block_of(
                    [windows[number] for number in group],
                    dtype,
                    more=data.draw(st.integers(0, 3)),
                    left=left,
                    wild=wild,
                ),
                n_best=n_best,
                most_tokens=most_tokens,
            )
            for group in groups
        ]
        return best_of_windows(parts, torch.tensor(places))

    found = arranged()
    by_hand = [best_by_hand(window, n_best, most_tokens) for window in windows]
    expected = [best_of_windows_by_hand([by_hand[number] for number in question]) for question in questions]
    assert_same(answers_of(found), expected)
    assert same_bits(arranged(), found)
    assert_columns(found)


def assert_columns(spans: Spans) -> None:
    columns = columns_of(spans)
    assert columns.keys() == {"start", "end", "score", "null_odds", "nan_logits", "inf_logits"}
    assert columns["null_odds"].dtype == torch.float32
    odds = columns["null_odds"].tolist()
    for answer, value in zip(answers_of(spans), odds, strict=True):
        assert math.isfinite(value)
        exact = sum_of(answer.null_score, -answer.score)
        if not answer.answered:
            assert value == LARGEST
        elif not math.isnan(exact):
            assert value == min(max(exact, -LARGEST), LARGEST)
    for name, value in (("nan_logits", spans.nan), ("inf_logits", spans.inf), ("score", spans.score)):
        assert torch.equal(columns[name], value)
    assert torch.equal(columns["start"], spans.start) and torch.equal(columns["end"], spans.end)
