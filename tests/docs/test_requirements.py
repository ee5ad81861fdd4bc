"""A test whose requirements are missing is skipped by name, or fails where they are required."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Finished, Launch


def run_without_mpirun(launch: Launch, folder: Path, require: str) -> Finished:
    """Run one test that needs mpi, on a PATH with nothing on it."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "caller"]
    variables = {"PATH": str(folder), "DUALEVAL_REQUIRE": require}
    return launch([*command, "tests/backends/test_shared_mpi.py"], cwd=ROOT, variables=variables)


@pytest.mark.needs("horovod")
@pytest.mark.parametrize("require", ["", "horovod"])
def test_skipped_by_name(require: str, launch: Launch, tmp_path: Path) -> None:
    done = run_without_mpirun(launch, tmp_path, require)
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout
    assert "needs mpi: there is no mpirun; type: apt install openmpi-bin libopenmpi-dev" in done.stdout


@pytest.mark.needs("horovod")
def test_failed_where_required(launch: Launch, tmp_path: Path) -> None:
    done = run_without_mpirun(launch, tmp_path, "mpi,horovod")
    assert done.returncode == 1, done.stdout
    assert "1 error" in done.stdout
    assert "DUALEVAL_REQUIRE has mpi, but there is no mpirun" in done.stdout


def test_a_misspelt_requirement_is_not_passed_over(launch: Launch, tmp_path: Path) -> None:
    done = run_without_mpirun(launch, tmp_path, "mpy")
    assert done.returncode == 2
    assert "DUALEVAL_REQUIRE names ['mpy']; it knows" in done.stdout + done.stderr
