"""Scores and best thresholds of files of v2.0, against their definitions in plain words."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualeval.metrics import Measured
from dualeval.metrics.intervals import wilson_interval
from dualeval.metrics.squad import F1, AnswerCounts, BestThresholds, ExactMatch
from tests.measuring import measure, same_bits
from tests.metrics.test_squad_metrics import many_questions, scored, texts


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question of v2.0: gold answers, the best span, the answer given, how little an answer is believed."""

    gold: list[str]
    span: str
    answer: str
    odds: float


def plain_words(text: str) -> list[str]:
    kept = "".join(character for character in text.lower() if character not in set(string.punctuation))
    # What lies between word characters at odd places; an article is a whole run of word characters.
    runs = re.split(r"(\W+)", kept)
    return "".join(" " if run in {"a", "an", "the"} else run for run in runs).split()


def plain_scores(answer: str, gold: list[str]) -> tuple[int, Fraction]:
    rights = [plain_words(text) for text in gold if plain_words(text)] or [[]]
    words = plain_words(answer)
    f1s = []
    for right in rights:
        left = list(right)
        shared = 0
        for word in words:
            if word in left:
                left.remove(word)
                shared += 1
        if not words or not right:
            f1s.append(1.0 if not words and not right else 0.0)
        elif not shared:
            f1s.append(0.0)
        else:
            precision, recall = shared / len(words), shared / len(right)
            f1s.append((2 * precision * recall) / (precision + recall))
    return int(words in rights), Fraction(max(f1s))


def plain_mean(scores: Sequence[Fraction | int]) -> float | None:
    return 100.0 * float(sum(map(Fraction, scores), Fraction())) / len(scores) if scores else None


def plain_threshold(questions: Sequence[Asked], scores: Sequence[Fraction | int]) -> tuple[float, float]:
    """The best score on the way from no answer at all to all answers, and the odds of the last one given."""
    running = Fraction(sum(1 for asked in questions if not asked.gold))
    best, threshold = running, 0.0
    for asked, score in sorted(zip(questions, scores, strict=True), key=lambda pair: pair[0].odds):
        if asked.gold:
            running += score
        elif asked.span:
            running -= 1
        if running > best:
            best, threshold = running, asked.odds
    return 100.0 * float(best) / len(questions), threshold


def columns_of(questions: Sequence[Asked]) -> dict[str, Tensor]:
    given_scores = scored([(asked.answer, asked.gold) for asked in questions], unanswerable=True)
    spans = scored([(asked.span, asked.gold) for asked in questions], unanswerable=True)
    return {
        **given_scores,
        **{f"span_{name}": column for name, column in spans.items()},
        "has_answer": torch.tensor([bool(asked.gold) for asked in questions], dtype=torch.bool),
        "null_odds": torch.tensor([asked.odds for asked in questions], dtype=torch.float32),
        "span_is_empty": torch.tensor([not asked.span for asked in questions], dtype=torch.bool),
    }


def thresholds(questions: Sequence[Asked]) -> dict[str, Any]:
    metric = BestThresholds()
    columns = columns_of(questions)
    return metric.compute({name: columns[name].numpy() for name in metric.columns}).values


@st.composite
def asked(draw: st.DrawFn) -> list[Asked]:
    """Questions, their null_odds with ties, and float32."""
    kinds = draw(st.sampled_from([(True,), (False,), (True, False), (True, False)]))
    odds = st.sampled_from([-2.5, -1.0, 0.0, -0.0, float(np.float32(0.1)), 0.75, 3.0])
    short = st.one_of(st.sampled_from(["", "the", "cat", "new cat", "new york", "the cat."]), texts)
    threshold = draw(odds)
    found = []
    for _ in range(draw(st.integers(1, 12))):
        gold = draw(st.lists(short, min_size=1, max_size=3)) if draw(st.sampled_from(kinds)) else []
        span, null_odds = draw(short), draw(odds)
        found.append(
            Asked(gold=gold, span=span, answer="" if null_odds > threshold else span, odds=null_odds)
        )
    return found


