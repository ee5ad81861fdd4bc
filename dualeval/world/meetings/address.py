"""At an address that all ranks know: rank 0 tells there where its store is, or the store itself is there.

The first follows from what Slurm or Flux says. The second is MASTER_ADDR and MASTER_PORT, where torchrun, or
rank 0 in its place, serves a store.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, ClassVar

from dualeval.errors import BackendError, LaunchError
from dualeval.torch_errors import TorchError
from dualeval.world import World
from dualeval.world.meetings import PATIENCE, MeetingAtStore, arrival
from dualeval.world.network import LATE_S, LOOPBACK, NAME_TOO_LONG, REACH_S, at
from dualeval.world.waiting import STARTED, waiting

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in __all__

# A meeting takes the first free one of so many ports from the agreed one on.
_PORTS_TRIED = 16
# What listens on a port and is no meeting of this run has this long to say so.
_ANSWER_S = 5.0
_LONGEST_ANSWER = 2**20  # bytes
# A host that cannot even be reached is told sooner.
_UNREACHABLE_S = 60.0
_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
_SHORTEST_PAUSE_S = 0.005
_PAUSE_PER_RANK_S = 1e-4
_NAMED_WITHIN_S = 60.0
_LOOK_UP_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True)
class AtAddress(MeetingAtStore):
    """At an address that follows from what the launcher says."""

    # Name or address of rank 0's host.
    host: str
    # The first port at which to meet there.
    port: int
    # What tells this run from all others that might be met there.
    run_id: str

    @property
    def host_of_rank_0(self) -> str:
        return self.host

    def _pass_on(self, world: World, offer: Any, purpose: str) -> AbstractContextManager[Any]:
        if world.is_main:
            return meeting(self.port, self.run_id, offer, purpose)
        return nullcontext(come_to_meeting(self.host, self.port, self.run_id, world, purpose))


@contextmanager
def meeting(port: int, run_id: str, payload: Any, purpose: str = "") -> Iterator[Any]:
    """Tell all who come to this host what they have to know; ``come_to_meeting`` is the other end."""
    server = _first_free(port, run_id, purpose)
    text = json.dumps({"run": run_id, "purpose": purpose, "payload": payload}).encode()

    over = threading.Event()

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                if over.is_set():
                    return
                # A caller that has gone again, or no file left for it just now: others are on their way.
                sleep(_PAUSE_S)
                continue
            # Nothing is read: who connects and then keeps silent holds up nobody.
            with connection, suppress(OSError):
                connection.sendall(text)

    serving = threading.Thread(target=serve, name="dualeval-meeting", daemon=True)
    serving.start()
    try:
        yield payload
    finally:
        over.set()
        # It ends the wait for the next caller; closing alone would not.
        server.shutdown(socket.SHUT_RDWR)
        serving.join()
        server.close()


def come_to_meeting(host: str, port: int, run_id: str, world: World, purpose: str = "") -> Any:
    """Wait until rank 0 holds its meeting, and return its payload."""
    ports = f"ports {port} to {port + _PORTS_TRIED - 1}"
    answer = _Answer()
    start = last_reached = monotonic()
    pause = _PAUSE_S
    with waiting(
        world,
        f"rank 0 at {host}, {ports}",
        f"Check that rank 0 has been started and what it says, that 'getent hosts {host}' prints its "
        f"address on this node, and that these ports are open between the nodes.",
        known=lambda: f"{host}: {answer.problem}",
        each_node=True,
    ):
        while True:
            answer = _ask_ports(host, port, run_id, purpose)
            if answer.payload is not None:
                return answer.payload[0]
            now = monotonic()
            if answer.reached:
                last_reached = now
            elif (answer.unknown and last_reached == start) or now - last_reached >= _UNREACHABLE_S:
                raise BackendError(
                    f"rank 0's host cannot be reached: {host}, {ports} ({host}: {answer.problem}). Its name "
                    f"must resolve on {socket.gethostname()}, in DNS or in /etc/hosts ('getent hosts {host}' "
                    "shows its address), and these ports must be open between the nodes."
                )
            if now - start > LATE_S:
                raise BackendError(
                    f"rank 0 has not come to {host}, {ports}, within {LATE_S / 60:.0f} minutes."
                )
            sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)


@dataclass
class _Answer:
    """What came of asking rank 0's host."""

    # That of the meeting, in a tuple; None where there is none.
    payload: tuple[Any] | None = None
    # Whether the host answered.
    reached: bool = False
    # Whether its name leads nowhere.
    unknown: bool = False
    # Why there is no payload.
    problem: str = "not asked yet"


