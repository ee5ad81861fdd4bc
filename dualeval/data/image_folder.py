"""A folder of images with one sub-folder a class, as torchvision's ImageFolder lays it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dualeval.data.cache import DataCache
from dualeval.data.class_folders import EXTENSIONS, PassedOver, class_folders, images_in, is_image, shown_name
from dualeval.data.image_files import FileNames, ImageFiles
from dualeval.data.labels import Labels, choose_labels
from dualeval.data.preprocessing import Preprocessing
from dualeval.errors import UsageError


class ImageFolder(ImageFiles):
    """Images below ``root/CLASS/``, folders and files in name order; sub-folders of a class count to it.

    A class folder may be empty. Files and folders whose names begin with a dot are passed over.
    """

    def __init__(
        self,
        root: Path,
        preprocessing: Preprocessing,
        *,
        label: Callable[[Sequence[str]], Labels] = choose_labels,
        whole_files: bool = False,
        cache: DataCache | None = None,
    ) -> None:
        cache = cache or DataCache()
        found, self.passed_over = cache.once(("class folders", root.absolute()), lambda: _listed(root))
        self.classes = list(found)
        if not any(map(len, found.values())):
            raise self._without_images(root)
        labels = label(self.classes)
        counts = [len(found[name]) for name in labels.classes]
        if not any(counts):
            raise UsageError(
                f"data folder {root} holds no sample: the class map leaves out all folders that hold images."
            )
        super().__init__(
            root,
            FileNames(path for name in labels.classes for path in found[name]),
            np.repeat(np.array([*labels.classes.values()], np.int64), counts),
            labels=labels,
            preprocessing=preprocessing,
            whole_files=whole_files,
            cache=cache,
        )

    def _without_images(self, root: Path) -> UsageError:
        loose = sum(is_image(path.name) for path in root.iterdir())
        folders = f"{len(self.classes)} class folders without images and {loose} images beside them"
        return UsageError(
            f"data folder {root} holds no sample: found {folders}; expected {root}/CLASS/IMAGE "
            f"({' '.join(EXTENSIONS)})." + (f" {self.passed_over}." if str(self.passed_over) else "")
        )

    def notes(self) -> list[str]:
        """Which classes the folders are, and what was passed over and is no picture."""
        said = "" if self.passed_over.holds_pictures else str(self.passed_over)
        return [*super().notes(), *filter(None, [said])]

    def warnings(self) -> list[str]:
        """Where classes may be others than the model's, and where pictures are no samples."""
        said = str(self.passed_over) if self.passed_over.holds_pictures else ""
        return [*super().warnings(), *filter(None, [said])]

    def labels_used(self, num_classes: int) -> dict[str, Any]:
        """How folders became classes, and what was passed over, as in result.json."""
        return {**super().labels_used(num_classes), "passed_over": self.passed_over.to_json()}


def _listed(root: Path) -> tuple[dict[str, FileNames], PassedOver]:
    """The images of each class folder, as paths below the root, and what lies there beside them."""
    passed_over = PassedOver()
    folders = {shown_name(name): name for name in class_folders(root, passed_over)}
    found = {name: FileNames(images_in(root, folder, passed_over)) for name, folder in folders.items()}
    return found, passed_over
