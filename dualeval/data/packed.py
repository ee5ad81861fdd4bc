"""Pictures inside of larger files: shards that hold many of them each."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dualeval.columns.of_data import NO_COLUMNS, KeptColumns, WithColumns
from dualeval.data.cache import DataCache
from dualeval.data.image_files import (
    PATH_COLUMNS,
    FileNames,
    ImageFiles,
    check_unchanged,
    digest_of,
    digest_or_unreadable,
)
from dualeval.data.labels import Labels
from dualeval.data.pictures import read_pixels
from dualeval.data.preprocessing import Preprocessing
from dualeval.data.set_names import LABEL_COLUMNS
from dualeval.data.stores.requests import notes
from dualeval.data.table import column_of
from dualeval.data.table_labels import LEFT_OUT, Labeler, refuse_other_names
from dualeval.errors import UsageError

# Of each process: a thread reads one after the other.
_OPEN_FILES = 8
# Size and time of change, in ns.
State: TypeAlias = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Pieces(ABC):
    """The bytes of samples, which lie in files at a place each: 8 bytes of memory a sample."""

    # Absolute; of each its state when it was found: (files, 2).
    files: Sequence[str]
    states: npt.NDArray[np.int64]
    # Where each ends, and where the samples are, in bytes or rows, as if the files were one.
    ends: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]

    # Whether a sample is read with many others.
    in_groups = False

    @abstractmethod
    def part(self, index: int) -> tuple[int, Callable[[int, int], bytes]]:
        """The size of a sample, and a function of a count and an offset in it that reads its bytes.

        Raises OSError where they are not there, or their file has changed since it was found.
        """

    @abstractmethod
    def sizes(self, count: int) -> list[int]:
        """The sizes of the first samples, or of what holds each."""

    def read(self, index: int) -> bytes:
        """All bytes of a sample."""
        size, read = self.part(index)
        return read(size, 0)

    def together(self, indices: Sequence[int]) -> Callable[[int], bytes]:
        """``read`` for some samples, which may have been read at once before this returns."""
        return self.read

    def digest(self, index: int, *, whole: bool) -> bytes:
        """As ``digest_of``, of a sample."""
        return digest_of(*self.part(index), whole=whole)

    def where(self, index: int) -> str:
        """The file that holds a sample."""
        return self.find(index)[0]

    def find(self, index: int) -> tuple[str, State, int]:
        """A sample's file, that file's state, and the sample's place in it."""
        place = int(self.places[index])
        number = int(np.searchsorted(self.ends, place, side="right"))
        size, time = self.states[number].tolist()
        return self.files[number], (size, time), place - (int(self.ends[number - 1]) if number else 0)

    def seen(self, samples: range) -> bytes:
        """What tells samples from any others, as long as their files are unchanged."""
        return self.states.tobytes() + self.places[samples.start : samples.stop].tobytes()

    def select(self, indices: npt.NDArray[np.int64]) -> Pieces:
        """Those of some samples, in this order."""
        return replace(self, places=self.places[indices])


def states_of(paths: Sequence[Path]) -> npt.NDArray[np.int64]:
    """As of ``Pieces``."""
    return np.array(
        [(status.st_size, status.st_mtime_ns) for status in (path.stat() for path in paths)], np.int64
    )


_Own = TypeVar("_Own", bound="InPieces")


class InPieces(ImageFiles):
    """Pictures whose bytes are pieces of files."""

    _pieces: Pieces

    def select(self: _Own, indices: Sequence[int] | npt.NDArray[np.int64]) -> _Own:
        """As for ``ImageFiles``."""
        images = super().select(indices)
        images._pieces = self._pieces.select(np.asarray(indices, np.int64))
        return images

    def notes(self) -> list[str]:
        """Also what had to be asked for again."""
        return [*super().notes(), *notes()]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """As for ``ImageFiles``."""
        read = self._pieces.together(indices)
        return [
            (read_pixels(io.BytesIO(read(index)), self.preprocessing), int(self._targets[index]))
            for index in indices
        ]

    def _openings(self, places: Sequence[int]) -> Callable[[int], AbstractContextManager[IO[bytes]]]:
        try:
            read = self._pieces.together(places)
        except OSError:
            return self.opened  # one of them is no more; the loop names it
        return lambda place: io.BytesIO(read(place))

    def reading_notes(self) -> list[str]:
        """What had to be asked for again."""
        return notes()

    @contextmanager
    def opened(self, index: int) -> Iterator[IO[bytes]]:
        """The bytes of an image; its file is as it was when the run started."""
        yield io.BytesIO(self._pieces.read(index))

    def as_it_is(self, index: int) -> AbstractContextManager[IO[bytes]]:
        """The same."""
        return self.opened(index)

    def _is_file(self, index: int) -> bool:
        return True

    def _looked_into(self, most: int) -> range:
        # Each of those that are spread over all would be read with many others.
        return range(min(most, len(self))) if self._pieces.in_groups else super()._looked_into(most)

    def _sizes(self, chosen: range) -> Iterator[int]:
        return iter(self._pieces.sizes(len(chosen)))

    def _seen(self, samples: range) -> bytes:
        return self._pieces.seen(samples)

    def _digest(self, index: int) -> bytes:
        return digest_or_unreadable(partial(self._pieces.digest, index, whole=self._whole_files))


