"""What is refused of questions in the format of SQuAD, and of files with a value for each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.squad_files import (
    READERS,
    changed,
    dump,
    file_of,
    files,
    numbered,
    owners,
    question,
    refused,
    shuffled,
    write,
)

# No JSON

NO_JSON = {
    "empty": ("", " is empty (0 bytes): its download or copy has failed. Fetch it again."),
    "a page": ("<!DOCTYPE html>\n<title>404", " is a web page, and begins with '<!DOCTYPE html>'"),
    "no comma": (
        '{\n  "version": "1.1"\n  "data": []\n}',
        ", line 3, column 3: no valid JSON, after the key \"version\": Expecting ',' delimiter",
    ),
    "cut short": (
        '{\n"data": [\n{"paragraphs": [',
        ', line 3, column 17: no valid JSON, after the key "paragraphs": Expecting value',
    ),
    "other quotes": ("{'data': []}", ", line 1, column 2: no valid JSON: Expecting property name"),
    "line end in a text": (
        '{\n"data" :\n"two\nlines"}',
        ', line 3, column 5: no valid JSON, after the key "data": Invalid control character',
    ),
    "more than one value": (
        '{"data": []}\n{"more": []}',
        ', line 2, column 1: no valid JSON, after the key "data": Extra data',
    ),
    "colons and quotes in a text": (
        r'{"key": "he: \"said\": {", 5}',
        ', line 1, column 28: no valid JSON, after the key "key": Expecting property name',
    ),
    "far from the last key": (
        '{"key": [\n' + "1,\n" * 40_000 + "}",
        ", line 40002, column 1: no valid JSON: Expecting value",
    ),
}


@pytest.mark.parametrize("flag", READERS)
@pytest.mark.parametrize("name", NO_JSON)
def test_no_json(tmp_path: Path, name: str, flag: str) -> None:
    content, message = NO_JSON[name]
    assert refused(write(tmp_path, content), flag).startswith(message)


@pytest.mark.parametrize("flag", READERS)
@pytest.mark.parametrize("start", ["[", '{"data": ', '{"data": [{"paragraphs": [[', '{"a":{"b":'])
def test_deep_nesting(tmp_path: Path, start: str, flag: str) -> None:
    message = refused(write(tmp_path, start * 100_000), flag)
    assert message == ": no valid JSON of this format: too many brackets within brackets"


@pytest.mark.parametrize("flag", READERS)
def test_no_utf_8(tmp_path: Path, flag: str) -> None:
    before = '{\n"ü": "x",\n"b": "'.encode()
    message = refused(write(tmp_path, before + b'na\xefve"\n}'), flag)
    assert message == ", line 3: no UTF-8 text (byte 21: invalid continuation byte)"
    assert refused(write(tmp_path, b"\xff\xfe{\0}\0"), flag).startswith(", line 1: no UTF-8 text (byte 0:")


@pytest.mark.parametrize("flag", READERS)
def test_no_utf_8_after_a_byte_order_mark(tmp_path: Path, flag: str) -> None:
    content = b'\xef\xbb\xbf{\n"a":\n"\xff"}'
    assert refused(write(tmp_path, content), flag).startswith(", line 3: no UTF-8 text (byte 11: ")


@pytest.mark.parametrize("flag", READERS)
def test_what_is_no_file(tmp_path: Path, flag: str) -> None:
    missing = refused(tmp_path / "nowhere.json", flag)
    assert missing.startswith(" cannot be read: No such file or directory. Give ")
    assert missing.endswith(f" with {flag}.")
    folder = refused(tmp_path, flag)
    assert folder.startswith(" cannot be read: Is a directory. Give ")
    assert folder.endswith(f" with {flag}.")


# JSON of another form

QUESTION = "data[0].paragraphs[0].qas[1]"
ANSWER = "data[0].paragraphs[0].qas[0].answers[1]"
# Changes of INDENTED, and what is said of what.
WRONG = {
    "version": ('"1.1"', "1.1", "version is the number 1.1, expected a text"),
    "version null": ('"1.1"', "null", "version is null, expected a text"),
    "no data": ('"data"', '"date"', "the file has no key 'data' (found: 'version', 'date')"),
    "no paragraphs": (
        '"paragraphs"',
        '"paragraph"',
        "data[0] has no key 'paragraphs' (found: 'title', 'paragraph')",
    ),
    "no context": (
        '"context"',
        '"text"',
        "data[0].paragraphs[0] has no key 'context' (found: 'text', 'qas')",
    ),
    "no qas": ('"qas"', '"questions"', "data[0].paragraphs[0] has no key 'qas' (found: 'context', "),
    "no id": ('"id": "b"', '"i": "b"', f"{QUESTION} has no key 'id' (found: 'i', 'question', "),
    "no question": ('"question": "Second?",', "", f"{QUESTION} has no key 'question' (found: 'id', "),
    "no answers": ('"answers": []', '"answer": []', f"{QUESTION} has no key 'answers' (found: "),
    "no text": ('"text": "two"', '"txt": "two"', f"{ANSWER} has no key 'text' (found: 'txt', "),
    "no answer_start": ('"answer_start": 8', '"end": 8', f"{ANSWER} has no key 'answer_start' (found: "),
    "context": ('"One and two."', "12", "data[0].paragraphs[0].context is the number 12, expected a text"),
    "context true": ('"One and two."', "true", "data[0].paragraphs[0].context is true, expected a text"),
    "id": ('"b"', "17", f"{QUESTION}.id is the number 17, expected a text"),
    "question": ('"Second?"', '["Second?"]', f"{QUESTION}.question is a list, expected a text"),
    "question far off": ('"Second?"', "\n\n\t{}", f"{QUESTION}.question is an object, expected a text"),
    "answers": ("[]", "{}", f"{QUESTION}.answers is an object, expected a list"),
    "answers null": ("[]", "null", f"{QUESTION}.answers is null, expected a list"),
    "answers a text": ("[]", '"one"', f"{QUESTION}.answers is a text, expected a list"),
    "an answer": ("[]", '["one"]', f"{QUESTION}.answers[0] is a text, expected an object"),
    "text": ('"two"', "2.5", f"{ANSWER}.text is the number 2.5, expected a text"),
    "text false": ('"two"', "false", f"{ANSWER}.text is false, expected a text"),
    "answer_start": ("8", '"8"', f"{ANSWER}.answer_start is a text, expected a whole number"),
    "answer_start 8.0": ("8", "8.0", f"{ANSWER}.answer_start is the number 8.0, expected a whole number"),
    "answer_start true": ("8", "true", f"{ANSWER}.answer_start is true, expected a whole number"),
    "answer_start NaN": ("8", "NaN", f"{ANSWER}.answer_start is the number nan, expected a whole number"),
    "is_impossible": ("true", '"true"', f"{QUESTION}.is_impossible is a text, expected true or false"),
    "is_impossible 1": ("true", "1", f"{QUESTION}.is_impossible is the number 1, expected true or false"),
    "is_impossible null": ("true", "null", f"{QUESTION}.is_impossible is null, expected true or false"),
    "answers to the impossible": (
        "[]",
        '[{"text": "One", "answer_start": 0}]',
        f"{QUESTION}.is_impossible is true, but there are answers",
    ),
    **{
        f"half a pair in {where}": (old, new, f"{way} is no Unicode text (half a surrogate pair)")
        for where, old, new, way in (
            ("version", '"1.1"', r'"\ud83d"', "version"),
            ("context", '"One and two."', r'"\uD83D and \ud83d\ude00"', "data[0].paragraphs[0].context"),
            ("id", '"b"', r'"b\ude00"', f"{QUESTION}.id"),
            ("question", '"Second?"', r'"\ude00\ud83d?"', f"{QUESTION}.question"),
            ("text", '"two"', r'"\ud83dtwo"', f"{ANSWER}.text"),
        )
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_content_is_refused_with_its_place(tmp_path: Path, name: str) -> None:
    old, new, said = WRONG[name]
    message = refused(write(tmp_path, changed(old, new)))
    assert message.startswith(f": {said}")
    assert message.endswith("each with id, question and answers[] (text, answer_start).")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("\n\n[]", "the file is a list"),
        ('\n"data"', "the file is a text"),
        ("null", "the file is null"),
        ("NaN", "the file is the number nan"),
        ('{"data":\n[\n[]]}', "data[0] is a list"),
        (
            '{"data": [{"paragraphs":\n[{"context": "", "qas": []},\n5]}]}',
            "data[0].paragraphs[1] is ",
        ),
        ('{"data": [{"paragraphs": [{"context": "",\n "qas": [\nnull]}]}]}', "data[0].paragraphs[0]"),
    ],
)
def test_what_should_be_an_object(tmp_path: Path, content: str, said: str) -> None:
    message = refused(write(tmp_path, content))
    assert message.startswith(f": {said}")
    assert ", expected an object. Expected the format of SQuAD: " in message


def test_an_object_without_keys(tmp_path: Path) -> None:
    assert refused(write(tmp_path, "{}")).startswith(": the file has no key 'data' (found: nothing).")


@pytest.mark.parametrize("first", ["[]", "0", '""', '[{"paragraphs": []}]'])
def test_wrong_content_below_a_key_that_is_there_twice(tmp_path: Path, first: str) -> None:
    content = (
        f'{{"data": {first}, "data": [{{"paragraphs": []}}, {{"paragraphs": []}}, {{"paragraphs": 5}}]}}'
    )
    assert "data[2].paragraphs is the number 5, expected a list" in refused(write(tmp_path, content))


@pytest.mark.parametrize("flag", ["--data", "--null-odds"])
@pytest.mark.parametrize("digits", [400, 5_000])
def test_a_vast_whole_number(tmp_path: Path, flag: str, digits: int) -> None:
    refused(write(tmp_path, f'{{"data": {"7" * digits}}}'), flag)


@pytest.mark.parametrize("data", [[], [{"paragraphs": []}], [{"paragraphs": [{"context": "", "qas": []}]}]])
def test_no_questions(tmp_path: Path, data: list[Any]) -> None:
    message = refused(dump(tmp_path, {"version": "2.0", "data": data}))
    assert message == " holds no question: its data[].paragraphs[].qas[] are empty."


def test_ids_must_be_unique(tmp_path: Path) -> None:
    content = file_of(*(question(name, ("One", 0)) for name in "cabacb"))
    content["data"] += file_of(question("b", ("One", 0)))["data"]
    message = refused(dump(tmp_path, content))
    assert message == (
        ": question ids must be unique, but there is c (2 times), a (2 times), b (3 times). "
        "Remove all but one."
    )
    content = file_of(*(question(name, ("One", 0)) for name in "abcdefgabcdefgh"))
    assert refused(dump(tmp_path, content)).endswith(
        "there is a (2 times), b (2 times), c (2 times), d (2 times), e (2 times) and 2 more. "
        "Remove all but one."
    )


# Any file with one fault

TEXTS = {"context", "id", "question", "text"}
REQUIRED = {"data", "paragraphs", "qas", "answers", "answer_start"} | TEXTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any")


@settings(max_examples=150, deadline=None)
@given(files, st.data())
def test_any_key_left_out_is_named_with_the_place_of_its_object(
    folder: Path, content: Any, data: st.DataObject
) -> None:
    content = shuffled(numbered(content), data.draw(st.randoms(use_true_random=False)))
    name, _, _, owner = data.draw(st.sampled_from(list(owners(content))))
    key = data.draw(st.sampled_from(sorted(owner.keys() & REQUIRED)))
    del owner[key]
    assert refused(dump(folder, content)).startswith(f": {name} has no key {key!r} (found: ")


@settings(max_examples=150, deadline=None)
@given(files, st.data())
def test_any_wrong_value_is_named_with_its_place(folder: Path, content: Any, data: st.DataObject) -> None:
    content = shuffled(numbered(content), data.draw(st.randoms(use_true_random=False)))
    name, _, _, owner = data.draw(st.sampled_from(list(owners(content))))
    key = data.draw(st.sampled_from(sorted(owner.keys() & REQUIRED)))
    wrong: list[Any] = [None, True, 1.5, {"id": []}, "7" if key == "answer_start" else 7]
    wrong += [[]] if key in TEXTS else ["text"]
    owner[key] = data.draw(st.sampled_from(wrong))
    message = refused(dump(folder, content))
    way = key if name == "the file" else f"{name}.{key}"
    assert message.startswith(f": {way} is ")
    assert f", expected {'a text' if key in TEXTS else 'a '}" in message


# Predictions and null odds

VALUES = {
    "null": "null",
    "true": "true",
    "false": "false",
    "a list": '["x"]',
    "an object": '{"x": "y"}',
    # An empty one is no empty list.
    "an object ": "{}",
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize(("flag", "good"), [("--predictions", '"x"'), ("--null-odds", "1")])
def test_values_of_the_wrong_type(tmp_path: Path, name: str, flag: str, good: str) -> None:
    expected = {"--predictions": "a text", "--null-odds": "a number"}[flag]
    message = refused(write(tmp_path, f'{{"first": {good}, "it\'s": {VALUES[name]}}}'), flag)
    assert message == f""": the value of "it's" is {name.strip()}, expected {expected}"""


def test_a_number_is_no_answer_and_a_text_no_number(tmp_path: Path) -> None:
    message = refused(write(tmp_path, '{"q": 1882}'), "--predictions")
    assert message == ": the value of 'q' is the number 1882, expected a text"
    message = refused(write(tmp_path, '{"q": "0.5"}'), "--null-odds")
    assert message == ": the value of 'q' is a text, expected a number"


@pytest.mark.parametrize(
    ("value", "said"),
    [("NaN", "nan"), ("Infinity", "inf"), ("-Infinity", "-inf"), ("1e999", "inf"), ("-1e999", "-inf")],
)
def test_null_odds_must_be_finite(tmp_path: Path, value: str, said: str) -> None:
    message = refused(write(tmp_path, f'{{"first": 1, "q": {value}}}'), "--null-odds")
    assert message == f": the value of 'q' is {said}, expected a finite number"


@pytest.mark.parametrize("flag", ["--predictions", "--null-odds"])
@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("[]", "a list"),
        ('[{"id": "a"}]', "a list"),
        ('"a"', "a text"),
        ("null", "null"),
        ("true", "true"),
        ("7", "the number 7"),
        ("NaN", "the number nan"),
    ],
)
def test_what_is_no_object(tmp_path: Path, content: str, kind: str, flag: str) -> None:
    message = refused(write(tmp_path, content), flag)
    assert message.startswith(f" holds {kind}, expected one JSON object: question id to ")


@pytest.mark.parametrize("flag", ["--predictions", "--null-odds"])
def test_keys_must_be_unique(tmp_path: Path, flag: str) -> None:
    value = {"--predictions": '"x"', "--null-odds": "1"}[flag]
    # Written in two ways; the values are the same.
    content = "{" + ", ".join(f'"{key}": {value}' for key in ("b", "a", "\\u0062", "c", "a", "b")) + "}"
    assert refused(write(tmp_path, content), flag) == (
        ": a question must have one value, but there is b (3 times), a (2 times). Remove all but one."
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (r'{"a": "x", "b": "\ud83d!"}', r"'\ud83d!', at 'b'"),
        (r'{"a": "x", "b\ude00": "y"}', r"'b\ude00', at 'b\ude00'"),
    ],
)
def test_half_a_pair_in_predictions(tmp_path: Path, content: str, said: str) -> None:
    message = refused(write(tmp_path, content), "--predictions")
    assert message == f": {said}, is no Unicode text (half a surrogate pair)"


@pytest.mark.parametrize("flag", ["--predictions", "--null-odds"])
def test_half_a_pair_in_keys(tmp_path: Path, flag: str) -> None:
    value = {"--predictions": '"x"', "--null-odds": "1"}[flag]
    assert "half a surrogate pair" in refused(write(tmp_path, f'{{"\\ud83d": {value}}}'), flag)
    # Twice: whatever is said of it must be text.
    refused(write(tmp_path, f'{{"\\ud83d": {value}, "\\ud83d": {value}}}'), flag)
