"""Questions in the format of SQuAD, and files with a value for each of them: what is read, and refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dualeval.data.squad import read_null_odds, read_predictions, read_questions
from tests.vehicles.assets import package_folder
from tests.vehicles.squad_files import (
    INDENTED,
    READERS,
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


def test_real_questions_are_read() -> None:
    """Which the official script reads, too: see tests/tasks/test_question_answering.py."""
    questions = read_questions(package_folder("allennlp") / "tests/fixtures/data/squad.json")
    first, second, third, fourth, fifth = questions.questions
    assert (first.id, questions.id(0)) == ("5733be284776f41900661182",) * 2
    assert (first.answers, first.starts) == (("Saint Bernadette Soubirous",), (515,))
    assert second.answers == (*("a golden statue of the Virgin Mary",) * 2, first.context)
    # One text is held once.
    assert first.context is second.context
    assert third.context is fourth.context is fifth.context
    assert not questions.unanswerable
    assert questions.misplaced(5) == []


@pytest.mark.parametrize(
    ("version", "unanswerable"),
    [
        *((version, False) for version in (None, "", "1.1", "v1.1", "1.2", "dev", "2024-03-01", "20", "2nd")),
        *((version, True) for version in ("2", "2.0", "v2.0", "V2.0", "v2", "2.1")),
    ],
)
def test_the_version_of_a_file_says_whether_questions_are_unanswerable(
    tmp_path: Path, version: str | None, unanswerable: bool
) -> None:
    content = file_of(question("a", ("One", 0)), version=version)
    assert read_questions(dump(tmp_path, content)).unanswerable is unanswerable
    # One without an answer makes any of them a file of the second kind.
    content = file_of(question("a", ("One", 0)), question("b") | {"is_impossible": False}, version=version)
    assert read_questions(dump(tmp_path, content)).unanswerable


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte-order mark"])
def test_a_byte_order_mark_and_any_line_end_are_read(tmp_path: Path, mark: bytes, newline: str) -> None:
    text = changed('"One and two."', '"One ünd two."').replace("\n", newline)
    questions = read_questions(write(tmp_path, mark + text.encode()))
    assert questions[0].context == "One ünd two."


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
        (one.id, one.question, one.context, [*zip(one.answers, one.starts, strict=True)])
        for one in found.questions
    ] == [(*rest, [(one["text"], one["answer_start"]) for one in gold]) for *rest, gold in expected]
    assert found.unanswerable == (content.get("version") == "v2.0" or not all(gold for *_, gold in expected))


# The fingerprint


def test_the_fingerprint_is_of_the_questions_and_not_of_the_spelling(tmp_path: Path) -> None:
    questions = read_questions(write(tmp_path, INDENTED))
    first = b'["a", "First?", "One and two.", ["One", "two"], [0, 8], "T"]'
    second = b'["b", "Second?", "One and two.", [], [], "T"]'
    assert questions.fingerprint(1) == hashlib.sha256(b"v2.0\n" + first).hexdigest()
    assert questions.fingerprint(2) == hashlib.sha256(b"v2.0\n" + first + second).hexdigest()
    assert questions.fingerprint(2) == questions.fingerprint(100)
    compact = json.dumps(json.loads(INDENTED) | {"more": 1}) + "\n"
    assert read_questions(write(tmp_path, compact)).fingerprint(2) == questions.fingerprint(2)


# Predictions and null odds


def test_predictions_are_read_in_their_order(tmp_path: Path) -> None:
    expected = {"b": "two words", "a": "", "": "NaN", "é": "\U0001f600\n", "1": "1"}
    for content in (json.dumps(expected), json.dumps(expected, ensure_ascii=False, indent=2)):
        found = read_predictions(write(tmp_path, b"\xef\xbb\xbf" + content.encode()))
        assert found == expected
        assert list(found) == list(expected)
    assert read_predictions(write(tmp_path, "{}")) == {}


def test_null_odds_are_read_as_floats(tmp_path: Path) -> None:
    found = read_null_odds(write(tmp_path, '{"b": -3, "a": 0.1, "c": -1e-320, "d": 1E+300}'))
    assert found == {"b": -3.0, "a": 0.1, "c": -1e-320, "d": 1e300}
    assert all(type(value) is float for value in found.values())
    assert read_null_odds(write(tmp_path, b"\xef\xbb\xbf{}")) == {}


# Refusals


@pytest.mark.parametrize("flag", READERS)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", " is empty (0 bytes): its download or copy has failed. Fetch it again."),
        ("<!DOCTYPE html>\n<title>404", " is a web page, and begins with '<!DOCTYPE html>'"),
        ('{"version": ""\n  "data": []}', " is not JSON in UTF-8: Expecting ',' delimiter: line 2 column 3"),
        ('{"data": [' * 100_000, " is not JSON in UTF-8: maximum recursion depth exceeded"),
        (
            '{"b": "na\xefve"}'.encode("latin-1"),
            " is not JSON in UTF-8: 'utf-8' codec can't decode byte 0xef",
        ),
        (None, " cannot be read: No such file or directory. Give "),
    ],
)
def test_a_file_that_is_no_json_is_refused(
    tmp_path: Path, content: str | bytes | None, said: str, flag: str
) -> None:
    path = tmp_path / "nowhere.json" if content is None else write(tmp_path, content)
    message = refused(path, flag)
    assert message.startswith(said)
    assert content is not None or message.endswith(f" with {flag}.")


QUESTION = "data[0].paragraphs[0].qas[1]"
ANSWER = "data[0].paragraphs[0].qas[0].answers[1]"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"1.1"', "1.1", "version is the number 1.1, expected a text"),
        ('"data"', '"date"', "the file has no key 'data' (found: 'version', 'date')"),
        ('"paragraphs"', '"paragraph"', "data[0] has no key 'paragraphs' (found: 'title', 'paragraph')"),
        ('"context"', '"text"', "data[0].paragraphs[0] has no key 'context' (found: 'text', 'qas')"),
        ('"qas"', '"questions"', "data[0].paragraphs[0] has no key 'qas' (found: 'context', "),
        ('"id": "b"', '"i": "b"', f"{QUESTION} has no key 'id' (found: 'i', 'question', "),
        ('"question": "Second?",', "", f"{QUESTION} has no key 'question' (found: 'id', "),
        ('"answers": []', '"answer": []', f"{QUESTION} has no key 'answers' (found: "),
        ('"text": "two"', '"txt": "two"', f"{ANSWER} has no key 'text' (found: 'txt', "),
        ('"answer_start": 8', '"end": 8', f"{ANSWER} has no key 'answer_start' (found: "),
        ('"One and two."', "true", "data[0].paragraphs[0].context is true, expected a text"),
        ('"b"', "17", f"{QUESTION}.id is the number 17, expected a text"),
        ('"Second?"', '["Second?"]', f"{QUESTION}.question is a list, expected a text"),
        ("[]", "{}", f"{QUESTION}.answers is an object, expected a list"),
        ("[]", "null", f"{QUESTION}.answers is null, expected a list"),
        ("[]", '["one"]', f"{QUESTION}.answers[0] is a text, expected an object"),
        ("8", "8.0", f"{ANSWER}.answer_start is the number 8.0, expected a whole number"),
        ("8", "true", f"{ANSWER}.answer_start is true, expected a whole number"),
        ("true", "1", f"{QUESTION}.is_impossible is the number 1, expected true or false"),
        ("[]", '[{"text": "One", "answer_start": 0}]', f"{QUESTION}.is_impossible is true, but there are"),
        ('"1.1"', r'"\ud83d"', "version is not Unicode text (half a surrogate pair)"),
        ('"b"', r'"b\ude00"', f"{QUESTION}.id is not Unicode text"),
        ('"two"', r'"\ud83dtwo"', f"{ANSWER}.text is not Unicode text"),
    ],
)
def test_wrong_content_is_refused_with_its_place(tmp_path: Path, old: str, new: str, said: str) -> None:
    message = refused(write(tmp_path, changed(old, new)))
    assert message.startswith(f": {said}")
    assert message.endswith("each with id, question and answers[] (text, answer_start).")


@pytest.mark.parametrize(
    ("flag", "content", "said"),
    [
        ("--data", "[]", ": the file is a list, expected an object"),
        ("--data", '{"data": [[]]}', ": data[0] is a list, expected an object"),
        ("--data", "{}", ": the file has no key 'data' (found: nothing)."),
        ("--data", '{"data": [{"paragraphs": []}]}', " holds no question: its data[].paragraphs[].qas[] are"),
        ("--predictions", '["x"]', " holds a list, expected one JSON object: question id to answer"),
        ("--predictions", '{"q": 1882}', ": the value of 'q' is the number 1882, expected a text"),
        ("--predictions", '{"q": {}}', ": the value of 'q' is an object, expected a text"),
        (
            "--predictions",
            r'{"a": "x", "b": "\ud83d!"}',
            r": '\ud83d!' is not Unicode text (half a surrogate",
        ),
        ("--predictions", r'{"b": "1", "a": "x", "\u0062": "y"}', ": a question must have one value, but "),
        ("--null-odds", "NaN", " holds the number nan, expected one JSON object: question id to number"),
        ("--null-odds", '{"q": "0.5"}', ": the value of 'q' is a text, expected a number"),
        ("--null-odds", '{"q": true}', ": the value of 'q' is true, expected a number"),
        ("--null-odds", '{"q": NaN}', ": the value of 'q' is nan, expected a finite number"),
        ("--null-odds", '{"q": -1e999}', ": the value of 'q' is -inf, expected a finite number"),
        ("--null-odds", f'{{"q": {"7" * 400}}}', f": the value of 'q' is {'7' * 400}, expected a finite"),
        ("--null-odds", r'{"\ud83d": 1}', r": '\ud83d' is not Unicode text (half a surrogate pair)"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path: Path, flag: str, content: str, said: str) -> None:
    assert refused(write(tmp_path, content), flag).startswith(said)


def test_ids_must_be_unique(tmp_path: Path) -> None:
    content = file_of(*(question(name, ("One", 0)) for name in "abcdefgabcdefgh"))
    content["data"] += file_of(question("b", ("One", 0)))["data"]
    assert refused(dump(tmp_path, content)) == (
        ": question ids must be unique, but there is a (2 times), b (3 times), c (2 times), d (2 times), "
        "e (2 times) and 2 more. Remove all but one."
    )
