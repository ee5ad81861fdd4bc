"""A pack: the samples of a data set as a model takes them, one behind the other in one file.

Behind ``_START`` bytes lie the samples, each with zeros up to a multiple of 8 bytes: the classes of a mask's
pixels, int16, and the picture's pixels, uint8; of one that cannot be read the error, UTF-8. Then come a row
for each (``row_type``), arrays, values as JSON, and an end of fixed size: where rows and values begin, and
the hash of all behind the samples. Rows are mapped into memory; samples are read by position, as an error of
the disk would kill a process that has them mapped.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
import numpy.typing as npt

from dualeval.atomic_files import put_in_place
from dualeval.data.preprocessing import Normalisation, OwnPreprocessing, Preprocessing, Uncropped
from dualeval.errors import UsageError, text_of

Bytes = npt.NDArray[np.uint8]
_MAGIC = b"dualeval pack 1\n"
_START, _STEP = 4096, 8
_END = struct.Struct("<QQ32s16s")
# Of a row: the sample cannot be read; EXIF has turned its picture or its mask alone.
FAILED, TURNED = 1, 2


def row_type(files: int) -> np.dtype[Any]:
    """What is known of a sample, which was made of so many files."""
    return np.dtype(
        [
            # Behind its last byte; and the checksum of its bytes.
            *(("end", "<i8"), ("sum", "<u8"), ("flags", "<i4")),
            # Channels, height and width of the picture, height and width of the mask; of one that cannot be
            # read those of what takes its place.
            ("shape", "<i4", (5,)),
            # Of each file the size, and what tells it from others (``ImageFiles``).
            *(("sizes", "<i8", (files,)), ("digests", "u1", (files, 32))),
        ]
    )


def stored(*parts: Bytes) -> Bytes:
    """The bytes of a sample as they lie in a pack."""
    gap = np.zeros(-sum(map(len, parts)) % _STEP, np.uint8)
    return np.concatenate([*parts, gap])


@lru_cache(2)
def _weights(bits: int) -> npt.NDArray[np.uint64]:
    return np.random.PCG64(0).random_raw(1 << bits) | np.uint64(1)


def sums_of(samples: Bytes) -> npt.NDArray[np.uint64]:
    """Checksums of samples of one length, (samples, bytes): five times as fast as CRC-32.

    A sum of 64-bit words, each by an odd number of its place: another value of one word is always seen.
    """
    words = samples.view(np.uint64)
    sums: npt.NDArray[np.uint64] = words @ _weights(words.shape[1].bit_length())[: words.shape[1]]
    return sums


def pixels_of(wanted: Normalisation) -> dict[str, Any]:
    """What decides the pixels of pictures, which mean and std do not: plain values of JSON."""
    if isinstance(wanted, OwnPreprocessing):
        return {"function": str(wanted)}
    kind = {Preprocessing: "a part of each", Uncropped: "whole"}.get(type(wanted), "whole, in own size")
    others = {name: value for name, value in vars(wanted).items() if name not in ("mean", "std")}
    plain: dict[str, Any] = json.loads(json.dumps({"pictures": kind, **others}))
    return plain


def refuse_other(path: Path, what: str, packed: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse a pack that holds something else than a run wants."""
    if packed != wanted:
        lists = (", ".join(f"{name} {value}" for name, value in each.items()) for each in (packed, wanted))
        names = [name for name in {**packed, **wanted} if packed.get(name) != wanted.get(name)]
        raise UsageError(
            f"{path} was packed with other {what} ({', '.join(names)}). It holds: {next(lists)}. This run "
            f"wants: {next(lists)}. Give the options with which it was packed, or pack the data for this "
            "model: dualeval pack"
        )


