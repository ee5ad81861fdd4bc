"""benchmarks/gpu.py, which is made for a GPU: how it judges, its page, and what of it runs on a CPU."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch

from tests.conftest import ROOT, Launch

GPU = {"digest": "a" * 64, "images_per_s": 1000.0, "peak_mb": 200.0}
CARD = {"name": "Played 9000", "driver": "1.2"}
EVENTS = {"cudaEventSynchronize": 80, "cudaStreamSynchronize": 5, "cudaMemcpyAsync": 90, "aten::add": 7}
ANSWERS: dict[str, Any] = {
    "transport": {
        "problems": {"all_reduce": None, "all_reduce on cuda": None, "barrier": None},
        "carriers": {"cpu": "cpu", "cuda": "cuda"},
        "speed": {"cpu": {"latency_us": 9.0}, "cuda": {"latency_us": 20.0}},
    },
    "waits": {"few": {**EVENTS, "cudaEventSynchronize": 48}, "many": EVENTS, "batches": 32, "lines": []},
    "speed": {
        "images_per_s": {"bare": [200.0, 200.0], "dualeval": [180.0, 190.0]},
        "peak_mb": {"bare": 90.0, "dualeval": 91.0},
    },
    "no_memory": {
        "error": "out of memory on cuda:0 with --batch-size 64: CUDA out of memory.",
        "first": "a",
        "then": "a",
    },
    "asserts": "DualevalError: CUDA error: device-side assert triggered",
}
RESULT = {
    "metrics_digest": "a" * 64,
    "chunks": {"resumed": 3},
    "samples_per_s": 500.0,
    "timing": {"ranks": [{"data": 0.5, "meet": 0.0}]},
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu")


@pytest.fixture
def played(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU whose workers answer at once: by way, the digest of the models."""
    digests: dict[str, Any] = {}

    def ask(trial: Any, worker: str, **given: Any) -> Any:
        if worker != "evaluate":
            return ANSWERS.get(worker, {"problems": [], "found": "none"})
        options = given.get("options", {})
        way = next((way for way in (*options, *given) if way in digests), None)
        changed = {} if way is None else digests[way]
        peak = 50.0 if "offload" in options else 200.0
        return {model: {**GPU, "peak_mb": peak, **changed} for model in given["models"]}

    def run(trial: Any, command: list[str], limit_s: float = 0.0, *others: Any, **options: Any) -> str:
        if "doctor" in command:
            return "cuda:0"
        if "bench" in command:
            Path(command[-1]).mkdir()
            (Path(command[-1]) / "bench.md").write_text("| single | 1 | 500 |\n")
            return ""
        if "run" in command:
            Path(command[-1]).mkdir(exist_ok=True)
            (Path(command[-1]) / "result.json").write_text(json.dumps(RESULT))
            return ""
        if "conformance" in command:
            runs = [{"outcome": "ok"}, {"outcome": "ok"}]
            (Path(command[-1]) / "conformance.json").write_text(json.dumps({"runs": runs}))
            return ""
        lines = [{"check": "attributes", "problems": []}, {"check": "gather", "problems": []}]
        (Path(command[-1]) / "rank-0.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return ""

    monkeypatch.setattr(gpu.Trial, "ask", ask)
    monkeypatch.setattr(gpu.Trial, "run", run)
    monkeypatch.setattr(gpu, "card_here", lambda: CARD)
    monkeypatch.setattr(gpu, "end_on_sigterm", lambda: None)
    monkeypatch.setattr(gpu, "write_pictures", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return digests


def test_a_whole_page(gpu: Any, played: dict[str, Any], tmp_path: Path) -> None:
    assert gpu.main(["--results", str(tmp_path)]) == 0
    [page] = tmp_path.glob("gpu-*.md")
    text = page.read_text("utf-8")
    assert text.startswith("# On one GPU: Played 9000\n")
    assert "name Played 9000, driver 1.2. One card: this page says nothing about NCCL between" in text
    assert " passed, 0 failed, 0 not available." in text
    figures = json.loads(page.with_suffix(".json").read_text("utf-8"))
    found = {(row["step"], row["what"]): row["found"] for row in figures["rows"]}
    assert {step for step, _ in found} == {*gpu.STEPS}
    assert found["waits", "of the host, in the loop"] == "1.00 cudaEventSynchronize a batch"
    assert found["transports", "CUDA tensors, NCCL"] == "all_reduce on cuda; all_reduce: latency_us 20"
    speed = "bare 200 images/s, peak 90 MB, dualeval 185 images/s, 0.925 (0.913 to 0.937) of bare, peak 91 MB"
    assert found["speed", "resnet18"] == speed
    assert found["ends", "SIGKILL, and the same command again"] == "aaaaaaaa, 3 chunks were there"
    assert found["tools", "dualeval bench --train"] == "single | 1 | 500"
    assert found["pictures", "resnet50, fp32"] == "500 images/s; seconds: data 0.50"


@pytest.mark.parametrize(
    ("way", "changed", "rows"),
    [
        ("workers", {"digest": "b" * 64}, ["2 reading processes", "4 reading processes"]),
        (
            "ranks",
            {"digest": "b" * 64},
            [
                *("torchrun, one rank", "torchrun, two ranks that share the device"),
                "sharded by a script that has begun NCCL",
            ],
        ),
        ("offload", {"digest": "b" * 64}, ["--shard fsdp --offload"]),
        ("offload", {"peak_mb": 200.0}, ["--shard fsdp --offload"]),
    ],
)
def test_another_digest_fails(
    gpu: Any, played: dict[str, Any], tmp_path: Path, way: str, changed: dict[str, Any], rows: list[str]
) -> None:
    played[way] = changed
    assert gpu.main(["--results", str(tmp_path), "--steps", "repeats,sharding"]) == 1
    [figures] = tmp_path.glob("gpu-*.json")
    failed = [row for row in json.loads(figures.read_text("utf-8"))["rows"] if row["outcome"] == "failed"]
    assert [row["what"] for row in failed if "shard fsdp, torchrun" not in row["what"]] == rows
    expected = f"{'b' * 64}, expected {'a' * 64}" if "digest" in changed else "no less memory than"
    assert all(expected in row["found"] for row in failed)


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


def test_without_a_gpu(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"gpu.py: no GPU here: torch {torch.__version__} ")
    assert not [*tmp_path.iterdir()]


@pytest.mark.long
def test_on_a_cpu(launch: Launch, tmp_path: Path) -> None:
    options = ["--device", "cpu", "--images", "64", "--steps", "transports,waits,sharding"]
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--results", str(tmp_path), *options]
    launch(command, timeout=240).ok()
    [page] = tmp_path.glob("gpu-*.md")
    assert " passed, 0 failed, 3 not available." in page.read_text("utf-8")
