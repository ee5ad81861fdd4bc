"""A machine to set Horovod up on, in which everything is false: facts, programs, pip and source."""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dualeval.tools.horovod.build import EDITS, UNITY, WITHOUT_CUDA, Build, Mpi, Nccl, Torch
from tests.conftest import ROOT, Finished, Launch

COMMAND: list[str | Path] = [sys.executable, "-m", "dualeval", "setup-horovod"]

TORCH = Torch(version="2.13.0+cpu", cuda=None, abi="1", standard=20)
OPEN_MPI = Mpi(wrapper="/opt/mpi/bin/mpicxx", version="Open MPI 4.1.4", link="c++ -L/opt/mpi/lib -lmpi")
BUILD = Build(
    torch=TORCH,
    compiler="c++ 12.2.0",
    mpi=OPEN_MPI,
    nccl=None,
    python="cpython-311-x86_64-linux-gnu",
    libc="glibc 2.36",
)
CUDA_TORCH = replace(TORCH, version="2.14.1+cu130", cuda="13.0")
NCCL = Nccl(home="/opt/nccl", version="2.30.7", cuda_home="/opt/cuda", cuda_version="13.0")
CUDA_BUILD = replace(BUILD, torch=CUDA_TORCH, nccl=NCCL)


def programs(folder: Path, **scripts: str) -> Path:
    """A folder with shell scripts for programs."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, script in scripts.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    return folder


def source_tree(folder: Path) -> Path:
    """A source with the lines that the edits look for, and some around them."""
    edits = (*EDITS, UNITY, *WITHOUT_CUDA)
    for file in {edit.file for edit in edits}:
        lines = [edit.old for edit in edits if edit.file == file]
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("".join(f"# before\n  {line}\n# after\n" for line in lines))
    return folder


# Does as pip does: a source archive, a wheel of it, and its installation; and writes down how it was called.
FALSE_PIP = """
import json, os, pathlib, shutil, subprocess, sys, tarfile, time, zipfile
here = pathlib.Path(__file__).resolve().parent.parent
words = sys.argv[1:]
with open(here / "calls", "a") as calls:
    calls.write(json.dumps([words, {name: value for name, value in os.environ.items()}]) + "\\n")
action = next(word for word in words if word in ("download", "wheel", "install"))
failure = here / "fail"
if failure.exists() and failure.read_text() == action:
    print("x.cc:7: error: 'at' is not a member of 'torch'")
    sys.exit(3)
waiting = here / "wait"
if waiting.exists() and waiting.read_text() == action:
    child = subprocess.Popen(["sleep", "600"])
    (here / "waiting").write_text(str(child.pid))
    try:
        child.wait()
    except KeyboardInterrupt:
        # Here the true one puts back the package that it was replacing.
        (here / "rolled back").touch()
        sys.exit(2)
if action == "download":
    shutil.copy(here / "horovod-0.28.1.tar.gz", words[words.index("--dest") + 1])
if action == "wheel":
    folder = pathlib.Path(words[words.index("--wheel-dir") + 1])
    assert "STANDARD 20" in (pathlib.Path(words[-1]) / "CMakeLists.txt").read_text()
    with zipfile.ZipFile(folder / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl", "w") as wheel:
        library = f"compiled at {time.time()}"
        wheel.writestr("horovod/__init__.py", "")
        built = {"gloo": "1", "mpi": os.environ.get("HOROVOD_WITH_MPI", "0"), "nccl": "0"}
        wheel.writestr("horovod/torch/__init__.py", "".join(
            f"def {name}_built(): return {value}\\n" for name, value in built.items()))
        wheel.writestr("horovod/torch/mpi_lib_v2.cpython-311-x86_64-linux-gnu.so", library)
        metadata = "Metadata-Version: 2.1\\nName: horovod\\nVersion: 0.28.1\\n"
        wheel.writestr("horovod-0.28.1.dist-info/METADATA", metadata)
        record = "".join(f"{name},,\\n" for name in wheel.namelist())
        wheel.writestr("horovod-0.28.1.dist-info/RECORD", record)
if action == "install" and not words[-1].endswith(".whl"):
    for name in words[words.index("install") + 1 :]:
        (here / f"{name}-1.dist-info").mkdir()
elif action == "install":
    with zipfile.ZipFile(words[-1]) as wheel:
        wheel.extractall(here)
"""
# Python runs it at its start: this package is only there where the false pip has put it.
HIDDEN = """
import importlib.metadata, pathlib
distribution = importlib.metadata.distribution
def visible(name):
    if name == {name!r} and not (pathlib.Path(__file__).parent / "{name}-1.dist-info").exists():
        raise importlib.metadata.PackageNotFoundError(name)
    return distribution(name)
importlib.metadata.distribution = visible
"""
TOOLS = {
    "c++": "echo c++ 12.2",
    "cc": "echo cc 12.2",
    "cmake": "echo cmake version 3.25.1",
    "make": "exit 0",
    "mpicxx": "echo mpicxx: Open MPI 4.1.4",
    "mpirun": "exit 0",
}


class Bench:
    """A machine to set Horovod up on: programs, a pip and a site folder, all false and of this test alone."""

    def __init__(self, folder: Path, launch: Launch) -> None:
        self.folder, self.launch = folder, launch
        self.site, self.cache, self.temporary = folder / "site", folder / "cache", folder / "tmp"
        self.temporary.mkdir()
        (self.site / "pip").mkdir(parents=True)
        (self.site / "pip/__init__.py").touch()
        (self.site / "pip/__main__.py").write_text(FALSE_PIP)
        self.programs = programs(folder / "bin", **TOOLS)
        self.source(source_tree(folder / "horovod-0.28.1"))

    def source(self, tree: Path) -> None:
        """Make a tree what pip fetches."""
        with tarfile.open(self.site / "horovod-0.28.1.tar.gz", "w:gz") as archive:
            archive.add(tree, arcname="horovod-0.28.1")

    @property
    def variables(self) -> dict[str, str]:
        return {
            # Installed twice within a second, a file of the same size has its old bytecode.
            "PYTHONDONTWRITEBYTECODE": "1",
            # Before the true ones in site-packages.
            "PYTHONPATH": f"{self.site}:{ROOT}",
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "TMPDIR": str(self.temporary),
            "HOME": str(self.folder),
            "XDG_CACHE_HOME": "",
        }

    def __call__(self, *options: str | Path, variables: Mapping[str, str] | None = None) -> Finished:
        command = [*COMMAND, "--cache", self.cache, *options]
        return self.launch(command, variables={**self.variables, **(variables or {})}, cwd=self.folder)

    def hide(self, package: str) -> None:
        """Have a package missing that is installed beside these tests."""
        (self.site / "sitecustomize.py").write_text(HIDDEN.format(name=package))

    def calls(self) -> list[str]:
        """What pip was asked to do since the last look."""
        file = self.site / "calls"
        if not file.exists():
            return []
        calls = [json.loads(line)[0] for line in file.read_text().splitlines()]
        file.unlink()
        return [word for call in calls for word in call if word in ("download", "wheel", "install")]

    def entries(self) -> list[Path]:
        return sorted(self.cache.iterdir()) if self.cache.exists() else []
