"""Samples: anything with a length and samples by index, as the engine reads it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, SubsetRandomSampler, TensorDataset

from dualeval.engine.identity.hasher import Hasher, SampleHasher
from dualeval.engine.identity.plain import attributes_of, module_name
from dualeval.errors import UsageError
from dualeval.messages import written
from dualeval.tasks import Dataset, Task

if TYPE_CHECKING:
    from dualeval.columns.of_data import KeptColumns

# A column's name, the samples' ids, or a function that returns the id for an index.
Ids: TypeAlias = str | Sequence[str] | Callable[[int], str] | None

# Types whose contents are in memory.
_IN_MEMORY = (Tensor, np.ndarray, list, tuple, range, TensorDataset)
_ARRAYS = (Tensor, np.ndarray)
_ROWS_AT_ONCE = 1 << 14
_WANTED = "expected a tensor (a row per sample), a list or a map-style data set, with __len__ and __getitem__"


def wrap(dataset: Any, *, ids: Ids = None, fingerprint: str | None = None) -> Samples:
    """Give ids and a fingerprint to a data set that has none.

    Args:
        dataset: a map-style data set of torch, a list, a tensor or array (a row a sample), or a
            ``datasets.Dataset`` of Hugging Face.
        ids: each sample's id: the name of a column, one text a sample, or a function of the index. None: the
            index.
        fingerprint: a text that identifies these samples, if there is one; a revision, for example. None: a
            hash of the contents, as far as they are tensors, arrays, texts and numbers. A change of other
            contents shows in the batches that a resumed run evaluates again.

    Raises:
        UsageError: it has no length or no samples by index, or ``ids`` do not fit it.
    """
    check_samples(dataset)
    kind = HuggingFaceSamples if _is_hugging_face(dataset) else Samples
    return kind(dataset, ids=ids, fingerprint=fingerprint)


def as_dataset(data: Any) -> Dataset:
    """A task's data set, with ids and a fingerprint."""
    if not all(callable(getattr(data, name, None)) for name in ("id", "fingerprint")):
        return wrap(data)
    if hasattr(data, "__getitems__"):
        dataset: Dataset = data
        return dataset
    check_samples(data)
    return OneByOne(data)


def check_samples(data: Any) -> None:
    """Check that something has a length, and samples by index."""
    if isinstance(data, DataLoader) and not _is_stream(data.dataset):
        # Torch's other samplers draw from the whole set, or divide it.
        is_of_torch = type(data.sampler).__module__.startswith("torch.")
        is_part = isinstance(data.sampler, SubsetRandomSampler) or not is_of_torch
        some = "Subset(loader.dataset, sorted(loader.sampler))" if is_part else "loader.dataset"
        hint = f". Give the loader's data set ({some}), and batch_size beside it"
    elif isinstance(data, Mapping):
        hint = f". Give one part of it: data[{next(iter(data), 'test')!r}]"
    elif _is_stream(of := data.dataset if isinstance(data, DataLoader) else data):
        hint = _of_stream(of)
    elif isinstance(data, tuple) and len(data) > 1 and all(isinstance(part, _ARRAYS) for part in data):
        hint = ". Inputs and targets go together as torch.utils.data.TensorDataset(inputs, targets)"
    elif isinstance(data, str | bytes | PurePath):
        hint = ". Read the file first, or write a data set whose __getitem__ reads one sample of it"
    elif type(data).__module__.partition(".")[0] == "pandas" and hasattr(data, "columns"):
        hint = '. Give its rows: data.to_dict("records")'
    elif hasattr(data, "__next__"):
        hint = ". Make a list of it, as list(data)"
    elif callable(data) and not hasattr(data, "__getitem__"):
        hint = ". Call it, and give what it returns"
    else:
        hint = ""
    if hint or not (_has_length(data) and hasattr(data, "__getitem__")):
        kind = "None" if data is None else f"a {type(data).__name__}"
        raise UsageError(f"the data is {kind}, which has no length or no samples by index: {_WANTED}{hint}")


def _is_stream(data: Any) -> bool:
    """Whether samples can only be read one after the other, each time from the first one on."""
    iterates = (
        hasattr(data, "__iter__") and not hasattr(data, "__getitem__") and not hasattr(data, "__next__")
    )
    return isinstance(data, IterableDataset) or iterates


