"""Files in the format of SQuAD: one to change in many ways, any other, and how one is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from dualeval.data.squad import read_null_odds, read_predictions, read_questions
from dualeval.errors import UsageError

_ANSWERS = [{"text": "One", "answer_start": 0}, {"text": "two", "answer_start": 8}]
_QUESTIONS = [
    {"id": "a", "question": "First?", "answers": _ANSWERS},
    {"id": "b", "question": "Second?", "is_impossible": True, "answers": []},
]
_PARAGRAPH = {"context": "One and two.", "qas": _QUESTIONS}
INDENTED = (
    json.dumps({"version": "1.1", "data": [{"title": "T", "paragraphs": [_PARAGRAPH]}]}, indent=2) + "\n"
)
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
