"""Segmentation from the command line: the same bits on every backend, resumed runs, and what reads them."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dualeval.engine.folder.layout import SUFFIX, journal_of
from tests import masked_pictures as made
from tests.conftest import BIN, ROOT, Launch

DUALEVAL: list[str | Path] = [sys.executable, "-m", "dualeval"]
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a network, its weights, and pictures of several sizes."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "nets.py").write_text(made.NETS)
    made.write_pictures(folder / "val")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = torch.nn.Conv2d(3, made.CLASSES, 3)
    torch.save({f"layer.{name}": value for name, value in layer.state_dict().items()}, folder / "net.pt")
    return folder


def command(out: Path, *more: str | Path) -> list[str | Path]:
    job = ["--model", "nets:make", "--weights", "net.pt", "--data", "val/img", "--masks", "val/masks"]
    words = ["--task", "segmentation", *job, "--num-classes", "5", "--preprocessing", "none"]
    return ["run", *words, "--batch-size", "3", "--no-progress", "--out", out, *more]


@pytest.fixture(scope="module")
def run(launch: Launch, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    def evaluate(*more: str) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("run") / "out"
        done = launch([*DUALEVAL, *command(out, *more)], cwd=home)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads((out / "result.json").read_text())
        return result

    return evaluate


@pytest.fixture(scope="module")
def wanted(run: Run) -> dict[str, Any]:
    """One process."""
    one = run("--workers", "0")
    assert one["chunks"]["total"] == 5
    return one


@pytest.mark.parametrize(
    ("size", "backend"),
    [
        (2, "torch"),
        *(pytest.param(size, "torch", marks=pytest.mark.long) for size in (1, 3)),
        pytest.param(2, "horovod", marks=[pytest.mark.needs("horovod"), pytest.mark.long]),
    ],
)
def test_the_same_bits(run: Run, wanted: dict[str, Any], size: int, backend: str) -> None:
    found = run("--nproc", str(size), "--backend", backend)
    assert (found["world"]["size"], found["world"]["backend"]) == (size, backend)
    assert found["chunks"]["resumed"] == 0
    for name in ("metrics", "metrics_digest", "samples_digest", "fingerprint", "intervals"):
        assert found[name] == wanted[name]


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_goes_on(launch: Launch, home: Path, tmp_path: Path, how: signal.Signals) -> None:
    """On two processes, where one has begun; whether it could still save what it has, or not."""
    made.write_pictures(tmp_path, count=9000)
    words: list[str | Path] = ["--data", tmp_path / "img", "--masks", tmp_path / "masks"]
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert launch([*DUALEVAL, *command(whole, *words)], cwd=home, timeout=280).returncode == 0
    with launch.started([*DUALEVAL, *command(out, *words, "--progress")], cwd=home) as process:
        assert process.stdout is not None
        # Every few seconds, from a thread that sees how far the run is; until something is in the journal.
        while not journal_of(out).is_dir() or not any(journal_of(out).glob(f"*{SUFFIX}")):
            assert "samples/s" in process.stdout.readline()
        process.send_signal(how)
        process.communicate(timeout=60)
    assert process.returncode == (75 if how == signal.SIGTERM else -how)
    done = launch([*DUALEVAL, *command(out, *words, "--nproc", "2")], cwd=home, timeout=280)
    assert done.returncode == 0, done.stderr
    found, once = (json.loads((folder / "result.json").read_text()) for folder in (out, whole))
    assert 0 < found["chunks"]["resumed"] < found["chunks"]["total"]
    assert found["metrics_digest"] == once["metrics_digest"]


def test_the_commands_of_the_page(launch: Launch, home: Path, tmp_path: Path) -> None:
    """And a comparison with another run."""
    for name in ("nets.py", "net.pt", "val"):
        (tmp_path / name).symlink_to(home / name)
    page = (ROOT / "docs/segmentation.md").read_text("utf-8")
    commands = [line for line in page.splitlines() if line.startswith("dualeval ")]
    assert [line.split()[1] for line in commands] == ["run", "score", "verify"]
    for line in commands:
        done = launch([BIN / "dualeval", *line.split()[1:]], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "dice" in done.stdout or "verified" in done.stdout
    other = launch([*DUALEVAL, *command(tmp_path / "runs/other", "--weights", "random:1")], cwd=tmp_path)
    assert other.returncode == 0, other.stderr
    compared = launch([*DUALEVAL, "compare", "runs/net", "runs/other", "--json"], cwd=tmp_path)
    assert compared.returncode == 0, compared.stderr
    assert {"pixel_accuracy", "picture_iou"} <= json.loads(compared.stdout)["metrics"].keys()


def test_a_bad_mask(launch: Launch, home: Path, tmp_path: Path) -> None:
    """Named without a traceback, or left out."""
    made.write_pictures(tmp_path, count=4)
    (tmp_path / "masks/001.png").unlink()
    words: list[str | Path] = ["--data", tmp_path / "img", "--masks", tmp_path / "masks"]
    done = launch([*DUALEVAL, *command(tmp_path / "out", *words)], cwd=home)
    assert done.returncode == 2
    assert "sample 001.png (index 1) cannot be read" in done.stderr
    assert "masks/001.png: there is no such file" in done.stderr
    assert "with the same --out also give --fresh" in done.stderr
    assert "Traceback" not in done.stderr
    skipped = launch(
        [*DUALEVAL, *command(tmp_path / "out", *words, "--on-error", "skip", "--fresh")], cwd=home
    )
    assert skipped.returncode == 0, skipped.stderr
    assert json.loads((tmp_path / "out/result.json").read_text())["samples"]["failed"] == 1
