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
        *(sys.executable, "-m", "dualeval", "run", *pictures.arguments, "--batch-size", BATCH_SIZE),
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


@pytest.mark.long
def test_the_same_bits_at_any_number_of_threads(evaluate: Evaluate, pictures: Pictures) -> None:
    """Of one process, which takes every core where nothing says otherwise, and of a rank, which takes one."""
    one = evaluate(pictures, 1, "--workers", "0")
    two = evaluate(pictures, 1, "--workers", "0", threads=2)
    assert two.result["metrics_digest"] == one.result["metrics_digest"]


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


def test_the_log_tells_the_right_preprocessing_from_the_wrong(
    evaluate: Evaluate, launch: Launch, pictures: Pictures, tmp_path: Path
) -> None:
    """With ImageNet's usual values, which were assumed, this model loses two of twenty pictures."""
    run = evaluate(pictures, 1, "--workers", "0")
    line = "256 bicubic, crop 224, mean 0.5, std 0.5 (given)"
    assert run.result["description"]["preprocessing"] == line
    assert run.result["job"]["interpolation"] == "bicubic"
    model: list[str | Path] = ["--model", "lite:efficientnet_lite0", "--weights", pictures.weights]
    command = [sys.executable, "-m", "dualeval", "run", *model, "--data", pictures.data, "--no-progress"]
    command += ["--workers", "0", "--out", tmp_path / "out"]
    done = launch(command, cwd=pictures.home)
    assert done.returncode == 2
    assert "nothing says how its pictures are prepared" in done.stderr
    done = launch([*command, "--preprocessing", "imagenet"], cwd=pictures.home).ok()
    said = dict(line.split(maxsplit=1) for line in done.stdout.splitlines()[:5])
    assert said["preprocessing"] == (
        "256 bilinear, crop 224, ImageNet mean and std (--preprocessing imagenet)"
    )
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert result["description"] == said
    assert result["metrics"]["top1"] == 16 / 20
    assert (result["job"]["device"], result["job"]["workers"], result["job"]["crop"]) == ("cpu", 0, 224)
    assert {name for name in said if said[name] != run.result["description"][name]} == {
        "preprocessing",
        "job",
    }


def test_a_failed_sample_is_in_the_digest(
    evaluate: Evaluate, pictures: Pictures, with_broken: Pictures
) -> None:
    whole = evaluate(pictures, 1, "--workers", "0")
    skipped = evaluate(with_broken, 1, "--workers", "0", "--on-error", "skip")
    assert skipped.result["metrics_digest"] != whole.result["metrics_digest"]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_broken_picture_stops_the_run(
    launch: Launch, with_broken: Pictures, tmp_path: Path, processes: int
) -> None:
    finished = start(launch, with_broken, tmp_path / "out", processes, "--workers", "0")
    assert finished.returncode == 2
    messages = [line for line in finished.stderr.splitlines() if "dualeval: error:" in line]
    assert len(messages) == 1, finished.stderr
    [message] = messages
    assert BROKEN in message
    assert "truncated" in message
    assert "--on-error skip" in message
    assert "Traceback" not in finished.stderr
    status = json.loads((tmp_path / "out/status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 2)
    assert BROKEN in status["reason"]
    assert not (tmp_path / "out/result.json").exists()
