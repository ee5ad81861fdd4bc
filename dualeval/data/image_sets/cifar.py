"""CIFAR-10 and CIFAR-100, as torchvision keeps them."""

from __future__ import annotations

from torch import from_numpy, tensor

from dualeval.data.set_names import NamedSet
from dualeval.data.small_images import SmallImages
from dualeval.errors import UsageError
from dualeval.vision_library import torchvision


def open_images(wanted: NamedSet, **_: object) -> SmallImages:
    """One of both by torchvision, which unpickles a file if its md5 is the published one."""
    kind = getattr(torchvision().datasets, wanted.name)
    try:
        found = kind(wanted.root, train=wanted.split == "train")
    except RuntimeError as error:
        raise UsageError(
            f"{wanted.root / kind.base_folder} does not hold the published files of {wanted.name}: one is "
            "missing, or has another md5. They are pickles, which can run code, so none was read. Unpack "
            f"{kind.filename} in {wanted.root}; nothing is downloaded. For pictures of your own use class "
            "folders or a manifest."
        ) from error
    images = from_numpy(found.data).permute(0, 3, 1, 2).contiguous()
    return SmallImages(images, tensor(found.targets), wanted.split, classes=found.classes)
