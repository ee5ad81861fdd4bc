"""How the ranks of a run find rank 0's host over TCP."""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from dualeval.errors import BackendError, LaunchError
from dualeval.waiting import waiting
from dualeval.world import World

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
# Where its name leads nowhere, but another address of the launcher's answers, that one has so long to be it.
_UNRESOLVED_S = 30.0
# Other addresses than the launcher's first word may be anybody's: they are asked when that does not answer,
# or when rank 0 is late there.
_OTHERS_AFTER_S = 10.0
_OTHERS_REACH_S = 3.0
_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
# Linux: the IPv4 address of an interface (netdevice(7)).
_SIOCGIFADDR = 0x8915
# Linux: all IPv6 addresses of this host; scope 0 is global, which unique local ones (fd00::/8) are as well.
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_GLOBAL_SCOPE = 0x00
# Flags of addresses (if_addr.h) that cannot be used, or not for long: deprecated, failed, tentative.
_NOT_FOR_USE = 0x20 | 0x08 | 0x40
# RFC 1035. Linux takes a host name of 64 letters all the same, and Python then fails to look it up.
_TOO_LONG = "a part of it between dots has more than 63 letters"


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
    outside += sorted(address for address, name in _ipv6_addresses() if name != "lo")
    return list(dict.fromkeys([*([master] if master else []), *outside]))


def check_own_name() -> None:
    """Refuse a host name with which libraries here cannot be used: they look their own host up by it.

    Raises:
        LaunchError: it is one that Python cannot look up.
    """
    name = socket.gethostname()
    try:
        name.encode("idna")
    except UnicodeError as error:
        raise LaunchError(
            f"this host's name, {name!r}, cannot be looked up: {_TOO_LONG}. Give the host a shorter name "
            "('hostname NAME'; for a container 'docker run --hostname NAME')."
        ) from error


def at(host: str, port: int) -> str:
    """A host and a port as text: ``n1:4711``, ``[fd00::1]:4711``."""
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


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
            tried.append(f"{at(address, port)} ({error})")
            continue
        return address, tried
    return None, tried


@contextmanager
def meeting(port: int, run_id: str, payload: Any) -> Iterator[None]:
    """Tell all who come to this host what they have to know; ``come_to_meeting`` is the other end.

    Args:
        port: the agreed port. Where another program has it, the next one is taken, and so on.
        run_id: name of the run, so that one who comes to another's meeting can tell.
        payload: plain values, as JSON has them.

    Raises:
        BackendError: no port is free, or another process holds this run's meeting already.
    """
    server = _first_free(port, run_id)
    text = json.dumps({"run": run_id, "payload": payload}).encode()

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


def come_to_meeting(hosts: Sequence[str], port: int, run_id: str, world: World) -> Any:
    """Wait until rank 0 holds its meeting, and return its payload.

    Args:
        hosts: names or addresses of rank 0's host: the one that the launcher says first, then others where
            it may be.
        port: the agreed port; the next ones are tried as well.
        run_id: name of the run.
        world: this rank's place, for messages.

    Raises:
        BackendError: the host's name leads nowhere, the host cannot be reached, or it has held no meeting for
            half an hour.
    """
    search = _Search(hosts, port, run_id)
    with waiting(
        world,
        f"rank 0 at {hosts[0]}, {search.ports}",
        f"Check that rank 0 has been started and what it says, that 'getent hosts {hosts[0]}' prints its "
        f"address on this node, and that these ports are open between the nodes.",
        known=search.outcome,
        each_node=True,
    ):
        return search.payload()


@dataclass
class _Answer:
    """What came of asking one host.

    Attributes:
        payload: that of the meeting, in a tuple; None where there is none.
        reached: whether the host answered.
        unknown: whether its name leads nowhere.
        problem: why there is no payload.
    """

    payload: tuple[Any] | None = None
    reached: bool = False
    unknown: bool = False
    problem: str = "not asked yet"


