"""Job arrays, heterogeneous jobs and jobs with GPUs under Slurm, and plain variables on two hosts."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster import test_launchers, test_requeue
from tests.cluster.hosts import Cluster
from tests.cluster.test_launchers import Batch
from tests.cluster.test_requeue import MODEL, PATIENCE, SLOW, until
from tests.conftest import ROOT, Launch

pytestmark = pytest.mark.needs("cluster")

PLACE: list[str | Path] = [sys.executable, ROOT / "tests/vehicles/workers/joining_worker.py", "place"]
COUNT_OF_TASKS = 3

# Asked for by the tests below, as this module's own.
batch = test_launchers.batch
digest = test_requeue.digest


@pytest.mark.long
def test_one_task_of_an_array_comes_back_alone(batch: Batch, digest: str) -> None:
    """The last one, whose number is the array's own: by that, Slurm would take all of them."""
    job = f"{MODEL} --batch-size 20 --limit 1600 --out out-%a"
    with batch.begun(f"dualeval submit --array 0-{COUNT_OF_TASKS - 1} -- {job}", SLOW) as (number, _):
        names = [f"{number}_{task}" for task in range(COUNT_OF_TASKS)]
        until(
            lambda: all(list(batch.folder.glob(f"out-{task}/journal/*")) for task in range(COUNT_OF_TASKS)),
            lambda: "\n".join(log.read_text() for log in batch.folder.glob("*.log")),
        )
        assert batch.facts(names[-1])["JobId"] == str(number)
        batch.order(f"scancel --signal=USR2 {names[-1]}")
        batch.cluster.wait_for_restart(names[-1], 1)
        logs = [batch.folder / f"dualeval-{name}.log" for name in names]
        for name, log in zip(names, logs, strict=True):
            assert batch.cluster.wait_for_job(name, PATIENCE) == "COMPLETED", log.read_text()
    assert [batch.facts(name)["Restarts"] for name in names] == ["0", "0", "1"]
    for task in range(COUNT_OF_TASKS):
        result = batch.result(f"out-{task}")
        assert result["metrics_digest"] == digest
        assert (result["chunks"]["resumed"] > 0) == (task == COUNT_OF_TASKS - 1)
    assert f"asked to queue job {names[-1]} again" in logs[-1].read_text()


@pytest.mark.long
def test_both_components_of_a_heterogeneous_job_evaluate(batch: Batch) -> None:
    """Slurm lists hosts and tasks by name, and numbers them by component: here the other way round."""
    tasks = "-w h1 --ntasks-per-node 2 : -w h0 --ntasks-per-node 1"
    with batch.begun(f"sbatch {tasks} slurm/eval.sbatch --limit 997 --out out") as (number, _):
        # The number of the first component, which has the script, stands for both.
        state = batch.cluster.wait_for_job(number + 1, PATIENCE)
    log = (batch.folder / f"dualeval-{number}.log").read_text()
    assert state == "COMPLETED", log
    assert batch.result("out")["world"] == {"size": 3, "nodes": 2, "launcher": "srun", "backend": "torch"}, (
        log
    )


def test_a_job_with_gpus_does_not_fall_back_to_cpus(batch: Batch) -> None:
    ended = batch("sbatch --gpus-per-node 1 slurm/eval.sbatch --limit 3 --out out")
    assert (ended.state, ended.exit_code) == ("FAILED", "2:0"), ended.log
    assert "--device cuda: rank 0 on h0 cannot compute on a GPU: torch" in ended.log
    assert not (batch.folder / "out/result.json").exists()


def test_plain_variables_place_ranks_of_two_hosts_in_any_order(cluster: Cluster, launch: Launch) -> None:
    """Ranks of one host need not follow each other."""
    hosts = ["h0", "h1", "h0"]
    with ExitStack() as stack:
        processes = []
        for rank, host in enumerate(hosts):
            own = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "h0", "MASTER_PORT": "23456"}
            processes.append(stack.enter_context(launch.started(cluster.on(host, PLACE), variables=own)))
        said = [process.communicate(timeout=PATIENCE) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert [place[:5] for place in json.loads(said[0][0])] == [
        [0, 0, 2, 0, [2, 1]],
        [1, 0, 1, 1, [2, 1]],
        [2, 1, 2, 0, [2, 1]],
    ]
