"""The cores of a node among its ranks, whether or not the launcher has bound these."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from dualeval.launch.cores import Cores, share_of_cores
from tests.conftest import Launch
from tests.launchers import needs, start


def on(host: str, numbers: range | list[int], **quotas: float) -> Cores:
    return Cores(host=host, numbers=list(numbers), quotas=quotas)


@pytest.mark.parametrize(
    ("everyone", "shares"),
    [
        ([on("a", range(8))], [8]),
        ([on("a", range(8))] * 4, [2] * 4),
        ([on("a", range(3))] * 3, [1] * 3),
        ([on("a", range(2))] * 4, [1] * 4),
        # Bound to cores of their own; to two sockets of four cores, two ranks on each.
        ([on("a", [0]), on("a", [1])], [1, 1]),
        ([on("a", range(4))] * 2 + [on("a", range(4, 8))] * 2, [2] * 4),
        # One rank bound to a core that the other may use as well.
        ([on("a", [0]), on("a", range(4))], [1, 3]),
        # Uneven nodes whose cores have the same numbers.
        ([on("a", range(8)), on("b", range(8)), on("b", range(8))], [8, 4, 4]),
        # A container's quota, of which its ranks have equal parts; less than one core is one thread.
        ([on("a", range(128), box=4)], [4]),
        ([on("a", range(128), box=4)] * 2, [2] * 2),
        ([on("a", range(128), box=2.5)], [2]),
        ([on("a", range(128), box=0.5)] * 2, [1] * 2),
        # Greater than the cores.
        ([on("a", range(2), box=4)] * 2, [1] * 2),
        # Two containers of a host have a quota each; a third one none.
        (
            [
                on("a", range(64), box=4),
                on("a", range(64), other=8),
                on("a", range(64), other=8),
                on("a", range(64)),
            ],
            [4, 4, 4, 16],
        ),
        # In a pod that has less than its containers together.
        ([on("a", range(64), box=4, pod=6), on("a", range(64), other=4, pod=6)], [3, 3]),
        # Groups of different hosts may have one name.
        ([on("a", range(8), box=4), on("b", range(8), box=4)], [4, 4]),
    ],
)
def test_share_of_cores(everyone: list[Cores], shares: list[int]) -> None:
    assert [share_of_cores(own, everyone) for own in everyone] == shares


THREADS = """
import json, os, sys, torch
from pathlib import Path
from dualeval import connect, detect
from dualeval.world.devices import take_cores
torch.set_num_threads(7)
with connect(None, detect(os.environ), "cpu") as backend:
    found = [take_cores(backend, sets_threads=True), torch.get_num_threads()]
    Path(sys.argv[1], str(backend.world.rank)).write_text(json.dumps(found))
"""


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("horovodrun", marks=[*needs("horovodrun", "horovod"), pytest.mark.long]),
        pytest.param("mpirun", marks=needs("mpirun", "mpi")),
    ],
)
@pytest.mark.parametrize("chosen", [None, pytest.param("3", marks=pytest.mark.long)])
def test_threads_are_the_share_unless_the_user_chose(
    launcher: str, chosen: str | None, launch: Launch, tmp_path: Path
) -> None:
    variables = {} if chosen is None else {"OMP_NUM_THREADS": chosen}
    command: list[str | Path] = [*start(launcher, 2), sys.executable, "-c", THREADS, tmp_path]
    launch(command, variables=variables).ok()
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in range(2):
        found = json.loads((tmp_path / str(rank)).read_text())
        # 7 is what the process had before: a choice of the user's is left alone.
        assert found == [share, 7 if chosen else share]
