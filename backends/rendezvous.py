"""How ranks find each other, and the network between their nodes, while there is no backend yet."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from time import monotonic, sleep
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in __all__
    DistNetworkError,
    PrefixStore,
    Store,
    TCPStore,
    rendezvous,
)

from dualeval.backends.mpi import MpiBackend
from dualeval.backends.pmi import payload_over_pmi
from dualeval.errors import BackendError, LaunchError
from dualeval.network import (
    LATE_S,
    LOOPBACK,
    at,
    come_to_meeting,
    host_identity,
    interface_of,
    meeting,
    offered_addresses,
    own_address_towards,
    reach,
)
from dualeval.store import join_store, names_of_absent, serve_store
from dualeval.waiting import CONNECTED, STARTED, not_come, waiting
from dualeval.world import World, place_by_hosts

PATIENCE = timedelta(seconds=LATE_S)
_ELSEWHERE = "dualeval/elsewhere"
_ANSWER_S = 10.0
_PAUSE_S = 0.05
_SHORTEST_PAUSE_S = 0.005
_PAUSE_PER_RANK_S = 1e-4


@contextmanager
def payload_of_rank_0(world: World, payload: Any) -> Iterator[Any]:
    """Tell every rank what rank 0 knows: over MPI or PMI, at horovodrun's rendezvous, or an agreed address.

    Rank 0 goes on telling until its block is left, which has to wait for the others.

    Args:
        world: this process's place; its launcher gives a way into MPI, or ``pmi_fd``, or ``rendezvous``, or
            ``master`` and ``run_id``.
        payload: on rank 0 plain values, as JSON has them; nothing elsewhere.

    Yields:
        the payload.

    Raises:
        BackendError: rank 0's host cannot be reached.
        LaunchError: MPI is missing or broken.
    """
    if world.size == 1:
        yield payload
    elif world.pmi_fd is not None:
        with waiting(world, "all ranks to come to the launcher's PMI", STARTED):
            received = payload_over_pmi(world, payload)
        yield received
    elif world.rendezvous is not None:
        yield _put_payload(world.rendezvous, payload) if world.is_main else _await_payload(world)
    elif world.run_id is None or world.master is None:
        with MpiBackend(world) as mpi:
            with waiting(world, "rank 0's address, over MPI", STARTED):
                received = mpi.broadcast_json(payload)
            yield received
            with waiting(world, "the ranks of MPI that have yet to reach rank 0", f"{STARTED} {CONNECTED}"):
                mpi.barrier()
    elif world.is_main:
        with meeting(world.master[1], world.run_id, payload):
            yield payload
    else:
        host, port = world.master
        yield come_to_meeting((host, *world.master_addresses), port, world.run_id, world)


def _put_payload(place: tuple[str, int], payload: Any) -> Any:
    """Put a payload where horovodrun keeps those of Horovod itself: a store of values, over HTTP."""
    status, _ = _ask(place, "PUT", json.dumps(payload).encode())
    if status != HTTPStatus.OK:
        raise BackendError(f"horovodrun's rendezvous at {at(*place)} answers {status}, expected 200")
    return payload


def _await_payload(world: World) -> Any:
    """Wait for the payload that ``_put_payload`` puts there."""
    assert world.rendezvous is not None
    start = monotonic()
    with waiting(world, f"rank 0's message at horovodrun's rendezvous, {at(*world.rendezvous)}", STARTED):
        while monotonic() - start < PATIENCE.total_seconds():
            status, content = _ask(world.rendezvous, "GET")
            if status == HTTPStatus.OK:
                return json.loads(content)
            sleep(_PAUSE_S)
    raise BackendError(f"rank 0 has left no message at horovodrun's rendezvous, {at(*world.rendezvous)}")


def missing_at_horovods(place: tuple[str, int], size: int) -> str:
    """Name the ranks that have not come to Horovod's rendezvous; empty where none is missing.

    Horovod's gloo leaves there, under each rank's number, at what addresses it is.
    """
    try:
        come = [_ask(place, "GET", path=f"/global/{rank}")[0] == HTTPStatus.OK for rank in range(size)]
    except BackendError as error:
        return str(error)
    # When all have met, Horovod clears it away.
    return not_come(rank for rank in range(size) if not come[rank]) if any(come) else ""


def _ask(
    place: tuple[str, int], method: str, body: bytes | None = None, path: str = "/dualeval/payload"
) -> tuple[int, bytes]:
    # Not urllib: that would go through the proxy that a user's variables name.
    connection = HTTPConnection(*place, timeout=_ANSWER_S)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, HTTPException) as error:
        raise BackendError(
            f"horovodrun's rendezvous at {at(*place)} cannot be reached ({error}). That is where "
            f"horovodrun was typed: its address must lead there from {socket.gethostname()}."
        ) from error
    finally:
        connection.close()


@contextmanager
def shared_store(world: World, purpose: str) -> Iterator[tuple[Store, str, int | None]]:
    """Open a store that all ranks share. A collective.

    Rank 0 serves it until its block is left, which has to wait for the others.

    Args:
        world: as for ``payload_of_rank_0``, or torchrun's, or one that has a ``master`` alone.
        purpose: what it is for, in messages.

    Yields:
        the store, the host or address at which this rank has reached it and, on rank 0, the port where it is
        served.
    """
    at_master = world.master is not None and world.run_id is None
    if world.launcher == "torchrun" or (at_master and world.size > 1):
        # Served by torchrun's agent, where there is one, and else by rank 0.
        store = _store_at_master(world)
        own = PrefixStore(f"dualeval/{_agree_on_name(store, world)}", store)
        own.set(_here(world.rank), "")
        yield own, *_master(world)
        return
    server, offer = serve_store(world) if world.is_main else (None, None)
    with payload_of_rank_0(world, offer) as offer:
        if server is not None:
            client = server
        else:
            where = at(offer["addresses"][0], offer["port"])
            with waiting(world, f"rank 0's store for {purpose} at {where}", CONNECTED, each_node=True):
                client = join_store(offer, world.rank, purpose, PATIENCE)
        client.set(_here(world.rank), "")
        yield client, client.host, server.port if server else None


def _master(world: World) -> tuple[str, int]:
    assert world.master is not None
    return world.master


def _store_at_master(world: World) -> Store:
    """Join the store that torchrun, or rank 0 in its place, serves at the launcher's address.

    Raises:
        BackendError: the address is a name that leads nowhere.
    """
    host, port = _master(world)
    try:
        socket.getaddrinfo(host, port)
    except socket.gaierror as error:
        # torch would try for half an hour, and log pages of C++ frames.
        if error.errno != socket.EAI_AGAIN:
            remedy = (
                "Start torchrun with an address in its place: --rdzv-endpoint ADDRESS:PORT, and --local-addr "
                "ADDRESS on the first node, or --master-addr ADDRESS."
                if world.launcher == "torchrun"
                else "Set MASTER_ADDR to an address of rank 0's host."
            )
            raise BackendError(
                f"rank {world.rank} is to meet the others at {at(host, port)}, by MASTER_ADDR and "
                f"MASTER_PORT, but {socket.gethostname()} knows no host of that name. {remedy}"
            ) from error
    who = "torchrun runs on the first node" if world.launcher == "torchrun" else "rank 0 has been started"
    check = (
        f"Check that {who}, that 'getent hosts {host}' prints its address on this node, and that this port "
        f"is open between the nodes."
    )
    with waiting(world, f"{_store_name(world)} at {at(host, port)}", check, each_node=True):
        if world.launcher == "torchrun":
            return next(rendezvous("env://", timeout=PATIENCE))[0]  # type: ignore[no-any-return]
        try:
            # Rank 0 does not wait here for the others: behind this it can name those that are missing.
            return TCPStore(
                host,
                port,
                is_master=world.is_main,
                timeout=PATIENCE,
                wait_for_workers=False,
                # This process may have served a store here before, as the doctor does.
                multi_tenant=True,
            )
        except DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise BackendError(
                f"port {port} of {socket.gethostname()}, where rank 0 is to serve by MASTER_PORT, is another "
                f"program's. Set another MASTER_PORT on all ranks: each job on a host needs its own."
            ) from error


def _store_name(world: World) -> str:
    return "torchrun's store" if world.launcher == "torchrun" else "rank 0's store"


def _here(rank: int) -> str:
    return f"dualeval/here/{rank}"


@contextmanager
def joining(world: World, store: Store, what: str) -> Iterator[None]:
    """Say what is waited for while a library joins all ranks; rank 0 names those that are missing.

    Args:
        world: this process's place.
        store: of ``shared_store``.
        what: what they join, as "torch.distributed's group (gloo)".
    """
    here = [_here(rank) for rank in range(world.size)]
    missing = names_of_absent(store, lambda: here) if world.is_main else None

    def known() -> str:
        # Rank 0 alone: a store that does not answer must not keep the last rank from speaking.
        return "" if missing is None else missing() or "all ranks have come to rank 0, but have yet to join"

    with waiting(world, f"all ranks to join {what}", f"{STARTED} {CONNECTED}", known=known):
        yield


def _agree_on_name(store: Store, world: World) -> str:
    """Agree on a name that the ranks of this start have in common, and those of no other. A collective.

    torchrun keeps one store for all its starts, with the addresses of ranks that have ended in it; and the
    number of starts that it tells may differ from node to node.

    Args:
        store: of all ranks, and of those that were there before them.
        world: this process's place.

    Raises:
        BackendError: a rank has not come.
        LaunchError: ranks were told different numbers of ranks, or two the same rank, by plain variables.
    """
    own = secrets.token_hex(8)
    store.set(_here(world.rank), own)
    # Those of torchrun's that have ended may have been others, and more or fewer.
    by_variables = world.launcher != "torchrun"
    start = monotonic()
    pause = max(_SHORTEST_PAUSE_S, world.size * _PAUSE_PER_RANK_S)
    all_here = [_here(rank) for rank in range(world.size)]
    here: list[str] = []
    awaited = all_here
    missing = names_of_absent(store, lambda: awaited) if world.is_main else None
    where = f"all ranks to come to {_store_name(world)} at {at(*_master(world))}"
    with waiting(world, where, STARTED, known=missing):
        while monotonic() - start < PATIENCE.total_seconds():
            if by_variables and store.get(_here(world.rank)).decode() != own:
                raise LaunchError(
                    f"another process has come to {at(*_master(world))} as rank {world.rank}, too. Give each "
                    f"rank a RANK of its own, and each job on a host a MASTER_PORT of its own."
                )
            if world.is_main and store.check(all_here):
                # Of ranks that have ended, perhaps: theirs do not agree, and are written over.
                now = [text.decode() for text in store.multi_get(all_here)]
                if now != here:
                    here = now
                    store.set("dualeval/name", json.dumps([secrets.token_hex(8), *here]))
            # Rank 0 goes by a name of its own start alone. The others may wait for it in the store, unless
            # they have to look whether another has come in their place.
            named_yet = here if world.is_main else not by_variables or store.check(["dualeval/name"])
            if named_yet:
                name, *named = json.loads(store.get("dualeval/name"))
                if by_variables and len(named) != world.size:
                    store.set(f"dualeval/{name}/size", str(world.size))
                    raise _different_sizes(world.rank, world.size, len(named))
                awaited = [f"dualeval/{name}/agreed/{rank}" for rank in range(world.size)]
                if world.is_main and store.check([f"dualeval/{name}/size"]):
                    other = int(store.get(f"dualeval/{name}/size"))
                    raise _different_sizes(None, other, world.size)
                if named == here or (not world.is_main and named[world.rank : world.rank + 1] == [own]):
                    store.set(awaited[world.rank], "")
                    if world.is_main and store.check(awaited):
                        store.set(f"dualeval/{name}/go", "")
                    if store.check([f"dualeval/{name}/go"]):
                        return str(name)
            sleep(pause)
    raise BackendError(
        f"the {world.size} ranks have not met at {_store_name(world)} in "
        f"{PATIENCE.total_seconds() / 60:.0f} minutes{f': {missing()}' if missing else ''}"
    )


def _different_sizes(rank: int | None, size: int, rank_0s: int) -> LaunchError:
    who = "another rank" if rank is None else f"rank {rank}"
    return LaunchError(
        f"{who} was told that there are {size} ranks, and rank 0 that there are {rank_0s}. Set WORLD_SIZE to "
        f"the number of ranks, the same on each of them."
    )


def own_place(world: World) -> tuple[str, int]:
    """What tells this rank's host from all others, and the number on it that its launcher gave to it."""
    # By the name too: where kernels are played (gVisor), hosts may look alike otherwise.
    return f"{host_identity()} {socket.gethostname()}", world.local_rank


