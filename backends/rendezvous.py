"""How ranks find each other, and the network between their nodes, while there is no backend yet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in __all__

from dualeval.backends.mpi import MpiBackend
from dualeval.network import (
    come_to_meeting,
    host_identity,
    interface_of,
    meeting,
    offered_addresses,
    own_address_towards,
    reach,
)
from dualeval.world import World

# How late a rank may be. A dead or stalled one is noticed, named and ended by the control plane long before.
PATIENCE = timedelta(minutes=30)


@contextmanager
def told_by_rank_0(world: World, words: Any) -> Iterator[Any]:
    """Tell every rank what rank 0 knows: over MPI, or, in a step of Slurm's, at the agreed address.

    Rank 0 goes on telling until its block is left, which has to wait for the others.

    Args:
        world: this process's place; its launcher gives a way into MPI, or ``master`` and ``run_id``.
        words: on rank 0 plain values, as JSON has them; nothing elsewhere.

    Yields:
        the words.

    Raises:
        BackendError: rank 0's host cannot be reached.
        LaunchError: MPI is missing or broken.
    """
    if world.run_id is None or world.master is None:
        with MpiBackend(world, torch.device("cpu")) as mpi:
            told = mpi.broadcast_json(words)
        yield told
    elif world.size == 1:
        yield words
    elif world.is_main:
        with meeting(world.master[1], world.run_id, words):
            yield words
    else:
        yield come_to_meeting(*world.master, world.run_id)


def interface_between_nodes(world: World, store: Store, port: int | None) -> str | None:
    """Find the network interface over which this node and the others reach each other. A collective.

    gloo would take the one that has the address of the host's own name, and many hosts map that to 127.0.1.1.

    Args:
        world: this process's place.
        store: one that all ranks share.
        port: on rank 0, where that store is served on all of its interfaces; None elsewhere.

    Returns:
        its name; None where none was found.
    """
    if world.is_main:
        offer = {"host": host_identity(), "addresses": offered_addresses(one_node=False), "port": port}
        store.set("dualeval/offer", json.dumps(offer))
    offer = json.loads(store.get("dualeval/offer"))
    if offer["host"] == host_identity():
        # Any rank of another node has told how it comes here.
        peer = store.get("dualeval/from-another-node").decode()
        own = own_address_towards(peer) if peer else None
    else:
        address, _ = reach(offer["addresses"], offer["port"])
        own = None if address is None else own_address_towards(address)
        store.set("dualeval/from-another-node", own or "")
    return interface_of(own) if own else None
