"""Ranks on this machine, started for a command line or for a script, which then waits for them.

The ranks get torchrun's variables, and are watched and ended as by torchrun. There are three differences: the
parent prints nothing of its own, passes on signals that stop a run, and exits with the ranks' exit code.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from types import FrameType, MappingProxyType

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from dualeval.backends import choose_backend, group_of_caller, world_of_caller
from dualeval.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, DualevalError, LaunchError, UsageError
from dualeval.launch import detect
from dualeval.launch.cores import usable_cores
from dualeval.launch.launchers import may_start_ranks
from dualeval.process.start import LAUNCHER_PID, end_with_launcher
from dualeval.world import World
from dualeval.world.devices import device_here
from dualeval.world.network import LOOPBACK, check_own_name
from dualeval.world.store import JOINING, allow_connections

# In the environment of a script's ranks: the launcher whose variables give them their places.
_STARTED = "DUALEVAL_STARTED_RANKS"
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# On average, a run loses half of it at its end.
_LOOK_EVERY_S = 0.03
# Ranks that are asked to stop end within 5 s, if they can.
_STOP_WITHIN_S = 10.0
# Seconds from the signal to end until ranks are killed, as under torchrun.
_END_WITHIN_S = 30.0


def last_rank(nproc: int, world: World, backend: str | None) -> World:
    """The last of the ranks to start here: if any of them cannot start, this one cannot, either."""
    if not may_start_ranks(world):
        raise LaunchError(
            f"--nproc {nproc} was given to a process that {world.launcher} had started already. "
            "Leave out --nproc there, or start 'dualeval run --nproc N' by itself."
        )
    if nproc < 1:
        raise UsageError(f"--nproc {nproc}: expected a number of processes, of at least 1")
    launcher = "horovodrun" if backend == "horovod" else "torchrun"
    return World(
        rank=nproc - 1, size=nproc, local_rank=nproc - 1, local_size=nproc, node_rank=0, launcher=launcher
    )


def start_ranks(
    command: list[str],
    last: World,
    *,
    backend: str | None,
    device: str | None,
    allow_shared_gpu: bool,
    stop_signals: Collection[signal.Signals],
    takes_signals: bool,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run a command as ranks of torchrun's or horovodrun's kind; returns their exit code."""
    # Errors are shown once here, before any rank is started.
    choose_backend(backend, last)
    device_here(device, last.size, last, allow_shared_gpu=allow_shared_gpu)
    environ = {**os.environ, **variables}
    if last.launcher == "torchrun":
        return run_local(command, last.size, environ, stop_signals=stop_signals, takes_signals=takes_signals)
    from dualeval.backends.horovod import serve_rendezvous

    with serve_rendezvous(last.size) as variables_of:
        return run_local(command, last.size, environ, variables_of, stop_signals, takes_signals=takes_signals)


def start_this_script(
    nproc: int,
    *,
    backend: str | None,
    device: str | None,
    allow_shared_gpu: bool,
    stop_signals: Collection[signal.Signals],
) -> str | None:
    """Run the script of this process again as ``nproc`` ranks, wait for them, and exit with their exit code.

    In the ranks, and in as many ranks of any other launcher, it does nothing. So code before this call runs
    here and in each rank, and code after it only in the ranks. The ranks get the script's arguments, the
    interpreter's options and the environment.
    """
    launcher, group, world = os.environ.get(_STARTED), group_of_caller(), rank_of_script()
    if launcher is not None or group is not None or not may_start_ranks(world):
        if world.size == nproc:
            end_with_launcher()
            return launcher
        raise LaunchError(
            f"nproc={nproc}: this process is rank {world.rank} of {world.size} already (started by "
            f"{world.launcher}). Leave nproc out, or start the script by itself: 'python SCRIPT'."
        )
    command = _own_command(nproc)
    last = last_rank(nproc, world, backend)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        code = start_ranks(
            command,
            last,
            backend=backend,
            device=device,
            allow_shared_gpu=allow_shared_gpu,
            stop_signals=stop_signals,
            takes_signals=False,
            variables={_STARTED: last.launcher},
        )
    except UsageError:
        raise
    except DualevalError as error:
        # For a rank that could not show its own error.
        sys.stderr.write(f"dualeval: error: {error}\n")
        code = error.exit_code
    sys.exit(code)


def rank_of_script() -> World:
    """This process's rank: in the group that its script has opened, or by its launcher."""
    # With the launcher named, for the shell may hold left-over variables of another one. If its own variables
    # are gone, this is an error here, rather than an endless start of ranks.
    world = detect(os.environ, os.environ.get(_STARTED))
    group = group_of_caller()
    return world if group is None else world_of_caller(group, world)


