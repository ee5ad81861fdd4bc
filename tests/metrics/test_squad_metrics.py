"""Exact match, F1, work and best thresholds of answers, against the official script and definitions."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualeval.metrics import Measured
from dualeval.metrics.intervals import wilson_interval
from dualeval.metrics.squad import (
    F1,
    AnswerCounts,
    BestThresholds,
    ExactMatch,
    WindowWork,
    normalize_answer,
    plain_text,
    score_answer,
)
from dualeval.options.choices import IGNORED
from tests.vehicles import questions as real
from tests.vehicles.measuring import measure, same_bits

# Answers and gold answers that are not made of the pieces below.
HARD: list[tuple[str, list[str]]] = [
    ("wind tunnel", ["a tunnel", "tunnel", "an early wind tunnel"]),
    ("theatre anthem a-team", ["atre them team", "theatre anthem ateam"]),
    ("the—cat", ["—cat", "cat"]),
    ("t.h.e cat", ["cat"]),
    ("a\u0301 cat", ["\u00e1 cat", "cat"]),
    ("Diyarbakır", ["DIYARBAKIR", "DİYARBAKIR", "diyarbakir"]),
    ("İstanbul", ["istanbul", "i\u0307stanbul"]),
    ("STRASSE", ["Straße", "straẞe"]),
    ("to be or not to be", ["to be to be to", "be be be"]),
    ("$5", ["5", "€5"]),
    ("\tone\t two\r\n three", ["one two three"]),
    ("one\u2009two\u3000three", ["one two three"]),
    ("one\x1ctwo\x85three", ["one two three"]),
    ("the_cat", ["thecat", "cat"]),
    ("Zahm's brother", ["Zahms brother", "Zahm s brother"]),
]
# Pieces of texts, in which much is equal once it is normalised.
PIECES = (
    *(
        *("cat", "Cat", "dog", "york", "new", "the", "The", "a", "an", "AN", "1,000", "1000", "１", "é"),
        "e\u0301",
    ),
    *("ı", "İ", "I", "ß", " ", " ", " ", " ", "\t", "\u00a0", "\u200b", "\x1c", "-", "—", ".", ",", "'", "“"),
)
texts = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


def scored(
    questions: Sequence[tuple[str, Sequence[str]]], *, unanswerable: bool = False
) -> dict[str, Tensor]:
    """The columns of answers and their gold answers."""
    scores = [score_answer(answer, gold, unanswerable=unanswerable) for answer, gold in questions]
    return {
        "exact_match": torch.tensor([exact for exact, _ in scores], dtype=torch.bool),
        "f1": torch.tensor([f1 for _, f1 in scores], dtype=torch.float64),
    }


@pytest.fixture(scope="module")
def official() -> ModuleType:
    """The official script of v1.1, as a package of the Allen Institute holds it."""
    return real.official_script()


def assert_scores_are_the_official_ones(official: ModuleType, answer: str, gold: Sequence[str]) -> None:
    exact, f1 = score_answer(answer, gold, unanswerable=False)
    best = official.metric_max_over_ground_truths
    assert exact is best(official.exact_match_score, answer, gold)
    # The script's int 0 where no word is shared.
    assert same_bits(f1, float(best(official.f1_score, answer, gold)))


def as_dataset(questions: Sequence[tuple[str, Sequence[str]]]) -> list[dict[str, Any]]:
    """Gold answers as the script's ``evaluate`` wants them; ids are the places."""
    entries = [
        {"id": str(place), "answers": [{"text": text} for text in gold]}
        for place, (_, gold) in enumerate(questions)
    ]
    return [{"paragraphs": [{"qas": entries[:2]}, {"qas": entries[2:]}]}]


def test_hard_cases_score_as_by_the_official_script(official: ModuleType) -> None:
    for answer, gold in HARD:
        for text in (answer, *gold):
            assert normalize_answer(text) == official.normalize_answer(text)
        assert_scores_are_the_official_ones(official, answer, gold)


