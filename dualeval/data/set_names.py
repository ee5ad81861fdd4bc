"""The names of data sets that lie on the disk, as ``--data CIFAR10:DIR`` gives them; light to import."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from dualeval.errors import UsageError
from dualeval.options.choices import check_choice

IMAGENET = "ImageNet"
# By torchvision's names: the splits, the first of them where none is asked for; and the module of this folder
# whose ``read_set`` reads it, where it does not lie as other data do.
SETS = {
    "CIFAR10": (("test", "train"), "cifar"),
    "CIFAR100": (("test", "train"), "cifar"),
    "FashionMNIST": (("test", "train"), ""),
    IMAGENET: (("val", "train"), ""),
    "MNIST": (("test", "train"), ""),
}
_NAMES = {name.casefold(): name for name in SETS}
_NAME_BEFORE = re.compile(r"([A-Za-z][\w-]*):(.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class NamedSet:
    """A data set by its name."""

    name: str
    # The folder that torchvision takes.
    root: Path
    # One of its splits.
    split: str

    def __str__(self) -> str:
        """As it is typed."""
        return f"{self.name}:{self.root}"


def named_set(data: str, split: str | None = None) -> NamedSet | None:
    """The data set that a value of ``--data`` names; None for a path."""
    if Path(data).exists() or (found := _NAME_BEFORE.fullmatch(data)) is None:
        return None
    name, folder = _NAMES.get(_simple(found[1])), found[2]
    if name is None:
        near = difflib.get_close_matches(_simple(found[1]), _NAMES, n=1)
        hint = f" Did you mean {_NAMES[near[0]]}:{folder}?" if near else ""
        raise UsageError(
            f"--data {data} does not exist, and there is no data set {found[1]!r}: expected a path, or "
            f"NAME:DIR with one of {', '.join(SETS)}.{hint}"
        )
    if not folder:
        raise UsageError(f"--data {data}: expected the folder that holds {name} after the colon, {name}:DIR")
    if split is not None:
        check_choice(f"--split of {name}", split, SETS[name][0])
    root = Path(folder)
    if not root.is_dir():
        raise UsageError(f"--data {data}: the folder {root} does not exist. Nothing is downloaded.")
    return NamedSet(name=name, root=root, split=split or SETS[name][0][0])


def data_beside(data: str, folder: Path) -> str:
    """A value of ``--data`` in a job file: its path counts from the file's folder."""
    found = _NAME_BEFORE.fullmatch(data)
    if found is not None and _simple(found[1]) in _NAMES:
        return f"{found[1]}:{folder / found[2]}"
    return str(folder / data)


def _simple(name: str) -> str:
    return name.replace("-", "").replace("_", "").casefold()