def _ask_ports(host: str, port: int, run_id: str, purpose: str) -> _Answer:
    """Ask a host for the payload of a run's meeting, at each port where that may be held."""
    answer = _Answer(problem="it answers, but the ranks of this run do not meet there yet")
    for number in range(port, port + _PORTS_TRIED):
        try:
            reply = _ask(host, number, run_id)
        except ConnectionRefusedError:
            # The host is there; whoever had this port may have left since the meeting took a later one.
            answer.reached = True
            continue
        except socket.gaierror as error:
            # A name server that does not answer just now may do so in a moment.
            unknown = error.errno != socket.EAI_AGAIN
            return _Answer(unknown=unknown, problem="no such name" if unknown else str(error.strerror))
        except UnicodeError:
            return _Answer(unknown=True, problem=f"no such name: {NAME_TOO_LONG}")
        except OSError as error:
            answer.problem = str(error)
            break
        answer.reached = True
        if reply is not None and reply.get("purpose") == purpose:
            return _Answer(payload=(reply["payload"],), reached=True)
        if reply is not None:
            answer.problem = (
                f"rank 0 meets there for {reply.get('purpose')}, and this rank has come for {purpose}; if "
                f"that lasts, the ranks were not started with the same command"
            )
    return answer


def _first_free(port: int, run_id: str, purpose: str) -> socket.socket:
    """Listen on all interfaces of this host, on the first port that nobody else has."""
    both = socket.has_dualstack_ipv6()
    for number in range(port, port + _PORTS_TRIED):
        try:
            return socket.create_server(
                ("", number),
                family=socket.AF_INET6 if both else socket.AF_INET,
                dualstack_ipv6=both,
                backlog=1024,
            )
        except OSError as error:
            problem = error
        with suppress(OSError):
            reply = _ask(LOOPBACK, number, run_id)
            if reply is not None and reply.get("purpose") == purpose:
                raise BackendError(
                    f"another process on {socket.gethostname()} says that it is rank 0 of this run "
                    f"({run_id}) as well: a task of srun's has started several. Have srun start the ranks, "
                    f"or torchrun one task's."
                )
    raise BackendError(
        f"no port is free for the ranks to meet at: {port} to {port + _PORTS_TRIED - 1} on "
        f"{socket.gethostname()} ({problem})"
    )


def _ask(host: str, port: int, run_id: str) -> dict[str, Any] | None:
    """What a run's meeting tells; None where something else listens on this port."""
    with socket.create_connection((host, port), timeout=REACH_S) as connection:
        # One limit for all of it: another program may well send without end.
        end = monotonic() + _ANSWER_S
        text = b""
        with suppress(OSError):
            while (left := end - monotonic()) > 0 and len(text) < _LONGEST_ANSWER:
                connection.settimeout(left)
                part = connection.recv(65536)
                if not part:
                    break
                text += part
    with suppress(ValueError):
        answer = json.loads(text)
        if isinstance(answer, dict) and answer.get("run") == run_id:
            return answer
    return None


