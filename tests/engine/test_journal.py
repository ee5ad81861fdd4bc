"""The journal's files: what is written is read, and damage anywhere is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dualeval.columns import values_of
from dualeval.engine.folder.journal import (
    JournalWriter,
    read_journal,
    read_journal_file,
)
from dualeval.engine.plan import EvalPlan
from dualeval.errors import DualevalError


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
