"""OpenSession: a session from its opening to its end, whatever it evaluates meanwhile.

A run ends early only by ``conclude``, whether the main thread raises an error, or the watch finds that the
main thread does not come back.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import sleep
from typing import TYPE_CHECKING, TypeVar

from dualeval.engine.control.progress import Stage
from dualeval.engine.joining import Joined
from dualeval.engine.values.options import SessionOptions
from dualeval.errors import EXIT_DONE, BackendError, DualevalError, PeerError, Stopped, UsageError, text_of
from dualeval.process.speech import conclude_quietly, say

if TYPE_CHECKING:
    from typing_extensions import Self

    from dualeval.backends.base import Backend
    from dualeval.engine.control.plane import ControlPlane
    from dualeval.engine.end.conclusion import Conclusion
    from dualeval.engine.end.watch import Watch
    from dualeval.engine.own_loop import OwnLoop
    from dualeval.result import Result
    from dualeval.world import World

_T = TypeVar("_T")

_LOOK_EVERY_S = 0.25


class OpenSession:
    """What a session holds of its ranks, and how it ends; ``Session`` evaluates in it."""

    def __init__(self, options: SessionOptions) -> None:
        self._options = options
        self.exit_code = EXIT_DONE
        self.is_concluded = False
        # Of a command, whose errors nobody catches.
        self.is_command = False
        # From `open` on.
        self._joined: Joined | None = None
        self._is_closed = False
        self._is_attempt = False
        # The caller's own loop, until it has a result.
        self._loop: OwnLoop | None = None

    @property
    def backend(self) -> Backend:
        """How the ranks reduce and gather; raises UsageError if the session is not open."""
        if self._joined is None or self._joined.backend is None:
            raise UsageError(
                "this session is not open: write 'with dualeval.Session() as session:' around its use"
            )
        return self._joined.backend

    @property
    def control(self) -> ControlPlane:
        """Where the ranks meet; raises UsageError likewise."""
        _ = self.backend
        assert self._joined is not None and self._joined.control is not None
        return self._joined.control

    @property
    def world(self) -> World:
        """This process's place among the ranks; raises UsageError likewise."""
        return self.backend.world

    @property
    def is_owner(self) -> bool:
        return self._joined is None or self._joined.is_owner

    @property
    def cores(self) -> int:
        return 1 if self._joined is None else self._joined.cores

    @property
    def _conclusion(self) -> Conclusion:
        _ = self.control
        assert self._joined is not None and self._joined.conclusion is not None
        return self._joined.conclusion

    @property
    def _watch(self) -> Watch:
        return self._conclusion.watch

    # -- opening -----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.open()
        return self

    def open(self) -> None:
        """Join the ranks, and watch them from here on. A collective.

        Raises:
            UsageError, LaunchError: the launcher, the backend or the device does not fit.
            BackendError: the group could not be joined.
        """
        if self._joined is not None:
            raise UsageError("this session was opened before: make another one, dualeval.Session(...)")
        self._joined = Joined(self._options)
        try:
            self._joined.join()
        except BaseException as error:
            if self._joined.conclusion is not None:
                self.conclude(error)
            elif self.is_owner and isinstance(error, DualevalError):
                self._joined.say_failure(error)
                self.exit_code, self.is_concluded = error.exit_code, True
            self._close(failed=True)
            raise

    # -- several pieces of work ---------------------------------------------------------------------

    def attempt(
        self, work: Callable[[], _T], *, progress: str = "", last: bool = False
    ) -> tuple[_T | None, PeerError | None]:
        """Do one of several pieces of work, such as evaluating one of several models. A collective.

        An error in it, on one rank or on all, ends this attempt on every rank, but not the session, if all
        ranks are there and none is inside a collective. Otherwise the run ends, as it does when a signal
        stops it.

        Args:
            work: evaluates at most once, with ``last=True``.
            progress: how many are done, as a sentence; shown if the run is stopped.
            last: no evaluation follows: a signal after the result is written has no effect.

        Returns:
            The result of ``work``, and None; or None and the failure, the same on every rank.

        Raises:
            PeerError: another rank failed, and the run ends.
            Stopped: a signal, or ``stop``, has ended the run.
        """
        self._check_usable()
        self._conclusion.done = progress
        self._watch.more_follows = not last
        self._watch.begin()
        self.control.progress.step(Stage.SETUP)
        self.control.check()
        done, problem = None, None
        self._is_attempt = True
        try:
            done = work()
        except BaseException as error:
            problem = self._cause(error, of_task=True)
            if not self._ends_attempt_only(problem):
                raise
        finally:
            self._is_attempt = False
        self._watch.end()
        failure = self._conclusion.of_attempt(problem if isinstance(problem, Exception) else None)
        # The error's frames hold the model and its data.
        problem = None
        self._free_memory()
        if not last:
            self._idle()
        return (done, None) if failure is None else (None, failure)

    def _ends_attempt_only(self, error: BaseException) -> bool:
        """Whether an error ends only an attempt, not the run: no rank has failed, and the backend works."""
        return (
            not self.is_concluded
            and isinstance(error, Exception)
            and not isinstance(error, Stopped | BackendError)
            and self.control.failure is None
            and self.control.stopping is None
            and not self.control.is_missed
        )

    def _free_memory(self) -> None:
        """Free the memory of a finished attempt."""
        from dualeval.engine.device.accelerator import accelerator_of

        gc.collect()
        device = self.backend.device
        try:
            accelerator_of(device).release()
        except RuntimeError as error:
            raise DualevalError(f"{device} cannot be used any more: {text_of(error)}") from error

    @contextmanager
    def _concluding(self, *, of_task: bool = True) -> Iterator[None]:
        """Conclude the run if the block raises."""
        from dualeval.engine.end.watch import Interrupted

        try:
            yield
        except BaseException as error:
            if isinstance(error, GeneratorExit) and self._loop is not None and of_task:
                raise  # the caller has left its loop; whether that is an error shows later
            self._watch.end(was_raised=isinstance(error, Interrupted))
            cause = self._cause(error, of_task=of_task)
            if self._is_attempt and self._ends_attempt_only(cause):
                raise
            self.conclude(cause)
            if cause is error:
                raise
            raise cause from error

    def idle_until(self, look: Callable[[], _T | None], *, progress: str = "") -> _T:
        """Have rank 0 call ``look`` repeatedly until there is something to do. A collective.

        Args:
            look: called on rank 0; returns plain values, or None if there is nothing yet.
            progress: how many are done, as a sentence; shown if the session is stopped meanwhile.

        Returns:
            Rank 0's value, on every rank.

        Raises:
            PeerError: another rank failed.
            Stopped: a signal, or ``stop``, has ended the session.
        """
        self._check_usable()
        self._conclusion.done = progress
        self._idle()
        if self.world.is_main:
            # It meets the others as soon as there is something: nobody is late.
            self.control.progress.step(Stage.MEET)
        value: _T | None = None
        while self.world.is_main and (value := look()) is None:
            self.control.check()
            sleep(_LOOK_EVERY_S)
        self.control.meet()
        shared: _T = self.backend.broadcast_json(value, src=0)
        return shared

    def _idle(self) -> None:
        """Set this rank to idle: the caller may now do anything, for as long as it likes."""
        self._watch.end()
        self._watch.goes_on()
        self.control.progress.step(Stage.IDLE)

    def note(self, sentence: str) -> None:
        """Pass on a sentence for the user, once a session or script; called on rank 0."""
        noted = set() if self._joined is None else self._joined.noted
        if sentence in noted:
            return
        noted.add(sentence)
        if self._options.note is not None:
            self._options.note(sentence)
        else:
            say(f"dualeval: note: {sentence}")

    def say_warnings(self, result: Result) -> None:
        """Note the warnings about a result, for a caller who prints only its numbers."""
        from dualeval.engine.values.measured import rough_warnings

        of_intervals = rough_warnings(result.rough)
        for sentence in result.warnings if self.world.is_main else ():
            if sentence not in of_intervals:
                self.note(sentence)

    def _check_usable(self) -> None:
        if self.is_concluded:
            raise UsageError(
                f"this session has ended with exit code {self.exit_code}: open another one to evaluate again"
            )
        if self._loop is not None:
            raise UsageError("a loop of this session has no result yet: call session.result() first")
        _ = self.control

    def _cause(self, error: BaseException, *, of_task: bool) -> BaseException:
        """The error with which the run ends: the one that was raised, or its cause."""
        from dualeval.engine.end.watch import Interrupted

        if isinstance(error, Interrupted):
            failure = self.control.failure
            return failure if failure is not None else Stopped(self.control.stopping or "stop()")
        if of_task and self.is_owner and isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit):
            # The session handles signals, so the task's own code has raised this.
            raised = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else type(error).__name__
            return DualevalError(f"the task's code raised {raised} during the run")
        return error

    def conclude(self, error: BaseException) -> int:
        """End the run early, from the main thread, which has the error; returns the exit code.

        Finished work is saved, all ranks learn of the error, rank 0 writes it into status.json, and it is
        shown once. A second call returns the same code.
        """
        if not self.is_concluded:
            self._conclusion.is_command = self.is_command
            self.exit_code = self._conclusion.conclude(error)
            self.is_concluded = True
            if self.is_owner:
                conclude_quietly(error, self.exit_code)
        return self.exit_code

    # -- closing -----------------------------------------------------------------------------------

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        left = None if isinstance(error, SystemExit) and not error.code else error
        if left is None and self._loop is not None:
            left = UsageError("the session was left before session.result() was called")
        try:
            if left is not None and not self.is_concluded:
                if self._loop is not None:
                    self._loop.close()
                with self._concluding(of_task=False):
                    raise left
        except BaseException as concluded:
            if concluded is not error:
                raise
        finally:
            self._close(failed=self.is_concluded)

    def _close(self, *, failed: bool) -> None:
        """Leave the ranks; a second call does nothing."""
        if not self._is_closed and self._joined is not None:
            self._is_closed = True
            self._joined.leave(failed=failed, is_concluded=self.is_concluded)