class PackFile:
    """A pack that is read; forks share it, as it is read by position."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            finalize(self, os.close, self._number)
            self._state = self._state_now()
            values = self._read_index(path.stat().st_size)
            self.values: dict[str, Any] = values["values"]
            self._arrays: dict[str, Any] = values["arrays"]
            first, count, files = values["rows"]
            # The ranks of a node share these pages.
            self.rows = np.memmap(path, row_type(files), "r", first, (count,)).view(np.ndarray)
        except (OSError, ValueError, KeyError) as error:
            why = "it does not exist" if isinstance(error, FileNotFoundError) else text_of(error)
            raise UsageError(f"{path} cannot be read as a pack: {why}. 'dualeval pack' makes one.") from error

    def _read_index(self, size: int) -> Any:
        end = os.pread(self._number, _END.size, max(0, size - _END.size))
        start, values, digest, magic = _END.unpack(end) if len(end) == _END.size else (0, 0, b"", b"")
        if magic != _MAGIC:
            raise ValueError("it is cut off, or no pack")
        index = self._bytes(start, size - _END.size)
        if hashlib.sha256(index.data).digest() != digest:
            raise ValueError("the list of its samples is damaged")
        # Over the checksums of all samples, too.
        self.checksum: str = digest.hex()
        return json.loads(index[values - start :].tobytes())

    def _state_now(self) -> tuple[int, int]:
        now = os.fstat(self._number)
        return now.st_size, now.st_mtime_ns

    def array(self, name: str) -> npt.NDArray[Any]:
        """An array by name."""
        dtype, first, count = self._arrays[name]
        return np.frombuffer(self._bytes(first, first + np.dtype(dtype).itemsize * count), dtype)

    def _bytes(self, first: int, last: int) -> Bytes:
        read, at = np.empty(last - first, np.uint8), first
        while at < last:
            if not (count := os.preadv(self._number, [read.data[at - first :]], at)):
                raise OSError(f"{self.path} ends within the sample")
            at += count
        return read

    def read(self, places: npt.NDArray[np.int64]) -> Bytes | list[Bytes]:
        """The bytes of samples: of consecutive ones parts of one array, of equal lengths its rows.

        Raises:
            OSError: they are not the bytes that were packed.
        """
        # Its sums would be those of the new bytes; of one that is shorter by now they cannot be read at all.
        if self._state_now() != self._state:
            raise OSError(f"{self.path} has changed since it was opened")
        if len(places) > 1 and (np.diff(places) != 1).any():
            return [self._consecutive(place[None])[0] for place in places]
        return self._consecutive(places)

    def _consecutive(self, places: npt.NDArray[np.int64]) -> Bytes | list[Bytes]:
        rows = self.rows[places[0] : places[-1] + 1]
        first = int(self.rows["end"][places[0] - 1]) if places[0] else _START
        ends = rows["end"] - first
        lengths = np.diff(ends, prepend=0)
        read = self._bytes(first, first + int(ends[-1]))
        if (lengths == lengths[0]).all():
            samples: Bytes | list[Bytes] = (table := read.reshape(len(places), -1))
            sums = sums_of(table)
        else:
            samples = np.split(read, ends[:-1])
            sums = np.concatenate([sums_of(sample[None]) for sample in samples])
        if (sums != rows["sum"]).any():
            raise OSError(f"{self.path} is damaged: it has other bytes than were packed. Pack it anew")
        return samples

    def error(self, place: int) -> str:
        """Why a sample that has FAILED could not be read, with the error's type."""
        return self.read(np.array([place]))[0].tobytes().rstrip(b"\0").decode()


def _is_at(number: int, path: Path) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(number), path.stat())
    except FileNotFoundError:
        return False


class PackWriter:
    """A pack that is written beside its name, and goes on where another process was killed.

    What is there is read once more, so that nothing waits for the disk before the end.
    """

    def __init__(self, path: Path, files: int, key: Mapping[str, Any]) -> None:
        self._path, self._type = path, row_type(files)
        self._partial, listed = (path.with_name(f"{path.name}.partial{end}") for end in ("", ".rows"))
        # Opened to append they are made, and keep what is there.
        self._file, self._listed = (each.open("a+b") for each in (self._partial, listed))
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UsageError(f"--out {path}: another process is packing it. Wait for that one.") from None
        if not _is_at(self._file.fileno(), self._partial):
            self.close()
            raise UsageError(
                f"--out {path}: another process has just packed it. Type the same command again."
            )
        of_key = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).digest()
        before, _, content = listed.read_bytes().partition(of_key)
        count = 0 if before else len(content) // self._type.itemsize
        rows = np.frombuffer(content, self._type, count)
        rows = rows[: self._whole(rows)]
        self._rows, self.count = [rows], len(rows)
        self.end = int(rows["end"][-1]) if len(rows) else _START
        self._file.truncate(self.end if len(rows) else 0)
        self._listed.truncate(len(of_key) + rows.nbytes if len(rows) else 0)
        if not len(rows):
            self._file.write(_MAGIC.ljust(_START, b"\0"))
            self._listed.write(of_key)

    def _whole(self, rows: npt.NDArray[Any]) -> int:
        """How many samples are there, whole."""
        end, size = _START, self._file.seek(0, os.SEEK_END)
        for place, row in enumerate(rows):
            first, end = end, int(row["end"])
            if not first < end <= size or (end - first) % _STEP:
                return place
            self._file.seek(first)
            read = np.frombuffer(self._file.read(end - first), np.uint8)
            if sums_of(read[None])[0] != row["sum"]:
                return place
        return len(rows)

    def close(self) -> None:
        """Close its files, which another process may go on with."""
        self._file.close()
        self._listed.close()

    def add(self, samples: Bytes, rows: npt.NDArray[Any]) -> None:
        """Write the next samples; the ends of their rows count from the first one's beginning."""
        rows["end"] += self.end
        self._file.write(samples.data)
        self._file.flush()
        self._listed.write(rows.tobytes())
        self._listed.flush()
        self._rows.append(rows)
        self.end, self.count = int(rows["end"][-1]), self.count + len(rows)

    def finish(self, arrays: Mapping[str, npt.NDArray[Any]], values: Mapping[str, Any]) -> None:
        """Write all that is behind the samples, and give the file its name."""
        hashed, places, at = hashlib.sha256(), {}, self.end
        rows = np.concatenate(self._rows)
        for name, array in {"": rows, **arrays}.items():
            places[name] = [array.dtype.str, at, len(array)]
            at += self._write(stored(np.frombuffer(array.tobytes(), np.uint8)).tobytes(), hashed)
        listed = [self.end, len(rows), rows["sizes"].shape[1]]
        self._write(json.dumps({"rows": listed, "arrays": places, "values": values}).encode(), hashed)
        self._file.write(_END.pack(self.end, at, hashed.digest(), _MAGIC))
        self._file.flush()
        # Locked until it has its name: another one would take the whole pack for what is packed so far.
        put_in_place(self._partial, self._path)
        self.close()
        self._partial.with_name(f"{self._partial.name}.rows").unlink()

    def _write(self, content: bytes, hashed: Any) -> int:
        hashed.update(content)
        return self._file.write(content)
