"""Shares in a Slurm array on two hosts, some killed: all of it once, with the digest of one process."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil  # type: ignore[import-untyped]
import pytest

from dualeval.engine.folder.layout import SUFFIX
from dualeval.result import read_status
from dualeval.tasks.image_classification import ImageClassification
from tests.cluster import test_launchers
from tests.cluster.test_launchers import Batch
from tests.cluster.test_requeue import MODEL, PACKAGE, SLOW
from tests.conftest import Launch
from tests.vehicles.faulty_models import FAULT
from tests.vehicles.sessions import evaluate

pytestmark = pytest.mark.needs("cluster")

PATIENCE_S = 900.0

# Asked for by the test below, as this module's own.
batch = test_launchers.batch


def is_done(batch: Batch, name: str) -> bool:
    status = read_status(batch.folder / "out/shares" / name)
    return status is not None and status.state == "done"


def has_saved(batch: Batch, name: str) -> bool:
    return any((batch.folder / "out/shares" / name / "journal").glob(f"*{SUFFIX}"))


def logs(batch: Batch, number: int) -> str:
    return "\n".join(log.read_text() for log in sorted(batch.folder.glob(f"dualeval-{number}_*.log")))


def kill(batch: Batch, name: str) -> None:
    """Kill the rank of a share."""
    text = name.replace("-of-", "/")
    for host in batch.cluster.hosts:
        for process in batch.cluster.processes(host):
            with suppress(psutil.NoSuchProcess):  # one that ends between the list and the look
                command = process.cmdline()
                if text in command and "python" in command[0]:
                    process.kill()


def run_array(batch: Batch, typed: str, *, variables: Mapping[str, str], killed: Sequence[str] = ()) -> str:
    """Hand over an array, kill some of its tasks in the midst, and wait for its end; returns the logs."""
    with batch.begun(typed, variables) as (number, _):
        left, deadline = [*killed], time.monotonic() + PATIENCE_S
        while left:
            assert time.monotonic() < deadline, logs(batch, number)
            for name in [name for name in left if has_saved(batch, name)]:
                kill(batch, name)
                left.remove(name)
            time.sleep(0.05)
        # Slurm forgets a task five minutes after its end.
        while batch.order("squeue --noheader"):
            assert time.monotonic() < deadline, logs(batch, number)
            time.sleep(0.5)
        return logs(batch, number)


@pytest.mark.parametrize(
    ("count", "batch_size", "slow_s", "hit"),
    [
        (2, 20, 0.1, [2]),
        pytest.param(100, 4, 1.0, [*range(5, 100, 10)], marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
    ids=["2 shares", "100 shares"],
)
def test_killed_shares_are_started_again(
    batch: Batch, launch: Launch, count: int, batch_size: int, slow_s: float, hit: Sequence[int]
) -> None:
    chunks = 1600 // batch_size
    typed = f"slurm/eval_array.sbatch {MODEL} --batch-size {batch_size} --limit 1600 --out out"
    variables = {**SLOW, FAULT: f"slow:{slow_s} all 0"}
    names = [f"{number}-of-{count}" for number in hit]
    everyone = range(1, count + 1)
    run_array(batch, f"sbatch --array 1-{count} {typed}", variables=variables, killed=names)
    assert [number for number in everyone if not is_done(batch, f"{number}-of-{count}")] == [*hit]

    refused = launch(["dualeval", "finish", "out"], cwd=batch.folder, variables=PACKAGE)
    assert refused.returncode == 2
    assert f"out is not finished: {count - len(hit)} of {count} shares. Missing: " in refused.stderr
    [array] = re.findall(r"--array=([\d,-]+)", refused.stderr)

    again = f"sbatch --array {array} {typed} --share %a/{count}"
    said = run_array(batch, again, variables=variables)
    # What was saved before is not evaluated again.
    resumed = [int(number) for number in re.findall(r"resumes in \S+: (\d+) of", said)]
    now = [int(number) for number in re.findall(r"is done, (\d+) of its", said)]
    assert len(resumed) == len(now) == len(hit)
    assert sum(resumed) + sum(now) == sum(len(range(share - 1, chunks, count)) for share in hit)

    launch(["dualeval", "finish", "out"], cwd=batch.folder, variables=PACKAGE).ok()
    result = batch.result("out")
    assert result["chunks"] == {"total": chunks, "evaluated_now": 0, "resumed": chunks}
    whole = evaluate(ImageClassification(), batch_size=batch_size, limit=1600)
    assert result["metrics_digest"] == whole.metrics_digest
