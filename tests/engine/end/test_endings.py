"""How a run ends early: by a signal, with nothing finished lost, and started again by its launcher."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from dualeval.engine.end.conclusion import Conclusion
from dualeval.errors import EXIT_STOPPED
from dualeval.world import World
from dualeval.world.devices import connect
from tests.conftest import ROOT, Launch
from tests.vehicles.faults import is_alive
from tests.vehicles.faulty_models import FAULT, FLUSH_S
from tests.vehicles.launchers import start
from tests.vehicles.sessions import joined

ASSETS = ROOT / "dualeval" / "assets"
Words = list[str | Path]
MODEL: Words = [
    "--model",
    "tests.vehicles.faulty_models:fashion_cnn",
    "--weights",
    ASSETS / "fashion_cnn.safetensors",
]
# 100 batches of 20.
JOB: Words = [*MODEL, "--data", ASSETS, "--batch-size", "20", "--limit", "2000", "--no-progress"]
RUN: Words = [sys.executable, "-m", "dualeval", "run"]
TORCHRUN: Words = [sys.executable, "-m", "torch.distributed.run"]
# 50 ms a batch, one batch at a time, and a journal file after a few of them.
SLOWLY = {FAULT: "slow all 0", FLUSH_S: "0.2", "OMP_NUM_THREADS": "1"}
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def wanted(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the job where nothing goes wrong."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert launch([*RUN, *JOB, "--out", out]).returncode == 0
    return str(read(out / "result.json")["metrics_digest"])


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def await_that(found: Any, process: subprocess.Popen[str]) -> None:
    """Wait until ``found()`` is true, for as long as the process runs."""
    deadline = monotonic() + DEADLINE_S
    while not found():
        assert process.poll() is None, process.communicate()
        assert monotonic() < deadline, "it did not come to that"
        sleep(0.02)


def await_line(wanted: str, process: subprocess.Popen[str]) -> None:
    """Read what a process says until it says that."""
    assert process.stderr is not None
    for line in process.stderr:
        if wanted in line:
            return
    raise AssertionError(f"it ended without saying {wanted!r}")


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks that a run has started, in their order; the process itself where it is the only one."""
    started = [
        child for child in psutil.Process(process.pid).children(recursive=True) if "RANK" in child.environ()
    ]
    return sorted(started, key=lambda child: int(child.environ()["RANK"])) or [psutil.Process(process.pid)]


@contextmanager
def at_work(
    launch: Launch, command: Words, out: Path, fault: str = "slow all 0"
) -> Iterator[subprocess.Popen[str]]:
    """A run that has written a journal file."""
    # Whoever started the tests may ignore some signals, and what they start would inherit that.
    words = ["env", "--default-signal", *command, *JOB, "--out", out]
    with launch.started(words, variables={**SLOWLY, FAULT: fault}) as process:
        await_that(lambda: list(out.glob("journal/*.journal")), process)
        yield process


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end; returns the exit code and what was said."""
    _, said = process.communicate(timeout=DEADLINE_S)
    return process.returncode, said


def goes_on(launch: Launch, out: Path, wanted: str, command: Words | None = None) -> dict[str, Any]:
    """The same command again comes to the same digest, from what was finished."""
    launch([*(command or RUN), *JOB, "--out", out]).ok()
    result = read(out / "result.json")
    assert result["metrics_digest"] == wanted
    chunks = result["chunks"]
    assert chunks["resumed"] + chunks["evaluated_now"] == chunks["total"] == 100
    assert not list(out.glob("journal/*")) and not (out / "lease.json").exists()
    return result


@pytest.mark.parametrize(
    ("number", "ranks"),
    [
        (signal.SIGTERM, 1),
        pytest.param(signal.SIGINT, 2, marks=pytest.mark.long),
        pytest.param(signal.SIGUSR2, 2, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_signal_saves_and_ends(
    launch: Launch, out: Path, wanted: str, number: signal.Signals, ranks: int
) -> None:
    # As under nohup: what is ignored at the start stays so.
    shell = f'trap "" {"HUP" if number == signal.SIGINT else "INT"}; exec "$@"'
    command = ["bash", "-c", shell, "bash", *RUN, *(["--nproc", "2"] if ranks == 2 else [])]
    with at_work(launch, command, out) as process:
        if ranks == 1:
            process.send_signal(signal.SIGINT)
        process.send_signal(number)
        code, said = end(process)
    assert code == 75, said
    status = read(out / "status.json")
    assert (status["state"], status["exit_code"], status["signal"]) == ("stopped", 75, number.name)
    assert said.count(f"dualeval: stopped by {number.name}.") == 1
    assert status["chunks_saved"] > 0
    result = goes_on(launch, out, wanted, [*start("torchrun", 2), *RUN] if ranks == 1 else RUN)
    assert result["chunks"]["resumed"] == status["chunks_saved"]


def test_a_signal_in_a_long_forward_of_one_rank_stops_the_run_at_once(
    launch: Launch, out: Path, wanted: str
) -> None:
    """One rank is in a forward of 10 s; the signal reaches the other one, which writes it down at once."""
    with at_work(launch, [*RUN, "--nproc", "2"], out, "slow 0 0;long 1 10") as process:
        await_line("fault: long", process)
        ranks_of(process)[0].send_signal(signal.SIGTERM)
        sent = monotonic()
        await_that(lambda: read(out / "status.json")["state"] == "stopped", process)
        code, said = end(process)
        assert monotonic() - sent < 9, "the forward has 10 s to go"
    assert code == 75, said
    assert read(out / "status.json")["state"] == "stopped"
    assert goes_on(launch, out, wanted)["chunks"]["resumed"] > 0


@contextmanager
def writing(
    launch: Launch, out: Path, *options: str
) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A run of two ranks, and these, as rank 0 writes the result: for some hundredths of a second."""
    words = ["env", "--default-signal", *RUN, "--nproc", "2", *JOB, *options, "--out", out]
    with launch.started(words) as process:
        await_that(lambda: (out / "status.json").exists() and len(ranks_of(process)) == 2, process)
        ranks = ranks_of(process)
        deadline = monotonic() + DEADLINE_S
        while not list(out.glob("predictions*")):
            assert process.poll() is None and monotonic() < deadline
            sleep(0.002)
        yield process, ranks


