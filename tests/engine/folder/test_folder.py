"""The output folder while a run is at work, and what others do to it meanwhile."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from dualeval.engine.folder import folder as folder_module
from dualeval.engine.folder import lease as lease_module
from dualeval.engine.folder.folder import RunFolder
from dualeval.engine.folder.layout import JobFacts
from dualeval.engine.folder.opening import begins_anew
from dualeval.engine.values.options import RunOptions
from dualeval.engine.values.plan import EvalPlan
from dualeval.errors import DualevalError, Stopped, UsageError
from dualeval.process.identity import Process
from dualeval.process.speech import how_to_resume
from dualeval.result import Status, read_status
from tests.conftest import Launch
from tests.engine.test_evaluator import evaluate
from tests.vehicles.tiny import TinyTask

PLAN = EvalPlan(num_samples=8, batch_size=4)
FACTS = JobFacts(
    job={},
    fingerprint="f" * 64,
    samples_digest="5a" * 32,
    machines=[{"device": "cpu", "versions": {}, "libraries": {}}],
    hosts=["one"],
    launches=[],
    files=[],
    task_class="T",
    metrics=[],
    options={},
    start_over="Give another --out",
)
PATIENCE_S = 30.0


def await_that(condition: Callable[[], object]) -> None:
    deadline = monotonic() + PATIENCE_S
    while not condition():
        assert monotonic() < deadline, "it did not come to that"
        sleep(0.01)


def counter(path: Path) -> int:
    try:
        return int(json.loads((path / "lease.json").read_bytes())["counter"])
    except (OSError, ValueError):
        return -1


@pytest.fixture
def lost() -> list[str]:
    """What the folder says of its lease."""
    return []


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: list[str]) -> Iterator[RunFolder]:
    """A run's folder, whose lease is renewed quickly."""
    monkeypatch.setattr(lease_module, "RENEW_EVERY_S", 0.01)
    folder, _ = RunFolder.open(tmp_path / "out", "0123abcd", PLAN, FACTS, RunOptions(), lost=lost.append)
    yield folder
    folder.close()


def take_over(folder: Path) -> None:
    """Put another run's lease into the place of the one that is kept there, as a newcomer does."""
    other = folder / "other"
    other.write_text(json.dumps({"token": "89abcdef"}))
    other.rename(folder / "lease.json")


def goes_on(opened: RunFolder, lost: list[str]) -> bool:
    """Whether the lease is renewed from here on."""
    before = counter(opened.path)
    await_that(lambda: counter(opened.path) > before)
    return not lost


def test_a_renewal_that_fails_is_tried_again(opened: RunFolder, lost: list[str]) -> None:
    lease = opened.path / "lease.json"
    kept = lease.rename(lease.with_name("kept"))
    lease.mkdir()
    sleep(0.05)
    lease.rmdir()
    kept.rename(lease)
    assert goes_on(opened, lost)


def test_another_run_that_has_taken_over_is_told_once(opened: RunFolder, lost: list[str]) -> None:
    replace(read_status(opened.path) or Status(state=""), run="89abcdef").write(opened.path)
    take_over(opened.path)
    await_that(lambda: lost)
    sleep(0.05)
    [said] = lost
    assert "another run has taken over" in said
    opened.note_end(DualevalError("the woken one's"))
    opened.close()
    assert (opened.path / "journal").is_dir(), "the other run is about to write into it"
    status = read_status(opened.path)
    assert status is not None and (status.run, status.state) == ("89abcdef", "running")


@pytest.mark.parametrize("new", [True, False], ids=["replaced", "gone"])
def test_a_folder_that_is_not_there_any_more_ends_nothing_but_a_write(
    opened: RunFolder, lost: list[str], new: bool
) -> None:
    moved = opened.path.rename(opened.path.with_name("moved"))
    if new:
        opened.path.mkdir()
    with pytest.raises(DualevalError) as said:
        opened.check()
    assert str(said.value) == lease_module.gone(opened.path)
    opened.note_end(said.value)
    if new:
        assert list(opened.path.iterdir()) == []
        opened.path.rmdir()
    moved.rename(opened.path)
    assert goes_on(opened, lost)


def test_a_run_that_was_stopped_while_it_wrote_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dualeval.engine import finish
    from dualeval.engine.folder import predictions

    write = predictions.write_predictions

    def taken_over_meanwhile(path: Path, *arguments: Any) -> None:
        write(path, *arguments)
        take_over(tmp_path)

    monkeypatch.setattr(finish, "write_predictions", taken_over_meanwhile)
    with pytest.raises(DualevalError, match="another run has taken over"):
        evaluate(TinyTask(8), tmp_path, batch_size=8)
    assert not (tmp_path / "result.json").exists()


def test_a_terminal_that_stands_still_does_not_stop_the_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that Ctrl-S has stopped: whoever shows how far the run is waits for it."""
    monkeypatch.setattr(lease_module, "RENEW_EVERY_S", 0.01)
    stands, counted = threading.Event(), threading.Event()

    class Watched(TinyTask):
        def forward(self, *arguments: Any) -> Any:
            assert stands.wait(PATIENCE_S)
            before = counter(tmp_path)
            await_that(lambda: counter(tmp_path) > before + 3)
            counted.set()
            return super().forward(*arguments)

    def show(done: int, total: int) -> None:
        stands.set()
        assert counted.wait(PATIENCE_S)

    evaluate(Watched(8), tmp_path, batch_size=8, show=show)
    assert counted.is_set()


# -- what killed runs have left ----------------------------------------------------------------------------


def leave(path: Path, *, age_s: float = 0.0, token: str = "89abcdef") -> list[Path]:
    """Leave a killed run's half-done files."""
    names = {
        f"journal/{token}-00000-000003.journal.partial": "half",
        f"journal/{token}.run": "",
        f"predictions.parquet.{token}.partial": "half",
    }
    left = []
    for name, content in names.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        left.append(file)
    for file in left:
        then = file.stat().st_mtime - age_s
        os.utime(file, (then, then))
    return left


