"""32 ranks on one machine, few as its cores may be, compute the digest of one process.

Started by their launchers they would import torch 32 times, a second of a core each; here they are forked
from one process that has imported it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from dualeval.backends.horovod import serve_rendezvous
from dualeval.world.network import LOOPBACK
from tests.conftest import ROOT, Launch
from tests.control_ranks import fail_in_the_middle, on_many_ranks, stop_all
from tests.faults import LOADED_S

WORKER = ROOT / "tests" / "workers" / "many_ranks_worker.py"
SIZE = 32
# NumPy's library of linear algebra starts its threads when it is imported.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

CONTROLLED = pytest.mark.parametrize(
    ("size", "processes"),
    [(128, 2), pytest.param(1000, 4, marks=[pytest.mark.long, pytest.mark.timeout(600)])],
)

Launched = Sequence[Mapping[str, str]]


@pytest.fixture(scope="module")
def wanted(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest that one process computes."""
    out = tmp_path_factory.mktemp("single") / "out"
    launch([sys.executable, "-m", "dualeval", "run", "--out", out]).ok()
    return str(json.loads((out / "result.json").read_text())["metrics_digest"])


@contextmanager
def torchrun() -> Iterator[Launched]:
    """Serve the store where the ranks meet; gives the variables that torchrun would set for each."""
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "many",
        "WORLD_SIZE": str(SIZE),
        "LOCAL_WORLD_SIZE": str(SIZE),
        "GROUP_RANK": "0",
    }
    yield [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(SIZE)]


@contextmanager
def horovodrun() -> Iterator[Launched]:
    """Serve Horovod's rendezvous, as --nproc does; gives the variables of each rank."""
    with serve_rendezvous(SIZE) as variables_of:
        yield [variables_of(rank) for rank in range(SIZE)]


def check(launch: Launch, folder: Path, launched: Launched, wanted: str) -> dict[str, object]:
    """Run the ranks and compare the digest of each; returns the World of result.json."""
    variables = folder / "variables.json"
    variables.write_text(json.dumps(launched))
    launch([sys.executable, WORKER, folder, variables], variables=ONE_THREAD, timeout=270).ok()
    assert [(folder / f"rank-{rank}").read_text() for rank in range(SIZE)] == [wanted] * SIZE
    result = json.loads((folder / "out/result.json").read_text())
    assert result["metrics_digest"] == wanted
    assert result["samples"] == {"total": 10_000, "evaluated": 10_000, "failed": 0}
    # 157 batches: at least four for each rank.
    assert len(result["timing"]["ranks"]) == SIZE
    world: dict[str, object] = result["world"]
    return world


@CONTROLLED
def test_a_failure_reaches_all(size: int, processes: int) -> None:
    """Promised within 2 s of a rank's failure; the ranks of a process are in each other's way here."""
    moments = on_many_ranks(size, processes, fail_in_the_middle)
    assert all(isinstance(of_rank, dict) for of_rank in moments), moments
    failed = moments[size // 2]["failed"]
    heard = [of_rank["heard"] - failed for of_rank in moments if "failed" not in of_rank]
    print(f"{size} ranks: heard after {max(heard):.2f} s; {moments[0]}")
    assert max(heard) < 2.0 + LOADED_S
    # Rank 0 evaluates beside it.
    assert moments[0]["cores of beats"] < 0.1


@CONTROLLED
def test_a_stop_is_concluded_by_all(size: int, processes: int) -> None:
    moments = on_many_ranks(size, processes, stop_all)
    assert all(isinstance(of_rank, dict) for of_rank in moments), moments
    signalled = moments[size // 2]["signalled"]
    ended = max(of_rank["ended"] for of_rank in moments) - signalled
    print(f"{size} ranks: ended after {ended:.2f} s")
    assert ended < 5.0 + LOADED_S


@pytest.mark.long
def test_32_ranks_of_torch(launch: Launch, tmp_path: Path, wanted: str) -> None:
    with torchrun() as launched:
        world = check(launch, tmp_path, launched, wanted)
    assert world == {"size": SIZE, "nodes": 1, "launcher": "torchrun", "backend": "torch"}


@pytest.mark.long
@pytest.mark.needs("horovod")
def test_32_ranks_of_horovod(launch: Launch, tmp_path: Path, wanted: str) -> None:
    with horovodrun() as launched:
        world = check(launch, tmp_path, launched, wanted)
    assert world == {"size": SIZE, "nodes": 1, "launcher": "horovodrun", "backend": "horovod"}
