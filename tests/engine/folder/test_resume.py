"""A run goes on from its journal: what was finished counts once, what is damaged is evaluated again."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dualeval.engine import finish
from dualeval.engine.control.plane import open_control_plane
from dualeval.engine.folder import lease as lease_module
from dualeval.engine.folder import opening, recorder
from dualeval.engine.folder.recorder import Ledger
from dualeval.engine.values.options import NEW_FOLDER, RunOptions
from dualeval.errors import DualevalError, Stopped, UsageError
from dualeval.result import Result, Status, read_result, read_status
from dualeval.world import Meeting, World
from dualeval.world.devices import connect
from tests.engine.test_evaluator import evaluate, rows
from tests.vehicles.sessions import FILES, run_task
from tests.vehicles.tiny import TinyTask

SAMPLES = 400
BATCH = 10


class Ending(TinyTask):
    """Raises in the forward of one of its batches."""

    # The same job as a TinyTask: the fingerprint names the source.
    __module__ = TinyTask.__module__

    def __init__(self, count: int, batch: int, **options: Any) -> None:
        super().__init__(count, **options)
        self._left = batch

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("enough")
        return super().forward(model, batch)


@pytest.fixture
def wanted(tmp_path: Path) -> str:
    return evaluate(TinyTask(SAMPLES), tmp_path / "whole", batch_size=BATCH).metrics_digest


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch, no_look: None) -> Iterator[None]:
    """A journal file holds five batches, and batches are computed one by one."""
    monkeypatch.setattr(recorder, "FLUSH_ROWS", 50)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def is_done(out: Path) -> bool:
    status = read_status(out)
    return status is not None and (status.state, status.exit_code) == ("done", 0)


def begin(out: Path, batches: int = 23, **options: Any) -> list[Path]:
    """Begin a run that breaks after some batches; returns its journal files."""
    task = Ending(SAMPLES, batches, **options)
    with pytest.raises(RuntimeError, match="enough"):
        evaluate(task, out, batch_size=BATCH)
    return sorted((out / "journal").glob("*.journal"))


def go_on(out: Path, task: TinyTask | None = None, **options: Any) -> Result:
    return evaluate(task or TinyTask(SAMPLES), out, batch_size=BATCH, **options)


def check(out: Path, result: Result, wanted: str, resumed: int) -> None:
    assert result.metrics_digest == wanted
    assert result.chunks == {"total": 40, "evaluated_now": 40 - resumed, "resumed": resumed}
    assert rows(out)["index"] == list(range(SAMPLES))
    assert sorted(path.name for path in out.iterdir()) == FILES
    assert is_done(out)


def test_what_was_finished_is_not_evaluated_again(tmp_path: Path, wanted: str) -> None:
    files = begin(tmp_path / "out")
    assert len(files) == 5, "four full ones, and what was finished when it broke"
    status = read_status(tmp_path / "out")
    assert status is not None
    assert (status.state, status.reason) == ("failed", "RuntimeError: enough")
    task = TinyTask(SAMPLES)
    result = go_on(tmp_path / "out", task)
    check(tmp_path / "out", result, wanted, resumed=23)
    assert result.replay == "same bits"
    proof, rest = task.dataset().reads[: 2 * BATCH], task.dataset().reads[2 * BATCH :]
    assert max(proof) < 230
    assert rest == list(range(230, SAMPLES))


def test_a_run_that_is_stopped_several_times_goes_on_each_time(tmp_path: Path, wanted: str) -> None:
    for _ in range(3):
        begin(tmp_path / "out", batches=9)  # those of the comparison are put back, and not counted
    check(tmp_path / "out", go_on(tmp_path / "out"), wanted, resumed=27)


def test_a_run_whose_end_alone_failed_evaluates_nothing_again(
    out: Path, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(finish, "write_predictions", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            go_on(out)
    task = TinyTask(SAMPLES)
    check(out, go_on(out, task), wanted, resumed=40)
    assert len(task.dataset().reads) == 2 * BATCH


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(bytes(byte ^ (i == 60) for i, byte in enumerate(path.read_bytes()))),
        lambda path: path.unlink() or path.mkdir(),
    ],
    ids=["cut short", "empty", "a flipped bit", "a folder"],
)
def test_a_damaged_file_is_named_and_its_chunks_evaluated_again(
    out: Path, wanted: str, damage: Callable[[Path], object]
) -> None:
    files = begin(out)
    damage(files[1])
    notes: list[str] = []
    result = go_on(out, note=notes.append)
    assert result.metrics_digest == wanted
    assert result.chunks["resumed"] == 18
    [named] = [note for note in notes if str(files[1]) in note]
    assert "left out" in named
    assert named in result.warnings
    assert rows(out)["index"] == list(range(SAMPLES))


def test_a_foreign_file_is_named_and_kept(tmp_path: Path, wanted: str) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    begin(other)
    with pytest.raises(RuntimeError):
        evaluate(Ending(SAMPLES, 12), other, batch_size=BATCH, fresh=True, precision="amp-bf16")
    begin(out)
    [first, *_] = sorted((other / "journal").glob("*.journal"))
    copy = out / "journal" / first.name
    shutil.copy(first, copy)
    notes: list[str] = []
    result = go_on(out, note=notes.append)
    assert result.metrics_digest == wanted
    assert result.chunks["resumed"] == 23
    assert any(str(copy) in note and "another job" in note for note in notes)
    assert copy.exists()


def test_a_chunk_in_two_files_counts_once(tmp_path: Path, wanted: str) -> None:
    """As two runs leave it that worked in one folder without a lease."""
    out, other = tmp_path / "out", tmp_path / "other"
    begin(out)
    begin(other, batches=31)
    for path in (other / "journal").glob("*.journal"):
        shutil.copy(path, out / "journal")
    result = go_on(out)
    assert result.metrics_digest == wanted
    assert rows(out)["index"] == list(range(SAMPLES))
    assert result.chunks["resumed"] >= 20


def test_another_job_is_refused_with_what_differs(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(UsageError) as caught:
        evaluate(TinyTask(SAMPLES + 1), tmp_path, batch_size=BATCH + 1)
    assert f"job.samples: {SAMPLES} there, {SAMPLES + 1} now" in str(caught.value)
    assert f"job.batch_size: {BATCH} there, {BATCH + 1} now" in str(caught.value)
    assert "--fresh" in str(caught.value)
    assert "weights" not in str(caught.value)
    result = evaluate(TinyTask(SAMPLES + 1), tmp_path, batch_size=BATCH + 1, fresh=True)
    assert result.chunks["resumed"] == 0
    with pytest.raises(UsageError, match="holds another job"):
        go_on(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES, "a refused job leaves nothing there"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("result.json", "{}", r"holds an earlier run \(result.json\), but no job.json.*--fresh"),
        (
            "job.json",
            '{"mine": 1}',
            r"job\.json is damaged: it has no field job\. Give another --out; or, if",
        ),
        ("job.json", '{"job": 5}', r"job\.json is damaged: "),
    ],
)
def test_a_folder_of_something_else_is_refused(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=said):
        go_on(tmp_path)
    assert (tmp_path / name).read_text() == content


def test_a_result_of_another_job_than_job_json_says_is_refused(tmp_path: Path) -> None:
    evaluate(TinyTask(SAMPLES), tmp_path / "other", batch_size=BATCH + 1)
    begin(tmp_path / "out")
    shutil.copy(tmp_path / "other/result.json", tmp_path / "out")
    with pytest.raises(UsageError, match=r"holds the result of another job\. Give another --out, or --fresh"):
        go_on(tmp_path / "out")


def test_a_finished_run_is_returned(tmp_path: Path, wanted: str) -> None:
    first = go_on(tmp_path / "out")
    task, notes = TinyTask(SAMPLES), list[str]()
    again = go_on(tmp_path / "out", task, note=notes.append)
    assert again.to_json() == replace(first, earlier=True, replay="same bits").to_json()
    assert len(task.dataset().reads) == 2 * BATCH
    assert "finished before" in notes[0]


def test_a_damaged_result_is_named_and_made_again(tmp_path: Path, wanted: str) -> None:
    first = go_on(tmp_path / "out")
    path = tmp_path / "out/result.json"
    path.write_text(path.read_text().replace(str(first.metrics["top1"]), "0.123"))
    notes: list[str] = []
    assert go_on(tmp_path / "out", note=notes.append).metrics_digest == wanted
    assert "do not fit its metrics_digest" in notes[0]


def test_a_run_killed_after_its_result_is_finished(out: Path, wanted: str) -> None:
    files = begin(out)
    kept = [(file, file.read_bytes()) for file in files]
    go_on(out)
    (out / "journal").mkdir()
    for file, content in kept:
        file.write_bytes(content)
    Status(state="running").write(out)
    assert go_on(out).metrics_digest == wanted
    assert is_done(out)
    assert not (out / "journal").exists()


def test_failed_samples_are_tried_again(out: Path, wanted: str) -> None:
    task = Ending(SAMPLES, 23)
    task.dataset()._broken = {5, 17}
    fingerprint = TinyTask(SAMPLES).dataset().fingerprint(SAMPLES)
    task.dataset().fingerprint = lambda count: fingerprint  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="enough"):
        evaluate(task, out, batch_size=BATCH, on_error="skip")
    result = go_on(out, on_error="skip")
    assert result.samples == {"total": SAMPLES, "evaluated": SAMPLES, "failed": 0}
    assert result.chunks["resumed"] == 21
    assert result.metrics_digest == wanted


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that do not renew their lease, and do not look whose it is: any other takes it over at once."""
    monkeypatch.setattr(lease_module, "TAKE_OVER_AFTER_S", 0.0)
    monkeypatch.setattr(lease_module.Lease, "renew", lambda lease: None)


