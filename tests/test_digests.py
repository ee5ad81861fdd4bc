"""The same bits whatever the number of processes, loader workers and threads, and however started."""

from __future__ import annotations

import itertools
import json
import math
import platform
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pyarrow.parquet
import pytest
import torch

from tests.conftest import ROOT, Finished, Launch

BIN = Path(sys.executable).parent
TORCHRUN = BIN / "torchrun"
WORKER = ROOT / "tests" / "digest_worker.py"
LIMITS = (10_000, 997, 3, 1)

# The embedded job on all 10,000 images with the shipped weights.
TOP1 = 0.9305

Digests = dict[int, str]


def matrix(launch: Launch, folder: Path, size: int, manners: list[tuple[int, int, int]]) -> list[str]:
    """Digests of the embedded job at a world size, for each (limit, workers, threads)."""
    folder.mkdir()
    torchrun: list[str | Path] = [TORCHRUN, "--standalone", f"--nproc-per-node={size}"]
    done = launch([*torchrun, WORKER, folder, json.dumps(manners)], timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "found.json").read_text())
    for (limit, _, _), entry in zip(manners, found, strict=True):
        assert (entry["total"], entry["resumed"]) == (limit, 0)
    return [entry["digest"] for entry in found]


@pytest.fixture(scope="module")
def wanted(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Digests:
    """The digest of each limit, from one process with one thread and no workers."""
    folder = tmp_path_factory.mktemp("wanted") / "out"
    digests = matrix(launch, folder, 1, [(limit, 0, 1) for limit in LIMITS])
    assert len(set(digests)) == len(LIMITS)
    return dict(zip(LIMITS, digests, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_world_sizes_workers_and_threads(launch: Launch, tmp_path: Path, wanted: Digests, size: int) -> None:
    """Ranks without any data (limits 1 and 3) finish like the others."""
    manners = [(limit, workers, 1) for limit in LIMITS[1:] for workers in (0, 2)]
    manners += [(997, 0, 2), (997, 2, 2), (10_000, 0, 2)]
    found = matrix(launch, tmp_path / "out", size, manners)
    assert found == [wanted[limit] for limit, _, _ in manners]


@pytest.fixture(scope="module")
def written_table() -> Iterator[list[tuple[int, int, int, int, str]]]:
    """Rows (limit, processes, workers, threads, digest), written to benchmarks/results/ at the end."""
    rows: list[tuple[int, int, int, int, str]] = []
    yield rows
    now = datetime.now(timezone.utc)
    lines = [
        "# Digests of the embedded job",
        "",
        f"{now:%Y-%m-%d %H:%M} UTC, `make test-long`; Python {platform.python_version()}, "
        f"torch {torch.__version__}. Every run evaluated anew.",
        "",
        "| samples | processes | loader workers | threads a process | metrics_digest |",
        "|---|---|---|---|---|",
        *(
            f"| {a:,} | {b} | {c} | {d} | `{digest[:16]}` |"
            for a, b, c, d, digest in sorted(rows, reverse=True)
        ),
    ]
    path = ROOT / f"benchmarks/results/digests-{now:%Y-%m-%d}.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n", "utf-8")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_combination(
    launch: Launch,
    tmp_path: Path,
    wanted: Digests,
    size: int,
    written_table: list[tuple[int, int, int, int, str]],
) -> None:
    manners = list(itertools.product(LIMITS, (0, 2), (1, 2)))
    found = matrix(launch, tmp_path / "out", size, manners)
    written_table += [(a, size, b, c, digest) for (a, b, c), digest in zip(manners, found, strict=True)]
    assert found == [wanted[limit] for limit, _, _ in manners]


PYTHON_M: list[str | Path] = [sys.executable, "-m", "dualeval", "run"]
WAYS: dict[str, tuple[list[str | Path], Path | None]] = {
    "dualeval run": ([BIN / "dualeval", "run"], None),
    "dualeval run --nproc 2": ([BIN / "dualeval", "run", "--nproc", "2"], None),
    "python -m dualeval run": ([*PYTHON_M], None),
    "torchrun dualeval run --backend torch": ([TORCHRUN, "dualeval", "run", "--backend", "torch"], ROOT),
    "torchrun --nproc-per-node 2 dualeval run --backend torch": (
        [TORCHRUN, "--nproc-per-node", "2", "dualeval", "run", "--backend", "torch"],
        ROOT,
    ),
    "torchrun --nproc-per-node 2 -m dualeval run": (
        [TORCHRUN, "--nproc-per-node", "2", "-m", "dualeval", "run"],
        None,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_start(launch: Launch, tmp_path: Path, wanted: Digests, way: str) -> None:
    command, cwd = WAYS[way]
    out = tmp_path / "out"
    done = launch([*command, "--out", out], cwd=cwd or tmp_path, variables={"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    assert wanted[10_000] in done.stdout
    assert f"{100 * TOP1:.2f} %" in done.stdout
    result = json.loads((out / "result.json").read_text())
    assert result["metrics_digest"] == wanted[10_000]
    assert result["metrics"]["top1"] == TOP1
    assert result["chunks"]["resumed"] == 0


def test_mean_loss_is_the_exact_sum_over_n(launch: Launch, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = launch([*PYTHON_M, "--nproc", "3", "--limit", "997", "--out", out])
    assert done.returncode == 0, done.stderr
    losses = pyarrow.parquet.read_table(out / "predictions.parquet")["loss"].to_pylist()
    loss = json.loads((out / "result.json").read_text())["metrics"]["loss"]
    assert loss == math.fsum(losses) / 997


def ends_well(launch: Launch, folder: Path, size: int) -> Finished:
    torchrun: list[str | Path] = [TORCHRUN, "--standalone", f"--nproc-per-node={size}"]
    return launch([*torchrun, "-m", "dualeval", "run", "--limit", "200", "--out", folder], timeout=60)


def _exit_codes(launch: Launch, folder: Path, size: int, times: int) -> list[int]:
    done = [ends_well(launch, folder / str(number), size) for number in range(times)]
    return [one.returncode for one in done]


@pytest.mark.parametrize("size", [2, 3])
def test_ten_of_ten_runs_exit_0(launch: Launch, tmp_path: Path, size: int) -> None:
    assert _exit_codes(launch, tmp_path, size, 10) == [0] * 10


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("size", [2, 3])
def test_fifty_of_fifty_runs_exit_0(launch: Launch, tmp_path: Path, size: int) -> None:
    assert _exit_codes(launch, tmp_path, size, 50) == [0] * 50
