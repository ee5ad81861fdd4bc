"""Play GPUs: what torch says of them, for as long as nothing is computed there. Also a rank's main program.

``PLAYED_GPUS="A,B" python -m tests.vehicles.played_gpus run --limit 8``: dualeval on a rank that sees
two, which break as soon as they are used; ``PLAYED_GPUS=""`` plays a node without.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch


def played_uuid(letter: str) -> uuid.UUID:
    return uuid.UUID(bytes=letter.encode() * 16)


@contextmanager
def played_gpus(letters: Sequence[str]) -> Iterator[None]:
    """Let torch say that there is a GPU for each letter."""
    properties = [
        SimpleNamespace(
            name=f"Played {letter}",
            uuid=played_uuid(letter),
            # An address that no machine has.
            pci_domain_id=0xFFFF,
            pci_bus_id=ord(letter),
            pci_device_id=0,
        )
        for letter in letters
    ]
    played = {
        "is_available": lambda: bool(letters),
        "device_count": lambda: len(letters),
        "get_device_properties": lambda number: properties[number],
    }
    with ExitStack() as stack:
        for name, function in played.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        yield


if __name__ == "__main__":
    from dualeval.cli import main

    with played_gpus([letter for letter in os.environ["PLAYED_GPUS"].split(",") if letter]):
        main()
