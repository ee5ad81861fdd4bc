"""From columns to the arguments of a TorchMetrics metric's ``update``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dualeval.errors import UsageError


@dataclass(frozen=True)
class Parsed:
    """A column of text with one JSON value a sample, such as a list of the sample's references."""

    column: str


# What an argument is made of: a column as a whole; a list with one entry, which stands for a list with such
# an entry for each sample; a dict of such. Within an entry a name stands for the sample's own value.
Shape: TypeAlias = "str | Parsed | list[Any] | dict[str, Any]"
Columns: TypeAlias = "str | Parsed | Sequence[Any] | Mapping[str, Any]"

_KINDS = "a column's name, a list [...] of one entry per sample, a dict {...} or Parsed(column)"
# TorchMetrics is written for int64 classes: some of its kernels take no other integer.
_WIDENED = (torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64)
_SCORES = "torchmetrics.classification."
_SOFTMAX = {"MulticlassPrecisionRecallCurve", "MulticlassCalibrationError", "MulticlassHingeLoss"}


def normaliser_of(metric: Any) -> str | None:
    """What of torch a metric applies to the scores of an update of which one lies outside 0 to 1."""
    names = [kind.__name__ for kind in type(metric).__mro__ if kind.__module__.startswith(_SCORES)]
    if any(name.startswith(("Binary", "Multilabel")) for name in names):
        return "sigmoid"
    return "softmax" if _SOFTMAX.intersection(names) else None


class Arguments:
    """How a metric's columns become the arguments of its ``update``."""

    def __init__(self, columns: Columns, update: Any, name: str) -> None:
        self.positional, self.named = _by_argument(columns, update, name)
        shapes = [*self.positional, *self.named.values()]
        self.columns = tuple(dict.fromkeys(column for shape in shapes for column in _read_by(shape, name)))

    def of(self, columns: Mapping[str, Any], samples: range, double: bool) -> tuple[list[Any], Any]:
        """The arguments for some consecutive samples, with ``double`` their floats as float64."""
        read = {name: _part(columns[name], samples, double) for name in self.columns}
        named = {argument: _whole(shape, read, len(samples)) for argument, shape in self.named.items()}
        return [_whole(shape, read, len(samples)) for shape in self.positional], named

    def column_forms(self, columns: Mapping[str, Any]) -> str:
        """The columns that are read, with their dtypes and shapes, for messages."""
        return "; ".join(f"{name}: {_form_of(columns[name])}" for name in self.columns)


def _form_of(column: Any) -> str:
    if isinstance(column, (Tensor, np.ndarray)):
        dtype = str(column.dtype).removeprefix("torch.")
        return f"{dtype} {tuple(column.shape)}"
    return f"{len(column)} entries"


def _by_argument(columns: Columns, update: Any, name: str) -> tuple[list[Shape], dict[str, Shape]]:
    signature = inspect.signature(update)
    arguments: Any = [columns] if isinstance(columns, (str, Parsed)) else columns
    if not isinstance(arguments, (Sequence, Mapping)):
        raise UsageError(
            f"{name}: columns is a {type(columns).__name__}, expected names of columns in the order of "
            f"update{signature}, or a dict of argument to column"
        )
    try:
        bound = signature.bind(**arguments) if isinstance(arguments, Mapping) else signature.bind(*arguments)
        if not bound.arguments:
            raise TypeError("there is none")
    except TypeError as error:
        raise UsageError(
            f"{name}: the columns {arguments!r} do not fit update{signature}: {error}. Give one for each "
            "argument, or a dict of argument to column"
        ) from error
    if isinstance(arguments, Mapping):
        return [], dict(arguments)
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values()):
        return list(arguments), {}  # of a wrapper, which passes them on
    return [], dict(bound.arguments)


def _read_by(shape: Any, name: str) -> Iterator[str]:
    """The columns of an argument of the metric ``name``."""
    if isinstance(shape, str):
        yield shape
    elif isinstance(shape, Parsed):
        yield shape.column
    elif (isinstance(shape, list) and shape) or (
        isinstance(shape, Mapping) and all(isinstance(key, str) for key in shape)
    ):
        for part in shape.values() if isinstance(shape, Mapping) else shape:
            yield from _read_by(part, name)
    else:
        raise UsageError(f"the columns of {name}: found {shape!r}, expected {_KINDS}")


def _part(column: Any, samples: range, double: bool) -> Tensor | list[Any]:
    """Some samples of a column: a tensor, or a list with an entry a sample."""
    if isinstance(column, (Tensor, np.ndarray)):
        return _tensor(column[samples.start : samples.stop], double)
    part = column[samples.start : samples.stop]
    return [value if isinstance(value, str) else _tensor(value, double) for value in part]


def _tensor(value: Any, double: bool) -> Tensor:
    # A copy: what is mapped from a file cannot be written to, and torch has no such tensors.
    tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    if double and tensor.is_floating_point():
        return tensor.double()
    return tensor.to(torch.int64) if tensor.dtype in _WIDENED else tensor


def _whole(shape: Shape, read: Mapping[str, Tensor | list[Any]], samples: int) -> Any:
    """An argument of all samples."""
    if isinstance(shape, str):
        return _joined(shape, read[shape])
    if isinstance(shape, dict):
        return {key: _whole(part, read, samples) for key, part in shape.items()}
    if isinstance(shape, list):
        if len(shape) != 1:
            raise UsageError(f"a list of one entry per sample has one entry in 'columns', found {shape!r}")
        shape = shape[0]
    return [_single(shape, read, place) for place in range(samples)]


def _single(shape: Shape, read: Mapping[str, Tensor | list[Any]], place: int) -> Any:
    """What belongs to one sample."""
    if isinstance(shape, str):
        return read[shape][place]
    if isinstance(shape, dict):
        return {key: _single(part, read, place) for key, part in shape.items()}
    if isinstance(shape, list):
        return [_single(part, read, place) for part in shape]
    text = read[shape.column][place]
    if not isinstance(text, str):
        raise UsageError(f"Parsed({shape.column!r}): the column holds numbers, expected a column of text")
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"Parsed({shape.column!r}): {text!a} is not JSON ({error})") from error


def _joined(name: str, column: Tensor | list[Any]) -> Any:
    if isinstance(column, Tensor) or not column or isinstance(column[0], str):
        return column
    if len({value.shape for value in column}) > 1:
        raise UsageError(
            f"the samples of column {name!r} differ in shape, and the metric takes one tensor of them all. "
            f"For a list with one entry per sample write [{name!r}] in 'columns'"
        )
    return torch.stack(column)
