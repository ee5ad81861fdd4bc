"""What this rank knows of the end of the run: the reason, who caused it, and which ranks have saved.

Any thread may report an end here. The helper thread (``plane``) sends the report to the store, and reads the
verdict that holds for all ranks. A rank killed on rank 0's host is named here (``name_killed``): with each
beat rank 0 looks whose process is gone (``ControlPlane._observe``); on another host it is seen to hang.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dualeval.engine.control.progress import Name
from dualeval.engine.control.verdict import Verdict
from dualeval.errors import DualevalError, PeerError

if TYPE_CHECKING:
    from dualeval.engine.control.meeting import Meetings


class Ending:
    """The end of the run, as one rank knows and reports it; the base class of ``ControlPlane``."""

    def __init__(self, name: Name, meetings: Meetings | None) -> None:
        self.name = name
        self.size = 1 if meetings is None else meetings.size
        # Wakes the watch: set when this rank learns of a failure, a stop or the end.
        self.news = threading.Event()
        # Set on rank 0 when all ranks have reported `saved`, on the others when rank 0 has recorded the end.
        self.all_saved = threading.Event()
        # Why all ranks end, as the store has decided; None while this rank knows of no verdict.
        self.verdict: Verdict | None = None
        # The first known failure. Perhaps only this rank knows it, because rank 0 cannot be reached.
        self.failure: PeerError | None = None
        # Name of the signal that stops the run; None without one.
        self.stopping: str | None = None
        self._meetings = meetings
        self._saved: int | None = None
        self._saved_by_all: dict[int, int] = {}
        self._names: dict[int, Name] = {name.rank: name}
        # Messages that the helper thread sends to the store with its next heartbeat.
        self._outbox: deque[Callable[[TCPStore], None]] = deque()
        self._wake = threading.Event()

    @property
    def end_code(self) -> int | None:
        """Rank 0's exit code, once rank 0 has reported it."""
        held = self.verdict
        return held.exit_code if held is not None and held.kind == "end" else None

    def stop(self, signal: str) -> None:
        """Ask all ranks to end: this one learns of it at once, the others with their next heartbeat."""
        if self.stopping is None:
            self.stopping = signal
            self._propose(Verdict.stop(self.name.rank, signal))
        self.news.set()

    def saved(self, chunks: int) -> None:
        """Report that this rank has saved its finished chunks and does nothing more."""
        self._saved = self._saved_by_all[self.name.rank] = chunks
        if self._meetings is None:
            self.all_saved.set()
        self._wake.set()

    def fail_to_save(self, problem: str) -> None:
        """Report, in place of ``saved``, that this rank cannot save its finished chunks."""
        error = DualevalError(f"what was finished could not be saved: {problem}")
        self._conclude(Verdict.own_failure(self.name.rank, error, str(self.name)))
        self.all_saved.set()

    def give_up(self, message: str, *, rank: int) -> None:
        """Report that a rank has failed; the others hear of it with the next beat."""
        self._conclude(Verdict.failure(rank, message))

    @property
    def saved_by_all(self) -> int:
        """On rank 0: number of chunks saved by the ranks that have reported so."""
        return sum(self._saved_by_all.values())

    @property
    def missing(self) -> list[str]:
        """On rank 0: the ranks that have not reported `saved`."""
        return [
            str(self._names.get(rank, f"rank {rank}"))
            for rank in range(self.size)
            if rank not in self._saved_by_all
        ]

    @property
    def ended(self) -> str | None:
        """On rank 0: a message about a rank of this host whose process exited before it had saved."""
        gone = self._gone()
        return name_killed(gone[0]) if gone else None

    def _gone(self, left: Collection[int] = ()) -> list[Name]:
        """Ranks of this host whose process exited before they had saved or left."""
        known = {*self._saved_by_all, *left}
        return [name for rank, name in self._names.items() if rank not in known and name.has_ended]

    def _conclude(self, failure: Verdict) -> None:
        # Propose first: the helper thread exits once a failure is known and nothing is left to propose.
        self._propose(failure)
        self._hear_failure(failure.to_error())

    def _propose(self, verdict: Verdict) -> None:
        """Have the helper thread propose a verdict; a rank that is alone decides by itself."""
        if (meetings := self._meetings) is not None:
            self._say(lambda client: self._hear(meetings.propose(client, verdict)))
        elif self.verdict is None or verdict.replaces(self.verdict):
            self._hear(verdict)

    def _say(self, message: Callable[[TCPStore], None]) -> None:
        self._outbox.append(message)
        self._wake.set()

    def _hear_failure(self, failure: PeerError) -> None:
        if self.failure is None:
            self.failure = failure
        self.news.set()
        self._wake.set()

    def _hear(self, verdict: Verdict) -> None:
        """Record the verdict that holds."""
        before = self.verdict
        if verdict == before or (verdict.kind == "attempt" and before and not verdict.replaces(before)):
            return
        self.verdict = verdict
        if verdict.kind == "attempt":
            return  # the main thread checks for it
        if verdict.kind != "stop":
            # Nothing is left to wait for.
            self.all_saved.set()
        if verdict.kind == "failure":
            self._hear_failure(verdict.to_error())
        else:
            self.stopping = self.stopping or verdict.message or None
        self.news.set()


def name_killed(name: Name) -> str:
    """The message about a rank that was killed: its process exited without a report."""
    return f"{name} exited without a message: it was killed or crashed"
