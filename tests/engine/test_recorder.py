"""The recorder: what waits for the fold keeps no more memory than it has values."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dualeval.engine import recorder
from dualeval.engine.feed import FailedSample
from dualeval.engine.folder.journal import JournalWriter, read_journal_file
from dualeval.engine.folder.windows import EVALUATED
from dualeval.engine.in_memory import MemoryWriter
from dualeval.engine.plan import EvalPlan
from dualeval.engine.recorder import Recorder
from dualeval.metrics import Mean
from tests.works import work_of

COLUMNS: dict[str, Callable[[], Any]] = {
    "sliced": lambda: torch.arange(1000.0)[10:14],
    "expanded": lambda: torch.ones(1).expand(4),
    "shared": lambda: torch.arange(4.0).share_memory_(),  # type: ignore[no-untyped-call]
}


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


def test_a_slow_disk_makes_nobody_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "FLUSH_ROWS", 4)
    begun, goes_on = threading.Event(), threading.Event()
    fsync = os.fsync

    def slow(number: int) -> None:
        begun.set()
        assert goes_on.wait(20)
        fsync(number)

    monkeypatch.setattr(os, "fsync", slow)
    plan = EvalPlan(num_samples=12, batch_size=4)
    taking = Recorder(plan, [Mean("m")], ["m"], journal(tmp_path))
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


def test_what_could_not_be_written_is_raised_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    taking = Recorder(plan, [Mean("m")], ["m"], journal(tmp_path))
    taking.add(work_of(plan, 0), {"m": torch.arange(4.0)})
    with pytest.raises(OSError, match="No space left"):
        taking.add(work_of(plan, 1), {"m": torch.arange(4.0)})
    assert taking.chunks_saved == 0
    assert taking.flush()
    assert taking.chunks_saved == 2 and taking.ledger.totals() == (8, 0)
    assert len(list(tmp_path.glob("*.journal"))) == 2


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
