"""The verdict: why all ranks of a run end early. There is one, and the store decides which.

One key holds it, set by ``compare_set``: of two ranks that fail at the same time one wins, and both read the
same verdict. A stop (a signal asks all ranks to end) may later be replaced by a failure, if a rank fails
before all have saved, or by the end, once rank 0 knows the exit code. Failure and end are final.

A run may make several attempts, such as one per model. The failure of one attempt is a verdict, too: it holds
for that attempt alone, and any other kind, or a later attempt's failure, replaces it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum, auto
from typing import Literal

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dualeval.errors import (
    EXIT_FAILED,
    EXIT_STOPPED,
    EXIT_USAGE,
    PeerError,
    PeerUsageError,
    Stopped,
    exit_code_of,
    message_of,
)

# The key, and its first value. Rank 0 sets it before any other rank knows the key: ranks read the key with
# each heartbeat, and the store's ``multi_get`` would wait for an absent key.
VERDICT, NO_VERDICT = "verdict", "-"
Action = Callable[[], object]


class Turn(Enum):
    """When a rank says why all ranks end."""

    # Unless another rank has said it; the others leave after that.
    IF_FIRST = auto()
    BEFORE_RANK_0 = auto()
    BEFORE_ALL_LEAVE = auto()
    # Asking nobody, and awaited by nobody.
    AT_ONCE = auto()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why all ranks end."""

    # "failure", "stop", "end", or "attempt": a failure that ends one attempt.
    kind: Literal["failure", "stop", "end", "attempt"]
    # The rank that failed or received the signal; 0 for "end".
    rank: int
    # The exit code of every rank.
    exit_code: int
    # The failure's text, or the signal's name.
    message: str = ""
    # The failed rank, with host and process, if it reported the failure itself; None if the message names the
    # rank.
    reporter: str | None = None
    # The number of the attempt that has failed.
    attempt: int = 0

    @classmethod
    def failure(cls, rank: int, message: str) -> Verdict:
        """A failure whose message names the rank."""
        return cls(kind="failure", rank=rank, exit_code=EXIT_FAILED, message=message)

    @classmethod
    def own_failure(
        cls, rank: int, error: BaseException, reporter: str, attempt: int | None = None
    ) -> Verdict:
        """A failure that the failed rank reports itself; of one attempt if ``attempt`` is given."""
        return cls(
            kind="failure" if attempt is None else "attempt",
            attempt=attempt or 0,
            rank=rank,
            exit_code=exit_code_of(error),
            message=message_of(error),
            reporter=reporter,
        )

    @classmethod
    def stop(cls, rank: int, signal: str) -> Verdict:
        """A signal that asks all ranks to end."""
        return cls(kind="stop", rank=rank, exit_code=EXIT_STOPPED, message=signal)

    @classmethod
    def read(cls, text: bytes | str) -> Verdict | None:
        """Parse the text that ``str`` gives; None if there is no verdict yet."""
        return None if text in (NO_VERDICT, NO_VERDICT.encode()) else cls(**json.loads(text))

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    def to_exception(self) -> PeerError | Stopped:
        """What ends the main thread: the failure, or the stop."""
        return Stopped(self.message) if self.kind == "stop" else self.to_error()

    def to_error(self) -> PeerError:
        """The failure, as an error to raise."""
        kind = PeerUsageError if self.exit_code == EXIT_USAGE else PeerError
        return kind(self.message, rank=self.rank, exit_code=self.exit_code, where=self.reporter)

    def replaces(self, other: Verdict) -> bool:
        """Whether this verdict may replace the other."""
        if other.kind == "attempt":
            return self.kind != "attempt" or self.attempt > other.attempt
        return other.kind == "stop" and self.kind in ("failure", "end")


def propose(store: TCPStore, key: str, verdict: Verdict) -> Verdict:
    """Propose a verdict to all ranks; returns the one that holds, which is this one or was there before."""
    expected = NO_VERDICT
    # A few rounds at most: what replaces a stop is final.
    while True:
        text = bytes(store.compare_set(key, expected, str(verdict))).decode()
        holds = Verdict.read(text)
        assert holds is not None, "the key is set before any rank knows it"
        if holds == verdict or not verdict.replaces(holds):
            return holds
        expected = text