@pytest.mark.long
def test_a_signal_while_the_result_is_written_comes_too_late(launch: Launch, tmp_path: Path) -> None:
    """Rank 1, which waits for rank 0, left by itself; and rank 0 broke as it waited for that one."""
    with writing(launch, tmp_path / "out") as (process, ranks):
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        code, said = end(process)
    assert code == 0, said
    assert "error" not in said and "stopped" not in said
    assert read(tmp_path / "out/status.json")["state"] == "done"


@pytest.mark.long
def test_a_finished_run_that_loses_a_rank_is_finished(launch: Launch, tmp_path: Path) -> None:
    """Rank 1 does not answer any more as rank 0 writes the result, and finds rank 0 gone when it wakes."""
    with writing(launch, tmp_path / "out", "--heartbeat-timeout", "5") as (process, ranks):
        ranks[1].suspend()
        await_that(lambda: not is_alive(ranks[0]), process)
        ranks[1].resume()
        code, said = end(process)
    assert code == 0, said
    assert "note: the result is complete" in said and "error" not in said
    assert read(tmp_path / "out/status.json")["state"] == "done"


@pytest.mark.long
def test_a_rank_that_is_killed_as_it_stops_is_what_the_run_has_come_to(
    launch: Launch, out: Path, wanted: str
) -> None:
    with at_work(launch, [*RUN, "--nproc", "2"], out, "slow 0 0;long 1 10") as process:
        await_line("fault: long", process)
        ranks = ranks_of(process)
        ranks[0].send_signal(signal.SIGTERM)
        ranks[1].kill()  # before it has saved
        code, said = end(process)
    says = f"(pid {ranks[1].pid}) exited without a message: it was killed or crashed"
    assert (code, said.count(says)) == (1, 1), said
    assert "did not report" not in said
    status = read(out / "status.json")
    assert status["state"] == "failed" and status["reason"].startswith("rank 1 ")
    assert status["reason"].endswith(says)
    assert goes_on(launch, out, wanted)["chunks"]["resumed"] > 0


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_was_suspended_goes_on(launch: Launch, out: Path, wanted: str, ranks: int) -> None:
    """For longer than the timeout, with all its processes, as by Ctrl-Z; one that is alone by itself, too."""
    command = [*RUN, *([] if ranks == 1 else ["--nproc", "2"]), "--heartbeat-timeout", "3"]
    with at_work(launch, command, out) as process:
        launcher = psutil.Process(process.pid)
        suspended = [launcher, *(launcher.children(recursive=True) if ranks == 2 else [])]
        for each in suspended:
            each.suspend()
        sleep(4.5)
        # A rank may wake before its guardian.
        for each in reversed(suspended):
            each.resume()
        code, said = end(process)
    assert code == 0, said
    assert "dualeval: error" not in said
    assert read(out / "result.json")["metrics_digest"] == wanted


def test_c_code_that_holds_pythons_lock_is_ended(launch: Launch, out: Path) -> None:
    with at_work(launch, [*RUN, "--heartbeat-timeout", "1.5"], out, "slow 0 0;lock 0 20") as process:
        code, said = end(process)
    assert code == -signal.SIGKILL, said
    assert said.count("C code held Python's lock") == 1, said
    assert "faulty_models.py" in (out / "stacks/rank-00000.txt").read_text()
    status = read(out / "status.json")
    assert status["state"] == "failed" and "C code held Python's lock" in status["reason"]


