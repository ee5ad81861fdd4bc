"""The lease of an output folder: one run at a time, and a dead run keeps nobody out."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from dualeval.engine.folder import lease as lease_module
from dualeval.engine.folder.lease import Lease
from dualeval.errors import UsageError
from tests.conftest import Launch

# Holds the lease of a folder until another run takes it over, or it is gone; with "child", a fork of it
# outlives it.
HOLDER = """
import os, signal, sys, time
from pathlib import Path
from dualeval.engine.folder.lease import Lease

lease = Lease.take(Path(sys.argv[1]), "holder")
child = os.fork() if "child" in sys.argv else None
if child == 0:
    signal.pause()
print(child, flush=True)
try:
    while lease.renew() is None and lease.path.exists():
        time.sleep(0.02)
finally:
    lease.close()
    lease.close()
"""

# Six processes want one dead run's lease, again and again. Who has it keeps it until the others are through.
RACE = """
import multiprocessing, os, sys, time
from pathlib import Path
from dualeval.engine.folder import lease as lease_module
from dualeval.engine.folder.lease import Lease
from dualeval.errors import UsageError

SIZE, ROUNDS = 6, int(sys.argv[4])
folder, dead = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes()
lease_module.LOOK_EVERY_S = 0.1
lease_module.TAKE_OVER_AFTER_S = float(sys.argv[3])
context = multiprocessing.get_context("fork")
together, refused = context.Barrier(SIZE, timeout=30), context.Value("i", 0)

def race(number):
    for round in range(ROUNDS):
        if number == 0:
            refused.value = 0
            (folder / "lease.json").write_bytes(dead)
        together.wait()
        try:
            lease = Lease.take(folder, f"{number}-{round}")
        except UsageError:
            with refused.get_lock():
                refused.value += 1
        else:
            while refused.value < SIZE - 1:
                assert lease.renew() is None, "two had it"
                time.sleep(0.001)
            lease.close()
        together.wait()
        assert os.listdir(folder) == []
        together.wait()

processes = [context.Process(target=race, args=(number,)) for number in range(SIZE)]
for process in processes:
    process.start()
for process in processes:
    process.join()
