"""This host's addresses, names and network interfaces, and those of others."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from dualeval.errors import LaunchError

LOOPBACK = "127.0.0.1"
REACH_S = 10
# How late a rank may be. The control plane notices, names and ends a dead or stalled rank long before.
LATE_S = 1800.0
# Linux: the IPv4 address of an interface (netdevice(7)).
_SIOCGIFADDR = 0x8915
# Linux: all IPv6 addresses of this host; scope 0 is global, and includes unique local ones (fd00::/8).
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_GLOBAL_SCOPE = 0x00
# Flags of addresses (if_addr.h) that cannot be used, or not for long: deprecated, failed, tentative.
_NOT_FOR_USE = 0x20 | 0x08 | 0x40
# RFC 1035. Linux takes a host name of 64 letters all the same, and Python then fails to look it up.
NAME_TOO_LONG = "a part of it between dots has more than 63 letters"


def offered_addresses(*, one_node: bool, master: str | None = None) -> list[str]:
    """Addresses under which this host may be reached, the likeliest first, without duplicates.

    They are those of its interfaces, not of its name, which Debian, for one, maps to 127.0.1.1.
    """
    if one_node:
        return [LOOPBACK]
    addresses = [address for address in map(_address_of, _interfaces()) if address is not None]
    outside = sorted(address for address in addresses if not address.startswith("127."))
    outside += sorted(address for address, name in _ipv6_addresses() if name != "lo")
    return list(dict.fromkeys([*([master] if master else []), *outside]))


def check_own_name() -> None:
    """Refuse a host name that cannot be looked up: libraries look up their own host by its name."""
    name = socket.gethostname()
    try:
        name.encode("idna")
    except UnicodeError as error:
        raise LaunchError(
            f"this host's name, {name!r}, cannot be looked up: {NAME_TOO_LONG}. Give the host a shorter name "
            "('hostname NAME'; for a container 'docker run --hostname NAME')."
        ) from error


def at(host: str, port: int) -> str:
    """A host and a port as text: ``n1:4711``, ``[fd00::1]:4711``."""
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


def reach(addresses: Sequence[str], port: int) -> tuple[str | None, list[str]]:
    """Find the first address that answers on a port."""
    tried = []
    for address in addresses:
        try:
            socket.create_connection((address, port), timeout=REACH_S).close()
        except OSError as error:
            tried.append(f"{at(address, port)} ({error})")
            continue
        return address, tried
    return None, tried


def named_by_addresses() -> str:
    """This host's name and addresses."""
    addresses = sorted(filter(None, map(_address_of, _interfaces())))
    return f"{socket.gethostname()}.{','.join(addresses)}"


def own_address_towards(host: str) -> str | None:
    """This host's own address on the route to another host; None without a route."""
    try:
        targets = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (socket.gaierror, UnicodeError):
        return None
    for family, kind, _, _, address in targets:
        with socket.socket(family, kind) as any_socket, suppress(OSError):
            # Nothing is sent: the kernel looks up the route.
            any_socket.connect(address)
            return str(any_socket.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """Name of the network interface with one of this host's addresses; None if none has it."""
    wanted = ip_address(address)
    if isinstance(wanted, IPv6Address):
        if wanted.scope_id is not None:
            return wanted.scope_id
        of_all = _ipv6_addresses(every=True)
        return next((name for other, name in of_all if ip_address(other) == wanted), None)
    return next((name for name in _interfaces() if _address_of(name) == address), None)


def interface_towards(host: str) -> str | None:
    """Name of the network interface over which this host reaches another one; None if it does not."""
    address = own_address_towards(host)
    return None if address is None else interface_of(address)


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _address_of(interface: str) -> str | None:
    """The IPv4 address of a network interface; None if it has none."""
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
    addresses = []
    for line in _IPV6_ADDRESSES.read_text("ascii").splitlines():
        digits, _, _, scope, flags, interface = line.split()
        # A link-local address (fe80::) can be used only with the name of an interface on the other host.
        if every or (int(scope, 16) == _GLOBAL_SCOPE and not int(flags, 16) & _NOT_FOR_USE):
            addresses.append((str(IPv6Address(int(digits, 16))), interface))
    return addresses
