"""Conclusion: the one way in which a run ends early, whoever notices the reason.

The main thread concludes the run with the error that it met; if the main thread does not return, the watch
concludes it. Finished work is saved, all ranks learn of the end, rank 0 writes it into status.json, it is
printed once, and all ranks exit with one code.

Attempts end here, too; all ranks are still there then, and make the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic

from dualeval.engine.control.plane import ControlPlane
from dualeval.engine.end.outcome import Role, note_of_loss, outcome_of
from dualeval.engine.end.watch import Watch
from dualeval.errors import EXIT_DONE, DualevalError, PeerError, Stopped, exit_code_of, text_of, with_type
from dualeval.process.speech import close_displays, say, say_if_uncaught, say_traceback, traceback_of, try_for
from dualeval.world.waiting import limit_for

# How long rank 0 waits for the others to save, and how long these wait for rank 0 to record that. With up to
# a thousand ranks (``limit_for``), every rank has exited within 5 s.
ALL_SAVED_WITHIN_S = 4.0
_STOPPED_WITHIN_S = 4.6
_FLUSH_WITHIN_S = 1.0
_LEAVE_AFTER_FAILURE_S = 2.0
# The limit of a step that may hang.
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
        # How many of several attempts are done; printed if the run is stopped.
        self.done = ""
        # Of a command: nobody catches its errors.
        self.is_command = False
        # Concludes the run if the main thread does not; holds what is to be saved.
        self.watch = Watch(control, self.conclude, ends_process=ends_process, stop=stop)

    def conclude(self, error: BaseException | None = None) -> int:
        """Conclude the run, once; returns the exit code.

        ``error`` is what the main thread met. Without one the caller is the watch's thread, because the main
        thread does not return.
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
        """Save finished work, report the end to all ranks, record it and print it."""
        control, code = self._control, None
        if control.failure is None and (isinstance(error, Stopped | None) or control.stopping is not None):
            # An error during a stop does not count: the ranks were told to end.
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

        Finished work is saved, all ranks learn how the attempt went, and rank 0 writes a failure into
        status.json. The session goes on.
        """
        folder = self.watch.folder
        raised = None if isinstance(error, PeerError) else error
        if error is not None:
            close_displays()
            self._save(error)
        if raised is not None:
            self._control.fail_attempt(raised)
            if self._is_owner:
                with _surviving("print the traceback"):
                    say_traceback(raised, whole=self._debug)
        failure = self._control.end_attempt(went_well=error is None)
        if failure is not None:
            if failure.rank == 0 or (raised is not None and text_of(raised) == text_of(failure)):
                # An error that rank 0 met as well is not specific to one rank.
                failure.where = None
            if self._control.name.rank == 0:
                self._write_down(failure if error is None else error)
            # As in ``_release``.
            with _surviving("remove what the watch has written"):
                self.watch.release(done=False)
            if folder is not None:
                folder.close()
        return failure

    def _is_late(self, failure: BaseException | None) -> bool:
        """Whether a rank was lost after the result was written, by no error of its own; prints a note."""
        folder = self.watch.folder
        if self.watch.more_follows or folder is None or not folder.shared or not folder.is_written:
            return False
        note = note_of_loss(failure, folder.path)
        if note and self._is_owner:
            say(note)
        return bool(note)

    def _release(self, code: int) -> None:
        """Release the watch and the folder, and let the other ranks end."""
        folder = self.watch.folder
        with _surviving("remove what the watch has written"):
            # All is saved, and the end recorded. The watch goes first: its file of stacks lies in the folder.
            self.watch.release(done=False)
        with _surviving("release the folder"):
            if folder is not None:
                folder.close()
        if self._control.name.rank == 0 and self._control.stopping is not None:
            self._control.report_end(code)
        elif self._control.stopping is not None:
            self._control.leave(self._leave_within_s)

    def _stop(self) -> int | None:
        """Have all ranks save what they have, and rank 0 record the stop; returns the exit code.

        None if a rank turns out to have failed.
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
        if control.failure is not None and control.failure.where is not None:
            return None
        stop, rank = Stopped(control.stopping or ""), control.name.rank
        is_done = folder is not None and (rank == 0 or folder.shared) and folder.is_done
        role = Role(
            rank=rank,
            is_owner=self._is_owner,
            folder=None if folder is None else folder.path,
            is_done=is_done and not self.watch.more_follows,
            progress=self.done or ("" if self.watch.has_begun else None),
            end_code=control.end_code,
            unsaved=control.missing[:8],
            lost=control.ended,
        )
        outcome = outcome_of(stop, role)
        if outcome.writes:
            self._write_down(DualevalError(outcome.failure) if outcome.failure else stop)
        if outcome.line:
            say(outcome.line)
        return outcome.exit_code

    def _fail(self, error: BaseException, *, by_watch: bool) -> int:
        """Report a failure to all ranks, record it, print it, and leave; returns the exit code."""
        control, rank = self._control, self._control.name.rank
        self._save(error)
        first = error if isinstance(error, PeerError) else control.fail(error)
        self.watch.code = first.exit_code
        outcome = outcome_of(first, Role(rank=rank, is_owner=self._is_owner, by_watch=by_watch, met=error))

        def do(action: Callable[[], object]) -> None:
            # The main thread may hang in the same disk or store; the watch must not.
            try_for(_DONE_WITHIN_S, action) if by_watch else action()

        if outcome.writes:
            do(partial(self._write_down, error))
        if self._is_owner and not isinstance(error, PeerError):
            with _surviving("print the traceback"):
                self._speak(error, traceback_of(error, whole=self._debug, is_first=first.rank == rank))
        if outcome.turn is not None:
            control.speak(outcome.turn, partial(self._speak, None if by_watch else error, outcome.line), do)
        if not by_watch:
            control.leave(self._leave_within_s)
        return outcome.exit_code

    def _speak(self, error: BaseException | None, text: str) -> None:
        """Say an error that is raised; of a script's one process, only where the script does not catch it."""
        if not text:
            return
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
        """Save finished work, after the error ``first``; returns what prevents it."""
        recorder = self.watch.recorder
        try:
            if recorder is None or recorder.flush(_FLUSH_WITHIN_S):
                return None
        except OSError as error:
            return with_type(error)
        except Exception as error:  # noqa: BLE001 - a metric of the user's folds what is to be saved
            problem = with_type(error)
            # The error that ended the run is reported already.
            if first is not None and problem not in (with_type(first), text_of(first)):
                say(f"dualeval: note: cannot save what is finished: {problem}")
            return problem
        return "writing hangs"


@contextmanager
def _surviving(step: str) -> Iterator[None]:
    """Do a step of the end; an error in it is printed, and the next steps follow all the same."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the first error is the one to report
        say(f"dualeval: note: cannot {step}: {with_type(error)}")
