"""What a value of ``--data`` names: a data set (CIFAR10:DIR), a table or a folder; light to import."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualeval.errors import UsageError
from dualeval.options.choices import check_choice
from dualeval.urls import url_of

IMAGENET = "ImageNet"
# By torchvision's names: the splits, the first of them where none is asked for; and the kind that it is of.
SETS: dict[str, tuple[tuple[str, ...], str]] = {
    "CIFAR10": (("test", "train"), "cifar"),
    "CIFAR100": (("test", "train"), "cifar"),
    "FashionMNIST": (("test", "train"), "idx"),
    IMAGENET: (("val", "train"), "class_folders"),
    "MNIST": (("test", "train"), "idx"),
}
_NAMES = {name.casefold(): name for name in SETS}
# Tables, whose rows are the samples or name them: by suffix the module of ``data/tables`` whose
# ``open_table`` reads it.
TABLES: dict[str, str] = {".csv": "delimited", ".tsv": "delimited", ".jsonl": "jsonl", ".parquet": "parquet"}
# Where labels of pictures are, in a table or in an object of JSON.
LABEL_COLUMNS = ("label", "class", "target", "y")
# Parts of a data set: folders of these names alone are no classes.
PARTS = ("train", "training", "trainval", "val", "valid", "validation", "dev", "eval", "test", "testing")
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


def has_rows(path: Path) -> bool:
    """Whether a path is that of a table, or of tar shards, whose samples may be rows."""
    return is_tar(path) or (path.is_file() and is_table(path))


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How images with a label each lie."""

    # The module of ``image_sets`` whose ``open_images`` opens them.
    module: str
    # Whether they lie so at a path that has no name.
    is_at: Callable[[Path], object] = lambda path: False
    # The splits that can be asked for there.
    splits: tuple[str, ...] = ()
    # Options that are for it alone, and what it is.
    options: tuple[str, ...] = ()
    what: str = ""
    # Whether samples have further columns, as --keep has them.
    has_columns: bool = False
    # Whether they are held in memory, as they are stored; their labels are indices of classes.
    in_memory: bool = False
    # The module of ``image_sets`` whose ``open_masks`` opens pictures with masks there.
    masks: str = ""
    # Whether they may lie in an object store or on the web.
    in_stores: bool = False


def has_idx(folder: Path) -> bool:
    """Whether idx files of images are in a folder."""
    return any(file for end in ("", ".gz") for file in folder.glob(f"*-images-idx3-ubyte{end}"))


_OF_COLUMNS: dict[str, Any] = {
    "options": ("path_column", "label_column"),
    "what": "manifests and pictures in columns",
}
_OF_MANIFEST: dict[str, Any] = {
    "options": ("image_root", "path_column", "label_column", "quoting"),
    "what": f"a manifest, a file that ends with {', '.join(TABLES)}",
}
# How tar files that are compressed end.
_PACKED_TARS = ("tgz", "tzst", "tbz2", "txz")


def is_tar(path: Path) -> bool:
    """Whether a path is that of a tar file, of a pattern of them, or of a folder that holds them alone."""
    if url_of(path) and is_tar_name(path.name):
        return True  # without the right to list, none may ask for a folder of this name
    return _holds(path, is_tar_name) if path.is_dir() else is_tar_name(path.name)


def _holds(folder: Path, is_shard: Callable[[str], bool]) -> bool:
    """Whether a folder holds shards, and neither pictures nor a folder to be seen, which would be a class."""
    from dualeval.data.image_paths import is_image

    if url_of(folder):
        names = [name for name, *_ in folder.entries]  # type: ignore[attr-defined] # a StorePath
        return any(map(is_shard, names)) and not any("/" in name or is_image(name) for name in names)
    entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    others = (entry.is_dir() or is_image(entry.name) for entry in entries)
    return any(is_shard(entry.name) for entry in entries) and not any(others)


def is_tar_name(name: str) -> bool:
    """Whether a name is that of a tar file, which may be compressed; val.tar.csv is one of a table."""
    suffixes = [suffix.lower() for suffix in name.split(".")[-2:]]
    return ("tar" in suffixes and f".{suffixes[-1]}" not in TABLES) or suffixes[-1] in _PACKED_TARS


def refuse_several(data: object) -> None:
    """Refuse a list of files, of which a pattern makes one value."""
    if isinstance(data, list | tuple):
        raise UsageError(
            f"data is a {type(data).__name__}, expected one path: a file, a folder of shards, or a pattern, "
            "such as 'shards/{a,b}.tar' or 'shards/val-{000..063}.tar'"
        )


