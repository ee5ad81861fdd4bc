"""Ranks on this machine: ``run_local``, and a script that ``evaluate(nproc=N)`` runs again as the ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from dualeval.errors import UsageError
from dualeval.launch.cores import usable_cores
from dualeval.world.local_ranks import exit_code_of, process_limit, run_local
from tests.conftest import ROOT, Launch
from tests.engine.end.test_endings import Words
from tests.vehicles.sessions import evaluate
from tests.vehicles.tiny import TinyTask

WORKER = ROOT / "tests/vehicles/workers/local_worker.py"
# ``say`` makes one write of a line: the ranks share a pipe.
RANK = (
    "import os, signal, sys; rank = int(os.environ['RANK']); "
    "say = lambda *words, to=1: os.write(to, (' '.join(map(str, words)) + chr(10)).encode()) and None; "
)
# A rank that says that it is there and then waits to be ended.
WAIT = "say('here', os.getpid()); signal.pause()"


def parent(processes: int, rank_code: str) -> list[str]:
    """The command of a parent whose ranks run ``rank_code``."""
    return [sys.executable, str(WORKER), str(processes), RANK + rank_code]


def wait_for_ranks(process: subprocess.Popen[str], count: int) -> list[int]:
    """Wait until so many ranks have said that they are there; returns their process ids."""
    assert process.stdout is not None
    pids = []
    for _ in range(count):
        word, pid = process.stdout.readline().split()
        assert word == "here"
        pids.append(int(pid))
    return pids


def test_ranks_get_torchruns_variables_and_our_streams(launch: Launch) -> None:
    code = (
        "names = ['RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'MASTER_ADDR']; "
        "names += ['MINE']; assert 'OMP_NUM_THREADS' not in os.environ; "
        "say(*(os.environ[name] for name in names)); say('error', rank, to=2); "
        "from dualeval.launch import detect; assert detect(os.environ).launcher == 'torchrun'"
    )
    finished = launch(parent(3, code), variables={"MINE": "kept", "RANK": "stale"})
    assert finished.returncode == 0
    assert sorted(finished.stdout.splitlines()) == [
        f"{rank} 3 {rank} 3 0 127.0.0.1 kept" for rank in range(3)
    ]
    assert sorted(finished.stderr.splitlines()) == ["error 0", "error 1", "error 2"]


@pytest.mark.parametrize(
    ("rank_code", "expected", "said"),
    [
        ("sys.exit(2)", 2, ""),
        ("sys.exit(75 if rank == 1 else 0)", 75, ""),
        # The other rank is ended by the agent's SIGTERM: a consequence, which must not hide the cause.
        ("sys.exit(3) if rank == 1 else signal.pause()", 3, ""),
        ("os.kill(os.getpid(), signal.SIGTERM) if rank == 1 else signal.pause()", 143, ""),
        (
            "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else signal.pause()",
            *(1, r"(?s).*DualevalError: rank 1 \(pid \d+\) was ended by SIGKILL.*"),
        ),
    ],
)
def test_the_parent_has_its_ranks_exit_code_and_says_nothing(
    rank_code: str, expected: int, said: str, launch: Launch
) -> None:
    """But for a rank that is killed, the parent has nothing of its own to say."""
    finished = launch(parent(2, rank_code))
    assert finished.returncode == expected, finished.stderr
    assert finished.stdout == ""
    assert re.fullmatch(said, finished.stderr), finished.stderr


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([1, -signal.SIGTERM], 1),
        ([-signal.SIGKILL, -signal.SIGTERM], 1),
        ([-signal.SIGABRT, 2], 2),
        ([-signal.SIGKILL, 75], 1),
        ([75, 1], 75),
        ([-signal.SIGINT], 130),
        ([-signal.SIGTERM, 1], 143),
    ],
)
def test_the_exit_code_is_that_of_the_cause(codes: list[int], expected: int) -> None:
    assert exit_code_of(codes) == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_parent_ends_the_ranks(number: signal.Signals, launch: Launch) -> None:
    """The ranks get it, or SIGTERM for SIGHUP, and time to act on it; ``launch`` checks that none is left."""
    taken = signal.SIGTERM if number == signal.SIGHUP else number
    code = f"signal.signal({taken:d}, lambda *_: sys.exit(say('saved'))); {WAIT}"
    # Where these tests run under nohup or in a shell's background, some signals come to them ignored.
    heard = ["env", "--default-signal=HUP,INT,QUIT,TERM"]
    with launch.started([*heard, *parent(2, code)]) as process:
        pids = wait_for_ranks(process, 2)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        assert stdout == "saved\nsaved\n"
        assert stderr == ""
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_ranks_end_with_a_parent_that_is_killed(launch: Launch) -> None:
    leave = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(say('saved')))"
    code = f"{leave}; __import__('dualeval.process.start').process.start.end_with_launcher(); {WAIT}"
    with launch.started(parent(2, code)) as process:
        wait_for_ranks(process, 2)
        process.kill()
        # To its end: both ranks have closed it.
        assert process.communicate(timeout=60)[0] == "saved\nsaved\n"


def test_a_rank_whose_parent_has_ended_before_ends_itself(launch: Launch) -> None:
    code = "import dualeval.process.start as it; it.end_with_launcher()"
    gone = launch([sys.executable, "-c", "import os; print(os.getpid())"]).ok().stdout.strip()
    done = launch([sys.executable, "-c", code], variables={"DUALEVAL_LAUNCHER_PID": gone})
    assert done.returncode == -signal.SIGTERM


def test_a_signal_while_the_ranks_are_started_ends_all(launch: Launch, tmp_path: Path) -> None:
    """A signal that comes when the first rank is there and the last is not yet ends all of them.

    The first rank signals the parent, which is then still starting the others.
    """
    fast = tmp_path / "fast.sh"
    fast.write_text("#!/bin/sh\n[ $RANK = 0 ] && kill -TERM $PPID\nexec sleep 600\n")
    fast.chmod(0o755)
    script = tmp_path / "parent.py"
    script.write_text(WORKER.read_text().replace('[sys.executable, "-c", sys.argv[2]]', "[sys.argv[2]]"))
    finished = launch([sys.executable, script, "16", fast], timeout=60)
    assert finished.returncode == 143
    assert finished.stderr == ""


def test_an_ignored_signal_stays_ignored(launch: Launch) -> None:
    """Under nohup a closed terminal does not end the run."""
    with launch.started(["nohup", *parent(2, WAIT)]) as process:
        wait_for_ranks(process, 2)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 143


@pytest.mark.parametrize("processes", [0, -1, process_limit(usable_cores()) + 1, 10**9])
def test_a_number_of_processes_beyond_reason_is_refused(processes: int) -> None:
    with pytest.raises(UsageError, match=r"takes 1 to \d+ processes"):
        run_local(["true"], processes, os.environ)


def test_run_local_leaves_signal_handlers_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers and loggers are as before; ``no_leaks`` watches the rest."""
    # torch's launch leaves this one behind; set here, it goes with the test.
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert run_local(["true"], 2, os.environ) == 0
    assert run_local(["false"], 1, os.environ) == 1
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers


