"""Questions in the format of SQuAD, and files with a value for each of them."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dualeval.data.squad import Question, Questions, read_null_odds, read_predictions, read_questions
from dualeval.errors import UsageError
from tests.assets import package_folder

INDENTED = """\
{
  "version": "1.1",
  "data": [
    {
      "title": "T",
      "paragraphs": [
        {
          "context": "One and two.",
          "qas": [
            {
              "id": "a",
              "question": "First?",
              "answers": [
                {
                  "text": "One",
                  "answer_start": 0
                },
                {
                  "text": "two",
                  "answer_start": 8
                }
              ]
            },
            {
              "id": "b",
              "question": "Second?",
              "is_impossible": true,
              "answers": []
            }
          ]
        }
      ]
    }
  ]
}
"""
READERS = {"--data": read_questions, "--predictions": read_predictions, "--null-odds": read_null_odds}


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "file.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def dump(folder: Path, content: Any) -> Path:
    return write(folder, json.dumps(content))


def refused(path: Path, flag: str = "--data") -> str:
    """The message with which a file is refused; it names the file, and can be written anywhere."""
    with pytest.raises(UsageError) as caught:
        READERS[flag](path)
    message = str(caught.value)
    assert message.startswith(str(path))
    message.encode()
    return message.removeprefix(str(path))


def changed(old: str, new: str) -> str:
    """INDENTED with a text that is there once replaced."""
    before, after = INDENTED.split(old)
    return before + new + after


def file_of(*questions: dict[str, Any], context: str = "One and two.", version: str | None = "1.1") -> Any:
    """A file's content with one paragraph."""
    data = [{"title": "T", "paragraphs": [{"context": context, "qas": list(questions)}]}]
    return {"data": data} if version is None else {"version": version, "data": data}


def question(name: str = "a", *answers: tuple[str, int], text: str = "?") -> dict[str, Any]:
    return {
        "id": name,
        "question": text,
        "answers": [{"text": answer, "answer_start": start} for answer, start in answers],
    }


# What is read


