"""How the ranks of a session are joined, and left: who they are, how they meet, what watches them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from dualeval.engine.control.progress import Stage
from dualeval.engine.values.options import SessionOptions
from dualeval.errors import BackendError, DualevalError, LibraryError, PeerError, UsageError, text_of
from dualeval.options.evaluation import readers_of
from dualeval.process.signals import Signals
from dualeval.process.speech import (
    conclude_quietly,
    install_hook,
    note_outer_hook,
    remove_hook,
    say,
    say_if_uncaught,
)
from dualeval.process.start import may_print
from dualeval.process.status_line import LINE
from dualeval.user_code.origin import wants_debug

if TYPE_CHECKING:
    from dualeval.backends.base import Backend
    from dualeval.engine.control.plane import ControlPlane
    from dualeval.engine.end.conclusion import Conclusion
    from dualeval.world import World

# srun loses words that it has not handed on when it ends the step. horovodrun ends rank 0, which may come
# later, when another rank has exited.
_LAST_WORDS_S, _BEFORE_RANK_0_S = 0.5, 3.0

# By what has joined the ranks of a guest's caller, torch's group or the module of Horovod; or by the script.
_noted_by_callers: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()

# Of the open sessions, the thread that has opened each.
_opened: dict[int, int] = {}


@contextmanager
def refusing() -> Iterator[None]:
    """End a script whose input is refused before its session begins as one whose input is refused in it."""
    from dualeval.backends import group_of_caller

    try:
        yield
    except UsageError as error:
        if group_of_caller() is None:
            install_hook()
            if may_print(os.environ):
                say_if_uncaught(error, f"dualeval: error: {text_of(error)}")
            conclude_quietly(error, error.exit_code)
        raise


class Joined:
    """What a session holds of its ranks from ``join`` to ``leave``; what is not there yet is None."""

    def __init__(self, options: SessionOptions) -> None:
        from dualeval.backends import group_of_caller

        if _opened and threading.get_ident() not in _opened.values():
            raise UsageError(
                "another session is open in another thread of this process: settings, signals and ranks are "
                "the process's. Evaluate in one thread at a time"
            )
        _opened[id(self)] = threading.get_ident()
        self._options = options
        # What the caller's script has opened; an owner's has nothing.
        self._caller = group_of_caller()
        self.is_owner = self._caller is None
        self.backend: Backend | None = None
        self.control: ControlPlane | None = None
        self.conclusion: Conclusion | None = None
        # Number of cores that are this rank's.
        self.cores = 1
        # Those of them on which reading processes run; empty for all.
        self.near_gpu: list[int] = []
        # What was noted already.
        self.noted: set[str] = set()
        self._world: World | None = None
        self._is_joining = False
        self._threads: int | None = None
        self._signals: Signals | None = None
        if self.is_owner:
            # Before any library has a thread: what is blocked then is blocked in all of them.
            self._signals = Signals(tuple(options.stop_signals))
            install_hook()

    def join(self) -> None:
        """Find the ranks, connect them, and watch them from here on. A collective."""
        import torch

        from dualeval.backends import choose_backend, connect, world_of_caller
        from dualeval.engine.control.plane import open_control_plane
        from dualeval.engine.end.conclusion import Conclusion
        from dualeval.launch import examine
        from dualeval.world.devices import check_name, take_cores, take_device

        options, caller = self._options, self._caller
        detection = examine(os.environ, options.launcher)
        world = detection.place if caller is None else world_of_caller(caller, detection.world)
        self._world = world
        name = options.backend or caller
        device = None if options.device is None else str(options.device)
        choose_backend(name, world)
        check_name(device)
        self._is_joining = True
        self.backend = connect(name, world)
        if caller is not None or options.note is None:
            # A training has a session an epoch: as long as its ranks are joined, each note is for it once.
            library = sys.modules["horovod.torch" if caller == "horovod" else "__main__"]
            joined = torch.distributed.group.WORLD if caller == "torch" else library
            self.noted = _noted_by_callers.setdefault(joined, set())
        if self.is_owner:
            note_outer_hook()
        self.control = open_control_plane(
            self.backend, options.heartbeat_timeout, forward_timeout_s=options.forward_timeout
        )
        self.conclusion = Conclusion(
            self.control,
            is_owner=self.is_owner,
            ends_process=options.on_stall == "exit" or (self.is_owner and options.on_stall is None),
            debug=options.debug or wants_debug(os.environ),
            stop=options.stop,
        )
        if self._signals is not None:
            self._signals.call(self.control.stop)
        before = torch.get_num_threads()
        self.cores = take_cores(self.backend, sets_threads=self.is_owner)
        self._threads = before if self.is_owner else None
        self.near_gpu = take_device(
            self.backend,
            device,
            allow_shared_gpu=options.allow_shared_gpu,
            mix_machines=options.mix_machines,
            cores=readers_of(self.cores, "cuda"),
        )
        LINE.show(None)  # the command has started

    def say_failure(self, error: DualevalError) -> None:
        """Say what is wrong, where there is no way yet to tell the other ranks; an owner calls it."""
        world = self._world
        alone = world is None or world.size == 1
        where = "" if alone or world is None else f" (on rank {world.rank})"
        # Before the ranks are joined all are told the same by what they were given; what a library lacks
        # is alike on a node; and anything else may be this rank's alone.
        if isinstance(error, LibraryError):
            speaks = world is None or world.local_rank == 0
        else:
            speaks = self._is_joining or world is None or world.is_main
            where = where if self._is_joining else ""
        LINE.speak(speaks=False)
        if speaks:
            say(f"dualeval: error: {text_of(error)}{where}")
        if not alone:
            sleep(_LAST_WORDS_S if speaks else _BEFORE_RANK_0_S)
        conclude_quietly(error, error.exit_code)

    def leave(self, *, failed: bool, is_concluded: bool) -> None:
        """Leave the ranks, and put back what an owner has changed of the process."""
        _opened.pop(id(self), None)
        failure: DualevalError | None = None
        if self.control is not None and not failed:
            self.control.progress.step(Stage.END)
            failure = self._leave_together(self.control)
        try:
            if self.backend is not None:
                self.backend.close(failed=failed or failure is not None)
        except BackendError as error:
            failure = error
        if self.conclusion is not None:
            if failure is not None and self.conclusion.watch.is_done and self.backend is not None:
                # All ranks have met since: none of them has more to do.
                say(
                    f"dualeval: note: the result is complete, but not all ranks left with rank "
                    f"{self.backend.world.rank}: one was killed, suspended or cut off"
                )
                failure = None
            self.conclusion.watch.stop()
        if self._signals is not None:
            self._signals.close()
        if self._threads is not None:
            import torch

            torch.set_num_threads(self._threads)
        if self.is_owner and not is_concluded:
            remove_hook()
        if failure is not None:
            raise failure

    @staticmethod
    def _leave_together(control: ControlPlane) -> DualevalError | None:
        """Leave in order; returns what is wrong where other ranks do not."""
        try:
            all_left = control.leave(together=True)
        except PeerError as failure:
            return failure
        if all_left:
            return None
        return DualevalError(
            f"rank {control.name.rank} has left the session, and other ranks have not: every rank has to "
            "evaluate the same, and to ask for the result"
        )
