"""MosaicML's shards (MDS of streaming): an index of JSON, and files of samples, perhaps packed with zstd."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow

from dualeval.data.cache import DataCache
from dualeval.data.image_files import FileNames, check_unchanged
from dualeval.data.packed import FilePieces, Labelled, PackedImages, State, columns_of, states_of
from dualeval.data.table_labels import Labeler, TableLabels
from dualeval.errors import UsageError
from dualeval.process.status_line import doing

_PICTURES = ("jpeg", "png", "bytes")
# Of a shard: how many samples, where each begins and where the last ends, and of a sample the sizes of the
# columns that have none of their own.
_NUMBER = np.dtype("<u4")
# As the index names them: "int" has eight bytes, others are NumPy's names.
_WHOLE = ("int", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
# Unpacked shards that a process keeps.
_UNPACKED = 2


def open_images(
    at: Path,
    *,
    label: Labeler,
    path_column: str | None,
    label_column: str | None,
    whole_files: bool,
    cache: DataCache | None,
) -> PackedImages:
    """Open those of a folder; what is done to each is decided afterwards (``prepared``)."""
    cache = cache or DataCache()
    chosen = path_column, label_column
    read = cache.once(("mds", at.absolute(), *chosen), lambda: _read(at, *chosen))
    return read.images(at, label, whole_files=whole_files, cache=cache)


def _read(at: Path, path_column: str | None, label_column: str | None) -> Labelled:
    shards = json.loads((at / "index.json").read_text("utf-8"))["shards"]
    kinds = dict(zip(shards[0]["column_names"], shards[0]["column_encodings"], strict=True))
    pictures = [name for name, kind in kinds.items() if kind in _PICTURES]
    if not pictures:
        raise UsageError(f"data folder {at} has the columns {kinds}: expected one of jpeg, png or bytes")
    usable = [name for name, kind in kinds.items() if kind in (*_WHOLE, "str")]
    picture, label = columns_of(at, pictures, usable, path_column, label_column)
    paths = [_file(at, shard) for shard in shards]
    states = states_of(paths)
    labels = TableLabels(lambda number: f"{at}, sample {number}", label, ())
    offsets, lengths, codes, ends = array("q"), array("I"), array("i"), [0]
    with doing(f"looking for the samples in {at}") as looking:
        for path, state, shard in zip(paths, states.tolist(), shards, strict=True):
            data = _bytes_of(str(path), tuple(state))
            begins = np.frombuffer(data[4 : 8 + 4 * shard["samples"]].tobytes(), _NUMBER).tolist()
            if len(begins) != shard["samples"] + 1 or begins[-1] != len(data):
                raise UsageError(
                    f"{path} is not as {at / 'index.json'} has it: fetch or write the shard again"
                )
            for begin in begins[:-1]:
                parts = _parts(data, begin, shard)
                first, last = parts[label]
                value = data[first:last].tobytes()
                name = "int64" if kinds[label] == "int" else kinds[label]
                codes.append(
                    labels.place(
                        len(codes), value.decode() if name == "str" else int(np.frombuffer(value, name)[0])
                    )
                )
                offsets.append(ends[-1] + parts[picture][0])
                lengths.append(parts[picture][1] - parts[picture][0])
            ends.append(ends[-1] + len(data))
            looking.count = len(codes)
    pieces = MdsPieces(
        files=[str(path.absolute()) for path in paths],
        states=states,
        ends=np.array(ends[1:], np.int64),
        places=np.frombuffer(offsets, np.int64),
        lengths=np.frombuffer(lengths, np.uint32),
    )
    names = FileNames(map(str, range(len(codes))))
    return Labelled(pieces=pieces, names=names, codes=np.frombuffer(codes, np.int32), labels=labels)


def _file(at: Path, shard: Mapping[str, Any]) -> Path:
    """The file of a shard, unpacked where it is there so."""
    files = [at / part["basename"] for part in (shard["raw_data"], shard["zip_data"]) if part]
    path: Path | None = next((path for path in files if path.is_file()), None)
    if path is None:
        raise UsageError(f"data folder {at}: its index.json names {files[-1]}, which is missing. Fetch it.")
    if path is not files[0] and path.suffix != ".zstd":
        raise UsageError(f"{path} is packed, and of packed shards those of zstd are read. Unpack it first.")
    return path


def _parts(data: npt.NDArray[np.uint8], begin: int, shard: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Where each column of a sample begins and ends."""
    sizes: Sequence[int | None] = shard["column_sizes"]
    first = begin + 4 * sizes.count(None)
    stored = iter(np.frombuffer(data[begin:first].tobytes(), _NUMBER).tolist())
    parts = {}
    for name, size in zip(shard["column_names"], sizes, strict=True):
        last = first + (next(stored) if size is None else size)
        parts[name] = (first, last)
        first = last
    return parts


class MdsPieces(FilePieces):
    """Pictures in shards, which may be packed."""

    @property
    def in_groups(self) -> bool:  # type: ignore[override]
        """Whether there are packed ones."""
        return any(file.endswith(".zstd") for file in self.files)

    def part(self, index: int) -> tuple[int, Callable[[int, int], bytes]]:
        file, state, first = self.find(index)
        if not file.endswith(".zstd"):
            return super().part(index)
        check_unchanged(file, state, file)
        data = _unpacked(file, state)[first : first + int(self.lengths[index])]
        return len(data), lambda count, offset: data[offset : offset + count].tobytes()


def _bytes_of(path: str, state: State) -> npt.NDArray[np.uint8]:
    """The bytes of a shard, which lie there until they are looked at, or are unpacked."""
    return _unpacked(path, state) if path.endswith(".zstd") else np.memmap(path, np.uint8, "r")


@lru_cache(_UNPACKED)
def _unpacked(path: str, state: State) -> npt.NDArray[np.uint8]:
    with pyarrow.input_stream(path, compression="zstd") as stream:
        return np.frombuffer(stream.read(), np.uint8)
