"""The journal: finished work of a rank on disk, one file at a time.

A file holds the chunks finished since the last one: their numbers, one ledger delta for them together, and
their per-sample rows. It is written under another name, checksummed, synced and renamed, so a file under its
final name is complete. Layout, integers little-endian:

    8 bytes   magic "DUALEVL3"; "DUALEVL4" if a column is ragged or text: older versions skip the file
    8 bytes   length of the header
    header    UTF-8 JSON: fingerprint, machine, chunks, rows (a count per chunk), failed, failures (index and
              error of each failed sample), entries, columns
    entries   int64 ledger slots, then int64 values: the non-zero entries of the delta
    columns   each in C order, one after the other; a ragged column, or one of text, as ``rows + 1`` int64
              offsets of its rows' values, and then the values
    32 bytes  sha256 of everything before
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualeval.atomic_files import partial_of, whole_file
from dualeval.columns.ragged import Column
from dualeval.engine.folder.layout import SUFFIX, file_name
from dualeval.engine.folder.row_windows import RowsOfChunks, describe_columns, place_columns
from dualeval.engine.values.plan import EvalPlan
from dualeval.errors import DualevalError

_MAGIC = b"DUALEVL3"
_MAGIC_OF_RAGGED = b"DUALEVL4"
_CHECKSUM_BYTES = 32
# Longest text kept of a failed sample's error; an error may quote a whole file.
MOST_OF_AN_ERROR = 500


@dataclass(frozen=True, kw_only=True)
class JournalFile(RowsOfChunks):
    """A checked file: what it holds, without the rows themselves."""

    # Sha256 of its content, 32 bytes.
    checksum: bytes
    # Fingerprint of the job that wrote it.
    fingerprint: str
    # The machine that computed its rows.
    machine: dict[str, Any]
    # Number of its samples that could not be read.
    failed: int
    # Index and error of each of these samples.
    failures: tuple[tuple[int, str], ...]
    # Ledger slots of its delta, int64 of shape (entries,).
    slots: npt.NDArray[np.int64]
    # The values to add to these slots, likewise.
    values: npt.NDArray[np.int64]

    def _read(self, dtype: np.dtype[Any], count: int, offset: int) -> npt.NDArray[Any]:
        # fromfile, not a memory map: mapped pages would count as this process's memory.
        return np.fromfile(self.path, dtype, count=count, offset=offset)


class JournalWriter:
    """Writes the files of one rank."""

    def __init__(self, folder: Path, *, fingerprint: str, machine: Mapping[str, Any], prefix: str) -> None:
        self.folder = folder
        self._fingerprint = fingerprint
        self._machine = dict(machine)
        self._prefix = prefix
        self.written: list[Path] = []

    def write(
        self,
        chunks: Sequence[int],
        rows: Sequence[int],
        delta: Tensor,
        columns: Mapping[str, Column],
        failures: Sequence[tuple[int, str]] = (),
    ) -> None:
        """Write one file and wait until it is on the disk."""
        slots = delta.nonzero().flatten()
        stored, arrays = describe_columns(columns)
        entries = [np.ascontiguousarray(part.numpy(), "<i8") for part in (slots, delta[slots])]
        header = json.dumps(
            {
                "fingerprint": self._fingerprint,
                "machine": self._machine,
                "chunks": list(chunks),
                "rows": list(rows),
                "failed": len(failures),
                "failures": list(failures),
                "entries": len(slots),
                "columns": stored,
            }
        ).encode()
        path = self.folder / file_name(self._prefix, len(self.written))
        with whole_file(path, partial_of(path)) as partial:
            _write(
                partial,
                [
                    _MAGIC if all("form" not in entry for entry in stored) else _MAGIC_OF_RAGGED,
                    len(header).to_bytes(8, "little"),
                    header,
                    *(array.reshape(-1).view(np.uint8).data for array in (*entries, *arrays)),
                ],
            )
        self.written.append(path)


def _write(path: Path, pieces: Sequence[bytes | memoryview]) -> None:
    """Write the pieces, followed by their checksum."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        file.write(digest.digest())


