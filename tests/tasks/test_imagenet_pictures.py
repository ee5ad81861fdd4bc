"""The whole way on real input: twenty ImageNet pictures and EfficientNet-Lite0, on 1, 2 and 3 processes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.assets import Pictures, build_pictures
from tests.conftest import Finished, Launch

# Five batches, so that each of three ranks has at least one.
BATCH_SIZE = "4"
BROKEN = "n01440764/a-broken.jpg"  # the first class, and the first sample of all


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that ended well: result.json and the rows of predictions.parquet."""

    result: dict[str, Any]
    rows: list[dict[str, Any]]


Evaluate = Callable[..., Run]


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    return build_pictures(tmp_path_factory.mktemp("imagenet"))


@pytest.fixture(scope="session")
def with_broken(pictures: Pictures, tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    """The same and, before all others, a JPEG that ends after a third of it."""
    home = tmp_path_factory.mktemp("broken")
    broken = build_pictures(home)
    whole = next(iter(sorted(pictures.data.glob("*/*.jpg")))).read_bytes()
    (broken.data / BROKEN).write_bytes(whole[: len(whole) // 3])
    return broken


def start(
    launch: Launch, pictures: Pictures, out: Path, processes: int, *more: str, threads: int | None = 1
) -> Finished:
    command: list[str | Path] = [
        *(sys.executable, "-m", "dualeval", "run", *pictures.arguments, "--batch-size", BATCH_SIZE)
    ]
    spread = ["--nproc", str(processes)] if processes > 1 else []
    variables = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return launch([*command, "--out", out, *spread, *more], cwd=pictures.home, variables=variables)


@pytest.fixture(scope="session")
def evaluate(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Evaluate:
    """Evaluate pictures once for each combination of processes, flags and threads, each in a new folder."""
    done: dict[tuple[object, ...], Run] = {}

    def once(pictures: Pictures, processes: int, *more: str, threads: int | None = 1) -> Run:
        key = (pictures.home, processes, threads, *more)
        if key not in done:
            out = tmp_path_factory.mktemp("run") / "out"
            start(launch, pictures, out, processes, *more, threads=threads).ok()
            result = json.loads((out / "result.json").read_text())
            assert result["chunks"]["resumed"] == 0
            assert result["world"]["size"] == processes
            rows = pyarrow.parquet.read_table(out / "predictions.parquet").to_pylist()
            done[key] = Run(result=result, rows=rows)
        return done[key]

    return once


@pytest.mark.parametrize(
    ("processes", "workers"),
    [
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((1, 2), (2, 0), (2, 2))),
        (1, 0),
        pytest.param(3, 0, marks=pytest.mark.long),
    ],
)
def test_the_published_accuracy(evaluate: Evaluate, pictures: Pictures, processes: int, workers: int) -> None:
    run = evaluate(pictures, processes, "--workers", str(workers))
    assert run.result["samples"] == {"total": 20, "evaluated": 20, "failed": 0}
    assert run.result["metrics"]["top1"] == 18 / 20
    assert run.result["metrics"]["top5"] == 19 / 20
    assert {row["id"]: row["target"] for row in run.rows} == pictures.labels
    assert [row["id"] for row in run.rows] == sorted(pictures.labels)
    losses = [row["loss"] for row in run.rows]
    assert run.result["metrics"]["loss"] == math.fsum(losses) / len(losses)


@pytest.mark.parametrize(
    ("processes", "workers"),
    [
        pytest.param(1, 2, marks=pytest.mark.long),
        pytest.param(2, 0, marks=pytest.mark.long),
        (2, 2),
        pytest.param(3, 0, marks=pytest.mark.long),
    ],
)
def test_the_same_bits(evaluate: Evaluate, pictures: Pictures, processes: int, workers: int) -> None:
    one = evaluate(pictures, 1, "--workers", "0")
    other = evaluate(pictures, processes, "--workers", str(workers))
    assert other.result["metrics"] == one.result["metrics"]
    assert other.result["metrics_digest"] == one.result["metrics_digest"]
    assert other.result["fingerprint"] == one.result["fingerprint"]
    assert other.rows == one.rows


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_broken_picture_is_skipped_and_listed(
    evaluate: Evaluate, with_broken: Pictures, processes: int
) -> None:
    run = evaluate(with_broken, processes, "--workers", "0", "--on-error", "skip")
    assert run.result["samples"] == {"total": 21, "evaluated": 20, "failed": 1}
    [failed] = run.result["failed"]
    assert failed["id"] == BROKEN
    assert "truncated" in failed["error"]
    assert any("1 sample" in warning for warning in run.result["warnings"])
    broken, *others = run.rows
    assert broken["id"] == BROKEN
    assert [name for name, value in broken.items() if value is not None] == ["id", "index"]
    # The metrics are of the other twenty, and of all of them.
    assert {row["id"]: row["target"] for row in others} == with_broken.labels
    assert run.result["metrics"]["top1"] == 18 / 20
    assert run.result["metrics"]["top5"] == 19 / 20
    losses = [row["loss"] for row in others]
    assert run.result["metrics"]["loss"] == math.fsum(losses) / 20
    one = evaluate(with_broken, 1, "--workers", "0", "--on-error", "skip")
    assert run.result["metrics_digest"] == one.result["metrics_digest"]
