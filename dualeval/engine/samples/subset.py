"""Parts of a data set: its first samples, or samples that are drawn by their ids; and the digest of all ids.

Drawn samples keep their indices in the whole data set, and a task sees only these indices.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dualeval.columns.late import KEEPING_LATE, LateColumns
from dualeval.columns.ragged import NumpyRows, Ragged, concatenated, host_columns
from dualeval.engine.samples.samples import Samples
from dualeval.engine.values.options import RunOptions
from dualeval.engine.values.plan import EvalPlan
from dualeval.errors import ExactlyOnceError, UsageError
from dualeval.result import ALL_SAMPLES, DRAWN_SAMPLES, FIRST_SAMPLES, described_part, sha256_of_json
from dualeval.tasks import Dataset, Task
from dualeval.world import World

# Ids hashed between two reports of progress: a fifth of a second.
_IDS_AT_ONCE = 1 << 17
_KEY_BYTES = 8
# In which ids are hashed, and how many samples at least are in each.
_MOST_BLOCKS, _LEAST_BLOCK = 1024, 64


def draw(
    dataset: Dataset, count: int, seed: int, step: Callable[[], None] = lambda: None
) -> npt.NDArray[np.int64]:
    """Draw the samples with the smallest sha256 of seed and id: the same on every machine.

    Each set of ``count`` ids is equally likely over the seeds, and a larger count keeps the samples of a
    smaller one. Samples of one id come in data-set order.
    """
    before = f"{seed}\0".encode()
    keys = []
    for first in range(0, len(dataset), _IDS_AT_ONCE):
        names = ids_of(dataset, range(first, min(first + _IDS_AT_ONCE, len(dataset))))
        digests = [_digest(before, name)[:_KEY_BYTES] for name in names]
        keys.append(np.frombuffer(b"".join(digests), dtype=">u8"))
        step()
    all_keys = np.concatenate(keys)
    bound = np.partition(all_keys, count - 1)[count - 1]
    below = np.flatnonzero(all_keys < bound)
    # Almost always one sample; if there are several, the rest of their digests decides.
    at_bound = np.flatnonzero(all_keys == bound).tolist()
    at_bound.sort(key=lambda index: (_digest(before, dataset.id(index)), index))
    chosen = [below, np.array(at_bound[: count - len(below)], np.int64)]
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def ids_of(dataset: Dataset, samples: range) -> Sequence[str]:
    """The ids of consecutive samples, by their positions."""
    if isinstance(dataset, Samples):
        return dataset.ids_in(samples)
    return [dataset.id(index) for index in samples]


def _digest(before: bytes, name: str) -> bytes:
    return hashlib.sha256(before + name.encode("utf-8", "surrogatepass")).digest()


class DrawnSamples(Samples):
    """Some samples of a data set, in its order, at positions from 0.

    If the data set has a method ``select(indices)``, which returns a data set of only these samples, no
    others are read and hashed.
    """

    def __init__(self, whole: Dataset, indices: npt.NDArray[np.int64], seed: int) -> None:
        super().__init__(whole)
        self.whole, self.indices, self.seed = whole, indices, seed
        select = getattr(whole, "select", None)
        # The wrapper of data sets without ids has no ``select``.
        self._selected: Any = self._checked(select(indices.tolist())) if callable(select) else None
        # The user's data set, whose class decides the numbers.
        self.wrapped = getattr(whole, "wrapped", whole)
        self.in_memory = bool(getattr(whole, "in_memory", False))
        self.is_hashed = bool(getattr(whole, "is_hashed", True))
        self.unique_ids = False
        self.kind = str(getattr(whole, "kind", type(whole).__name__))
        for name in ("content_fingerprint", "placeholder", "columns"):
            if hasattr(whole, name):
                setattr(self, name, getattr(self, f"_{name}"))

    def _checked(self, selected: Any) -> Any:
        """Check the result of the data set's ``select``: a method of this name may mean something else."""
        names = ("__len__", "id", "fingerprint", "__getitems__")
        if all(callable(getattr(selected, name, None)) for name in names):
            ids = [selected.id(place) for place in range(len(selected))]
            if ids == self.ids_in(range(len(self))):
                return selected
        raise UsageError(
            f"{type(self.whole).__name__}.select(indices) returned a {type(selected).__name__}, expected a "
            f"data set ({', '.join(names)}) of only the {len(self):,} drawn samples, in their order. Mend "
            "it, or give it another name: the samples are read without it, too."
        )

    def __len__(self) -> int:
        return len(self.indices)

    def id(self, index: int) -> str:
        return self.whole.id(int(self.indices[index]))

    def ids_in(self, samples: range) -> Sequence[str]:
        return [self.id(index) for index in samples]

    def __getitem__(self, index: int) -> Any:
        return self._data[int(self.indices[index])]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        if self._selected is not None:
            return self._selected.__getitems__(indices)
        return self.whole.__getitems__(self.indices[np.asarray(indices, np.int64)].tolist())

    def runs(self, places: range) -> Iterator[tuple[slice, range]]:
        """Split positions into runs of consecutive samples: each run's slice of them, and its indices."""
        indices = self.indices[places.start : places.stop]
        ends = [*(np.flatnonzero(np.diff(indices) != 1) + 1).tolist(), len(indices)]
        start = 0
        for stop in ends:
            first = int(indices[start])
            yield slice(start, stop), range(first, first + stop - start)
            start = stop

    def fingerprint(self, count: int) -> str:
        of_samples = (
            self.whole.fingerprint(len(self.whole))
            if self._selected is None
            else self._selected.fingerprint(count)
        )
        content = f"{len(self.whole)} {count} {of_samples}\n".encode()
        return hashlib.sha256(content + self.indices[:count].astype("<i8").tobytes()).hexdigest()

    def _content_fingerprint(self, samples: range) -> str:
        """A hash of the contents of the samples at consecutive positions."""
        if self._selected is not None:
            return str(self._selected.content_fingerprint(samples))
        read: Any = self.whole
        digest = hashlib.sha256()
        for _, indices in self.runs(samples):
            digest.update(f"{read.content_fingerprint(indices)}\n".encode())
        return digest.hexdigest()

    def _columns(self, indices: Sequence[int]) -> Any:
        """The user's own columns for the samples at some positions."""
        if hasattr(self._selected, "columns"):
            return self._selected.columns(indices)
        read: Any = self.whole
        return read.columns(self.indices[np.asarray(indices, np.int64)].tolist())

    def _placeholder(self, index: int) -> Any:
        whole: Any = self.whole
        return whole.placeholder(int(self.indices[index]))