def placed_on_hosts(world: World, store: Store) -> World:
    """Find which ranks share a host, where the launcher does not tell. A collective there.

    Args:
        world: this process's place.
        store: one that all ranks share.

    Returns:
        the world with this rank's place on its node.
    """
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

    Args:
        world: this process's place.
        store: one that all ranks share.
        port: on rank 0, where that store is served on all of its interfaces; None elsewhere.

    Returns:
        its name; the loopback interface where what the launcher calls nodes is one host; None where none was
        found.
    """
    if world.is_main:
        offer = {"host": host_identity(), "addresses": offered_addresses(one_node=False), "port": port}
        store.set("dualeval/offer", json.dumps(offer))
    with joining(world, store, "the search for the network between the nodes"):
        offer = json.loads(store.get("dualeval/offer"))
        if offer["host"] != host_identity():
            address, _ = reach(offer["addresses"], offer["port"])
            own = None if address is None else own_address_towards(address)
            store.set(_ELSEWHERE, own or "")
        else:
            if store.add("dualeval/with-rank-0", 1) == world.size:
                store.set(_ELSEWHERE, LOOPBACK)
            # Any rank of another host has told how it comes here, or the last rank that there is none.
            peer = store.get(_ELSEWHERE).decode()
            own = own_address_towards(peer) if peer else None
    return interface_of(own) if own else None


@contextmanager
def interface_beside(world: World, store: Store) -> Iterator[str | None]:
    """Find that interface where a library of the script's own has joined the ranks. A collective.

    Until the block is left, rank 0 can be reached where the others look for it.

    Args:
        world: this process's place.
        store: one that all ranks share, for this search alone.
    """
    store.set(_here(world.rank), "")
    server = serve_store(world)[0] if world.is_main else None
    yield interface_between_nodes(world, store, None if server is None else server.port)


def nccl_variables(interface: str | None) -> dict[str, str]:
    """Find what tells NCCL over which network interface the nodes reach each other, as horovodrun does.

    NCCL reads it when it first needs it, which is long after its library has joined the ranks: it has to stay
    set for as long as the backend lives.

    Args:
        interface: from ``interface_between_nodes``; None leaves it to NCCL.
    """
    # "=" is NCCL's word for this very name; without it every interface that begins so would do.
    return {"NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}