@pytest.mark.parametrize(("age_s", "stays"), [(60.0, [1]), (0.0, [0, 1])], ids=["killed", "just now"])
def test_what_killed_runs_have_left_is_removed(tmp_path: Path, age_s: float, stays: list[int]) -> None:
    left = leave(tmp_path, age_s=age_s)
    others = [tmp_path / "journal/notes.txt", tmp_path / "a.partial"]
    for file in others:
        file.write_text("somebody else's")
    folder, _ = RunFolder.open(tmp_path, "0123abcd", PLAN, FACTS, RunOptions())
    assert [number for number, file in enumerate(left) if file.exists()] == stays
    assert all(file.exists() for file in others)
    folder.close()


# -- before the first batch --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["result.json", "status.json", "job.json", "predictions.parquet", "lease.json"]
)
def test_a_folder_where_a_file_belongs_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    refused(tmp_path, r"(?s)Is a directory.* --out|but no job\.json.* --out")


def test_a_name_of_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / os.fsdecode(b"out\xff"), r"out\\udcff', is not UTF-8.*Give another --out")
    refused(tmp_path / ("a" * 256), r"cannot be written .*File name too long.*--out")
    assert not list(tmp_path.iterdir())


def refused(out: Path, said: str) -> None:
    """Before anything is read."""
    task = TinyTask(8)
    with pytest.raises(UsageError, match=said):
        evaluate(task, out, batch_size=8)
    assert task.dataset().reads == []


@pytest.mark.parametrize("name", ["layout.probe_of", "write_text"])
def test_a_folder_without_room_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"{folder_module.__name__}.{name}", full)
    with pytest.raises(UsageError, match="No space left on device"):
        RunFolder.open(tmp_path / "out", "0123abcd", PLAN, FACTS, RunOptions())
    assert not list(tmp_path.iterdir())


# -- starts ------------------------------------------------------------------------------------------------


def begun(path: Path, state: str, launch: str | None, process: str = "h 1 1") -> None:
    (path / "job.json").write_text(json.dumps({"fingerprint": "f" * 64, "job": {}}))
    Status(state=state, launch_id=launch, process=process, signal="SIGUSR2").write(path)


def test_fresh_counts_for_the_first_start_of_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def anew(*launches: str, fingerprint: str = "f" * 64) -> bool:
        return begins_anew(tmp_path, fingerprint, launches, fresh=True)

    assert anew("id a 1 1")
    begun(tmp_path, "running", "id a 1 1 | id b 2 2")
    assert not anew("id b 2 2")
    # Another launch, of the same name.
    assert anew("id b 3 3")
    assert anew()
    # Another job of the same script.
    assert anew("id b 2 2", fingerprint="e" * 64)
    begun(tmp_path, "stopped", "id a 1 1")
    with pytest.raises(Stopped, match="SIGUSR2"):
        anew("id a 1 1")
    assert anew("id b 2 2")
    # A second evaluation of the same process.
    own = Process.own()
    begun(tmp_path, "stopped", "id a 1 1", process=f"{own.host} {own.pid} {own.start}")
    assert anew("id a 1 1")


# -- a disk that takes no new file -------------------------------------------------------------------------

# A folder that is read-only, with a status.json in it that is not.
READ_ONLY = """
mount --bind "$1" "$1" && mount --bind "$1/status.json" "$1/status.json" && mount -o remount,bind,ro "$1"
exec "$2" -c '
from dualeval.result import Status
from pathlib import Path
import sys
Status(state="failed", exit_code=1).write(Path(sys.argv[1]))
' "$1"
"""


@pytest.mark.needs("mounts")
def test_where_no_file_can_be_made_the_status_is_written_over(tmp_path: Path, launch: Launch) -> None:
    Status(state="running", reason="a longer text than the next").write(tmp_path)
    launch(["unshare", "--mount", "bash", "-c", READ_ONLY, "bash", tmp_path, sys.executable]).ok()
    assert read_status(tmp_path) == Status(state="failed", exit_code=1)


def test_a_text_that_is_no_utf_8_is_written(tmp_path: Path) -> None:
    """As the text of an error that names a file of such a name."""
    Status(state="failed", reason="bad \udcff name").write(tmp_path)
    assert read_status(tmp_path) == Status(state="failed", reason="bad \udcff name")


# -- how a run that was stopped says what to type -------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "named"),
    [
        (None, None),
        ("runs/mine", None),
        ("runs/20261122T184226-fdb49fd2", "runs/20261122T184226-fdb49fd2"),
        ("runs/20261122T184226.2-fdb49fd2", "runs/20261122T184226.2-fdb49fd2"),
        ("runs/20261122T184226-several-fdb49fd2/epoch1", "runs/20261122T184226-several-fdb49fd2"),
    ],
)
def test_a_folder_that_nobody_has_named_is_named_to_resume(folder: str | None, named: str | None) -> None:
    out = "" if named is None else f", with --out {named},"
    assert how_to_resume(None if folder is None else Path(folder)) == f"the same command again{out} to resume"
