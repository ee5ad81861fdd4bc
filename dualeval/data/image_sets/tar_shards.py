"""Tar shards, as WebDataset writes them: a picture and its label lie side by side, under one key."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualeval.data.cache import DataCache
from dualeval.data.image_files import FileNames
from dualeval.data.image_paths import EXTENSIONS
from dualeval.data.index_cache import IndexCache
from dualeval.data.packed import FilePieces, Labelled, PackedImages
from dualeval.data.set_names import LABEL_COLUMNS
from dualeval.data.stored import StorePieces
from dualeval.data.stores.path import StorePath
from dualeval.data.table import column_of
from dualeval.data.table_labels import Labeler, TableLabels
from dualeval.data.tar import Member, TarReader, tars_at
from dualeval.errors import UsageError
from dualeval.messages import counted
from dualeval.process.status_line import doing

_CLASS, _JSON = ".cls", ".json"
_KINDS = (str, int, bool, float, type(None))
# A file system behind a network answers many questions at a time, each after a while.
_THREADS = 8
# What has fewer samples is indexed in less time than its index is looked up.
_WORTH_KEEPING = 1000
_LARGEST = 2**32 - 1


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
    caches = [IndexCache(path, f"picture and {key or _CLASS}") for path in paths]
    shards: list[_Shard] = []
    pool = ThreadPoolExecutor(min(_THREADS, len(paths)), "dualeval-tar")
    with doing(f"looking for the samples in {at}") as looking, pool:
        for shard in pool.map(partial(_shard, key=key), paths, caches):
            shards.append(shard)
            looking.count += len(shard.offsets)
    states = np.array([cache.state for cache in caches], np.int64)
    before = np.cumsum(states[:, 0]) - states[:, 0]
    pieces = FilePieces(
        files=[str(path.absolute()) for path in paths],
        states=states,
        offsets=np.concatenate([shard.offsets + first for shard, first in zip(shards, before, strict=True)]),
        lengths=np.concatenate([shard.lengths for shard in shards]),
    )
    if remote := [path.found for path in paths if isinstance(path, StorePath)]:
        pieces = StorePieces(**vars(pieces), found=remote)
    names, notes = _names(paths, caches, shards)
    labels = TableLabels(lambda number: f"{pieces.where(number)}, {names.shown(number)}", key or _CLASS, ())
    codes, first = [], 0
    for shard in shards:
        _, firsts = np.unique(shard.codes, return_index=True)
        places = [
            labels.place(first + int(place), value) for place, value in zip(firsts, shard.labels, strict=True)
        ]
        codes.append(np.array(places, np.int32)[shard.codes])
        first += len(shard.codes)
    if passed_over := sum(shard.passed_over for shard in shards):
        notes.append(f"passed over: {counted(passed_over, 'file')} of the shards, which are of no sample")
    return Labelled(pieces=pieces, names=names, codes=np.concatenate(codes), labels=labels, notes=notes)


def _label_key(path: Path, asked: str | None) -> str | None:
    """The key of ``.json`` that has the labels; None where each is in a ``.cls``, by the first sample."""
    with TarReader(path) as reader:
        for key, parts in reader.samples():
            if not _pictures(parts):
                continue
            if asked is None and _CLASS in parts:
                return None
            if _JSON in parts:
                of = f"{path}: {key}{_JSON}"
                columns = [*_object(reader, parts[_JSON])]
                return column_of(of, columns, asked, LABEL_COLUMNS, "--label-key", "the classes")
            wanted = f"{key}{_JSON}, whose {asked!r} is its class" if asked else f"its class in {key}{_CLASS}"
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


def _object(reader: TarReader, member: Member) -> dict[str, Any]:
    name, offset, size = member
    try:
        value = json.loads(reader.read(offset, size))
    except ValueError as error:
        raise reader.refused(name, f"is not JSON: {error}", "Pack it anew") from error
    if not isinstance(value, dict):
        raise reader.refused(name, "is no JSON object", 'Expected {"label": 3, ...}')
    return value


@dataclass(frozen=True, kw_only=True)
class _Shard:
    """The samples of a shard."""

    # Names of the pictures' files, one behind the other, and where each ends.
    names: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.uint32]
    # The place of each label among those of the shard, which are in the order of their first samples.
    codes: npt.NDArray[np.int32]
    labels: Sequence[Any]
    # How many files are of no sample.
    passed_over: int


def _shard(path: Path, cache: IndexCache, key: str | None) -> _Shard:
    # All ranks of a machine fetch each shard of a store once.
    with cache.alone() if isinstance(path, StorePath) else nullcontext():
        return _indexed(path, cache, key)


def _indexed(path: Path, cache: IndexCache, key: str | None) -> _Shard:
    if (kept := cache.load()) is not None:
        arrays, (labels, passed_over) = kept
        return _Shard(**arrays, labels=labels, passed_over=passed_over)
    names, numbers = FileNames(), {name: array(code) for name, code in (("offsets", "q"), ("lengths", "I"))}
    codes, places = array("i"), dict[tuple[type, Any], int]()
    with TarReader(path) as reader:
        passed_over = 0
        for sample, parts in reader.samples():
            pictures, part = _pictures(parts), _JSON if key else _CLASS
            if not pictures and part not in parts:
                passed_over += len(parts)
                continue
            if len(pictures) != 1 or part not in parts:
                raise _incomplete(path, sample, parts, part)
            value = _label(reader, parts[part], key)
            codes.append(places.setdefault((type(value), value), len(places)))
            name, offset, size = parts[pictures[0]]
            if size > _LARGEST:
                raise reader.refused(name, f"has {size:,} bytes", "No picture is as large: leave it out")
            names.append(os.fsdecode(name))
            numbers["offsets"].append(offset)
            numbers["lengths"].append(size)
        passed_over += reader.passed_over
    stored, ends = names.stored_all()
    arrays = {
        "names": np.frombuffer(stored, np.uint8),
        "ends": ends,
        "offsets": np.frombuffer(numbers["offsets"], np.int64),
        "lengths": np.frombuffer(numbers["lengths"], np.uint32),
        "codes": np.frombuffer(codes, np.int32),
    }
    labels = [value for _, value in places]
    if len(codes) >= _WORTH_KEEPING or isinstance(path, StorePath):
        cache.keep(arrays, [labels, passed_over])
    return _Shard(**arrays, labels=labels, passed_over=passed_over)


def _incomplete(path: Path, sample: str, parts: Mapping[str, Member], part: str) -> UsageError:
    pictures = _pictures(parts)
    if len(pictures) > 1:
        return UsageError(
            f"{path}: the sample {sample!r} has {' and '.join(pictures)}: keep one picture of it."
        )
    there, missing = (part, "picture") if not pictures else (pictures[0], f"label ({part})")
    return UsageError(
        f"{path}: the sample {sample!r} has {there} and no {missing}. Add it, or leave the sample out. The "
        "files of a sample lie side by side in a shard, as tar --sort=name packs them."
    )


def _label(reader: TarReader, member: Member, key: str | None) -> Any:
    name, offset, size = member
    if key is None:
        try:
            return reader.read(offset, size).decode().strip()
        except UnicodeDecodeError as error:
            raise reader.refused(name, "is no text", "Expected a class's index or name in UTF-8") from error
    value = _object(reader, member).get(key, reader)
    if type(value) not in _KINDS:
        found = "is not there" if value is reader else f"is {value!r}"
        raise reader.refused(name, f"{key!r} {found}", "Expected a class's index or name")
    return value


def _names(
    paths: Sequence[Path], caches: Sequence[IndexCache], shards: Sequence[_Shard]
) -> tuple[FileNames, list[str]]:
    """The ids: the pictures' names; with that of their shard before them where shards share some."""
    names, numbers = FileNames(), np.cumsum([len(shard.offsets) for shard in shards])
    for shard in shards:
        names.extend(shard.names.tobytes(), shard.ends)
    if (twice := names.repeated()) is None:
        return names, []
    copies: dict[str, Path] = {}
    for path, cache in zip(paths, caches, strict=True):
        if (other := copies.setdefault(cache.ends, path)) is not path:
            raise UsageError(f"{other} and {path} are the same shard: leave one out.")
    longer = FileNames(
        f"{paths[int(shard)].name}/{names[place]}"
        for place, shard in enumerate(np.searchsorted(numbers, np.arange(len(names)), side="right"))
    )
    if (again := longer.repeated()) is not None:
        raise UsageError(
            f"{paths[int(np.searchsorted(numbers, again, side='right'))]} has {names.shown(again)!r} more "
            "than once: keep one of them, so that each picture counts once."
        )
    return longer, [f"shards share names, such as {names.shown(twice)}: ids begin with the shard's name"]
