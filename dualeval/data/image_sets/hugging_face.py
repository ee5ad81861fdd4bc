"""Pictures in columns, as Hugging Face's library writes them: Parquet files, or a folder of save_to_disk.

A picture is a struct of bytes and path. Of Parquet whole row groups are read, two of which each process
keeps; Arrow files are mapped into memory, and pages of theirs are read as they are needed.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute
import pyarrow.ipc

from dualeval.columns.of_data import FurtherColumns
from dualeval.data.contents import what_it_is
from dualeval.data.image_files import FileNames, check_unchanged, digest_of
from dualeval.data.packed import Labelled, PackedImages, Pieces, State, columns_of, open_once, states_of
from dualeval.data.parquet_file import opened_parquet
from dualeval.data.set_names import PICTURE_COLUMNS, is_parquet_name, is_picture_type, is_saved_folder
from dualeval.data.shards import shards_at
from dualeval.data.stores.path import path_at
from dualeval.data.table import class_names_in
from dualeval.data.table_labels import TableLabels
from dualeval.errors import UsageError
from dualeval.messages import first_of
from dualeval.process.status_line import doing
from dualeval.urls import url_of

_ROWS_AT_ONCE = 1 << 14
# Row groups and mapped files that a process keeps.
_GROUPS, _MAPPED = 2, 8
_LARGE = 2**30
# Bytes of pictures that Arrow reads at once, where their type counts them with 32 bits.
_MOST = 2**31 - 1
_T = TypeVar("_T")


def open_images(
    at: Path, *, path_column: str | None, label_column: str | None, keep: tuple[str, ...], **options: Any
) -> PackedImages:
    """Open those of Parquet or Arrow files."""
    return open_once(_read, at, path_column, label_column, keep, **options)


def _read(at: Path, path_column: str | None, label_column: str | None, keep: tuple[str, ...]) -> Labelled:
    kind: type[_Cells] = _ArrowCells if not url_of(at) and is_saved_folder(at) else _ParquetCells
    paths = kind.files_at(at)
    try:
        schemas = [_schema(kind, path) for path in paths]
        schema = schemas[0]
        columns = schema.names
        for path, other in zip(paths, schemas, strict=True):
            if other.names != columns:
                there, expected = (first_of(names, 12) for names in (other.names, columns))
                raise UsageError(f"{path} has the columns {there}, expected those of {paths[0]}: {expected}")
        pictures = [each.name for each in schema if is_picture_type(each.type)]
        if not pictures:
            held = first_of([f"{each.name} ({each.type})" for each in schema], 12)
            raise UsageError(
                f"{paths[0]} has the columns {held}: expected one of pictures. {PICTURE_COLUMNS} A manifest "
                "is one file: --data FILE.parquet"
            )
        others = [name for name in columns if name not in pictures]
        picture, label = columns_of(at, pictures, others, path_column, label_column)
        for name in (picture, label):
            for path, other in zip(paths, schemas, strict=True):
                if (there := other.field(name).type) != (expected := schema.field(name).type):
                    raise UsageError(
                        f"{path}: the column {name!r} holds {there}, expected {expected} as in "
                        f"{paths[0].name!r}. Write the files anew, together."
                    )
        classes = [class_names_in(each.metadata or {}).get(label, ()) for each in schemas]
        for path, names in zip(paths, classes, strict=True):
            if names != classes[0]:
                there, expected = (first_of(each, 12) or "none" for each in (names, classes[0]))
                raise UsageError(
                    f"{path}: the classes of the column {label!r} are {there}; expected those of {paths[0]}: "
                    f"{expected}. The same index would be another class: write the files anew, together."
                )
        unfit = {each.name: f"it holds {each.type}" for each in schema if not _is_plain(each.type)}
        return _rows(
            at, kind, paths, picture, label, schema, FurtherColumns(others, (label,), keep, unfit=unfit)
        )
    except (OSError, pyarrow.ArrowException) as error:
        raise UsageError(f"--data {at}: a file of it cannot be read: {error}") from error


def _schema(kind: type[_Cells], path: Path) -> Any:
    try:
        return kind.schema(path)
    except (OSError, pyarrow.ArrowException) as error:
        what = what_it_is(path) if path.is_file() else None
        raise UsageError(f"{path} {what or f'cannot be read: {error}'}") from error


def _rows(
    at: Path,
    kind: type[_Cells],
    paths: Sequence[Path],
    picture: str,
    label: str,
    schema: Any,
    further: FurtherColumns,
) -> Labelled:
    """Read all but the pictures themselves."""
    names, codes, starts, states = FileNames(), array("i"), [0], states_of(paths)

    def where(number: int) -> str:
        file = int(np.searchsorted(starts, number, side="right")) - 1
        return f"{paths[file]}, row {number - starts[file] + 1}"

    labels = TableLabels(where, label, class_names_in(schema.metadata or {}).get(label, ()))
    is_named = schema.field(picture).type.get_field_index("path") >= 0
    with doing(f"reading {at}") as reading:
        for path in paths:
            for batch in kind.batches(path, picture, [label, *further.names]):
                first = len(codes)
                codes.extend(
                    labels.place(first + i, v) for i, v in enumerate(batch.column(label).to_pylist())
                )
                of_pictures: list[Any] = (
                    batch.column(picture).field("path").to_pylist() if is_named else [None]
                )
                if is_named := all(of_pictures):
                    for name in of_pictures:
                        names.append(name)
                further.take({name: batch.column(name).to_pylist() for name in further.names})
                reading.count = len(codes)
            starts.append(len(codes))
    if not is_named or names.repeated() is not None:
        names = FileNames(map(str, range(len(codes))))
    pieces = kind(
        files=[str(path.absolute()) for path in paths],
        states=states,
        ends=np.array(starts[1:], np.int64),
        places=np.arange(len(codes)),
        column=picture,
    )
    # Before a picture is read: one of too large a row group cannot be.
    notes = pieces.notes()
    first_cell = pieces.cell(*pieces.find(0)) if len(codes) else None
    if is_named and first_cell is not None and not first_cell["bytes"].is_valid:
        raise UsageError(
            f"--data {at} names its pictures by paths, such as {names.shown(0)}, and does not hold them: "
            "to_parquet of datasets leaves them out. Write it with dataset.save_to_disk(DIR), which takes "
            "them in, or give a manifest of path and label."
        )
    return Labelled(
        pieces=pieces,
        names=names,
        codes=np.frombuffer(codes, np.int32),
        labels=labels,
        notes=notes,
        kept=further.kept(),
    )


def _is_plain(kind: pyarrow.DataType) -> bool:
    types = pyarrow.types
    return not (types.is_nested(kind) or types.is_binary(kind) or types.is_large_binary(kind))


@dataclass(frozen=True, kw_only=True)
class _Cells(Pieces):
    """Pictures in rows of files."""

    column: str

    @staticmethod
    @abstractmethod
    def files_at(at: Path) -> list[Path]:
        """The files of a value of ``--data``."""

    @staticmethod
    @abstractmethod
    def schema(path: Path) -> Any:
        """The columns of a file."""

    @staticmethod
    @abstractmethod
    def batches(path: Path, picture: str, columns: Sequence[str]) -> Iterator[Any]:
        """The rows of a file: some columns, and the paths in that of the pictures."""

    @abstractmethod
    def cell(self, file: str, state: State, row: int) -> Any:
        """What Arrow has of a row's picture."""

    def notes(self) -> list[str]:
        """Sentences for people; UsageError where a part is too large to be read."""
        return []

    def of_files(self, function: Callable[[str, State, str], _T]) -> list[_T]:
        """What a function of a file, its state and the column gives for each."""
        states = self.states.tolist()
        return [
            function(file, (size, time), self.column)
            for file, (size, time) in zip(self.files, states, strict=True)
        ]

    def part(self, index: int) -> tuple[int, Callable[[int, int], bytes]]:
        file, state, row = self.find(index)
        if not url_of(file):
            check_unchanged(file, state, file)
        try:
            cell = self.cell(file, state, row)
            data = cell["bytes"].as_buffer() if cell.is_valid else None
        except pyarrow.ArrowException as error:
            raise OSError(f"{file}, row {row + 1}: {error}") from error
        if data is None:
            raise OSError(f"{file}, row {row + 1} has no bytes of a picture")
        return data.size, lambda count, offset: data[offset : offset + count].to_pybytes()


