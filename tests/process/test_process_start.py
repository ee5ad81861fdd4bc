"""The first moments of the command line: signals, and standard streams that are closed, full or gone."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from dualeval.launch.launchers import LAUNCHERS, launcher_of
from dualeval.process.start import may_print
from dualeval.tasks.image_data import ASSETS
from tests.conftest import Finished, Launch
from tests.vehicles.faulty_models import FAULT
from tests.vehicles.sessions import FILES

# Whoever started the tests may ignore some signals, and what they start would inherit that.
HEARD = ["env", "--default-signal"]
DUALEVAL = [*HEARD, sys.executable, "-m", "dualeval"]
RUN = [*DUALEVAL, "run", "--limit", "64", "--no-progress"]
# Has Python say on standard error what it has just imported.
IMPORTS = {"PYTHONPROFILEIMPORTTIME": "1"}
IMPORTED = re.compile(r"import time: .*\| *(\S+)\n")
TERM, INT, USR2 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR2


def signalled(
    launch: Launch, command: list[str], number: signal.Signals, module: str, times: int, cwd: Path
) -> tuple[int, str]:
    """Signal a command once it has imported a module so often; returns its exit code and what it said."""
    with launch.started(command, variables=IMPORTS, cwd=cwd) as process:
        assert process.stderr is not None
        seen = itertools.count(1)
        for line in process.stderr:
            found = IMPORTED.fullmatch(line)
            if found and found[1] == module and next(seen) == times:
                break
        else:
            raise AssertionError(f"it ended without importing {module} {times} times")
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    return process.returncode, IMPORTED.sub("", said)


@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("click", TERM),
        ("torch._C", USR2),
        *(
            pytest.param(module, number, marks=pytest.mark.long)
            for module in (
                *("dualeval.cli", "ctypes", "numpy", "numpy._core._multiarray_umath", "torch"),
                *("torch.functional", "asyncio", "dualeval.cli.options", "dualeval.world.devices"),
                *("dualeval.engine.control.plane", "dualeval.engine.run", "dualeval.models.weights"),
            )
            for number in (TERM, INT, USR2)
        ),
    ],
)
def test_a_signal_before_anything_has_begun_exits_75(
    launch: Launch, tmp_path: Path, module: str, number: signal.Signals
) -> None:
    code, said = signalled(launch, [*RUN, "--out", "out"], number, module, 1, tmp_path)
    assert code == 75, said
    assert said.splitlines()[0].startswith(f"dualeval: stopped by {number.name}. Nothing was started"), said
    assert "Traceback" not in said


def test_a_signal_before_python_runs_our_code_leaves_no_traceback(launch: Launch, tmp_path: Path) -> None:
    code, said = signalled(launch, RUN, TERM, "encodings", 1, tmp_path)
    assert (code, said) in [(-TERM, ""), (75, "dualeval: stopped by SIGTERM. Nothing was started.\n")]


@pytest.mark.parametrize(
    ("module", "times", "number"),
    [
        # The parent alone is there; the ranks are, but our code does not run in them; it does.
        pytest.param("torch._C", 1, INT, marks=pytest.mark.long),
        pytest.param("site", 2, INT, marks=pytest.mark.long),
        pytest.param("site", 2, TERM, marks=pytest.mark.long),
        pytest.param("site", 3, USR2, marks=pytest.mark.long),
        ("numpy", 3, TERM),
        pytest.param("dualeval.cli", 2, INT, marks=pytest.mark.long),
    ],
)
def test_an_early_signal_to_the_parent_of_ranks_exits_75(
    launch: Launch, tmp_path: Path, module: str, times: int, number: signal.Signals
) -> None:
    code, said = signalled(launch, [*RUN, "--nproc", "2", "--out", "out"], number, module, times, tmp_path)
    assert code == 75, said
    assert f"dualeval: stopped by {number.name}. Nothing was started." in said
    assert "Traceback" not in said


def test_the_first_signals_are_those_that_were_named(launch: Launch, tmp_path: Path) -> None:
    run = [*RUN, "--stop-signals=SIGUSR1,SIGHUP"]
    assert signalled(launch, run, signal.SIGUSR1, "click", 1, tmp_path)[0] == 75
    assert signalled(launch, run, TERM, "click", 1, tmp_path)[0] == -TERM


@pytest.mark.parametrize(
    ("number", "module", "code", "said"),
    [
        (INT, "click", 130, "dualeval: interrupted.\n"),
        (INT, "torch", 130, "dualeval: error: interrupted\n"),
        pytest.param(TERM, "click", -TERM, "", marks=pytest.mark.long),
    ],
)
def test_other_commands_end_as_ever(
    launch: Launch, tmp_path: Path, number: signal.Signals, module: str, code: int, said: str
) -> None:
    found, heard = signalled(launch, [*DUALEVAL, "doctor"], number, module, 1, tmp_path)
    # click goes to a new line first.
    assert (found, heard.lstrip("\n")) == (code, said)


def test_one_rank_prints_for_all() -> None:
    assert may_print({}) and may_print({"RANK": "0"})
    assert not may_print({"RANK": "0", "SLURM_PROCID": "3"})
    for launcher in map(launcher_of, LAUNCHERS):
        assert may_print({launcher.rank: "1"}) == (launcher.name == "none")


# -- standard streams ----------------------------------------------------------------------------------


def in_shell(launch: Launch, command: list[str], redirected: str, cwd: Path) -> Finished:
    shell = ["bash", "-o", "pipefail", "-c", f"{shlex.join(command)} {redirected}"]
    return launch(shell, variables={"PYTHONUNBUFFERED": ""}, cwd=cwd)


@pytest.mark.parametrize(
    ("redirected", "words", "why"),
    [
        pytest.param(">&-", [], "Bad file descriptor", marks=pytest.mark.long),
        (">/dev/full", ["--nproc", "2"], "No space left on device"),
        pytest.param(
            ">/dev/full", ["--json", "--progress"], "No space left on device", marks=pytest.mark.long
        ),
        pytest.param("2>/dev/full", ["--progress", "--json"], None, marks=pytest.mark.long),
        ("0<&- 1>&- 2>&-", [], None),
        pytest.param("| sleep 0", ["--json"], "Broken pipe", marks=pytest.mark.long),
    ],
)
def test_a_finished_run_exits_0_whatever_became_of_its_streams(
    launch: Launch, tmp_path: Path, redirected: str, words: list[str], why: str | None
) -> None:
    """Whatever has become of its standard streams: the result is in the folder."""
    done = in_shell(launch, [*RUN, *words, "--out", "out"], redirected, tmp_path).ok()
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert result["samples"]["evaluated"] == 64
    # Nothing of what was printed has gone into a file that took the number of a closed stream.
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES
    note = f"dualeval: note: standard output cannot be written ({why}); the result is in "
    assert done.stderr == ("" if why is None else f"{note}{tmp_path / 'out/result.json'}\n")


@pytest.mark.parametrize(
    ("redirected", "code", "said"),
    [
        (">/dev/full", 1, "dualeval: error: standard output cannot be written: No space left on device\n"),
        (">&-", 1, "dualeval: error: standard output cannot be written: Bad file descriptor\n"),
        ("| head -0", 0, ""),
        ("2>/dev/full", 0, ""),
    ],
)
def test_what_is_only_printed_has_to_be_printed(
    launch: Launch, tmp_path: Path, redirected: str, code: int, said: str
) -> None:
    done = in_shell(launch, [*DUALEVAL, "--help"], redirected, tmp_path)
    assert (done.returncode, done.stderr) == (code, said)


def test_a_standstill_is_noticed_with_standard_error_closed(launch: Launch, tmp_path: Path) -> None:
    """A rank that stands still is noticed all the same."""
    model = [
        *("--model", "tests.vehicles.faulty_models:fashion_cnn"),
        *("--weights", "random:0", "--num-classes", "10"),
    ]
    words = [*RUN, *model, "--data", str(ASSETS), "--batch-size", "8", "--heartbeat-timeout", "2"]
    with launch.started(
        ["bash", "-c", f"exec {shlex.join(words)} --out out 2>&-"],
        variables={FAULT: "stall 0 3"},
        cwd=tmp_path,
    ) as process:
        assert process.wait(60) == 1
    status = json.loads((tmp_path / "out/status.json").read_text())
    assert (status["state"], "no progress for" in status["reason"]) == ("failed", True)


CHILD = """
import subprocess, sys
from dualeval.process.start import prepare
prepare([])
subprocess.run([sys.executable, "-c", "import os; os.fstat(0), os.fstat(1)"], check=True)
"""


def test_what_was_closed_is_open_in_children_too(launch: Launch, tmp_path: Path) -> None:
    in_shell(launch, [sys.executable, "-c", CHILD], "<&- >&-", tmp_path).ok()
