"""What every data set of images has, whatever it was read from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy.typing as npt
from torch import Tensor

from dualeval.data.labels import KnownClasses, Labels
from dualeval.data.preprocessing import Normalisation


class ImageData(Protocol):
    """Images in a fixed order, each with one class."""

    labels: Labels
    # The images lie in memory as they are evaluated; else reading processes are worth their start.
    in_memory: bool

    def __len__(self) -> int: ...

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every sample."""

    @property
    def targets(self) -> Tensor | npt.NDArray[Any]:
        """The class of each image, int64 (images,)."""

    @property
    def largest_target(self) -> int:
        """The largest class that a label of the data is; -1 where there is none."""

    def id(self, index: int) -> str:
        """The name of a sample that stays the same between runs and machines; no other sample has it."""

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """A ready batch ``{"images", "targets"}``, or a list of (uint8 (channels, height, width), class)."""

    def picture(self, index: int) -> Any:
        """A ``PIL.Image.Image`` of a sample before any preprocessing."""

    def fingerprint(self, count: int) -> str:
        """sha256, in hex, over id, size in bytes and class of the first ``count`` samples."""

    def content_fingerprint(self, samples: range) -> str:
        """sha256, in hex, over what is in consecutive samples."""

    def prepared(self, preprocessing: Normalisation) -> ImageData:
        """The same images with another preprocessing."""

    def notes(self) -> list[str]:
        """What a reader should know of the data, in sentences."""

    def warnings(self) -> list[str]:
        """What belongs beside the numbers, in sentences."""

    def labels_used(self, num_classes: int) -> dict[str, Any]:
        """How labels became classes, as in result.json; empty where there is nothing to say."""


class Labeler(Protocol):
    """Decides which class each label is."""

    @property
    def known(self) -> KnownClasses | None:
        """The model's classes, where their names are known."""

    @property
    def takes_names(self) -> bool:
        """Whether labels are names, also those that look like numbers: a class map or an order was given."""

    def __call__(self, names: Sequence[str], noun: str) -> Labels:
        """Decide for labels, sorted; ``noun`` is what one of them is called in messages."""
