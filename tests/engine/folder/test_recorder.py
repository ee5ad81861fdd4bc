"""The recorder: what waits for the fold keeps no more memory than it has values."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dualeval.columns.ragged import values_of
from dualeval.engine.control.progress import Progress, Stage
from dualeval.engine.folder import recorder
from dualeval.engine.folder.journal import FinishedChunks, JournalWriter, read_journal, read_journal_file
from dualeval.engine.folder.recorder import HandedBatch, Ledger, Recorder
from dualeval.engine.folder.row_windows import EVALUATED
from dualeval.engine.folder.stored_rows import MemoryWriter
from dualeval.engine.samples.feed import FailedSample
from dualeval.engine.values.plan import MAX_CHUNKS, EvalPlan
from dualeval.errors import DualevalError, ExactlyOnceError
from dualeval.metrics import Mean

COLUMNS: dict[str, Callable[[], Any]] = {
    "sliced": lambda: torch.arange(1000.0)[10:14],
    "expanded": lambda: torch.ones(1).expand(4),
    "shared": lambda: torch.arange(4.0).share_memory_(),  # type: ignore[no-untyped-call]
}


def work_of(plan: EvalPlan, batch: int, failed: Sequence[FailedSample] = ()) -> HandedBatch:
    """One batch of a plan whose chunks have one batch each."""
    samples = plan.batch_samples(batch)
    return HandedBatch(chunk=batch, batch=batch, samples=samples, is_last=True, failed=tuple(failed))


@pytest.mark.parametrize("make", COLUMNS.values(), ids=COLUMNS)
def test_columns_keep_no_memory_of_others(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Tensor]
) -> None:
    waiting: list[dict[str, Tensor]] = []
    finished = vars(recorder)["_Finished"]

    def noted(rows: int, columns: Any, *more: Any) -> Any:
        waiting.append(columns)
        return finished(rows, columns, *more)

    monkeypatch.setattr(recorder, "_Finished", noted)
    plan = EvalPlan(num_samples=12, batch_size=4)
    taking = Recorder(plan, [Mean("m")], ["kept"], MemoryWriter(keeps=True))
    for batch in range(3):
        # Column "other" is read by nobody.
        taking.add(work_of(plan, batch), {"m": make(), "kept": make().int(), "other": torch.zeros(4, 5000)})
    assert [sorted(columns) for columns in waiting] == 3 * [["kept", "m"]]
    for columns in waiting:
        for column in columns.values():
            assert not column.is_shared()  # type: ignore[no-untyped-call]
            assert column.untyped_storage().nbytes() <= column.numel() * column.element_size()
            assert column.tolist() == make().tolist()


@pytest.mark.parametrize("beside", [None, nullcontext], ids=["in front", "beside"])
def test_a_slow_disk_makes_nobody_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: Any) -> None:
    monkeypatch.setattr(recorder, "FLUSH_ROWS", 4)
    begun, goes_on = threading.Event(), threading.Event()
    fsync = os.fsync

    def slow(number: int) -> None:
        begun.set()
        assert goes_on.wait(20)
        fsync(number)

    monkeypatch.setattr(os, "fsync", slow)
    plan = EvalPlan(num_samples=12, batch_size=4)
    taking = Recorder(plan, [Mean("m")], ["m"], journal(tmp_path), beside=beside)
    taking.add(work_of(plan, 0), {"m": torch.arange(4.0)})
    assert begun.wait(20)
    assert taking.flush(0.01) is False, "a disk that hangs is said at a stop"
    assert taking.chunks_saved == 0
    goes_on.set()
    taking.add(work_of(plan, 1), {"m": torch.arange(4.0)})
    taking.add(work_of(plan, 2), {"m": torch.arange(4.0)})
    assert taking.flush()
    assert taking.chunks_saved == 3 and taking.ledger.totals() == (12, 0)
    files = [read_journal_file(path) for path in sorted(tmp_path.glob("*.journal"))]
    assert [file.chunks for file in files] == [(0,), (1,), (2,)]


@pytest.mark.parametrize("beside", [None, nullcontext], ids=["in front", "beside"])
def test_what_could_not_be_written_is_raised_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: Any
) -> None:
    monkeypatch.setattr(recorder, "FLUSH_ROWS", 4)
    failing = [OSError(28, "No space left on device")]
    write = JournalWriter.write

    def full(*words: Any, **named: Any) -> None:
        if failing:
            raise failing.pop()
        write(*words, **named)

    monkeypatch.setattr(JournalWriter, "write", full)
    plan = EvalPlan(num_samples=8, batch_size=4)
    taking = Recorder(plan, [Mean("m")], ["m"], journal(tmp_path), beside=beside)
    taking.add(work_of(plan, 0), {"m": torch.arange(4.0)})
    with pytest.raises(OSError, match="No space left"):
        taking.add(work_of(plan, 1), {"m": torch.arange(4.0)})
    assert taking.chunks_saved == 0
    assert taking.flush()
    assert taking.chunks_saved == 2 and taking.ledger.totals() == (8, 0)
    assert len(list(tmp_path.glob("*.journal"))) == 2


class Held(Mean):
    """Waits in its update until it may go on, and notes the thread."""

    def __init__(self) -> None:
        super().__init__("m")
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.threads: list[str] = []
        self.error: Exception | None = None

    def update(self, ledger: Tensor, columns: Any) -> None:
        self.threads.append(threading.current_thread().name)
        self.begun.set()
        assert self.goes_on.wait(20)
        if self.error is not None:
            raise self.error
        super().update(ledger, columns)


@pytest.mark.parametrize("writes", [True, False])
def test_a_fold_beside_makes_nobody_wait_but_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    monkeypatch.setattr(recorder, "FLUSH_ROWS", 8)
    plan, metric = EvalPlan(num_samples=20, batch_size=4), Held()
    writer = journal(tmp_path) if writes else MemoryWriter(keeps=True)
    progress = Progress()
    taking = Recorder(plan, [metric], ["m"], writer, progress, beside=nullcontext)
    with torch.inference_mode():  # a caller's: its tensors are written only in it
        for batch in range(3):
            taking.add(work_of(plan, batch), {"m": torch.arange(4.0)})
        assert metric.begun.wait(20) and taking.flush(0.01) is False
        waits = threading.Thread(target=taking.add, args=(work_of(plan, 3), {"m": torch.arange(4.0)}))
        waits.start()
        waits.join(0.05)
        assert waits.is_alive(), "no third part: memory is bounded"
        assert progress.position.stage is Stage.METRICS
        metric.goes_on.set()
        waits.join(20)
        taking.add(work_of(plan, 4), {"m": torch.arange(4.0)})
        assert taking.flush()
    assert taking.chunks_saved == 5 and taking.ledger.totals() == (20, 0)
    assert {*metric.threads} == {"dualeval-journal"}
    # What was waited for was the metric, and no disk: 0.01 s of the flush, and 0.05 s of the third part.
    assert taking.metrics_s > 0.04


def test_a_fold_that_fails_beside_is_raised_by_the_next_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "FLUSH_ROWS", 8)
    plan, metric = EvalPlan(num_samples=16, batch_size=4), Held()
    metric.error = ValueError("the metric's own")
    taking = Recorder(plan, [metric], ["m"], journal(tmp_path), beside=nullcontext)
    for batch in range(2):
        taking.add(work_of(plan, batch), {"m": torch.arange(4.0)})
    assert metric.begun.wait(20) and taking._writing is not None
    metric.goes_on.set()
    taking._writing.join(20)
    with pytest.raises(ValueError, match="the metric's own"):
        taking.add(work_of(plan, 2), {"m": torch.arange(4.0)})
    with pytest.raises(ValueError, match="the metric's own"):  # it is tried again, as a file is
        taking.flush()
    metric.error = None
    assert taking.flush() and taking.chunks_saved == 3


def journal(folder: Path) -> JournalWriter:
    return JournalWriter(folder, fingerprint="f", machine={}, prefix="0")


def test_failed_samples_are_marked_where_they_are() -> None:
    plan = EvalPlan(num_samples=11, batch_size=4)
    writer = MemoryWriter(keeps=True)
    taking = Recorder(plan, [Mean("m")], ["m"], writer)
    failed = {0: [3], 1: [4, 6], 2: []}
    for batch, indices in failed.items():
        samples = [FailedSample(index=index, error="E") for index in indices]
        rows = torch.tensor([float(index) for index in plan.batch_samples(batch)])
        taking.add(work_of(plan, batch, samples), {"m": rows})
    taking.flush()
    marked: dict[float, int] = {}
    for header, [evaluated, values] in writer.written:
        assert [entry["name"] for entry in header["columns"]] == [EVALUATED, "m"]
        marked |= dict(zip(values.tolist(), evaluated.tolist(), strict=True))
    assert marked == {float(index): int(index not in (3, 4, 6)) for index in range(11)}
    assert taking.ledger.totals() == (8, 3)
    assert taking.failed == [3, 4, 6]


# -- evalPlan: every sample in one batch, every batch in one chunk, every chunk on one rank -------------


SIZES = [
    (1, 1),
    (1, 64),
    (2, 64),
    (63, 64),
    (64, 64),
    (65, 64),
    (997, 64),
    (10_000, 64),
    (10_000, 1),
    (40_000, 1),
    (2 * MAX_CHUNKS + 5, 1),
]


@pytest.mark.parametrize(("samples", "batch_size"), SIZES)
def test_chunks_cover_every_sample_once(samples: int, batch_size: int) -> None:
    plan = EvalPlan(num_samples=samples, batch_size=batch_size)
    covered = [index for chunk in range(plan.num_chunks) for index in plan.chunk_samples(chunk)]
    assert covered == list(range(samples))
    batches = [batch for chunk in range(plan.num_chunks) for batch in plan.chunk_batches(chunk)]
    assert batches == list(range(plan.num_batches))
    sizes = [len(plan.chunk_samples(chunk)) for chunk in range(plan.num_chunks)]
    assert plan.chunk_sizes().tolist() == sizes
    chunks = range(plan.num_chunks)
    assert all({*map(plan.chunk_of, plan.chunk_samples(chunk))} == {chunk} for chunk in chunks)
    assert plan.samples_in(range(0, plan.num_chunks, 3)) == sum(sizes[::3])
    assert [len(plan.batch_samples(batch)) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 200])
def test_every_chunk_has_one_rank(size: int) -> None:
    plan = EvalPlan(num_samples=997, batch_size=64)
    taken = sorted(chunk for rank in range(size) for chunk in plan.static_chunks(rank, size))
    assert taken == list(range(plan.num_chunks))


def test_chunks_are_bounded_and_even() -> None:
    assert EvalPlan(num_samples=131_073 * 8, batch_size=8).num_chunks == MAX_CHUNKS == 131_072
    plan = EvalPlan(num_samples=1_281_167, batch_size=4)
    assert plan.num_batches > plan.num_chunks == MAX_CHUNKS
    lengths = {len(plan.chunk_batches(chunk)) for chunk in range(plan.num_chunks)}
    assert lengths == {2, 3}


# -- ledger: merging by addition, and the check that every chunk was counted exactly once ---------------


PLAN = EvalPlan(num_samples=10, batch_size=4)


def folded(*chunks: int, last: tuple[int, int] | None = None) -> Ledger:
    """The ledger of some chunks without failed samples, and of chunk 2 with so many evaluated and failed."""
    ledger = Ledger(PLAN, [])
    ledger.fold(chunks, [len(PLAN.chunk_samples(chunk)) for chunk in chunks], [0] * len(chunks))
    if last is not None:
        ledger.fold([2], [last[0]], [last[1]])
    return ledger


@pytest.mark.parametrize(
    ("ledger", "totals"), [(folded(2, 0, 1), (10, 0)), (folded(0, 1, last=(1, 1)), (9, 1))]
)
def test_a_ledger_with_each_chunk_once_is_right(ledger: Ledger, totals: tuple[int, int]) -> None:
    ledger.verify_exactly_once()
    assert ledger.totals() == totals


MISSING = r"1 of 3 chunks .* chunk 2 \(samples 8 to 9\): folded 0 times, 0 evaluated and 0 failed of 2"


@pytest.mark.parametrize(
    ("ledger", "message"),
    [
        (folded(0, 1), MISSING),
        (folded(0, 1, 1, 2), r"chunk 1 \(samples 4 to 7\): folded 2 times, 8 evaluated"),
        (folded(), "3 of 3 chunks"),
        (folded(0, 1, last=(1, 0)), "folded 1 times, 1 evaluated and 0 failed of 2"),
        (Ledger(EvalPlan(num_samples=100, batch_size=1), []), r"and 90 more$"),
        (Ledger(EvalPlan(num_samples=10, batch_size=1), []), r"10 of 10 chunks .* failed of 1$"),
    ],
)
def test_missing_double_and_wrong_chunks_are_named(ledger: Ledger, message: str) -> None:
    with pytest.raises(ExactlyOnceError, match=message):
        ledger.verify_exactly_once()


def test_metrics_have_slots_of_their_own() -> None:
    columns = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([10.0, 30.0])}
    ledger = Ledger(PLAN, [Mean("a", name="first"), Mean("b", name="second")])
    ledger.update(columns, [2])
    values = {}
    for metric, slots in ledger.slots():
        values.update(metric.compute(slots).values)
    assert values == {"first": 1.5, "second": 20.0}
    assert ledger.values[: 3 * PLAN.num_chunks].sum() == 0
    assert len(ledger.values) == 3 * PLAN.num_chunks + 2 * Mean("a").size
    metrics = ledger.values[3 * PLAN.num_chunks :].clone()
    ledger.fold([0, 1, 2], [4, 4, 2], [0, 0, 0])
    ledger.verify_exactly_once()
    assert ledger.totals() == (10, 0)
    assert torch.equal(ledger.values[3 * PLAN.num_chunks :], metrics)


# -- the journal's files: what is written is read, and damage anywhere is noticed -----------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "journal").mkdir()
    writer = JournalWriter(
        tmp_path / "journal", fingerprint="f" * 64, machine={"model": "m"}, prefix="t-00000"
    )
    delta = torch.zeros(50, dtype=torch.int64)
    delta[3], delta[40] = 7, -2
    columns = {
        "evaluated": torch.tensor([1, 1, 0], dtype=torch.uint8),
        "loss": torch.tensor([0.5, float("nan"), 2.0]),
        "top": torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32),
    }
    writer.write([4, 9], [2, 1], delta, columns)
    [written] = writer.written
    return written


def test_what_is_written_is_read(path: Path) -> None:
    file = read_journal_file(path)
    assert [other.name for other in path.parent.iterdir()] == ["t-00000-000000.journal"], "nothing beside it"
    assert (file.fingerprint, file.chunks, file.rows) == ("f" * 64, (4, 9), (2, 1))
    assert file.machine == {"model": "m"}
    assert file.read_rows("evaluated", 0, 3).tolist() == [1, 1, 0]
    assert file.read_rows("top", 1, 3).tolist() == [[3, 4], [5, 6]]
    assert file.read_rows("loss", 2, 3).tolist() == [2.0]
    assert values_of(file.read_rows("loss", 1, 1)).shape == (0,)


def test_files_of_plain_columns_are_those_of_earlier_versions(path: Path) -> None:
    assert path.read_bytes().startswith(b"DUALEVL3")


def test_the_machine_of_a_finished_run_is_that_of_its_first_file(path: Path) -> None:
    first = read_journal_file(path)
    other = replace(first, machine={"model": "other"}, chunks=(0,))
    chunks = FinishedChunks(files=(first, other), remaining=(), left_out=())
    assert chunks.machine({"model": "now"}) == {"model": "m"}
    assert replace(chunks, remaining=(7,)).machine({"model": "now"}) == {"model": "now"}


def test_every_flipped_byte_and_every_truncation_is_noticed(path: Path, tmp_path: Path) -> None:
    content = bytearray(path.read_bytes())
    damaged = tmp_path / "damaged.journal"
    for position in range(len(content)):
        flipped = bytes(content[:position]) + bytes([content[position] ^ 0x40]) + content[position + 1 :]
        for written in (flipped, content[:position]):
            damaged.write_bytes(written)
            with pytest.raises(DualevalError):
                read_journal_file(damaged)


def test_errors_of_failed_samples_are_in_their_file(path: Path) -> None:
    writer = JournalWriter(path.parent, fingerprint="f" * 64, machine={}, prefix="u-00000")
    failures = [(7, "OSError: cut short"), (3, "ValueError: \udc80")]
    columns = {"evaluated": torch.zeros(2, dtype=torch.uint8)}
    writer.write([1], [2], torch.zeros(50, dtype=torch.int64), columns, failures)
    [written] = writer.written
    file = read_journal_file(written)
    assert (file.failed, file.failures) == (2, tuple(failures))


def test_a_file_of_another_division_into_chunks_is_left_out(path: Path) -> None:
    """As versions with other chunks have written it: the fingerprint is the same."""
    plan = EvalPlan(num_samples=30, batch_size=2)
    chunks = read_journal([path.parent], plan, "f" * 64)
    assert (chunks.files, len(chunks.remaining)) == ((), 15)
    [reason] = chunks.left_out
    assert "divides the data set into other chunks" in reason
    small = EvalPlan(num_samples=3, batch_size=2)
    assert read_journal([path.parent], small, "f" * 64).remaining == (0, 1)
