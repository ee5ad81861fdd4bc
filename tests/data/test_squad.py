"""Questions in the format of SQuAD, and files with a value for each of them: what is read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dualeval.data.squad import Question, Questions, read_null_odds, read_predictions, read_questions
from tests.assets import package_folder
from tests.squad_files import (
    INDENTED,
    changed,
    dump,
    file_of,
    files,
    laid_out,
    layouts,
    numbered,
    question,
    refused,
    shuffled,
    write,
)

# Questions


def test_real_questions() -> None:
    path = package_folder("allennlp") / "tests/fixtures/data/squad.json"
    questions = read_questions(path)
    assert [questions.id(index) for index in range(len(questions))] == [
        *("5733be284776f41900661182", "5733be284776f4190066117e", "5733b1da4776f41900661068"),
        *("5733b1da4776f4190066106b", "5733b1da4776f41900661067"),
    ]
    first, second, third, fourth, fifth = questions.questions
    assert first.question == "To whom did the Virgin Mary allegedly appear in 1858 in Lourdes France?"
    assert first.context.startswith("Architecturally, the school has a Catholic character. Atop the Main")
    assert first.context.endswith("is a simple, modern stone statue of Mary.")
    assert third.context.startswith("In 1882, Albert Zahm (John Zahm's brother) built an early wind tunnel")
    assert (first.answers, first.starts) == (("Saint Bernadette Soubirous",), (515,))
    assert second.answers == (*("a golden statue of the Virgin Mary",) * 2, first.context)
    assert second.starts == (92, 92, 0)
    assert [(*one.answers, *one.starts) for one in (third, fourth, fifth)] == [
        ("1882", 3),
        ("Father Julius Nieuwl", 222),
        ("an early wind tunnel", 49),
    ]
    assert fifth.question == "What did the brother of John Zahm construct at Notre Dame?"
    # One text is held once.
    assert first.context is second.context
    assert third.context is fourth.context is fifth.context
    assert not questions.unanswerable
    assert questions.misplaced(5) == []


def test_the_answers_of_an_indented_file(tmp_path: Path) -> None:
    questions = read_questions(write(tmp_path, INDENTED))
    assert questions.questions == (
        Question(
            id="a",
            question="First?",
            context="One and two.",
            answers=("One", "two"),
            starts=(0, 8),
            article="T",
        ),
        Question(id="b", question="Second?", context="One and two.", answers=(), starts=(), article="T"),
    )


def test_questions_by_place(tmp_path: Path) -> None:
    content = file_of(*(question(name, ("One", 0)) for name in "abcde"))
    questions = read_questions(dump(tmp_path, content))
    assert len(questions) == 5
    assert (questions[3].id, questions.id(4)) == ("d", "e")
    assert [one.id for one in questions.__getitems__([4, 0, 0])] == ["e", "a", "a"]
    assert [one.id for one in questions.__getitems__(range(1, 4))] == ["b", "c", "d"]


@pytest.mark.parametrize(
    ("version", "unanswerable"),
    [
        *((version, False) for version in (None, "", "1.1", "v1.1", "1.2", "dev", "2024-03-01", "20", "2nd")),
        *((version, True) for version in ("2", "2.0", "v2.0", "V2.0", "v2", "2.1")),
    ],
)
def test_kind_of_file_by_its_version(tmp_path: Path, version: str | None, unanswerable: bool) -> None:
    content = file_of(question("a", ("One", 0)), version=version)
    assert read_questions(dump(tmp_path, content)).unanswerable is unanswerable


@pytest.mark.parametrize("version", [None, "1.1", "v2.0"])
def test_a_question_without_an_answer_makes_it_a_file_of_the_second_kind(
    tmp_path: Path, version: str | None
) -> None:
    content = file_of(question("a", ("One", 0)), question("b"), version=version)
    assert read_questions(dump(tmp_path, content)).unanswerable


def test_is_impossible_false_without_answers_is_no_contradiction(tmp_path: Path) -> None:
    entry = question("a") | {"is_impossible": False}
    assert read_questions(dump(tmp_path, file_of(entry))).questions[0].answers == ()


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte-order mark"])
def test_a_byte_order_mark_and_any_line_end_are_read(tmp_path: Path, mark: bytes, newline: str) -> None:
    text = changed('"One and two."', '"One ünd two."').replace("\n", newline)
    questions = read_questions(write(tmp_path, mark + text.encode()))
    assert questions[0].context == "One ünd two."
    wrong = mark + text.replace('"Second?"', "7").encode()
    assert refused(write(tmp_path, wrong)).startswith(": data[0].paragraphs[0].qas[1].question is")


def test_misplaced_answers_are_found(tmp_path: Path) -> None:
    # A letter of two UTF-16 units, three of UTF-8 and four bytes: places are counted in characters.
    context = "\U0001f600 is one € and 1 euro"
    right = [("one", 5), ("€", 9), ("\U0001f600", 0), ("euro", 17), ("", 21), (context, 0)]
    wrong = [("one", 6), ("one", 4), ("One", 5), ("euro", -4), ("euro", 10**30), ("", 22), ("€ AND", 9)]
    entries = [question(f"right {place}", answer) for place, answer in enumerate(right)]
    entries += [question(f"wrong {place}", answer) for place, answer in enumerate(wrong)]
    entries += [question("wrong second", right[0], wrong[0]), question("none"), question("both", *right)]
    questions = read_questions(dump(tmp_path, file_of(*entries, context=context)))
    expected = [f"wrong {place}" for place in range(len(wrong))]
    assert questions.misplaced(len(questions)) == [*expected, "wrong second"]
    assert questions.misplaced(len(right) + 2) == expected[:2]
    assert questions.misplaced(len(right)) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any")


@settings(max_examples=100, deadline=None)
@given(files, layouts, st.randoms(use_true_random=False))
def test_any_valid_file_is_read(folder: Path, content: Any, layout: dict[str, Any], random: Any) -> None:
    content = shuffled(numbered(content), random)
    expected = [
        (entry["id"], entry["question"], paragraph["context"], entry["answers"])
        for article in content["data"]
        for paragraph in article["paragraphs"]
        for entry in paragraph["qas"]
    ]
    assume(expected)
    text = laid_out(content, layout, random.choice(["", "\n \t"]), random.choice(["\n", "\r\n"]))
    found = read_questions(write(folder, text))
    assert [
        (
            one.id,
            one.question,
            one.context,
            [(text, start) for text, start in zip(one.answers, one.starts, strict=True)],
        )
        for one in found.questions
    ] == [(*rest, [(one["text"], one["answer_start"]) for one in gold]) for *rest, gold in expected]
    assert found.unanswerable == (content.get("version") == "v2.0" or not all(gold for *_, gold in expected))


# The fingerprint


def fingerprinted(*questions: Question, unanswerable: bool = False) -> str:
    return Questions(questions=questions, unanswerable=unanswerable).fingerprint(len(questions))


def test_fingerprint(tmp_path: Path) -> None:
    questions = read_questions(write(tmp_path, INDENTED))
    first = b'["a", "First?", "One and two.", ["One", "two"], [0, 8], "T"]'
    second = b'["b", "Second?", "One and two.", [], [], "T"]'
    assert questions.fingerprint(1) == hashlib.sha256(b"v2.0\n" + first).hexdigest()
    assert questions.fingerprint(2) == hashlib.sha256(b"v2.0\n" + first + second).hexdigest()
    assert questions.fingerprint(2) == questions.fingerprint(100)
    compact = json.dumps(json.loads(INDENTED) | {"more": 1}) + "\n"
    assert read_questions(write(tmp_path, compact)).fingerprint(2) == questions.fingerprint(2)


def test_fingerprint_depends_on_every_field_and_on_its_ends() -> None:
    base: dict[str, Any] = {
        "id": "ab",
        "question": "cd",
        "context": "ef",
        "answers": ("gh", "ij"),
        "starts": (0, 1),
        "article": "kl",
    }
    variants: list[dict[str, Any]] = [
        {},
        *({name: "other"} for name in ("id", "question", "context", "article")),
        *({"answers": answers} for answers in (("gh", "i"), ("ij", "gh"), ("gh",), (), ("ghij",))),
        {"answers": ("gh", "ij", "")},
        {"starts": (1, 0)},
        # The same letters in a row.
        {"id": "a", "question": "bcd"},
        {"question": "c", "context": "def"},
        {"context": "e", "answers": ("fgh", "ij")},
        {"answers": ("g", "hij")},
        {"id": 'ab", "cd', "question": ""},
    ]
    questions = [Question(**(base | variant)) for variant in variants]
    found = [fingerprinted(one) for one in questions]
    found += [fingerprinted(questions[0], unanswerable=True)]
    found += [fingerprinted(*questions[:2]), fingerprinted(*reversed(questions[:2]))]
    assert len(set(found)) == len(found)


def test_fingerprint_depends_on_the_count(tmp_path: Path) -> None:
    content = file_of(*(question(name, ("One", 0)) for name in "abc"))
    questions = read_questions(dump(tmp_path, content))
    assert len({questions.fingerprint(count) for count in range(4)}) == 4


# Predictions and null odds


def test_predictions(tmp_path: Path) -> None:
    expected = {"b": "two words", "a": "", "": "NaN", "é": "\U0001f600\n", "1": "1"}
    for content in (json.dumps(expected), json.dumps(expected, ensure_ascii=False, indent=2)):
        found = read_predictions(write(tmp_path, b"\xef\xbb\xbf" + content.encode()))
        assert found == expected
        assert list(found) == list(expected)
    assert read_predictions(write(tmp_path, "{}")) == {}


def test_null_odds(tmp_path: Path) -> None:
    found = read_null_odds(write(tmp_path, '{"b": -3, "a": 0.1, "c": -1e-320, "d": 1E+300}'))
    assert found == {"b": -3.0, "a": 0.1, "c": -1e-320, "d": 1e300}
    assert all(type(value) is float for value in found.values())
    assert read_null_odds(write(tmp_path, b"\xef\xbb\xbf{}")) == {}
