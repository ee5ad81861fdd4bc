"""The types that usual checkpoints hold beside tensors, and what takes their place when a file is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

from dualeval.models.passed_over import PassedOver


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
