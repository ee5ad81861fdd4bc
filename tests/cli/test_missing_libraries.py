"""Horovod, MPI, mpi4py, transformers missing or broken: an error says what to type, and all else works."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dualeval import cli
from dualeval.backends.horovod import _meets_over_mpi
from dualeval.errors import LaunchError
from dualeval.world import World
from tests.conftest import BIN, ROOT, Launch
from tests.vehicles.launchers import start

RUN: list[str | Path] = [BIN / "dualeval", "run", "--limit", "200"]
# Python imports this module of every process at its start, wherever it lies on the path.
HIDING = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
def hide(name, path=None, target=None):
    return None if name.partition('.')[0] in {hidden} else find_spec(name, path, target)
PathFinder.find_spec = staticmethod(hide)
"""


def without(folder: Path, *hidden: str) -> dict[str, str]:
    """Variables with which a process finds these packages nowhere."""
    (folder / "sitecustomize.py").write_text(HIDING.format(hidden=set(hidden)))
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


@pytest.fixture
def broken_horovod(tmp_path: Path) -> dict[str, str]:
    """Variables with which a process finds a Horovod whose compiled library is none."""
    spec = importlib.util.find_spec("horovod")
    assert spec is not None
    assert spec.origin is not None
    copy = tmp_path / "broken" / "horovod"
    shutil.copytree(Path(spec.origin).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for library in copy.glob("torch/*.so"):
        library.write_bytes(b"no library")
    return {"PYTHONPATH": f"{copy.parent}:{ROOT}"}


def check_error(
    launch: Launch, command: list[str | Path], variables: dict[str, str], *words: str, code: int | None = 2
) -> None:
    done = launch(command, variables=variables)
    assert done.returncode == code if code is not None else done.returncode != 0
    output = done.stdout + done.stderr
    assert "dualeval: error: " in output, output
    assert output.count("dualeval: error: ") == 1, f"expected one message, not one a rank:\n{output}"
    for word in words:
        assert word in output, output
    assert 'File "' not in output.partition("dualeval: error: ")[0], output


def test_a_missing_horovod_is_named(launch: Launch, tmp_path: Path) -> None:
    command = [*RUN, "--nproc", "2", "--backend", "horovod"]
    check_error(launch, command, without(tmp_path, "horovod"), "Horovod is not installed", "setup-horovod")


@pytest.mark.long
@pytest.mark.needs("horovod", "mpi")
def test_a_broken_horovod_is_not_passed_over(launch: Launch, broken_horovod: dict[str, str]) -> None:
    """What mpirun takes by itself must not depend on a node's Horovod being whole; another can be named."""
    command = [*start("mpirun", 2), *RUN]
    check_error(launch, command, broken_horovod, "cannot be loaded", "setup-horovod")
    done = launch([*command, "--backend", "mpi", "--json"], variables=broken_horovod).ok()
    assert json.loads(done.stdout)["world"]["backend"] == "mpi"


def test_a_missing_transformers_is_named(launch: Launch, tmp_path: Path) -> None:
    """The files are looked at later: what is missing is said first."""
    command: list[str | Path] = [BIN / "dualeval", "run", "--task", "question-answering"]
    command += ["--model", tmp_path / "model", "--data", tmp_path / "data.json"]
    words = ("needs the transformers library", "pip install 'dualeval[hf]'")
    check_error(launch, command, without(tmp_path, "transformers"), *words)


@pytest.mark.needs("mpi")
def test_a_missing_mpi4py_is_named(launch: Launch, tmp_path: Path) -> None:
    words = ("mpi4py is not installed", "pip install mpi4py")
    for backend in ("mpi", "torch"):
        command = [*start("mpirun", 2), *RUN, "--backend", backend]
        check_error(launch, command, without(tmp_path, "mpi4py"), *words)


@pytest.mark.long
@pytest.mark.needs("mpi", "horovod")
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --mpi"])
def test_a_missing_mpi4py_is_named_once_for_horovod(launcher: str, launch: Launch, tmp_path: Path) -> None:
    """It is set up along with Horovod; where it has gone since, that is said once, and not by each rank."""
    words = ("mpi4py is not installed", "with Horovod too", "pip install mpi4py")
    check_error(launch, [*start(launcher, 2), *RUN], without(tmp_path, "mpi4py"), *words, code=None)


HERE = f" (on {socket.gethostname()})"


@pytest.mark.parametrize(
    ("rank", "of_node", "where"),
    [(0, False, ""), (2, False, None), (0, True, ""), (1, True, None), (2, True, HERE), (3, True, None)],
)
def test_an_error_of_one_node_is_printed_by_its_first_rank(
    rank: int, of_node: bool, where: str | None, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four ranks on two nodes: on rank 0's the library may be there."""
    for name, value in {"RANK": rank, "SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_SIZE": 2}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    # What follows the words: the process waits for the others' end, and ends.
    monkeypatch.setattr("dualeval.cli.sleep", lambda seconds: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    cli._say("it is gone", ["run"], of_node=of_node)
    assert capsys.readouterr().err == ("" if where is None else f"dualeval: error: it is gone{where}\n")


@pytest.mark.needs("mpi")
def test_a_missing_mpi_library_is_named(launch: Launch) -> None:
    command = [*start("mpirun", 2), *RUN, "--backend", "mpi"]
    variables = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    words = ("mpi4py cannot load an MPI library", "/nowhere/libmpi.so", "apt install openmpi-bin")
    check_error(launch, command, variables, *words)


@pytest.mark.needs("mpi")
def test_an_mpi_other_than_mpiruns_is_refused(launch: Launch) -> None:
    """Without mpirun behind them the same variables leave each process a world of its own."""
    variables = {f"OMPI_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK")}
    variables |= {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
    words = ("as rank 1 of 2", "says rank 0 of 1", "Open MPI v", "MPI4PY_LIBMPI")
    check_error(launch, [*RUN, "--backend", "mpi"], variables, *words)


BOTH = {"gloo", "mpi"}


@pytest.mark.parametrize(
    ("launcher", "pmi", "built", "controller", "found"),
    [
        ("openmpi", False, {"gloo"}, None, "built without MPI.*setup-horovod --with-mpi.*--backend mpi"),
        ("horovodrun", False, {"mpi"}, None, "built without it.*setup-horovod"),
        ("srun", False, {"mpi"}, None, "srun started.*built without it.*setup-horovod"),
        ("srun", False, BOTH, "mpi", "srun was not told --mpi=pmix.*unset HOROVOD_CONTROLLER"),
        ("srun", True, {"gloo"}, "mpi", "Horovod is built without MPI.*unset HOROVOD_CONTROLLER"),
        # Over MPI where both have it.
        ("srun", True, BOTH, None, True),
        ("srun", True, BOTH, "gloo", False),
        ("srun", True, {"gloo"}, None, False),
        ("srun", False, BOTH, None, False),
    ],
)
def test_horovod_meets_over_what_launcher_and_build_have(
    launcher: str,
    pmi: bool,
    built: set[str],
    controller: str | None,
    found: bool | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if controller is not None:
        monkeypatch.setenv("HOROVOD_CONTROLLER", controller)
    library = SimpleNamespace(mpi_built=lambda: "mpi" in built, gloo_built=lambda: "gloo" in built)
    world = World(rank=0, size=2, local_rank=0, local_size=2, node_rank=0, launcher=launcher, mpi=pmi)
    if isinstance(found, bool):
        assert _meets_over_mpi(library, world) is found
        return
    with pytest.raises(LaunchError, match=f"(?s){found}"):
        _meets_over_mpi(library, world)


@pytest.mark.parametrize(
    ("command", "backend", "gone"),
    [
        pytest.param(RUN, "single", ["horovod", "mpi4py"], id="plain"),
        pytest.param([*RUN, "--nproc", "2"], "torch", ["horovod", "mpi4py"], id="nproc"),
        pytest.param(
            *([*start("mpirun", 2), *RUN], "mpi", ["horovod"]),
            id="mpirun",
            marks=[pytest.mark.needs("mpi"), pytest.mark.long],
        ),
    ],
)
def test_other_backends_work_without_the_missing_libraries(
    launch: Launch, tmp_path: Path, command: list[str | Path], backend: str, gone: list[str]
) -> None:
    out = tmp_path / "out"
    launch([*command, "--out", out], variables=without(tmp_path, *gone)).ok()
    assert json.loads((out / "result.json").read_text())["world"]["backend"] == backend
