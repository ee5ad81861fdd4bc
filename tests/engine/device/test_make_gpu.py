"""benchmarks/gpu.py, which is made for a GPU: rows that fail, and what of it runs on a CPU."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch

from tests.conftest import ROOT, Launch


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu")


def test_a_row_that_fails_stops_no_other(gpu: Any) -> None:
    trial = gpu.Trial(device="cpu", images=8, rounds=2, ends=monotonic() + 60)

    def fail(error: Exception) -> Any:
        raise error

    trial.row("s", "hangs", lambda: fail(subprocess.TimeoutExpired("x", 90.0)))
    trial.row("s", "breaks", lambda: trial.run([sys.executable, "-c", "raise ValueError('a | b')"]))
    trial.row("s", "works", lambda: ("passed", trial.run([sys.executable, "-c", "print('fine', end='')"])))
    trial.row("s", "newer", lambda: fail(RuntimeError("shard needs torch 2.13 or newer")))
    trial.row("s", "elsewhere", lambda: fail(AssertionError()), on_cpu=False)
    trial.ends = monotonic()
    trial.row("s", "late", lambda: trial.run(["true"]))
    assert [(row.what, row.outcome, row.found) for row in trial.rows] == [
        ("hangs", "failed", "took longer than 90 s"),
        ("breaks", "failed", "RuntimeError: ValueError: a | b"),
        ("works", "passed", "fine"),
        ("newer", "not available", "RuntimeError: shard needs torch 2.13 or newer"),
        ("elsewhere", "not available", "needs a GPU"),
        ("late", "failed", "TimeoutError: not begun: the ten minutes were over"),
    ]
    assert "| s | breaks | failed | RuntimeError: ValueError: a / b |" in gpu.page(trial.rows, {})
    assert gpu.page(trial.rows, {}).startswith(
        "**On a CPU: this page says that the script works, and nothing"
    )


def test_without_a_gpu_it_ends_with_2_and_writes_nothing(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"gpu.py: no GPU here: torch {torch.__version__} ")
    assert not [*tmp_path.iterdir()]


@pytest.mark.long
def test_on_a_cpu_its_steps_pass(launch: Launch, tmp_path: Path) -> None:
    options = ["--device", "cpu", "--images", "64", "--steps", "transports,waits,sharding"]
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--results", str(tmp_path), *options]
    launch(command, timeout=240).ok()
    [page] = tmp_path.glob("gpu-*.md")
    assert " passed, 0 failed, 3 not available." in page.read_text("utf-8")
