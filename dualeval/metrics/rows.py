"""Rows: any function of all samples' columns as a metric."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dualeval.errors import UsageError
from dualeval.metrics.metric import Measured, direction
from dualeval.options.choices import check_kind

_IGNORED = -100  # cross_entropy's default
_EXAMPLE = 'Rows(r2_score, ["target", "prediction"])'


class Rows:
    """A function of all samples' columns, in data-set order, computed once, on rank 0.

    Such as those of scikit-learn: ``Rows(r2_score, ["target", "prediction"])``. Its source, its defaults and
    what it closes over are part of the job's identity.

    Args:
        function: gets the columns as positional arguments, as numpy arrays with a row a sample. It returns a
            number, which becomes the value of the metric's name; or a dict, whose entries become values of
            their own: numbers, None, or lists and dicts of them.
        columns: names of the columns, in the order of the arguments.
        name: without one the function's.
        unit: as in ``Measured``, of the number; a dict gives that of each key.
        higher_is_better: likewise; None where neither is better.

    Raises:
        UsageError: an argument is of another kind, or the function has no name and none was given.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        columns: Sequence[str],
        *,
        name: str | None = None,
        unit: str | Mapping[str, str] | None = None,
        higher_is_better: bool | Mapping[str, bool] | None = None,
    ) -> None:
        check_kind("function", function, callable(function), "a function of the columns")
        named = isinstance(columns, (list, tuple)) and all(isinstance(column, str) for column in columns)
        check_kind("columns", columns, named and bool(columns), f"a list of column names, as in {_EXAMPLE}")
        check_kind("unit", unit, _fits(unit, str), "a text, a dict of texts by key, or None")
        fits = _fits(higher_is_better, bool)
        check_kind("higher_is_better", higher_is_better, fits, "True, False, a dict of them by key, or None")
        self.function = function
        self.columns = tuple(columns)
        self.name = _name_of(function) if name is None else name
        self.unit = unit if unit is None or isinstance(unit, str) else dict(unit)
        self.higher_is_better = (
            dict(higher_is_better) if isinstance(higher_is_better, Mapping) else higher_is_better
        )

    def sources(self) -> Sequence[Any]:
        """The function, whose module's source decides the value."""
        return (_innermost(self.function),)

    def compute(self, columns: Mapping[str, npt.NDArray[Any]]) -> Measured:
        """What the function returns for all rows."""
        result = self.function(*(columns[name] for name in self.columns))
        values = dict(result) if isinstance(result, Mapping) else {self.name: _number(self.name, result)}
        scalars = [key for key, value in values.items() if _is_number(value)]
        units = _by_key(self.unit, scalars)
        better = _by_key(self.higher_is_better, scalars)
        for option, keys in (("unit", units), ("higher_is_better", better)):
            if absent := [key for key in keys if key not in values]:
                raise UsageError(
                    f"metric {self.name!r}: {option} names {absent[0]!r}, and the function returned only "
                    f"{', '.join(map(str, values))}"
                )
        directions = {key: direction(higher) for key, higher in better.items()}
        return Measured(values=values, units=units, directions=directions, warnings=self._of_ignored(columns))

    def _of_ignored(self, columns: Mapping[str, npt.NDArray[Any]]) -> tuple[str, ...]:
        target = columns.get("target") if "target" in self.columns else None
        if not isinstance(target, np.ndarray) or target.dtype.kind != "i":
            return ()
        count = int((target == _IGNORED).sum())
        warning = (
            f"{self.name} gets {count:,} targets of {_IGNORED}, which torch's losses ignore: leave them out"
        )
        return (warning,) if count else ()


def _fits(option: object, kind: type) -> bool:
    if isinstance(option, Mapping):
        return all(isinstance(key, str) and isinstance(value, kind) for key, value in option.items())
    return option is None or isinstance(option, kind)


def _by_key(option: Any, keys: Sequence[str]) -> dict[str, Any]:
    if isinstance(option, Mapping):
        return dict(option)
    return {} if option is None else dict.fromkeys(keys, option)


def _innermost(function: Callable[..., Any]) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _name_of(function: Callable[..., Any]) -> str:
    name = getattr(_innermost(function), "__name__", "<")
    if name.startswith("<"):
        raise UsageError("the function has no name: give the metric one, as in Rows(..., name='auroc')")
    return str(name)


def _is_number(value: object) -> bool:
    return value is None or isinstance(value, numbers.Real)


def _number(metric: str, value: Any) -> Any:
    # An array or tensor of one number.
    single = getattr(value, "ndim", None) == 0 or getattr(value, "size", None) == 1
    if single and not _is_number(value):
        value = value.item()
    if not _is_number(value):
        raise UsageError(
            f"metric {metric!r}: the function returned a {type(value).__name__}, expected a number, or a "
            "dict of numbers by name"
        )
    return value
