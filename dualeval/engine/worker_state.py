"""What a reading process gets where it does not inherit its parent's memory.

Python starts such processes with spawn or forkserver (by itself on macOS and Windows, and on Linux from 3.14
on) and sends them what they need: the data set, and the task for its ``collate``. A task often keeps its
model, which would go with it: copied, or as a share in a GPU's memory, which costs each process a context of
its own. So device state stays here, and so does what cannot be sent as long as ``collate`` does without it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

from torch import Tensor, nn

from dualeval.engine.nests import name_of_type
from dualeval.errors import UsageError
from dualeval.tasks import Dataset, Task

_IN_THIS_PROCESS = "or read in the process that computes: --workers 0"


class LeftOut:
    """Stands, in a reading process, for what has stayed in its parent; whoever uses it is told so."""

    def __init__(self, what: str, why: str) -> None:
        self._what = what
        self._why = why

    def __reduce__(self) -> tuple[type[LeftOut], tuple[str, str]]:
        return LeftOut, (self._what, self._why)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            # Python and its libraries ask every object for these, and take their absence for an answer.
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *arguments: object, **options: object) -> NoReturn:
        raise UsageError(
            f"a reading process uses {self._what}, which {self._why} and so has stayed in the process that "
            "started it. Let collate and the data set do without it (a copy of what they need, made in the "
            f"task's constructor, is sent along), {_IN_THIS_PROCESS}."
        )

    __call__ = __iter__ = __len__ = __bool__ = __contains__ = __getitem__ = __setitem__ = _refuse
    __enter__ = __exit__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = (
        _refuse
    )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        for argument in [*arguments, *(options or {}).values()]:
            if isinstance(argument, LeftOut):
                argument._refuse()
        raise TypeError(f"{function} was given what has stayed in another process")


def pack(reader: object, dataset: Dataset, task: Task, model: nn.Module | None) -> bytes:
    """Pickle what reads, without device state."""
    left_out = _parts_of(model)
    missing: dict[str, LeftOut] = {}
    try:
        _try_to_pickle(reader, left_out)
    except Exception:  # noqa: BLE001 - whatever cannot be pickled; next: what
        missing = _unpicklable(task, left_out)
    try:
        _try_to_pickle(dataset, left_out, task, missing)
    except Exception as error:
        names = _unpicklable(dataset, left_out)
        parts = f" (its attribute {', '.join(names)})" if names else ""
        raise UsageError(
            f"the data set {type(dataset).__name__}{parts} cannot be sent to the reading processes: "
            f"{_said(error)}. Python starts them anew on this system, and so what they get has to be "
            "picklable. Define classes and functions at the top of a module, open files and connections "
            f"in __getitems__ where they are not open yet, {_IN_THIS_PROCESS}."
        ) from error
    try:
        # Once alone: each time, every tensor's memory is handed to the process that is being started.
        return _pickled(_Pickler, reader, left_out, task, missing)
    except Exception as error:
        raise UsageError(
            f"the task {type(task).__name__} cannot be sent to the reading processes, which call its "
            f"collate: {_said(error)}. Python starts them anew on this system, and so what they get has "
            "to be picklable. Define the task's class at the top of a module that can be imported, "
            f"{_IN_THIS_PROCESS}."
        ) from error


def unpack(packed: bytes) -> Any:
    """What ``pack`` was given, in another process."""
    try:
        return pickle.loads(packed)  # noqa: S301 - from this program itself
    except (AttributeError, ImportError) as error:
        raise UsageError(
            f"a reading process cannot find what the task or its data set is made of: {_said(error)}. Define "
            f"it in a module that can be imported, {_IN_THIS_PROCESS}."
        ) from error


def _parts_of(model: nn.Module | None) -> dict[int, LeftOut]:
    """The model, its modules and its tensors, by identity."""
    if model is None:
        return {}
    part = LeftOut("a part of the model", "belongs to the device")
    parts = [*model.modules(), *model.parameters(), *model.buffers()]
    return {**{id(own): part for own in parts}, id(model): LeftOut("the model", "belongs to the device")}


def _unpicklable(owner: object, left_out: Mapping[int, LeftOut]) -> dict[str, LeftOut]:
    """The attributes of a task or data set that cannot be pickled, by name."""
    # An attribute may hold its owner, whose other attributes are not what is asked about.
    others = {**left_out, id(owner): LeftOut("", "")}
    found = {}
    for name, value in getattr(owner, "__dict__", {}).items():
        try:
            _try_to_pickle(value, others)
        except Exception as error:  # noqa: BLE001 - that is the answer
            why = f"cannot be pickled ({_said(error)})"
            found[name] = LeftOut(f"{type(owner).__name__}.{name}", why)
    return found


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _try_to_pickle(
    value: object,
    left_out: Mapping[int, LeftOut],
    task: Task | None = None,
    missing: Mapping[str, LeftOut] | None = None,
) -> None:
    """Raise what stands in the way of pickling, without sharing any tensor's memory."""
    _pickled(_Trial, value, left_out, task, missing)


def _pickled(
    kind: type[_Pickler],
    value: object,
    left_out: Mapping[int, LeftOut],
    task: Task | None = None,
    missing: Mapping[str, LeftOut] | None = None,
) -> bytes:
    file = io.BytesIO()
    kind(file, left_out, task, missing or {}).dump(value)
    return file.getvalue()


class _Pickler(ForkingPickler):
    """Pickles for another process of this program: PyTorch shares the memory of tensors with it."""

    def __init__(
        self,
        file: io.BytesIO,
        left_out: Mapping[int, LeftOut],
        task: Task | None,
        missing: Mapping[str, LeftOut],
    ) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._left_out = left_out
        self._task = task
        self._missing = missing

    def reducer_override(self, value: Any) -> Any:
        if id(value) in self._left_out:
            return self._left_out[id(value)].__reduce__()
        if isinstance(value, Tensor) and value.device.type not in ("cpu", "meta"):
            name = f"a {name_of_type(value)} on {value.device}"
            return LeftOut(name, "belongs to the device").__reduce__()
        if value is self._task and self._missing:
            return self._without_missing(value.__reduce_ex__(pickle.HIGHEST_PROTOCOL))
        return NotImplemented

    def _without_missing(self, reduced: Any) -> Any:
        """The same with what is left out in place of the attributes, where the state is made of them."""
        if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
            return reduced
        state = {name: self._missing.get(name, value) for name, value in reduced[2].items()}
        return (*reduced[:2], state, *reduced[3:])


class _Trial(_Pickler):
    """Pickles for nobody."""

    def reducer_override(self, value: Any) -> Any:
        reduced = super().reducer_override(value)
        # PyTorch refuses to send a tensor that other tensors' gradients depend on.
        if (
            reduced is NotImplemented
            and isinstance(value, Tensor)
            and (value.is_leaf or not value.requires_grad)
        ):
            return str, ()
        return reduced