@settings(max_examples=200, deadline=None)
@given(texts, st.lists(texts, min_size=1, max_size=3))
def test_any_texts_score_as_by_the_official_script(
    official: ModuleType, answer: str, gold: list[str]
) -> None:
    for text in (answer, *gold):
        assert normalize_answer(text) == official.normalize_answer(text)
    assert_scores_are_the_official_ones(official, answer, gold)


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_is_normalised_as_by_the_official_script(official: ModuleType, text: str) -> None:
    assert normalize_answer(text) == official.normalize_answer(text)


def assert_sets_score_alike(
    official: ModuleType, questions: Sequence[tuple[str, Sequence[str]]], seed: int = 0
) -> None:
    columns = scored(questions)
    exact = measure(ExactMatch(parts=False), columns, seed)
    f1 = measure(F1(parts=False), columns, seed)
    given_answers = {str(place): answer for place, (answer, _) in enumerate(questions)}
    expected = official.evaluate(as_dataset(questions), given_answers)
    assert exact.values == {"exact_match": expected["exact_match"]}
    by_script = [
        float(official.metric_max_over_ground_truths(official.f1_score, answer, gold))
        for answer, gold in questions
    ]
    assert same_bits(f1.values["f1"], 100 * math.fsum(by_script) / len(questions))
    assert f1.values["f1"] == pytest.approx(expected["f1"], abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(texts, st.lists(texts, min_size=1, max_size=3)), min_size=1, max_size=12),
    st.integers(0, 1000),
)
def test_any_set_scores_as_by_the_official_script(
    official: ModuleType, questions: list[tuple[str, list[str]]], seed: int
) -> None:
    assert_sets_score_alike(official, questions, seed)


def many_questions(count: int, seed: int) -> list[tuple[str, list[str]]]:
    random = Random(seed)
    words = ["alpha", "beta", "gamma", "delta", "the", "epsilon"]

    def text() -> str:
        return " ".join(random.choices(words, k=random.randint(1, 7)))

    return [(text(), [text() for _ in range(random.randint(1, 3))]) for _ in range(count)]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(*[st.integers(0, 2**31 - 1)] * 3), max_size=20).map(lambda rows: [(2, 0, 1), *rows]),
    st.integers(0, 1000),
)
def test_the_work_of_windows_is_summed(rows: list[tuple[int, int, int]], seed: int) -> None:
    names = ("windows", "tokens", "padded_tokens")
    columns = {
        name: torch.tensor(values, dtype=torch.int32)
        for name, values in zip(names, zip(*rows, strict=True), strict=True)
    }
    expected = {name: sum(row[place] for row in rows) for place, name in enumerate(names)}
    assert measure(WindowWork(), columns, seed) == Measured(values={}, work=expected)


# -- files of v2.0: scores and best thresholds, against their definitions in plain words -----------------


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
def test_best_thresholds_are_those_of_their_definition(questions: list[Asked]) -> None:
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


def test_intervals_of_exact_match_are_wilsons() -> None:
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


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        *(
            (one, other, False)
            for one, other in (("-3.5", "35"), ("-3.5", "3.5"), ("3,5", "35"), ("2e-5", "2e5"))
        ),
        *((one, other, False) for one, other in (("A", ""), ("A", "the"), ("?", "+"), ("is -3.", "is 3"))),
        *(
            (one, other, True)
            for one, other in (("1,234,567", "1234567"), ("$1,000.50", "1000.50"), ("(3)", "3."))
        ),
        *(
            (one, other, True)
            for one, other in (("-$3.5", "-3.5%"), ("(A)", "a"), ("", " "), ("The sea!", "sea"))
        ),
        *((one, other, True) for one, other in (("2020-01-05", "2020/01/05"), ("x-3", "x3"), ("U.S.", "us"))),
    ],
)
def test_plain_text_keeps_numbers_and_is_never_empty(one: str, other: str, are_equal: bool) -> None:
    assert (plain_text(one, IGNORED) == plain_text(other, IGNORED)) == are_equal
