"""Meetings of ranks that know a host and a port alone, and the interfaces between hosts."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from dualeval.errors import BackendError
from dualeval.world import network
from dualeval.world.meetings import address as at_address
from dualeval.world.meetings.address import come_to_meeting, meeting
from dualeval.world.network import (
    LOOPBACK,
    at,
    interface_of,
    interface_towards,
    offered_addresses,
    own_address_towards,
    reach,
)
from tests.environments import world_at

# The only other rank, on a node of its own.
OTHER = world_at("srun", 1, 2, 0, 1, 1, node_sizes=(1, 1))
WORDS = {"port": 17, "addresses": ["10.0.0.1", "é" * 100_000]}
LIMIT_S = 30


def come(host: str, port: int, run_id: str) -> Any:
    return come_to_meeting(host, port, run_id, OTHER)


@pytest.fixture
def port() -> int:
    """The first of two neighbours that are free now."""
    for _ in range(100):
        with socket.create_server(("", 0)) as first, contextlib.suppress(OSError):
            number = int(first.getsockname()[1])
            with socket.create_server(("", number + 1)):
                return number
    raise AssertionError("no two free ports")


@contextlib.contextmanager
def other_program(port: int, answer: bytes | None) -> Iterator[None]:
    """Something else that listens on the port; None never answers."""
    with socket.create_server(("", port)) as server, contextlib.ExitStack() as held:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = held.enter_context(server.accept()[0])
                    if answer is not None:
                        connection.sendall(answer)
                        connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_all_who_come_are_told(port: int) -> None:
    """Also while a caller says nothing."""
    silent = (LOOPBACK, port)
    with meeting(port, "c.1.0", WORDS), socket.create_connection(silent), ThreadPoolExecutor(8) as ranks:
        told = list(ranks.map(lambda _: come(LOOPBACK, port, "c.1.0"), range(32)))
    assert told == [WORDS] * 32


def test_who_comes_first_waits(port: int) -> None:
    with ThreadPoolExecutor(1) as ranks:
        early = ranks.submit(come, LOOPBACK, port, "c.1.0")
        with pytest.raises(TimeoutError):
            early.result(timeout=0.2)
        with meeting(port, "c.1.0", WORDS):
            assert early.result(timeout=LIMIT_S) == WORDS


@pytest.mark.parametrize(
    "answer", [None, b"", b"SSH-2.0-OpenSSH\r\n", b'{"run": "c.2.0", "payload": 1}', b"[1]"]
)
def test_the_next_port_where_another_program_has_it(
    port: int, answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_address, "_ANSWER_S", 0.2)
    with other_program(port, answer), meeting(port, "c.1.0", WORDS):
        assert come(LOOPBACK, port, "c.1.0") == WORDS


def test_found_on_a_later_port_after_the_other_program_has_left(port: int) -> None:
    with contextlib.ExitStack() as held:
        with other_program(port, b""):
            held.enter_context(meeting(port, "c.1.0", WORDS))
        assert come(LOOPBACK, port, "c.1.0") == WORDS


def test_two_meetings_of_one_run(port: int) -> None:
    with meeting(port, "c.1.0", "first", "the doctor"), meeting(port, "c.1.0", "second", "torch"):
        assert come_to_meeting(LOOPBACK, port, "c.1.0", OTHER, "torch") == "second"
        assert come_to_meeting(LOOPBACK, port, "c.1.0", OTHER, "the doctor") == "first"
    with meeting(port, "c.1.0", WORDS, "torch"):
        # As where one rank was given another --backend: what it waits for has to say so.
        answer = at_address._ask_ports(LOOPBACK, port, "c.1.0", "Horovod")
    assert answer.payload is None
    assert answer.problem.startswith("rank 0 meets there for torch, and this rank has come for Horovod")


def test_two_rank_0s_are_one_too_many(port: int) -> None:
    with (
        meeting(port, "c.1.0", WORDS),
        pytest.raises(BackendError, match=r"says that it is rank 0 of this run \(c\.1\.0\) as well"),
        meeting(port, "c.1.0", WORDS),
    ):
        pass


def test_no_free_port_is_an_error(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_address, "_PORTS_TRIED", 1)
    with (
        other_program(port, b""),
        pytest.raises(BackendError, match=f"no port is free .* {port} to {port}"),
        meeting(port, "c.1.0", WORDS),
    ):
        pass


def test_a_meeting_that_never_is(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host answers, so it is only late, for as long as ranks may be."""
    monkeypatch.setattr(at_address, "_UNREACHABLE_S", 0.0)
    monkeypatch.setattr(at_address, "LATE_S", 0.0)
    with pytest.raises(BackendError, match=f"rank 0 has not come to {LOOPBACK}, ports {port} to"):
        come(LOOPBACK, port, "c.1.0")


def test_a_name_that_leads_nowhere_is_an_error_at_once(port: int) -> None:
    start = monotonic()
    said = r"host cannot be reached: h0\.invalid, .* \(h0\.invalid: no such"
    with pytest.raises(BackendError, match=said) as caught:
        come("h0.invalid", port, "c.1.0")
    assert socket.gethostname() in str(caught.value)
    # A name server that is slow to say so takes its time, but nobody waits for a meeting.
    assert monotonic() - start < at_address._UNREACHABLE_S


@pytest.mark.skipif(not network._ipv6_addresses(every=True), reason="this kernel has no IPv6")
def test_both_families(port: int) -> None:
    assert own_address_towards("::1") == "::1"
    assert interface_of("::1") == interface_of("0:0:0:0:0:0:0:1") == interface_towards("::1") == "lo"
    assert interface_of("2001:db8::1") is None
    with meeting(port, "c.1.0", WORDS):
        assert come("::1", port, "c.1.0") == come(LOOPBACK, port, "c.1.0") == WORDS
        assert reach(["::1"], port) == ("::1", [])
    address, tried = reach(["::1", LOOPBACK], port)
    assert address is None
    assert [text.partition(" ")[0] for text in tried] == [f"[::1]:{port}", f"{LOOPBACK}:{port}"]
    assert at("n1", 7) == "n1:7"


def test_offered_addresses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fd000000000000000000000000000007 01 80 00 80       lo\n"
        "fe8000000000000000fc00fffe000001 04 40 20 80     eth0\n"
        "20010db8000000000000000000000005 04 40 00 80     eth0\n"
        "fd000000000000000000000000000002 04 40 00 80     eth0\n"
        "20010db8000000000000000000000006 04 40 00 c0     eth0\n"
        "20010db8000000000000000000000007 04 40 00 20     eth0\n"
    )
    monkeypatch.setattr(network, "_IPV6_ADDRESSES", table)
    monkeypatch.setattr(network, "_interfaces", lambda: ["lo", "eth0", "ib0"])
    monkeypatch.setattr(
        network, "_address_of", {"lo": LOOPBACK, "eth0": "10.0.0.2", "ib0": "10.1.0.2"}.__getitem__
    )
    assert offered_addresses(one_node=True, master="n1") == [LOOPBACK]
    own = ["10.0.0.2", "10.1.0.2", "2001:db8::5", "fd00::2"]
    assert offered_addresses(one_node=False, master="n1") == ["n1", *own]
    assert offered_addresses(one_node=False, master="fd00::2") == ["fd00::2", *own[:3]]
    table.unlink()
    assert offered_addresses(one_node=False) == own[:2]


def test_the_addresses_of_this_host_are_its_own() -> None:
    for address in offered_addresses(one_node=False):
        assert not ip_address(address).is_loopback
        assert not ip_address(address).is_link_local
        assert interface_of(address) is not None
        assert own_address_towards(address) is not None
