"""Watch: the thread that ends a run if its main thread cannot.

It calls neither the store nor a collective. A rank's main thread may be in a collective that will never end,
in a forward that takes minutes or in a read that hangs; a signal or another rank's failure must end the run
all the same. This module decides when a run is concluded, the session how.
"""

from __future__ import annotations

import ctypes
import faulthandler
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from time import monotonic, sleep

from dualeval.engine.control.monitor import Clock, Finding, Judge, Standstill
from dualeval.engine.control.plane import ControlPlane
from dualeval.engine.end.guardian import Guardian
from dualeval.engine.folder.folder import RunFolder
from dualeval.engine.folder.recorder import Recorder
from dualeval.errors import EXIT_DONE, EXIT_FAILED, DualevalError, message_of, with_type
from dualeval.process.speech import end_process, how_to_resume, say, spoken
from dualeval.result import STATUS
from dualeval.world.waiting import limit_for

# Seconds that the main thread has to conclude the run, after a signal or a failure.
GRACE_S = 3.0
# Seconds until a process whose main thread concludes the run itself is ended.
_OUT_WITHIN_S = 8.0
# Seconds until the guardian ends a rank whose Python does not run.
_AT_LAST_S = 9.5
_LOOK_EVERY_S = 0.25
_SHORTEST_PAUSE_S = 0.001
# Rank 0 waits two seconds for ranks that leave after a failure.
_GUEST_GRACE_S = 1.0
_RAISED_WITHIN_S = 1.0
_LEAVE_S = 1.0
# Added to the guardian's timeout, so that this thread comes first, if it can; and mpirun leaves a rank one
# second after the others have exited.
_NO_PYTHON_S = 1.0


class Interrupted(BaseException):
    """Raised by the watch in a guest's main thread if a run has failed while Python code does not return.

    The session turns it into the failure.
    """


