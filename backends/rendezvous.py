"""Which ranks share a node, and the network between the nodes: found over the store where the ranks met."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from socket import gethostname

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in __all__

from dualeval.world import World, host_identity, place_by_hosts
from dualeval.world.meetings import arrival
from dualeval.world.network import LOOPBACK, interface_of, offered_addresses, own_address_towards, reach
from dualeval.world.store import names_of_absent, serve_store
from dualeval.world.waiting import CONNECTED, STARTED, waiting

_ELSEWHERE = "dualeval/elsewhere"


@contextmanager
def joining(world: World, store: Store, what: str) -> Iterator[None]:
    """Say what is waited for while a library joins all ranks; rank 0 names those that are missing."""
    here = [arrival(rank) for rank in range(world.size)]
    missing = names_of_absent(store, lambda: here) if world.is_main else None

    def known() -> str:
        # Rank 0 alone: a store that does not answer must not keep the last rank from speaking.
        return "" if missing is None else missing() or "all ranks have come to rank 0, but have yet to join"

    with waiting(world, f"all ranks to join {what}", f"{STARTED} {CONNECTED}", known=known):
        yield


def own_place(world: World) -> tuple[str, int]:
    """What tells this rank's host from all others, and the number on it that its launcher gave to it."""
    # By the name too: where kernels are played (gVisor), hosts may look alike otherwise.
    return f"{host_identity()} {gethostname()}", world.local_rank


def placed_on_hosts(world: World, store: Store) -> World:
    """Find which ranks share a host, where the launcher does not tell. A collective there."""
    if world.placed:
        return world
    store.set(f"dualeval/host/{world.rank}", json.dumps(own_place(world)))
    if world.is_main:
        received = store.multi_get([f"dualeval/host/{rank}" for rank in range(world.size)])
        hosts, local_ranks = zip(*map(json.loads, received), strict=True)
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        store.set("dualeval/hosts", json.dumps([[numbers[host] for host in hosts], local_ranks]))
    return place_by_hosts(world, *json.loads(store.get("dualeval/hosts")))


def interface_between_nodes(world: World, store: Store, port: int | None) -> str | None:
    """Find the network interface over which this node and the others reach each other. A collective.

    gloo would take the one that has the address of the host's own name, and many hosts map that to 127.0.1.1.
    """
    if world.is_main:
        offer = {"host": host_identity(), "addresses": offered_addresses(one_node=False), "port": port}
        store.set("dualeval/offer", json.dumps(offer))
    with joining(world, store, "the search for the network between the nodes"):
        offer = json.loads(store.get("dualeval/offer"))
        if offer["host"] != host_identity():
            address, _ = reach(offer["addresses"], offer["port"])
            local = None if address is None else own_address_towards(address)
            store.set(_ELSEWHERE, local or "")
        else:
            if store.add("dualeval/with-rank-0", 1) == world.size:
                store.set(_ELSEWHERE, LOOPBACK)
            # Any rank of another host has told how it comes here, or the last rank that there is none.
            peer = store.get(_ELSEWHERE).decode()
            local = own_address_towards(peer) if peer else None
    return interface_of(local) if local else None


@contextmanager
def interface_beside(world: World, store: Store) -> Iterator[str | None]:
    """Find that interface where a library of the script's own has joined the ranks. A collective.

    Until the block is left, rank 0 can be reached where the others look for it.
    """
    store.set(arrival(world.rank), "")
    server = serve_store(world)[0] if world.is_main else None
    yield interface_between_nodes(world, store, None if server is None else server.port)


def nccl_variables(interface: str | None) -> dict[str, str]:
    """Find what tells NCCL over which network interface the nodes reach each other, as horovodrun does.

    NCCL reads it when it first needs it, which is long after its library has joined the ranks: it has to stay
    set for as long as the backend lives.
    """
    # "=" is NCCL's word for this very name; without it every interface that begins so would do.
    return {"NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}
