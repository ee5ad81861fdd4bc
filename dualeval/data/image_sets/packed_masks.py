"""Packs of pictures with masks, as ``dualeval pack`` writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from dualeval.data.image_sets.pack import PackedPixels, PackPieces, kept_in, names_of, opened
from dualeval.data.masks import NO_LABEL, LabelRule, MaskedPictures
from dualeval.data.pack_file import TURNED, refuse_other
from dualeval.data.pictures import picture_of
from dualeval.data.preprocessing import Normalisation


def open_masks(
    at: Path, rule: LabelRule, *, preprocessing: Normalisation, whole_files: bool, **common: Any
) -> PackedMasks:
    """Open those of a pack, which are prepared like this; the rule is checked when the classes are known."""
    pack = opened(at, "segmentation", whole_files=whole_files)
    common |= {"preprocessing": preprocessing, "whole_files": whole_files}
    targets = np.zeros(len(pack.rows), np.int32)
    pictures, masks = (
        PackedPixels(PackPieces.of(pack, file), at, names_of(pack, file), targets, **common)
        for file in (0, 1)
    )
    return PackedMasks(
        pictures=pictures.prepared(preprocessing),
        masks=masks,
        rule=rule,
        table="",
        numbers=np.array([], np.int64),
        notes=tuple(pack.values["notes"]),
        kept=kept_in(pack),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedMasks(MaskedPictures):
    """Pictures of a pack with the classes of their pixels."""

    in_memory = True

    @property
    def _pieces(self) -> PackPieces:
        pieces = self.pictures._pieces  # type: ignore[attr-defined]
        assert isinstance(pieces, PackPieces)
        return pieces

    @property
    def checksum(self) -> str:
        """The hash of all that the pack holds."""
        return self._pieces.pack.checksum

    def check_palettes(self) -> None:
        """Nothing: that was done when they were packed."""

    def labels_of_first(self) -> Iterator[list[int]]:
        """Nothing, likewise."""
        return iter(())

    def check_rule(self) -> None:
        """Refuse another rule than that by which their classes were found."""
        pack = self._pieces.pack
        refuse_other(pack.path, "classes", pack.values["made_of"]["labels"], self.rule.to_json())

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor, bool]]:
        chosen = np.asarray(indices, np.int64)
        samples = self._pieces.samples(chosen)
        return [self._parts(index, sample) for index, sample in zip(chosen, samples, strict=True)]

    def _parts(self, index: int, sample: Any) -> tuple[Tensor, Tensor, bool]:
        row = self._pieces.row(index)
        *shape, height, width = row["shape"].tolist()
        pixels = 2 * height * width
        classes = torch.from_numpy(sample[:pixels].view(np.int16)).view(height, width)
        picture = torch.from_numpy(sample[pixels : pixels + int(np.prod(shape))]).view(shape)
        return picture, classes, bool(row["flags"] & TURNED)

    def picture(self, index: int) -> tuple[Image.Image, npt.NDArray[np.int16]]:
        """The picture as a model takes it, for people, and the classes of its pixels."""
        [(picture, classes, _)] = self.__getitems__([index])
        return picture_of(picture).convert("RGB"), classes.numpy()

    def placeholder(self, index: int) -> tuple[Tensor, Tensor, bool]:
        """As for ``MaskedPictures``."""
        *shape, height, width = self._pieces.row(index)["shape"].tolist()
        empty = torch.zeros(shape, dtype=torch.uint8)
        return empty, torch.full((height, width), NO_LABEL, dtype=torch.int16), False
