"""Meetings of ranks, the interfaces between hosts, and what ranks find out where no launcher tells them."""

from __future__ import annotations

import contextlib
import importlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from dualeval.backends import horovod, rendezvous
from dualeval.backends.horovod import gloo_variables
from dualeval.errors import BackendError
from dualeval.world import World, network, waiting
from dualeval.world.meetings import MeetingAtStore
from dualeval.world.meetings import address as at_address
from dualeval.world.meetings.address import AtMaster, AtTorchrun, come_to_meeting, meeting
from dualeval.world.meetings.served import AtHorovodrun
from dualeval.world.network import (
    LOOPBACK,
    at,
    interface_of,
    interface_towards,
    offered_addresses,
    own_address_towards,
    reach,
)
from dualeval.world.store import names_of_absent
from tests.vehicles.environments import world_at

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
def test_a_meeting_takes_the_next_port_where_another_program_has_it(
    port: int, answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_address, "_ANSWER_S", 0.2)
    with other_program(port, answer), meeting(port, "c.1.0", WORDS):
        assert come(LOOPBACK, port, "c.1.0") == WORDS


def test_a_meeting_is_found_on_a_later_port_when_the_first_is_free(port: int) -> None:
    with contextlib.ExitStack() as held:
        with other_program(port, b""):
            held.enter_context(meeting(port, "c.1.0", WORDS))
        assert come(LOOPBACK, port, "c.1.0") == WORDS


def test_two_meetings_of_one_run_are_told_apart(port: int) -> None:
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