def test_a_run_alone_that_was_killed_is_written_down(launch: Launch, tmp_path: Path) -> None:
    out = tmp_path / "20260102T030405-0123abcd"  # as without --out
    with at_work(launch, RUN, out) as process:
        process.kill()
        _, said = end(process)
    says = f"(pid {process.pid}) exited without a message: it was killed or crashed"
    assert said.count(says) == 1, said
    status = read(out / "status.json")
    assert status["state"] == "failed" and says in status["reason"]
    assert f"Type the same command again, with --out {out}, to resume." in status["reason"]


def test_a_second_sigint_stops_at_once(launch: Launch, out: Path, wanted: str) -> None:
    with at_work(launch, RUN, out, "slow all 0;long all 10") as process:
        await_line("fault: long", process)
        process.send_signal(signal.SIGINT)
        sleep(0.6)  # sooner, it would be a launcher's echo of the first
        process.send_signal(signal.SIGINT)
        code, said = end(process)
    assert code == 130
    assert "interrupted twice" in said
    assert goes_on(launch, out, wanted)["chunks"]["resumed"] > 0


def test_a_stop_needs_nobody_who_reads(launch: Launch, out: Path, wanted: str) -> None:
    """As in ``dualeval run ... 2>&1 | tee log``, where Ctrl-C ends tee as well."""
    with at_work(launch, [*RUN, "--progress", "--stop-signals", "SIGUSR1"], out) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        process.send_signal(signal.SIGUSR1)
        assert process.wait(DEADLINE_S) == 75
    status = read(out / "status.json")
    assert (status["state"], status["signal"]) == ("stopped", "SIGUSR1")


@pytest.mark.parametrize("name", ["SIGKILL", "TERM"])
def test_signals_that_cannot_stop_a_run_are_refused(launch: Launch, tmp_path: Path, name: str) -> None:
    done = launch([*RUN, "--stop-signals", name], cwd=tmp_path)
    assert done.returncode == 2 and f"'{name}' is not a signal that can stop a run" in done.stderr


def test_torchrun_goes_on_after_a_killed_rank(launch: Launch, tmp_path: Path, wanted: str) -> None:
    """By itself, with --max-restarts, and without --out too; --fresh counts for the first start."""
    command = [*TORCHRUN, "--nproc-per-node=2", "--max-restarts=2", "-m", "dualeval", "run", *JOB, "--fresh"]
    with launch.started(command, cwd=tmp_path, variables=SLOWLY) as process:
        await_that(lambda: list(tmp_path.glob("runs/*/journal/*.journal")), process)
        ranks_of(process)[1].kill()
        code, said = end(process)
    assert code == 0, said
    [out] = tmp_path.glob("runs/*")
    result = read(out / "result.json")
    assert result["metrics_digest"] == wanted
    assert result["chunks"]["resumed"] > 0


def test_torchrun_does_not_start_again_what_was_stopped(launch: Launch, out: Path) -> None:
    """The signal reaches the ranks alone, as Slurm's does; the agent takes their end for a failure."""
    command = [*TORCHRUN, "--nproc-per-node=2", "--max-restarts=1", "-m", "dualeval", "run", "--fresh"]
    with at_work(launch, command, out) as process:
        for rank in ranks_of(process):
            rank.send_signal(signal.SIGUSR2)
        code, said = end(process)
    assert code == 1
    assert said.count("dualeval: stopped by SIGUSR2.") == 2, "once, and when it was started again"
    status = read(out / "status.json")
    assert (status["state"], status["signal"]) == ("stopped", "SIGUSR2")
    assert status["chunks_saved"] > 0


@pytest.mark.needs("cluster")
def test_a_full_disk_is_said_so(launch: Launch, out: Path, wanted: str) -> None:
    """A disk of 40 kB takes some of the journal; where there is room the run goes on."""
    out.mkdir()
    mounted = (
        f'mount -t tmpfs -o size=40k tmpfs "{out}" && "$@"; code=$?; cp -r "{out}" "{out}.kept"; exit $code'
    )
    command = ["unshare", "--mount", "bash", "-c", mounted, "bash", *RUN, *JOB, "--out", out]
    done = launch(command, variables=SLOWLY)
    assert done.returncode == 1, done.stderr
    assert "cannot be written any more" in done.stderr
    assert "No space left on device" in done.stderr
    assert done.stderr.count("dualeval: error: ") == 1
    assert "Traceback" not in done.stderr
    kept = Path(f"{out}.kept")
    status = read(kept / "status.json")
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert goes_on(launch, kept, wanted)["chunks"]["resumed"] > 0


