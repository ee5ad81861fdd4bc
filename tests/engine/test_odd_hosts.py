"""Hosts that lack what others have, or lose it: a message says what to do, and nothing finished is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.conftest import Launch
from tests.engine.test_endings import JOB, RUN, Words, at_work, end, goes_on, read
from tests.faulty_models import FAULT

SMALL: Words = [sys.executable, "-m", "dualeval", "run", "--limit", "64", "--no-progress", "--out", "out"]


@pytest.fixture(scope="module")
def wanted(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the job where nothing goes wrong."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert launch([*RUN, *JOB, "--out", out]).returncode == 0
    return str(read(out / "result.json")["metrics_digest"])


def test_a_killed_reading_process(launch: Launch, tmp_path: Path, wanted: str) -> None:
    out = tmp_path / "out"
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


def test_an_error_beside_reading_processes(launch: Launch, tmp_path: Path) -> None:
    """Its traceback holds them, and SIGTERM, which would end them as Python ends, is blocked in them."""
    command = [*RUN, *JOB, "--workers", "2", "--out", tmp_path / "out"]
    done = launch(command, variables={FAULT: "raise 0 20"}, timeout=60)
    assert done.returncode == 1
    assert "RuntimeError: the model broke" in done.stderr


@pytest.mark.needs("cluster")
@pytest.mark.parametrize(
    ("words", "code"), [(["--nproc", "2"], 2), pytest.param([], 0, marks=pytest.mark.long)]
)
def test_a_host_name_of_64_letters(launch: Launch, tmp_path: Path, words: list[str], code: int) -> None:
    """Linux takes it; torch's launch, which looks it up, does not."""
    named = 'hostname "$1" && shift && exec "$@"'
    command = ["unshare", "--uts", "bash", "-c", named, "bash", "h" * 64, *SMALL, *words]
    done = launch(command, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert ("Give the host a shorter name ('hostname NAME';" in done.stderr) == (code == 2)


@pytest.mark.needs("cluster")
@pytest.mark.parametrize("words", [[], pytest.param(["--nproc", "2"], marks=pytest.mark.long)])
def test_without_proc(launch: Launch, tmp_path: Path, words: list[str]) -> None:
    mounted = 'mount -t tmpfs tmpfs /proc && exec "$@"'
    launch(["unshare", "--mount", "bash", "-c", mounted, "bash", *SMALL, *words], cwd=tmp_path).ok()
    assert read(tmp_path / "out/result.json")["samples"]["evaluated"] == 64
