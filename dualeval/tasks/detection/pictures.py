"""The data set of detection: pictures of a folder, turned and sized as their annotations have them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from dualeval.columns.of_data import KeptColumns
from dualeval.data.cache import DataCache
from dualeval.data.image_files import FileNames, ImageFiles
from dualeval.data.labels import indices_of_classes
from dualeval.data.pictures import StoredPicture, prepare, read_picture
from dualeval.data.preprocessing import Normalisation
from dualeval.errors import UsageError
from dualeval.messages import listed
from dualeval.tasks.detection.annotations import Annotations, read_annotations

_LOOKED_FOR = 1000


@dataclass(frozen=True, kw_only=True)
class AnnotatedPictures:
    """Pictures with what is true of them; a sample is the picture, as it is prepared."""

    pictures: ImageFiles
    annotations: Annotations
    # Of a picture that EXIF turns and whose annotations fit both ways: "stored", "shown", or None.
    orientation: str | None

    in_memory = False
    unique_ids = True

    def __len__(self) -> int:
        return len(self.pictures)

    def id(self, index: int) -> str:
        """The picture's path, as its file_name."""
        return self.pictures.id(index)

    @property
    def kept(self) -> KeptColumns:
        return self.annotations.kept

    def columns(self, indices: Sequence[int]) -> Mapping[str, Any]:
        """What else the file says of the pictures."""
        return self.kept.of(indices)

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        """Pictures as they are prepared, (channels, height, width)."""
        return [
            prepare(self._annotated(index).eight_bits(), self.pictures.preprocessing) for index in indices
        ]

    def _annotated(self, index: int) -> StoredPicture:
        """A picture, stored or turned, as its annotations have it."""
        with self.pictures.opened(index) as file:
            picture = read_picture(file)
        height, width = self.annotations.sizes[index].tolist()
        ways = {"stored": picture, "shown": picture.upright()}
        fitting = {name: each for name, each in ways.items() if each.image.size == (width, height)}
        if not fitting:
            found = "{} x {}".format(*picture.image.size)
            raise ValueError(
                f"it has {found} pixels, and its annotations are for {width} x {height} ({self._path})"
            )
        if picture.orientation != 1 and len(fitting) == 2:
            if self.orientation is None:
                raise ValueError(
                    f"EXIF turns it (orientation {picture.orientation}), and its annotations fit both ways: "
                    "type --orientation stored if they are of the pixels as stored, as COCO's are, or "
                    "--orientation shown"
                )
            return ways[self.orientation]
        return next(iter(fitting.values()))

    @property
    def _path(self) -> Path:
        return self.annotations.path

    def path_of(self, index: int) -> str:
        """Where a picture is looked for."""
        return self.pictures.path(index)

    def picture(self, index: int) -> Image.Image:
        """The picture as its annotations have it, for people."""
        return self._annotated(index).eight_bits().convert("RGB")

    def placeholder(self, index: int) -> Tensor:
        """A black picture of the same size."""
        height, width = self.annotations.sizes[index].tolist()
        return prepare(Image.new("RGB", (width, height)), self.pictures.preprocessing)

    def select(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> AnnotatedPictures:
        """Some of the samples, in this order."""
        chosen = np.asarray(indices, np.int64)
        return replace(
            self, pictures=self.pictures.select(chosen), annotations=self.annotations.select(chosen)
        )

    def fingerprint(self, count: int) -> str:
        """sha256, in hex, over names and sizes in bytes of the first pictures, and what is true of them."""
        parts = self.pictures.fingerprint(count), self.annotations.digest(range(min(count, len(self))))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def content_fingerprint(self, samples: range) -> str:
        """sha256, in hex, over what is in these pictures."""
        return self.pictures.content_fingerprint(samples)


def open_annotated(
    data: Path,
    annotations: Path | None,
    preprocessing: Normalisation,
    *,
    kinds: Sequence[str],
    points: int,
    keep: Sequence[str],
    orientation: str | None,
    order: str,
    whole_files: bool,
    cache: DataCache,
) -> AnnotatedPictures:
    """The pictures that a file of annotations names, in the order of their ids, or of their shapes."""
    if not data.is_dir():
        there = "is not a folder" if data.exists() else "does not exist"
        raise UsageError(f"--data {data} {there}: expected the folder of the pictures.")
    path = annotations or _beside(data)
    if not path.exists():
        raise UsageError(f"--annotations {path} does not exist: expected a JSON file as COCO has it.")
    read = cache.once(
        ("annotations", path.absolute(), points, *kinds, tuple(keep)),
        lambda: read_annotations(path, kinds, keep, points),
    )
    if order == "shape":
        read = read.select(np.lexsort((read.ids, read.sizes[:, 1], read.sizes[:, 0])))
    folder = _folder_of(data, path, read.names)
    pictures = ImageFiles(
        folder,
        FileNames(read.names),
        np.zeros(len(read), np.int64),
        labels=indices_of_classes(),
        preprocessing=preprocessing,
        whole_files=whole_files,
        cache=cache,
    )
    return AnnotatedPictures(pictures=pictures, annotations=read, orientation=orientation)


def _beside(data: Path) -> Path:
    """The file of annotations that lies where data sets have it."""
    places = (
        data / "_annotations.coco.json",
        data.parent / "annotations" / f"instances_{data.name}.json",
        *sorted((data / "annotations").glob("instances_*.json")),
    )
    found = [each for each in places if each.is_file()]
    if len(found) == 1:
        return found[0]
    looked = f"there are {listed(map(str, found))}" if found else f"looked for {places[0]} and {places[1]}"
    raise UsageError(f"--annotations is not given, and {looked}: give the JSON file of the annotations.")


def _folder_of(data: Path, path: Path, names: Sequence[str]) -> Path:
    """Where the names lead to files: the data folder, one of the same name in it, or the one it is in."""
    name = path.stem.partition("_")[2]
    for folder in (data, *([data / name] if name else []), data.parent):
        if any((folder / each).exists() for each in names[:_LOOKED_FOR]):
            return folder
    raise UsageError(
        f"--data {data}: none of the pictures that {path} names is there; the first was looked for at "
        f"{data / names[0]}."
    )


def padded(pictures: Sequence[Tensor]) -> Tensor:
    """Pictures in one batch, with 0 to the right of and below the smaller ones."""
    if len({each.shape for each in pictures}) == 1:
        return torch.stack([*pictures])
    shape = [max(sides) for sides in zip(*(each.shape for each in pictures), strict=True)]
    batch = pictures[0].new_zeros(len(pictures), *shape)
    for place, each in zip(batch, pictures, strict=True):
        place[:, : each.shape[1], : each.shape[2]] = each
    return batch
