"""Meetings: ranks wait for each other here, share out chunks, choose who speaks, and leave in order.

All calls use the main thread's client of the store; a call hangs while rank 0's host is suspended or
unreachable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from time import monotonic, sleep

from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]

from dualeval.engine.control.progress import Name
from dualeval.engine.control.verdict import NO_VERDICT, VERDICT, Action, Turn, Verdict, propose
from dualeval.errors import EXIT_FAILED, PeerError
from dualeval.world.store import names_of_absent
from dualeval.world.waiting import limit_for, pause_for

_SPEAK_WITHIN_S = 3.0
_SHORTEST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05
_AFTER_RANK_0_S = 10.0
_LOOK_FOR_VERDICT_S = 0.5
_GO = "go"
_FAILED = "failed"


class Meetings:
    """The main thread's access to the store."""

    def __init__(self, store: TCPStore, token: str, size: int, name: Name, rank_0: Name) -> None:
        self.store = store
        self.size = size
        self._token = token
        self._name = name
        self._rank_0 = rank_0
        # Each attempt counts its meetings from 0: a rank on which one fails has held fewer than others.
        self._attempt = 0
        self._held = 0
        # False once the store does not answer: each call to a lost store makes torch print pages of frames.
        self.is_reachable = True

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Turn errors of the store within the block into a PeerError: rank 0 is gone."""
        gone = PeerError(
            f"{self._rank_0} can no longer be reached: it ended, or its host or network did",
            rank=0,
            exit_code=EXIT_FAILED,
        )
        if not self.is_reachable:
            raise gone
        try:
            yield
        except (DistNetworkError, DistStoreError) as error:
            raise gone from error

    def come(self, heartbeat: str) -> None:
        """Announce this rank."""
        with self.asking():
            self.store.set(self.key(f"heartbeat/{self._name.rank}"), heartbeat)
            self.store.set(self.key(f"name/{self._name.rank}"), json.dumps(asdict(self._name)))

    def key(self, name: str) -> str:
        """Prefix a key with the token of this run."""
        return f"{self._token}/{name}"

    def keys(self, name: str) -> list[str]:
        """The keys of all ranks for one name."""
        return [self.key(f"{name}/{rank}") for rank in range(self.size)]

    def names_of_absent(self) -> Callable[[], str]:
        """On rank 0: make a function, for another thread, that names the ranks that have not come."""
        return names_of_absent(self.store, lambda: self.keys("name"))

    def meet(self, check: Callable[[], None], limit_s: float) -> None:
        """Sleep until every rank has come here; raises the verdict if a rank has failed."""
        number = self._next
        self._held += 1
        # Rank 0 names the missing ranks; the others wait longer, and do so only if rank 0 does not.
        within_s = limit_s + (_AFTER_RANK_0_S if self._name.rank else 0.0)
        with self.asking():
            if self._is_last(f"arrived/{number}"):
                self.store.set(self.key(f"go/{number}"), _GO)
            if (value := self._await(f"go/{number}", within_s, check)) == _GO:
                return
            if value == _FAILED:
                verdict = Verdict.read(self.store.get(self.key(VERDICT)))
                assert verdict is not None, "who ends a meeting has given the verdict before"
                raise verdict.to_exception()
            missing = self.names_of_absent()() or "rank 0 has not answered the ranks that connected"
        raise PeerError(
            f"{missing} to the control plane within {limit_s:.0f} s of a collective that all ranks had "
            "reached",
            rank=self._name.rank,
            exit_code=EXIT_FAILED,
            where=str(self._name),
        )

    def _is_last(self, name: str) -> bool:
        """Count this rank; returns whether it is the last one."""
        return self.store.add(self.key(name), 1) == self.size

    def _await(
        self, name: str, limit_s: float = float("inf"), check: Callable[[], None] = lambda: None
    ) -> str | None:
        """Wait until a key is set; None after ``limit_s`` seconds without it."""
        start = monotonic()
        # Poll: a blocking wait of torch cannot be interrupted, and logs its timeout.
        pause, longest = _SHORTEST_PAUSE_S, pause_for(self.size, 1, _LONGEST_PAUSE_S)
        while not self.store.check([self.key(name)]):
            if monotonic() - start > limit_s:
                return None
            try:
                check()
            except Exception:
                # The key may have been set just before check() raised.
                if not self.store.check([self.key(name)]):
                    raise
                break
            sleep(pause)
            pause = min(1.5 * pause, longest)
        return bytes(self.store.get(self.key(name))).decode()

    def propose(self, store: TCPStore, verdict: Verdict) -> Verdict:
        """Propose a verdict, from any thread with a client of its own; returns the one that holds."""
        holds = propose(store, self.key(VERDICT), verdict)
        if verdict.kind in ("failure", "attempt"):
            # Other ranks can at most be waiting at the meeting that this rank would come to next.
            store.set(self.key(f"go/{self._next}"), _FAILED)
        return holds

    @property
    def _next(self) -> str:
        """Name of this rank's next meeting."""
        return f"{self._attempt}.{self._held}"

    def end_attempt(self, check: Callable[[], None]) -> Verdict | None:
        """Sleep until every rank has ended the attempt, whether it succeeded there or not."""
        over = f"over/{self._attempt}"
        with self.asking():
            if self._is_last(f"arrived/{over}"):
                # Only the last rank reads it: the others might already find the next attempt's verdict.
                self.store.set(self.key(over), bytes(self.store.get(self.key(VERDICT))).decode())
            verdict = self._await(over, check=check)
        self._attempt += 1
        self._held = 0
        return Verdict.read(verdict or NO_VERDICT)

    def claim(self, run: int) -> int:
        """Take the run's next number, from 0; no other rank gets the same."""
        with self.asking():
            return int(self.store.add(self.key(f"claims/{run}"), 1)) - 1

    def speak(self, turn: Turn, say: Action, do: Callable[[Action], object]) -> None:
        """Say why all ranks end, in this rank's turn; ``do`` makes a call to the store, which may hang."""
        is_asking, answers = turn is Turn.IF_FIRST, list[bool]()
        if not is_asking:
            say()
        if is_asking or turn is Turn.BEFORE_RANK_0:
            do(lambda: answers.append(self._may_speak()))
        if is_asking and answers != [False]:
            say()
        if turn is not Turn.AT_ONCE:
            # Before this process ends: other ranks can no longer ask rank 0 then.
            do(self._let_leave)

    def _may_speak(self) -> bool:
        """Whether no other rank prints why all ranks end: rank 0 does, or another if it is silent for 3 s.

        A launcher kills all ranks when the first one fails, so the others wait until rank 0 has spoken. But
        rank 0 may be in the middle of a long batch.
        """
        with suppress(PeerError), self.asking():
            # A rank that sees the key makes no further call: rank 0 may exit once it has spoken.
            within_s = limit_for(self.size, _SPEAK_WITHIN_S)
            if self._name.rank != 0 and self._await("spoken", within_s) is not None:
                return False
            return self.store.add(self.key("speakers"), 1) == 1
        return True  # rank 0 is gone, and nobody else is known to be there

    def _let_leave(self) -> None:
        with suppress(PeerError), self.asking():
            self.store.set(self.key("spoken"), _GO)

    def leave(self, limit_s: float, *, together: bool) -> bool:
        """Leave; rank 0, which serves the others, goes last. Returns whether all are known to have left."""
        verdict: Verdict | None = None
        all_left = False
        # If rank 0 has gone already, there is no order to keep.
        with suppress(PeerError), self.asking():
            if self._is_last("left"):
                self.store.set(self.key("all-left"), _GO)
            if self._name.rank == 0:
                # Wait for the last calls of the others: torch prints pages of frames when the store is gone.
                return self._await("all-gone", limit_s) is not None
            # Wait after a stop, too: if all ranks are through, the stop came too late.
            while together and not all_left and (verdict is None or verdict.kind == "stop"):
                all_left = self._await("all-left", _LOOK_FOR_VERDICT_S) is not None
                verdict = Verdict.read(self.store.get(self.key(VERDICT)))
            if self.store.add(self.key("gone"), 1) == self.size - 1:
                self.store.set(self.key("all-gone"), _GO)
        if verdict is not None and verdict.kind == "failure":
            raise verdict.to_error()
        return all_left
