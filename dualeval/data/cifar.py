"""CIFAR-10 and CIFAR-100 as their authors publish them: pickled batches, which are known by their hashes."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualeval.data.small_images import SmallImages, check_small
from dualeval.errors import UsageError

_SHAPE = (3, 32, 32)


@dataclass(frozen=True, kw_only=True)
class CifarFiles:
    """The published files of one of the two."""

    # Theirs below the root, as torchvision unpacks the archive.
    folder: str
    # The batches of each split.
    splits: Mapping[str, tuple[str, ...]]
    # The key of a batch's labels.
    labels: str
    # The file of the classes' names.
    meta: str
    # Its key.
    names: str
    # That holds all of them.
    archive: str


FILES = {
    "CIFAR10": CifarFiles(
        folder="cifar-10-batches-py",
        splits={"test": ("test_batch",), "train": tuple(f"data_batch_{n}" for n in range(1, 6))},
        labels="labels",
        meta="batches.meta",
        names="label_names",
        archive="cifar-10-python.tar.gz",
    ),
    "CIFAR100": CifarFiles(
        folder="cifar-100-python",
        splits={"test": ("test",), "train": ("train",)},
        labels="fine_labels",
        meta="meta",
        names="fine_label_names",
        archive="cifar-100-python.tar.gz",
    ),
}

# The md5 of each published file, by its path below the root.
MD5 = {
    "cifar-10-batches-py/data_batch_1": "c99cafc152244af753f735de768cd75f",
    "cifar-10-batches-py/data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "cifar-10-batches-py/data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "cifar-10-batches-py/data_batch_4": "634d18415352ddfa80567beed471001a",
    "cifar-10-batches-py/data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "cifar-10-batches-py/test_batch": "40351d587109b95175f43aff81a1287e",
    "cifar-10-batches-py/batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    "cifar-100-python/train": "16019d7e3df5f24257cddd939b257f8d",
    "cifar-100-python/test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "cifar-100-python/meta": "7973b15100ade9c7d40fb424638fde48",
}


def read_cifar(name: str, root: Path, split: str) -> SmallImages:
    """Read CIFAR-10 or CIFAR-100 from the disk."""
    files = FILES[name]
    # Of all files, before any is read further: a missing one is said first.
    paths = [f"{files.folder}/{file}" for file in (*files.splits[split], files.meta)]
    for path in paths:
        if not (root / path).is_file():
            raise UsageError(
                f"{root / path} is missing: --data {name}:DIR takes {name} as torchvision keeps it, "
                f"DIR/{path}. Unpack {files.archive} in DIR; nothing is downloaded."
            )
    *batches, meta = (_checked(root, path, name) for path in paths)
    images, targets = [], []
    for batch in batches:
        images.append(np.asarray(batch["data"], np.uint8).reshape(-1, *_SHAPE))
        targets += batch[files.labels]
    classes = [str(label) for label in meta[files.names]]
    all_images = torch.from_numpy(np.concatenate(images))
    all_targets = torch.tensor(targets, dtype=torch.int64)
    check_small(all_images, all_targets, root / files.folder, classes)
    return SmallImages(all_images, all_targets, split, classes=classes)


def _checked(root: Path, path: str, name: str) -> Any:
    """What a published file holds; no other file is unpickled."""
    # The bytes that are unpickled are those that were hashed: a file read twice may have changed.
    content = (root / path).read_bytes()
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != MD5[path]:
        raise UsageError(
            f"{root / path} is not the published file of {name}: its md5 is {found}, expected {MD5[path]}. "
            "It is a pickle, which can run code, so it was not read. Unpack the archive again: "
            f"{FILES[name].archive}. For pictures of your own use class folders or a manifest."
        )
    return pickle.loads(content, encoding="latin1")  # noqa: S301 - of the authors, by its hash
