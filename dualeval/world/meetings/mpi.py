"""Over MPI, into which the launcher gives its ranks a way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dualeval.world import World
from dualeval.world.meetings import MeetingAtStore
from dualeval.world.waiting import CONNECTED, STARTED, waiting


class OverMpi(MeetingAtStore):
    """Rank 0 broadcasts where its store is."""

    @contextmanager
    def _pass_on(self, world: World, offer: Any, purpose: str) -> Iterator[Any]:
        from dualeval.backends.mpi import MpiBackend

        with MpiBackend(world) as mpi:
            with waiting(world, "rank 0's address, over MPI", STARTED):
                received = mpi.broadcast_json(offer)
            yield received
            with waiting(world, "the ranks of MPI that have yet to reach rank 0", f"{STARTED} {CONNECTED}"):
                mpi.barrier()
