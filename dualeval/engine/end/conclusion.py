"""Conclusion: the one way in which a run ends early, whoever notices that it has to.

The main thread concludes it with the error that it has met, or the watch, where the main thread does not come
back. What is finished is saved, all ranks learn of the end, rank 0 writes it into status.json, it is said
once, and all end with one exit code.

An attempt ends here as well: every rank is still there then, and makes the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic

from dualeval.engine.control.plane import ControlPlane
from dualeval.engine.end.process import (
    close_displays,
    how_to_resume,
    say,
    say_if_uncaught,
    say_traceback,
    spoken,
    traceback_of,
    try_for,
)
from dualeval.engine.end.watch import Watch
from dualeval.engine.folder.folder import RunFolder
from dualeval.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    EXIT_USAGE,
    DualevalError,
    PeerError,
    Stopped,
    exit_code_of,
    text_of,
    with_type,
)
from dualeval.world.store import limit_for

# Until rank 0 waits no longer for what the others have saved, and these no longer for rank 0 to write that
# down. Every rank has ended before 5 s, of up to a thousand (``limit_for``).
ALL_SAVED_WITHIN_S = 4.0
_STOPPED_WITHIN_S = 4.6
_FLUSH_WITHIN_S = 1.0
_LEAVE_AFTER_FAILURE_S = 2.0
# Of a step that may hang.
_DONE_WITHIN_S = 1.0


class Conclusion:
    """How the runs of one session end early."""

    def __init__(
        self,
        control: ControlPlane,
        *,
        is_owner: bool,
        ends_process: bool,
        debug: bool = False,
        stop: Callable[[], bool | str] | None = None,
    ) -> None:
        self._control = control
        self._is_owner = is_owner
        self._debug = debug
        self._leave_within_s = limit_for(control.size, _LEAVE_AFTER_FAILURE_S)
        self._concluding = threading.Lock()
        # Of several attempts, how many are done; said where the run is stopped.
        self.progress = ""
        # Of a command: nobody catches its errors.
        self.is_command = False
        # Sees to it that it comes to a conclusion; what is to be saved is in its hands.
        self.watch = Watch(control, self.conclude, ends_process=ends_process, stop=stop)

    def conclude(self, error: BaseException | None = None) -> int:
        """Conclude the run, once; returns the exit code.

        ``error`` is what the main thread has met. Without one the watch's thread concludes, where the main
        thread is in something that does not return.
        """
        watch = self.watch
        if not self._concluding.acquire(blocking=False):
            # The other thread was first: its exit code stands, and the watch ends the process.
            within_s = limit_for(self._control.size, ALL_SAVED_WITHIN_S) if error is None else None
            threading.Event().wait(within_s)
            return watch.code
        if error is not None:
            watch.main_concludes(exit_code_of(error))
        close_displays()
        watch.code = self._end(error)
        self._release(watch.code)
        return watch.code

    def _end(self, error: BaseException | None) -> int:
        """Save what is finished, have all ranks know and one write down how it ends, say it."""
        control, code = self._control, None
        if control.failure is None and (isinstance(error, Stopped | None) or control.stopping is not None):
            # Whatever went wrong while ranks were ending: they were told to.
            if error is not None:
                control.stop(text_of(error))
            code = self._stop()
            met = control.failure or error
        else:
            met = control.failure if error is None else error
        if self._is_late(control.failure if error is None else error):
            return EXIT_DONE
        if code is not None and (control.failure is None or control.failure.where is None):
            return code
        assert met is not None
        return self._fail(met, by_watch=error is None)

    def of_attempt(self, error: Exception | None) -> PeerError | None:
        """End an attempt, from the main thread; every rank of the session calls it.

        What is finished is saved, all ranks learn how it went, and rank 0 writes a failure into status.json.
        The session goes on.
        """
        folder = self.watch.folder
        own = None if isinstance(error, PeerError) else error
        if error is not None:
            close_displays()
            self._save(error)
        if own is not None:
            self._control.fail_attempt(own)
            if self._is_owner:
                with _surviving("print the traceback"):
                    say_traceback(own, whole=self._debug)
        failure = self._control.end_attempt(went_well=error is None)
        if failure is not None:
            if failure.rank == 0 or (own is not None and text_of(own) == text_of(failure)):
                # What rank 0 met as well is no matter of one rank.
                failure.where = None
            if self._control.name.rank == 0:
                self._write_down(failure if error is None else error)
            # As it is done where a run ends.
            with _surviving("remove what the watch has written"):
                self.watch.release(done=False)
            if folder is not None:
                folder.close()
        return failure

    def _is_late(self, failure: BaseException | None) -> bool:
        """Whether a rank was lost, by no error of its own, after the result was written; says so."""
        folder = self.watch.folder
        if not isinstance(failure, PeerError) or failure.where is not None or self.watch.more_follows:
            return False
        if folder is None or not folder.shared or not folder.is_written:
            return False
        self._say(f"dualeval: note: the result is complete: {folder.path}; but {text_of(failure)}")
        return True

    def _release(self, code: int) -> None:
        """Close what shows that this run is at work, and let the others end."""
        folder = self.watch.folder
        with _surviving("remove what the watch has written"):
            # Nothing more is in hand, and the end is written down. The watch's file of stacks goes first.
            self.watch.release(done=False)
        with _surviving("release the folder"):
            if folder is not None:
                folder.close()
        if self._control.name.rank == 0 and self._control.stopping is not None:
            self._control.report_end(code)
        elif self._control.stopping is not None:
            self._control.leave(self._leave_within_s)

    def _stop(self) -> int | None:
        """Have all ranks save what they have, and rank 0 write it down; returns the exit code.

        None where it turns out that a rank has failed.
        """
        control, folder = self._control, self.watch.folder
        start = self.watch.since or monotonic()
        problem = self._save()
        if problem is None:
            recorder = self.watch.recorder
            control.saved(0 if recorder is None else recorder.chunks_saved)
        else:
            control.fail_to_save(problem)
        within_s = ALL_SAVED_WITHIN_S if control.name.rank == 0 else _STOPPED_WITHIN_S
        within_s = limit_for(control.size, within_s)
        control.all_saved.wait(max(0.0, within_s - (monotonic() - start)))
        if control.name.rank != 0:
            is_done = folder is not None and folder.shared and self._is_done(folder)
            otherwise = EXIT_DONE if is_done else EXIT_STOPPED
            return otherwise if control.end_code is None else control.end_code
        if control.failure is not None and control.failure.where is not None:
            return None
        stop = Stopped(control.stopping or "")
        if folder is not None and self._is_done(folder):
            self._say(f"dualeval: {stop} came when the result was written: {folder.path}")
            return EXIT_DONE
        missing = ", ".join(control.missing[:8])
        if missing:
            silent = f"after {stop}, {missing} did not report that all is saved: killed or hanging"
            message = control.ended or silent
            self._write_down(DualevalError(message))
            self._say(f"dualeval: error: {message}")
            return EXIT_FAILED
        self._write_down(stop)
        where = "Type" if folder is None else f"What is finished is saved in {folder.path}: type"
        done = f"{self.progress} " if self.progress else ""
        again = how_to_resume(None if folder is None else folder.path)
        self._say(f"dualeval: stopped by {stop}. {done}{where} {again}.")
        return EXIT_STOPPED

    def _is_done(self, folder: RunFolder) -> bool:
        """Whether nothing is left to do."""
        return folder.is_done and not self.watch.more_follows

    def _fail(self, error: BaseException, *, by_watch: bool) -> int:
        """Tell every rank of a failure, have it written down, say it, and leave; returns the exit code."""
        control, rank = self._control, self._control.name.rank
        self._save(error)
        first = error if isinstance(error, PeerError) else control.fail(error)
        self.watch.code = first.exit_code

        def do(action: Callable[[], object]) -> None:
            # What the main thread hangs in may be the disk, or its end of the store.
            try_for(_DONE_WITHIN_S, action) if by_watch else action()

        # Where rank 0 is what failed, any other has to write it.
        if rank == 0 or (isinstance(error, PeerError) and first.rank == 0):
            do(partial(self._write_down, error))
        if self._is_owner and not isinstance(error, PeerError):
            with _surviving("print the traceback"):
                if text := traceback_of(error, whole=self._debug, is_first=first.rank == rank):
                    self._speak(error, text)
        line, is_usage = spoken(first, rank), first.exit_code == EXIT_USAGE
        if is_usage and not by_watch:
            # Of wrong usage one rank speaks; what rank 0 met as well is no matter of one rank.
            everybodys = first.rank == 0 or text_of(first) == text_of(error)
            line = f"dualeval: error: {text_of(first)}" if everybodys else spoken(first, 0)
        asks = is_usage and rank == 0 if by_watch else is_usage or rank == 0
        # Rank 0 may be gone at any moment, and says nothing any more.
        waits = not (asks or by_watch or (first.rank == 0 and first.where is None))
        if not asks:
            self._say(line, by_watch=by_watch, error=error)
        answers: list[bool] = []
        if asks or waits:
            do(lambda: answers.append(control.may_speak()))
        if asks and answers != [False]:
            self._say(line, by_watch=by_watch, error=error)
        if asks or waits or by_watch:
            # In time: the others cannot ask any more once the process of rank 0 has ended.
            do(control.has_spoken)
        if not by_watch:
            control.leave(self._leave_within_s)
        return first.exit_code

    def _say(self, line: str, *, by_watch: bool = False, error: BaseException | None = None) -> None:
        """Say how the run ended; a guest raises it instead, where its process goes on."""
        if self._is_owner or by_watch:
            self._speak(None if by_watch else error, line)

    def _speak(self, error: BaseException | None, text: str) -> None:
        """Say an error that is raised; of a script's one process, only where the script does not catch it."""
        if self.is_command or self._control.size > 1 or not isinstance(error, Exception):
            say(text)
        else:
            say_if_uncaught(error, text)

    def _write_down(self, error: BaseException) -> None:
        """Write the end into status.json."""
        folder = self.watch.folder
        if folder is not None and folder.shared:
            with _surviving("write status.json"):
                folder.note_end(error, self._control.saved_by_all if isinstance(error, Stopped) else None)

    def _save(self, first: BaseException | None = None) -> str | None:
        """Save what is finished, after that error; returns what stands in the way."""
        recorder = self.watch.recorder
        try:
            if recorder is None or recorder.flush(_FLUSH_WITHIN_S):
                return None
        except OSError as error:
            return with_type(error)
        except Exception as error:  # noqa: BLE001 - a metric of the user's folds what is to be saved
            problem = with_type(error)
            # What the metric has broken the run with is said already.
            if first is not None and problem not in (with_type(first), text_of(first)):
                say(f"dualeval: note: cannot save what is finished: {problem}")
            return problem
        return "writing hangs"


@contextmanager
def _surviving(step: str) -> Iterator[None]:
    """Do a step of the end; what it raises is said, and the next steps are done all the same."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the first error is the one to report
        say(f"dualeval: note: cannot {step}: {with_type(error)}")