class Watch:
    """Watches this rank's main thread, and has the run concluded if the main thread does not."""

    def __init__(
        self,
        control: ControlPlane,
        conclude: Callable[[], int],
        *,
        ends_process: bool = True,
        stop: Callable[[], bool | str] | None = None,
    ) -> None:
        # Saves finished work before an end; None if nothing is in hand.
        self.recorder: Recorder | None = None
        # The run's output folder, likewise.
        self.folder: RunFolder | None = None
        # The process's exit code, as far as it is known.
        self.code = EXIT_FAILED
        # `monotonic()` when the watch learned that the run ends; None before.
        self.since: float | None = None
        # Whether more work follows the result being written, so that a signal then is not too late.
        self.more_follows = False
        # Whether a batch of any run was begun.
        self.has_begun = False
        # Whether the last run is complete on all ranks, so that a signal is too late.
        self.is_done = False
        self._control = control
        self._conclude = conclude
        self._ends_process = ends_process
        self._main = threading.get_ident()
        self._stacks: TextIOWrapper | None = None
        # The main thread may close the file of stacks while another thread writes to it.
        self._of_stacks = threading.Lock()
        self._guardian: Guardian | None = None
        if ends_process:
            try:
                within_s = control.limits.timeout_s + _NO_PYTHON_S
                self._guardian = Guardian(str(control.name), within_s)
            except OSError as error:
                raise DualevalError(
                    f"cannot start the process that ends this one where it hangs: {with_type(error)}. Allow "
                    "more processes (ulimit -u)."
                ) from error
        self._interrupting = threading.Lock()
        self._in_evaluation = False
        self._was_interrupted = False
        self._main_concludes = threading.Event()
        self._is_over = threading.Event()
        self._finding = Finding("going")
        self._has_named = False
        self._thread = threading.Thread(target=self._run, name="dualeval-watch", daemon=True)
        self._thread.start()
        if stop is not None:
            # In a thread of its own: the caller's function may take its time, or hang.
            threading.Thread(target=self._poll, args=(stop,), name="dualeval-stop", daemon=True).start()

    # -- called by the main thread -----------------------------------------------------------------

    def begin(self) -> None:
        """Say that an evaluation begins."""
        self.is_done = False
        if self._guardian is not None:
            self._guardian.tell(idle=False)
        with self._interrupting:
            self._in_evaluation = True

    def end(self, *, was_raised: bool = False) -> None:
        """Say that the evaluation is over, in order or by an error, and must not be interrupted."""
        try:
            with self._interrupting:
                self._in_evaluation = False
                sent, self._was_interrupted = self._was_interrupted, False
            # An interrupt that was just sent is raised here. Do not withdraw it: Python 3.11 would keep
            # looking for it.
            limit = monotonic() + _RAISED_WITHIN_S
            while sent and not was_raised and monotonic() < limit:
                sleep(_SHORTEST_PAUSE_S)
        except Interrupted:
            return

    def keep(self, folder: RunFolder) -> None:
        """Say in which folder an end and stacks are recorded."""
        self.folder = folder
        if self._guardian is not None and not self._control.has_peers:
            resume = f"Type {how_to_resume(folder.path)}."
            paths = str(folder.path / STATUS), folder.token, str(folder.stacks)
            self._guardian.tell(guarded=[*paths, resume])
        # On an error they go to standard error; a full disk will be noticed elsewhere soon enough.
        with suppress(OSError), self._of_stacks:
            folder.stacks.parent.mkdir(exist_ok=True)
            self._stacks = folder.stacks.open("w")
            if self._guardian is not None:
                self._guardian.write_stacks_to(self._stacks)

    def release(self, *, done: bool) -> None:
        """Say that nothing is left to save."""
        self.is_done = done and not self.more_follows
        self.recorder = self.folder = None
        if self._guardian is not None:
            self._guardian.tell(guarded=None)
            self._guardian.write_stacks_to(sys.__stderr__)
        with self._of_stacks, suppress(OSError):
            stacks, self._stacks = self._stacks, None
            if stacks is not None:
                stacks.close()
                path = Path(stacks.name)
                if path.stat().st_size == 0:
                    path.unlink()

    def goes_on(self) -> None:
        """Say that the caller may do more after a complete run: a signal ends that, too.

        The caller may take its time, also in C code that holds Python's lock.
        """
        self.is_done = False
        if self._guardian is not None:
            self._guardian.tell(idle=True)

    def main_concludes(self, code: int) -> None:
        """Say that the main thread concludes the run; the process ends some seconds later, with that code."""
        self.code = code
        self._main_concludes.set()
        self._control.news.set()

    def stop(self) -> None:
        """Stop watching: all ranks have left, and nothing is in hand."""
        self._is_over.set()
        self._control.news.set()
        if self._guardian is not None:
            self._guardian.leave()
        if threading.current_thread() is not self._thread:
            self._thread.join(_LEAVE_S)

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException as error:  # noqa: BLE001 - unwatched, a run that hangs would hang for ever
            if self._is_over.is_set():
                return
            with suppress(OSError, ValueError, AttributeError):
                traceback.print_exception(error)
            name = self._control.name
            self._control.give_up(f"{name}: the watch has failed: {message_of(error)}", rank=name.rank)
            if self._ends_process:
                end_process(self._conclude())

    def _watch(self) -> None:
        clock = Clock(most_s=2 * _LOOK_EVERY_S + 1.0)
        limits = self._control.limits
        judge = Judge(limits, clock.now())
        answered = Standstill(clock.now())
        while not self._heard():
            if self._is_over.is_set():
                return
            if self._guardian is not None:
                self._guardian.tell()
            self._control.news.wait(_LOOK_EVERY_S)
            # Before the news is read: later news sets it again.
            self._control.news.clear()
            now = clock.now()
            if not self._heard():
                self._finding = judge.look(self._control.own_heartbeat(), now)
                self._judge(self._finding, answered.seconds(self._control.answers, now), limits.timeout_s)
        self._end()

    def _poll(self, stop: Callable[[], bool | str]) -> None:
        """Ask the caller whether the run is to stop."""
        while not self._is_over.wait(_LOOK_EVERY_S) and self._control.stopping is None:
            try:
                wanted = stop()
                if wanted:
                    self._control.stop(wanted if isinstance(wanted, str) else "stop()")
            except BaseException as error:  # noqa: BLE001 - the caller's own, and the run's end
                name = self._control.name
                self._control.give_up(f"{name}: stop() raised {message_of(error)}", rank=name.rank)
                return

    def _heard(self) -> bool:
        return (
            self._control.failure is not None
            or (self._control.stopping is not None and not self.is_done)
            or self._main_concludes.is_set()
        )

    def _judge(self, finding: Finding, silent: float, timeout_s: float) -> None:
        """Give up this rank if it makes no progress, or rank 0 if it does not answer."""
        name = self._control.name
        if self._control.has_peers and silent > timeout_s:
            rank_0 = self._control.rank_0
            self._control.give_up(f"{rank_0}: no answer for {silent:.0f} s", rank=rank_0.rank)
        elif finding.kind == "stuck" or (finding.kind == "collective" and not self._control.has_peers):
            self._dump()
            self._control.give_up(f"{name}: {finding.text}", rank=name.rank)
        elif finding.kind == "computing" and not self._control.has_peers and not self._has_named:
            # With peers, rank 0, which sees all ranks, reports this, and judges waits in collectives.
            self._has_named = True
            say(f"dualeval: note: {name}: {finding.text}")

    def _dump(self) -> None:
        # Fails for a stream without a descriptor, such as a notebook's.
        with suppress(OSError, ValueError, RuntimeError, AttributeError), self._of_stacks:
            if (stream := self._stacks or sys.__stderr__) is not None:
                faulthandler.dump_traceback(stream)

    def _end(self) -> None:
        """Give the main thread some time, and have the run concluded if the main thread has not."""
        start = self.since = monotonic()
        out_within_s = limit_for(self._control.size, _OUT_WITHIN_S)
        if self._finding.kind == "collective":
            self._dump()
        if not self._ends_process:
            self._interrupt_main()
            return
        if self._guardian is not None:
            # Whatever hangs from here on, even a full disk or a file server, the guardian ends this process.
            self._guardian.tell(timeout_s=limit_for(self._control.size, _AT_LAST_S), idle=False)
        if self._control.failure is None and self.recorder is not None:
            # A launcher may leave a second between SIGTERM and SIGKILL.
            with suppress(OSError):
                self.recorder.flush(GRACE_S / 3)
        self._main_concludes.wait(GRACE_S)
        if self._main_concludes.is_set():
            if self._is_over.wait(out_within_s - (monotonic() - start)):
                return
            end_process(self.code)
        if self.is_done:
            # The result is written; the main thread is on its way out, or waits for a lost rank.
            if self._control.name.rank == 0:
                self._control.report_end(EXIT_DONE)
            if self._is_over.wait(out_within_s - (monotonic() - start)):
                return  # it has left the session, and shows the result
            if self._control.name.rank == 0:
                failure, stop = self._control.failure, self._control.stopping
                came = f"dualeval: {stop} came while the result was being written"
                if failure is not None:
                    lost = spoken(failure, 0).removeprefix("dualeval: error: ").rstrip(".")
                    came = f"dualeval: note: the result is complete, but {lost}"
                say(f"{came}; the steps after it are not all done.")
            end_process(EXIT_DONE)
        end_process(self._conclude())

    def _interrupt_main(self) -> None:
        """Print why a guest's run has failed, and interrupt the main thread if it runs Python code."""
        failure = self._control.failure
        if failure is not None:
            say(spoken(failure, self._control.name.rank))
        if self._main_concludes.wait(_GUEST_GRACE_S):
            return
        with self._interrupting:
            if self._in_evaluation:
                self._was_interrupted = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._main), ctypes.py_object(Interrupted)
                )