# -- Parquet ---------------------------------------------------------------------------------------------


class _ParquetCells(_Cells):
    in_groups = True

    @staticmethod
    def files_at(at: Path) -> list[Path]:
        return shards_at(at, is_parquet_name, "val-{00..13}.parquet")

    @staticmethod
    def schema(path: Path) -> Any:
        with opened_parquet(path) as file:
            return file.schema_arrow

    @staticmethod
    def batches(path: Path, picture: str, columns: Sequence[str]) -> Iterator[Any]:
        # One thread: reading processes are forked later, and have none of a pool's.
        with opened_parquet(path) as file:
            yield from file.iter_batches(
                _ROWS_AT_ONCE, columns=[f"{picture}.path", *columns], use_threads=False
            )

    def cell(self, file: str, state: State, row: int) -> Any:
        groups = _groups(file, state, self.column)
        number = int(np.searchsorted(groups[:, 0], row, side="right")) - 1
        return _row_group(file, state, number, self.column)[row - int(groups[number, 0])]

    def notes(self) -> list[str]:
        sizes = [int(groups[:, 3].max(initial=0)) for groups in self.of_files(_groups)]
        largest, file = max(zip(sizes, self.files, strict=True))
        kind = self.schema(path_at(file)).field(self.column).type.field("bytes").type
        if largest > _MOST and not pyarrow.types.is_large_binary(kind):
            raise UsageError(
                f"{file} has a row group of {largest / 2**30:.1f} GiB of pictures, and Arrow reads 2 GiB at "
                "most. Write it anew: pyarrow.parquet.write_table(table, FILE, row_group_size=100)"
            )
        if largest < _LARGE:
            return []
        return [
            f"row groups have up to {largest / _LARGE:.1f} GiB of pictures, and each reading process holds "
            f"{_GROUPS}: written with row_group_size=100 they take less memory"
        ]

    def sizes(self, count: int) -> list[int]:
        # Of their row groups: those of the pictures would be known once all have been read.
        starts = np.concatenate(([0], self.ends[:-1]))
        groups = [
            (each[:, 0] + start, each[:, 2])
            for each, start in zip(self.of_files(_groups), starts.tolist(), strict=True)
        ]
        firsts, sizes = map(np.concatenate, zip(*groups, strict=True))
        of_rows: list[int] = sizes[np.searchsorted(firsts, self.places[:count], side="right") - 1].tolist()
        return of_rows

    def digest(self, index: int, *, whole: bool) -> bytes:
        """Of the pictures' bytes only where all are asked for; else of the row group that holds them."""
        if whole:
            return super().digest(index, whole=whole)
        file, state, row = self.find(index)
        groups = _groups(file, state, self.column)
        first, offset, size, _ = groups[np.searchsorted(groups[:, 0], row, side="right") - 1].tolist()
        # Of a store without a request: the state stands for all its bytes.
        ends = f"{state} {offset} {size}".encode() if url_of(file) else _ends_of(file, state, offset, size)
        return hashlib.sha256(ends + str(row - first).encode()).digest()


