"""The start scripts of the example that trains, each as its first lines say, on two hosts and under Slurm."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Cluster
from tests.cluster.test_launchers import PATIENCE, Batch
from tests.conftest import ROOT, Launch
from tests.engine.end.test_endings import read
from tests.training.test_training import (
    FILES,
    MODEL,
    ONE_THREAD,
    SCRIPTS,
    SMALL,
    digest_by_dualeval,
    log_of,
    write_fashion,
)

# The hosts' own names lead to 127.0.1.1, as on many.
NETWORK = {"GLOO_SOCKET_IFNAME": "eth0"}

pytestmark = [pytest.mark.needs("cluster"), pytest.mark.long]


@pytest.fixture(scope="module")
def fashion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fashion(tmp_path_factory.mktemp("data") / "fashion", 100, 70)


def options(data: Path, out: Path) -> list[str]:
    return [*map(str, ("--model", MODEL, "--data", data, "--out", out)), "--epochs", "1", *SMALL]


def check(run: Path, data: Path, expected: Mapping[str, Any]) -> None:
    assert sorted(path.name for path in run.iterdir()) == FILES
    assert expected.items() <= read(run / "run.json").items()
    [entry] = log_of(run)
    assert entry["metrics_digest"] == digest_by_dualeval(run, data)


@pytest.mark.parametrize(
    ("script", "hosts", "variables", "expected"),
    [
        ("one_process", ["h0"], {}, {"world_size": 1, "backend": "torch", "launcher": "none"}),
        ("torchrun_one_node", ["h0"], {"RANKS": "3"}, {"world_size": 3, "launcher": "torchrun"}),
        (
            "torchrun_two_nodes",
            ["h0", "h1"],
            {"HEAD": "h0", "RANKS": "1", **NETWORK},
            {"world_size": 2, "backend": "torch"},
        ),
        pytest.param(
            *("horovodrun_one_node", ["h0"], {}, {"world_size": 2, "backend": "horovod"}),
            marks=pytest.mark.needs("horovod"),
        ),
        pytest.param(
            "horovodrun_two_nodes",
            ["h0"],
            {"HOSTS": "h0,h1", "RANKS": "1"},
            {"world_size": 2, "backend": "horovod"},
            marks=pytest.mark.needs("horovod"),
        ),
    ],
)
def test_each_start_script_trains_as_its_first_lines_say(
    cluster: Cluster,
    launch: Launch,
    fashion: Path,
    tmp_path: Path,
    script: str,
    hosts: list[str],
    variables: dict[str, str],
    expected: dict[str, Any],
) -> None:
    out = tmp_path / "run"
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                launch.started(
                    cluster.on(host, [SCRIPTS / f"{script}.sh", *options(fashion, out)]),
                    variables={**cluster.variables, **ONE_THREAD, **variables},
                    cwd=tmp_path,
                )
            )
            for host in hosts
        ]
        said = [text for process in processes for text in process.communicate(timeout=PATIENCE)]
    assert [process.returncode for process in processes] == [0] * len(hosts), "\n".join(said)
    check(out, fashion, expected)


@pytest.mark.parametrize("script", ["torchrun_two_nodes", "horovodrun_two_nodes"])
def test_a_script_for_two_machines_asks_for_them(launch: Launch, tmp_path: Path, script: str) -> None:
    done = launch([SCRIPTS / f"{script}.sh", "--data", "DATA", "--out", "runs/r18"], cwd=tmp_path)
    assert done.returncode == 2
    assert "give the name" in done.stderr


def test_the_job_of_slurm_trains_on_two_nodes(
    cluster: Cluster, launch: Launch, fashion: Path, tmp_path: Path
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    batch = Batch(cluster, launch, tmp_path)
    words = " ".join(options(fashion, tmp_path / "run"))
    variables = {**ONE_THREAD, **NETWORK, "RANKS": "2", "PYTHONPATH": str(ROOT)}
    with batch.begun(f"sbatch --nodes 2 examples/scripts/slurm.sbatch {words}", variables) as (number, _):
        state = cluster.wait_for_job(number, PATIENCE)
    log = (tmp_path / f"training-{number}.log").read_text()
    assert state == "COMPLETED", log
    check(tmp_path / "run", fashion, {"world_size": 4, "backend": "torch", "launcher": "torchrun"})