# -- ``dualeval.evaluate(task, nproc=N)``: the script itself is run again as the ranks ---------------------


SCRIPT = """
import os, sys
import dualeval
from tests.vehicles.tiny import TinyTask

os.write(1, b"before\\n")
out, *more = sys.argv[1:]
os.chdir(os.path.dirname(out))
options = dict(word.split("=") for word in more)
count = int(options.pop("nproc"))
result = dualeval.evaluate(TinyTask(4000), out=out, batch_size=20, nproc=count, **options)
line = f"after {result.world['size']} {sys.flags.optimize} {sys.warnoptions} {result.metrics_digest}\\n"
os.write(1, line.encode())
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = tmp_path_factory.mktemp("scripts") / "evaluations"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "small.py").write_text(SCRIPT)
    return package / "small.py"


@pytest.fixture(scope="module")
def wanted() -> str:
    """The digest of one process."""
    return evaluate(TinyTask(4000), batch_size=20).metrics_digest


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("file", marks=pytest.mark.long),
        "module",
        pytest.param("horovod", marks=[pytest.mark.needs("horovod"), pytest.mark.long]),
    ],
)
def test_the_script_becomes_the_ranks(
    launch: Launch, script: Path, tmp_path: Path, wanted: str, way: str
) -> None:
    """With its arguments and the interpreter's options, by a relative name, from another folder later."""
    run: Words = ["-m", "evaluations.small"] if way == "module" else ["evaluations/small.py"]
    command: Words = [sys.executable, "-O", "-W", "ignore::ImportWarning", *run, tmp_path / "out", "nproc=2"]
    more: Words = ["backend=horovod"] if way == "horovod" else []
    variables = {"PYTHONPATH": f"{Path.cwd()}{os.pathsep}{script.parent.parent}"}
    done = launch([*command, *more], cwd=script.parent.parent, variables=variables).ok()
    before, *rest = sorted(done.stdout.splitlines(), reverse=True)
    after = f"after 2 1 ['ignore::ImportWarning'] {wanted}"
    assert [before, *rest] == ["before", "before", "before", after, after]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["-c", SCRIPT], "nproc=2 runs the script again as 2 processes, and there is no file to run"),
        (["-"], "there is no file to run"),
    ],
    ids=["c", "standard-input"],
)
def test_nproc_without_a_script_to_run_again_is_refused(
    launch: Launch, tmp_path: Path, command: list[str], message: str
) -> None:
    (tmp_path / "code").write_text(SCRIPT)
    shell: Words = ["bash", "-c", 'exec "$@" <code', "bash", sys.executable, *command]
    done = launch([*shell, tmp_path / "out", "nproc=2"], cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr
    assert "type 'python FILE'" in done.stderr


@pytest.mark.long
def test_nproc_under_a_launcher_must_be_its_number_of_ranks(
    launch: Launch, script: Path, tmp_path: Path, wanted: str
) -> None:
    torchrun: Words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", script]
    done = launch([*torchrun, tmp_path / "out", "nproc=1"]).ok()
    assert done.stdout.split()[-1] == wanted, "as many: it has nothing to do"
    done = launch([*torchrun, tmp_path / "other", "nproc=3"])
    assert done.returncode != 0
    assert "nproc=3: this process is rank 0 of 1 already (started by torchrun)" in done.stderr


@pytest.mark.long
def test_a_rank_that_forgets_it_is_one_starts_no_more(launch: Launch, script: Path, tmp_path: Path) -> None:
    forgetful = script.with_name("forgetful.py")
    forgetful.write_text(
        "import os\nfor name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE',"
        " 'GROUP_RANK', 'MASTER_ADDR', 'MASTER_PORT', 'TORCHELASTIC_RUN_ID'):\n"
        "    os.environ.pop(name, None)\n" + SCRIPT
    )
    done = launch([sys.executable, forgetful, tmp_path / "out", "nproc=2"])
    assert done.returncode == 1
    assert "no variable of torchrun is set" in done.stderr, done.stderr


def test_an_error_of_a_rank_is_the_scripts_and_said_once(
    launch: Launch, script: Path, tmp_path: Path
) -> None:
    """Its exit code is the script's, and nothing is said twice."""
    done = launch([sys.executable, script, tmp_path / "out", "nproc=2", "precision=fp7"])
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("fp7") == 1, done.stderr
