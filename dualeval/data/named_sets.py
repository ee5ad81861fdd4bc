"""Data sets of torchvision by name, read from the disk into memory."""

from __future__ import annotations

from torch import from_numpy, tensor

from dualeval.data.idx import SPLITS, IdxImages
from dualeval.data.set_names import NamedSet
from dualeval.data.small_images import SmallImages
from dualeval.errors import UsageError
from dualeval.vision_library import torchvision

FASHION_MNIST_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
MNIST_CLASSES = (
    *("0 - zero", "1 - one", "2 - two", "3 - three", "4 - four"),
    *("5 - five", "6 - six", "7 - seven", "8 - eight", "9 - nine"),
)
_IDX_CLASSES = {"FashionMNIST": FASHION_MNIST_CLASSES, "MNIST": MNIST_CLASSES}


def read_small(wanted: NamedSet) -> SmallImages:
    """Read one of those whose images are held in memory: all but ImageNet."""
    if wanted.name not in _IDX_CLASSES:
        return _read_cifar(wanted)
    # torchvision's place; then that of the files where nobody gave them a folder of their own.
    places = (wanted.root / wanted.name / "raw", wanted.root / "raw", wanted.root)
    folder = next((place for place in places if IdxImages.is_in(place)), None)
    split = SPLITS[wanted.split]
    if folder is None:
        raise UsageError(
            f"{places[0] / f'{split}-images-idx3-ubyte.gz'} is missing: --data {wanted.name}:DIR takes "
            f"{wanted.name} as torchvision keeps it, DIR/{wanted.name}/raw, with .gz or without. Nothing is "
            "downloaded."
        )
    return IdxImages(folder, split, classes=_IDX_CLASSES[wanted.name])


def _read_cifar(wanted: NamedSet) -> SmallImages:
    """CIFAR-10 or CIFAR-100 by torchvision, which unpickles a file if its md5 is the published one."""
    kind = getattr(torchvision().datasets, wanted.name)
    try:
        found = kind(wanted.root, train=wanted.split == "train")
    except RuntimeError as error:
        raise UsageError(
            f"{wanted.root / kind.base_folder} does not hold the published files of {wanted.name}: one is "
            "missing, or its md5 is another. They are pickles, which can run code, so none was read. Unpack "
            f"{kind.filename} in {wanted.root}; nothing is downloaded. For pictures of your own use class "
            "folders or a manifest."
        ) from error
    images = from_numpy(found.data).permute(0, 3, 1, 2).contiguous()
    return SmallImages(images, tensor(found.targets), wanted.split, classes=found.classes)
