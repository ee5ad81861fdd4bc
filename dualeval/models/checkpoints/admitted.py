"""The types that usual checkpoints hold beside tensors, and what takes their place when a file is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

_EXTRA_STATE = "_extra_state"
# Of a quantised linear layer or LSTM: a dtype; weights and bias together.
_PACKED = re.compile(r"(^|\.)_packed_params\.(dtype|_packed_params)")


class PassedOver:
    """Takes the place of an object in a file that is no tensor: it ignores all that the file says of it."""

    def __new__(cls, *_: object, **__: object) -> PassedOver:
        return object.__new__(cls)

    def __setstate__(self, _: object) -> None:
        """Keep nothing."""


class _AsDict:
    """Makes a plain dict, the only mapping beside OrderedDict and Counter that torch fills from a file."""

    def __new__(cls, *_: object) -> dict[Any, Any]:  # type: ignore[misc]
        return {}


class _AsList:
    """Makes a plain list, the only sequence that torch fills from a file."""

    def __new__(cls, *_: object) -> list[Any]:  # type: ignore[misc]
        return []


# What usual checkpoints hold beside tensors: the names in the file, and what is made of each. None of these
# types is used itself. So no constructor and no __setstate__ of theirs sees what a file says, and it does not
# matter what they would do with it: numpy's believe the offsets in a dtype, and follow them. What a file puts
# into one of them is read by the same rules, so nothing else can hide there.
_ADMITTED: dict[str, Callable[..., object]] = {
    **dict.fromkeys(("argparse.Namespace", "types.SimpleNamespace"), PassedOver),
    **{
        f"{module}.{name}": PassedOver
        for module in ("pathlib", "pathlib._local")  # the latter in files of Python 3.13
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
    # Scalars and arrays; numpy 1 and numpy 2.
    **dict.fromkeys(("numpy.dtype", "numpy.ndarray"), PassedOver),
    **{
        f"{module}.multiarray.{name}": PassedOver
        for module in ("numpy.core", "numpy._core")
        for name in ("scalar", "_reconstruct")
    },
    **{f"datetime.{name}": PassedOver for name in ("datetime", "date", "time", "timedelta", "timezone")},
    # As values, and as what a defaultdict makes.
    **{
        f"builtins.{name}": PassedOver
        for name in ("bool", "int", "float", "str", "list", "tuple", "dict", "frozenset", "range", "slice")
    },
    "collections.defaultdict": _AsDict,
    "collections.deque": _AsList,
}


@contextmanager
def admitting() -> Iterator[None]:
    """Let torch take what is admitted; what a program has admitted itself stays, but for the same names.

    A program's numpy.dtype and the one here do not go together.
    """
    before: list[Any] = get_safe_globals()
    others = [entry for entry in before if _name_in_files(entry) not in _ADMITTED]
    clear_safe_globals()
    add_safe_globals([*others, *((made, name) for name, made in _ADMITTED.items())])
    try:
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(before)


def _name_in_files(entry: Any) -> str:
    return str(entry[1]) if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"


# -- entries of a state_dict that need not be tensors: ``_extra_state``, packed weights of quantised layers --


def is_extra_state(name: str) -> bool:
    """Whether torch gives this name to what a module keeps beside tensors."""
    return name == _EXTRA_STATE or name.endswith(f".{_EXTRA_STATE}") or _PACKED.search(name) is not None


def is_read(value: object) -> bool:
    """Whether nothing in a value was passed over when the file was read."""
    waiting = [value]
    seen: set[int] = set()
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, PassedOver):
            return False
        if isinstance(inner, (Mapping, list, tuple, set)) and id(inner) not in seen:
            seen.add(id(inner))
            waiting += [*inner, *inner.values()] if isinstance(inner, Mapping) else inner
    return True