class _Search:
    """A rank on its way to rank 0's meeting."""

    def __init__(self, hosts: Sequence[str], port: int, run_id: str) -> None:
        self.ports = f"ports {port} to {port + _PORTS_TRIED - 1}"
        self._port = port
        self._run_id = run_id
        self._host, *self._others = dict.fromkeys(hosts)
        self._answers = {self._host: _Answer()}

    def payload(self) -> Any:
        """Ask until the payload is there; raises as ``come_to_meeting``."""
        start = last_reached = monotonic()
        pause = _PAUSE_S
        while True:
            first = self._ask(self._host, _REACH_S)
            others = []
            if not first.reached or monotonic() - start > _OTHERS_AFTER_S:
                others = [self._ask(host, _OTHERS_REACH_S) for host in self._others if first.payload is None]
            for answer in (first, *others):
                if answer.payload is not None:
                    return answer.payload[0]
            now = monotonic()
            limit = _UNREACHABLE_S
            if first.unknown and last_reached == start:
                limit = _UNRESOLVED_S if any(other.reached for other in others) else 0.0
            if first.reached:
                last_reached = now
            elif now - last_reached >= limit:
                raise BackendError(
                    f"rank 0's host cannot be reached: {self._host}, {self.ports} ({self.outcome()}). Its "
                    f"name has to lead to it from {socket.gethostname()}, in DNS or in /etc/hosts ('getent "
                    f"hosts {self._host}' shows where it leads), and these ports must be open between the "
                    f"nodes."
                )
            if now - start > LATE_S:
                raise BackendError(
                    f"rank 0 has not come to {self._host}, {self.ports}, within {LATE_S / 60:.0f} minutes."
                )
            sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)

    def outcome(self) -> str:
        """What came of it so far, for a message."""
        return "; ".join(f"{host}: {answer.problem}" for host, answer in list(self._answers.items()))

    def _ask(self, host: str, reach_s: float) -> _Answer:
        answer = self._answers[host] = _ask_ports(host, self._port, self._run_id, reach_s)
        return answer


def _ask_ports(host: str, port: int, run_id: str, reach_s: float) -> _Answer:
    """Ask a host for the payload of a run's meeting, at each port where that may be held."""
    answer = _Answer(problem="it answers, but no meeting of this run is held there yet")
    for number in range(port, port + _PORTS_TRIED):
        try:
            payload = _ask(host, number, run_id, reach_s)
        except ConnectionRefusedError:
            # The host is there; whoever had this port may have left since the meeting took a later one.
            answer.reached = True
            continue
        except socket.gaierror as error:
            # A name server that does not answer just now may do so in a moment.
            unknown = error.errno != socket.EAI_AGAIN
            return _Answer(unknown=unknown, problem="no such name" if unknown else str(error.strerror))
        except UnicodeError:
            return _Answer(unknown=True, problem=f"no such name: {_TOO_LONG}")
        except OSError as error:
            answer.problem = str(error)
            break
        answer.reached = True
        if payload is not None:
            return _Answer(payload=payload, reached=True)
    return answer


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


def _ask(host: str, port: int, run_id: str, reach_s: float = _REACH_S) -> tuple[Any] | None:
    """The payload of a run's meeting; None where something else listens on this port."""
    with socket.create_connection((host, port), timeout=reach_s) as connection:
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
            return (answer["payload"],)
    return None


def host_identity() -> str:
    """What two processes share if and only if they see the same network interfaces of the same kernel.

    Where there is no /proc to tell, as in some sandboxes: the host's name and its addresses.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}.{Path('/proc/self/ns/net').stat().st_ino}"
    except FileNotFoundError:
        addresses = sorted(filter(None, map(_address_of, _interfaces())))
        return f"{socket.gethostname()}.{','.join(addresses)}"


def own_address_towards(host: str) -> str | None:
    """This host's own address on the way to another one; None where there is no way."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (socket.gaierror, UnicodeError):
        return None
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as any_socket, suppress(OSError):
            # Nothing is sent: the kernel looks up the route.
            any_socket.connect(address)
            return str(any_socket.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """Name of the network interface that has an address of this host's; None where none has it."""
    wanted = ip_address(address)
    if isinstance(wanted, IPv6Address):
        if wanted.scope_id is not None:
            return wanted.scope_id
        of_all = _ipv6_addresses(every=True)
        return next((name for found, name in of_all if ip_address(found) == wanted), None)
    return next((name for name in _interfaces() if _address_of(name) == address), None)


def interface_towards(host: str) -> str | None:
    """Name of the network interface over which this host reaches another one; None where it does not."""
    own = own_address_towards(host)
    return None if own is None else interface_of(own)


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


def _ipv6_addresses(*, every: bool = False) -> list[tuple[str, str]]:
    """IPv6 addresses of this host, each with its interface: those that others can use, or ``every`` one."""
    if not _IPV6_ADDRESSES.exists():  # a kernel without IPv6
        return []
    found = []
    for line in _IPV6_ADDRESSES.read_text("ascii").splitlines():
        digits, _, _, scope, flags, interface = line.split()
        # A link-local address (fe80::) means something only together with an interface of the other host's.
        if every or (int(scope, 16) == _GLOBAL_SCOPE and not int(flags, 16) & _NOT_FOR_USE):
            found.append((str(IPv6Address(int(digits, 16))), interface))
    return found
