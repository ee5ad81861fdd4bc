"""Which files a value of ``--data`` names: one, a folder's, or those of a pattern in braces."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dualeval.data.set_names import PARTS
from dualeval.data.stores.path import path_at
from dualeval.errors import UsageError
from dualeval.messages import counted, first_of
from dualeval.urls import url_of

_RANGE = re.compile(r"\{(?:([0-9]+)\.\.([0-9]+)|([^{}]*,[^{}]*))\}", re.ASCII)
_MOST = 10**6
# A file system behind a network, or a store, answers many questions at a time.
_THREADS = 16
_WORD, _NUMBER = re.compile(r"[a-z]+"), re.compile(r"(?<=[-_.])[0-9]+")


def shards_at(data: Path, is_shard: Callable[[str], bool], example: str) -> list[Path]:
    """The shards at a path, those of a folder by name, or those of a pattern {000..063} in its order."""
    names = list(itertools.islice(_expanded(str(data)), _MOST))
    # Without the right to list, a store refuses to say that nothing has a pattern's own name.
    is_pattern = url_of(data) is not None and names != [str(data)]
    if not is_pattern and data.is_dir():
        paths = sorted(each for each in data.glob("[!.]*") if is_shard(each.name))
        _refuse_parts(data, paths)
        return paths
    if not is_pattern and data.exists():
        return [data]
    paths = [path_at(name) for name in names]
    with ThreadPoolExecutor(_THREADS, "dualeval-shards") as pool:
        there = [*pool.map(lambda path: path.is_file(), paths)]
    missing = [path for path, is_there in zip(paths, there, strict=True) if not is_there]
    if len(missing) == len(paths):
        which = "does not exist" if paths == [data] else f"names {len(paths):,} files, and none exists"
        raise UsageError(
            f"--data {data} {which}; the first was looked for at {paths[0]}. Give a file, a folder of them, "
            f"or a range in quotation marks: --data '{example}'"
        )
    if missing:
        raise UsageError(
            f"--data {data}: {len(missing):,} of {counted(len(paths), 'shard')} are missing: "
            f"{first_of(missing, 3)}. Give the range that is there, or fetch the others."
        )
    return paths


def _refuse_parts(folder: Path, paths: list[Path]) -> None:
    """Refuse a folder that holds a data set's training files beside those to evaluate."""
    of_parts: dict[str, list[Path]] = {}
    for path in paths:
        words = _WORD.findall(path.name.lower())
        # All of them: test-dev is another part than test.
        of_parts.setdefault("-".join(word for word in words if word in PARTS), []).append(path)
    named = sorted(of_parts.keys() - {""})
    if len(named) > 1:
        last = of_parts[max(named, key=lambda name: PARTS.index(name.rpartition("-")[2]))][-1]
        pattern = _NUMBER.sub(lambda match: f"{{{'0' * len(match[0])}..{match[0]}}}", last.name, count=1)
        raise UsageError(
            f"data folder {folder} holds shards of several parts of a data set: "
            f"{' and '.join(f'{len(of_parts[name]):,} of {name}' for name in named)}. Give those of one: "
            f"--data '{folder / pattern}'"
        )


def _expanded(pattern: str) -> Iterator[str]:
    """The names that a pattern of ranges {000..063} and lists {a,b} stands for, in its order."""
    if (match := _RANGE.search(pattern)) is None:
        yield pattern
        return
    first, last, listed = match.groups()
    if listed is None:
        width = max(len(first), len(last)) if "0" in (first[0], last[0]) else 0
        step = 1 if int(first) <= int(last) else -1
        parts: Iterator[str] = (f"{each:0{width}}" for each in range(int(first), int(last) + step, step))
    else:
        parts = iter(listed.split(","))
    for part in parts:
        yield from _expanded(pattern[: match.start()] + part + pattern[match.end() :])
