"""What docs/your-own.md shows runs as it stands there, in its order."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import dualeval
from dualeval.cli.init import text_for
from dualeval.vision_library import torchvision
from tests.conftest import ROOT, Launch
from tests.engine.test_endings import read
from tests.tasks.test_task_examples import ALL

PAGE = (ROOT / "docs/your-own.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
SHELL = [text.splitlines() for language, text in BLOCKS if language == "sh"]


def file_of(text: str) -> str | None:
    """The name that a block's first line gives it."""
    found = re.match(r"# (\S+\.\w+)\n", text)
    return found[1] if found else None


def write_pictures_and_checkpoint(folder: Path) -> None:
    """What the file of ``dualeval init image-classification`` reads."""
    for number in range(10):
        (folder / f"val/{number}").mkdir(parents=True)
        Image.new("RGB", (40, 30), (number * 20, 0, 0)).save(folder / f"val/{number}/a.png")
    net = torchvision().models.resnet18(num_classes=10)
    torch.save(net.state_dict(), folder / "checkpoint.pt")


def write_files(folder: Path) -> None:
    for _, text in BLOCKS:
        if name := file_of(text):
            (folder / name).write_text(text, "utf-8")


def test_all_blocks_are_known() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "sh", "toml"}
    assert [file_of(text) for text in PYTHON] == [
        *(None, None, None, "mine.py", None, "ranking.py", None, "close_calls.py")
    ]
    assert [len(lines) for lines in SHELL] == [4, 3]


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    write_files(tmp_path)
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
    write_files(tmp_path)
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


def test_the_table_of_examples_tells_their_lines() -> None:
    rows = dict(re.findall(r"\]\(\.\./examples/(\w+)\.py\) \| (\d+) \|", PAGE))
    assert rows.keys() == {example.file for example in ALL}
    for example in ALL:
        assert f" {rows[example.file]} lines are for dualeval" in example.path.read_text("utf-8")
