"""Columns that are made where somebody reads them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

_Method = TypeVar("_Method", bound=Callable[..., Any])


class LateColumns:
    """Columns of a batch that are made of others: on the host, when they are read, of many batches at once.

    A subclass is a read-only mapping as well, for whoever reads the columns earlier. What is written into a
    column is lost: only functions that are marked (``keeps_late``) get one.
    """

    # What they are made of, a row a sample; on the host in memory that nobody else has.
    given: Mapping[str, Tensor]
    # What batches have in common whose columns can be made at once.
    kind: object
    # Makes these of other tensors, as the same ones on the host; holds no tensors.
    of: Callable[[Mapping[str, Any]], Mapping[str, Tensor]]

    def joined(self, others: Sequence[LateColumns]) -> LateColumns:
        """These and those of more batches of their kind."""
        raise NotImplementedError

    def made(self, names: Collection[str]) -> dict[str, Tensor]:
        """The columns of these names."""
        raise NotImplementedError


def keeps_late(method: _Method) -> _Method:
    """Mark an ``observe`` that may give ``LateColumns``, or a ``postprocess`` that returns those it gets."""
    KEEPING_LATE.add(method)
    return method


# The marked functions themselves: a function around one, or in its place, is not marked.
KEEPING_LATE: set[object] = set()
