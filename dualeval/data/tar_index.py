"""Where the samples of tar shards are: read from their headers, kept in the user's cache for the next run."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dualeval.columns.of_data import FurtherColumns
from dualeval.data.image_files import FileNames, digest_of_file
from dualeval.data.index_cache import IndexCache
from dualeval.data.packed import FilePieces, Labelled
from dualeval.data.set_names import PARTS
from dualeval.data.stored import StorePieces
from dualeval.data.stores.path import StorePath
from dualeval.data.table_labels import TableLabels
from dualeval.data.tar import Member, TarReader
from dualeval.errors import UsageError
from dualeval.messages import counted
from dualeval.process.status_line import doing

# A file system behind a network answers many questions at a time, each after a while.
_THREADS = 8
# What has fewer samples is indexed in less time than its index is looked up.
_WORTH_KEEPING = 1000
_LARGEST = 2**32 - 1

# What is read of a sample: some of its files, of which the first gives its id; a value of JSON; and those of
# further columns.
Chosen: TypeAlias = tuple[Sequence[Member], Any, Sequence[Any]]
# It is chosen by the sample's key and its files by suffix; None where nothing is read.
Choose: TypeAlias = Callable[[TarReader, str, Mapping[str, Member]], "Chosen | None"]


# Of a shard: the names one behind the other and where each ends, offsets and lengths of each file, and the
# place of each value among its values, which are in the order of their first samples; these, how many files
# are of no sample, and the further columns.
_Shard: TypeAlias = tuple[Mapping[str, npt.NDArray[Any]], tuple[Sequence[Any], int, Mapping[str, list[Any]]]]


def read_index(
    at: Path,
    paths: Sequence[Path],
    column: str,
    choose: Choose,
    files: int = 1,
    further: FurtherColumns | None = None,
) -> Labelled:
    """Look for the samples of shards: of so many files each, and of a value, which ``column`` names."""
    further = further or FurtherColumns()
    # All that the choice goes by.
    purpose = " ".join((f"{files} of {column}", *map(repr, further.names)))
    caches = [IndexCache(path, purpose) for path in paths]
    shards: list[_Shard] = []
    pool = ThreadPoolExecutor(min(_THREADS, len(paths)), "dualeval-tar")
    with doing(f"looking for the samples in {at}") as looking, pool:
        index = partial(_shard, files=files, choose=choose, further=further.names)
        for shard in pool.map(index, paths, caches):
            shards.append(shard)
            looking.count += len(shard[0]["codes"])
    states = np.array([cache.state for cache in caches], np.int64)
    ends = np.cumsum(states[:, 0])
    names, notes = _names(at, paths, caches, shards)
    pieces = []
    remote = {str(path): path.found for path in paths if isinstance(path, StorePath)}
    for file in range(files):
        offsets = [arrays[f"offsets {file}"] for arrays, _ in shards]
        pieces.append(
            (partial(StorePieces, found=remote) if remote else FilePieces)(
                files=[str(path.absolute()) for path in paths],
                states=states,
                ends=ends,
                places=np.concatenate(
                    [each + first for each, first in zip(offsets, ends - states[:, 0], strict=True)]
                ),
                lengths=np.concatenate([arrays[f"lengths {file}"] for arrays, _ in shards]),
            )
        )
    labels = TableLabels(lambda number: f"{pieces[0].where(number)}, {names.shown(number)}", column, ())
    codes, first, passed_over = [], 0, 0
    for arrays, (values, count, columns) in shards:
        _, firsts = np.unique(arrays["codes"], return_index=True)
        places = [
            labels.place(first + int(number), value) for number, value in zip(firsts, values, strict=True)
        ]
        codes.append(np.array(places, np.int32)[arrays["codes"]])
        further.take(columns)
        first, passed_over = first + len(arrays["codes"]), passed_over + count
    if passed_over:
        notes.append(f"passed over: {counted(passed_over, 'file')} of the shards, which are of no sample")
    return Labelled(
        pieces=pieces[0],
        others=pieces[1:],
        names=names,
        codes=np.concatenate(codes),
        labels=labels,
        notes=notes,
        kept=further.kept(),
    )


def _shard(path: Path, cache: IndexCache, files: int, choose: Choose, further: Sequence[str]) -> _Shard:
    # All ranks of a machine fetch each shard of a store once.
    with cache.alone() if isinstance(path, StorePath) else nullcontext():
        return _indexed(path, cache, files, choose, further)


def _indexed(path: Path, cache: IndexCache, files: int, choose: Choose, further: Sequence[str]) -> _Shard:
    if (kept := cache.load()) is not None:
        return kept
    names, keys, codes, places = FileNames(), FileNames(), array("i"), dict[tuple[type, Any], int]()
    offsets, lengths = [array("q") for _ in range(files)], [array("I") for _ in range(files)]
    columns: dict[str, list[Any]] = {name: [] for name in further}
    passed_over = 0
    with TarReader(path) as reader:
        for key, parts in reader.samples():
            if (chosen := choose(reader, key, parts)) is None:
                passed_over += len(parts)
                continue
            members, value, rest = chosen
            for column, each in zip(columns.values(), rest, strict=True):
                column.append(each)
            codes.append(places.setdefault((type(value), value), len(places)))
            names.append_stored(members[0][0])
            keys.append(key)
            for (name, offset, size), its_offsets, its_lengths in zip(members, offsets, lengths, strict=True):
                if size > _LARGEST:
                    raise reader.refused(name, f"has {size:,} bytes", "No picture is as large: leave it out")
                its_offsets.append(offset)
                its_lengths.append(size)
        passed_over += reader.passed_over
        if (again := keys.repeated()) is not None:
            raise reader.repeated(keys.shown(again))
    stored, ends = names.stored_all()
    arrays: dict[str, npt.NDArray[Any]] = {
        "names": np.frombuffer(stored, np.uint8),
        "ends": ends,
        "codes": np.frombuffer(codes, np.int32),
        **{f"offsets {number}": np.frombuffer(each, np.int64) for number, each in enumerate(offsets)},
        **{f"lengths {number}": np.frombuffer(each, np.uint32) for number, each in enumerate(lengths)},
    }
    values = [value for _, value in places]
    if len(codes) >= _WORTH_KEEPING or isinstance(path, StorePath):
        cache.keep(arrays, [values, passed_over, columns])
    return arrays, (values, passed_over, columns)


def _names(
    at: Path, paths: Sequence[Path], caches: Sequence[IndexCache], shards: Sequence[_Shard]
) -> tuple[FileNames, list[str]]:
    """The ids: the pictures' names; with that of their shard before them where shards share some."""
    names, numbers = FileNames(), np.cumsum([len(arrays["ends"]) for arrays, _ in shards])
    for arrays, _ in shards:
        names.extend(arrays["names"].tobytes(), arrays["ends"])
    _refuse_parts(at, names)
    if (twice := names.repeated()) is None:
        return names, []
    copies, ends = dict[bytes, Path](), Counter(cache.ends for cache in caches)
    for path in (path for path, cache in zip(paths, caches, strict=True) if ends[cache.ends] > 1):
        # Shards of one size may have the same first and last files.
        if (other := copies.setdefault(digest_of_file(path, whole=True), path)) is not path:
            raise UsageError(f"{other} and {path} are the same shard: leave one out.")
    longer = FileNames(
        f"{paths[int(shard)].name}/{names[place]}"
        for place, shard in enumerate(np.searchsorted(numbers, np.arange(len(names)), side="right"))
    )
    if (again := longer.repeated()) is not None:
        raise UsageError(
            f"{longer.shown(again)!r} is the id of two pictures, of shards of one name in different folders, "
            f"such as {paths[int(np.searchsorted(numbers, again, side='right'))]}: rename one of them."
        )
    return longer, [f"shards share names, such as {names.shown(twice)}: ids begin with the shard's name"]


def _refuse_parts(at: Path, names: FileNames) -> None:
    """Refuse shards that begin in one part of a data set and end in another one, as a packed tree does."""
    if not len(names):
        return
    first, last = (names[place].split("/")[:-1] for place in (0, len(names) - 1))
    one, other = next((pair for pair in zip(first, last, strict=False) if pair[0] != pair[1]), ("", ""))
    if one.lower() in PARTS and other.lower() in PARTS:
        raise UsageError(
            f"--data {at} begins with {names.shown(0)} and ends with {names.shown(len(names) - 1)}: {one} "
            f"and {other} are parts of a data set. Pack the one to evaluate by itself: tar --sort=name -cf "
            f"{other}.tar {other}"
        )
