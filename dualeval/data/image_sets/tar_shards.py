"""Tar shards, as WebDataset writes them: a picture and its label lie side by side, under one key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dualeval.columns.of_data import FurtherColumns
from dualeval.data.image_paths import EXTENSIONS
from dualeval.data.packed import Labelled, PackedImages, open_once
from dualeval.data.set_names import LABEL_COLUMNS
from dualeval.data.table import column_of
from dualeval.data.tar import CLASS, JSON, Member, TarReader, tars_at
from dualeval.data.tar_index import Chosen, read_index
from dualeval.errors import UsageError
from dualeval.messages import first_of

_NAMED_AT_MOST = 12
_KINDS = (str, int, bool, float, type(None))


def open_images(at: Path, *, label_key: str | None, keep: tuple[str, ...], **options: Any) -> PackedImages:
    """Open those of tar files."""
    return open_once(_read, at, label_key, keep, **options)


def _read(at: Path, label_key: str | None, keep: tuple[str, ...]) -> Labelled:
    paths = tars_at(at)
    # By default none are kept: each sample's .json would be read for them.
    key, keys = _keys(paths[0], label_key, has_columns=bool(keep))
    further = FurtherColumns(keys, (), keep)
    choose = partial(_labelled, key, further.names)
    return read_index(at, paths, key or CLASS, choose, further=further)


def _labelled(
    key: str | None, further: Sequence[str], reader: TarReader, sample: str, parts: Mapping[str, Member]
) -> Chosen | None:
    """A picture, its label, and what else is kept of its JSON."""
    part = JSON if key else CLASS
    pictures = reader.pictures(sample, parts, (part,))
    if not pictures and part not in parts:
        return None
    picture = reader.one_picture(sample, parts, pictures, "" if part in parts else f"label ({part})")
    values = reader.object(parts[JSON]) if key or (further and JSON in parts) else {}
    label = reader.text(parts[CLASS]).strip() if key is None else _label(reader, parts[JSON], values, key)
    return [picture], label, [values.get(name) for name in further]


def _keys(path: Path, asked: str | None, *, has_columns: bool) -> tuple[str | None, list[str]]:
    """The key of ``.json`` that has the labels, and those that may be kept, by the first sample.

    The key is None where each label is in a ``.cls``; then no other program's ``.json`` is looked into.
    """
    others = set[str]()
    with TarReader(path) as reader:
        for key, parts in reader.samples():
            if not reader.pictures(key, parts):
                others.update(parts)
                continue
            is_class = asked is None and CLASS in parts
            columns = [*reader.object(parts[JSON])] if JSON in parts and (has_columns or not is_class) else []
            kept = columns if has_columns else []
            if is_class:
                return None, kept
            if JSON in parts:
                of = f"{path}: {key}{JSON}"
                return column_of(of, columns, asked, LABEL_COLUMNS, "--label-key", "the labels"), kept
            wanted = f"{key}{JSON}, whose {asked!r} is its class" if asked else f"its class in {key}{CLASS}"
            mend = (
                "If the class is in a .json, give --label-key KEY; class folders in a tar have to be "
                f"unpacked: mkdir val; tar -xf {path} -C val"
            )
            if CLASS in parts:
                mend = "Or leave --label-key out: its class is in the .cls."
            raise UsageError(
                f"{path}: the sample {key!r} is {' '.join(parts)}; expected {wanted}, right behind or before "
                f"it in the shard. {mend}"
            )
    there = first_of(sorted(others), _NAMED_AT_MOST) if others else "no file with a suffix"
    raise UsageError(
        f"{path} holds no picture that is read: found {there}; expected files such as a.jpg "
        f"({' '.join(EXTENSIONS)}), each beside a.cls or a.json"
    )


def _label(reader: TarReader, member: Member, values: Mapping[str, Any], key: str) -> Any:
    value = values.get(key, reader)
    if type(value) not in _KINDS:
        found = "is not there" if value is reader else f"is {value!r}"
        raise reader.refused(member[0], f"{key!r} {found}", "Expected a class's index or name")
    return value
