"""Reading a launcher's variables, with the errors of what is missing in them or cannot be."""

from __future__ import annotations

from collections.abc import Mapping

from dualeval.errors import LaunchError
from dualeval.launch.variables import ENV, TORCHRUN, Variables
from dualeval.world import World

# Slurm numbers from here on what is no step of tasks: a batch script, an salloc shell on a node.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


class LeftOver(LaunchError):
    """Variables that are set in part, and may be another's than the launcher whose names they have."""


def read_place(source: Variables, environ: Mapping[str, str], trace: tuple[str, ...]) -> World | None:
    """Read the four numbers that every launcher gives; None where it left no trace."""
    if not is_whole(source, environ, trace):
        return None
    rank, size, local_rank, local_size = (whole_number(source, environ, name) for name in source.ranks)
    return check_place(source, environ, rank, size, local_rank, local_size)


def is_whole(source: Variables, environ: Mapping[str, str], trace: tuple[str, ...]) -> bool:
    """Whether a launcher's variables are all set; False where it left no trace.

    A rank or a size without the rest is an error and never rank 0: several processes that each took
    themselves for the only one would all write the same result.
    """
    if not any(name in environ for name in trace):
        return False
    missing = [name for name in source.needed if name not in environ]
    if missing:
        raise half_set(source, environ, missing)
    return True


def is_step_of_tasks(step: str) -> bool:
    """Whether a value of SLURM_STEP_ID is the number of a step that srun started."""
    return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def check_place(
    source: Variables, environ: Mapping[str, str], rank: int, size: int, local_rank: int, local_size: int
) -> World:
    """Make a World of numbers that fit together."""
    if not rank < size:
        raise launch_error(source, f"{source.rank}={rank} is not below {source.size}={size}", environ)
    if not local_rank < local_size:
        limit = source.local_size if source.local_size in environ else source.size
        raise launch_error(
            source, f"{source.local_rank}={local_rank} is not below {limit}={local_size}", environ
        )
    if not local_size <= size:
        raise launch_error(source, f"{source.local_size}={local_size} is above {source.size}={size}", environ)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=None,
        launcher=source.launcher,
    )


def whole_number(source: Variables, environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdecimal()):
        raise launch_error(source, f"{name}={text!r} is not a whole number", environ)
    return int(text)


def read_address(source: Variables, environ: Mapping[str, str], host: str, port: str) -> tuple[str, int]:
    if not environ[host]:
        raise launch_error(source, f"{host} is empty", environ)
    number = whole_number(source, environ, port)
    if not 0 < number < 65536:
        raise launch_error(source, f"{port}={number} is not a port (1 to 65535)", environ)
    return environ[host], number


def half_set(source: Variables, environ: Mapping[str, str], missing: list[str]) -> LaunchError:
    start = f"Start with '{source.start}'"
    own = source is not ENV and (source.mark is None or source.mark in environ)
    if own:
        cause = (
            f"{source.launcher} started this process, but something between removed a part of its variables"
        )
        remedy = start
    else:
        stale = " ".join(name for name in source.needed if name in environ)
        cause = f"{TORCHRUN.mark} is not set either, so these are left over or another tool's"
        remedy = f"{start}, set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or type 'unset {stale}'"
    verb = "is" if len(missing) == 1 else "are"
    problem = f"{source.launcher}'s variables are half set: {', '.join(missing)} {verb} missing"
    return launch_error(source, problem, environ, f"{cause}. {remedy}", LaunchError if own else LeftOver)


def launch_error(
    source: Variables,
    problem: str,
    environ: Mapping[str, str],
    advice: str | None = None,
    kind: type[LaunchError] = LaunchError,
) -> LaunchError:
    """Make the error that shows what was found of a launcher's variables and what to type."""
    found = ", ".join(f"{name}={environ[name]}" for name in source.all if name in environ)
    start = f"Start with '{source.start}'"
    return kind(
        f"{problem} (found: {found}). {advice or start}, "
        f"or pass --launcher none to run one process without them."
    )
