"""Exact match and F1 of answers: against the official script of v1.1, TorchMetrics, and plain references."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import re
import string
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from dualeval.errors import UsageError
from dualeval.metrics import Measured, Metric
from dualeval.metrics.classification import wilson_interval
from dualeval.metrics.exact import NORMAL_95, ExactMean, from_limbs
from dualeval.metrics.squad import (
    F1,
    AnswerCounts,
    BestThresholds,
    ExactMatch,
    WindowWork,
    normalize_answer,
    score_answer,
)
from dualeval.vision_library import torchvision
from tests.assets import package_folder

# Answer and gold answers.
HARD = {
    "several gold answers, the last is right": (
        "wind tunnel",
        ["a tunnel", "tunnel", "an early wind tunnel"],
    ),
    "best of exact match and of F1 differ": ("the cat", ["dog cat", "cat"]),
    "articles only": ("the", ["a", "an the"]),
    "articles against words": ("a the", ["cat"]),
    "words against articles": ("cat", ["the", "a"]),
    "punctuation only": ("...", ["!?"]),
    "punctuation against nothing": ("--", [""]),
    "empty answer": ("", ["1882"]),
    "empty answer and empty gold answer": ("", ["", "1882"]),
    "articles inside words": ("theatre anthem a-team", ["atre them team", "theatre anthem ateam"]),
    "article before a mark that stays": ("the—cat", ["—cat", "cat"]),
    "article made by taking punctuation out": ("t.h.e cat", ["cat"]),
    "other punctuation stays": ("“Venite Ad Me Omnes”", ['"Venite Ad Me Omnes"', "venite ad me omnes"]),
    "em dash stays": ("lift—drag", ["lift drag", "lift—drag"]),
    "combining mark": ("cafe\u0301", ["caf\u00e9", "cafe"]),
    "combining mark on an article": ("a\u0301 cat", ["\u00e1 cat", "cat"]),
    "Turkish dotless i": ("Diyarbakır", ["DIYARBAKIR", "DİYARBAKIR", "diyarbakir"]),
    "Turkish dotted I grows": ("İstanbul", ["istanbul", "i\u0307stanbul"]),
    "sharp s": ("STRASSE", ["Straße", "straẞe"]),
    "full-width digits": ("１８８２", ["1882"]),
    "full-width digits are themselves": ("in １８８２", ["１８８２"]),
    "repeated words": ("to be or not to be", ["to be to be to", "be be be"]),
    "repeated words, one in common": ("new new york", ["york york new"]),
    "hyphen joins": ("well-known man", ["wellknown man", "well known man"]),
    "commas in numbers": ("1,000,000", ["1000000", "1.000.000", "1 000 000"]),
    "currency": ("$5", ["5", "€5"]),
    "tabs and line ends": ("\tone\t two\r\n three", ["one two three"]),
    "non-breaking space": ("one\u00a0two", ["one two"]),
    "article between non-breaking spaces": ("one\u00a0the\u00a0two", ["one two"]),
    "space of no width": ("one\u200btwo", ["one two", "onetwo"]),
    "thin and ideographic space": ("one\u2009two\u3000three", ["one two three"]),
    "separators that are white space": ("one\x1ctwo\x85three", ["one two three"]),
    "no words shared": ("cat", ["dog"]),
    "underscore": ("the_cat", ["thecat", "cat"]),
    "possessive": ("Zahm's brother", ["Zahms brother", "Zahm s brother"]),
}
# Pieces of texts, in which much is equal once it is normalised.
PIECES = (
    *(
        "cat",
        "Cat",
        "dog",
        "york",
        "new",
        "the",
        "The",
        "a",
        "an",
        "AN",
        "1,000",
        "1000",
        "１",
        "é",
        "e\u0301",
    ),
    *("ı", "İ", "I", "ß", " ", " ", " ", " ", "\t", "\u00a0", "\u200b", "\x1c", "-", "—", ".", ",", "'", "“"),
)
texts = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


def same_bits(found: object, expected: float) -> bool:
    return isinstance(found, float) and struct.pack("<d", found) == struct.pack("<d", expected)


def ledger_of(metric: Metric, columns: Mapping[str, Tensor], random: Random | None = None) -> Tensor:
    """The ledger of all samples; with ``random`` of updates with some of them each, added in any order."""
    count = len(next(iter(columns.values())))
    samples = list(range(count))
    owners = [0] * count
    if random is not None:
        random.shuffle(samples)
        owners = [random.randrange(6) for _ in samples]
    ledgers = []
    for rank in range(1 if random is None else 3):
        ledger = torch.zeros(metric.size, dtype=torch.int64)
        for update in (0,) if random is None else (2 * rank, 2 * rank + 1):
            chosen = [sample for sample, owner in zip(samples, owners, strict=True) if owner == update]
            metric.update(ledger, {name: column[chosen] for name, column in columns.items()})
        ledgers.append(ledger)
    if random is not None:
        random.shuffle(ledgers)
    return torch.stack(ledgers).sum(dim=0)


def measure(metric: Metric, columns: Mapping[str, Tensor], seed: int = 0) -> Measured:
    """What the metric says, which no split and no order changes."""
    whole = metric.compute(ledger_of(metric, columns))
    assert metric.compute(ledger_of(metric, columns, Random(seed))) == whole
    return whole


def scored(
    questions: Sequence[tuple[str, Sequence[str]]], *, unanswerable: bool = False
) -> dict[str, Tensor]:
    """The columns of answers and their gold answers."""
    scores = [score_answer(answer, gold, unanswerable=unanswerable) for answer, gold in questions]
    return {
        "exact_match": torch.tensor([exact for exact, _ in scores], dtype=torch.bool),
        "f1": torch.tensor([f1 for _, f1 in scores], dtype=torch.float64),
    }


# v1.1, against the official script


@pytest.fixture(scope="module")
def official() -> ModuleType:
    """The official script of v1.1, as a package of the Allen Institute holds it."""
    path = package_folder("allennlp") / "tools/squad_eval.py"
    spec = importlib.util.spec_from_file_location("official_squad", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_scores_are_the_official_ones(official: ModuleType, answer: str, gold: Sequence[str]) -> None:
    exact, f1 = score_answer(answer, gold, unanswerable=False)
    best = official.metric_max_over_ground_truths
    assert exact is best(official.exact_match_score, answer, gold)
    # The script's int 0 where no word is shared.
    assert same_bits(f1, float(best(official.f1_score, answer, gold)))


def real_questions() -> list[tuple[str, list[str]]]:
    """Id and gold answers of the five real questions."""
    content = json.loads((package_folder("allennlp") / "tests/fixtures/data/squad.json").read_text("utf-8"))
    return [
        (entry["id"], [answer["text"] for answer in entry["answers"]])
        for article in content["data"]
        for paragraph in article["paragraphs"]
        for entry in paragraph["qas"]
    ]


def as_dataset(questions: Sequence[tuple[str, Sequence[str]]]) -> list[dict[str, Any]]:
    """Gold answers as the script's ``evaluate`` wants them; ids are the places."""
    entries = [
        {"id": str(place), "answers": [{"text": text} for text in gold]}
        for place, (_, gold) in enumerate(questions)
    ]
    return [{"paragraphs": [{"qas": entries[:2]}, {"qas": entries[2:]}]}]


