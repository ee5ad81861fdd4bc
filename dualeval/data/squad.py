"""Questions in the JSON format of SQuAD v1.1 and v2.0, and files with a value for each of them.

{"version": "v2.0", "data": [{"title": ..., "paragraphs": [{"context": ..., "qas": [
    {"id": ..., "question": ..., "is_impossible": false, "answers": [{"text": ..., "answer_start": 0}]}
]}]}]}
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

from dualeval.data.contents import what_it_is
from dualeval.data.set_names import has_rows
from dualeval.data.table import read_rows
from dualeval.errors import UsageError
from dualeval.messages import is_unicode, listed

_SHOWN_AT_MOST = 5
# "v2.0" and the like; not a date, as "2024-03-01".
_SECOND = re.compile(r"[vV]?2(\.[^-]*)?")

# Of rows, as load_dataset("squad") has them.
_COLUMNS = ("id", "title", "context", "question", "answers")
_EXAMPLE = {"id": "1", "context": "...", "question": "...", "answers": {"text": [], "answer_start": []}}

_EXPECTED: dict[type, str] = {
    str: "a text",
    int: "a whole number",
    list: "a list",
    dict: "an object",
    bool: "true or false",
}

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One question on one text."""

    # Unique in its file.
    id: str
    # As it stands in the file.
    question: str
    # The text, the same object for all questions on it.
    context: str
    # The gold answers; none where the text holds no answer.
    answers: tuple[str, ...]
    # Where each of them is said to begin in the context, in characters.
    starts: tuple[int, ...]
    # The title of the article that the text is of.
    article: str


@dataclass(frozen=True, kw_only=True)
class Questions:
    """The questions of one file, in its order."""

    # At least one.
    questions: tuple[Question, ...]
    # The file is of v2.0: it says so, or holds questions without an answer.
    unanswerable: bool

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: int) -> Question:
        return self.questions[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Question]:
        """Questions by their places."""
        return [self.questions[index] for index in indices]

    def id(self, index: int) -> str:
        """The question's id in the file."""
        return self.questions[index].id

    def fingerprint(self, count: int) -> str:
        """sha256, in hex, over everything about the first ``count`` questions."""
        digest = hashlib.sha256(b"v2.0\n" if self.unanswerable else b"v1.1\n")
        for question in self.questions[:count]:
            digest.update(json.dumps(astuple(question)).encode())
        return digest.hexdigest()

    def misplaced(self, count: int) -> list[str]:
        """Ids of those of the first ``count`` questions with a gold answer that is not where it should be."""
        return [
            question.id
            for question in self.questions[:count]
            if any(
                start < 0 or not question.context.startswith(text, start)
                for text, start in zip(question.answers, question.starts, strict=True)
            )
        ]


class _Wrong(Exception):
    """What is wrong with a value, which is named as in JavaScript: data[0].paragraphs[2]."""


def read_questions(path: Path) -> Questions:
    """Read a file of questions, or rows of them."""
    if has_rows(path):
        table = read_rows(path, lambda columns: tuple(name for name in _COLUMNS if name in columns), _EXAMPLE)
        return questions_of_rows(
            [dict(zip(table.columns, row, strict=True)) for row in table.values], table.where
        )
    content = _read(path, "questions in the JSON format of SQuAD", "--data")
    try:
        version = _get(content, "version", str, "", "") if isinstance(content, dict) else ""
        questions = tuple(_questions(content))
    except _Wrong as wrong:
        raise UsageError(
            f"{path}: {wrong}. Expected the format of SQuAD: data[].paragraphs[] with context and qas[], "
            "each with id, question and answers[] (text, answer_start)."
        ) from wrong
    if not questions:
        raise UsageError(f"{path} holds no question: its data[].paragraphs[].qas[] are empty.")
    _refuse_twice([question.id for question in questions], f"{path}: question ids must be unique, but")
    return Questions(
        questions=questions,
        unanswerable=_SECOND.fullmatch(version) is not None or any(not q.answers for q in questions),
    )


def questions_of_rows(
    rows: Sequence[Mapping[str, Any]], where: Callable[[int], str] = "row {} of the questions".format
) -> Questions:
    """Questions from rows in memory, as Hugging Face's ``load_dataset("squad", split=...)`` gives them.

    Messages say ``where`` a row is; those from Python are counted from 0, as Python does.
    """
    if isinstance(rows, Mapping):
        raise UsageError(
            f"the questions are in parts ({', '.join(map(str, rows))}): give one, as data['validation']"
        )
    questions = []
    # Rows without a title: each text is an article.
    texts: dict[str, str] = {}
    for number in range(len(rows)):
        try:
            questions.append(_question_of_row(rows[number], texts))
        except _Wrong as wrong:
            raise UsageError(
                f"{where(number)}: {wrong}. Expected the columns of load_dataset('squad'): "
                "id, context, question, answers (text, answer_start)."
            ) from wrong
    if not questions:
        raise UsageError("there are no questions: the rows are empty")
    _refuse_twice([question.id for question in questions], "question ids must be unique, but")
    return Questions(
        questions=tuple(questions), unanswerable=any(not question.answers for question in questions)
    )