def _of_stream(data: Any) -> str:
    """What to do with samples that can only be read one after the other: not divided, and not resumed."""
    library = type(data).__module__.partition(".")[0]
    if library == "webdataset":
        of_library = (
            "dualeval run reads the shards by itself, with --data 'val-{000..063}.tar' (docs/data.md). In "
            "Python "
        )
    elif library == "datasets":
        of_library = "Load it without streaming=True. Or "
    else:
        of_library = "Samples in a stream cannot be divided among processes or resumed. "
    return (
        f". {of_library}keep its samples, data=list(data); index its file in a data set whose __getitem__ "
        "reads one sample; or loop over the samples' ids yourself, session.batches(ids) "
        "(docs/your-own.md#a-stream)"
    ).replace(". keep", ". Keep")


class Samples:
    """A data set as the engine reads it; see ``wrap``."""

    def __init__(self, data: Any, *, ids: Ids = None, fingerprint: str | None = None) -> None:
        self._data = self.wrapped = data  # its class is part of the job's identity
        self._ids = ids
        self._given = fingerprint
        self.in_memory = isinstance(data, _IN_MEMORY) and not isinstance(data, np.memmap)
        self.is_hashed = fingerprint is not None or self.in_memory
        self.reads_for_ids = isinstance(ids, str) and not self.in_memory
        self.unique_ids = ids is None  # they are the indices then
        self.kind = type(data).__name__
        if callable(getattr(data, "columns", None)):
            self.columns = data.columns
        if isinstance(ids, Sequence) and not isinstance(ids, str) and len(ids) != len(data):
            raise UsageError(f"ids has {len(ids)} entries for {len(data)} samples: expected one each")

    def __len__(self) -> int:
        return len(self._data)

    def id(self, index: int) -> str:
        if self._ids is None:
            return str(index)
        if isinstance(self._ids, str):
            return written(self._of_column(index, self._ids))
        return written(self._ids(index) if callable(self._ids) else self._ids[index])

    def ids_in(self, samples: range) -> Sequence[str]:
        """The ids of consecutive samples."""
        return [self.id(index) for index in samples]

    def _of_column(self, index: int, name: str) -> Any:
        """One value of a sample that is a dict; the whole sample is read for it."""
        sample = self._data[index]
        if not isinstance(sample, Mapping) or name not in sample:
            has = (
                f"has the columns {', '.join(map(str, sample))}"
                if isinstance(sample, Mapping)
                else (f"is a {type(sample).__name__}")
            )
            raise UsageError(f"ids={name!r} names a column, and sample {index} {has}")
        return sample[name]

    def __getitem__(self, index: int) -> Any:
        return self._data[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        many = getattr(self._data, "__getitems__", None)
        if many is not None:
            return list(many(list(indices)))
        return [self._data[index] for index in indices]

    def stacker(self, task: Task) -> Callable[[range], list[Tensor]] | None:
        """A function that collates consecutive samples as the task does; None if they are not rows of
        tensors, or if the task does not collate like torch's ``default_collate``.

        It copies, as a collate does: a forward that writes into its input leaves the caller's tensors alone,
        and the copy's alignment does not change a kernel's last bits.
        """
        data: Any = self._data
        places: Any = None
        if type(data) is Subset and isinstance(data.indices, list | range | np.ndarray | Tensor):
            data, places = data.dataset, data.indices
        if type(data) is not TensorDataset or not task._collates_as_torch():
            return None
        tensors = data.tensors
        if any(type(one) is not Tensor or one.layout is not torch.strided for one in tensors):
            return None
        if any(one.requires_grad for one in tensors):
            return None

        def stacked(samples: range) -> list[Tensor]:
            if places is None:
                part = slice(samples.start, samples.stop)
                return [one[part].clone(memory_format=torch.contiguous_format) for one in tensors]
            rows = torch.as_tensor(places[samples.start : samples.stop])
            return [one[rows].contiguous() for one in tensors]

        return stacked

    def fingerprint(self, count: int) -> str:
        contents = self._contents() if self._given is None else self._given
        text = f"{module_name(type(self._data).__module__)}.{self.kind} {len(self)} {count} {contents}"
        return hashlib.sha256(text.encode()).hexdigest()

    def _contents(self) -> str:
        """A hash of the contents in memory; for any other object, of its public attributes."""
        if self.in_memory:
            data = self._data.tensors if isinstance(self._data, TensorDataset) else self._data
            return SampleHasher().digest(data).hex()
        # Dicts and private attributes may be caches that fill during reading; a mapped file may be large.
        attributes = {
            name: value
            for name, value in attributes_of(self._data).items()
            if not name.startswith("_") and not isinstance(value, (dict, np.memmap))
        }
        return Hasher().attributes(attributes).hex()


class HuggingFaceSamples(Samples):
    """A ``datasets.Dataset`` of Hugging Face; its contents are hashed as they are stored, undecoded."""

    kept: KeptColumns | None = None

    def __init__(self, data: Any, *, ids: Ids = None, fingerprint: str | None = None) -> None:
        super().__init__(data, ids=ids, fingerprint=fingerprint)
        self.is_hashed, self.reads_for_ids = True, False
        self._stored = data.with_format("arrow")
        self._id_column: Any = None
        if isinstance(ids, str):
            if ids not in data.column_names:
                raise UsageError(f"ids={ids!r}: the data set has the columns {', '.join(data.column_names)}")
            self._id_column = data.with_format(None).select_columns([ids])

    def ids_in(self, samples: range) -> Sequence[str]:
        if not isinstance(self._ids, str):
            return super().ids_in(samples)
        # All at once: reading them one by one takes a hundred times as long.
        return [*map(written, self._id_column[samples.start : samples.stop][self._ids])]

    def _of_column(self, index: int, name: str) -> Any:
        return self._id_column[index][name]

    def columns(self, indices: Sequence[int]) -> dict[str, Any]:
        """The columns that are kept, of some samples; as of ``Dataset``."""
        return {} if self.kept is None else self.kept.of(indices)

    def read_columns(self, names: Sequence[str]) -> None:
        """Read the columns that are kept for the rows of a run, by the rules of ``FurtherColumns``."""
        from dualeval.columns.of_data import FurtherColumns

        schema = self._stored.features.arrow_schema
        unfit = {each.name: f"it holds {each.type}" for each in schema if not _is_plain(str(each.type))}
        further = FurtherColumns(schema.names, (), names, unfit=unfit)
        if further.names:
            stored = self._stored.select_columns(list(further.names))
            for first in range(0, len(self), _ROWS_AT_ONCE):
                further.take(stored[first : first + _ROWS_AT_ONCE].to_pydict())
        self.kept = further.kept()

    def fingerprint(self, count: int) -> str:
        contents = self._given
        if contents is None:
            # Stored values are left to content_fingerprint, for which the ranks of a node share the reading.
            contents = Hasher().digest([str(self._data.features), self._data.format]).hex()
        return hashlib.sha256(f"{len(self)} {count} {contents}".encode()).hexdigest()

    def content_fingerprint(self, samples: range) -> str:
        """sha256, in hex, over the stored values of consecutive samples."""
        if self._given is not None:
            return self._given
        columns = self._stored[samples.start : samples.stop].to_pydict()
        stored = [_stored(columns[name]) for name in sorted(columns)]
        return SampleHasher().digest([sorted(columns), stored]).hex()


class OneByOne(Samples):
    """A data set with its own ids and fingerprint, whose samples are read one by one."""

    def __init__(self, data: Any) -> None:
        super().__init__(data, ids=data.id)
        for name in ("content_fingerprint", "placeholder"):
            if hasattr(data, name):
                setattr(self, name, getattr(data, name))

    def fingerprint(self, count: int) -> str:
        return str(self._data.fingerprint(count))


def _stored(value: Any) -> Any:
    """A stored value; for a picture or sound in its own file, only the file's name."""
    if isinstance(value, list):
        return [_stored(part) for part in value]
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        return value["bytes"] if value["bytes"] is not None else PurePath(value["path"] or "").name
    return value


def _is_plain(arrow_type: str) -> bool:
    """Whether a column of an Arrow type holds a text, a number, a bool or a time."""
    return not arrow_type.startswith(
        ("struct", "list", "large_list", "fixed_size", "map", "extension", "bin")
    )


def _is_hugging_face(data: Any) -> bool:
    return type(data).__module__.partition(".")[0] == "datasets" and hasattr(data, "with_format")


def _has_length(data: Any) -> bool:
    try:
        return len(data) >= 0
    except TypeError:
        # No length, or none in this case, as for a tensor without dimensions.
        return False
