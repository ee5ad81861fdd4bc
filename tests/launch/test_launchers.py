"""Bad input, failures, signals and kills under launchers that are not ours: one message, and an end."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.conftest import Launch
from tests.vehicles.launchers import needs

# A model that takes its time, and says that it is there.
SLOW = """
import os, time
from pathlib import Path
from torch import nn
class Slow(nn.Linear):
    def forward(self, images):
        mine = Path(os.environ["HERE"], str(os.getpid()))
        if mine.exists() and "FAIL" in os.environ:
            raise RuntimeError("the model broke")
        mine.touch()
        time.sleep(0.1)
        return super().forward(images.flatten(1))
def make(num_classes):
    return Slow(784, num_classes)
"""
NPROC = "dualeval run --nproc 2 --backend horovod"
GLOO = "horovodrun --gloo -np 2 dualeval run"
MPIRUN = "mpirun -np 2 dualeval run --backend mpi"
OVER_MPI = "horovodrun --mpi -np 2 dualeval run"


def ways(*quick: str, long: Sequence[str]) -> pytest.MarkDecorator:
    """A test of these ways to start, the latter in the long run alone."""
    needed = {OVER_MPI: ("horovodrun --mpi", "horovod"), MPIRUN: ("mpirun", "mpi")}
    marks = {way: needs(*needed.get(way, ("horovodrun", "horovod"))) for way in (*quick, *long)}
    params = [pytest.param(way, marks=marks[way]) for way in quick]
    params += [pytest.param(way, marks=[*marks[way], pytest.mark.long]) for way in long]
    return pytest.mark.parametrize("way", params)


@ways(GLOO, long=[NPROC, MPIRUN, OVER_MPI])
def test_bad_input_is_said_once(way: str, launch: Launch, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = launch([*way.split(), "--weights", tmp_path / "none.pt", "--model", "fashion-cnn", "--out", out])
    # horovodrun alone makes 1 of every code, where it starts the ranks itself.
    assert done.returncode == (1 if way.startswith("horovodrun --gloo") else 2), done.stderr
    assert (done.stdout + done.stderr).count("dualeval: error: ") == 1
    assert "none.pt" in done.stdout + done.stderr
    assert not out.exists()


def start_slowly(way: str, folder: Path) -> tuple[list[str | Path], dict[str, str]]:
    """A command that evaluates for minutes, and its variables."""
    (folder / "slow.py").write_text(SLOW)
    (folder / "here").mkdir()
    command = [*way.split(), "--model", "slow:make", "--weights", "random:0", "--num-classes", "10"]
    data = Path(__file__).resolve().parents[2] / "dualeval" / "assets"
    command += ["--data", str(data), "--batch-size", "2", "--no-progress", "--out", str(folder / "out")]
    variables = {"PYTHONPATH": str(folder), "HERE": str(folder / "here"), "OMP_NUM_THREADS": "1"}
    return [*command], variables


def await_ranks(folder: Path, process: subprocess.Popen[str]) -> list[int]:
    """Wait until both ranks evaluate; returns their process ids."""
    while len(found := list((folder / "here").iterdir())) < 2:
        assert process.poll() is None, process.communicate()
        with_timeout(process, 0.1)
    return [int(path.name) for path in found]


def with_timeout(process: subprocess.Popen[str], seconds: float) -> bool:
    """Whether a process ends within so many seconds."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


@ways(GLOO, MPIRUN, long=[NPROC])
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_signal_to_the_launcher_ends_all(
    way: str, number: signal.Signals, launch: Launch, tmp_path: Path
) -> None:
    command, variables = start_slowly(way, tmp_path)
    # Whoever started the tests may ignore some signals, and what they start would inherit that.
    with launch.started(["env", "--default-signal", *command], variables=variables) as process:
        await_ranks(tmp_path, process)
        process.send_signal(number)
        assert with_timeout(process, 60), f"still running after {number.name}"
        assert process.returncode != 0


@ways(NPROC, long=[MPIRUN, GLOO])
def test_a_killed_rank_ends_all(way: str, launch: Launch, tmp_path: Path) -> None:
    command, variables = start_slowly(way, tmp_path)
    with launch.started(command, variables=variables) as process:
        psutil.Process(await_ranks(tmp_path, process)[1]).kill()
        assert with_timeout(process, 60)
        assert process.returncode != 0
        if way.startswith("dualeval"):
            assert process.stderr is not None
            assert "was ended by SIGKILL" in process.stderr.read()


@ways(GLOO, long=[NPROC, MPIRUN])
def test_a_failure_in_the_loop_is_said_once(way: str, launch: Launch, tmp_path: Path) -> None:
    command, variables = start_slowly(way, tmp_path)
    done = launch(command, variables={**variables, "FAIL": "1"}, timeout=60)
    assert done.returncode == 1, done.stderr
    output = done.stdout + done.stderr
    # Either may be the first.
    failure = r"rank [01] on \S+ \(pid \d+\): RuntimeError: the model broke"
    assert len(re.findall(f"dualeval: error: {failure}", output)) == 1, output
    assert len(re.findall(f"dualeval: rank 1 ends: {failure}", output)) == 1, output
    status = json.loads((tmp_path / "out/status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 1)