def drawn(
    dataset: Dataset,
    options: RunOptions,
    note: Callable[[str], None],
    step: Callable[[], None] = lambda: None,
) -> Dataset:
    """The samples drawn as the options ask, or the data set as it is."""
    if options.sample is None:
        return dataset
    if options.sample >= len(dataset):
        note(f"all {len(dataset):,} samples of the data set are evaluated: {options.sample:,} were asked for")
        return dataset
    seed = options.seed or 0
    return DrawnSamples(dataset, draw(dataset, options.sample, seed, step), seed)


def identity_of(dataset: Dataset) -> dict[str, Any]:
    """The part of a job's identity that describes drawn samples; empty if none were drawn."""
    if not isinstance(dataset, DrawnSamples):
        return {}
    return {"sample": {"seed": dataset.seed, "of": len(dataset.whole)}}


def index_of(dataset: Dataset, place: int) -> int:
    """The index in the whole data set of the sample at a position."""
    return int(dataset.indices[place]) if isinstance(dataset, DrawnSamples) else place


def name_of(dataset: Dataset, place: int) -> str:
    """A sample's id and its index in the whole data set, for messages."""
    return f"{dataset.id(place)} (index {index_of(dataset, place)})"


def indices_of(dataset: Dataset, start: int, stop: int) -> npt.NDArray[np.int64]:
    """Like ``index_of``, for consecutive positions."""
    if isinstance(dataset, DrawnSamples):
        return dataset.indices[start:stop]
    return np.arange(start, stop, dtype=np.int64)


# -- what a result says of its part --------------------------------------------------------------------


