"""The end of a run, as far as this rank knows of it: why, by whom, and who has saved what it had.

Any thread reports here what ends the run. The helper thread (``plane``) takes it to the store, and brings
what holds for all ranks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dualeval.engine.control.meeting import Meetings
from dualeval.engine.control.progress import Name
from dualeval.engine.control.verdict import Verdict
from dualeval.errors import DualevalError, PeerError


class Ending:
    """What a rank knows of the end of the run, and reports of it; a part of its ``ControlPlane``."""

    def __init__(self, name: Name, meetings: Meetings | None) -> None:
        self.name = name
        self.size = 1 if meetings is None else meetings.size
        # Set when another rank's failure or a stop has been heard of, for who watches.
        self.news = threading.Event()
        # Set on rank 0 when all ranks have reported that they have `saved`; on the others when rank 0 has
        # written that down.
        self.all_saved = threading.Event()
        # Why all ranks end, as the store has decided; None as long as nothing is known of it here.
        self.verdict: Verdict | None = None
        # The failure that was heard of first, which may be this rank's alone: rank 0 is gone.
        self.failure: PeerError | None = None
        # The name of the signal that has asked the run to end; None where none has.
        self.stopping: str | None = None
        self._meetings = meetings
        self._saved: int | None = None
        self._saved_by_all: dict[int, int] = {}
        self._names: dict[int, Name] = {name.rank: name}
        # What the helper thread is to say to the store with its next beat.
        self._outbox: deque[Callable[[TCPStore], None]] = deque()
        self._wake = threading.Event()

    @property
    def end_code(self) -> int | None:
        """What rank 0 ends with, once it has said so."""
        held = self.verdict
        return held.exit_code if held is not None and held.kind == "end" else None

    def stop(self, signal: str) -> None:
        """Ask all ranks to end: this one knows at once, the others with their next beat."""
        if self.stopping is None:
            self.stopping = signal
            self._propose(Verdict.stop(self.name.rank, signal))
        self.news.set()

    def saved(self, chunks: int) -> None:
        """Report that this rank has saved what it had finished, and does nothing more."""
        self._saved = self._saved_by_all[self.name.rank] = chunks
        if self._meetings is None:
            self.all_saved.set()
        self._wake.set()

    def fail_to_save(self, problem: str) -> None:
        """Report, in place of ``saved``, that this rank cannot save what it had."""
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
        """On rank 0: the ranks that have not reported that they have saved what they had."""
        return [
            str(self._names.get(rank, f"rank {rank}"))
            for rank in range(self.size)
            if rank not in self._saved_by_all
        ]

    @property
    def ended(self) -> str | None:
        """On rank 0: what is said of a missing rank whose process, on this host, has ended."""
        gone = self._gone()
        return how_it_ended(gone[0]) if gone else None

    def _gone(self, left: Collection[int] = ()) -> list[Name]:
        """Ranks of this host whose process has ended, though they have not saved, or left."""
        known = {*self._saved_by_all, *left}
        return [name for rank, name in self._names.items() if rank not in known and name.has_ended]

    def _conclude(self, failure: Verdict) -> None:
        # In this order: the helper thread ends once it has heard of a failure and has nothing to propose.
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
        """Take note of the verdict that holds."""
        before = self.verdict
        if verdict == before or (verdict.kind == "attempt" and before and not verdict.replaces(before)):
            return
        self.verdict = verdict
        if verdict.kind == "attempt":
            return  # the main thread looks for it
        if verdict.kind != "stop":
            # Nothing more of what is waited for will come.
            self.all_saved.set()
        if verdict.kind == "failure":
            self._hear_failure(verdict.to_error())
        else:
            self.stopping = self.stopping or verdict.message or None
        self.news.set()


def how_it_ended(name: Name) -> str:
    """What is said of a rank whose process has ended without a word."""
    return f"{name} exited without a message: it was killed or crashed"
