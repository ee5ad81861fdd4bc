"""What a value of ``--data`` names: a data set on the disk (CIFAR10:DIR), or a table; light to import."""

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
# Tables, whose rows are the samples or name them: by suffix the module of ``data/tables`` whose
# ``open_table`` reads it.
TABLES: dict[str, str] = {".csv": "delimited", ".tsv": "delimited", ".jsonl": "jsonl", ".parquet": "parquet"}
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
    if Path(data).exists() or (match := _NAME_BEFORE.fullmatch(data)) is None:
        return None
    name, folder = _NAMES.get(_simple(match[1])), match[2]
    if name is None:
        near = difflib.get_close_matches(_simple(match[1]), _NAMES, n=1)
        hint = f" Did you mean {_NAMES[near[0]]}:{folder}?" if near else ""
        raise UsageError(
            f"--data {data} does not exist, and there is no data set {match[1]!r}: expected a path, or "
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
    match = _NAME_BEFORE.fullmatch(data)
    if match is not None and _simple(match[1]) in _NAMES:
        return f"{match[1]}:{folder / match[2]}"
    return str(folder / data)


def _simple(name: str) -> str:
    return name.replace("-", "").replace("_", "").casefold()


def is_table(path: Path) -> bool:
    """Whether a path is that of a table, by its suffix."""
    return path.suffix.lower() in TABLES and not path.is_dir()
