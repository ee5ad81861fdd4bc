"""Meetings of ranks that know a host and a port alone, and the interfaces between hosts."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dualeval import network
from dualeval.errors import BackendError
from dualeval.network import LOOPBACK, come_to_meeting, interface_of, meeting, own_address_towards

WORDS = {"port": 17, "addresses": ["10.0.0.1", "é" * 100_000]}
LIMIT_S = 30


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
    with socket.create_server(("", port)) as server:
        held = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    held.append(connection)
                    if answer is not None:
                        connection.sendall(answer)
                        connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in held:
            connection.close()


def test_all_who_come_are_told(port: int) -> None:
    with meeting(port, "c.1.0", WORDS), ThreadPoolExecutor(8) as ranks:
        told = list(ranks.map(lambda _: come_to_meeting(LOOPBACK, port, "c.1.0"), range(32)))
    assert told == [WORDS] * 32


def test_who_comes_first_waits(port: int) -> None:
    with ThreadPoolExecutor(1) as ranks:
        early = ranks.submit(come_to_meeting, LOOPBACK, port, "c.1.0")
        with pytest.raises(TimeoutError):
            early.result(timeout=0.2)
        with meeting(port, "c.1.0", WORDS):
            assert early.result(timeout=LIMIT_S) == WORDS


@pytest.mark.parametrize(
    "answer", [None, b"", b"SSH-2.0-OpenSSH\r\n", b'{"run": "c.2.0", "words": 1}', b"[1]"]
)
def test_the_next_port_where_another_program_has_it(
    port: int, answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_ANSWER_S", 0.2)
    with other_program(port, answer), meeting(port, "c.1.0", WORDS):
        assert come_to_meeting(LOOPBACK, port, "c.1.0") == WORDS


def test_found_on_a_later_port_after_the_other_program_has_left(port: int) -> None:
    with contextlib.ExitStack() as held:
        with other_program(port, b""):
            held.enter_context(meeting(port, "c.1.0", WORDS))
        assert come_to_meeting(LOOPBACK, port, "c.1.0") == WORDS


def test_two_runs_at_neighbouring_ports(port: int) -> None:
    with meeting(port, "c.1.0", "first"), meeting(port, "c.1.1", "second"):
        assert come_to_meeting(LOOPBACK, port, "c.1.0") == "first"
        assert come_to_meeting(LOOPBACK, port, "c.1.1") == "second"


def test_two_rank_0s_are_one_too_many(port: int) -> None:
    with (
        meeting(port, "c.1.0", WORDS),
        pytest.raises(BackendError, match=r"says that it is rank 0 of this run \(c\.1\.0\) as well"),
        meeting(port, "c.1.0", WORDS),
    ):
        pass


def test_a_silent_caller_holds_up_nobody(port: int) -> None:
    with meeting(port, "c.1.0", WORDS), socket.create_connection((LOOPBACK, port)):
        assert come_to_meeting(LOOPBACK, port, "c.1.0") == WORDS


def test_no_free_port_is_an_error(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_PORTS_TRIED", 1)
    with (
        other_program(port, b""),
        pytest.raises(BackendError, match=f"no port is free .* {port} to {port}"),
        meeting(port, "c.1.0", WORDS),
    ):
        pass


def test_an_unreachable_host_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_UNREACHABLE_S", 0.0)
    with pytest.raises(BackendError, match=r"host cannot be reached: nowhere\.invalid, ports") as caught:
        come_to_meeting("nowhere.invalid", port, "c.1.0")
    assert socket.gethostname() in str(caught.value)


def test_a_meeting_that_never_is(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host answers, so it is only late, for as long as ranks may be."""
    monkeypatch.setattr(network, "_UNREACHABLE_S", 0.0)
    monkeypatch.setattr(network, "LATE_S", 0.0)
    with pytest.raises(BackendError, match=f"rank 0 has not come to {LOOPBACK}, ports {port} to"):
        come_to_meeting(LOOPBACK, port, "c.1.0")


def test_interfaces() -> None:
    assert own_address_towards("127.0.0.5") == LOOPBACK
    assert interface_of(LOOPBACK) == "lo"
    assert interface_of("192.0.2.1") is None
