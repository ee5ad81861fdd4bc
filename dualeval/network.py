"""How the ranks of a run find rank 0's host over TCP."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Sequence

LOOPBACK = "127.0.0.1"
_REACH_S = 10
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