sys.exit(any(process.exitcode for process in processes))
"""


def dead_lease(folder: Path, **changes: object) -> Path:
    """Write a lease as a run leaves it that was killed; by default on this kernel."""
    lease = Lease.take(folder, "dead")
    # No process has the highest number that there can be, and one more.
    claim = read(folder) | {"pid": 2**22 + 1} | changes
    lease.close()
    path = folder / "lease.json"
    path.write_bytes(json.dumps(claim).encode().ljust(1023) + b"\n")
    return path


def read(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "lease.json").read_bytes()))


def never() -> None:
    raise AssertionError("a dead run's lease was waited for")


def watched() -> None:
    raise InterruptedError


def test_a_lease_is_taken_renewed_and_released(tmp_path: Path) -> None:
    lease = Lease.take(tmp_path, "mine", waiting=never)
    path = tmp_path / "lease.json"
    first = path.stat()
    assert lease.renew() is None and lease.renew() is None
    assert (path.stat().st_ino, path.stat().st_size) == (first.st_ino, first.st_size) == (first.st_ino, 1024)
    claim = read(tmp_path)
    assert (claim["pid"], claim["token"], claim["counter"]) == (os.getpid(), "mine", 2)
    lease.close()
    assert list(tmp_path.iterdir()) == []
    following = Lease.take(tmp_path, "next", waiting=never)
    lease.close()
    assert lease.renew() is not None and following.renew() is None
    following.close()


def test_a_living_run_is_not_disturbed(tmp_path: Path, launch: Launch) -> None:
    with launch.started([sys.executable, "-c", HOLDER, tmp_path]) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        with pytest.raises(UsageError, match=rf"{tmp_path} .* {os.uname().nodename} \(pid {holder.pid}\)"):
            Lease.take(tmp_path, "second")
        assert read(tmp_path)["token"] == "holder" and holder.poll() is None
        (tmp_path / "lease.json").unlink()
        assert holder.wait(30) == 0


@pytest.mark.parametrize("child", ["alone", "child"])
def test_a_killed_run_gives_way_at_once(tmp_path: Path, launch: Launch, child: str) -> None:
    with launch.started([sys.executable, "-c", HOLDER, tmp_path, child]) as holder:
        assert holder.stdout is not None
        orphan = holder.stdout.readline().strip()
        holder.kill()
        holder.wait(30)
        Lease.take(tmp_path, "second", waiting=never).close()
        if child == "child":
            os.kill(int(orphan), signal.SIGKILL)


def test_a_stopped_run_gives_way_in_time_and_learns_of_it(
    tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "TAKE_OVER_AFTER_S", 0.3)
    with launch.started([sys.executable, "-c", HOLDER, tmp_path]) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        holder.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED)
        start = monotonic()
        lease = Lease.take(tmp_path, "second")
        assert monotonic() - start >= 0.3
        holder.send_signal(signal.SIGCONT)
        assert holder.wait(30) == 0
    assert lease.renew() is None and read(tmp_path)["token"] == "second"
    lease.close()


@pytest.mark.parametrize(
    "content",
    [None, b"", b'{"pid": 1}', b'{"host": "", "pid": "1", "space": "", "start": ""}', b"\xff" * 1200],
)
def test_a_lease_of_an_unknown_process_is_watched_before_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    monkeypatch.setattr(lease_module, "TAKE_OVER_AFTER_S", 0.2)
    monkeypatch.setattr(lease_module, "LOOK_EVERY_S", 0.02)
    path = dead_lease(tmp_path, space="another kernel")
    if content is not None:
        path.write_bytes(content)
    start = monotonic()
    lease = Lease.take(tmp_path, "second")
    assert monotonic() - start >= 0.2
    assert list(tmp_path.iterdir()) == [path] and read(tmp_path)["token"] == "second"
    lease.close()


@pytest.mark.parametrize(("said", "pid"), [("node7 (pid 41)", 41), ("an unknown host", None)])
def test_a_lease_that_moves_is_of_a_living_run(tmp_path: Path, said: str, pid: int | None) -> None:
    (tmp_path / "other").mkdir()
    moved = dead_lease(tmp_path / "other", host="node7", pid=pid, counter=7).read_bytes()
    path = dead_lease(tmp_path, space="another kernel")

    def move() -> None:
        path.write_bytes(moved if pid else b"torn")

    with pytest.raises(UsageError) as refusal:
        Lease.take(tmp_path, "second", waiting=move)
    assert f" is in use by another run on {said}. " in str(refusal.value)


@pytest.mark.parametrize("start", [None, "1"], ids=["alive", "another process has its number by now"])
def test_the_time_of_its_start_tells_a_process_from_a_later_one(tmp_path: Path, start: str | None) -> None:
    dead_lease(tmp_path, pid=os.getpid(), **({} if start is None else {"start": start}))

    if start is None:
        with pytest.raises(InterruptedError):
            Lease.take(tmp_path, "second", waiting=watched)
    else:
        Lease.take(tmp_path, "second", waiting=never).close()


def test_a_lease_of_a_folder_that_is_gone_is_refused_or_let_go(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with pytest.raises(FileNotFoundError):
        Lease.take(folder, "first", waiting=never)
    folder.mkdir()
    lease = Lease.take(folder, "first")
    shutil.rmtree(folder)
    assert lease.renew() is None, "whoever writes rows there says so"
    lease.close()
    lease.close()
    assert not folder.exists()


@pytest.mark.parametrize("told", ["at once", "by standing still"])
def test_of_many_newcomers_one_takes_over(tmp_path: Path, launch: Launch, told: str) -> None:
    changes, after_s, rounds = ({}, 20, 10) if told == "at once" else ({"space": "another kernel"}, 1, 2)
    dead = dead_lease(tmp_path, **changes).replace(tmp_path / "dead")
    (tmp_path / "out").mkdir()
    (tmp_path / "race.py").write_text(RACE)
    words = [str(tmp_path / "out"), str(dead), str(after_s), str(rounds)]
    launch([sys.executable, tmp_path / "race.py", *words], timeout=120).ok()
