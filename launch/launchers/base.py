"""What a launcher is: the names of its variables, what its ranks use, and how they are started.

A probe reads the environment through ``Environment``, which raises the errors of what is missing or wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dualeval.errors import LaunchError
from dualeval.world import World

if TYPE_CHECKING:
    from dualeval.launch.site import Site

# torchrun's names are those of other tools and shells, too. This one it alone sets.
MARK_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"


class LeftOver(LaunchError):
    """Variables that are set in part, and may be another tool's than the launcher whose names they have."""


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A variable of a launcher's that is set."""

    name: str
    value: str
    # Which part of a World it tells, as "rank"; empty where it serves otherwise.
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to start ranks."""

    # What `--launchers` of `dualeval conformance` takes.
    name: str
    # Which backends its ranks can use.
    backends: tuple[str, ...]
    # The words before the command, for a site, the ranks on each node, and a number of this start.
    words: Callable[[Site, Sequence[int], int], list[str]]
    # What has to be on the PATH; None where the command starts its own ranks.
    program: str | None = None
    # The words after the command, for so many ranks.
    after: Callable[[int], list[str]] = lambda ranks: []
    # Why it cannot start ranks of a backend, for a site and the ranks on each node; None: it can.
    lacks: Callable[[Site, Sequence[int], str], str | None]
    # Whether `dualeval doctor` can be its command.
    has_doctor: bool = True


@dataclass(frozen=True)
class Environment:
    """The environment, as the probe of one launcher reads it; what is wrong there is a LaunchError."""

    # Whose variables are read.
    launcher: Launcher
    # All that are set.
    variables: Mapping[str, str]

    def are_whole(self) -> bool:
        """Whether the launcher's variables are all set; False where it left no trace.

        A rank or a size without the rest is an error and never rank 0: several processes that each took
        themselves for the only one would all write the same result.
        """
        if not any(name in self.variables for name in self.launcher.trace or self.launcher.ranks):
            return False
        if missing := self.missing():
            raise self.half_set(missing)
        return True

    def missing(self) -> list[str]:
        """Those that are needed and not set."""
        return [name for name in self.launcher.needed if name not in self.variables]

    def world_of_four(self) -> World | None:
        """Read the four numbers that every launcher gives; None where it left no trace."""
        return self.world(*map(self.number, self.launcher.ranks)) if self.are_whole() else None

    def world(self, rank: int, size: int, local_rank: int, local_size: int) -> World:
        """Make a World of numbers that fit together."""
        source = self.launcher
        if not rank < size:
            raise self.error(f"{source.rank}={rank} is not below {source.size}={size}")
        if not local_rank < local_size:
            limit = source.local_size if source.local_size in self.variables else source.size
            raise self.error(f"{source.local_rank}={local_rank} is not below {limit}={local_size}")
        if not local_size <= size:
            raise self.error(f"{source.local_size}={local_size} is above {source.size}={size}")
        from dualeval.world.meetings import MeetingAtStore
        from dualeval.world.meetings.mpi import OverMpi

        return World(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node_rank=None,
            launcher=source.name,
            mpi=source.starts_mpi,
            meeting=OverMpi() if source.starts_mpi else MeetingAtStore(),
        )

    def number(self, name: str, default: int | None = None) -> int:
        """Read a whole number; ``default``, where there is one, stands for an empty or missing variable."""
        text = self.variables.get(name, "")
        if not text and default is not None:
            return default
        if not (text.isascii() and text.isdecimal()):
            raise self.error(f"{name}={text!r} is not a whole number")
        return int(text)

    def address(self, host: str = "MASTER_ADDR", port: str = "MASTER_PORT") -> tuple[str, int]:
        """Read a host and a port."""
        if not self.variables[host]:
            raise self.error(f"{host} is empty")
        number = self.number(port)
        if not 0 < number < 65536:
            raise self.error(f"{port}={number} is not a port (1 to 65535)")
        return self.variables[host], number

    def half_set(self, missing: list[str]) -> LaunchError:
        """Make the error of variables that are set in part."""
        source = self.launcher
        start = f"Start with '{source.start}'"
        certain = not source.is_shared or source.mark in self.variables
        if certain:
            cause = (
                f"{source.name} started this process, but something in between removed some of its variables"
            )
            remedy = start
        else:
            stale = " ".join(name for name in source.needed if name in self.variables)
            cause = f"{MARK_OF_TORCHRUN} is not set either, so these are left over or another tool's"
            remedy = (
                f"{start}, set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or type 'unset {stale}'"
            )
        verb = "is" if len(missing) == 1 else "are"
        problem = f"{source.name}'s variables are half set: {', '.join(missing)} {verb} missing"
        return self.error(problem, f"{cause}. {remedy}", LaunchError if certain else LeftOver)

    def error(self, problem: str, advice: str = "", kind: type[LaunchError] = LaunchError) -> LaunchError:
        """Make the error that shows what was found of the launcher's variables and what to type."""
        source = self.launcher
        shown = ", ".join(f"{name}={self.variables[name]}" for name in source.all if name in self.variables)
        start = f"Start with '{source.start}'"
        return kind(
            f"{problem} (found: {shown}). {advice or start}, "
            f"or pass --launcher none to run one process without them."
        )


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """One launcher; the first table of ``docs/launchers.md`` is made of these values."""

    # What ``--launcher`` takes.
    name: str
    # Its page in ``docs/launchers``, which several may share.
    page: str
    # Its name in sentences to people, where that is another.
    title: str = ""
    # Variables with this process's number and the other three; empty where it tells none.
    rank: str = ""
    size: str = ""
    local_rank: str = ""
    local_size: str = ""
    # Further variables that it always sets, and that are needed.
    others: tuple[str, ...] = ()
    # Those of the four above that may be missing: the hosts of all ranks tell then.
    optional: tuple[str, ...] = ()
    # A variable that it alone sets; empty where the names above are its own already.
    mark: str = ""
    # Other tools set variables of these names, too.
    is_shared: bool = False
    # Any one of these shows that it started this process; empty for the four above.
    trace: tuple[str, ...] = ()
    # Launchers that may each have started the other; the variables do not show which.
    contradicts: tuple[str, ...] = ()
    # What to type to start with it.
    start: str
    # Finds the World in the variables; None where this launcher left no trace there.
    read: Callable[[Environment], World | None] = Environment.world_of_four
    # The backends that its ranks can use, the default first, with a condition for the docs.
    backends: Mapping[str, str]
    # It starts ranks of an MPI alone: they take Horovod where that is built with MPI, and else mpi.
    starts_mpi: bool = False
    # A rank that it started alone may start ranks of its own: a shell that srun has opened on a node is a
    # step of one task, and a pod may be a job of one.
    may_start: bool = False
    # Those of its variables in an environment that the ranks of such a process must not see.
    not_handed_on: Callable[[Mapping[str, str]], Collection[str]] = lambda environ: ()
    # How ``dualeval conformance`` starts it.
    ways: tuple[Way, ...] = ()

    def probe(self, environ: Mapping[str, str]) -> World | None:
        """Find the World in the environment; None where this launcher left no trace there."""
        return self.read(Environment(self, environ))

    @property
    def ranks(self) -> tuple[str, ...]:
        """The four that every launcher has."""
        return (self.rank, self.size, self.local_rank, self.local_size)

    @property
    def needed(self) -> tuple[str, ...]:
        """Those without which a process cannot be placed."""
        return tuple(name for name in (*self.ranks, *self.others) if name and name not in self.optional)

    @property
    def all(self) -> tuple[str, ...]:
        """Those that are needed, the optional ones, and the mark."""
        return (*self.needed, *self.optional, *((self.mark,) if self.mark else ()))

    def variables_in(self, environ: Mapping[str, str]) -> tuple[Variable, ...]:
        """Those that are set, with what they are read for."""
        meanings = dict(zip(self.ranks, ("rank", "size", "local rank", "local size"), strict=True))
        return tuple(
            Variable(name=name, value=environ[name], meaning=meanings.get(name, ""))
            for name in self.all
            if name in environ
        )
