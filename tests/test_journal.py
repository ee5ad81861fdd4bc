"""The journal's files: what is written is read, and damage anywhere is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dualeval.engine.folder.journal import JournalWriter, file_bytes, read_journal_file, store_file
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
    assert (file.fingerprint, file.chunks, file.rows) == ("f" * 64, (4, 9), (2, 1))
    assert file.machine == {"model": "m"}
    assert file.read_rows("evaluated", 0, 3).tolist() == [1, 1, 0]
    assert file.read_rows("top", 1, 3).tolist() == [[3, 4], [5, 6]]
    assert file.read_rows("loss", 2, 3).tolist() == [2.0]
    assert file.read_rows("loss", 1, 1).shape == (0,)


def test_nothing_is_left_beside_it(path: Path) -> None:
    assert [other.name for other in path.parent.iterdir()] == ["t-00000-000000.journal"]


def test_every_flipped_byte_is_noticed(path: Path, tmp_path: Path) -> None:
    content = bytearray(path.read_bytes())
    damaged = tmp_path / "damaged.journal"
    for position in range(len(content)):
        content[position] ^= 0x40
        damaged.write_bytes(content)
        with pytest.raises(DualevalError):
            read_journal_file(damaged)
        content[position] ^= 0x40


def test_every_truncation_is_noticed(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    damaged = tmp_path / "damaged.journal"
    for length in range(len(content)):
        damaged.write_bytes(content[:length])
        with pytest.raises(DualevalError):
            read_journal_file(damaged)


def test_a_file_travels_as_bytes(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.journal"
    store_file(copy, file_bytes(path))
    assert copy.read_bytes() == path.read_bytes()
    assert read_journal_file(copy).chunks == (4, 9)