class PackedImages(WithColumns, InPieces):
    """Pictures in pieces of files; the names are their ids."""

    def __init__(
        self,
        pieces: Pieces,
        root: Path,
        names: FileNames,
        targets: npt.NDArray[np.int32],
        *,
        notes: Sequence[str] = (),
        kept: KeptColumns = NO_COLUMNS,
        **options: Any,
    ) -> None:
        super().__init__(root, names, targets, **options)
        self._pieces = pieces
        self._notes = notes
        self.kept = kept

    def select(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> PackedImages:
        """As for ``ImageFiles``."""
        images = super().select(indices)
        images.kept = self.kept.select(np.asarray(indices, np.int64))
        return images

    def notes(self) -> list[str]:
        """Which classes the labels are, and what was passed over."""
        return [*super().notes(), *self._notes]

    def path(self, index: int) -> str:
        """Where an image lies, for people."""
        return f"{self._pieces.where(index)}, {self.id(index)}"


class DecidedLabels(Protocol):
    """Labels, of which a run decides what class each is."""

    def decide(self, label: Labeler) -> tuple[Labels, list[int]]:
        """As of ``TableLabels``."""


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Samples with a label each, in little room."""

    pieces: Pieces
    names: FileNames
    # The place of each sample's label among `labels`.
    codes: npt.NDArray[np.int32]
    labels: DecidedLabels
    notes: Sequence[str] = ()
    # Further bytes of the same samples, as of masks.
    others: Sequence[Pieces] = ()
    # Other columns of the samples.
    kept: KeptColumns = NO_COLUMNS
    kind: type[PackedImages] = PackedImages

    def images(self, of: Path, label: Labeler, **options: Any) -> PackedImages:
        """The pictures of which a label is a class, without those that the class map leaves out."""
        if not len(self.names):
            raise UsageError(f"--data {of} holds no sample: found no picture with a label.")
        labels, classes = self.labels.decide(label)
        targets = np.array(classes, np.int32)[self.codes]
        refuse_other_names(of, labels, label.known, targets, self.kept)
        images = self.kind(
            self.pieces,
            of,
            self.names,
            targets,
            labels=labels,
            preprocessing=Preprocessing(),
            notes=self.notes,
            kept=self.kept,
            **options,
        )
        if (targets != LEFT_OUT).all():
            return images
        if (targets == LEFT_OUT).all():
            raise UsageError(f"--data {of}: the class map leaves out all labels that samples have.")
        return images.select(np.flatnonzero(targets != LEFT_OUT))


def open_once(
    read: Callable[..., Labelled],
    at: Path,
    *chosen: Any,
    label: Labeler,
    whole_files: bool,
    cache: DataCache | None,
) -> PackedImages:
    """The pictures at a path, which a run's tasks that chose the same read once.

    What is done to each is decided afterwards (``prepared``).
    """
    cache = cache or DataCache()
    labelled = cache.once((read, at.absolute(), *chosen), lambda: read(at, *chosen))
    return labelled.images(at, label, whole_files=whole_files, cache=cache)


def columns_of(
    of: Path,
    pictures: Sequence[str],
    others: Sequence[str],
    path_column: str | None,
    label_column: str | None,
) -> tuple[str, str]:
    """The columns of pictures and labels, of those that may be."""
    if len(pictures) == 1 and path_column is None:
        path_column = pictures[0]
    return (
        column_of(of, pictures, path_column, PATH_COLUMNS, "--path-column", "the pictures"),
        column_of(of, others, label_column, LABEL_COLUMNS, "--label-column", "their labels"),
    )


@dataclass(frozen=True, kw_only=True)
class FilePieces(Pieces):
    """Bytes that lie in files as they are: 12 bytes of memory a sample."""

    lengths: npt.NDArray[np.uint32]

    def part(self, index: int) -> tuple[int, Callable[[int, int], bytes]]:
        file, state, first = self.find(index)
        size, held = int(self.lengths[index]), _opened(file, state)
        check_unchanged(file, state, held.number)

        def read(count: int, offset: int) -> bytes:
            count = max(0, min(count, size - offset))
            data = os.pread(held.number, count, first + offset)
            if len(data) < count:
                raise OSError(f"{file} ends within the sample")
            return data

        return size, read

    def sizes(self, count: int) -> list[int]:
        sizes: list[int] = self.lengths[:count].tolist()
        return sizes

    def select(self, indices: npt.NDArray[np.int64]) -> Pieces:
        return replace(self, places=self.places[indices], lengths=self.lengths[indices])


class _Opened:
    """A file that is closed when the last who reads it lets go; threads and forks share it by pread."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


@lru_cache(_OPEN_FILES)
def _opened(path: str, state: State) -> _Opened:
    """A file in this state, kept open for the next samples."""
    return _Opened(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
