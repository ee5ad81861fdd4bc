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
from dualeval.network import LOOPBACK
from tests.conftest import ROOT, Launch

WORKER = ROOT / "tests" / "many_ranks_worker.py"
SIZE = 32
# NumPy's library of linear algebra starts its threads when it is imported.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

Launched = Sequence[Mapping[str, str]]


@pytest.fixture(scope="module")
def wanted(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest that one process computes."""
    out = tmp_path_factory.mktemp("single") / "out"
    done = launch([sys.executable, "-m", "dualeval", "run", "--out", out])
    assert done.returncode == 0, done.stderr
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
    done = launch([sys.executable, WORKER, folder, variables], variables=ONE_THREAD, timeout=270)
    assert done.returncode == 0, done.stderr
    assert [(folder / f"rank-{rank}").read_text() for rank in range(SIZE)] == [wanted] * SIZE
    result = json.loads((folder / "out/result.json").read_text())
    assert result["metrics_digest"] == wanted
    assert result["samples"] == {"total": 10_000, "evaluated": 10_000, "failed": 0}
    # 157 batches: at least four for each rank.
    assert len(result["timing"]["ranks"]) == SIZE
    world: dict[str, object] = result["world"]
    return world


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