@lru_cache(_MAPPED)
def _in_state(file: str, state: State) -> Path:
    """A file; of one in a store OSError where it is no longer that of the state."""
    path = path_at(file)
    if url_of(path) and tuple(states_of([path])[0].tolist()) != state:
        raise OSError(f"{path} has changed since the run started")
    return path


@lru_cache(_MAPPED)
def _groups(file: str, state: State, column: str) -> npt.NDArray[np.int64]:
    """Of each row group its first row, the offset of the pictures, and their size, as stored and as read."""
    with opened_parquet(_in_state(file, state)) as parquet:
        metadata = parquet.metadata
    groups, first = [], 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = (group.column(place) for place in range(group.num_columns))
        chunk = next(each for each in chunks if each.path_in_schema == f"{column}.bytes")
        offset = chunk.dictionary_page_offset or chunk.data_page_offset
        groups.append((first, offset, chunk.total_compressed_size, chunk.total_uncompressed_size))
        first += group.num_rows
    return np.array(groups, np.int64).reshape(-1, 4)


@lru_cache(_GROUPS)
def _row_group(file: str, state: State, number: int, column: str) -> Any:
    """The pictures of a row group; threads that read ahead do not outlive a fork, so there are none."""
    with opened_parquet(_in_state(file, state)) as parquet:
        return parquet.read_row_group(number, [f"{column}.bytes"], use_threads=False).column(0)


