"""Class folders below a data folder, which may be ImageNet's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dualeval.data.cache import DataCache
from dualeval.data.image_files import FileNames, ImageFiles
from dualeval.data.image_paths import (
    EXTENSIONS,
    PassedOver,
    images_in,
    is_hidden,
    is_image,
    refuse_listing,
    shown_name,
)
from dualeval.data.labels import Labels, are_wnids, choose_labels, imagenet_wnids
from dualeval.data.packed import InPieces
from dualeval.data.preprocessing import Normalisation, Preprocessing
from dualeval.data.set_names import PARTS, NamedSet, is_parquet_name, is_tar_name, kind_at
from dualeval.data.shards import shards_at
from dualeval.data.stored import ObjectPieces
from dualeval.data.stores.path import StorePath
from dualeval.errors import UsageError
from dualeval.process.status_line import doing
from dualeval.urls import url_of


def open_images(at: NamedSet | Path, **options: Any) -> ImageFolder:
    """Open those of a folder, or ImageNet; what is done to each is decided afterwards (``prepared``)."""
    root = imagenet_folder(at.root, at.split) if isinstance(at, NamedSet) else at
    return (StoredFolder if url_of(root) else ImageFolder)(root, Preprocessing(), **options)


class ImageFolder(ImageFiles):
    """Images below ``root/CLASS/``, folders and files in name order; sub-folders of a class count to it.

    A class folder may be empty. Files and folders whose names begin with a dot are passed over.
    """

    def __init__(
        self,
        root: Path,
        preprocessing: Normalisation,
        *,
        label: Callable[[Sequence[str]], Labels] = choose_labels,
        whole_files: bool = False,
        cache: DataCache | None = None,
    ) -> None:
        cache = cache or DataCache()
        files, self.passed_over = cache.once(("class folders", root.absolute()), lambda: _by_class(root))
        self.classes = list(files)
        if not any(map(len, files.values())):
            raise self._without_images(root)
        labels = label(self.classes)
        counts = [len(files[name]) for name in labels.classes]
        if not any(counts):
            raise UsageError(
                f"data folder {root} holds no sample: the class map leaves out all folders that hold images."
            )
        super().__init__(
            root,
            FileNames(path for name in labels.classes for path in files[name]),
            np.repeat(np.array([*labels.classes.values()], np.int32), counts),
            labels=labels,
            preprocessing=preprocessing,
            whole_files=whole_files,
            cache=cache,
        )

    def _without_images(self, root: Path) -> UsageError:
        if others := [root / name for name in self.classes if _is_other_kind(root / name)]:
            # As repositories of Hugging Face lie, whose data/ has the files of each part.
            shards_at(others[0], lambda name: is_parquet_name(name) or is_tar_name(name), "")
            return UsageError(
                f"data folder {root} has no pictures in class folders, but other data in "
                f"{' and '.join(each.name for each in others)}. Give one folder: --data {others[0]}"
            )
        loose = sum(is_image(path.name) for path in root.iterdir())
        folders = f"{len(self.classes)} class folders without images and {loose} images beside them"
        # With folders beside them they are no shards: those who have ImageNet's archive beside its classes.
        tars = f" The tar files in it are read by --data {root}/NAME.tar." * (
            ".tar" in self.passed_over.files
        )
        return UsageError(
            f"data folder {root} holds no sample: found {folders}; expected {root}/CLASS/IMAGE "
            f"({' '.join(EXTENSIONS)})." + (f" {self.passed_over}." if str(self.passed_over) else "") + tars
        )

    def notes(self) -> list[str]:
        """Which classes the folders are, and what was passed over and is no picture."""
        sentence = "" if self.passed_over.holds_pictures else str(self.passed_over)
        return [*super().notes(), *filter(None, [sentence])]

    def warnings(self) -> list[str]:
        """Where classes may be others than the model's, and where pictures are no samples."""
        sentence = str(self.passed_over) if self.passed_over.holds_pictures else ""
        return [*super().warnings(), *filter(None, [sentence])]

    def labels_used(self, num_classes: int) -> dict[str, Any]:
        """How folders became classes, and what was passed over, as in result.json."""
        return {**super().labels_used(num_classes), "passed_over": self.passed_over.to_json()}


class StoredFolder(InPieces, ImageFolder):
    """Images below ``root/CLASS/`` in an object store; a class folder there has a file."""

    def __init__(self, root: Path, *arguments: Any, **options: Any) -> None:
        super().__init__(root, *arguments, **options)
        self._pieces = ObjectPieces.below(root, self._paths)


