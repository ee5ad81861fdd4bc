"""Start several ranks on this machine: what ``dualeval run --nproc N`` does.

The ranks are started, watched and ended by torch's own elastic launch, as under ``torchrun``. What differs is
said here: the ranks meet without the random delay of up to 0.3 s with which torchrun spreads the arrival of
many nodes, the parent prints nothing of its own, and the exit code is that of the ranks.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dualeval.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, DualevalError, UsageError
from dualeval.launch.cores import usable_cores
from dualeval.world.network import LOOPBACK, check_own_name
from dualeval.world.store import JOINING, allow_connections

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Seconds between two looks at the ranks: half of it is what a run loses at its end on average.
MONITOR_INTERVAL = 0.03
# Ranks that are asked to stop have ended after 5 s, if they can.
_STOP_WITHIN_S = 10.0


def run_local(
    command: list[str],
    processes: int,
    environ: Mapping[str, str],
    variables_of: Callable[[int], Mapping[str, str]] = lambda rank: {},
    stop_signals: Collection[signal.Signals] = (),
    *,
    takes_signals: bool = False,
) -> int:
    """Run a command as the ranks of one run on this machine, and wait for them.

    Their standard output and error are this process's own. They get torchrun's variables beside ``environ``
    (but not its OMP_NUM_THREADS=1: the ranks divide the cores themselves). When a rank fails, the others get
    SIGTERM and, 30 s later, SIGKILL. SIGINT, SIGTERM, SIGHUP and SIGQUIT sent to this process are passed to
    the ranks in the same way, but ``stop_signals`` leave them time to end by themselves. Call it in the main
    thread.
    """
    cores = usable_cores()
    limit = process_limit(cores)
    if not 1 <= processes <= limit:
        raise UsageError(
            f"--nproc {processes} is out of range: this machine takes 1 to {limit} processes (16 for each of "
            f"the {cores} cores that it may use, and at least 64: each needs about 150 MB and a second of "
            f"one core before it begins). Type a smaller --nproc, or use more nodes."
        )
    check_own_name()
    # It serves the store in which the ranks meet, and they inherit its limit.
    allow_connections(JOINING * processes, "the process that starts the ranks")
    rendezvous_handler_registry.register(_LocalRendezvous.backend, _LocalRendezvous)
    watch = _SignalWatch(stop_signals, stop_signals if takes_signals else ())
    # Later torch versions can be told to leave the signals to the watch; earlier ones have no such field.
    options: dict[str, Any] = (
        {"signals_to_handle": ""} if _has_field(LaunchConfig, "signals_to_handle") else {}
    )
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend=_LocalRendezvous.backend,
        rdzv_endpoint=f"{LOOPBACK}:0",
        rdzv_configs={"watch": watch},
        local_addr=LOOPBACK,
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL,
        logs_specs=_PassThrough(environ, variables_of, watch),
        **options,
    )
    with _quiet_launcher(), watch:
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            # A dict keeps the order in which the agent saw the failures; its time stamps are whole seconds.
            code = exit_code_of([failure.exitcode for failure in error.failures.values()])
            rank, first = next(iter(error.failures.items()))
            if code == EXIT_FAILED and first.exitcode < 0:
                # It could not speak for itself.
                raise DualevalError(
                    f"rank {rank} (pid {first.pid}) was ended by {signal.Signals(-first.exitcode).name}"
                ) from error
            return code
        except SignalException as stop:
            return 128 + stop.sigval
    return EXIT_DONE


def process_limit(cores: int) -> int:
    """The greatest number of ranks that a machine with that many cores is asked to run."""
    return max(64, 16 * cores)


def exit_code_of(codes: list[int]) -> int:
    """The exit code of a run from those of its failed ranks, first failure first (-N: died by signal N)."""
    if EXIT_USAGE in codes:
        return EXIT_USAGE
    first = codes[0]
    if first in (-signal.SIGINT, -signal.SIGTERM):
        return 128 - first
    return first if first > 0 else EXIT_FAILED


def _has_field(config: type[LaunchConfig], name: str) -> bool:
    return any(field.name == name for field in dataclasses.fields(config))


class _SignalWatch:
    """Remembers the first signal that asks this process to end; puts the handlers back afterwards.

    The handler does not raise: raised while the agent is still starting the ranks, before it has noted them,
    the exception would leave them running without a parent. The agent asks between two looks instead.
    """

    def __init__(self, stop_signals: Collection[signal.Signals], blocked: Collection[signal.Signals]) -> None:
        self._stop_signals = frozenset(stop_signals)
        self._blocked = blocked
        self._received: signal.Signals | None = None
        self._since = 0.0
        self._to_pass_on: list[signal.Signals] = []

    @property
    def ending(self) -> signal.Signals | None:
        """The signal after which the ranks have to be ended."""
        if self._received in self._stop_signals and monotonic() - self._since < _STOP_WITHIN_S:
            return None
        return self._received

    def before_start(self) -> None:
        """Block what the ranks, which are started next, take by themselves: they inherit that."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked)

    def pass_on(self) -> None:
        """Hand the ranks, which are all started, what they are to end by themselves on."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        while self._to_pass_on:
            number = self._to_pass_on.pop(0)
            for child in _children():
                with suppress(ProcessLookupError):
                    os.kill(child, number)

    def __enter__(self) -> _SignalWatch:
        # A signal that is ignored here (nohup, a job in a shell's background) stays ignored.
        wanted = [
            number
            for number in {*ENDING_SIGNALS, *self._stop_signals}
            if signal.getsignal(number) is not signal.SIG_IGN
        ]
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._previous = {number: signal.signal(number, self._remember) for number in wanted}
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received, self._since = signal.Signals(number), monotonic()
        if number in self._stop_signals:
            self._to_pass_on.append(signal.Signals(number))


def _children() -> Iterator[int]:
    """Numbers of this process's child processes."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        # Gone, perhaps, since they were listed.
        with suppress(OSError):
            _, parent, *_ = file.read_text().rpartition(")")[2].split()
            if int(parent) == os.getpid():
                yield int(file.parent.name)


