"""At an address that all ranks know: rank 0 tells there, to all who come, where its store is."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

from dualeval.errors import BackendError
from dualeval.world import World
from dualeval.world.meetings import MeetingAtStore
from dualeval.world.network import LATE_S, LOOPBACK, NAME_TOO_LONG, REACH_S
from dualeval.world.waiting import waiting

# A meeting takes the first free one of so many ports from the agreed one on.
_PORTS_TRIED = 16
# What listens on a port and is no meeting of this run has this long to say so.
_ANSWER_S = 5.0
_LONGEST_ANSWER = 2**20  # bytes
# A host that cannot even be reached is told sooner.
_UNREACHABLE_S = 60.0
_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5


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
                    f"rank 0's host cannot be reached: {host}, {ports} ({host}: {answer.problem}). Its "
                    f"name has to lead to it from {socket.gethostname()}, in DNS or in /etc/hosts ('getent "
                    f"hosts {host}' shows where it leads), and these ports must be open between the nodes."
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
    answer = _Answer(problem="it answers, but no meeting of this run is held there yet")
    for number in range(port, port + _PORTS_TRIED):
        try:
            said = _ask(host, number, run_id)
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
        if said is not None and said.get("purpose") == purpose:
            return _Answer(payload=(said["payload"],), reached=True)
        if said is not None:
            answer.problem = (
                f"rank 0 meets there for {said.get('purpose')}, and this rank has come for {purpose}; if "
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
            said = _ask(LOOPBACK, number, run_id)
            if said is not None and said.get("purpose") == purpose:
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
