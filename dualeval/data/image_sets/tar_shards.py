"""Tar shards, as WebDataset writes them: a picture and its label lie side by side, under one key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dualeval.data.cache import DataCache
from dualeval.data.image_paths import EXTENSIONS
from dualeval.data.packed import Labelled, PackedImages
from dualeval.data.set_names import LABEL_COLUMNS
from dualeval.data.table import column_of
from dualeval.data.table_labels import Labeler
from dualeval.data.tar import CLASS, JSON, Member, TarReader, tars_at
from dualeval.data.tar_index import read_index
from dualeval.errors import UsageError

_KINDS = (str, int, bool, float, type(None))


def open_images(
    at: Path, *, label: Labeler, label_key: str | None, whole_files: bool, cache: DataCache | None
) -> PackedImages:
    """Open those of tar files; what is done to each is decided afterwards (``prepared``)."""
    cache = cache or DataCache()
    read = cache.once(("tar shards", at.absolute(), label_key), lambda: _read(at, label_key))
    return read.images(at, label, whole_files=whole_files, cache=cache)


def _read(at: Path, label_key: str | None) -> Labelled:
    paths = tars_at(at)
    key = _label_key(paths[0], label_key)
    return read_index(at, paths, key or CLASS, partial(_labelled, key))


def _labelled(
    key: str | None, reader: TarReader, sample: str, parts: Mapping[str, Member]
) -> tuple[Sequence[Member], Any] | None:
    """A picture and its label."""
    pictures, part = _pictures(parts), JSON if key else CLASS
    if not pictures and part not in parts:
        return None
    if len(pictures) > 1:
        raise reader.refused(parts[pictures[1]][0], f"is a second picture of {sample!r}", "Keep one of them")
    if not pictures or part not in parts:
        there, missing = (pictures[0], f"label ({part})") if pictures else (part, "picture")
        raise reader.incomplete(sample, there, missing)
    return [parts[pictures[0]]], _label(reader, parts[part], key)


def _label_key(path: Path, asked: str | None) -> str | None:
    """The key of ``.json`` that has the labels; None where each is in a ``.cls``, by the first sample."""
    with TarReader(path) as reader:
        for key, parts in reader.samples():
            if not _pictures(parts):
                continue
            if asked is None and CLASS in parts:
                return None
            if JSON in parts:
                of = f"{path}: {key}{JSON}"
                columns = [*reader.object(parts[JSON])]
                return column_of(of, columns, asked, LABEL_COLUMNS, "--label-key", "the classes")
            wanted = f"{key}{JSON}, whose {asked!r} is its class" if asked else f"its class in {key}{CLASS}"
            raise UsageError(
                f"{path}: the sample {key!r} is {' '.join(parts)}; expected {wanted}, right behind or before "
                f"it in the shard. If the class is in a .json, give --label-key KEY; class folders in a tar "
                f"have to be unpacked: mkdir val; tar -xf {path} -C val"
            )
    raise UsageError(
        f"{path} holds no picture: expected files such as a.jpg ({' '.join(EXTENSIONS)}), each beside a.cls "
        "or a.json"
    )


def _pictures(parts: Mapping[str, Member]) -> list[str]:
    return [suffix for suffix in parts if suffix in EXTENSIONS]


def _label(reader: TarReader, member: Member, key: str | None) -> Any:
    if key is None:
        return reader.text(member).strip()
    value = reader.object(member).get(key, reader)
    if type(value) not in _KINDS:
        found = "is not there" if value is reader else f"is {value!r}"
        raise reader.refused(member[0], f"{key!r} {found}", "Expected a class's index or name")
    return value
