"""docs/start.md works as it stands there, in its order, and prints what it shows."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from dualeval.cli import dualeval
from tests.conftest import ROOT, Launch

PAGE = (ROOT / "docs/start.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
# What installs dualeval itself: tests/docs/test_readme_in_order.py types these lines in a clone.
INSTALLATION = "make run\n. .venv/bin/activate\n"
LINES = [line for kind, text in BLOCKS if kind == "sh" and text != INSTALLATION for line in text.splitlines()]
INLINE = [
    "horovodrun -np 2 python mine.py",
    "mpirun -np 2 python mine.py",
    "torchrun --nproc-per-node 2 -m dualeval doctor",
]
LAUNCHERS = ("torchrun", "horovodrun", "mpirun")


def write_files(folder: Path) -> None:
    for kind, text in BLOCKS:
        if kind == "python":
            name = re.match(r"# (\w+\.py)\n", text)
            assert name, f"a block without the name of its file:\n{text}"
            (folder / name[1]).write_text(text, "utf-8")


def shape(text: str) -> str:
    """A text without its numbers, whose last digits belong to the machine."""
    return re.sub(r"\d+(\.\d+)?", "0", text)


def typed(line: str) -> str:
    """What a line prints, run in this process."""
    program, *words = shlex.split(line)
    if program == "python":
        runpy.run_path(words[0], run_name="__main__")
        return ""
    done = CliRunner().invoke(dualeval, words)
    assert done.exit_code == 0, f"{line}\n{done.output}"
    return done.stdout


def test_the_page_is_short_and_in_the_order_of_the_questions() -> None:
    assert len(PAGE.splitlines()) <= 260
    questions = "Install, My model, My preprocessing, My metric, In my training, Several processes, "
    questions += "Look at results, Compare, My cluster, When something fails"
    assert re.findall(r"^## (.*)$", PAGE, re.MULTILINE) == questions.split(", ")
    assert ("sh", INSTALLATION) in BLOCKS
    assert all(f"`{line}`" in PAGE for line in INLINE)


def test_each_block_runs_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_files(tmp_path)
    before = set(sys.modules)
    printed = ""
    try:
        for kind, text in BLOCKS:
            if kind == "" and printed:
                assert shape(text) == shape(printed)
            lines = text.splitlines() if kind == "sh" and text != INSTALLATION else []
            for line in lines:
                # Several processes are for the test below: here one of them does the same.
                if line.startswith(LAUNCHERS):
                    continue
                said = typed(line.replace(" --nproc 2", ""))
                printed = said or capsys.readouterr().out
    finally:
        for name in set(sys.modules) - before:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(tmp_path):
                del sys.modules[name]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"crop", "net", "trained"}


@pytest.mark.long
@pytest.mark.needs("mpi", "horovod")
def test_a_new_user_types_each_line(launch: Launch, tmp_path: Path) -> None:
    write_files(tmp_path)
    for line in [*LINES, *INLINE]:
        done = launch(["bash", "-c", line], cwd=tmp_path, timeout=120)
        assert done.returncode == 0, f"{line}\n{done.stderr}"


TROUBLE = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
# Messages of Open MPI.
FOREIGN = {"mpirun has detected an attempt to run as root", "There are not enough slots available"}


def texts_of(tree: ast.AST) -> Iterator[str]:
    """All texts of a file but docstrings; in an f-string each value is a line feed."""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\n" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.value


def test_each_message_of_troubleshooting_is_in_the_source() -> None:
    folders = (ROOT / name for name in ("dualeval", "backends", "launch"))
    files = [path for folder in folders for path in folder.rglob("*.py")]
    source = "\0".join(text for path in files for text in texts_of(ast.parse(path.read_text("utf-8"))))
    headings = re.findall(r"^### (.*)$", TROUBLE, re.MULTILINE)
    assert 25 <= len(headings) == len(set(headings))
    assert [words for words in headings if words not in FOREIGN and words not in source] == []
    assert len(TROUBLE.splitlines()) <= 200
