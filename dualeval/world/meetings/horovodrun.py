"""At the rendezvous that horovodrun serves for Horovod's gloo: a store of values, over HTTP."""

from __future__ import annotations

import json
import socket
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from time import monotonic, sleep
from typing import Any

from dualeval.errors import BackendError
from dualeval.world import World
from dualeval.world.meetings import MeetingAtStore
from dualeval.world.network import LATE_S, at
from dualeval.world.waiting import STARTED, waiting

_ANSWER_S = 10.0
_PAUSE_S = 0.05


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
        raise BackendError(f"rank 0 has left no message at {where}")


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
