"""A torch TCPStore that rank 0 serves: offering it, and joining it from another host."""

from __future__ import annotations

import resource
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]

from dualeval.errors import BackendError, LaunchError
from dualeval.world import World
from dualeval.world.network import LOOPBACK, at, offered_addresses, reach
from dualeval.world.waiting import not_come

# torch looks up the name of each address that it connects to, and waits 10 s for a name server that does not
# answer.
_CONNECT = timedelta(seconds=60)
# Beside its connections a rank opens data, a journal and its reading processes' pipes.
_OTHER_FILES = 256
# Connections to each other rank while ranks join: on the serving rank, one in the store; one in gloo's mesh.
JOINING = 2


def allow_connections(count: int, who: str) -> None:
    """Let this process open so many more files: raises its soft limit if that is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Without /proc, none are counted.
    opened = len(list(Path("/proc/self/fd").glob("*")))
    needed = opened + count + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise LaunchError(
            f"{who} needs {needed:,} open files, {count:,} of them for connections to other ranks, and may "
            f"have {hard:,} (ulimit -Hn). Type 'ulimit -n {needed}' as root where the run starts, or have "
            "the limit raised (nofile in /etc/security/limits.conf, LimitNOFILE of slurmd), or start fewer "
            "ranks."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve_store(world: World, connections: int = 1) -> tuple[TCPStore, dict[str, Any]]:
    """Serve a store on a port that the kernel picks."""
    allow_connections(connections * world.size, f"rank {world.rank}")
    server = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    addresses = offered_addresses(one_node=world.is_one_node, master=world.meeting.host_of_rank_0)
    return server, {"addresses": addresses, "port": server.port}


def join_store(offer: dict[str, Any], rank: int, purpose: str, timeout: timedelta = _CONNECT) -> TCPStore:
    """Join the store of an offer, at the first of its addresses that answers."""
    # A plain connection first: a store that cannot connect logs pages of C++ frames.
    address, tried = reach(offer["addresses"], offer["port"])
    if address is None:
        raise BackendError(f"rank {rank} cannot reach rank 0 for {purpose}; tried {'; '.join(tried)}")
    try:
        return TCPStore(address, offer["port"], is_master=False, timeout=timeout)
    except (DistNetworkError, DistStoreError) as error:
        raise BackendError(
            f"rank {rank} cannot join rank 0 for {purpose} at {at(address, offer['port'])}: "
            f"{str(error).partition(chr(10))[0]}"
        ) from error


def names_of_absent(store: Any, keys: Callable[[], list[str]]) -> Callable[[], str]:
    """Make a function that says which ranks have not come, to be called in another thread than the store's.

    Make it only if it is needed: it opens its own connection.
    """
    # The store's own client may be blocked in a call. If this one were made later, after the store is gone,
    # it would wait for the whole timeout, and log pages of C++ frames.
    client = store.clone()

    def names() -> str:
        try:
            return not_come(rank for rank, key in enumerate(keys()) if not client.check([key]))
        except (DistNetworkError, DistStoreError) as error:
            return f"the store does not answer ({str(error).partition(chr(10))[0]})"

    return names