@pytest.mark.usefixtures("asleep")
def test_a_second_run_that_ends_first_has_the_one_right_result(out: Path, wanted: str) -> None:
    """It begins while the first is at work, and takes what is finished by then."""
    inner: list[Result] = []
    calls: list[int] = []

    class Twice(TinyTask):
        __module__ = TinyTask.__module__

        def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            calls.append(len(calls))
            if len(calls) == 23:
                inner.append(go_on(out))
            return super().forward(model, batch)

    task = Twice(SAMPLES)
    with pytest.raises(DualevalError, match="Type the same command again"):
        go_on(out, task)
    assert inner[0].metrics_digest == read_result(out / "result.json").metrics_digest == wanted
    assert inner[0].chunks["resumed"] == 20
    assert rows(out)["index"] == list(range(SAMPLES))
    assert is_done(out)


def test_a_second_run_is_refused_while_the_first_is_at_work(tmp_path: Path) -> None:
    class Twice(TinyTask):
        def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            with pytest.raises(UsageError, match=r"is in use by another run on .* \(pid \d+\)"):
                go_on(tmp_path)
            return super().forward(model, batch)

    assert evaluate(Twice(8), tmp_path, batch_size=8).chunks["evaluated_now"] == 1


@pytest.mark.usefixtures("asleep")
def test_a_run_that_wakes_writes_nothing_where_another_has_gone_on(out: Path) -> None:
    class Sleeper(Ending):
        """Is stopped in its forward, until others have taken its folder over, or have told of its end."""

        def __init__(self, others: Callable[[], None]) -> None:
            super().__init__(SAMPLES, 11)
            self._others = others

        def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            if self._left == 0:
                self._left = -1
                self._others()
            return super().forward(model, batch)

    def taken_over() -> None:
        with pytest.raises(RuntimeError, match="enough"):
            evaluate(Sleeper(lambda: None), out, batch_size=BATCH)
        taken = read_status(out)
        assert taken is not None
        replace(taken, state="running", reason="the other's").write(out)

    def told_by_another_rank() -> None:
        running = read_status(out)
        assert running is not None
        replace(running, state="failed", exit_code=1, reason="rank 0 does not answer").write(out)

    for others, said in ((taken_over, "the other's"), (told_by_another_rank, "rank 0 does not answer")):
        with pytest.raises(RuntimeError, match="enough"):
            evaluate(Sleeper(others), out, batch_size=BATCH, fresh=True)
        status = read_status(out)
        assert status is not None and status.reason == said


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_the_schedule_changes_no_bit(tmp_path: Path, wanted: str, schedule: str) -> None:
    begin(tmp_path / "out")
    for workers in (0, 2):
        out = tmp_path / f"out{workers}"
        shutil.copytree(tmp_path / "out", out)
        assert go_on(out, schedule=schedule, workers=workers).metrics_digest == wanted


