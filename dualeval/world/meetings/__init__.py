"""How the ranks of a run find each other: one class for each way, which the launcher's probe builds.

This file and those beside it import torch and MPI only when ranks meet. Callers: launchers and backends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dualeval.world import Meeting, World
from dualeval.world.network import LATE_S, at
from dualeval.world.waiting import CONNECTED, waiting

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

PATIENCE = timedelta(seconds=LATE_S)


def arrival(rank: int) -> str:
    """The key that a rank sets in the store when it has come."""
    return f"dualeval/here/{rank}"


@dataclass(frozen=True, kw_only=True)
class MeetingAtStore(Meeting):
    """Rank 0 serves a store, and ``_pass_on`` tells the others where, by way of the launcher."""

    @contextmanager
    def open(self, world: World, purpose: str) -> Iterator[tuple[Store, str, int | None]]:
        """Open a store that all ranks share. A collective.

        Rank 0 serves it until its block is left, which has to wait for the others.
        """
        from dualeval.world.store import join_store, serve_store

        server: TCPStore | None
        offer: Any
        server, offer = serve_store(world) if world.is_main else (None, None)
        with self._pass_on(world, offer, purpose) if world.size > 1 else nullcontext(offer) as offer:
            if server is not None:
                client = server
            else:
                where = at(offer["addresses"][0], offer["port"])
                with waiting(world, f"rank 0's store for {purpose} at {where}", CONNECTED, each_node=True):
                    client = join_store(offer, world.rank, purpose, PATIENCE)
            client.set(arrival(world.rank), "")
            yield client, client.host, server.port if server else None

    def _pass_on(self, world: World, offer: Any, purpose: str) -> AbstractContextManager[Any]:
        """Give every rank the offer of rank 0, plain values as JSON has them, until its block is left."""
        raise AssertionError(f"{world.launcher} tells its {world.size} ranks no way to meet")
