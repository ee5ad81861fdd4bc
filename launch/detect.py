"""Find the World of this process in the variables that its launcher set.

Detection is a table of pure probes, each ``Mapping -> World | None``, asked in order: the innermost launcher
first, because it alone knows this process's rank (torchrun inside an allocation starts several ranks for
each task of the outer launcher). All fields of a World come from the one probe that answered.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from dualeval.errors import LaunchError, UsageError
from dualeval.world import World

Probe = Callable[[Mapping[str, str]], World | None]

# torchrun sets all of these for every process; it alone sets the mark.
TORCHRUN_MARK = "TORCHELASTIC_RUN_ID"
TORCHRUN_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
TORCHRUN_MASTER = ("MASTER_ADDR", "MASTER_PORT")
TORCHRUN_START = "torchrun --nproc-per-node N -m dualeval run"


def detect(environ: Mapping[str, str], launcher: str | None = None) -> World:
    """Find which launcher started this process, and the process's place in the run.

    Args:
        environ: the environment variables.
        launcher: a name of ``PROBES`` to ask that probe alone; None asks all, innermost first.

    Returns:
        the World; ``World.alone()`` where no launcher left a trace, or with ``launcher="none"``.

    Raises:
        LaunchError: the variables are incomplete or contradict each other, or are not those of ``launcher``.
        UsageError: there is no launcher of that name.
    """
    if launcher is None:
        # The last probe, "none", always answers.
        return next(world for probe in PROBES.values() if (world := probe(environ)) is not None)
    if launcher not in PROBES:
        near = difflib.get_close_matches(launcher, PROBES, cutoff=0.5) or list(PROBES)
        raise UsageError(
            f"There is no launcher {launcher!r}. Did you mean {' or '.join(near)}? "
            f"--launcher takes one of: {', '.join(PROBES)}."
        )
    world = PROBES[launcher](environ)
    if world is None:
        raise LaunchError(
            f"--launcher {launcher} was given, but no variable of {launcher} is set. "
            f"Start with '{TORCHRUN_START}', or leave --launcher out."
        )
    return world


def _probe_torchrun(environ: Mapping[str, str]) -> World | None:
    """Probe for torchrun: all of its variables, or none of those that place a process.

    MASTER_ADDR and MASTER_PORT alone are no trace of it: job scripts export them for any launcher, and an
    address makes no process a rank. A rank or a size without the rest is an error and never rank 0: several
    processes that each took themselves for the only one would all write the same result.
    """
    if not any(name in environ for name in (TORCHRUN_MARK, *TORCHRUN_RANKS)):
        return None
    needed = (*TORCHRUN_RANKS, *TORCHRUN_MASTER)
    missing = [name for name in needed if name not in environ]
    if missing:
        if TORCHRUN_MARK in environ:
            cause = "torchrun started this process, but something between removed a part of its variables"
            remedy = f"Start with '{TORCHRUN_START}'"
        else:
            stale = [name for name in needed if name in environ]
            cause = f"{TORCHRUN_MARK} is not set either, so these are left over or another tool's"
            remedy = f"Start with '{TORCHRUN_START}', or type 'unset {' '.join(stale)}'"
        raise _torchrun_error(
            f"torchrun's variables are half set: {', '.join(missing)} {_is_or_are(missing)} missing",
            environ,
            f"{cause}. {remedy}",
        )

    values: dict[str, int] = {}
    for name in (*TORCHRUN_RANKS, "MASTER_PORT"):
        text = environ[name]
        if not (text.isascii() and text.isdecimal()):
            raise _torchrun_error(f"{name}={text!r} is not a whole number", environ)
        values[name] = int(text)
    rank, size = values["RANK"], values["WORLD_SIZE"]
    local_rank, local_size = values["LOCAL_RANK"], values["LOCAL_WORLD_SIZE"]
    if not rank < size:
        raise _torchrun_error(f"RANK={rank} is not below WORLD_SIZE={size}", environ)
    if not local_rank < local_size:
        raise _torchrun_error(f"LOCAL_RANK={local_rank} is not below LOCAL_WORLD_SIZE={local_size}", environ)
    if not local_size <= size:
        raise _torchrun_error(f"LOCAL_WORLD_SIZE={local_size} is above WORLD_SIZE={size}", environ)
    if not environ["MASTER_ADDR"]:
        raise _torchrun_error("MASTER_ADDR is empty", environ)
    if not 0 < values["MASTER_PORT"] < 65536:
        raise _torchrun_error(f"MASTER_PORT={values['MASTER_PORT']} is no port (1 to 65535)", environ)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=values["GROUP_RANK"],
        launcher="torchrun",
        master=(environ["MASTER_ADDR"], values["MASTER_PORT"]),
    )


def _probe_none(environ: Mapping[str, str]) -> World:
    """Probe for no launcher: answers always, whatever is set."""
    return World.alone()


def _torchrun_error(
    problem: str, environ: Mapping[str, str], advice: str = f"Start with '{TORCHRUN_START}'"
) -> LaunchError:
    """Make the error that shows what was found of torchrun's variables and what to type."""
    names = (*TORCHRUN_RANKS, *TORCHRUN_MASTER, TORCHRUN_MARK)
    found = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
    return LaunchError(
        f"{problem} (found: {found}). {advice}, or pass --launcher none to run one process without them."
    )


def _is_or_are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


# Innermost launcher first. "none" stays last: it always answers.
PROBES: dict[str, Probe] = {"torchrun": _probe_torchrun, "none": _probe_none}