def test_restarted_ranks_find_the_folder_of_their_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def run(task: TinyTask, restarts: int, launch_id: str = "mine") -> Result:
        # Each start is a process of its own.
        monkeypatch.setattr(opening, "own_process", lambda: f"host {restarts}")
        world = replace(World.alone(), meeting=Meeting(restarts=restarts, launch_id=launch_id))
        with connect(None, world, "cpu") as backend:
            return run_task(
                task, backend, open_control_plane(backend), RunOptions(out=NEW_FOLDER, batch_size=BATCH)
            )

    task = Ending(SAMPLES, 23)
    with pytest.raises(RuntimeError, match="enough"):
        run(task, 0)
    [made] = (tmp_path / "runs").iterdir()
    assert run(TinyTask(SAMPLES), 1, "another").chunks["resumed"] == 0
    result = run(TinyTask(SAMPLES), 1)
    assert (result.chunks["resumed"], result.folder) == (23, str(made))
    status = read_status(made)
    assert status is not None
    replace(status, state="stopped", signal="SIGUSR2").write(made)
    with pytest.raises(Stopped, match="SIGUSR2"):
        run(TinyTask(SAMPLES), 2)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, "can't allocate memory"),
        (MemoryError(), "--batch-size 10: MemoryError. Try"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "when calling `cublasCreate(handle)`. Try",
        ),
    ],
)
def test_memory_that_is_not_there_is_explained(tmp_path: Path, error: Exception | None, said: str) -> None:
    class Greedy(Ending):
        def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            self._left -= 1
            if self._left < 0:
                if error is not None:
                    raise error
                torch.empty(1 << 55, dtype=torch.uint8)
            return TinyTask.forward(self, model, batch)

    with pytest.raises(DualevalError) as caught:
        evaluate(Greedy(SAMPLES, 12), tmp_path, batch_size=BATCH)
    for words in ("out of memory on cpu", "--batch-size 10", "--batch-size 5", "12 finished chunks", said):
        assert words in str(caught.value)
    assert len(list((tmp_path / "journal").glob("*.journal"))) == 3


