"""Horovod, MPI, mpi4py, transformers missing or broken: an error says what to type, and all else works."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dualeval import cli
from dualeval.backends.horovod import _meets_over_mpi
from dualeval.errors import LaunchError
from dualeval.world import World
from tests.conftest import BIN, ROOT, Launch
from tests.launchers import start

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


def test_horovod_is_missing(launch: Launch, tmp_path: Path) -> None:
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


def test_transformers_is_missing(launch: Launch, tmp_path: Path) -> None:
    """The files are looked at later: what is missing is said first."""
    command: list[str | Path] = [BIN / "dualeval", "run", "--task", "question-answering"]
    command += ["--model", tmp_path / "model", "--data", tmp_path / "data.json"]
    words = ("needs the transformers library", "pip install transformers")
    check_error(launch, command, without(tmp_path, "transformers"), *words)


@pytest.mark.needs("mpi")
def test_mpi4py_is_missing(launch: Launch, tmp_path: Path) -> None:
    words = ("mpi4py is not installed", "pip install mpi4py")
    for backend in ("mpi", "torch"):
        command = [*start("mpirun", 2), *RUN, "--backend", backend]
        check_error(launch, command, without(tmp_path, "mpi4py"), *words)


@pytest.mark.long
@pytest.mark.needs("mpi", "horovod")
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --mpi"])
def test_mpi4py_is_missing_for_horovod(launcher: str, launch: Launch, tmp_path: Path) -> None:
    """It is set up along with Horovod; where it has gone since, that is said once, and not by each rank."""
    words = ("mpi4py is not installed", "with Horovod too", "pip install mpi4py")
    check_error(launch, [*start(launcher, 2), *RUN], without(tmp_path, "mpi4py"), *words, code=None)


@pytest.mark.parametrize(
    ("rank", "local_rank", "of_node", "said"),
    [
        (0, 0, False, "dualeval: error: it is gone\n"),
        (2, 0, False, ""),
        (0, 0, True, "dualeval: error: it is gone\n"),
        (1, 1, True, ""),
        (2, 0, True, f"dualeval: error: it is gone (on {socket.gethostname()})\n"),
        (3, 1, True, ""),
    ],
)
def test_what_may_be_of_one_node_is_said_by_the_first_rank_there(
    rank: int,
    local_rank: int,
    of_node: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Four ranks on two nodes: on rank 0's the library may be there."""
    for name, value in {"RANK": rank, "SIZE": 4, "LOCAL_RANK": local_rank, "LOCAL_SIZE": 2}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    # What follows the words: the process waits for the others' end, and ends.
    monkeypatch.setattr("dualeval.cli.sleep", lambda seconds: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    cli._say("it is gone", ["run"], of_node=of_node)
    assert capsys.readouterr().err == said


@pytest.mark.needs("mpi")
def test_the_mpi_library_is_missing(launch: Launch) -> None:
    command = [*start("mpirun", 2), *RUN, "--backend", "mpi"]
    variables = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    words = ("mpi4py cannot load an MPI library", "/nowhere/libmpi.so", "apt install openmpi-bin")
    check_error(launch, command, variables, *words)


@pytest.mark.needs("mpi")
def test_another_mpi_than_mpiruns(launch: Launch) -> None:
    """Without mpirun behind them the same variables leave each process a world of its own."""
    variables = {f"OMPI_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK")}
    variables |= {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
    words = ("as rank 1 of 2", "says rank 0 of 1", "Open MPI v", "MPI4PY_LIBMPI")
    check_error(launch, [*RUN, "--backend", "mpi"], variables, *words)


@pytest.mark.parametrize(
    ("launcher", "lacks", "words"),
    [
        ("openmpi", "mpi", ["built without MPI", "setup-horovod --with-mpi", "--backend mpi"]),
        ("horovodrun", "gloo", ["built without it", "setup-horovod"]),
        ("srun", "gloo", ["srun started", "built without it", "setup-horovod"]),
    ],
)
def test_horovod_lacks_what_the_launcher_needs(launcher: str, lacks: str, words: list[str]) -> None:
    built = SimpleNamespace(mpi_built=lambda: lacks != "mpi", gloo_built=lambda: lacks != "gloo")
    world = World(rank=0, size=2, local_rank=0, local_size=2, node_rank=None, launcher=launcher)
    with pytest.raises(LaunchError) as caught:
        _meets_over_mpi(built, world)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("pmi", "mpi_built", "words"),
    [(False, True, "srun was not told --mpi=pmix"), (True, False, "Horovod is built without MPI")],
)
def test_horovods_controller_that_cannot_be(
    pmi: bool, mpi_built: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_CONTROLLER", "mpi")
    built = SimpleNamespace(mpi_built=lambda: mpi_built, gloo_built=lambda: True)
    world = World(rank=0, size=2, local_rank=0, local_size=2, node_rank=0, launcher="srun", mpi=pmi)
    with pytest.raises(LaunchError, match=f"{words}.*unset HOROVOD_CONTROLLER"):
        _meets_over_mpi(built, world)


@pytest.mark.parametrize(
    ("pmi", "mpi_built", "controller", "over_mpi"),
    [
        (True, True, None, True),
        (True, True, "gloo", False),
        (True, False, None, False),
        (False, True, None, False),
    ],
)
def test_horovod_under_srun_meets_over_mpi_where_both_have_it(
    pmi: bool, mpi_built: bool, controller: str | None, over_mpi: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if controller is not None:
        monkeypatch.setenv("HOROVOD_CONTROLLER", controller)
    built = SimpleNamespace(mpi_built=lambda: mpi_built, gloo_built=lambda: True)
    world = World(rank=0, size=2, local_rank=0, local_size=2, node_rank=0, launcher="srun", mpi=pmi)
    assert _meets_over_mpi(built, world) is over_mpi


@pytest.mark.parametrize(
    ("command", "backend"),
    [
        pytest.param(RUN, "single", id="plain"),
        pytest.param([*RUN, "--nproc", "2"], "torch", id="nproc"),
        pytest.param(
            [*start("mpirun", 2), *RUN],
            "mpi",
            id="mpirun",
            marks=[pytest.mark.needs("mpi"), pytest.mark.long],
        ),
    ],
)
def test_all_else_works_without_horovod(
    launch: Launch, tmp_path: Path, command: list[str | Path], backend: str
) -> None:
    out = tmp_path / "out"
    launch([*command, "--out", out], variables=without(tmp_path, "horovod")).ok()
    assert json.loads((out / "result.json").read_text())["world"]["backend"] == backend


def test_nothing_of_horovod_or_mpi_is_imported_without_need(launch: Launch, tmp_path: Path) -> None:
    code = (
        "import atexit, sys; from dualeval.cli import main\n"
        "def check(): print(sorted({'horovod', 'mpi4py'} & set(sys.modules)))\n"
        "atexit.register(check); main(sys.argv[1:])"
    )
    for size in (1, 2):
        command = [*(start("torchrun", size) if size > 1 else []), sys.executable, "-c", code]
        done = launch([*command, "run", "--limit", "64", "--out", tmp_path / str(size)]).ok()
        # Anywhere: two ranks write into one pipe, also in the midst of each other's lines.
        assert done.stdout.count("[]") == size