def read_journal_file(path: Path) -> JournalFile:
    """Check a file from its first to its last byte and describe what it holds."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(len(_MAGIC) + 8)
        if size < len(start) + _CHECKSUM_BYTES or not start.startswith((_MAGIC, _MAGIC_OF_RAGGED)):
            raise DualevalError(f"{path} is not a journal file of this version, or is truncated")
        digest = hashlib.sha256(start)
        left = size - len(start) - _CHECKSUM_BYTES
        header_length = int.from_bytes(start[len(_MAGIC) :], "little")
        header = file.read(min(header_length, left))
        digest.update(header)
        left -= len(header)
        while left > 0 and (part := file.read(min(left, 1 << 20))):
            digest.update(part)
            left -= len(part)
        checksum = file.read(_CHECKSUM_BYTES)
        if digest.digest() != checksum:
            raise DualevalError(f"{path} is damaged: its checksum does not fit its content")
    facts = json.loads(header)
    total = sum(facts["rows"])
    entries = facts["entries"]
    delta = np.fromfile(path, "<i8", count=2 * entries, offset=len(start) + header_length)
    offset = len(start) + header_length + 2 * 8 * entries
    return JournalFile(
        path=path,
        checksum=checksum,
        fingerprint=facts["fingerprint"],
        machine=facts["machine"],
        chunks=tuple(facts["chunks"]),
        rows=tuple(facts["rows"]),
        failed=facts["failed"],
        # Older versions only counted failures.
        failures=tuple((index, error) for index, error in facts.get("failures", ())),
        slots=delta[:entries],
        values=delta[entries:],
        columns=place_columns(facts["columns"], total, offset),
    )


@dataclass(frozen=True, kw_only=True)
class FinishedChunks:
    """The chunks that earlier runs of the same job have finished."""

    # The files that count, in name order; no chunk is in two of them.
    files: tuple[JournalFile, ...]
    # Numbers of the chunks that are in none of these files, in order.
    remaining: tuple[int, ...]
    # A sentence for each file that does not count.
    left_out: tuple[str, ...]
    # The left-out files that belong to another job.
    foreign: frozenset[Path] = frozenset()

    def machine(self, current: Mapping[str, Any]) -> Mapping[str, Any]:
        """The machine that the result names: this run's, or that of the first file if no chunk remains."""
        return current if self.remaining or not self.files else self.files[0].machine

    def add_to(self, ledger: Tensor) -> None:
        """Add the files' deltas to a ledger's vector."""
        for file in self.files:
            ledger.index_add_(0, torch.from_numpy(file.slots), torch.from_numpy(file.values))


def read_journal(
    folders: Sequence[Path],
    plan: EvalPlan,
    fingerprint: str,
    each: Callable[[], None] = lambda: None,
    *,
    retried: Path | None = None,
    wanted: Sequence[int] | None = None,
) -> FinishedChunks:
    """Read the journal files in some folders, whichever runs wrote them.

    Files are taken in the order of folders and names, those without a failed sample first. A file that names
    a chunk already taken is left out whole, so that no chunk counts twice. In the folder ``retried``, files
    with a failed sample are left out, so that these chunks are tried again. ``remaining`` are those of the
    ``wanted`` chunks, or of all, that none of these files holds.
    """
    readable: list[JournalFile] = []
    files = []
    left_out = []
    foreign = set()
    held = np.zeros(plan.num_chunks, np.bool_)
    sizes = plan.chunk_sizes()
    asked = range(plan.num_chunks) if wanted is None else wanted
    for path in (path for folder in folders for path in sorted(folder.glob(f"*{SUFFIX}"))):
        try:
            readable.append(read_journal_file(path))
        except (DualevalError, OSError) as error:
            left_out.append(str(error))
        each()
    for file in sorted(readable, key=lambda file: file.failed > 0):
        if file.fingerprint != fingerprint:
            foreign.add(file.path)
        retries = file.path.parent == retried
        reason = _reason_to_leave_out(file, sizes, fingerprint, held, retries=retries)
        if reason is None:
            files.append(file)
            held[list(file.chunks)] = True
        elif reason:
            left_out.append(reason)
    return FinishedChunks(
        files=tuple(files),
        remaining=tuple(chunk for chunk in asked if not held[chunk]),
        left_out=tuple(left_out),
        foreign=frozenset(foreign),
    )


def _reason_to_leave_out(
    file: JournalFile,
    sizes: npt.NDArray[np.int64],
    fingerprint: str,
    held: npt.NDArray[np.bool_],
    *,
    retries: bool,
) -> str | None:
    """Why a whole file does not count: a sentence, empty if nobody needs to know; None if the file counts."""
    if file.fingerprint != fingerprint:
        return f"{file.path} belongs to another job, with fingerprint {file.fingerprint[:8]}"
    if file.failed and retries:
        return ""
    chunks = np.array(file.chunks, np.int64)
    # Chunk sizes are not in the fingerprint: no number depends on them.
    if chunks.max() >= len(sizes) or not np.array_equal(sizes[chunks], file.rows):
        return f"{file.path} was written by a version of dualeval that divides the data set into other chunks"
    again = chunks[held[chunks]]
    if len(again):
        return f"{file.path} holds chunk {again[0]}, which another file holds already"
    return None
