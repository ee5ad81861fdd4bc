"""At a store of values that the launcher serves: over PMI-1, or at horovodrun's rendezvous over HTTP.

The wire protocol of PMI-1, the Process Management Interface, is lines of text over a file descriptor, as Flux
(its RFC 13) and MPICH's Hydra speak it. horovodrun serves its rendezvous for Horovod's gloo.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import select
import socket
import stat
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from time import monotonic, sleep
from typing import Any

from dualeval.errors import BackendError, LaunchError
from dualeval.world import World
from dualeval.world.meetings import MeetingAtStore
from dualeval.world.network import LATE_S, at
from dualeval.world.waiting import STARTED, waiting

# Ranks may meet several times, all of them equally often: a name is never used again.
_numbers = itertools.count()
_LEAVE_S = 5.0
_ANSWER_S = 10.0
_PAUSE_S = 0.05


@dataclass(frozen=True, kw_only=True)
class OverPmi(MeetingAtStore):
    """Rank 0 puts into that store where its own is."""

    # The file descriptor at which the launcher answers.
    descriptor: int

    def _pass_on(self, world: World, offer: Any, purpose: str) -> AbstractContextManager[Any]:
        with waiting(world, "all ranks to come to the launcher's PMI", STARTED):
            return nullcontext(self._exchange(world, offer))

    def _exchange(self, world: World, payload: Any) -> Any:
        client = _Client(self.descriptor)
        number = next(_numbers)
        client.ask("init pmi_version=1 pmi_subversion=1")
        if number == 0:
            # A server may take a process that ends without this for lost, and drop its last message.
            atexit.register(client.leave)
        store = client.ask("get_my_kvsname")["kvsname"]
        longest = int(client.ask("get_maxes")["vallen_max"]) - 1
        name = f"dualeval-{number}"
        if world.is_main:
            # In hexadecimal digits: a space or an equals sign may end a value.
            text = json.dumps(payload).encode().hex()
            pieces = [text[start : start + longest] for start in range(0, len(text), longest)]
            keys = ["parts", *range(len(pieces))]
            for key, value in zip(keys, [len(pieces), *pieces], strict=True):
                client.ask(f"put kvsname={store} key={name}-{key} value={value}")
        client.ask("barrier_in")
        count = int(client.ask(f"get kvsname={store} key={name}-parts")["value"])
        read = (client.ask(f"get kvsname={store} key={name}-{part}")["value"] for part in range(count))
        return json.loads(bytes.fromhex("".join(read)))


class _Client:
    """One process's end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._read = b""
        try:
            mode = os.fstat(descriptor).st_mode
        except OSError:
            mode = 0
        if not stat.S_ISSOCK(mode):
            raise LaunchError(
                f"PMI_FD={descriptor} is not a connection to the launcher in this process: something in "
                "between has closed it. Have the launcher start dualeval itself, or give the ranks an "
                "address to meet at, as in 'flux run -o pmi=none --env=MASTER_ADDR=FIRST_HOST "
                "--env=MASTER_PORT=29500'."
            )

    def ask(self, request: str, limit_s: float = LATE_S) -> dict[str, str]:
        """Send a request and wait for its answer; returns that answer's values by name."""
        try:
            os.write(self._descriptor, f"cmd={request}\n".encode())
            answer = self._line(limit_s)
        except OSError as error:
            raise BackendError(f"the launcher's PMI broke off ({error})") from error
        values = dict(word.partition("=")[::2] for word in answer.split())
        if values.get("rc", "0") != "0":
            raise BackendError(f"the launcher's PMI answered {answer!r} to {request!r}")
        return values

    def leave(self) -> None:
        """Say that this process asks no more."""
        # At the end of the process nothing depends on an answer: the launcher may have gone before.
        with suppress(BackendError):
            self.ask("finalize", limit_s=_LEAVE_S)

    def _line(self, limit_s: float) -> str:
        deadline = monotonic() + limit_s
        while b"\n" not in self._read:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - monotonic()))
            if not ready:
                raise BackendError(f"not all ranks reached the launcher's PMI in {limit_s / 60:.0f} minutes")
            part = os.read(self._descriptor, 4096)
            if not part:
                raise BackendError("the launcher has closed its PMI")
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()


@dataclass(frozen=True, kw_only=True)
class AtHorovodrun(MeetingAtStore):
    """Rank 0 leaves a message beside those of Horovod itself."""

    # Host and port of the rendezvous.
    address: tuple[str, int]

    def _pass_on(self, world: World, offer: Any, purpose: str) -> AbstractContextManager[Any]:
        if not world.is_main:
            return nullcontext(self._await_message(world))
        status, _ = _ask(self.address, "PUT", json.dumps(offer).encode())
        if status != HTTPStatus.OK:
            raise BackendError(
                f"horovodrun's rendezvous at {at(*self.address)} answers {status}, expected 200"
            )
        return nullcontext(offer)

    def _await_message(self, world: World) -> Any:
        where = f"horovodrun's rendezvous, {at(*self.address)}"
        start = monotonic()
        with waiting(world, f"rank 0's message at {where}", STARTED):
            while monotonic() - start < LATE_S:
                status, content = _ask(self.address, "GET")
                if status == HTTPStatus.OK:
                    return json.loads(content)
                sleep(_PAUSE_S)
        raise BackendError(f"rank 0 left no message at {where}")


def _ask(address: tuple[str, int], method: str, body: bytes | None = None) -> tuple[int, bytes]:
    # Not urllib: that would go through the proxy that a user's variables name.
    connection = HTTPConnection(*address, timeout=_ANSWER_S)
    try:
        connection.request(method, "/dualeval/payload", body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, HTTPException) as error:
        raise BackendError(
            f"horovodrun's rendezvous at {at(*address)} cannot be reached ({error}). That is where "
            f"horovodrun was typed: its address must lead there from {socket.gethostname()}."
        ) from error
    finally:
        connection.close()