def _own_command(nproc: int) -> list[str]:
    """The command of this process, by which its script can be run again."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    problem = None
    if multiprocessing.parent_process() is not None:
        problem = "this process was started by multiprocessing"
    elif threading.current_thread() is not threading.main_thread():
        problem = "it was called outside of the main thread"
    elif file is None or file == "<stdin>" or hasattr(sys, "ps1") or hasattr(main, "get_ipython"):
        problem = "there is no file to run (notebook, prompt, 'python -c', standard input)"
    if problem is not None or file is None:
        raise UsageError(
            f"nproc={nproc} runs the script again as {nproc} processes, and {problem}. Write the call into a "
            "file, and type 'python FILE'; or leave nproc out, which evaluates in this process."
        )
    words = sys.orig_argv[1:]
    if main.__spec__ is None:
        # A file, not a module of -m. After a change of the folder, its name alone would not be found.
        names = [Path(word).name for word in words]
        words[names.index(Path(file).name)] = file
    return [sys.executable, *words]


def run_local(
    command: list[str],
    processes: int,
    environ: Mapping[str, str],
    variables_of: Callable[[int], Mapping[str, str]] = lambda rank: {},
    stop_signals: Collection[signal.Signals] = (),
    *,
    takes_signals: bool = False,
) -> int:
    """Run a command as the ranks of one run on this machine, and wait for them. Only in the main thread.

    They share this process's standard output and error. They get torchrun's variables beside ``environ``
    (but not its OMP_NUM_THREADS=1: the ranks divide the cores themselves). When a rank fails, the others get
    SIGTERM and, 30 s later, SIGKILL. SIGINT, SIGTERM and SIGQUIT sent to this process are passed to the ranks
    in the same way, SIGHUP as SIGTERM; after ``stop_signals`` they have time to end by themselves, and ranks
    that handle these are started with them blocked. If this process is killed, they get SIGTERM.
    """
    cores = usable_cores()
    limit = process_limit(cores)
    if not 1 <= processes <= limit:
        raise UsageError(
            f"--nproc {processes} is out of range: this machine takes 1 to {limit} processes (16 for each of "
            f"the {cores} cores that it may use, and at least 64: each needs about 150 MB and a second of "
            "one core to start). Type a smaller --nproc, or use more nodes."
        )
    check_own_name()
    # This process serves the store in which the ranks meet, and the ranks inherit its limit.
    allow_connections(JOINING * processes, "the process that starts the ranks")
    # Port 0: the kernel picks a free one, so that two runs on one machine cannot collide.
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    shared = {**environ, **_variables_of_torchrun(processes, store.port), LAUNCHER_PID: str(os.getpid())}
    ranks: list[subprocess.Popen[bytes]] = []
    with _SignalCatcher(stop_signals) as catcher:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals if takes_signals else ())
        try:
            for rank in range(processes):
                numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
                variables = {**shared, **numbers, **variables_of(rank)}
                ranks.append(subprocess.Popen(command, env=variables, start_new_session=True))
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            codes = _codes_of(ranks, catcher)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            # SIGHUP would end the ranks before they have said so.
            _end(ranks, catcher.ending if catcher.ending not in (None, signal.SIGHUP) else signal.SIGTERM)
    if codes is None:
        assert catcher.received is not None
        return 128 + catcher.received
    return _exit_code(codes, ranks)


def process_limit(cores: int) -> int:
    """The greatest number of ranks for a machine with that many cores."""
    return max(64, 16 * cores)


def exit_code_of(codes: list[int]) -> int:
    """The exit code of a run from those of its failed ranks, first failure first (-N: died by signal N)."""
    if EXIT_USAGE in codes:
        return EXIT_USAGE
    first = codes[0]
    if first in (-signal.SIGINT, -signal.SIGTERM):
        return 128 - first
    return first if first > 0 else EXIT_FAILED


def _variables_of_torchrun(size: int, port: int) -> dict[str, str]:
    """torchrun's variables that are the same for all ranks of one node."""
    return {
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(size)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


class _SignalCatcher:
    """Remembers signals that ask this process to end; puts the handlers back afterwards.

    The handler does not raise: while the ranks are started, the exception would leave some without a parent.
    """

    def __init__(self, stop_signals: Collection[signal.Signals]) -> None:
        self._stop_signals = frozenset(stop_signals)
        # The first signal.
        self.received: signal.Signals | None = None
        self._since = 0.0
        # Signals on which the ranks end by themselves, and which have not been passed on yet.
        self._to_pass_on: list[signal.Signals] = []

    @property
    def ending(self) -> signal.Signals | None:
        """The signal after which this process has to end the ranks."""
        if self.received in self._stop_signals and monotonic() - self._since < _STOP_WITHIN_S:
            return None
        return self.received

    def pass_on(self, ranks: Sequence[subprocess.Popen[bytes]]) -> None:
        """Send the ranks, which are all started, the signals on which they end by themselves."""
        while self._to_pass_on:
            number = self._to_pass_on.pop(0)
            for rank in ranks:
                rank.send_signal(number)

    def __enter__(self) -> _SignalCatcher:
        # A signal that is ignored here (nohup, a job in a shell's background) stays ignored.
        wanted = [
            number
            for number in {*_ENDING_SIGNALS, *self._stop_signals}
            if signal.getsignal(number) is not signal.SIG_IGN
        ]
        self._previous = {number: signal.signal(number, self._remember) for number in wanted}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._since = signal.Signals(number), monotonic()
        if number in self._stop_signals:
            self._to_pass_on.append(signal.Signals(number))


def _codes_of(ranks: Sequence[subprocess.Popen[bytes]], catcher: _SignalCatcher) -> dict[int, int] | None:
    """Wait until a rank has failed or all are done; returns failed ranks' codes, or None after a signal."""
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = {rank: code for rank, code in enumerate(codes) if code}
        if failed or None not in codes:
            return failed
        catcher.pass_on(ranks)
        if catcher.ending is not None:
            return None
        sleep(_LOOK_EVERY_S)


def _end(ranks: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """Send a signal to ranks that still run, with their child processes, and SIGKILL after the time limit."""
    running = [rank for rank in ranks if rank.poll() is None]
    for rank in running:
        os.killpg(rank.pid, number)
    deadline = monotonic() + _END_WITHIN_S
    for rank in running:
        with suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, deadline - monotonic()))
    for rank in running:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


def _exit_code(failed: Mapping[int, int], ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    if not failed:
        return EXIT_DONE
    code = exit_code_of([*failed.values()])
    rank, first = next(iter(failed.items()))
    if code == EXIT_FAILED and first < 0:
        # This rank could not show its own error.
        raise DualevalError(f"rank {rank} (pid {ranks[rank].pid}) was ended by {signal.Signals(-first).name}")
    return code
