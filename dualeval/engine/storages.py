"""Storages of tensors: a view keeps all of a storage, and all of it goes to another process with the view."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor

from dualeval.engine.transfer import map_batch


def own_storages(batch: Any) -> Any:
    """Give a batch's plain tensors storages of their own where they are small parts of larger ones.

    Consecutive samples of a tensor that holds the whole data set are a view of it. Shapes and strides stay,
    so that a model computes the same bits.
    """
    sharing: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)

    def note(tensor: Tensor) -> Tensor:
        # Memory that needs a gradient, or is read as conjugated or negated, is more than its numbers.
        if not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg()):
            sharing[tensor.untyped_storage().data_ptr()][id(tensor)] = tensor
        return tensor

    map_batch(note, batch)
    copies: dict[int, Tensor] = {}
    for tensors in sharing.values():
        storage = next(iter(tensors.values())).untyped_storage().nbytes()
        taken = sum(_reach(tensor) * tensor.element_size() for tensor in tensors.values())
        # Where a batch has most of a storage, as with a matrix whose columns are contiguous, little is saved.
        if 2 * taken <= storage:
            copies.update((name, _alone(tensor)) for name, tensor in tensors.items())
    if not copies:
        return batch
    return map_batch(lambda tensor: copies.get(id(tensor), tensor), batch)


def _reach(tensor: Tensor) -> int:
    """The elements of the storage from a tensor's first one to its last."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _alone(tensor: Tensor) -> Tensor:
    memory = tensor.as_strided((_reach(tensor),), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride())