REAL_ANSWERS = {
    "good": [
        "Saint Bernadette Soubirous",
        "golden statue of the Virgin Mary",
        "1882",
        "Father Julius Nieuwland",
        "early wind tunnel",
    ],
    "bad": ["", "the", "1,882", "nuclear accelerator", "An early wind-tunnel, used to compare lift to drag"],
    "mixed": ["the Saint", "copper statue", "In 1882,", "Nieuwl; Father, Julius...", "wind"],
}


@pytest.mark.parametrize("name", REAL_ANSWERS)
def test_real_questions_score_as_by_the_official_script(official: ModuleType, name: str) -> None:
    questions = [
        (answer, gold) for answer, (_, gold) in zip(REAL_ANSWERS[name], real_questions(), strict=True)
    ]
    for answer, gold in questions:
        assert_scores_are_the_official_ones(official, answer, gold)
    assert_sets_score_alike(official, questions)


def test_real_questions_by_hand() -> None:
    questions = [
        (answer, gold) for answer, (_, gold) in zip(REAL_ANSWERS["good"], real_questions(), strict=True)
    ]
    columns = scored(questions)
    assert columns["exact_match"].tolist() == [True, True, True, False, True]
    assert columns["f1"].tolist()[3] == pytest.approx(2 / 3)
    assert measure(ExactMatch(parts=False), columns).values == {"exact_match": 80.0}


@pytest.mark.parametrize("name", HARD)
def test_hard_cases_score_as_by_the_official_script(official: ModuleType, name: str) -> None:
    answer, gold = HARD[name]
    for text in (answer, *gold):
        assert normalize_answer(text) == official.normalize_answer(text)
    assert_scores_are_the_official_ones(official, answer, gold)