def test_metrics_that_break_in_the_midst_count_nothing_twice(
    tmp_path: Path, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, calls = Ledger.update, list[int]()

    def broken(self: Ledger, columns: dict[str, Tensor], batches: list[int]) -> None:
        update(self, columns, batches)
        calls.append(len(calls))
        if len(calls) == 3:
            raise MemoryError("after some metrics have taken the rows")

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "update", broken)
        with pytest.raises(DualevalError, match="out of memory"):
            go_on(tmp_path / "out")
    result = go_on(tmp_path / "out")
    assert result.metrics_digest == wanted
    assert result.chunks["resumed"] > 0


def acting(act: Callable[[], object]) -> TinyTask:
    """A TinyTask that does something before it reads its thirteenth batch."""
    task = TinyTask(SAMPLES)
    dataset: Any = task.dataset()
    read = dataset.__getitems__
    pending = [act]

    def reading(indices: Sequence[int]) -> Any:
        if len(dataset.reads) >= 12 * BATCH and pending:
            for thread in threading.enumerate():
                if thread.name == "dualeval-journal":
                    thread.join(20)  # not in the midst of a file
            pending.pop()()
        return read(indices)

    dataset.__getitems__ = reading
    return task


def empty(out: Path) -> None:
    """As ``rm -rf OUT/*``."""
    for entry in out.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def take_the_place_of(out: Path) -> None:
    out.rename(out.with_name("renamed"))
    out.mkdir()


@pytest.mark.parametrize("act", [empty, take_the_place_of])
def test_nothing_is_written_into_a_folder_that_was_emptied_or_replaced(
    out: Path, wanted: str, act: Callable[[Path], None]
) -> None:
    with pytest.raises(DualevalError, match=r"was emptied or replaced: .*Type the same command") as caught:
        go_on(out, acting(lambda: act(out)))
    assert "saved" not in str(caught.value)
    assert list(out.iterdir()) == []
    check(out, go_on(out), wanted, resumed=0)


def test_a_journal_that_was_removed_is_said_to_be_gone(out: Path, wanted: str) -> None:
    with pytest.raises(DualevalError, match=r"journal is gone, or a file of it: .*evaluated again"):
        go_on(out, acting(lambda: shutil.rmtree(out / "journal")))
    status = read_status(out)
    assert status is not None and status.state == "failed"
    check(out, go_on(out), wanted, resumed=0)


def test_a_folder_in_the_place_of_a_file_loses_nothing(out: Path, wanted: str) -> None:
    with pytest.raises(DualevalError, match=r"cannot be written any more .*Is a directory.*same command"):
        go_on(out, acting((out / "predictions.parquet").mkdir))
    (out / "predictions.parquet").rmdir()
    check(out, go_on(out), wanted, resumed=40)


def test_a_folder_with_nothing_but_a_failure_is_taken(tmp_path: Path, wanted: str) -> None:
    (tmp_path / "out").mkdir()
    Status(state="failed", exit_code=1).write(tmp_path / "out")
    check(tmp_path / "out", go_on(tmp_path / "out"), wanted, resumed=0)
    (tmp_path / "out/job.json").unlink()
    with pytest.raises(UsageError, match=r"but no job.json"):
        go_on(tmp_path / "out")
