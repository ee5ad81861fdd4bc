"""What the checks of the contract work with: a bench that notes problems, inputs, and reductions by hand."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dualeval.backends.base import Backend, Op
from dualeval.errors import BackendError

SHAPES: dict[str, tuple[int, ...]] = {
    "0-d": (),
    "empty": (0,),
    "empty rows": (0, 3),
    "no columns": (3, 0),
    "1-d": (5,),
    "2-d": (3, 4),
    "transposed": (3, 4),
    "strided": (5,),
    "expanded": (3, 4),
    "large": (-1,),  # 1 MiB
}
# Relative to the greatest sum of absolute values: a sum over three ranks rounds twice.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-6, torch.float64: 1e-14}
PRIMITIVES = ("_all_reduce", "_broadcast", "_gather_headers", "_gather")


@dataclass
class Bench:
    """What a check works with: the backend under test, a folder that all ranks share, the problems found."""

    backend: Backend
    folder: Path
    problems: list[str] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.backend.world.rank

    @property
    def size(self) -> int:
        return self.backend.world.size

    def inputs(self, layout: str, dtype: torch.dtype, rows: list[int] | None = None) -> list[Tensor]:
        """Every rank's input, on the backend's device, with so many rows where these are given."""
        made = (sample(rank, layout, dtype, rows[rank] if rows else None) for rank in range(self.size))
        return [tensor.to(self.backend.device) for tensor in made]

    def expect(self, condition: bool, problem: str) -> None:
        if not condition:
            self.problems.append(problem)

    def expect_tensor(
        self, label: str, actual: Tensor, expected: Tensor, scale: Tensor | None = None
    ) -> None:
        """Expect the same dtype, device, shape and values: to the bit, or within TOLERANCE of ``scale``."""
        kind, wanted = ((tensor.dtype, tensor.device, tuple(tensor.shape)) for tensor in (actual, expected))
        self.expect(kind == wanted, f"{label}: got {kind}, expected {wanted}")
        if kind != wanted:
            return
        if scale is None:
            same = torch.equal(actual, expected)
        else:
            error = (actual.double() - expected.double()).abs()
            same = bool((error <= TOLERANCE[actual.dtype] * scale.double().abs()).all())
        if not same:
            self.problems.append(f"{label}: got {actual}, expected {expected}")

    def expect_new(self, label: str, result: Tensor, *others: Tensor) -> None:
        """Expect that no memory of the result is that of another tensor."""
        if result.numel():
            start, end = extent(result)
            overlaps = [
                other
                for other in others
                if other.numel() and start < extent(other)[1] and extent(other)[0] < end
            ]
            self.expect(not overlaps, f"{label}: the result is an alias")

    def collective(self, label: str, call: Callable[[Tensor], Tensor], argument: Tensor, name: str) -> Tensor:
        """Call a collective: one primitive of this name, which leaves its argument and gives a new tensor."""
        before = argument.clone()
        with count_collectives(self.backend) as counts:
            result = call(argument)
        self.expect(counts == ([name] if argument.numel() else []), f"{label}: {counts} for one {name}")
        self.expect_tensor(f"{label}, argument", argument, before)
        self.expect_new(label, result, argument)
        return result

    def expect_error(self, label: str, call: Callable[[], Any], *parts: str, early: bool = True) -> None:
        """Expect the same BackendError on every rank; early: before any communication."""
        message = None
        with count_collectives(self.backend) as counts:
            try:
                call()
            except BackendError as error:
                message = str(error)
        messages = self.backend.all_gather_json(message)
        self.expect(message is not None, f"{label}: no BackendError")
        self.expect(len(set(messages)) == 1, f"{label}: the ranks' errors differ: {messages}")
        for part in parts:
            self.expect(part in (message or ""), f"{label}: {part!r} is not in {message!r}")
        if early:
            self.expect(not counts, f"{label}: communicated before it failed: {counts}")
        self.backend.barrier()


def extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of that behind its last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


@contextmanager
def count_collectives(backend: Backend) -> Iterator[list[str]]:
    """List the primitives that are called meanwhile; none may be given a tensor without elements.

    What one primitive does through another counts once.
    """
    calls: list[str] = []
    inside: list[str] = []

    def counted(name: str, primitive: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            empty = any(isinstance(argument, Tensor) and not argument.numel() for argument in arguments)
            if not inside:
                calls.append(f"{name} of nothing" if empty else name)
            inside.append(name)
            try:
                return primitive(*arguments)
            finally:
                inside.pop()

        return call

    with ExitStack() as stack:
        for name in PRIMITIVES:
            stack.enter_context(mock.patch.object(backend, name, counted(name, getattr(backend, name))))
        yield calls


@contextmanager
def largest_piece(backend: Backend) -> Iterator[list[int]]:
    """Note the most bytes of one collective meanwhile: of a gather, what all ranks send together."""
    largest = [0]

    def noted(primitive: Callable[..., Any], ranks: int) -> Callable[..., Any]:
        def call(tensor: Tensor, *arguments: Any) -> Any:
            largest[0] = max(largest[0], ranks * tensor.numel() * tensor.itemsize)
            return primitive(tensor, *arguments)

        return call

    with ExitStack() as stack:
        for name, ranks in (("_all_reduce", 1), ("_broadcast", 1), ("_gather", backend.world.size)):
            primitive = noted(getattr(backend, name), ranks)
            stack.enter_context(mock.patch.object(backend, name, primitive))
        yield largest


def sample(rank: int, layout: str, dtype: torch.dtype, rows: int | None = None) -> Tensor:
    """Make the input of a rank: the same in every process, over the whole range of an integer dtype."""
    shape = SHAPES[layout]
    if layout == "large":
        shape = (2**20 // dtype.itemsize,)
    if rows is not None:
        shape = (rows, *shape[1:])
    if layout == "transposed":
        return random_tensor(rank, shape[::-1], dtype).t()
    if layout == "strided":
        return random_tensor(rank, (2 * shape[0],), dtype)[::2]
    if layout == "expanded":
        return random_tensor(rank, (shape[0], 1), dtype).expand(shape)
    return random_tensor(rank, shape, dtype)


def random_tensor(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{rank} {shape} {dtype}".encode()))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return (100 * torch.randn(shape, generator=generator, dtype=wide)).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, shape, generator=generator, dtype=dtype)


def reduced(inputs: list[Tensor], op: Op) -> Tensor:
    """Work out a reduction without any backend: exact for integers, in float64 for floats."""
    dtype = inputs[0].dtype
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    stack = torch.stack([tensor.to(wide) for tensor in inputs])
    if op == "sum":
        # Wraps for integers; for bool a sum that is not 0 is True.
        return stack.sum(0).to(dtype)
    return (stack.amin(0) if op == "min" else stack.amax(0)).to(dtype)
