"""ImageNet (ILSVRC-2012): the WordNet ids of its classes, and where its pictures lie below a folder."""

from __future__ import annotations

import functools
from pathlib import Path

from dualeval.data.class_folders import PassedOver, class_folders, is_image
from dualeval.data.labels import are_wnids
from dualeval.errors import UsageError

# torchvision's, then Kaggle's archive, then others' names.
_PLACES = ("{}", "ILSVRC/Data/CLS-LOC/{}", "Data/CLS-LOC/{}", "ILSVRC2012/{}", "ILSVRC2012_img_{}")
_NAMES = {"val": ("val", "validation"), "train": ("train",)}
_TAR = "ILSVRC2012_img_{}.tar"
# Facts, a line a class; tests/write_wnids.py has written it.
WNIDS_FILE = Path(__file__).resolve().parent.parent / "assets" / "imagenet_wnids.txt"


@functools.cache
def imagenet_wnids() -> tuple[str, ...]:
    """The wnid of each class of ILSVRC-2012, by its index: they are in the order of their names."""
    return tuple(WNIDS_FILE.read_text("ascii").split())


def imagenet_folder(root: Path, split: str) -> Path:
    """The folder of ImageNet's class folders, named by wnid."""
    places = [root / place.format(name) for place in _PLACES for name in _NAMES[split]]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        tar = root / _TAR.format(split)
        hint = f" {tar} is an archive: unpack it into {places[0]}/WNID/." if tar.is_file() else ""
        raise UsageError(
            f"{places[0]} is missing: --data ImageNet:DIR takes DIR/{split}/WNID/IMAGE, as torchvision keeps "
            f"it, and nothing is downloaded.{hint}"
        )
    folders = class_folders(found, PassedOver())
    if not folders and any(is_image(path.name) for path in found.iterdir()):
        raise UsageError(
            f"the pictures lie in {found} itself, expected one folder a class, {found}/n01440764/IMAGE. "
            "Sort them into folders by wnid, as torchvision.datasets.ImageNet does, or list them with their "
            "classes in a manifest: --data FILE.csv --image-root DIR."
        )
    if not are_wnids(folders, imagenet_wnids()):
        odd = next((name for name in folders if not are_wnids([name], imagenet_wnids())), "no folder")
        raise UsageError(
            f"{found}: found {odd}, expected folders that are named by the wnids of ILSVRC-2012, such as "
            f"n01440764. For other folders give --data {found}."
        )
    return found
