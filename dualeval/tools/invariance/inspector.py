"""Which modules of a model give rows other bits in another batch, though their inputs have the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dualeval.engine.values.nests import tensors_in

# A tensor of a call: the module's name, which call of it, "in" or "out", and where it is in there.
Place = tuple[str, int, str, str]
Shapes = Mapping[Place, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Differences:
    """How the modules of one batch differ from those of the batch of the job's shape."""

    # The kinds of those with other outputs for the same inputs, by name ("" is the model itself), in the
    # order of their calls; of modules inside each other the innermost.
    modules: Mapping[str, str]
    # Number of modules without modules in them that differ as a consequence.
    after: int
    # The model's own inputs have other bits already.
    inputs_differ: bool


@dataclass
class _Call:
    name: str
    number: int
    parent: _Call | None
    hashes: dict[tuple[str, str], npt.NDArray[np.int64] | None] = field(default_factory=dict)


class ModuleInspector:
    """Looks at every call of every module of a model: first at shapes, then at hashes of rows."""

    def __init__(self, model: nn.Module, rows: int) -> None:
        # Programs take no hooks.
        self._named = [
            (name, module)
            for name, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)
        ]
        self._kinds = {name: type(module).__name__ for name, module in self._named}
        self._leaves = {name for name, module in self._named if not any(True for _ in module.children())}
        self._rows = rows
        self._dimensions: dict[Place, int | None] = {}

    @contextmanager
    def shapes(self) -> Iterator[dict[Place, tuple[int, ...]]]:
        """Collect the shapes of all tensors of the calls inside the context."""
        shapes: dict[Place, tuple[int, ...]] = {}

        def see(call: _Call, way: str, value: Any) -> None:
            for path, tensor in tensors_in(value):
                shapes[call.name, call.number, way, path] = tuple(tensor.shape)

        with self._hooked(see):
            yield shapes

    def learn(self, shapes: Shapes, other: Shapes, other_rows: int) -> None:
        """Find out in which dimension of each tensor the rows are."""
        self._dimensions = {
            place: row_dimension(shape, self._rows, other[place], other_rows)
            for place, shape in shapes.items()
            if place in other and len(other[place]) == len(shape)
        }

    @contextmanager
    def hashes(self) -> Iterator[list[_Call]]:
        """Collect hashes of the rows of all tensors of the calls inside the context, in their order."""
        calls: list[_Call] = []

        def see(call: _Call, way: str, value: Any) -> None:
            if way == "in":
                calls.append(call)
            for path, tensor in tensors_in(value):
                place = call.name, call.number, way, path
                known = place in self._dimensions and tensor.ndim > (self._dimensions[place] or 0)
                call.hashes[way, path] = hashes_of_rows(tensor, self._dimensions[place]) if known else None

        with self._hooked(see):
            yield calls

    @contextmanager
    def _hooked(self, see: Any) -> Iterator[None]:
        numbers: Counter[str] = Counter()
        under_way: list[_Call] = []

        def before(name: str) -> Any:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                call = _Call(name, numbers[name], under_way[-1] if under_way else None)
                numbers[name] += 1
                under_way.append(call)
                see(call, "in", (args, kwargs))

            return hook

        def after(module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
            see(under_way.pop(), "out", outputs)

        with ExitStack() as stack:
            for name, module in self._named:
                for handle in (
                    module.register_forward_pre_hook(before(name), prepend=True, with_kwargs=True),
                    module.register_forward_hook(after, with_kwargs=True),
                ):
                    stack.callback(handle.remove)
            yield

    def differences(self, calls: Sequence[_Call], job: Sequence[_Call]) -> Differences:
        """Compare the calls of a smaller batch with those of the job's batch."""
        there = {(call.name, call.number): call for call in job}
        culprits: dict[str, str] = {}
        inside: set[int] = set()  # calls that have a culprit in them
        differing = set()
        inputs_differ = False
        # The last call first: calls inside of a call come behind it.
        for call in reversed(calls):
            beside = there.get((call.name, call.number))
            if beside is None or call.hashes.keys() != beside.hashes.keys():
                continue
            of_inputs, of_outputs = (_differing(call, beside, way) for way in ("in", "out"))
            if call.parent is None:
                inputs_differ |= bool(of_inputs.any())
            if not of_outputs.any():
                continue
            differing.add(call.name)
            if len(of_inputs) == len(of_outputs):
                by_itself = bool((of_outputs & ~of_inputs).any())
            else:
                by_itself = not of_inputs.any()
            if by_itself and id(call) not in inside:
                culprits.pop(call.name, None)
                culprits[call.name] = self._kinds[call.name]
            if (by_itself or id(call) in inside) and call.parent is not None:
                inside.add(id(call.parent))
        return Differences(
            modules=dict(reversed(culprits.items())),
            after=len((differing & self._leaves) - culprits.keys()),
            inputs_differ=inputs_differ,
        )


def row_dimension(shape: tuple[int, ...], rows: int, other: tuple[int, ...], other_rows: int) -> int | None:
    """Which dimension of a tensor the rows of a batch are in, found from its shapes in two batches."""
    if len(shape) != len(other):
        return None
    differing = [place for place in range(len(shape)) if shape[place] != other[place]]
    grown = [place for place in differing if shape[place] * other_rows == other[place] * rows]
    return next(iter(grown or differing), None)


def hashes_of_rows(tensor: Tensor, dimension: int | None) -> npt.NDArray[np.int64] | None:
    """Eight bytes for each row, which stand for all of its bits; None where it has no memory of rows."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return None
    values = tensor.detach().cpu()
    if values.is_quantized:
        values = values.int_repr()
    values = values.unsqueeze(0) if dimension is None else values.movedim(dimension, 0)
    if not values.numel():
        return np.zeros(len(values), np.int64)
    # A clone: a dimension of one entry may have any stride, and counts as contiguous.
    rows = values.resolve_conj().clone(memory_format=torch.contiguous_format).view(len(values), -1)
    digests = (blake2b(row.data, digest_size=8).digest() for row in rows.view(torch.uint8).numpy())
    return np.frombuffer(b"".join(digests), np.int64)


def _differing(call: _Call, job: _Call, way: str) -> npt.NDArray[np.bool_]:
    """Which rows of a call's tensors are not among those of the job's batch; one entry where none has rows.

    A row is looked for among all of the job's: it may stand at another place there, and samples may have
    several rows each.
    """
    differing: list[npt.NDArray[np.bool_]] = []
    for (own_way, path), hashes in call.hashes.items():
        beside = job.hashes[own_way, path]
        if own_way == way and hashes is not None and beside is not None:
            differing.append(~np.isin(hashes, beside))
    rows = max((len(each) for each in differing), default=1)
    together = np.zeros(rows, np.bool_)
    for each in differing:
        # A tensor without rows, or with another number of them: each row may depend on all of it.
        together |= each if len(each) == rows else each.any()
    return together
