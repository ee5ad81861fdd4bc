"""Watch: the thread that ends a rank which cannot end by itself, with what it has finished saved.

It makes no call to the store, and no collective. A rank's main thread may be in a collective that will never
end, in a forward that takes minutes or in a read that hangs; a signal or another rank's failure must end it
all the same.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from time import monotonic

from dualeval.engine.control import ControlPlane
from dualeval.engine.ending import end_process
from dualeval.engine.folder import RunFolder
from dualeval.engine.heartbeat import WAITING, Clock, Standstill
from dualeval.engine.recorder import Recorder
from dualeval.errors import DualevalError, PeerError, Stopped

# Seconds from a signal, or from the news of a failure, until the main thread is waited for no longer.
GRACE_S = 3.0
# Until rank 0 waits no longer for what the others have saved, and these no longer for rank 0 to write that
# down. Every rank has ended before 5 s.
_ALL_SAVED_WITHIN_S = 4.0
_STOPPED_WITHIN_S = 4.6
# Until a main thread that is on its way out is ended.
_OUT_WITHIN_S = 8.0
# Until a rank ends even where nothing of its Python runs.
_AT_LAST_S = 9.5
_LOOK_EVERY_S = 0.25
_FLUSH_WITHIN_S = 1.0
# After the time-out: what the others say of this rank comes first.
_NO_PYTHON_S = 3.0


class Watch:
    """Watches this rank's main thread, and ends the process where that does not.

    Args:
        control: what has been heard from other ranks and from signals.
        say: prints a line for people.
    """

    def __init__(self, control: ControlPlane, say: Callable[[str], None]) -> None:
        self._control = control
        self._say = say
        self._recorder: Recorder | None = None
        self._folder: RunFolder | None = None
        self._stacks: TextIOWrapper | None = None
        self._through = threading.Event()
        self._arming = threading.Lock()
        self._ends_with: int | None = None
        self._is_done = False
        self._has_dumped = False
        self._thread = threading.Thread(target=self._watch, name="dualeval-watch", daemon=True)
        self._thread.start()

    def keep(self, recorder: Recorder, folder: RunFolder) -> None:
        """Say what is to be saved before an end, and where stacks are written."""
        if self._control.timeout_s is not None:
            folder.stacks.parent.mkdir(exist_ok=True)
            self._stacks = folder.stacks.open("w")
        self._recorder, self._folder = recorder, folder

    def release(self) -> None:
        """Say that the run has come to its end: nothing is to be saved, and a signal comes too late."""
        self._is_done = True
        self._recorder = self._folder = None
        with self._arming:
            stacks, self._stacks = self._stacks, None
        if stacks is not None:
            # It was armed for the file that is to be closed.
            self._arm()
            stacks.close()
            path = Path(stacks.name)
            if path.exists() and path.stat().st_size == 0:
                path.unlink()

    def main_ends(self, code: int) -> None:
        """Say, from the main thread, that it is on its way to end the process with that exit code."""
        self._ends_with = code
        self._control.news.set()

    def wait_for_end(self) -> None:
        """Say, from the main thread, that a stop finds nothing more in hand; does not return."""
        self._through.set()
        self._control.news.set()
        threading.Event().wait()

    # -- the thread --------------------------------------------------------------------------------

    def _watch(self) -> None:
        clock = Clock(most_s=2 * _LOOK_EVERY_S + 1.0)
        own = Standstill(clock.now())
        answered = Standstill(clock.now())
        while not self._heard():
            self._arm()
            self._control.news.wait(_LOOK_EVERY_S)
            now = clock.now()
            if self._control.timeout_s is not None and not self._heard():
                still = own.seconds(self._control.steps(), now)
                silent = answered.seconds(self._control.answers, now)
                self._judge(still, silent, self._control.timeout_s)
        self._end()

    def _heard(self) -> bool:
        return (
            self._control.failure is not None
            or (self._control.stopping is not None and not self._is_done)
            or self._ends_with is not None
        )

    def _judge(self, still: float, silent: float, timeout_s: float) -> None:
        """End this rank where it stands still itself, or hears nothing of rank 0."""
        place = self._control.progress.place
        name = self._control.name
        if self._control.has_peers and silent > timeout_s:
            first = self._control.first
            self._control.give_up(f"{first}: no answer for {silent:.0f} s", rank=first.rank)
        elif still > timeout_s and place.stage not in WAITING:
            if not self._has_dumped:
                self._has_dumped = True
                faulthandler.dump_traceback(self._stacks or sys.stderr)
            # In a collective others may be the cause; they are told of first.
            if place.stage != "reduce" or still > timeout_s + _NO_PYTHON_S:
                self._control.give_up(f"{name}: no progress for {still:.0f} s, {place}", rank=name.rank)

    def _arm(self) -> None:
        """Have stacks written and the process ended where this thread does not come back in time.

        That is where C code holds the interpreter's lock: faulthandler's own thread needs none.
        """
        timeout_s = self._control.timeout_s
        if timeout_s is not None:
            with self._arming:
                file = self._stacks or sys.stderr
                faulthandler.dump_traceback_later(timeout_s + _NO_PYTHON_S, exit=True, file=file)

    def _end(self) -> None:
        """Give the main thread its time, save what is finished, and end the process."""
        start = monotonic()
        # Whatever hangs from here on, a full disk or a file server included.
        faulthandler.dump_traceback_later(_AT_LAST_S, exit=True, file=self._stacks or sys.stderr)
        stopped = self._control.stopping is not None and self._control.failure is None
        if stopped:
            # A launcher may leave a second between SIGTERM and SIGKILL.
            self._flush()
        self._through.wait(GRACE_S)
        if self._ends_with is not None:
            # It speaks and leaves by itself, if it can.
            threading.Event().wait(_OUT_WITHIN_S - (monotonic() - start))
            end_process(self._ends_with)
        problem = self._flush()
        error = self._stop(start, problem) if stopped else self._control.failure
        assert error is not None
        self._tell(error)
        end_process(error.exit_code)

    def _stop(self, start: float, problem: str | None) -> DualevalError:
        """Tell the others that this rank has saved what it had; rank 0 waits for all of them to say so."""
        recorder = self._recorder
        saved = 0 if recorder is None else recorder.chunks_saved
        self._control.saved(saved)
        within_s = _ALL_SAVED_WITHIN_S if self._control.name.rank == 0 else _STOPPED_WITHIN_S
        self._control.all_saved.wait(max(0.0, within_s - (monotonic() - start)))
        stop = Stopped(self._control.stopping or "")
        if problem is not None:
            return DualevalError(f"stopped by {stop}, but not everything was saved: {problem}")
        missing = self._control.missing if self._control.name.rank == 0 else []
        if missing:
            return DualevalError(
                f"stopped by {stop}, but nothing was heard of {', '.join(missing[:8])}: killed, or hanging"
            )
        return stop

    def _tell(self, error: DualevalError) -> None:
        """Say why this rank ends, on standard error and in status.json."""
        rank = self._control.name.rank
        if isinstance(error, Stopped):
            if rank == 0:
                folder = self._folder
                where = "" if folder is None else f" What is finished is saved in {folder.path}:"
                again = " Type" if folder is None else " type"
                self._say(f"dualeval: stopped by {error}.{where}{again} the same command again to go on.")
        else:
            self._say(spoken(error, rank))
        folder = self._folder
        # Where rank 0 is what failed, any other has to write it.
        writes = rank == 0 or (isinstance(error, PeerError) and error.rank == 0)
        if folder is not None and folder.shared and writes:
            folder.note_end(error, self._control.saved_by_all if isinstance(error, Stopped) else None)
            if rank == 0:
                folder.close()
        if isinstance(error, Stopped) and rank == 0:
            self._control.tell_end()

    def _flush(self) -> str | None:
        """Save what is finished; returns what stands in the way."""
        recorder = self._recorder
        try:
            if recorder is None or recorder.flush(_FLUSH_WITHIN_S):
                return None
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        return "writing hangs"


def spoken(error: DualevalError, rank: int) -> str:
    """What a rank says of the first failure: which rank, where, and why; once."""
    if not isinstance(error, PeerError):
        return f"dualeval: error: {error}"
    text = str(error) if str(error).startswith("rank ") else f"{error.where}: {error}"
    return f"dualeval: error: {text}" if rank == 0 else f"dualeval: rank {rank} ends: {text}"
