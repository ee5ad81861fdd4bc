"""Packs of pictures, as ``dualeval pack`` writes them: decoded, resized and cropped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualeval.columns.of_data import KeptColumns, Texts
from dualeval.data.cache import DataCache
from dualeval.data.image_files import FileNames
from dualeval.data.labels import Labels
from dualeval.data.pack_file import FAILED, Bytes, PackFile, pixels_of, refuse_other
from dualeval.data.packed import Labelled, PackedImages, Pieces, states_of
from dualeval.data.pictures import picture_of
from dualeval.data.preprocessing import Normalisation
from dualeval.data.table_labels import LEFT_OUT, Labeler, TableLabels
from dualeval.errors import DualevalError


def open_images(at: Path, *, label: Labeler, whole_files: bool, cache: DataCache | None) -> PackedImages:
    """Open those of a pack; whether they are prepared as a run wants is checked afterwards (``prepared``)."""
    pack = opened(at, "image-classification", whole_files=whole_files)
    names, codes, labels = names_of(pack, 0), pack.array("codes"), pack.values["made_of"]["labels"]
    table = TableLabels(
        lambda code: f"{at}, {names.shown(int(np.argmax(codes == code)))}", "label", labels["of_indices"]
    )
    for code, name in enumerate(labels["names"]):
        table.place(code, name)
    return Labelled(
        pieces=PackPieces.of(pack),
        names=names,
        codes=codes,
        labels=_Folders(labels["names"]) if labels["noun"] == "folder" else table,
        kept=kept_in(pack),
        notes=pack.values["notes"],
        kind=PackedPixels,
    ).images(at, label, whole_files=whole_files, cache=cache or DataCache())


class _Folders:
    """Class folders by name."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def decide(self, label: Labeler) -> tuple[Labels, list[int]]:
        """As of ``TableLabels``."""
        labels = label(self._names, "class folder", lambda name: "")
        return labels, [labels.classes.get(name, LEFT_OUT) for name in self._names]


def opened(at: Path, task: str, *, whole_files: bool) -> PackFile:
    """Open a pack of a task, whose files were told apart in a way."""
    pack = PackFile(at)
    wanted = {"task": task, "data_fingerprint": "content" if whole_files else "ends"}
    refuse_other(at, "options", {name: pack.values["made_of"][name] for name in wanted}, wanted)
    return pack


def names_of(pack: PackFile, file: int) -> FileNames:
    """The names of each sample's first or second file."""
    names = FileNames()
    names.extend(pack.array(f"names{file}").tobytes(), pack.array(f"ends{file}"))
    return names


def kept_in(pack: PackFile) -> KeptColumns:
    """The columns of the data from which it was packed."""
    values: dict[str, Any] = {}
    for number, (name, distinct) in enumerate(pack.values["columns"]):
        column = pack.array(f"column{number}")
        values[name] = column if distinct is None else Texts(column, distinct)
    return KeptColumns(values=values, left_out=pack.values["left_out"])


@dataclass(frozen=True, kw_only=True)
class PackPieces(Pieces):
    """Samples of a pack, and what is known of the file that each was made of."""

    pack: PackFile
    # 0; 1 for that of a mask.
    file: int = 0

    @classmethod
    def of(cls, pack: PackFile, file: int = 0) -> PackPieces:
        """All of a pack."""
        places = np.arange(len(pack.rows))
        files, ends = [str(pack.path)], np.array([len(places)])
        return cls(files=files, states=states_of([pack.path]), ends=ends, places=places, pack=pack, file=file)

    def row(self, index: int) -> Any:
        """What is known of a sample: a row of ``row_type``."""
        return self.pack.rows[self.places[index]]

    def samples(self, indices: npt.NDArray[np.int64]) -> Bytes | list[Bytes]:
        """The bytes of samples, as ``PackFile.read`` gives them; an error for those that have none."""
        places = self.places[indices]
        for place in places[self.pack.rows["flags"][places] & FAILED != 0].tolist():
            raise DualevalError(self.pack.error(place))  # the text begins with its type
        return self.pack.read(places)

    def part(self, index: int) -> tuple[int, Callable[[int, int], bytes]]:
        stored = self.pack.read(self.places[[index]])[0].tobytes()
        return len(stored), lambda count, offset: stored[offset : offset + count]

    def seen(self, samples: range) -> bytes:
        return super().seen(samples) + bytes([self.file])  # a mask may have its picture's name

    def sizes(self, count: int) -> list[int]:
        sizes: list[int] = self.pack.rows["sizes"][self.places[:count], self.file].tolist()
        return sizes

    def digest(self, index: int, *, whole: bool) -> bytes:
        return bytes(self.pack.rows["digests"][self.places[index], self.file])


class Stacked(list[tuple[Tensor, int]]):
    """Samples whose pictures, uint8 (n, channels, height, width), are a batch already."""

    stacked: Tensor


class PackedPixels(PackedImages):
    """Pictures of a pack. Their fingerprints are those of the files from which it was made."""

    # A batch is read in one piece, faster than another process would hand it over.
    in_memory = True
    _pieces: PackPieces

    @property
    def checksum(self) -> str:
        """The hash of all that the pack holds."""
        return self._pieces.pack.checksum

    def prepared(self, preprocessing: Normalisation) -> PackedPixels:
        """The same images, which have to be prepared like this; mean and std are the model's matter."""
        pack = self._pieces.pack
        packed, wanted = pack.values["made_of"]["preprocessing"], pixels_of(preprocessing)
        refuse_other(pack.path, "preprocessing", packed, wanted)
        images = super().prepared(preprocessing)
        assert isinstance(images, PackedPixels)
        return images

    def left_out(self) -> list[str]:
        """What was to be said of them when they were packed."""
        return [*self._pieces.pack.values["warnings"]]

    def picture(self, index: int) -> Any:
        """The picture as a model takes it, for people."""
        return picture_of(self._image(index))

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        chosen = np.asarray(indices, np.int64)
        samples, shape = np.asarray(self._pieces.samples(chosen)), self._pieces.row(chosen[0])["shape"][:3]
        images = torch.from_numpy(samples[:, : math.prod(shape)].reshape(-1, *shape))
        stacked = Stacked(zip(images, self._targets[chosen].tolist(), strict=True))
        stacked.stacked = images
        return stacked

    def _image(self, index: int) -> Tensor:
        return self.__getitems__([index])[0][0]