@dataclass(frozen=True, kw_only=True)
class AtMaster(MeetingAtStore):
    """At a store that rank 0 serves."""

    # Host and port of the store.
    address: tuple[str, int]
    # What the store is called in messages.
    name: ClassVar = "rank 0's store"
    # What has to be there, in advice.
    server: ClassVar = "rank 0 has been started"
    # What to do where the host's name leads nowhere.
    remedy: ClassVar = "Set MASTER_ADDR to an address of rank 0's host."
    # The store is new, and all who come to it are ranks of this start. That of torchrun may still name ranks
    # that have ended: others, and more or fewer.
    served_by_rank_0: ClassVar = True

    @property
    def host_of_rank_0(self) -> str:
        return self.address[0]

    @contextmanager
    def open(self, world: World, purpose: str) -> Iterator[tuple[Store, str, int | None]]:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        store = self._join(world)
        prefixed = PrefixStore(f"dualeval/{self._agree_on_name(store, world)}", store)
        prefixed.set(arrival(world.rank), "")
        yield prefixed, *self.address

    def _join(self, world: World) -> Store:
        """Join the store."""
        host, port = self.address
        in_dns = (
            f"Check that rank 0 has been started, and that 'getent hosts {host}' prints its address here."
        )
        with waiting(world, f"the name {host} (MASTER_ADDR) to lead to a host", in_dns, each_node=True):
            self._await_name(world)
        check = (
            f"Check that {self.server}, that 'getent hosts {host}' prints its address on this node, and that "
            f"this port is open between the nodes."
        )
        with waiting(world, f"{self.name} at {at(host, port)}", check, each_node=True):
            return self._connect(world)

    def _await_name(self, world: World) -> None:
        """Wait until the host's name is known: that of a pod comes into the DNS when the pod runs."""
        host, port = self.address
        start = monotonic()
        while True:
            try:
                socket.getaddrinfo(host, port)
                return
            except socket.gaierror as error:
                if error.errno == socket.EAI_AGAIN:
                    return  # no name server answers, and torch tries again by itself
                if monotonic() - start > _NAMED_WITHIN_S:
                    # torch would try for half an hour, and log pages of C++ frames.
                    raise BackendError(
                        f"rank {world.rank} is to meet the others at {at(host, port)}, by MASTER_ADDR and "
                        f"MASTER_PORT, but {socket.gethostname()} knows no host of that name, also after "
                        f"{_NAMED_WITHIN_S:.0f} s. {self.remedy}"
                    ) from error
            sleep(_LOOK_UP_EVERY_S)

    def _connect(self, world: World) -> Store:
        from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

        host, port = self.address
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
            if not TorchError.PORT_IN_USE.of(error):
                raise
            raise BackendError(
                f"port {port} of {socket.gethostname()}, where rank 0 is to serve by MASTER_PORT, is used by "
                "another program. Set another MASTER_PORT on all ranks: each job on a host needs its own."
            ) from error

    def _agree_on_name(self, store: Store, world: World) -> str:
        """Agree on a name that the ranks of this start have in common, and those of no other. A collective.

        torchrun keeps one store for all its starts, with the addresses of ranks that have ended in it; and
        the number of starts that it tells may differ from node to node.
        """
        from dualeval.world.store import names_of_absent

        token = secrets.token_hex(8)
        store.set(arrival(world.rank), token)
        start = monotonic()
        pause = max(_SHORTEST_PAUSE_S, world.size * _PAUSE_PER_RANK_S)
        all_here = [arrival(rank) for rank in range(world.size)]
        come: list[str] = []
        awaited = all_here
        missing = names_of_absent(store, lambda: awaited) if world.is_main else None
        where = f"all ranks to come to {self.name} at {at(*self.address)}"
        with waiting(world, where, STARTED, known=missing):
            while monotonic() - start < PATIENCE.total_seconds():
                if self.served_by_rank_0 and store.get(arrival(world.rank)).decode() != token:
                    raise LaunchError(
                        f"another process joined {at(*self.address)} as rank {world.rank}. Give each rank a "
                        "RANK of its own, and each job on a host a MASTER_PORT of its own."
                    )
                if world.is_main and store.check(all_here):
                    # Of ranks that have ended, perhaps: theirs do not agree, and are written over.
                    now = [text.decode() for text in store.multi_get(all_here)]
                    if now != come:
                        come = now
                        store.set("dualeval/name", json.dumps([secrets.token_hex(8), *come]))
                # Rank 0 goes by a name of its own start alone. The others may wait for it in the store,
                # unless they have to look whether another has come in their place.
                if world.is_main:
                    named_yet = bool(come)
                else:
                    named_yet = not self.served_by_rank_0 or store.check(["dualeval/name"])
                if named_yet:
                    name, *named = json.loads(store.get("dualeval/name"))
                    if self.served_by_rank_0 and len(named) != world.size:
                        store.set(f"dualeval/{name}/size", str(world.size))
                        raise _different_sizes(world.rank, world.size, len(named))
                    awaited = [f"dualeval/{name}/agreed/{rank}" for rank in range(world.size)]
                    if world.is_main and store.check([f"dualeval/{name}/size"]):
                        other = int(store.get(f"dualeval/{name}/size"))
                        raise _different_sizes(None, other, world.size)
                    if named == come or (not world.is_main and named[world.rank : world.rank + 1] == [token]):
                        store.set(awaited[world.rank], "")
                        if world.is_main and store.check(awaited):
                            store.set(f"dualeval/{name}/go", "")
                        if store.check([f"dualeval/{name}/go"]):
                            return str(name)
                sleep(pause)
        raise BackendError(
            f"the {world.size} ranks have not met at {self.name} in "
            f"{PATIENCE.total_seconds() / 60:.0f} minutes{f': {missing()}' if missing else ''}"
        )


class AtTorchrun(AtMaster):
    """At torchrun's own store, which outlives the ranks that its agent starts again."""

    name = "torchrun's store"
    server = "torchrun runs on the first node"
    remedy = (
        "Start torchrun with an address in its place: --rdzv-endpoint ADDRESS:PORT, and --local-addr "
        "ADDRESS on the first node, or --master-addr ADDRESS."
    )
    served_by_rank_0 = False

    def _connect(self, world: World) -> Store:
        from torch.distributed import rendezvous  # type: ignore[attr-defined]

        return next(rendezvous("env://", timeout=PATIENCE))[0]  # type: ignore[no-any-return]


def _different_sizes(rank: int | None, size: int, rank_0s: int) -> LaunchError:
    who = "another rank" if rank is None else f"rank {rank}"
    return LaunchError(
        f"{who} was told that there are {size} ranks, and rank 0 that there are {rank_0s}. Set WORLD_SIZE to "
        f"the number of ranks, the same on each of them."
    )