def _listed(root: StorePath) -> tuple[dict[str, FileNames], PassedOver]:
    """As ``_by_class``, of a folder in a store."""
    passed_over, files = PassedOver(), dict[str, list[str]]()
    with doing(f"listing the files of {root}"):
        for path, *_ in root.entries:
            *folders, name = path.split("/")
            hidden = any(map(is_hidden, folders))
            passed_over.hidden_folders += hidden
            of_class = files.setdefault(folders[0], []) if folders and not hidden else []
            if folders and is_image(name):
                of_class.append(path)
            elif not hidden:
                passed_over.add(name)
                passed_over.beside += not folders and is_image(name)
    _refuse_parts(
        root,
        sorted(files),
        [name for name in files if any("/" in path[len(name) + 1 :] for path in files[name])],
    )
    return {name: FileNames(sorted(files[name])) for name in sorted(files)}, passed_over


def _by_class(root: Path) -> tuple[dict[str, FileNames], PassedOver]:
    """The images of each class folder, as paths below the root, and what lies there beside them."""
    if isinstance(root, StorePath):
        return _listed(root)
    passed_over = PassedOver()
    folders = {shown_name(name): name for name in class_folders(root, passed_over)}
    files = {}
    with doing(f"listing the files of {root}") as listing:
        for name, folder in folders.items():
            files[name] = FileNames(images_in(root, folder, passed_over))
            listing.count += len(files[name])
    return files, passed_over


_FLAT = (
    "There is no class folder in {0}: expected {0}/CLASS/IMAGE, or the list of pictures and labels: --data "
    "FILE.csv"
)


def class_folders(root: Path, passed_over: PassedOver) -> list[str]:
    """The names of the class folders, by code point; hidden ones and files are counted as passed over."""
    try:
        entries = list(os.scandir(root))
    except OSError as error:
        refuse_listing(error)
    folders = []
    for entry in entries:
        if not entry.is_dir():
            passed_over.add(entry.name)
            passed_over.beside += is_image(entry.name)
        elif is_hidden(entry.name):
            passed_over.hidden_folders += 1
        else:
            folders.append(entry.name)
    folders.sort()
    _refuse_parts(
        root,
        folders,
        (
            name
            for name in folders
            if any(map(Path.is_dir, (root / name).glob("*"))) or _is_other_kind(root / name)
        ),
    )
    return folders


def _is_other_kind(folder: Path) -> bool:
    """Whether a folder holds shards or others of ``set_names.KINDS``."""
    return kind_at(folder).module != "class_folders"


def _refuse_parts(root: Path, folders: Sequence[str], with_folders: Iterable[str]) -> None:
    """Refuse a folder whose folders are parts of a data set, of which some have class folders or shards."""
    if folders and all(name.lower() in PARTS for name in folders):
        filled, splits = sorted(with_folders, key=lambda name: PARTS.index(name.lower())), folders
        raise UsageError(
            f"data folder {root} holds {' and '.join(splits)}, which are parts of a data set, not classes. "
            + (f"Give one of them: --data {root / filled[-1]}" if filled else _FLAT.format(root / splits[-1]))
        )


# torchvision's, then Kaggle's archive, then others' names.
_PLACES = ("{}", "ILSVRC/Data/CLS-LOC/{}", "Data/CLS-LOC/{}", "ILSVRC2012/{}", "ILSVRC2012_img_{}")
_NAMES = {"val": ("val", "validation"), "train": ("train",)}
_TAR = "ILSVRC2012_img_{}.tar"


def imagenet_folder(root: Path, split: str) -> Path:
    """The folder of ImageNet's class folders, named by wnid."""
    places = [root / place.format(name) for place in _PLACES for name in _NAMES[split]]
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        tar = root / _TAR.format(split)
        hint = f" {tar} is an archive: unpack it into {places[0]}/WNID/." if tar.is_file() else ""
        raise UsageError(
            f"{places[0]} is missing: --data ImageNet:DIR takes DIR/{split}/WNID/IMAGE, as torchvision keeps "
            f"it, and nothing is downloaded.{hint}"
        )
    folders = class_folders(folder, PassedOver())
    if not folders and any(is_image(path.name) for path in folder.iterdir()):
        raise UsageError(
            f"the pictures lie in {folder} itself, expected one folder per class, {folder}/n01440764/IMAGE. "
            "Sort them into folders by wnid, as torchvision.datasets.ImageNet does, or list them with their "
            "classes in a manifest: --data FILE.csv --image-root DIR."
        )
    if not are_wnids(folders, imagenet_wnids()):
        odd = next((name for name in folders if not are_wnids([name], imagenet_wnids())), "no folder")
        raise UsageError(
            f"{folder}: found {odd}, expected folders that are named by the wnids of ILSVRC-2012, such as "
            f"n01440764. For other folders give --data {folder}."
        )
    return folder
