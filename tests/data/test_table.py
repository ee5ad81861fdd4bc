"""Tables of texts: which rows a file has, and what is refused since nobody can tell."""

from __future__ import annotations

import csv
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from dualeval.data.table import TableOptions, column_of, open_table, read_rows
from dualeval.errors import UsageError

# As GLUE has them: two rows begin and end with a quotation mark that belongs to the texts of both.
GLUE = 'text\tlabel\n"good film\t1\nthe river\t0\nbad film"\t0\nold "mill"\t1\n'
LONG = "good, " * 30_000
ROWS: list[tuple[str, str | bytes, str | None, list[tuple[str, str]]]] = [
    (
        "a.tsv",
        GLUE,
        "none",
        [('"good film', "1"), ("the river", "0"), ('bad film"', "0"), ('old "mill"', "1")],
    ),
    ("a.tsv", GLUE, "standard", [("good film\t1\nthe river\t0\nbad film", "0"), ('old "mill"', "1")]),
    ("a.tsv", 'text\tlabel\r\na 5" disk\t1\r\n\r\n', None, [('a 5" disk', "1")]),
    ("a.csv", 'text,label\n"a",1\n', "none", [('"a"', "1")]),
    ("a.csv", 'text,label\r\n"a\r\nb",1\r\n', None, [("a\r\nb", "1")]),
    ("a.csv", f'text,label\n"{LONG}",1\n', None, [(LONG, "1")]),
    ("a.tsv", f"text\tlabel\n{LONG}\t1\n", None, [(LONG, "1")]),
    ("a.csv", b"\xef\xbb\xbftext,label\na,1\n", None, [("a", "1")]),
]
REFUSED: list[tuple[str, str | bytes, str | None, str]] = [
    ("a.tsv", GLUE, None, "a.tsv, line 2 has a cell that begins with a quotation mark"),
    ("a.tsv", '"text"\t"label"\na\t1\n', None, "line 1 has a cell that begins with a quotation mark"),
    ("a.tsv", "text\tlabel\na\t1\nb\n", None, "line 3 has 1 columns, expected 2 as in the first line"),
    ("a.csv", 'text,label\na,1\n"b" c,1\n', None, "line 3 is not CSV: ',' expected after '\"'"),
    (
        "a.csv",
        'text,label\n"a \\"b\\" c",1\n',
        None,
        'where the file has \\", write it anew: pandas.read_csv(F',
    ),
    ("a.csv", 'text,label\na,1\n"b,1\n', None, "line 3 is not CSV: unexpected end of data"),
    ("a.csv", "text\tlabel\na\t1\n", None, "Where '\\t' separates columns, rename it to a.tsv"),
    ("a.tsv", "text,label\na,1\n", None, "Where ',' separates columns, rename it to a.csv"),
    ("a.csv", "sep=;\r\ntext;label\r\na;1\r\n", None, "line 1 is 'sep=;', which only Excel reads"),
    (
        "a.csv",
        "text,label\nn\xe9,1\n".encode("latin1"),
        None,
        r"at b'text,label\nn\xe9'. Write it anew: iconv",
    ),
    ("a.jsonl", '{"text": "a", "label": 1}\n', "none", "--quoting is for .csv and .tsv files"),
]


def choose(found: Sequence[str]) -> tuple[str, ...]:
    return tuple(column_of("it", found, None, (name,), f"--{name}", name) for name in ("text", "label"))


def read(path: Path, content: str | bytes, quoting: str | None) -> list[tuple[object, ...]]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [*read_rows(path, choose, {"text": "a", "label": 1}, TableOptions(quoting=quoting)).values]


@pytest.mark.parametrize(("name", "content", "quoting", "rows"), ROWS)
def test_each_kind_of_table_has_its_rows(
    tmp_path: Path, name: str, content: str | bytes, quoting: str | None, rows: list[tuple[str, str]]
) -> None:
    limit = csv.field_size_limit()
    assert read(tmp_path / name, content, quoting) == rows
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(("name", "content", "quoting", "said"), REFUSED)
def test_tables_that_nobody_can_tell_are_refused(
    tmp_path: Path, name: str, content: str | bytes, quoting: str | None, said: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        read(tmp_path / name, content, quoting)
    with pytest.raises(UsageError, match=r"--quoting is for \.csv and \.tsv files, and a list is not one"):
        read_rows([{"text": "a"}], choose, {}, TableOptions(quoting="none"))


def test_semicolons_are_named_with_what_writes_commas(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Where ';' separates columns, write it with commas: ") as refused:
        read(tmp_path / "a.csv", b"\xef\xbb\xbftext;label\ngood, film;1\n", None)
    _, flag, code = shlex.split(str(refused.value).partition("commas: ")[2])
    subprocess.run([sys.executable, flag, code], cwd=tmp_path, check=True)
    new = tmp_path / "new.csv"
    assert read(new, new.read_bytes(), None) == [("good, film", "1")]


@pytest.mark.parametrize("columns", [{"text": ["b"], "label": [1.0]}, {"text": ["b"]}])
def test_a_parquet_file_that_is_replaced_before_its_rows_are_read_is_refused(
    tmp_path: Path, columns: dict[str, list[object]]
) -> None:
    """The names of its classes, and what its columns hold, would be those of the one before."""
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"], "label": [1]}), path)
    table = open_table(path, choose, {}, options=TableOptions())
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(UsageError, match=r"a\.parquet, after row 0, cannot be read: it has changed"):
        list(table.rows)