@settings(max_examples=150, deadline=None)
@given(asked(), st.integers(0, 1000))
def test_the_second_kind_of_file_scores_as_defined(questions: list[Asked], seed: int) -> None:
    columns = columns_of(questions)
    plain = [plain_scores(one.answer, one.gold) for one in questions]
    assert columns["exact_match"].tolist() == [bool(exact) for exact, _ in plain]
    assert columns["f1"].tolist() == [float(f1) for _, f1 in plain]
    expected: dict[str, float | None] = {}
    for part, chosen in (
        ("", plain),
        ("HasAns_", [scores for scores, one in zip(plain, questions, strict=True) if one.gold]),
        ("NoAns_", [scores for scores, one in zip(plain, questions, strict=True) if not one.gold]),
    ):
        expected[f"{part}exact" if part else "exact_match"] = plain_mean([exact for exact, _ in chosen])
        expected[f"{part}f1"] = plain_mean([f1 for _, f1 in chosen])
    found = measure(ExactMatch(parts=True), columns, seed).values
    found = found | measure(F1(parts=True), columns, seed).values
    assert found == expected
    assert measure(AnswerCounts(), columns, seed).values == {
        "HasAns_total": sum(1 for one in questions if one.gold),
        "NoAns_total": sum(1 for one in questions if not one.gold),
    }


@settings(max_examples=200, deadline=None)
@given(asked())
def test_best_thresholds_as_defined(questions: list[Asked]) -> None:
    plain = [plain_scores(one.span, one.gold) for one in questions]
    best_exact, at_exact = plain_threshold(questions, [exact for exact, _ in plain])
    best_f1, at_f1 = plain_threshold(questions, [f1 for _, f1 in plain])
    assert thresholds(questions) == {
        "best_exact": best_exact,
        "best_exact_thresh": at_exact,
        "best_f1": best_f1,
        "best_f1_thresh": at_f1,
    }


def test_best_thresholds_of_many_are_exact() -> None:
    random = Random(3)
    questions = [
        Asked(
            gold=gold if random.random() < 0.6 else [],
            span=answer,
            answer=answer,
            odds=random.randint(-200, 200) / 8,
        )
        for answer, gold in many_questions(2_000, seed=3)
    ]
    best, threshold = plain_threshold(questions, [plain_scores(one.span, one.gold)[1] for one in questions])
    found = thresholds(questions)
    assert same_bits(found["best_f1"], best)
    assert same_bits(found["best_f1_thresh"], threshold)


def right(odds: float) -> Asked:
    return Asked(gold=["cat"], span="cat", answer="cat", odds=odds)


def wrong(odds: float) -> Asked:
    return Asked(gold=["cat"], span="dog", answer="dog", odds=odds)


def needless(odds: float, span: str = "dog") -> Asked:
    return Asked(gold=[], span=span, answer=span, odds=odds)


def test_questions_of_equal_odds_stay_in_their_order() -> None:
    # So many that an unstable sort would mix them: of each odds first the right answers, then the needless.
    odds = [float(place % 3 + 1) for place in range(300)]
    found = thresholds([*map(right, odds), *map(needless, odds)])
    assert (found["best_exact"], found["best_exact_thresh"]) == (100.0 * 400 / 600, 1.0)


def test_without_samples_there_is_no_value() -> None:
    columns = columns_of([])
    for metric, keys in (
        (ExactMatch(parts=True), ("exact_match", "HasAns_exact", "NoAns_exact")),
        (F1(parts=True), ("f1", "HasAns_f1", "NoAns_f1")),
    ):
        nothing = Measured(
            values=dict.fromkeys(keys),
            units=dict.fromkeys(keys, "percent"),
            directions=dict.fromkeys(keys, "higher"),
        )
        assert measure(metric, columns) == nothing
    columns = columns_of([right(0.0), wrong(0.0)])
    assert measure(ExactMatch(parts=True), columns).values == {
        "exact_match": 50.0,
        "HasAns_exact": 50.0,
        "NoAns_exact": None,
    }
    assert measure(F1(parts=True), columns).values == {"f1": 50.0, "HasAns_f1": 50.0, "NoAns_f1": None}
    assert measure(AnswerCounts(), columns).values == {"HasAns_total": 2, "NoAns_total": 0}


def test_intervals() -> None:
    columns = columns_of([right(0.0)] * 3 + [wrong(0.0)] * 2 + [needless(0.0, "")] * 4 + [needless(0.0)])
    intervals = measure(ExactMatch(parts=True), columns).intervals
    counts = {"exact_match": (7, 10), "HasAns_exact": (3, 5), "NoAns_exact": (4, 5)}
    for key, (count, samples) in counts.items():
        assert intervals[key] == pytest.approx([100 * end for end in wilson_interval(count, samples)])
    assert intervals.keys() == counts.keys()
    # Where each F1 is 0 or 1 too, the two have one interval, to the bit.
    of_f1 = measure(F1(parts=True), columns).intervals
    assert list(of_f1.values()) == list(intervals.values())
    all_right = measure(F1(parts=False), columns_of([right(0.0)] * 5)).intervals["f1"]
    assert all_right == pytest.approx((56.55, 100.0), abs=0.01)