def is_saved_folder(path: Path) -> bool:
    """Whether a folder is one of save_to_disk of Hugging Face's library, or of its parts."""
    names = ("dataset_dict.json",), ("dataset_info.json", "state.json")
    return any(all((path / name).is_file() for name in each) for each in names)


def has_picture_column(path: Path) -> bool:
    """Whether pictures lie in a column: of Parquet files, or of a folder of save_to_disk."""
    is_pattern = is_parquet_name(path.name) and "{" in path.name
    if url_of(path) and is_pattern:
        return True  # without the right to list, none may ask for a file of this name
    if path.is_dir():
        return (not url_of(path) and is_saved_folder(path)) or _holds(path, is_parquet_name)
    if not path.exists() or not is_parquet_name(path.name):
        return is_pattern
    import pyarrow

    from dualeval.data.parquet_file import opened_parquet

    try:
        with opened_parquet(path) as file:
            schema = file.schema_arrow
    except (OSError, pyarrow.ArrowException):
        return False  # as a manifest it is refused with the reason
    return any(is_picture_type(each.type) for each in schema)


def is_mds(folder: Path) -> bool:
    """Whether a folder has the index of MosaicML's shards, or these."""
    index = folder / "index.json"
    if index.is_file() and b'"shards"' in index.read_bytes():
        return True
    return folder.is_dir() and _holds(folder, lambda name: ".mds" in Path(name).suffixes)


def is_parquet_name(name: str) -> bool:
    """Whether a name is that of a Parquet file."""
    return name.lower().endswith(".parquet")


# What to type where they are plain bytes.
PICTURE_COLUMNS = (
    "Pictures in Parquet are a struct of bytes and path, as Hugging Face's library writes them; a plain "
    'column of bytes becomes one: datasets.load_dataset("parquet", data_files=FILE, split="train")'
    ".cast_column(NAME, datasets.Image()).save_to_disk(DIR)."
)


def is_picture_type(kind: Any) -> bool:
    """Whether an Arrow type is that of pictures: a struct of bytes and path."""
    return str(kind).startswith("struct<") and kind.get_field_index("bytes") >= 0


def is_pack(path: Path) -> bool:
    """Whether a path is that of a pack, by its suffix."""
    return path.suffix == ".pack" and not path.is_dir()


# By module; a path is of the first kind that is there.
KINDS: dict[str, Kind] = {
    "cifar": Kind(module="cifar", in_memory=True),
    "tar_shards": Kind(
        module="tar_shards",
        is_at=is_tar,
        options=("label_key",),
        what="tar shards (.tar)",
        has_columns=True,
        in_stores=True,
    ),
    "hugging_face": Kind(
        module="hugging_face", is_at=has_picture_column, has_columns=True, in_stores=True, **_OF_COLUMNS
    ),
    "mds": Kind(module="mds", is_at=is_mds, **_OF_COLUMNS),
    "manifest": Kind(module="manifest", is_at=is_table, has_columns=True, in_stores=True, **_OF_MANIFEST),
    "idx": Kind(module="idx", is_at=has_idx, splits=("test", "train"), in_memory=True),
    "pack": Kind(module="pack", is_at=is_pack, masks="packed_masks"),
    "class_folders": Kind(module="class_folders", is_at=lambda path: path.is_dir(), in_stores=True),
}


def kind_at(path: Path) -> Kind:
    """How the images at a path lie."""
    kinds = [kind for kind in KINDS.values() if kind.in_stores or not url_of(path)]
    kind = next((kind for kind in kinds if kind.is_at(path)), None)
    if kind is None:
        if path.suffix == ".arrow" and path.exists():
            folder = path.parent if is_saved_folder(path.parent) else "DIR"
            raise UsageError(
                f"--data {path} is one of a data set's files: give the folder of dataset.save_to_disk(DIR) "
                f"instead: --data {folder}"
            )
        fault = "is a file" if path.exists() else "does not exist"
        if url_of(path) and path.exists():
            raise UsageError(
                f"--data {path} is a file that is read from a disk alone: copy it there, and give its path. "
                "Where it lies, class folders, manifests, Parquet and tar shards are read."
            )
        raise UsageError(
            f"data folder {path} {fault}. Give --data a folder with one sub-folder per class, a "
            "manifest (.csv, .tsv, .jsonl, .parquet), tar shards (.tar), a pack (.pack) or a data set by "
            "name (CIFAR10:DIR)."
        )
    return kind


def module_of_masks(path: Path) -> str:
    """The module that opens the pictures and masks at a path; "" where they are files of their own."""
    return next((kind.masks for kind in KINDS.values() if kind.masks and kind.is_at(path)), "")
