"""Exact match and F1 of answers: against the official script of v1.1 and TorchMetrics; work of windows."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from collections.abc import Sequence
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualeval.metrics import Measured
from dualeval.metrics.squad import F1, ExactMatch, WindowWork, normalize_answer, score_answer
from tests.assets import package_folder
from tests.measuring import measure, same_bits

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
        *("Saint Bernadette Soubirous", "golden statue of the Virgin Mary", "1882"),
        *("Father Julius Nieuwland", "early wind tunnel"),
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


def test_a_large_set_scores_as_by_the_official_script(official: ModuleType) -> None:
    questions = many_questions(2_000, seed=1)
    assert_sets_score_alike(official, questions)
    # And here a sum in order, as the script's, has other bits than the exact one.
    values = scored(questions)["f1"].tolist()
    assert sum(values) != math.fsum(values)


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
