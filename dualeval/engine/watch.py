"""Watch: the thread that ends a rank which cannot end by itself, with what it has finished saved.

It makes no call to the store, and no collective. A rank's main thread may be in a collective that will never
end, in a forward that takes minutes or in a read that hangs; a signal or another rank's failure must end it
all the same.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from time import monotonic

from dualeval.engine.control.beats import WAITING, Clock, Standstill
from dualeval.engine.control.plane import ControlPlane
from dualeval.engine.ending import end_process, say
from dualeval.engine.folder.folder import RunFolder
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
_OWN_REDUCE_GRACE_S = 3.0


class Watch:
    """Watches this rank's main thread, and ends the process where that does not.

    Args:
        control: what has been heard from other ranks and from signals.
    """

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._recorder: Recorder | None = None
        self._folder: RunFolder | None = None
        self._stacks: TextIOWrapper | None = None
        self._through = threading.Event()
        self._arming = threading.Lock()
        self._ends_with: int | None = None
        self._is_done = False
        self._is_over = False
        self._has_dumped = False
        self._thread = threading.Thread(target=self._watch, name="dualeval-watch", daemon=True)
        self._thread.start()

    def keep(self, recorder: Recorder, folder: RunFolder) -> None:
        """Say what is to be saved before an end, and where stacks are written."""
        if self._control.timeout_s is not None:
            # Else they go to standard error: a full disk is met soon enough.
            with suppress(OSError), self._arming:
                folder.stacks.parent.mkdir(exist_ok=True)
                self._stacks = folder.stacks.open("w")
        self._recorder, self._folder = recorder, folder

    def release(self, *, done: bool) -> None:
        """Say that there is nothing to be saved any more.

        Args:
            done: whether the run has come to its end, so that a signal comes too late.
        """
        self._is_done = done
        self._recorder = self._folder = None
        with self._arming:
            stacks, self._stacks = self._stacks, None
            if stacks is None:
                return
            # It may be armed for the file that is to be closed; the next look arms it anew.
            faulthandler.cancel_dump_traceback_later()
            with suppress(OSError):
                stacks.close()
                path = Path(stacks.name)
                if path.stat().st_size == 0:
                    path.unlink()

    def stop(self) -> None:
        """Say that the run has come to its end and all ranks have left: nothing is left to be watched."""
        self._is_over = True
        with self._arming:
            faulthandler.cancel_dump_traceback_later()

    def main_ends(self, code: int) -> None:
        """Say, from the main thread, that it is on its way to end the process with that exit code."""
        self._ends_with = code
        self._control.news.set()

    def wait_for_end(self) -> None:
        """Say, from the main thread, that a stop finds nothing more in hand; does not return."""
        if self._is_done:
            # The signal came when all was done: what remained was to leave.
            end_process(EXIT_DONE)
        self._through.set()
        self._control.news.set()
        threading.Event().wait()

    # -- the thread --------------------------------------------------------------------------------

    def _watch(self) -> None:
        clock = Clock(most_s=2 * _LOOK_EVERY_S + 1.0)
        own = Standstill(clock.now())
        answered = Standstill(clock.now())
        while not self._heard():
            if self._is_over:
                return
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
            with self._arming:
                if not self._has_dumped:
                    self._has_dumped = True
                    faulthandler.dump_traceback(self._stacks or sys.stderr)
            # In a collective others may be the cause; rank 0 has the time to tell of them first.
            if place.stage != "reduce" or still > timeout_s + _OWN_REDUCE_GRACE_S:
                self._control.give_up(f"{name}: no progress for {still:.0f} s, {place}", rank=name.rank)

    def _arm(self) -> None:
        """Have stacks written and the process ended where this thread does not come back in time.

        That is where C code holds the interpreter's lock: faulthandler's own thread needs none.
        """
        timeout_s = self._control.timeout_s
        if timeout_s is not None:
            with self._arming:
                if self._is_over:
                    return
                file = self._stacks or sys.stderr
                faulthandler.dump_traceback_later(timeout_s + _NO_PYTHON_S, exit=True, file=file)

    def _end(self) -> None:
        """Give the main thread its time, save what is finished, and end the process."""
        start = monotonic()
        with self._arming:
            # Whatever hangs from here on, a full disk or a file server included.
            faulthandler.dump_traceback_later(_AT_LAST_S, exit=True, file=self._stacks or sys.stderr)
        if self._control.failure is None:
            # A launcher may leave a second between SIGTERM and SIGKILL.
            self._flush()
        self._through.wait(GRACE_S)
        if self._ends_with is not None or self._is_done:
            # It leaves by itself, if it can: with an error of its own, or out of a finished run.
            threading.Event().wait(_OUT_WITHIN_S - (monotonic() - start))
            end_process(EXIT_DONE if self._ends_with is None else self._ends_with)
        problem = self._flush()
        code = None if self._control.failure is not None else self._stop(start, problem)
        failure = self._control.failure
        # A failure that a rank has told of is why a launcher ends the others by a signal.
        if failure is not None and (code is None or failure.where is not None):
            say(spoken(failure, self._control.name.rank))
            # Where rank 0 is what failed, any other has to write it.
            if self._control.name.rank == 0 or failure.rank == 0:
                self._note(failure)
            code = failure.exit_code
        assert code is not None
        if self._folder is not None and not self._folder.shared:
            self._folder.close()
        if self._control.name.rank == 0 and self._control.stopping is not None:
            self._control.tell_end(code)
        end_process(code)

    def _stop(self, start: float, problem: str | None) -> int:
        """Have all ranks save what they have, and rank 0 write it down; returns the exit code."""
        control = self._control
        folder = self._folder
        if problem is None:
            control.saved(0 if self._recorder is None else self._recorder.chunks_saved)
        else:
            control.fail_to_save(problem)
        within_s = _ALL_SAVED_WITHIN_S if control.name.rank == 0 else _STOPPED_WITHIN_S
        control.all_saved.wait(max(0.0, within_s - (monotonic() - start)))
        if control.name.rank != 0:
            is_done = folder is not None and folder.shared and folder.is_done
            otherwise = EXIT_DONE if is_done else EXIT_STOPPED
            return otherwise if control.end_code is None else control.end_code
        if control.failure is not None and control.failure.where is not None:
            return control.failure.exit_code
        stop = Stopped(control.stopping or "")
        if folder is not None and folder.is_done:
            folder.close()
            say(f"dualeval: {stop} came when the result was written: {folder.path}")
            return EXIT_DONE
        missing = ", ".join(control.missing[:8])
        if missing:
            message = f"stopped by {stop}, but nothing was heard of {missing}: killed, or hanging"
            self._note(DualevalError(message))
            say(f"dualeval: error: {message}")
            return EXIT_FAILED
        self._note(stop)
        where = "Type" if folder is None else f"What is finished is saved in {folder.path}: type"
        say(f"dualeval: stopped by {stop}. {where} the same command again to go on.")
        return EXIT_STOPPED

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
