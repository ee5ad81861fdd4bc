"""Small images that are held in memory: in their own size, or brought to another one as picture files are."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, as_tensor

from dualeval.data.labels import Labels, indices_of_classes
from dualeval.data.preprocessing import Normalisation, OwnPreprocessing, Preprocessing, shape_of


class SmallImages:
    """Images of one size, in memory."""

    in_memory = True

    def __init__(self, images: Tensor, targets: Tensor, split: str, *, classes: Sequence[str] = ()) -> None:
        self._images = images
        self._targets = targets
        self._split = split
        # Indices of classes, and their names.
        self.labels: Labels = indices_of_classes(classes)

    def __len__(self) -> int:
        return len(self._images)

    def with_labels(self, labels: Labels) -> SmallImages:
        """The same images with other names of classes."""
        found = copy.copy(self)
        found.labels = labels
        return found

    def prepared(self, preprocessing: Normalisation) -> SmallImages:
        """The same images, brought to another size where that is wanted, or through the user's function."""
        if isinstance(preprocessing, Preprocessing | OwnPreprocessing):
            return ResizedImages(self, preprocessing)
        return self

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every sample."""
        channels, height, width = self._images.shape[1:]
        return channels, height, width

    @property
    def targets(self) -> Tensor:
        """The label of each image, int64 (images,)."""
        return self._targets

    @property
    def largest_target(self) -> int:
        """The largest label; -1 where there are no samples."""
        return int(self._targets.max()) if len(self._targets) else -1

    def id(self, index: int) -> str:
        """Split and number, such as ``t10k-00017``."""
        return f"{self._split}-{index:05d}"

    def notes(self) -> list[str]:
        """Nothing: the files hold images and labels alone."""
        return []

    def warnings(self) -> list[str]:
        """Nothing, as ``notes``."""
        return []

    def labels_used(self, num_classes: int) -> dict[str, Any]:
        """The names of the classes, as in result.json; empty where they are not known."""
        return self.labels.to_json(num_classes)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """One ready batch: images uint8 (n, channels, height, width), targets int64 (n,)."""
        if isinstance(indices, range) and indices.step == 1:
            rows = slice(indices.start, indices.stop)
            return {"images": self._images[rows], "targets": self._targets[rows]}
        chosen = as_tensor(indices)
        return {"images": self._images[chosen], "targets": self._targets[chosen]}

    def picture(self, index: int) -> Any:
        """The picture in its own size, for people."""
        from dualeval.data.pictures import picture_of

        return picture_of(self._images[index])

    def fingerprint(self, count: int) -> str:
        """sha256, in hex, over id, size in bytes and label of the first ``count`` samples."""
        size = math.prod(self._images.shape[1:])
        digest = hashlib.sha256()
        for index, target in enumerate(self._targets[:count].tolist()):
            digest.update(f"{self.id(index)}\0{size}\0{target}\n".encode())
        return digest.hexdigest()

    def content_fingerprint(self, samples: range) -> str:
        """sha256, in hex, over the pixels and labels of consecutive samples."""
        rows = slice(samples.start, samples.stop)
        digest = hashlib.sha256(str(tuple(self._images[rows].shape)).encode())
        digest.update(self._images[rows].contiguous().numpy().data)
        digest.update(self._targets[rows].numpy().data)
        return digest.hexdigest()


class ResizedImages(SmallImages):
    """Small images that are brought to other channels and another size, with the bits of a picture file.

    Ids, labels and fingerprints are those of the small images: the preprocessing is the job's.
    """

    # Pillow resizes one at a time: reading processes are worth their start.
    in_memory = False

    def __init__(self, images: SmallImages, preprocessing: Preprocessing | OwnPreprocessing) -> None:
        from dualeval.vision_library import torchvision

        torchvision()  # not in each reading process anew
        super().__init__(images._images, images._targets, images._split)
        self.labels = images.labels
        self._preprocessing = preprocessing

    @functools.cached_property
    def sample_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every sample, as they are evaluated."""
        return shape_of(self._preprocessing, self.id(0), lambda: self.__getitems__([0])[0][0])

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """(uint8 (channels, height, width), label) for each index."""
        from dualeval.data.pictures import picture_of, prepare  # Pillow, which other small images do without

        batch = super().__getitems__(indices)
        pictures = (prepare(picture_of(image), self._preprocessing) for image in batch["images"])
        return list(zip(pictures, batch["targets"].tolist(), strict=True))
