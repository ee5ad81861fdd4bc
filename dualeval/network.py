"""How the ranks of a run find rank 0's host over TCP."""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from dualeval.errors import BackendError

LOOPBACK = "127.0.0.1"
_REACH_S = 10
# A meeting takes the first free one of so many ports from the agreed one on.
_PORTS_TRIED = 16
# What listens on a port and is no meeting of this run has this long to say so.
_ANSWER_S = 5.0
_LONGEST_ANSWER = 2**20  # bytes
# How late a rank may be. A dead or stalled one is noticed, named and ended by the control plane long before.
LATE_S = 1800.0
# A host that cannot even be reached is told sooner.
_UNREACHABLE_S = 60.0
_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
# Linux: the IPv4 address of an interface (netdevice(7)).
_SIOCGIFADDR = 0x8915


def offered_addresses(*, one_node: bool, master: str | None = None) -> list[str]:
    """Addresses under which this host may be reached, the likeliest first, each once.

    The interfaces are asked, not the host's name: Debian, for one, maps that to 127.0.1.1.

    Args:
        one_node: everyone who is to reach it runs on this very host.
        master: the name or address that the launcher gives to it, tried first.
    """
    if one_node:
        return [LOOPBACK]
    own = [address for address in map(_address_of, _interfaces()) if address is not None]
    outside = sorted(address for address in own if not address.startswith("127."))
    return list(dict.fromkeys([*([master] if master else []), *outside]))


def reach(addresses: Sequence[str], port: int) -> tuple[str | None, list[str]]:
    """Find the first address that answers on a port.

    Returns:
        the address, or None where none answered; and what was tried in vain, as text for a message.
    """
    tried = []
    for address in addresses:
        try:
            socket.create_connection((address, port), timeout=_REACH_S).close()
        except OSError as error:
            tried.append(f"{address}:{port} ({error})")
            continue
        return address, tried
    return None, tried


@contextmanager
def meeting(port: int, run_id: str, words: Any) -> Iterator[None]:
    """Tell all who come to this host what they have to know; ``come_to_meeting`` is the other end.

    Args:
        port: the agreed port. Where another program has it, the next one is taken, and so on.
        run_id: name of the run, so that one who comes to another's meeting can tell.
        words: plain values, as JSON has them.

    Raises:
        BackendError: no port is free, or another process holds this run's meeting already.
    """
    server = _first_free(port, run_id)
    text = json.dumps({"run": run_id, "words": words}).encode()

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
        yield
    finally:
        over.set()
        # It ends the wait for the next caller; closing alone would not.
        server.shutdown(socket.SHUT_RDWR)
        serving.join()
        server.close()


def come_to_meeting(host: str, port: int, run_id: str) -> Any:
    """Wait until rank 0 holds its meeting, and return its words.

    Raises:
        BackendError: the host cannot be reached, or has held no meeting for half an hour.
    """
    start = last_reached = monotonic()
    pause = _PAUSE_S
    problem = ""
    while True:
        reached = False
        for number in range(port, port + _PORTS_TRIED):
            try:
                words = _ask(host, number, run_id)
            except ConnectionRefusedError:
                # The host is there; whoever had this port may have left since the meeting took a later one.
                reached = True
                continue
            except OSError as error:
                problem = str(error)
                break
            reached = True
            if words is not None:
                return words[0]
        now = monotonic()
        if reached:
            last_reached = now
        where = f"{host}, ports {port} to {port + _PORTS_TRIED - 1}"
        if now - last_reached > _UNREACHABLE_S:
            raise BackendError(
                f"rank 0's host cannot be reached: {where} ({problem}). Its name has to lead to it from "
                f"{socket.gethostname()}, and these ports must be open between the nodes."
            )
        if now - start > LATE_S:
            raise BackendError(f"rank 0 has not come to {where} within {LATE_S / 60:.0f} minutes.")
        sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE_S)


def _first_free(port: int, run_id: str) -> socket.socket:
    """Listen on all interfaces of this host, on the first port that nobody else has.

    Raises:
        BackendError: there is none, or who has one holds a meeting of this very run.
    """
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
            if _ask(LOOPBACK, number, run_id) is not None:
                raise BackendError(
                    f"another process on {socket.gethostname()} says that it is rank 0 of this run "
                    f"({run_id}) as well: a task of srun's has started several. Have srun start the ranks, "
                    f"or torchrun one task's."
                )
    raise BackendError(
        f"no port is free for the ranks to meet at: {port} to {port + _PORTS_TRIED - 1} on "
        f"{socket.gethostname()} ({problem})"
    )


def _ask(host: str, port: int, run_id: str) -> tuple[Any] | None:
    """The words of a run's meeting; None where something else listens on this port."""
    with socket.create_connection((host, port), timeout=_REACH_S) as connection:
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
            return (answer["words"],)
    return None


def host_identity() -> str:
    """What two processes share if and only if they see the same network interfaces of the same kernel."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot}.{Path('/proc/self/ns/net').stat().st_ino}"


def own_address_towards(address: str) -> str | None:
    """This host's own address on the way to another one; None where there is no way."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as any_socket:
        try:
            # Nothing is sent: the kernel looks up the route.
            any_socket.connect((address, 9))
        except OSError:
            return None
        return str(any_socket.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Name of the network interface that has an IPv4 address of this host's; None where none has it."""
    return next((name for name in _interfaces() if _address_of(name) == address), None)


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _address_of(interface: str) -> str | None:
    """The IPv4 address of a network interface; None where it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        except OSError:  # EADDRNOTAVAIL: an interface without an address, as most virtual ones are
            return None
    return socket.inet_ntoa(answer[20:24])
