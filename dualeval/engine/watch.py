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
from dualeval.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, DualevalError, PeerError, Stopped

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
# After the time-out: this thread comes first, if it can; and mpirun leaves a rank one second after the others
# have ended.
_NO_PYTHON_S = 1.0
_REDUCE_GRACE_S = 3.0


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
            # Before the look at what is new: what comes after that sets it again.
            self._control.news.clear()
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
            if place.stage != "reduce" or still > timeout_s + _REDUCE_GRACE_S:
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
        if stopped and self._is_done:
            # It was on its way out of a finished run.
            threading.Event().wait(_OUT_WITHIN_S)
            end_process(EXIT_DONE)
        problem = self._flush()
        if stopped:
            end_process(self._stop(start, problem))
        failure = self._control.failure
        assert failure is not None
        self._say(spoken(failure, self._control.name.rank))
        # Where rank 0 is what failed, any other has to write it.
        if self._control.name.rank == 0 or failure.rank == 0:
            self._note(failure)
        end_process(failure.exit_code)

    def _stop(self, start: float, problem: str | None) -> int:
        """Have all ranks save what they have, and rank 0 write it down; returns the exit code."""
        control = self._control
        control.saved(0 if self._recorder is None else self._recorder.chunks_saved)
        if control.name.rank != 0:
            control.all_saved.wait(max(0.0, _STOPPED_WITHIN_S - (monotonic() - start)))
            folder = self._folder
            seen = folder is not None and folder.shared and folder.is_done
            return EXIT_DONE if control.was_done or seen else EXIT_STOPPED
        control.all_saved.wait(max(0.0, _ALL_SAVED_WITHIN_S - (monotonic() - start)))
        stop = Stopped(control.stopping or "")
        folder = self._folder
        if folder is not None and folder.is_done:
            self._say(f"dualeval: {stop} came when the result was written: {folder.path}")
            folder.close()
            control.tell_end(done=True)
            return EXIT_DONE
        missing = ", ".join(control.missing[:8])
        if problem is not None:
            self._fail_to_stop(f"stopped by {stop}, but not everything was saved: {problem}")
        elif missing:
            self._fail_to_stop(f"stopped by {stop}, but nothing was heard of {missing}: killed, or hanging")
        else:
            where = "Type" if folder is None else f"What is finished is saved in {folder.path}: type"
            self._say(f"dualeval: stopped by {stop}. {where} the same command again to go on.")
            self._note(stop)
            control.tell_end(done=False)
            return EXIT_STOPPED
        return EXIT_FAILED

    def _fail_to_stop(self, message: str) -> None:
        self._say(f"dualeval: error: {message}")
        self._note(DualevalError(message))

    def _note(self, error: DualevalError) -> None:
        """Write the end into status.json."""
        folder = self._folder
        if folder is not None and folder.shared:
            folder.note_end(error, self._control.saved_by_all if isinstance(error, Stopped) else None)
            folder.close()

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
    text = f"{error.where}: {error}" if error.where else str(error)
    return f"dualeval: error: {text}" if rank == 0 else f"dualeval: rank {rank} ends: {text}"