def part_of(dataset: Dataset, plan: EvalPlan) -> dict[str, Any]:
    """Which part of the data set is evaluated, for the result."""
    whole = dataset.whole if isinstance(dataset, DrawnSamples) else dataset
    part: dict[str, Any] = {"kind": ALL_SAMPLES, "samples": plan.num_samples, "of": len(whole)}
    if plan.num_samples == len(whole):
        return part
    part["kind"] = FIRST_SAMPLES
    if isinstance(dataset, DrawnSamples):
        part |= {"kind": DRAWN_SAMPLES, "seed": dataset.seed}
    targets = _targets(whole)
    if targets is not None:
        of_part = targets[indices_of(dataset, 0, plan.num_samples)]
        part |= {"classes": len(np.unique(of_part)), "of_classes": len(np.unique(targets))}
    return part


def _targets(dataset: Dataset) -> npt.NDArray[Any] | None:
    """Each sample's class if the data set has them without reading, as ``targets`` (torchvision's name)."""
    try:
        targets = getattr(dataset, "targets", None)
        classes = np.asarray(
            getattr(getattr(dataset, "wrapped", None), "targets", None) if targets is None else targets
        )
    except Exception:  # noqa: BLE001 - the user's property; a finished run is not lost for a count of classes
        return None
    return classes if classes.dtype.kind in "iu" and classes.shape == (len(dataset),) else None


def warnings_of(part: Mapping[str, Any]) -> list[str]:
    """Warnings about numbers of this part."""
    if part["kind"] != FIRST_SAMPLES:
        return []
    return [
        f"{described_part(part)}: the first samples are not a random sample, so the intervals say "
        f"nothing about the others. --sample {part['samples']} draws a random one."
    ]


def whole_set_intervals(
    part: Mapping[str, Any], evaluated: int, fields: Mapping[str, Any]
) -> dict[str, tuple[float, float]]:
    """95 % intervals for the values that the whole data set would give; only for drawn samples.

    The finite-population correction: both sides of an interval times sqrt(1 - n / N) (W. G. Cochran,
    "Sampling Techniques", 3rd ed. 1977, section 2.6). Samples are drawn one by one, so clusters, such as the
    questions on one text, play no role in this draw.
    """
    if part.get("kind") != DRAWN_SAMPLES:
        return {}
    factor = math.sqrt(max(0.0, 1.0 - evaluated / part["of"]))
    intervals = {**fields["intervals"], **fields.get("naive_intervals", {})}
    metrics = fields["metrics"]
    return {
        name: (value - (value - low) * factor, value + (high - value) * factor)
        for name, (low, high) in intervals.items()
        if isinstance(value := metrics.get(name), (int, float))
    }


# -- what a task is told of drawn samples --------------------------------------------------------------


def postprocessed(
    task: Task, dataset: Dataset, columns: Mapping[str, Any], samples: range
) -> Mapping[str, Any]:
    """The task's ``postprocess`` of a batch, as columns of the host.

    For drawn samples it is called once per run of consecutive samples, with indices in the whole data set.
    """
    method = getattr(task.postprocess, "__func__", None)
    if isinstance(columns, LateColumns):
        if method is Task.postprocess:
            return columns
        if not isinstance(dataset, DrawnSamples) and method in KEEPING_LATE:
            return task.postprocess(columns, samples)
        columns = dict(columns)
    if method is Task.postprocess or not isinstance(dataset, DrawnSamples):
        whole: Mapping[str, Any] = host_columns(task.postprocess(columns, samples), samples)
        return whole
    pieces: list[Mapping[str, Any]] = []
    for places, indices in dataset.runs(samples):
        piece = {name: column[places] for name, column in columns.items()}
        made = host_columns(task.postprocess(piece, indices), indices)
        _check_part(made, pieces[0] if pieces else made, indices)
        pieces.append(made)
    return {name: concatenated([each[name] for each in pieces]) for name in pieces[0]}


def _check_part(made: Any, first: Mapping[str, Any], indices: range) -> None:
    """Check each part by itself: in the sum, extra rows of one part would hide missing rows of another."""
    where = f"samples {indices.start} to {indices.stop - 1}"
    if not isinstance(made, Mapping) or made.keys() != first.keys():
        raise UsageError(
            f"postprocess gave the columns {', '.join(made)} for {where}, and {', '.join(first)} for others "
            "of their batch: give the same columns for all samples"
        )
    for name, column in made.items():
        has_rows = isinstance(column, Ragged) or (isinstance(column, Tensor) and column.ndim > 0)
        rows = len(column) if has_rows else "no"
        if rows != len(indices):
            raise ExactlyOnceError(
                f"postprocess gave {rows} rows of the column {name!r} for {where}, expected {len(indices)}: "
                "one row per sample, in order"
            )