class _LocalRendezvous(RendezvousHandler):
    """The meeting of one agent with itself: serves the store in which the ranks then find each other.

    Takes the place of torch's c10d rendezvous, which waits up to 0.3 s at random before it joins.
    """

    backend = "dualeval-local"

    def __init__(self, params: RendezvousParameters) -> None:
        self._run_id = params.run_id
        self._watch: _SignalWatch = params.config["watch"]
        self._store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return self.backend

    def next_rendezvous(self) -> RendezvousInfo:
        # Port 0: the kernel picks a free one, so that two runs on one machine cannot collide.
        self._store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

    def num_nodes_waiting(self) -> int:
        """Return 0: nobody else can join. The agent asks after each look at the ranks, all of them noted."""
        self._watch.pass_on()
        ending = self._watch.ending
        if ending is not None:
            raise SignalException(f"got {ending.name}", sigval=ending)
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: no other node could try to join."""

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class _PassThrough(LogsSpecs):
    """Ranks that write straight to this process's standard output and error, with no log folder."""

    def __init__(
        self,
        environ: Mapping[str, str],
        variables_of: Callable[[int], Mapping[str, str]],
        watch: _SignalWatch,
    ) -> None:
        super().__init__(log_dir=os.devnull)
        self._environ = environ
        self._variables_of = variables_of
        self._watch = watch

    @property
    def root_log_dir(self) -> str:
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Add the wanted variables to those of each rank (torch's own win) and redirect nothing.

        The ranks are started next.
        """
        self._watch.before_start()
        for rank, env in envs.items():
            env.update({**self._environ, **env, **self._variables_of(rank)})
        console = dict.fromkeys(envs, "")
        return LogsDest(
            stdouts=console,
            stderrs=dict(console),
            tee_stdouts={},
            tee_stderrs={},
            error_files=dict.fromkeys(envs, os.devnull),
        )


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Keep the agent's log lines off standard error.

    On a failure the ranks have said what is wrong; "failed (exitcode: 1) local_rank: 0 ..." and
    "Sending process 4711 closing signal SIGTERM" would only bury it.
    """
    logger = logging.getLogger("torch.distributed.elastic")
    silent = logging.NullHandler()
    handlers, propagate = logger.handlers, logger.propagate
    # The NullHandler keeps logging's handler of last resort out.
    logger.handlers, logger.propagate = [silent], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
