"""Every JSON file that a run, a share or a watcher keeps beside its rows, damaged in every way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dualeval.cli.several import _launch_there
from dualeval.engine.folder.layout import job_there, what_they_said
from dualeval.engine.folder.lease import Lease
from dualeval.errors import EXIT_USAGE, DualevalError, UsageError
from dualeval.result import read_fields, read_job, read_result, read_status
from dualeval.tools.watch.checkpoints import Board, Checkpoints
from dualeval.tools.watch.command import Wanted, Watching

JOB = {
    "job": {"batch_size": 4, "columns": ["loss"], "metric_options": {}},
    "machine": {},
    "files": [],
    "shares": 2,
    "command": {"words": [], "folder": "/"},
}


def open_watcher(folder: Path) -> None:
    watching = Watching(
        session=cast("Any", SimpleNamespace()),
        checkpoints=Checkpoints("", settle_s=1, marker=None),
        wanted=Wanted(),
        board=Board(folder, metric=None, link=None),
        targets=(),
        job={"weights": "ckpts"},
        evaluate=cast("Any", None),
    )
    watching._open()


# Of each file: what it holds, its reader, and what is said to do. Without that, it is taken for none.
READ: dict[str, tuple[object, Callable[[Path], object], str]] = {
    "job.json": (JOB, read_job, "Evaluate again: 'dualeval run ... --out "),
    "shares/1-of-2/said.json": ({"warnings": ["a"], "unlike": [["b"]]}, what_they_said, "Remove it: its sha"),
    "watch.json": ({"weights": "ckpts"}, open_watcher, "Remove it, if the options are the same, or give"),
    "result.json": ({}, lambda folder: read_result(folder / "result.json"), ""),
    "status.json": ({"state": "done"}, read_status, ""),
    "models.json": ({"launch": "a"}, _launch_there, ""),
    ".watchers/a.pt/stamp": ("0123456789abcdef", lambda folder: board(folder)._stamp("a.pt"), ""),
    "lease.json": ({}, lambda folder: Lease.take(folder, "01234567").close(), ""),
}
DAMAGED: dict[str, bytes | None] = {
    "empty": b"",
    "half": b'{"job": {"batch_size": 4, "warnings": ["a',
    "list": b"[]",
    "null": b"null",
    "text": b'"x"',
    "number": b"7",
    "kinds": b'{"job": 7, "warnings": 7, "unlike": [7], "state": 7, "weights": 7, "launch": []}',
    "inner": b'{"job": {"batch_size": "4"}, "warnings": [7], "unlike": []}',
    "bytes": b"\xff\xfe\x00\x9f",
    "zeros": bytes(64),
    "folder": None,
}


def board(folder: Path) -> Board:
    return Board(folder, metric=None, link=None)


@pytest.mark.parametrize("how", DAMAGED)
@pytest.mark.parametrize("name", READ)
def test_a_damaged_side_file_is_named_or_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    monkeypatch.setattr("dualeval.engine.folder.lease.TAKE_OVER_AFTER_S", 0.0)
    monkeypatch.setattr("dualeval.engine.folder.lease.LOOK_EVERY_S", 0.0)
    content, read, remedy = READ[name]
    (tmp_path / "job.json").write_text(json.dumps(JOB))
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    if name != "result.json":
        read(tmp_path)
    path.unlink(missing_ok=True)
    if (damaged := DAMAGED[how]) is None:
        path.mkdir()
    else:
        path.write_bytes(damaged)
    if name in ("result.json", "lease.json") and how == "folder":
        with pytest.raises(IsADirectoryError):  # a sentence is made of it where they are opened
            read(tmp_path)
    elif name == "result.json":
        with pytest.raises(DualevalError, match=f"{path} is damaged: "):
            read(tmp_path)
    elif not remedy:
        assert read(tmp_path) in (None, "[]")
    elif (name, how) == ("watch.json", "inner"):
        with pytest.raises(UsageError, match="watcher with other options"):
            read(tmp_path)
    elif (name, how) == ("watch.json", "kinds"):
        with pytest.raises(UsageError, match=r"other options.*weights: 7 there, ckpts here"):
            read(tmp_path)
    else:
        with pytest.raises(UsageError) as caught:
            read(tmp_path)
        assert caught.value.exit_code == EXIT_USAGE
        assert re.match(
            rf"{re.escape(str(path))} (is damaged: |cannot be read: Is a directory)", str(caught.value)
        )
        assert remedy in str(caught.value)
    assert job_there(tmp_path) == ({} if name == "job.json" else JOB)


def test_what_is_wrong_in_a_file_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": {"b": "1"}, "d": 1}')
    for kinds, said in (
        ({"a": {"b": int}}, "in its field a: its field b is '1', expected int"),
        ({"c": {"b": int}}, "it has no field c"),
        ({"d": list[str] | None}, r"its field d is 1, expected list\[str\] \| None"),
    ):
        with pytest.raises(UsageError, match=rf"a.json is damaged: {said}\. Remove it"):
            read_fields(path, kinds, "Remove it")
    assert read_fields(path, {"e": str | None}, "") == {"a": {"b": "1"}, "d": 1}