def texts_of(
    task: Task, dataset: Dataset, rows: Mapping[str, NumpyRows], first: int
) -> Mapping[str, Sequence[str | None]]:
    """The task's ``texts`` of consecutive rows; for drawn samples run by run, like ``postprocessed``."""
    if not isinstance(dataset, DrawnSamples) or type(task).texts is Task.texts:
        return task.texts(rows, first)
    count = len(next(iter(rows.values())))
    joined: dict[str, list[str | None]] = {}
    for places, indices in dataset.runs(range(first, first + count)):
        part = {name: column[places] for name, column in rows.items()}
        for name, texts in task.texts(part, indices.start).items():
            joined.setdefault(name, []).extend(texts)
    return joined


def findings_of(task: Task, dataset: Dataset, count: int) -> dict[str, list[str]]:
    """The task's ``findings`` about the first ``count`` samples, or about those that were drawn."""
    if not isinstance(dataset, DrawnSamples):
        return {kind: list(names) for kind, names in task.findings(count).items()}
    of_whole = {kind: list(names) for kind, names in task.findings(len(dataset.whole)).items()}
    if not any(of_whole.values()):
        return of_whole
    ids = set(dataset.ids_in(range(count)))
    return {kind: [name for name in names if name in ids] for kind, names in of_whole.items()}


# -- ids: one digest of all, and those that are there twice --------------------------------------------


def hashes_of_ids(
    dataset: Dataset, samples: int, world: World, step: Callable[[], None]
) -> tuple[list[str], npt.NDArray[np.uint64]]:
    """The hashes of this rank's blocks of ids, and of its single ids; none if ids cost reading samples."""
    of_blocks, single = list[str](), [np.empty(0, np.uint64)]
    blocks = [] if getattr(dataset, "reads_for_ids", False) else blocks_of(samples)
    for block in blocks[world.rank :: world.size]:
        ids = [*map(str, ids_of(dataset, block))]
        of_blocks.append(sha256_of_json(ids))
        if not getattr(dataset, "unique_ids", False):
            single.append(hashed(ids))
        step()
    return of_blocks, np.concatenate(single)


def hashed(ids: Sequence[str]) -> npt.NDArray[np.uint64]:
    """8 bytes of each id's hash: more would not fit in memory for 10**8 ids."""
    return np.fromiter(map(_hash, ids), np.uint64, len(ids))


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def repeated(hashes: npt.NDArray[np.uint64], ids: Iterator[str]) -> dict[str, int]:
    """The ids that occur more than once, with their counts; ``ids`` is read only if two hashes are equal."""
    ordered = np.sort(hashes)
    suspect = frozenset(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    counts = Counter(name for name in ids if _hash(name) in suspect) if suspect else {}
    # Two different ids may have the same hash.
    return {name: count for name, count in counts.items() if count > 1}


def joined(samples: int, ranks: Sequence[list[str]]) -> str | None:
    """The digest of all ids, from the blocks' hashes that ``hashes_of_ids`` returned on every rank."""
    if not any(ranks):
        return None
    blocks = range(len(blocks_of(samples)))
    return sha256_of_json([samples, *(ranks[block % len(ranks)][block // len(ranks)] for block in blocks)])


def digest_of(samples: int, ids: Iterable[str]) -> str | None:
    """The same digest as ``joined``, from all ids in order."""
    names = iter(ids)
    return joined(samples, [[sha256_of_json([*islice(names, len(block))]) for block in blocks_of(samples)]])


def blocks_of(samples: int) -> list[range]:
    """Blocks of consecutive samples to hash together; the number of samples alone decides them."""
    size = max(_LEAST_BLOCK, -(-samples // _MOST_BLOCKS))
    return [range(first, min(first + size, samples)) for first in range(0, samples, size)]
