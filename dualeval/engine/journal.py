"""The journal: what a rank has finished, on disk, a file at a time.

A file holds the chunks finished since the last one: their numbers, one ledger delta for them together, and
their per-sample rows. It is written beside its place, checksummed, synced and renamed, so a file that is
there under its name is whole. Layout, integers little-endian:

    8 bytes   magic "DUALEVL1"
    8 bytes   length of the header
    header    UTF-8 JSON: fingerprint, chunks, rows (a count per chunk), entries, columns
    entries   int64 ledger slots, then int64 values: the non-zero entries of the delta
    columns   each in C order, one after the other
    32 bytes  sha256 of everything before
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualeval.errors import DualevalError
from dualeval.result import partial_of

_MAGIC = b"DUALEVL1"
_CHECKSUM_BYTES = 32
SUFFIX = ".journal"


@dataclass(frozen=True, kw_only=True)
class Column:
    """Where a column lies in a file.

    Attributes:
        name: the column's name.
        dtype: its little-endian numpy dtype.
        row_shape: the shape of one row; () for a scalar column.
        offset: bytes from the start of the file.
    """

    name: str
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(self.dtype.itemsize * np.prod(self.row_shape, dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class JournalFile:
    """A checked file: what it holds, without the rows themselves.

    Attributes:
        path: where it is.
        fingerprint: of the job that wrote it.
        chunks: numbers of its chunks, in the order of its rows.
        rows: number of rows of each chunk.
        columns: its columns by name.
    """

    path: Path
    fingerprint: str
    chunks: tuple[int, ...]
    rows: tuple[int, ...]
    columns: dict[str, Column]

    def read_rows(self, column: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows ``start`` to ``stop`` of a column, shape (stop - start, *row_shape)."""
        where = self.columns[column]
        count = (stop - start) * where.row_bytes // where.dtype.itemsize
        # fromfile, not a memory map: mapped pages would count as this process's memory.
        values = np.fromfile(
            self.path, where.dtype, count=count, offset=where.offset + start * where.row_bytes
        )
        return values.reshape(stop - start, *where.row_shape)


class JournalWriter:
    """Writes the files of one rank.

    Args:
        folder: where; it must exist.
        fingerprint: the job's; written into every file.
        prefix: start of every file's name, unique to this rank of this run.
    """

    def __init__(self, folder: Path, *, fingerprint: str, prefix: str) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._prefix = prefix
        self.written: list[Path] = []

    def write(
        self, chunks: Sequence[int], rows: Sequence[int], delta: Tensor, columns: Mapping[str, Tensor]
    ) -> None:
        """Write one file and wait until it is on the disk.

        Args:
            chunks: numbers of the finished chunks.
            rows: number of rows of each of them.
            delta: ledger of these chunks alone, 1-d int64.
            columns: their rows, in the order of ``chunks``, on the CPU, first dimension ``sum(rows)``.
        """
        slots = delta.nonzero().flatten()
        arrays = [slots.numpy(), delta[slots].numpy(), *(column.numpy() for column in columns.values())]
        arrays = [np.ascontiguousarray(array, array.dtype.newbyteorder("<")) for array in arrays]
        header = json.dumps(
            {
                "fingerprint": self._fingerprint,
                "chunks": list(chunks),
                "rows": list(rows),
                "entries": len(slots),
                "columns": [
                    {"name": name, "dtype": array.dtype.str, "shape": list(array.shape[1:])}
                    for name, array in zip(columns, arrays[2:], strict=True)
                ],
            }
        ).encode()
        path = self._folder / f"{self._prefix}-{len(self.written):06d}{SUFFIX}"
        partial = partial_of(path)
        digest = hashlib.sha256()
        with partial.open("wb") as file:
            for part in (
                _MAGIC,
                len(header).to_bytes(8, "little"),
                header,
                *(array.tobytes() for array in arrays),
            ):
                digest.update(part)
                file.write(part)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        _sync_folder(self._folder)
        self.written.append(path)


def read_journal_file(path: Path) -> JournalFile:
    """Check a file from its first to its last byte and describe what it holds.

    Raises:
        DualevalError: the file is not a whole file of this format.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(len(_MAGIC) + 8)
        if size < len(start) + _CHECKSUM_BYTES or not start.startswith(_MAGIC):
            raise DualevalError(f"{path} is no journal file of this version, or is cut short")
        digest = hashlib.sha256(start)
        left = size - len(start) - _CHECKSUM_BYTES
        header_length = int.from_bytes(start[len(_MAGIC) :], "little")
        header = file.read(min(header_length, left))
        digest.update(header)
        left -= len(header)
        while left > 0 and (part := file.read(min(left, 1 << 20))):
            digest.update(part)
            left -= len(part)
        if digest.digest() != file.read(_CHECKSUM_BYTES):
            raise DualevalError(f"{path} is damaged: its checksum does not fit its content")
    described = json.loads(header)
    total = sum(described["rows"])
    offset = len(start) + header_length + 2 * 8 * described["entries"]
    columns = {}
    for entry in described["columns"]:
        column = Column(
            name=entry["name"],
            dtype=np.dtype(entry["dtype"]),
            row_shape=tuple(entry["shape"]),
            offset=offset,
        )
        columns[column.name] = column
        offset += total * column.row_bytes
    return JournalFile(
        path=path,
        fingerprint=described["fingerprint"],
        chunks=tuple(described["chunks"]),
        rows=tuple(described["rows"]),
        columns=columns,
    )


def file_bytes(path: Path) -> Tensor:
    """A whole file as a 1-d uint8 tensor."""
    return torch.from_numpy(np.fromfile(path, dtype=np.uint8))


def store_file(path: Path, content: Tensor) -> None:
    """Write the bytes of a file that came from another rank; whole under its name, or not there."""
    partial = partial_of(path)
    with partial.open("wb") as file:
        file.write(content.numpy().data)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