def test_real_questions() -> None:
    path = package_folder("allennlp") / "tests/fixtures/data/squad.json"
    questions = read_questions(path)
    assert [questions.id(index) for index in range(len(questions))] == [
        "5733be284776f41900661182",
        "5733be284776f4190066117e",
        "5733b1da4776f41900661068",
        "5733b1da4776f4190066106b",
        "5733b1da4776f41900661067",
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
        Question(id="a", question="First?", context="One and two.", answers=("One", "two"), starts=(0, 8)),
        Question(id="b", question="Second?", context="One and two.", answers=(), starts=()),
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
        *((version, False) for version in (None, "", "1.1", "v1.1", "1.2", "dev")),
        *((version, True) for version in ("2.0", "v2.0", "V2.0", "v2", "2.1")),
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
    assert refused(write(tmp_path, wrong)).startswith(", line 26: data[0].paragraphs[0].qas[1].question is")


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


# The fingerprint


def fingerprinted(*questions: Question, unanswerable: bool = False) -> str:
    return Questions(questions=questions, unanswerable=unanswerable).fingerprint(len(questions))


def test_fingerprint(tmp_path: Path) -> None:
    questions = read_questions(write(tmp_path, INDENTED))
    first = b'["a", "First?", "One and two.", "One", "two"]'
    second = b'["b", "Second?", "One and two."]'
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
    }
    variants: list[dict[str, Any]] = [
        {},
        *({name: "other"} for name in ("id", "question", "context")),
        *({"answers": answers} for answers in (("gh", "i"), ("ij", "gh"), ("gh",), (), ("ghij",))),
        {"answers": ("gh", "ij", "")},
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


# What is refused: no JSON

NO_JSON = {
    "empty": ("", ", line 1, column 1: no valid JSON: Expecting value"),
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


# What is refused: JSON of another form

QUESTION = "data[0].paragraphs[0].qas[1]"
ANSWER = "data[0].paragraphs[0].qas[0].answers[1]"
# Changes of INDENTED; the line, and what is said of what.
WRONG = {
    "version": ('"1.1"', "1.1", 2, "version is the number 1.1, expected a text"),
    "version null": ('"1.1"', "null", 2, "version is null, expected a text"),
    "no data": ('"data"', '"date"', 1, "the file has no key 'data' (found: 'version', 'date')"),
    "no paragraphs": (
        '"paragraphs"',
        '"paragraph"',
        4,
        "data[0] has no key 'paragraphs' (found: 'title', 'paragraph')",
    ),
    "no context": (
        '"context"',
        '"text"',
        7,
        "data[0].paragraphs[0] has no key 'context' (found: 'text', 'qas')",
    ),
    "no qas": ('"qas"', '"questions"', 7, "data[0].paragraphs[0] has no key 'qas' (found: 'context', "),
    "no id": ('"id": "b"', '"i": "b"', 24, f"{QUESTION} has no key 'id' (found: 'i', 'question', "),
    "no question": ('"question": "Second?",', "", 24, f"{QUESTION} has no key 'question' (found: 'id', "),
    "no answers": ('"answers": []', '"answer": []', 24, f"{QUESTION} has no key 'answers' (found: "),
    "no text": ('"text": "two"', '"txt": "two"', 18, f"{ANSWER} has no key 'text' (found: 'txt', "),
    "no answer_start": ('"answer_start": 8', '"end": 8', 18, f"{ANSWER} has no key 'answer_start' (found: "),
    "context": ('"One and two."', "12", 8, "data[0].paragraphs[0].context is the number 12, expected a text"),
    "context true": ('"One and two."', "true", 8, "data[0].paragraphs[0].context is true, expected a text"),
    "id": ('"b"', "17", 25, f"{QUESTION}.id is the number 17, expected a text"),
    "question": ('"Second?"', '["Second?"]', 26, f"{QUESTION}.question is a list, expected a text"),
    "question far off": ('"Second?"', "\n\n\t{}", 28, f"{QUESTION}.question is an object, expected a text"),
    "answers": ("[]", "{}", 28, f"{QUESTION}.answers is an object, expected a list"),
    "answers null": ("[]", "null", 28, f"{QUESTION}.answers is null, expected a list"),
    "answers a text": ("[]", '"one"', 28, f"{QUESTION}.answers is a text, expected a list"),
    "an answer": ("[]", '["one"]', 28, f"{QUESTION}.answers[0] is a text, expected an object"),
    "text": ('"two"', "2.5", 19, f"{ANSWER}.text is the number 2.5, expected a text"),
    "text false": ('"two"', "false", 19, f"{ANSWER}.text is false, expected a text"),
    "answer_start": ("8", '"8"', 20, f"{ANSWER}.answer_start is a text, expected a whole number"),
    "answer_start 8.0": ("8", "8.0", 20, f"{ANSWER}.answer_start is the number 8.0, expected a whole number"),
    "answer_start true": ("8", "true", 20, f"{ANSWER}.answer_start is true, expected a whole number"),
    "answer_start NaN": ("8", "NaN", 20, f"{ANSWER}.answer_start is the number nan, expected a whole number"),
    "is_impossible": ("true", '"true"', 27, f"{QUESTION}.is_impossible is a text, expected true or false"),
    "is_impossible 1": ("true", "1", 27, f"{QUESTION}.is_impossible is the number 1, expected true or false"),
    "is_impossible null": ("true", "null", 27, f"{QUESTION}.is_impossible is null, expected true or false"),
    "answers to the impossible": (
        "[]",
        '[{"text": "One", "answer_start": 0}]',
        27,
        f"{QUESTION}.is_impossible is true, but there are answers",
    ),
    **{
        f"half a pair in {where}": (old, new, line, f"{way} is no Unicode text (half a surrogate pair)")
        for where, old, new, line, way in (
            ("version", '"1.1"', r'"\ud83d"', 2, "version"),
            ("context", '"One and two."', r'"\uD83D and \ud83d\ude00"', 8, "data[0].paragraphs[0].context"),
            ("id", '"b"', r'"b\ude00"', 25, f"{QUESTION}.id"),
            ("question", '"Second?"', r'"\ude00\ud83d?"', 26, f"{QUESTION}.question"),
            ("text", '"two"', r'"\ud83dtwo"', 19, f"{ANSWER}.text"),
        )
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_content_is_refused_with_line_and_key(tmp_path: Path, name: str) -> None:
    old, new, line, said = WRONG[name]
    message = refused(write(tmp_path, changed(old, new)))
    assert message.startswith(f", line {line}: {said}")
    assert message.endswith("each with id, question and answers[] (text, answer_start).")
    # The same on one line, after empty ones.
    compact = "\n \n\t\n" + json.dumps(json.loads(changed(old, new)))
    assert refused(write(tmp_path, compact)).startswith(f", line 4: {said}")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("\n\n[]", "line 3: the file is a list"),
        ('\n"data"', "line 2: the file is a text"),
        ("null", "line 1: the file is null"),
        ("NaN", "line 1: the file is the number nan"),
        ('{"data":\n[\n[]]}', "line 3: data[0] is a list"),
        (
            '{"data": [{"paragraphs":\n[{"context": "", "qas": []},\n5]}]}',
            "line 3: data[0].paragraphs[1] is ",
        ),
        ('{"data": [{"paragraphs": [{"context": "",\n "qas": [\nnull]}]}]}', "line 3: data[0].paragraphs[0]"),
    ],
)
def test_what_should_be_an_object(tmp_path: Path, content: str, said: str) -> None:
    message = refused(write(tmp_path, content))
    assert message.startswith(f", {said}")
    assert ", expected an object. Expected the format of SQuAD: " in message


def test_an_object_without_keys(tmp_path: Path) -> None:
    assert refused(write(tmp_path, "{}")).startswith(", line 1: the file has no key 'data' (found: nothing).")


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


# Any file

hard_text = st.text(alphabet=st.sampled_from('ab ,:[]{}"\\/\n\t\r\u2028é漢\U0001f600'), max_size=8)
answers = st.fixed_dictionaries(
    {"text": hard_text, "answer_start": st.integers(-3, 2**40)}, optional={"more": hard_text}
)
questions = st.fixed_dictionaries(
    {"id": hard_text, "question": hard_text, "answers": st.lists(answers, max_size=2)},
    optional={"plausible_answers": st.lists(answers, max_size=1)},
)
paragraphs = st.fixed_dictionaries({"context": hard_text, "qas": st.lists(questions, max_size=2)})
articles = st.fixed_dictionaries(
    {"paragraphs": st.lists(paragraphs, max_size=2)}, optional={"title": hard_text, "x": st.none()}
)
files = st.fixed_dictionaries(
    {"data": st.lists(articles, min_size=1, max_size=3)},
    optional={"version": st.sampled_from(["1.1", "v2.0"])},
)
layouts = st.fixed_dictionaries(
    {
        "indent": st.sampled_from([None, 0, 1, 4, "\t"]),
        "ensure_ascii": st.booleans(),
        "separators": st.sampled_from([None, (",", ":"), (" ,", " : ")]),
    }
)


def laid_out(content: Any, layout: dict[str, Any], before: str, newline: str) -> str:
    return before + json.dumps(content, **layout).replace("\n", newline)


def numbered(content: Any) -> Any:
    """The same with ids that differ."""
    entries = [entry for *_, entry in owners(content) if "id" in entry]
    for number, entry in enumerate(entries):
        entry["id"] += f" {number}"
    return content


def shuffled(content: Any, random: Any) -> Any:
    """The same with the keys of all objects in another order."""
    if isinstance(content, list):
        return [shuffled(value, random) for value in content]
    if isinstance(content, dict):
        return {key: shuffled(content[key], random) for key in random.sample(list(content), len(content))}
    return content


def owners(content: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """Every object that must have some keys: its name, what holds it and where there, and itself."""

    def below(name: str, holder: Any, key: str) -> Iterator[tuple[str, Any, Any, Any]]:
        for place, entry in enumerate(holder[key]):
            yield f"{name}{key}[{place}]", holder[key], place, entry

    yield "the file", None, None, content
    for article in below("", content, "data"):
        yield article
        for paragraph in below(f"{article[0]}.", article[-1], "paragraphs"):
            yield paragraph
            for entry in below(f"{paragraph[0]}.", paragraph[-1], "qas"):
                yield entry
                yield from below(f"{entry[0]}.", entry[-1], "answers")


TEXTS = {"context", "id", "question", "text"}
REQUIRED = {"data", "paragraphs", "qas", "answers", "answer_start"} | TEXTS
MARK = "the only MARK"


def line_of_mark(text: str, newline: str) -> int:
    before, _ = text.split(json.dumps(MARK))
    return before.count(newline) + 1


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


@settings(max_examples=150, deadline=None)
@given(files, layouts, st.data())
def test_any_key_left_out_is_named_with_the_line_where_its_object_begins(
    folder: Path, content: Any, layout: dict[str, Any], data: st.DataObject
) -> None:
    random = data.draw(st.randoms(use_true_random=False))
    content = shuffled(numbered(content), random)
    before, newline = data.draw(st.sampled_from(["", "\n", "\n\n "])), random.choice(["\n", "\r\n"])
    marked = copy.deepcopy(content)
    chosen = data.draw(st.integers(0, len(list(owners(content))) - 1))
    name, _, _, owner = list(owners(content))[chosen]
    _, holder, place, _ = list(owners(marked))[chosen]
    if holder is None:
        marked = MARK
    else:
        holder[place] = MARK
    line = line_of_mark(laid_out(marked, layout, before.replace("\n", newline), newline), newline)
    key = data.draw(st.sampled_from(sorted(owner.keys() & REQUIRED)))
    del owner[key]
    message = refused(write(folder, laid_out(content, layout, before.replace("\n", newline), newline)))
    assert message.startswith(f", line {line}: {name} has no key {key!r} (found: ")


@settings(max_examples=150, deadline=None)
@given(files, layouts, st.data())
def test_any_wrong_value_is_named_with_the_line_where_it_begins(
    folder: Path, content: Any, layout: dict[str, Any], data: st.DataObject
) -> None:
    content = shuffled(numbered(content), data.draw(st.randoms(use_true_random=False)))
    name, _, _, owner = data.draw(st.sampled_from(list(owners(content))))
    key = data.draw(st.sampled_from(sorted(owner.keys() & REQUIRED)))
    owner[key] = MARK
    line = line_of_mark(laid_out(content, layout, "", "\n"), "\n")
    wrong: list[Any] = [None, True, 1.5, {"id": []}, "7" if key == "answer_start" else 7]
    wrong += [[]] if key in TEXTS else ["text"]
    owner[key] = data.draw(st.sampled_from(wrong))
    message = refused(write(folder, laid_out(content, layout, "", "\n")))
    way = key if name == "the file" else f"{name}.{key}"
    assert message.startswith(f", line {line}: {way} is ")
    assert f", expected {'a text' if key in TEXTS else 'a '}" in message


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