def _question_of_row(row: Any, articles: dict[str, str]) -> Question:
    answers = _get(row, "answers", dict, "")
    texts, starts = (list(_get(answers, key, list, "answers")) for key in ("text", "answer_start"))
    if len(texts) != len(starts):
        raise _Wrong(f"answers has {len(texts)} texts and {len(starts)} values of answer_start")
    entry = {
        "id": _get(row, "id", str, ""),
        "question": _get(row, "question", str, ""),
        "answers": [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)],
    }
    context = _get(row, "context", str, "")
    title = _title(row) or articles.setdefault(context, f"text {len(articles) + 1}")
    return _question(entry, context, title, "")


def _questions(content: Any) -> Iterator[Question]:
    for number, article in enumerate(_get(content, "data", list, "")):
        in_article = f"data[{number}]"
        title = _title(article) or f"article {number + 1}"
        for place, paragraph in enumerate(_get(article, "paragraphs", list, in_article)):
            in_paragraph = f"{in_article}.paragraphs[{place}]"
            context = _get(paragraph, "context", str, in_paragraph)
            for index, entry in enumerate(_get(paragraph, "qas", list, in_paragraph)):
                yield _question(entry, context, title, f"{in_paragraph}.qas[{index}]")


def _title(entry: Any) -> str | None:
    """The title of an article; None where it has none that can be written down."""
    title = entry.get("title") if isinstance(entry, Mapping) else None
    return title if isinstance(title, str) and title and is_unicode(title) else None


def _question(entry: Any, context: str, article: str, where: str) -> Question:
    fields = {key: _get(entry, key, str, where) for key in ("id", "question")}
    texts, starts = [], []
    for place, answer in enumerate(_get(entry, "answers", list, where)):
        in_answer = f"{where}.answers[{place}]".removeprefix(".")
        texts.append(_get(answer, "text", str, in_answer))
        starts.append(_get(answer, "answer_start", int, in_answer))
    if _get(entry, "is_impossible", bool, where, False) and texts:
        raise _Wrong(f"{where}.is_impossible is true, but there are answers")
    return Question(**fields, context=context, article=article, answers=tuple(texts), starts=tuple(starts))


def read_predictions(path: Path) -> dict[str, str]:
    """Read answers in the official format: one JSON object of question id to text, "" for no answer."""
    answers = _read_object(path, "--predictions", "question id to answer")
    for key, value in answers.items():
        if not isinstance(value, str):
            raise UsageError(f"{path}: the value of {key!r} is {_json_type(value)}, expected a text")
    return answers


def read_null_odds(path: Path) -> dict[str, float]:
    """Read how likely each question has no answer: one JSON object of question id to number."""
    odds = _read_object(path, "--null-odds", "question id to number")
    for key, value in odds.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UsageError(f"{path}: the value of {key!r} is {_json_type(value)}, expected a number")
        if not abs(value) <= sys.float_info.max:
            raise UsageError(f"{path}: the value of {key!r} is {value}, expected a finite number")
    return {key: float(value) for key, value in odds.items()}


def _read_object(path: Path, flag: str, expected: str) -> dict[str, Any]:
    pairs = _read(path, f"a JSON object, {expected},", flag, object_pairs_hook=_Pairs)
    if not isinstance(pairs, _Pairs):
        raise UsageError(f"{path} holds {_json_type(pairs)}, expected one JSON object: {expected}")
    for pair in pairs:
        for text in pair:
            if isinstance(text, str) and not is_unicode(text):
                raise UsageError(f"{path}: {text!a} is not Unicode text (half a surrogate pair)")
    _refuse_twice([key for key, _ in pairs], f"{path}: a question must have one value, but")
    return dict(pairs)


class _Pairs(list[tuple[str, Any]]):
    """The entries of a JSON object, where a dict would keep the last one of each key."""


def _read(path: Path, what: str, flag: str, **options: Any) -> Any:
    try:
        return json.loads(path.read_text("utf-8-sig"), **options)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Give {what} with {flag}.") from error
    except (ValueError, RecursionError) as error:
        other = what_it_is(path) or f"is not JSON in UTF-8: {error}"
        raise UsageError(f"{path} {other}.") from error


def _get(entry: Any, key: str, kind: type[_T], where: str, default: _T | None = None) -> _T:
    """The value of a key of the object at ``where``, checked."""
    if not isinstance(entry, dict):
        raise _Wrong(f"{where or 'the file'} is {_json_type(entry)}, expected an object")
    if key not in entry:
        if default is not None:
            return default
        there = ", ".join(map(repr, entry)) or "nothing"
        raise _Wrong(f"{where or 'the file'} has no key {key!r} (found: {there})")
    value = entry[key]
    name = f"{where}.{key}".removeprefix(".")
    # A bool is an int for Python.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _Wrong(f"{name} is {_json_type(value)}, expected {_EXPECTED[kind]}")
    if isinstance(value, str) and not is_unicode(value):
        raise _Wrong(f"{name} is not Unicode text (half a surrogate pair)")
    return value


def _json_type(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, _Pairs | Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return "a text" if isinstance(value, str) else f"the number {value}"


def _refuse_twice(ids: Sequence[str], start: str) -> None:
    twice = [f"{name} ({count} times)" for name, count in Counter(ids).items() if count > 1]
    if twice:
        raise UsageError(f"{start} there is {listed(twice, _SHOWN_AT_MOST)}. Remove all but one.")