@lru_cache(_GROUPS)
def _ends_of(file: str, state: State, offset: int, size: int) -> bytes:
    with open(file, "rb") as parquet:  # noqa: PTH123 - a text
        return digest_of(
            size, lambda count, at: os.pread(parquet.fileno(), min(count, size), offset + at), whole=False
        )


# -- save_to_disk ----------------------------------------------------------------------------------------


class _ArrowCells(_Cells):
    @staticmethod
    def files_at(at: Path) -> list[Path]:
        is_of_parts = (at / "dataset_dict.json").is_file()
        index = at / ("dataset_dict.json" if is_of_parts else "state.json")
        try:
            content = json.loads(index.read_bytes())
            if is_of_parts:
                parts = content["splits"]
                raise UsageError(
                    f"data folder {at} holds the parts {', '.join(parts)} of a data set. Give one: --data "
                    f"{at / parts[-1]}"
                )
            files, is_selected = content["_data_files"], content.get("_indices_data_files")
            paths = [at / each["filename"] for each in files]
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise UsageError(
                f"{index} is not as save_to_disk writes it ({error!r}). Copy or write the folder again."
            ) from error
        if is_selected:
            # As datasets before November 2021 wrote it: all rows, and a file of those that are meant.
            raise UsageError(
                f"data folder {at} holds all rows of a data set, and a list of those that are meant. Load it "
                "with datasets, and write these alone: dataset.flatten_indices().save_to_disk(DIR)"
            )
        if not paths:
            raise UsageError(f"--data {at} holds no sample: its state.json names no file.")
        return paths

    @staticmethod
    def schema(path: Path) -> Any:
        with pyarrow.memory_map(str(path)) as file:
            return pyarrow.ipc.open_stream(file).schema

    @staticmethod
    def batches(path: Path, picture: str, columns: Sequence[str]) -> Iterator[Any]:
        with pyarrow.memory_map(str(path)) as file:
            yield from pyarrow.ipc.open_stream(file)

    def cell(self, file: str, state: State, row: int) -> Any:
        return _mapped(file, state, self.column)[row]

    def sizes(self, count: int) -> list[int]:
        cells = (pyarrow.compute.struct_field(column, "bytes") for column in self.of_files(_mapped))
        lengths = [pyarrow.compute.binary_length(each).fill_null(0).to_numpy() for each in cells]
        sizes: list[int] = np.concatenate(lengths)[self.places[:count]].tolist()
        return sizes


@lru_cache(_MAPPED)
def _mapped(file: str, state: State, column: str) -> Any:
    """The pictures of a file, which lie there until they are looked at."""
    return pyarrow.ipc.open_stream(pyarrow.memory_map(file)).read_all().column(column)
