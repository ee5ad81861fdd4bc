"""Ranks on this machine, started for a command line or for a script, which then waits for them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

from dualeval.backends import choose_backend, group_of_caller, world_of_caller
from dualeval.errors import DualevalError, LaunchError, UsageError
from dualeval.launch import detect
from dualeval.launch.local import run_local
from dualeval.launch.starts import may_start_ranks
from dualeval.world import World
from dualeval.world.devices import device_here

# In the environment of a script's ranks: by which launcher's variables they find their places.
_STARTED = "DUALEVAL_STARTED_RANKS"


def last_rank(nproc: int, world: World, backend: str | None) -> World:
    """The last of the ranks that are started from here: whatever stops any of them stops this one."""
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
    # Said here once, before any rank is started.
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

    In the ranks, and in those of any other launcher that are as many, it does nothing. So what the script
    does before this call is done once more here than in the ranks, and what comes after it in the ranks only.
    They get the script's arguments, the interpreter's options and the environment.
    """
    launcher, group, world = os.environ.get(_STARTED), group_of_caller(), rank_of_script()
    if launcher is not None or group is not None or not may_start_ranks(world):
        if world.size == nproc:
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
        # A rank that could not speak for itself.
        sys.stderr.write(f"dualeval: error: {error}\n")
        code = error.exit_code
    sys.exit(code)


def rank_of_script() -> World:
    """Which rank this process is: of the group that its script has opened, or of what has started it."""
    # Said, not left to be found: variables of another launcher may be left over in the shell. Where its own
    # are gone, that is an error here, and no start of ranks without end.
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
        problem = "it was called in another thread than the main one"
    elif file is None or file == "<stdin>" or hasattr(sys, "ps1") or hasattr(main, "get_ipython"):
        problem = "there is no file to run (notebook, prompt, 'python -c', standard input)"
    if problem is not None or file is None:
        raise UsageError(
            f"nproc={nproc} runs the script again as {nproc} processes, and {problem}. Write the call into a "
            "file, and type 'python FILE'; or leave nproc out, which evaluates in this process."
        )
    words = sys.orig_argv[1:]
    if main.__spec__ is None:
        # A file, no module of -m. Where the folder has been changed since, its name alone leads nowhere.
        names = [Path(word).name for word in words]
        words[names.index(Path(file).name)] = file
    return [sys.executable, *words]