@pytest.mark.parametrize(
    ("fault", "said_of_it"),
    [
        ("exit:0 1 20", "sys.exit(0)"),
        pytest.param("exit:3 1 20", "sys.exit(3)", marks=pytest.mark.long),
        pytest.param("interrupt 1 20", "KeyboardInterrupt", marks=pytest.mark.long),
        pytest.param("exit:0 1 0", "sys.exit(0)", marks=pytest.mark.long),
        pytest.param("interrupt 1 0", "KeyboardInterrupt", marks=pytest.mark.long),
        pytest.param("exit:0 0 20", "sys.exit(0)", marks=pytest.mark.long),
    ],
)
def test_a_model_that_ends_its_rank_is_a_failure_and_no_stop(
    launch: Launch, out: Path, fault: str, said_of_it: str
) -> None:
    """On one rank of two, in the loop or while it is built: that is a failure, and no stop."""
    done = launch([*start("torchrun", 2), *RUN, *JOB, "--out", out], variables={FAULT: fault})
    assert done.returncode == 1, done.stderr
    assert f"the task's code raised {said_of_it}" in done.stderr
    assert f"rank {fault.split()[1]} on " in done.stderr
    assert "stopped by" not in done.stderr
    if fault.endswith("20"):
        status = read(out / "status.json")
        assert (status["state"], status["exit_code"]) == ("failed", 1)
        assert said_of_it in status["reason"]


# -- hosts that lack what others have, or lose it: a message says what to do, and nothing finished is los


SMALL: Words = [sys.executable, "-m", "dualeval", "run", "--limit", "64", "--no-progress", "--out", "out"]


def test_a_killed_reading_process_is_named(launch: Launch, out: Path, wanted: str) -> None:
    with at_work(launch, [*RUN, "--workers", "2"], out) as process:
        readers = [
            child for child in psutil.Process(process.pid).children() if "--workers" in child.cmdline()
        ]
        readers[0].kill()
        code, said = end(process)
    assert code == 1, said
    message = f"a reading process (pid {readers[0].pid}) ended early (killed by signal: Killed)"
    assert said.count(message) == said.count("\n") == 1, said
    status = read(out / "status.json")
    assert (status["state"], message in status["reason"]) == ("failed", True)
    assert goes_on(launch, out, wanted)["chunks"]["resumed"] > 0


def test_an_error_beside_reading_processes_ends_the_run(launch: Launch, tmp_path: Path) -> None:
    """Its traceback holds them, and SIGTERM, which would end them as Python ends, is blocked in them."""
    command = [*RUN, *JOB, "--workers", "2", "--out", tmp_path / "out"]
    done = launch(command, variables={FAULT: "raise 0 20"}, timeout=60)
    assert done.returncode == 1
    assert "RuntimeError: the model broke" in done.stderr


@pytest.mark.needs("cluster")
@pytest.mark.parametrize(
    ("words", "code"), [(["--nproc", "2"], 2), pytest.param([], 0, marks=pytest.mark.long)]
)
def test_a_host_name_of_64_letters_is_refused_where_ranks_are_started(
    launch: Launch, tmp_path: Path, words: list[str], code: int
) -> None:
    """Linux takes it; torch's launch, which looks it up, does not."""
    named = 'hostname "$1" && shift && exec "$@"'
    command = ["unshare", "--uts", "bash", "-c", named, "bash", "h" * 64, *SMALL, *words]
    done = launch(command, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert ("Give the host a shorter name ('hostname NAME';" in done.stderr) == (code == 2)


@pytest.mark.needs("cluster")
@pytest.mark.parametrize("words", [[], pytest.param(["--nproc", "2"], marks=pytest.mark.long)])
def test_a_run_needs_no_proc(launch: Launch, tmp_path: Path, words: list[str]) -> None:
    mounted = 'mount -t tmpfs tmpfs /proc && exec "$@"'
    launch(["unshare", "--mount", "bash", "-c", mounted, "bash", *SMALL, *words], cwd=tmp_path).ok()
    assert read(tmp_path / "out/result.json")["samples"]["evaluated"] == 64


def test_who_concludes_first_decides_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A main thread that raises while the watch concludes, as one in a collective does, changes nothing."""

    class AnotherConcludes:
        def acquire(self, *, blocking: bool) -> bool:
            raise Waits

    class Waits(Exception):
        """In place of a wait for the end of the process."""

    with connect(None, World.alone(), "cpu") as backend, joined(backend) as control:
        conclusion = Conclusion(control, is_owner=False, ends_process=False)
        conclusion.watch.code = EXIT_STOPPED
        monkeypatch.setattr(conclusion, "_concluding", AnotherConcludes())
        with pytest.raises(Waits):
            conclusion.conclude(RuntimeError("the collective was ended"))
        assert conclusion.watch.code == EXIT_STOPPED
        conclusion.watch.stop()
