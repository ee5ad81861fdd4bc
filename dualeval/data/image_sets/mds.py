"""MosaicML's shards (MDS of streaming): an index of JSON, and files of samples, perhaps packed with zstd."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow

from dualeval.data.image_files import FileNames, check_unchanged
from dualeval.data.packed import FilePieces, Labelled, PackedImages, State, columns_of, open_once, states_of
from dualeval.data.table_labels import TableLabels
from dualeval.errors import UsageError
from dualeval.process.status_line import doing

_PICTURES = ("jpeg", "png", "bytes")
# Of a shard: how many samples, where each begins and where the last ends, and of a sample the sizes of the
# columns that have none of their own.
_NUMBER = np.dtype("<u4")
# As the index names them: "int" has eight bytes, others are NumPy's names.
_TEXTS = ("str", "str_int")
_WHOLE = ("int", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
# Unpacked shards that a process keeps.
_UNPACKED = 2


def open_images(
    at: Path, *, path_column: str | None, label_column: str | None, **options: Any
) -> PackedImages:
    """Open those of a folder."""
    return open_once(_read, at, path_column, label_column, **options)


def _read(at: Path, path_column: str | None, label_column: str | None) -> Labelled:
    shards = _shards(at / "index.json")
    columns = shards[0]["column_names"]
    # Behind a colon is what the writer was asked for: "jpeg:90".
    kinds = [kind.partition(":")[0] for kind in shards[0]["column_encodings"]]
    pictures = [name for name, kind in zip(columns, kinds, strict=True) if kind in _PICTURES]
    if not pictures:
        raise UsageError(
            f"data folder {at} has the columns {_columns(shards[0])}: expected one of {', '.join(_PICTURES)}"
        )
    others = [name for name in columns if name not in pictures]
    chosen = columns_of(at, pictures, others, path_column, label_column)
    picture, label = map(columns.index, chosen)
    if (kind := kinds[label]) not in (*_WHOLE, *_TEXTS):
        raise UsageError(
            f"data folder {at}: the labels {chosen[1]!r} are {kind}; expected one of "
            f"{', '.join((*_WHOLE, *_TEXTS))}. Name another column: --label-column NAME"
        )
    paths = [_file(at, shard) for shard in shards]
    states = states_of(paths)
    labels = TableLabels(lambda number: f"{at}, sample {number}", chosen[1], ())
    places, lengths, codes, ends = [], [], array("i"), [0]
    with doing(f"looking for the samples in {at}") as looking:
        for path, state, shard in zip(paths, states.tolist(), shards, strict=True):
            try:
                data = _bytes_of(str(path), tuple(state))
                of_samples = _places(data, shard)
                values = _values(data, of_samples[:, label : label + 2], kind)
            except (OSError, ValueError, IndexError) as error:
                raise _torn(path, at / "index.json", error) from error
            codes.extend(labels.place(number, value) for number, value in enumerate(values, len(codes)))
            places.append(of_samples[:, picture] + ends[-1])
            lengths.append(np.diff(of_samples[:, picture : picture + 2])[:, 0].astype(np.uint32))
            ends.append(ends[-1] + len(data))
            looking.count = len(codes)
    pieces = MdsPieces(
        files=[str(path.absolute()) for path in paths],
        states=states,
        ends=np.array(ends[1:], np.int64),
        places=np.concatenate(places),
        lengths=np.concatenate(lengths),
    )
    names = FileNames(map(str, range(len(codes))))
    return Labelled(pieces=pieces, names=names, codes=np.frombuffer(codes, np.int32), labels=labels)


def _shards(index: Path) -> list[dict[str, Any]]:
    """The shards that an index names, whose columns are those of the first."""
    try:
        shards: list[dict[str, Any]] = json.loads(index.read_bytes())["shards"]
        columns = [_columns(shard) for shard in shards]
        names = [shard["raw_data"]["basename"] for shard in shards]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{index} is not as streaming writes it ({error!r}). Fetch it, or write the shards again."
        ) from error
    if not shards:
        raise UsageError(f"--data {index.parent} holds no sample: its index.json names no shard.")
    for name, there in zip(names, columns, strict=True):
        if there != columns[0]:
            raise UsageError(
                f"{index}: the shard {name} has the columns {there}; expected those of {names[0]}: "
                f"{columns[0]}. Write the shards anew, together."
            )
    return shards


def _columns(shard: Mapping[str, Any]) -> str:
    """The columns of a shard, and how each is written."""
    if shard["format"] != "mds":
        raise ValueError(f"format {shard['format']}, expected mds")
    kinds = zip(shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=True)
    return ", ".join(
        f"{name} ({kind}{'' if size is None else f', {size} bytes'})" for name, kind, size in kinds
    )


def _file(at: Path, shard: Mapping[str, Any]) -> Path:
    """The file of a shard, unpacked where it is there so."""
    parts = [part for part in (shard["raw_data"], shard.get("zip_data")) if part]
    part = next((part for part in parts if (at / part["basename"]).is_file()), None)
    if part is None:
        missing = at / parts[-1]["basename"]
        raise UsageError(f"data folder {at}: its index.json names {missing}, which is missing. Fetch it.")
    path = at / str(part["basename"])
    if part is not parts[0] and path.suffix != ".zstd":
        raise UsageError(f"{path} is packed, and of packed shards those of zstd are read. Unpack it first.")
    if (size := path.stat().st_size) != part["bytes"]:
        raise _torn(path, at / "index.json", f"{size:,} bytes, expected {part['bytes']:,}")
    return path


def _torn(path: Path, index: Path, fault: object) -> UsageError:
    return UsageError(f"{path} is not as {index} has it ({fault}): fetch or write the shard again")


def _places(data: npt.NDArray[np.uint8], shard: Mapping[str, Any]) -> npt.NDArray[np.int64]:
    """Where each column of each sample begins, and where the last ends: (samples, columns + 1).

    Raises ValueError or IndexError where the bytes are not those of such samples.
    """
    count, sizes = shard["samples"], shard["column_sizes"]
    if len(data) != shard["raw_data"]["bytes"]:
        raise ValueError(f"{len(data):,} bytes unpacked, expected {shard['raw_data']['bytes']:,}")
    begins = np.frombuffer(data[4 : 8 + 4 * count].tobytes(), _NUMBER).astype(np.int64)
    are_stored = np.array([size is None for size in sizes])
    heads = begins[:-1, None] + np.arange(4 * are_stored.sum())
    lengths = np.tile(np.array([size or 0 for size in sizes], np.int64), (count, 1))
    lengths[:, are_stored] = np.ascontiguousarray(data[heads]).view(_NUMBER)
    places = np.cumsum(np.column_stack((begins[:-1] + heads.shape[1], lengths)), axis=1)
    if begins[-1] != len(data) or (places[:, -1] != begins[1:]).any():
        raise ValueError("its samples do not follow each other")
    return places


def _values(data: npt.NDArray[np.uint8], places: npt.NDArray[np.int64], kind: str) -> list[Any]:
    """The labels, each from one place to another."""
    if kind in _TEXTS:
        return [data[begin:end].tobytes().decode() for begin, end in places.tolist()]
    form = np.dtype("int64" if kind == "int" else kind)
    stored = np.ascontiguousarray(data[places[:, :1] + np.arange(form.itemsize)])
    values: list[Any] = stored.view(form)[:, 0].tolist()
    return values


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