@pytest.mark.parametrize(
    ("answer", "gold", "exact", "f1"),
    [
        ("The Cat!", ["a cat"], True, 1.0),
        ("black cat", ["dog", "cat"], False, 2 / 3),
        ("a b b c", ["b b d"], False, 2 / 3),  # a is an article
        ("the", ["a"], True, 0.0),
        ("", [""], True, 0.0),
        ("", ["cat"], False, 0.0),
        ("one\u00a0two", ["one two"], True, 1.0),
        ("１", ["1"], False, 0.0),
    ],
)
def test_scores_by_hand(answer: str, gold: list[str], exact: bool, f1: float) -> None:
    found = score_answer(answer, gold, unanswerable=False)
    assert found[0] is exact
    assert found[1] == pytest.approx(f1, abs=1e-15)


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


def test_a_large_set_scores_as_by_the_official_script(official: ModuleType) -> None:
    questions = many_questions(2_000, seed=1)
    assert_sets_score_alike(official, questions)
    # And here a sum in order, as the script's, has other bits than the exact one.
    values = scored(questions)["f1"].tolist()
    assert sum(values) != math.fsum(values)


@pytest.fixture(scope="module")
def torchmetrics() -> ModuleType:
    """Metrics of texts; TorchMetrics imports torchvision, which wants help beside a CPU build of torch."""
    torchvision()
    return importlib.import_module("torchmetrics.text")


def test_sets_score_as_by_torchmetrics(torchmetrics: ModuleType) -> None:
    # It follows the script of v2.0 where a text has no words left: F1 is 1 there if both have none. The two
    # scripts agree on all other texts that have a gold answer, so those are left out.
    cases = [*HARD.values(), *many_questions(100, seed=2)]
    questions = [
        (answer, gold) for answer, gold in cases if all(normalize_answer(text) for text in (answer, *gold))
    ]
    assert len(questions) > 100
    columns = scored(questions)
    # In float32.
    expected = torchmetrics.SQuAD()(
        [{"id": str(place), "prediction_text": answer} for place, (answer, _) in enumerate(questions)],
        [
            {"id": str(place), "answers": {"text": gold, "answer_start": [0] * len(gold)}}
            for place, (_, gold) in enumerate(questions)
        ],
    )
    exact = measure(ExactMatch(parts=False), columns).values["exact_match"]
    assert exact == pytest.approx(expected["exact_match"].item(), abs=1e-4)
    assert measure(F1(parts=False), columns).values["f1"] == pytest.approx(expected["f1"].item(), abs=1e-4)


# v2.0, against its definitions in plain words


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


@pytest.mark.parametrize(
    ("questions", "best", "threshold"),
    [
        pytest.param([right(-1.0), right(2.0), wrong(3.0)], 200 / 3, 2.0, id="all have an answer"),
        pytest.param([wrong(-1.0), wrong(2.0)], 0.0, 0.0, id="nothing is right"),
        pytest.param([needless(-1.0), needless(2.0)], 100.0, 0.0, id="none has an answer"),
        pytest.param([needless(-1.0, ""), needless(2.0, "")], 100.0, 0.0, id="none, and no spans"),
        pytest.param([needless(5.0), right(1.0)], 100.0, 1.0, id="order of the odds"),
        pytest.param([right(-3.0), needless(-2.0), right(-1.0)], 200 / 3, -3.0, id="the first best counts"),
        pytest.param([needless(0.5), right(0.5)], 50.0, 0.0, id="tie, the wrong one first"),
        pytest.param([right(0.5), needless(0.5)], 100.0, 0.5, id="tie, the right one first"),
        pytest.param([needless(0.5, ""), right(0.5)], 100.0, 0.5, id="an empty span costs nothing"),
        pytest.param([needless(-2.0, "the"), right(-1.0)], 50.0, 0.0, id="a span of articles costs a point"),
        pytest.param([right(-3.0), right(-2.0), needless(-1.0)], 100.0, -2.0, id="odds below zero"),
    ],
)
def test_best_thresholds_by_hand(questions: list[Asked], best: float, threshold: float) -> None:
    assert thresholds(questions) == {
        "best_exact": best,
        "best_exact_thresh": threshold,
        "best_f1": best,
        "best_f1_thresh": threshold,
    }


def test_questions_of_equal_odds_stay_in_their_order() -> None:
    # So many that an unstable sort would mix them: of each odds first the right answers, then the needless.
    odds = [float(place % 3 + 1) for place in range(300)]
    found = thresholds([*map(right, odds), *map(needless, odds)])
    assert (found["best_exact"], found["best_exact_thresh"]) == (100.0 * 400 / 600, 1.0)


