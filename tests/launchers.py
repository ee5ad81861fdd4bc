"""The real launchers, as tests start ranks with them."""

from __future__ import annotations

import sys

import pytest

from tests.conftest import BIN


def start(launcher: str, size: int) -> list[str]:
    """The words before a command that start so many ranks of it on this machine."""
    return {
        "none": [],
        "torchrun": [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={size}", "--no-python"],
        "horovodrun": [sys.executable, str(BIN / "horovodrun"), "--gloo", "-np", str(size)],
        "horovodrun --mpi": [sys.executable, str(BIN / "horovodrun"), "--mpi", "-np", str(size)],
        "mpirun": ["mpirun", "-np", str(size)],
    }[launcher]


def needs(launcher: str, backend: str) -> list[pytest.MarkDecorator]:
    """The mark of a test that starts ranks of a backend with a launcher."""
    names = set()
    if backend == "horovod" or launcher.startswith("horovodrun"):
        names.add("horovod")
    if backend == "mpi" or launcher in ("mpirun", "horovodrun --mpi"):
        names.add("mpi")
    return [pytest.mark.needs(*sorted(names))] if names else []
