"""Texts, documents and questions in tar shards: the numbers of the same rows in a table; what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import dualeval.tasks
from dualeval.data.squad import read_questions
from dualeval.data.table import read_rows
from dualeval.errors import EXIT_USAGE, UsageError
from tests.engine.test_evaluator import evaluate
from tests.vehicles import questions, texts
from tests.vehicles.causal_models import save_causal
from tests.vehicles.packed_pictures import pack

Members = dict[str, bytes]


def as_parts(row: Mapping[str, Any]) -> Members:
    """A text and its label in files of their own."""
    text, label, key = row["text"], row["label"], row["id"]
    return {f"{key}.jpg": b"", f"{key}.cls": f"{label}\n".encode(), f"{key}.txt": text.encode()}


def as_object(row: Mapping[str, Any]) -> Members:
    """All but the id in one object."""
    rest = {name: value for name, value in row.items() if name != "id"}
    return {f"{row['id']}.json": json.dumps(rest).encode()}


def text_rows() -> list[dict[str, Any]]:
    rows = enumerate(texts.rows(14))
    return [{"id": f"a/{at:03}", "text": row["sentence"], "label": row["label"]} for at, row in rows]


def question_rows() -> list[dict[str, Any]]:
    rows = []
    for context, qa in questions.asked(questions.squad_file()):
        answers = {key: [each[key] for each in qa["answers"]] for key in ("text", "answer_start")}
        rows.append({"id": qa["id"], "context": context, "question": qa["question"], "answers": answers})
    return rows


CASES: dict[
    str, tuple[str, Callable[[Path], Path], Callable[[], Sequence[Any]], Callable[[Any], Members]]
] = {
    "texts": ("TextClassification", texts.save_classifier, text_rows, as_parts),
    "texts in json": ("TextClassification", texts.save_classifier, text_rows, as_object),
    "documents": ("LanguageModeling", save_causal, text_rows, as_parts),
    "questions": ("QuestionAnswering", questions.save_tiny_bert, question_rows, as_object),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_in_shards_are_those_of_a_table(tmp_path: Path, case: str) -> None:
    task, save, make_rows, members = CASES[case]
    rows = make_rows()
    for shard, some in enumerate((rows[:2], rows[2:])):
        pack(tmp_path / f"val-{shard}.tar", {k: v for row in some for k, v in members(row).items()})
    table = texts.write(tmp_path / "rows.jsonl", rows)
    model = save(tmp_path / "model")

    def result(data: Path) -> Any:
        return evaluate(getattr(dualeval.tasks, task)(model=model, data=data), tmp_path / "out" / data.name)

    ours, theirs = result(tmp_path / "val-{0..1}.tar"), result(table)
    assert ours.samples["evaluated"] >= len(rows)  # of documents the windows
    assert (ours.metrics_digest, ours.samples_digest) == (theirs.metrics_digest, theirs.samples_digest)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"a.jpg": b""}, "the sample 'a' has .jpg and no .txt or .json"),
        ({"a.txt": b"a", "a.cls": b"1", "b.txt": b"b"}, "the sample 'b' has .txt and no .cls"),
        ({"a.txt": b"\xff", "a.cls": b"1"}, "the member 'a.txt' is no text in UTF-8"),
        ({"a.json": b"{"}, "the member 'a.json' is not JSON"),
        ({"a.json": b"[]"}, "the member 'a.json' is no JSON object"),
        ({"a.json": b'{"text": "b"}', "a.txt": b"a"}, "has a key 'text', and a.txt is the same column"),
        ({"a.json": b'{"text": "b"}', "b.json": b"{}"}, "sample 2 has no 'text'"),
        ({"a.txt": b"1", "b.txt": b"2", "./a.txt": b"3"}, "has the key 'a', a file's name up to its first"),
        ({"README": b""}, "holds no sample: expected files such as a.txt and a.cls, or a.json"),
    ],
)
def test_samples_that_are_no_rows_are_named(tmp_path: Path, members: Members, said: str) -> None:
    path = pack(tmp_path / "a.tar", members)
    with pytest.raises(UsageError) as caught:
        read_rows(path, lambda columns: ("text",), {"text": "a text"})
    assert said in str(caught.value)
    assert caught.value.exit_code == EXIT_USAGE


def test_a_row_that_is_no_question_is_where_the_table_says(tmp_path: Path) -> None:
    """Counted from 1, as all rows of files are."""
    rows = question_rows()[:2]
    del rows[1]["answers"]["answer_start"]
    shard = pack(tmp_path / "a.tar", as_object(rows[0]) | as_object(rows[1]))
    for data, where in ((shard, "sample 2"), (texts.write(tmp_path / "a.jsonl", rows), "line 2")):
        with pytest.raises(UsageError) as caught:
            read_questions(data)
        assert str(caught.value).startswith(f"{data}, {where}: answers has no key 'answer_start'")


def test_a_table_whose_name_has_tar_in_it_is_a_table(tmp_path: Path) -> None:
    """It was read before shards were."""
    table = texts.write(tmp_path / "reviews.tar.csv", text_rows())
    assert len(read_rows(table, lambda columns: ("text",), {"text": "a text"})) == len(text_rows())
