"""Batch jobs that Slurm warns, kills, cancels or loses a node of: which of them come back, and with what."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dualeval.engine.folder.layout import SUFFIX
from dualeval.tasks.image_classification import ImageClassification
from tests.cluster import test_launchers
from tests.cluster.hosts import Cluster
from tests.cluster.test_launchers import Batch
from tests.conftest import ROOT, Launch
from tests.vehicles.faulty_models import FAULT, FLUSH_S
from tests.vehicles.sessions import evaluate

pytestmark = pytest.mark.needs("cluster")

PATIENCE = 60.0
ASSETS = ROOT / "dualeval/assets"
FAULTY = "tests.vehicles.faulty_models:fashion_cnn"
MODEL = f"--model {FAULTY} --weights {ASSETS}/fashion_cnn.safetensors --data {ASSETS}"
JOB = f"{MODEL} --batch-size 20 --limit 1600 --out out"
TASKS = "--nodes 2 --ntasks-per-node 1"
SBATCH = f"sbatch {TASKS} slurm/eval.sbatch {JOB}"
PACKAGE = {"PYTHONPATH": str(ROOT)}
# Each of two ranks works for 3 s, and has saved something after the first.
SLOW = {**PACKAGE, FAULT: "slow:0.15 all 0", FLUSH_S: "0.3"}
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"
TORCHRUN = (
    "srun torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint h0:29500 --rdzv-id 7 "
    f"--signals-to-handle {SIGNALS} -m dualeval run {JOB}"
)

# Asked for by the tests below, as this module's own.
batch = test_launchers.batch


@pytest.fixture(scope="module")
def digest() -> str:
    """That of the job without Slurm, and without a pause."""
    return evaluate(ImageClassification(), batch_size=20, limit=1600).metrics_digest


def status(batch: Batch) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((batch.folder / "out/status.json").read_text())
    return found


def until(found: Callable[[], object], what: Callable[[], str]) -> None:
    """Wait for something; fails with what is there instead."""
    deadline = time.monotonic() + PATIENCE
    while not found():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


def wait_for_chunks(batch: Batch, number: int) -> None:
    """Wait until a job's ranks have saved some, and are at work on the next."""
    log = batch.folder / f"dualeval-{number}.log"
    until(
        lambda: list((batch.folder / "out/journal").glob(f"*{SUFFIX}")),
        lambda: log.read_text() if log.exists() else "no log",
    )


def check_completed(batch: Batch, number: int, digest: str, restarts: int) -> str:
    """Check the result of a job that has come back; returns its log."""
    log = (batch.folder / f"dualeval-{number}.log").read_text()
    assert batch.cluster.wait_for_job(number, PATIENCE) == "COMPLETED", log
    facts = batch.facts(number)
    assert (facts["ExitCode"], facts["Restarts"]) == ("0:0", str(restarts))
    result = batch.result("out")
    assert result["metrics_digest"] == digest
    assert result["chunks"]["resumed"] > 0
    assert status(batch)["state"] == "done"
    return (batch.folder / f"dualeval-{number}.log").read_text()


WARNED = ["stopped by SIGUSR2", "asked to queue job {} again, to resume in out."]


@pytest.mark.parametrize(
    ("line", "order", "says"),
    [
        (f"{SBATCH} --fresh", "scancel --signal=USR2 {}", WARNED),
        pytest.param(f"dualeval submit {TASKS} -- {JOB}", "scontrol requeue {}", [], marks=pytest.mark.long),
    ],
    ids=["warned", "requeued"],
)
def test_a_job_comes_back(batch: Batch, digest: str, line: str, order: str, says: list[str]) -> None:
    with batch.begun(line, SLOW) as (number, _):
        wait_for_chunks(batch, number)
        batch.order(order.format(number))
        batch.cluster.wait_for_restart(number, 1)
        log = check_completed(batch, number, digest, restarts=1)
    assert all(words.format(number) in log for words in says), log


@pytest.mark.parametrize(
    ("line", "order", "state", "signal"),
    [
        (SBATCH, "scancel {}", "CANCELLED", "SIGTERM"),
        # To the batch shell, and through torchrun's agents.
        pytest.param(SBATCH, "scancel --batch --signal=TERM {}", "FAILED", "SIGTERM", marks=pytest.mark.long),
        pytest.param(
            f"sbatch {TASKS} --output dualeval-%j.log --wrap '{TORCHRUN}'",
            *("scancel --signal=USR2 {}", "FAILED", "SIGUSR2"),
            marks=pytest.mark.long,
        ),
    ],
    ids=["cancelled", "shell", "torchrun"],
)
def test_a_job_that_does_not_come_back_has_saved(
    batch: Batch, line: str, order: str, state: str, signal: str
) -> None:
    with batch.begun(line, SLOW) as (number, _):
        wait_for_chunks(batch, number)
        batch.order(order.format(number))
        assert batch.cluster.wait_for_job(number, PATIENCE) == state
    assert batch.facts(number)["Restarts"] == "0"
    found = status(batch)
    assert (found["state"], found["signal"], found["exit_code"]) == ("stopped", signal, 75)
    assert found["chunks_saved"] > 0


@pytest.mark.long
def test_where_slurm_does_not_requeue_the_same_line_goes_on(batch: Batch, digest: str) -> None:
    line = f"sbatch --no-requeue {TASKS} slurm/eval.sbatch {JOB}"
    with batch.begun(line, SLOW) as (number, _):
        wait_for_chunks(batch, number)
        batch.order(f"scancel --signal=USR2 {number}")
        assert batch.cluster.wait_for_job(number, PATIENCE) == "FAILED"
    assert batch.facts(number)["ExitCode"] == "75:0"
    log = (batch.folder / f"dualeval-{number}.log").read_text()
    assert "does not queue this job again. To resume, type the same line with --out out." in log
    again = batch(line, PACKAGE)
    check_completed(batch, again.number, digest, restarts=0)


@pytest.mark.long
def test_a_job_whose_time_is_up_comes_back(batch: Batch, digest: str) -> None:
    # Slurm looks every 30 s, and warns where the time is within the next 30: 10 to 40 s after the start,
    # and the job takes 50.
    slow = {**PACKAGE, FAULT: "slow:1.3 all 0"}
    line = f"sbatch {TASKS} --time=1 --signal=USR2@20 slurm/eval.sbatch {JOB}"
    with batch.begun(line, slow) as (number, _):
        batch.cluster.wait_for_restart(number, 1, 90)
        batch.order(f"scontrol update jobid={number} timelimit=10")
        log = check_completed(batch, number, digest, restarts=1)
    assert "stopped by SIGUSR2" in log


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    """A cluster that a test may damage."""
    with Cluster() as cluster:
        yield cluster


@pytest.mark.long
def test_a_job_of_a_lost_node_comes_back(
    own_cluster: Cluster, launch: Launch, tmp_path: Path, digest: str
) -> None:
    batch = Batch(own_cluster, launch, tmp_path)
    with batch.begun(SBATCH, SLOW) as (number, _):
        wait_for_chunks(batch, number)
        own_cluster.lose("h1")
        own_cluster.bring_back("h1")
        own_cluster.wait_for_restart(number, 1)
        check_completed(batch, number, digest, restarts=1)
