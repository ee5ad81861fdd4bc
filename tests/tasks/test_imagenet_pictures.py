"""The whole way on real input: twenty ImageNet pictures and EfficientNet-Lite0, on 1, 2 and 3 processes."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.assets import Pictures, build_pictures
from tests.conftest import Launch

# Five batches, so that each of three ranks has at least one.
BATCH_SIZE = "4"
# result.json and the rows of predictions.parquet.
Run = tuple[dict[str, Any], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    return build_pictures(tmp_path_factory.mktemp("imagenet"))


def evaluated(launch: Launch, pictures: Pictures, out: Path, processes: int, workers: int) -> Run:
    command = [sys.executable, "-m", "dualeval", "run", *pictures.arguments, "--batch-size", BATCH_SIZE]
    command += ["--out", out, "--workers", str(workers)]
    command += ["--nproc", str(processes)] if processes > 1 else []
    launch(command, cwd=pictures.home, variables={"OMP_NUM_THREADS": "1"}).ok()
    result = json.loads((out / "result.json").read_text())
    assert (result["chunks"]["resumed"], result["world"]["size"]) == (0, processes)
    return result, pyarrow.parquet.read_table(out / "predictions.parquet").to_pylist()


@pytest.fixture(scope="session")
def alone(launch: Launch, pictures: Pictures, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return evaluated(launch, pictures, tmp_path_factory.mktemp("run") / "out", 1, 0)


def test_the_published_accuracy(alone: Run, pictures: Pictures) -> None:
    result, rows = alone
    assert result["samples"] == {"total": 20, "evaluated": 20, "failed": 0}
    assert result["metrics"]["top1"] == 18 / 20
    assert result["metrics"]["top5"] == 19 / 20
    assert {row["id"]: row["target"] for row in rows} == pictures.labels
    assert [row["id"] for row in rows] == sorted(pictures.labels)
    losses = [row["loss"] for row in rows]
    assert result["metrics"]["loss"] == math.fsum(losses) / len(losses)


@pytest.mark.parametrize(
    ("processes", "workers"),
    [*(pytest.param(*each, marks=pytest.mark.long) for each in ((1, 2), (2, 0), (3, 0))), (2, 2)],
)
def test_the_same_bits(
    launch: Launch, alone: Run, pictures: Pictures, tmp_path: Path, processes: int, workers: int
) -> None:
    result, rows = evaluated(launch, pictures, tmp_path / "out", processes, workers)
    for name in ("samples", "metrics", "metrics_digest", "fingerprint"):
        assert result[name] == alone[0][name]
    assert rows == alone[1]