def test_a_meeting_that_never_is_ends_with_an_error(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_ranks_meet_over_ipv4_and_ipv6(port: int) -> None:
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


def test_the_master_and_permanent_addresses_are_offered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


# -- what ranks find out for themselves where no launcher of the library's own tells them -------------------


def world_of(rank: int, node_sizes: tuple[int, ...]) -> World:
    """A rank's place where ranks fill one node after the other."""
    node = next(n for n in range(len(node_sizes)) if rank < sum(node_sizes[: n + 1]))
    local_rank = rank - sum(node_sizes[:node])
    numbers = (rank, sum(node_sizes), local_rank, node_sizes[node], node)
    return world_at("srun", *numbers, node_sizes=node_sizes)


@pytest.mark.needs("horovod")
@pytest.mark.parametrize("node_sizes", [(1,), (2, 2), (2, 1, 3)])
def test_horovods_variables_are_those_that_horovodrun_sets(node_sizes: tuple[int, ...]) -> None:
    hosts_module = importlib.import_module("horovod.runner.common.util.hosts")
    hosts = [hosts_module.HostInfo(f"h{node}", size) for node, size in enumerate(node_sizes)]
    for slot in hosts_module.get_host_assignments(hosts, sum(node_sizes)):
        own = gloo_variables(world_of(slot.rank, node_sizes), "10.0.0.1", 4711, "eth0")
        expected = {
            "HOROVOD_RANK": slot.rank,
            "HOROVOD_SIZE": slot.size,
            "HOROVOD_LOCAL_RANK": slot.local_rank,
            "HOROVOD_LOCAL_SIZE": slot.local_size,
            "HOROVOD_CROSS_RANK": slot.cross_rank,
            "HOROVOD_CROSS_SIZE": slot.cross_size,
        }
        assert {name: own[name] for name in expected} == {k: str(v) for k, v in expected.items()}
        assert own["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.1"
        assert own["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "4711"
        assert own["HOROVOD_GLOO_IFACE"] == "eth0"
        unknown = gloo_variables(world_of(slot.rank, node_sizes), "10.0.0.1", 4711, None)
        assert "HOROVOD_GLOO_IFACE" not in unknown


def interfaces(hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What ranks on hosts of these names find, each in a thread of its own."""
    server = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    own = threading.local()
    monkeypatch.setattr(rendezvous, "host_identity", lambda: own.host)
    # Rank 0 offers what others can reach it at: here the loopback address, for want of another network.
    monkeypatch.setattr(rendezvous, "offered_addresses", lambda *, one_node: [LOOPBACK])

    def work(rank: int) -> str | None:
        own.host = hosts[rank]
        world = World(
            rank=rank, size=len(hosts), local_rank=0, local_size=1, node_rank=rank, launcher="torchrun"
        )
        store = TCPStore(LOOPBACK, server.port, is_master=False, timeout=timedelta(seconds=30))
        return rendezvous.interface_between_nodes(world, store, server.port if rank == 0 else None)

    with ThreadPoolExecutor(len(hosts)) as ranks:
        return list(ranks.map(work, range(len(hosts))))


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "a", "a"], ["a", "b"], ["a", "a", "b"], ["a", "b", "c"]])
def test_every_rank_finds_a_network(hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the nodes of a launcher's are one host: nobody waits for a rank elsewhere."""
    assert interfaces(hosts, monkeypatch) == ["lo"] * len(hosts)


def test_no_way_between_hosts_is_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "reach", lambda addresses, port: (None, []))
    assert interfaces(["a", "b", "a"], monkeypatch) == [None] * 3


def test_horovodruns_rendezvous_is_named_where_it_cannot_be_reached() -> None:
    with socket.create_server((LOOPBACK, 0)) as closed:
        place = (LOOPBACK, closed.getsockname()[1])
    world = replace(world_of(0, (2,)), launcher="horovodrun", meeting=AtHorovodrun(address=place))
    with (
        pytest.raises(BackendError, match=f"rendezvous at {place[0]}:{place[1]} cannot be reached"),
        world.meeting.open(world, "a test"),
    ):
        pass


def test_a_rank_alone_meets_nobody() -> None:
    world = World.alone()
    with MeetingAtStore().open(world, "a test") as (store, host, port):
        store.set("a", "1")
        assert (store.get("a"), host) == (b"1", LOOPBACK)
        assert port is not None


def test_an_address_of_torchruns_that_leads_nowhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch itself would try for as long as a rank may be late."""
    monkeypatch.setattr(at_address, "_NAMED_WITHIN_S", 0.0)
    world = world_at("torchrun", 1, 2, 0, 1, 1, meeting=AtTorchrun(address=("h0.invalid", 29500)))
    with (
        pytest.raises(BackendError, match=r"meet the others at h0\.invalid:29500, .* --local-addr ADDRESS"),
        world.meeting.open(world, "a test"),
    ):
        pass


def test_a_masters_name_that_is_not_known_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """That of a pod comes into the DNS when the pod runs; a rank that was there before ended at once."""
    asked = threading.Semaphore(0)
    is_known = threading.Event()
    really = socket.getaddrinfo

    def getaddrinfo(host: str, *others: Any, **more: Any) -> Any:
        asked.release()
        if host == "master" and not is_known.is_set():
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return really(LOOPBACK if host == "master" else host, *others, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(at_address, "_LOOK_UP_EVERY_S", 0.01)
    monkeypatch.setattr(waiting, "FIRST_WORD_S", 0.05)
    monkeypatch.setattr(AtMaster, "_connect", lambda self, world: "the store")
    world = replace(world_of(1, (2,)), launcher="env")
    with ThreadPoolExecutor(1) as pool:
        joined: Future[object] = pool.submit(AtMaster(address=("master", 29500))._join, world)
        for _ in range(3):
            assert asked.acquire(timeout=30)
        said = ""
        while "has waited" not in said:
            assert asked.acquire(timeout=30)
            said += capfd.readouterr().err
        is_known.set()
        assert joined.result(30) == "the store"
    assert "for the name master (MASTER_ADDR) to lead to a host. Check that rank 0 has been started" in said


def test_horovod_over_ipv6_is_refused() -> None:
    """Its rendezvous is asked over IPv4 alone, and would not be found."""
    horovod._require_ipv4("127.0.0.1", 3)
    horovod._require_ipv4("localhost", 3)
    for host in ("fd00::1", "h0.invalid"):
        with pytest.raises(BackendError, match=f"IPv4, and rank 3 reaches rank 0 at {host}"):
            horovod._require_ipv4(host, 3)


def test_nccl_is_told_its_network_by_a_variable() -> None:
    assert rendezvous.nccl_variables("ib0") == {"NCCL_SOCKET_IFNAME": "=ib0"}
    assert rendezvous.nccl_variables(None) == {}


def test_who_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By rank 0, from its store, also while that is in a call of another rank's key."""
    told: list[Callable[[], str]] = []

    def waits(*_: object, known: Callable[[], str]) -> AbstractContextManager[None]:
        told.append(known)
        return nullcontext()

    monkeypatch.setattr(rendezvous, "waiting", waits)
    server = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    with ThreadPoolExecutor(1) as other, rendezvous.joining(world_of(0, (2, 2)), server, "the library"):
        held = other.submit(server.get, "comes at the end")
        for come, expected in [
            ([0], "ranks 1 to 3 have not come"),
            ([2], "ranks 1 and 3 have not come"),
            ([1, 3], "all ranks have come to rank 0, but have yet to join"),
        ]:
            client = TCPStore(LOOPBACK, server.port, is_master=False)
            for rank in come:
                client.set(f"dualeval/here/{rank}", "")
                client.get(f"dualeval/here/{rank}")  # set does not wait until the store has it
            assert told[0]() == expected
        client.set("comes at the end", "")
        held.result(timeout=30)


def test_a_store_that_is_gone_is_said() -> None:
    server = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    client = TCPStore(LOOPBACK, server.port, is_master=False, timeout=timedelta(seconds=1))
    names = names_of_absent(client, lambda: ["a", "b"])
    client.set("a", "")
    client.get("a")  # set does not wait until the store has it
    assert names() == "rank 1 has not come"
    del server
    assert names().startswith("the store does not answer")