@pytest.mark.parametrize(
    ("answer", "gold", "exact", "f1"),
    [
        ("", [], True, 1.0),
        ("the", [], True, 1.0),
        ("cat", [], False, 0.0),
        ("", ["the", "..."], True, 1.0),
        ("", ["the", "cat"], False, 0.0),
        ("the", ["cat"], False, 0.0),
        ("cat", ["the"], False, 0.0),
        ("black cat", ["a", "cat"], False, 2 / 3),
    ],
)
def test_scores_of_the_second_kind_by_hand(answer: str, gold: list[str], exact: bool, f1: float) -> None:
    found = score_answer(answer, gold, unanswerable=True)
    assert found[0] is exact
    assert found[1] == pytest.approx(f1, abs=1e-15)


def test_without_samples_there_is_no_value() -> None:
    columns = columns_of([])
    for metric, keys in (
        (ExactMatch(parts=True), ("exact_match", "HasAns_exact", "NoAns_exact")),
        (F1(parts=True), ("f1", "HasAns_f1", "NoAns_f1")),
    ):
        assert measure(metric, columns) == Measured(values=dict.fromkeys(keys))
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
    intervals = measure(F1(parts=True), columns).intervals
    half_width = 100 * NORMAL_95 * math.sqrt(0.7 * 0.3 / 9)
    assert intervals["f1"] == pytest.approx((70 - half_width, 70 + half_width))
    # Cut at 0 and 100.
    half_width = 100 * NORMAL_95 * math.sqrt(0.6 * 0.4 / 4)
    assert intervals["HasAns_f1"] == pytest.approx((60 - half_width, 100.0))
    assert measure(F1(parts=False), columns_of([right(0.0)] + [wrong(0.0)] * 5)).intervals["f1"][0] == 0.0


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(*[st.integers(0, 2**31 - 1)] * 3), max_size=20).map(lambda rows: [(2, 0, 1), *rows]),
    st.integers(0, 1000),
)
def test_window_work(rows: list[tuple[int, int, int]], seed: int) -> None:
    names = ("windows", "tokens", "padded_tokens")
    columns = {
        name: torch.tensor(values, dtype=torch.int32)
        for name, values in zip(names, zip(*rows, strict=True), strict=True)
    }
    expected = {name: sum(row[place] for row in rows) for place, name in enumerate(names)}
    assert measure(WindowWork(), columns, seed) == Measured(values={}, work=expected)


# The exact mean of float64

# Whose squares are float64 numbers, or smaller than all of these; smallest and largest among them.
MODERATE = 1e150
moderate = st.one_of(
    st.floats(-MODERATE, MODERATE),
    st.floats(-1.0, 1.0),
    st.floats(-(2.0**-1022), 2.0**-1022),
    st.sampled_from([5e-324, -5e-324, 2.0**-1022, 0.0, -0.0, MODERATE, -MODERATE, 1 / 3]),
)
finite = st.one_of(moderate, st.floats(allow_nan=False, allow_infinity=False))
LARGEST = 1.7976931348623157e308


def doubles(values: Sequence[float]) -> dict[str, Tensor]:
    return {"value": torch.tensor(values, dtype=torch.float64)}


def mean_of(factor: float = 1.0) -> ExactMean:
    return ExactMean("mean", "value", torch.float64, factor)


def expected_half_width(values: Sequence[float]) -> float:
    exact = [Fraction(value) for value in values]
    count = len(exact)
    mean = sum(exact, Fraction()) / count
    variance = sum(((value - mean) ** 2 for value in exact), Fraction()) / (count - 1)
    spread = variance / count
    with localcontext() as context:
        # Beyond any float64, and back.
        context.prec, context.Emax, context.Emin = 50, 10_000, -10_000
        return NORMAL_95 * float((Decimal(spread.numerator) / Decimal(spread.denominator)).sqrt())


@settings(max_examples=200, deadline=None)
@given(st.lists(moderate, min_size=1, max_size=30), st.sampled_from([1.0, 100.0, 0.3]), st.integers(0, 1000))
def test_mean_of_doubles_and_its_interval(values: list[float], factor: float, seed: int) -> None:
    measured = measure(mean_of(factor), doubles(values), seed)
    expected = factor * math.fsum(values) / len(values)
    assert same_bits(measured.values["mean"], expected)
    if len(values) == 1:
        assert measured.intervals == {}
        return
    half_width = factor * expected_half_width(values)
    low, high = measured.intervals["mean"]
    tolerance = 4 * math.ulp(max(abs(low), abs(high), half_width))
    assert low == pytest.approx(expected - half_width, rel=0, abs=tolerance)
    assert high == pytest.approx(expected + half_width, rel=0, abs=tolerance)


