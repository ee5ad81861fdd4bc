"""mpi4py and a Horovod with MPI share one MPI in a process, in any order, and with a caller's own use."""

from __future__ import annotations

import sys

import pytest

from tests.conftest import Launch
from tests.launchers import start

PREPARE = """
import os, torch
from dualeval import connect, detect
world = detect(os.environ)
def check(*backends):
    for backend in backends:
        assert backend.all_reduce(torch.tensor([world.rank + 1])).tolist() == [3]
        assert [piece.item() for piece in backend.all_gather(torch.tensor(world.rank))] == [0, 1]
"""
SCRIPTS = {
    "mpi first": """
mpi = connect("mpi", world, "cpu")
horovod = connect("horovod", world, "cpu")
check(mpi, horovod, mpi); horovod.close(); check(mpi); mpi.close()
""",
    "horovod first": """
horovod = connect("horovod", world, "cpu")
mpi = connect("mpi", world, "cpu")
check(mpi, horovod, mpi); horovod.close(); check(mpi); mpi.close()
""",
    "last in, last out": """
mpi = connect("mpi", world, "cpu")
horovod = connect("horovod", world, "cpu")
check(mpi, horovod); mpi.close(); check(horovod); horovod.close()
""",
    "the caller's MPI": """
from mpi4py import MPI
for name in ("mpi", "horovod", "torch", "mpi"):
    with connect(name, world, "cpu") as backend:
        check(backend)
        assert MPI.COMM_WORLD.allreduce(1) == 2
assert MPI.COMM_WORLD.allreduce(1) == 2
assert not MPI.Is_finalized()
""",
    "not again": """
from dualeval import LaunchError
with connect("mpi", world, "cpu") as backend:
    check(backend)
try:
    connect("mpi", world, "cpu")
except LaunchError as error:
    assert "cannot be started again" in str(error)
else:
    raise AssertionError("MPI was started twice")
""",
}


# What MPI cannot count in one call goes in several: 2 GiB of bytes, or here 70.
LARGE = """
import dualeval.backends.mpi
dualeval.backends.mpi._MOST_ELEMENTS = 70
own = torch.arange(100, dtype=torch.uint8) + world.rank
with connect("mpi", world, "cpu") as backend:
    assert backend.broadcast(own, 1).tolist() == list(range(1, 101))
    assert [piece.tolist() for piece in backend.all_gather(own)] == [list(range(100)), list(range(1, 101))]
    gathered = backend.gather(own, 1)
    if world.rank == 1:
        assert [piece.tolist() for piece in gathered] == [list(range(100)), list(range(1, 101))]
    assert backend.all_reduce(own.long()).tolist() == list(range(1, 201, 2))
"""


@pytest.mark.needs("mpi")
def test_more_than_one_call_can_carry(launch: Launch) -> None:
    launch([*start("mpirun", 2), sys.executable, "-c", PREPARE + LARGE], timeout=60).ok()


@pytest.mark.needs("horovod", "mpi")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in ("mpi first", "last in, last out") else [])
        for name in SCRIPTS
    ],
)
def test_one_mpi_in_a_process(name: str, launch: Launch) -> None:
    launch([*start("mpirun", 2), sys.executable, "-c", PREPARE + SCRIPTS[name]], timeout=60).ok()
