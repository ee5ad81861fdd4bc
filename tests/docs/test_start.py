"""docs/start.md and docs/your-own.md work as they stand there, in their order, and print what they show."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import dualeval
from dualeval.cli import dualeval as command
from dualeval.cli.init import text_for
from dualeval.vision_library import torchvision
from tests.conftest import ROOT, Launch
from tests.engine.end.test_endings import read
from tests.tasks.test_task_examples import ALL

PAGE = (ROOT / "docs/start.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
# What installs dualeval itself: tests/docs/test_readme.py types these lines in a clone.
INSTALLATION = "make run\n. .venv/bin/activate\n"
LINES = [line for kind, text in BLOCKS if kind == "sh" and text != INSTALLATION for line in text.splitlines()]
INLINE = [
    "horovodrun -np 2 python mine.py",
    "mpirun -np 2 python mine.py",
    "torchrun --nproc-per-node 2 -m dualeval doctor",
]
LAUNCHERS = ("torchrun", "horovodrun", "mpirun")


def file_of(text: str) -> str | None:
    """The name that a block's first line gives it."""
    found = re.match(r"# (\S+\.\w+)\n", text)
    return found[1] if found else None


def write_files(folder: Path, blocks: list[tuple[str, str]]) -> None:
    for _, text in blocks:
        if name := file_of(text):
            (folder / name).write_text(text, "utf-8")


def shape(text: str) -> str:
    """A text without its numbers, whose last digits belong to the machine."""
    return re.sub(r"\d+(\.\d+)?", "0", text)


def typed(line: str) -> str:
    """What a line prints, run in this process."""
    program, *words = shlex.split(line)
    if program == "python":
        runpy.run_path(words[0], run_name="__main__")
        return ""
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, f"{line}\n{done.output}"
    return done.stdout


def test_the_page_is_short_and_in_the_order_of_the_questions() -> None:
    assert len(PAGE.splitlines()) <= 260
    questions = "Install, My model, My preprocessing, My metric, In my training, Several processes, "
    questions += "Look at results, Compare, My cluster, When something fails"
    assert re.findall(r"^## (.*)$", PAGE, re.MULTILINE) == questions.split(", ")
    assert ("sh", INSTALLATION) in BLOCKS
    assert all(file_of(text) for kind, text in BLOCKS if kind == "python")
    assert all(f"`{line}`" in PAGE for line in INLINE)


def test_each_block_runs_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_files(tmp_path, BLOCKS)
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
    write_files(tmp_path, BLOCKS)
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


# -- docs/your-own.md ------------------------------------------------------------------------------------


OWN_PAGE = (ROOT / "docs/your-own.md").read_text("utf-8")
OWN_BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", OWN_PAGE, re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in OWN_BLOCKS if language == "python"]
SHELL = [text.splitlines() for language, text in OWN_BLOCKS if language == "sh"]


def write_pictures_and_checkpoint(folder: Path) -> None:
    """What the file of ``dualeval init image-classification`` reads."""
    for number in range(10):
        (folder / f"val/{number}").mkdir(parents=True)
        Image.new("RGB", (40, 30), (number * 20, 0, 0)).save(folder / f"val/{number}/a.png")
    net = torchvision().models.resnet18(num_classes=10)
    torch.save(net.state_dict(), folder / "checkpoint.pt")


def test_all_blocks_are_known() -> None:
    assert {language for language, _ in OWN_BLOCKS} == {"python", "sh", "toml"}
    assert [file_of(text) for text in PYTHON] == [
        *(None, None, None, "mine.py", None, None, "ranking.py", None, "close_calls.py")
    ]
    assert [len(lines) for lines in SHELL] == [4, 3]


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_each_python_block_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / (file_of(PYTHON[number]) or "block.py")
    file.write_text(PYTHON[number], "utf-8")
    if file.name == "mine.py":
        assert PYTHON[number] == text_for("image-classification", Path("mine.py"))
        write_pictures_and_checkpoint(tmp_path)
    defined = runpy.run_path(str(file), run_name="__main__")
    if file.name == "ranking.py":
        task, result = defined["Ranking"](), defined["result"]
        again = dualeval.rescore("runs/ranking", metrics=task.metrics())
        assert again.metrics_digest == result.metrics_digest


def run(launch: Launch, line: str, folder: Path, **variables: str) -> str:
    words = shlex.split(line)
    if words[0] == "pip":
        # Beside the environment of the tests, which stays as it is; nothing is downloaded.
        words += ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", "site"]
    starts = {"python": [sys.executable], "pip": [sys.executable, "-m", "pip"]}
    words = [*starts.get(words[0], [sys.executable, "-m", words[0]]), *words[1:]]
    done = launch(words, cwd=folder, variables=variables)
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    return done.stdout


@pytest.mark.long
def test_the_command_line_runs_the_task(launch: Launch, tmp_path: Path) -> None:
    write_files(tmp_path, OWN_BLOCKS)
    script, same, other, options = SHELL[0]
    run(launch, script, tmp_path)
    assert "samples         400 of 400 evaluated" in run(launch, same, tmp_path)
    digests = {read(tmp_path / f"runs/{name}/result.json")["metrics_digest"] for name in ("ranking", "typed")}
    assert len(digests) == 1
    run(launch, other, tmp_path)
    result = read(tmp_path / "runs/margin/result.json")
    assert result["samples"]["total"] == 1000 and result["world"]["size"] == 2
    assert {"margin": 0.5, "count": 1000}.items() <= result["job"].items()
    assert "By how much the better one has to win." in run(launch, options, tmp_path)


@pytest.mark.long
def test_a_package_offers_a_task_and_a_metric(launch: Launch, tmp_path: Path) -> None:
    write_files(tmp_path, OWN_BLOCKS)
    site = f"{tmp_path / 'site'}{os.pathsep}{ROOT}"
    install, listed, evaluate = SHELL[1]
    run(launch, install, tmp_path)
    for name in ("ranking.py", "close_calls.py"):
        (tmp_path / name).unlink()
    assert re.search(r"ranking .*dualeval-ranking 1\.0", run(launch, listed, tmp_path, PYTHONPATH=site))
    run(launch, evaluate, tmp_path, PYTHONPATH=site)
    metrics = read(tmp_path / "runs/installed/result.json")["metrics"]
    assert metrics.keys() == {"wins", "close_calls"}
    assert json.dumps(metrics["close_calls"]).isdigit()


def test_the_table_of_examples_has_their_numbers_of_lines() -> None:
    rows = dict(re.findall(r"\]\(\.\./examples/(\w+)\.py\) \| (\d+) \|", OWN_PAGE))
    assert rows.keys() == {example.file for example in ALL}
    for example in ALL:
        assert f" {rows[example.file]} lines are for dualeval" in example.path.read_text("utf-8")