@settings(max_examples=100, deadline=None)
@given(st.lists(finite, max_size=30), st.integers(0, 1000))
def test_ledgers_of_doubles_hold_the_rational_sums(values: list[float], seed: int) -> None:
    # All that are finite: sums here may exceed the largest float64.
    for random in (None, Random(seed)):
        ledger = ledger_of(mean_of(), doubles(values), random).tolist()
        assert ledger[:4] == [len(values), 0, 0, 0]
        exact = [Fraction(value) for value in values]
        assert Fraction(from_limbs(ledger[4:71]), 2**1074) == sum(exact, Fraction())
        squares = sum((value * value for value in exact), Fraction())
        assert Fraction(from_limbs(ledger[71:]), 2**2148) == squares


@pytest.mark.parametrize(
    "values",
    [
        [MODERATE, 1.0, -MODERATE],
        [MODERATE, 5e-324, -MODERATE],
        [-5e-324, 5e-324, 5e-324, 5e-324],
        [1.0, 2.0**-53, 2.0**-106],
        [1.0, 2.0**-53],
        [0.1] * 10,
        [-0.0],
        [5e-324],
        [LARGEST],
        [-LARGEST],
    ],
)
def test_hard_sums_of_doubles(values: list[float]) -> None:
    measured = measure(mean_of(), doubles(values))
    assert same_bits(measured.values["mean"], math.fsum(values) / len(values))


@settings(max_examples=50, deadline=None)
@given(st.lists(finite, min_size=1, max_size=10), st.integers(0, 1000))
def test_mean_of_any_doubles(values: list[float], seed: int) -> None:
    try:
        expected = math.fsum(values) / len(values)
    except OverflowError:  # no float64 is near enough
        reject()
    assert same_bits(measure(mean_of(), doubles(values), seed).values["mean"], expected)


def test_mean_of_doubles_whose_squares_are_none() -> None:
    assert measure(mean_of(), doubles([1e200, -1e200, 3.0])).values == {"mean": 1.0}


def test_variance_of_doubles_survives_a_large_mean() -> None:
    # In float64, the mean of squares less the square of the mean is noise here.
    low, high = measure(mean_of(), doubles([2.0**40, 2.0**40 + 1.0] * 50)).intervals["mean"]
    assert high - low == pytest.approx(2 * NORMAL_95 * math.sqrt(0.25 / 99), abs=2.0**-11)
    low, high = measure(mean_of(), doubles([1.0, 1.0 + 2.0**-52])).intervals["mean"]
    assert low < 1.0 < high


def test_nonfinite_doubles_are_counted() -> None:
    values = [1.0, math.nan, math.inf, -math.inf, math.inf, -math.nan, -2.5]
    assert measure(mean_of(), doubles(values)) == Measured(
        values={"mean": None}, nonfinite={"mean": {"nan": 2, "pos_inf": 2, "neg_inf": 1}}
    )
    ledger = ledger_of(mean_of(), doubles(values))
    assert ledger[0] == 7
    assert torch.equal(ledger[4:], ledger_of(mean_of(), doubles([1.0, -2.5]))[4:])
    for value, kind in ((math.nan, "nan"), (math.inf, "pos_inf"), (-math.inf, "neg_inf")):
        measured = measure(mean_of(), doubles([1.0, value]))
        counts = dict.fromkeys(("nan", "pos_inf", "neg_inf"), 0) | {kind: 1}
        assert measured == Measured(values={"mean": None}, nonfinite={"mean": counts})


def test_no_doubles() -> None:
    assert measure(mean_of(), doubles([])) == Measured(values={"mean": None})


def test_a_billion_ledgers_of_doubles_add_up() -> None:
    values = [LARGEST, -1.5, 5e-324, -LARGEST, 0.1, 1e-200, 3e200]
    ledger = ledger_of(mean_of(), doubles(values))
    merged = ledger * 2**30
    mean_of().update(merged, doubles(values))
    found = merged.tolist()
    exact = [Fraction(value) for value in values]
    assert found[0] == 7 * (2**30 + 1)
    assert Fraction(from_limbs(found[4:71]), 2**1074) == sum(exact, Fraction()) * (2**30 + 1)
    assert Fraction(from_limbs(found[71:]), 2**2148) == (2**30 + 1) * sum(one * one for one in exact)
    for limbs in (found[4:71], found[71:]):
        assert all(0 <= limb < 2**32 for limb in limbs[:-1])
        assert -(2**31) <= limbs[-1] < 2**31


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_column_of_another_dtype_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UsageError, match="float64"):
        ledger_of(mean_of(), {"value": torch.ones(3, dtype=dtype)})
