"""What a language model is evaluated on: documents, rows with choices, or prompts with their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualeval.columns.of_data import NO_COLUMNS, KeptColumns
from dualeval.data.set_names import has_rows
from dualeval.data.stores.path import path_at
from dualeval.data.table import AS_USUAL, DataRows, PythonRows, TableOptions, column_of, read_rows
from dualeval.data.token_groups import Document
from dualeval.errors import UsageError

DOCUMENTS, CHOICES, ANSWERS = "documents", "choices", "answers"
_TEXTS = ("text", "content", "document", "page")
_CONTEXTS = ("context", "question")
_SUFFIX = ".txt"


@dataclass(frozen=True, kw_only=True)
class LanguageData:
    """All that is evaluated, of one kind."""

    # One of DOCUMENTS, CHOICES and ANSWERS.
    kind: str
    # As in ``DataRows``.
    of: str
    source: str
    documents: Sequence[Document] = ()
    # Where the kind is not DOCUMENTS: columns context, choices, answer, or prompt, answer.
    rows: DataRows | None = None
    # The other columns of the documents' rows.
    kept: KeptColumns = NO_COLUMNS


def read_language_data(
    data: str | Path | PythonRows, text: str | None, options: TableOptions = AS_USUAL
) -> LanguageData:
    """Read a .txt file or a folder of such files, a document each; or a table or rows from Python.

    Which kind rows are is found by their columns; ``text`` says which one has documents.
    """
    path = path_at(data) if isinstance(data, str | Path) else None
    if path is not None and not has_rows(path):
        if text is not None and path.exists():
            raise UsageError(
                f"--text {text}: --data {data} is made of text files, which have no columns. Leave it out."
            )
        options.refuse_quoting(data)
        return _of_files(path, str(path))
    named = str(data) if isinstance(data, str | Path) else f"the {type(data).__name__}"
    example = {"text": "A whole document."}
    rows = read_rows(data, lambda columns: _columns(named, columns, text), example, options)
    if text is None and rows.columns[0] in (*_CONTEXTS, "prompt"):
        kind = CHOICES if "choices" in rows.columns else ANSWERS
        return LanguageData(kind=kind, of=rows.of, source=rows.source, rows=rows)
    documents = [_of_row(rows, index) for index in range(len(rows))]
    return LanguageData(kind=DOCUMENTS, of=rows.of, source=rows.source, documents=documents, kept=rows.kept)


def _columns(named: str, names: Sequence[str], text: str | None) -> tuple[str, ...]:
    if text is not None:
        return (column_of(named, names, text, (), "--text", "the documents' texts"),)
    if {"choices", "answer"} <= {*names} and (context := next((n for n in _CONTEXTS if n in names), None)):
        return context, "choices", "answer"
    if {"prompt", "answer"} <= {*names} and "choices" not in names:
        return "prompt", "answer"
    if "choices" not in names and (column := next((name for name in _TEXTS if name in names), None)):
        return (column,)
    raise UsageError(
        f"{named} has the columns {', '.join(names)}: expected {', '.join(_TEXTS[:-1])} or {_TEXTS[-1]} (one "
        "document per row), context or question with choices and answer (multiple choice), or prompt and "
        "answer (greedy answers). Or say which column has the documents with --text NAME."
    )


def _of_row(rows: DataRows, index: int) -> Document:
    try:
        return Document(name=rows.ids[index], text=rows.text(index, rows.columns[0]))
    except UsageError as error:
        return Document(name=rows.ids[index], text="", wrong=str(error))


def _of_files(path: Path, named: str) -> LanguageData:
    """One text file, or all in a folder and its folders, by their names."""
    files = [path] if path.suffix.lower() == _SUFFIX and path.is_file() else []
    if path.is_dir():
        files = sorted(path.rglob(f"*{_SUFFIX}"), key=lambda file: file.relative_to(path).as_posix())
    if not files:
        other = "is neither a text file nor a table" if path.exists() else "does not exist"
        fault = "holds no .txt file" if path.is_dir() else other
        raise UsageError(
            f"--data {named} {fault}. Expected a .txt file, a folder of such files, or a table (.jsonl, "
            ".parquet, .csv, .tsv)."
        )
    root = path if path.is_dir() else path.parent
    documents = [_of_file(file, file.relative_to(root).as_posix()) for file in files]
    return LanguageData(kind=DOCUMENTS, of=named, source=str(path.absolute()), documents=documents)


def _of_file(path: Path, name: str) -> Document:
    text, wrong = "", ""
    try:
        # Not as text: that would change the ends of its lines.
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        wrong = f"{path} cannot be read: {error.strerror or error}"
    except UnicodeDecodeError as error:
        wrong = f"{path} is not UTF-8: {error}"
    if not wrong and not text.strip():
        text, wrong = "", f"{path} is empty: expected a text"
    return Document(name=name, text=text, wrong=wrong)


def choices_of(rows: DataRows, index: int) -> tuple[str, list[str], int]:
    """Context, choices, and which of these is the answer, of a row; UsageError where they do not fit."""
    context, choices, answer = rows.values[index][:3]
    where = rows.where(index)
    if not isinstance(choices, list | tuple) or len(choices) < 2:
        raise UsageError(f"{where}: choices is {_typed(choices)}, expected a list of at least two texts")
    for place, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice.strip():
            fault = "is empty" if choice is None or choice == "" else f"is {_typed(choice)}"
            raise UsageError(f"{where}: choice {place} {fault}, expected a text")
    context = context if context == "" else rows.text(index, rows.columns[0])
    return context, list(choices), _place_of(answer, choices, where)


def _place_of(answer: Any, choices: Sequence[str], where: str) -> int:
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    raise UsageError(
        f"{where}: answer is {_typed(answer)}, expected one of the {len(choices)} choices, or its index "
        f"from 0 to {len(choices) - 1}"
    )


def answers_of(rows: DataRows, index: int) -> list[str]:
    """The right answers of a row, at least one; UsageError where there is none."""
    answer = rows.values[index][1]
    answers = [answer] if isinstance(answer, str) else answer
    if isinstance(answers, list | tuple) and answers and all(isinstance(each, str) for each in answers):
        return list(answers)
    raise UsageError(f"{rows.where(index)}: answer is {_typed(answer)}, expected a text or a list of texts")


def _typed(value: Any) -> str:
    return f"{value!a} ({type(value).__name__})"
