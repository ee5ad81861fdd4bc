"""Hashes of the rows of tensors, made where the tensor lies: eight bytes a row stand for all of its bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Words hashed at once: each takes sixteen bytes meanwhile.
_WORDS_AT_ONCE = 1 << 22
_SEED = 0x6475616C


def row_dimension(shape: tuple[int, ...], rows: int, other: tuple[int, ...], other_rows: int) -> int | None:
    """Which dimension of a tensor the rows of a batch are in, found from its shapes in two batches."""
    if len(shape) != len(other):
        return None
    differing = [place for place in range(len(shape)) if shape[place] != other[place]]
    grown = [place for place in differing if shape[place] * other_rows == other[place] * rows]
    return next(iter(grown or differing), None)


class RowHash:
    """Hashes rows: sums of their words times fixed random odd numbers, modulo 2**64.

    Two different rows have one hash with a probability of about 2**-32 (multilinear hashing; J. L. Carter and
    M. N. Wegman, Journal of Computer and System Sciences 18, 1979).
    """

    def __init__(self) -> None:
        self._factors: dict[torch.device, Tensor] = {}

    def rows(self, tensor: Tensor, dimension: int | None) -> npt.NDArray[np.int64] | None:
        """Hash each row of a tensor."""
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
            return None
        values = tensor.detach()
        if values.is_quantized:
            values = values.int_repr()
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        count = 1 if dimension is None else values.shape[dimension]
        if dimension is not None:
            values = values.movedim(dimension, 0)
        if not values.numel():
            return np.zeros(count, np.int64)
        words = _words(values.contiguous().view(count, -1))
        factors = self._of_length(1 + words.shape[1], words.device)
        at_once = max(1, _WORDS_AT_ONCE // words.shape[1])
        # The first stands for the length: a row padded with zeros is another one.
        length = words.shape[1] * factors[0]
        parts = [
            (part.to(torch.int64) * factors[1:]).sum(dim=1) + length for part in torch.split(words, at_once)
        ]
        return np.asarray(torch.cat(parts).cpu().numpy())

    def _of_length(self, count: int, device: torch.device) -> Tensor:
        known = self._factors.get(device)
        if known is None or len(known) < count:
            generator = torch.Generator().manual_seed(_SEED)
            limits = torch.iinfo(torch.int64)
            drawn = torch.randint(limits.min, limits.max, (count,), generator=generator, dtype=torch.int64)
            known = self._factors[device] = (drawn | 1).to(device)
        return known[:count]


def _words(rows: Tensor) -> Tensor:
    """The bits of rows as integers of 32, 16 or 8 bits."""
    kinds = {1: torch.uint8, 2: torch.int16}
    if rows.stride(-1) != 1:
        # A dimension of one entry may have any stride, and counts as contiguous.
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(kinds.get(rows.element_size(), torch.int32))
