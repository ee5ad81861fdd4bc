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


@pytest.mark.needs("horovod", "mpi")
@pytest.mark.parametrize("name", SCRIPTS)
def test_one_mpi_in_a_process(name: str, launch: Launch) -> None:
    launch([*start("mpirun", 2), sys.executable, "-c", PREPARE + SCRIPTS[name]], timeout=60).ok()
