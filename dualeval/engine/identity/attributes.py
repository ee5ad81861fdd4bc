"""Which attributes of classes and objects belong to the identity, and which never do."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from types import MemberDescriptorType
from typing import Any

from dualeval.engine.nests import own_attributes
from dualeval.errors import UsageError
from dualeval.world import World

# In a class or an object: the names of attributes that decide no number.
IGNORES = "dualeval_identity_ignores"

_INCIDENTAL = {
    # Where a thing was found, and not what it is.
    "name_or_path",
    # A hash that Python has salted, another in each process; transformers keeps one of a model's options.
    "original_object_hash",
}


def is_incidental(name: str) -> bool:
    """Whether an attribute of that name says where a thing lies, and not what it is."""
    return name.strip("_").lower() in _INCIDENTAL


class _Reading:
    """Reads attributes that may say which of how many processes this is: a job is that of one process."""

    def __init__(self, world: World) -> None:
        self.alone = False  # whether this rank's numbers are read as rank 0's
        self.met = False  # whether a number was met that may be this rank's, or the same on all ranks
        self.sizes = {"world_size": world.size, "local_world_size": world.local_size}
        self.ranks = {"rank": world.rank, "global_rank": world.rank, "local_rank": world.local_rank}
        self.ranks |= dict.fromkeys(("node_rank", "group_rank"), world.node_rank or 0)

    def value(self, name: str, value: Any) -> Any:
        """An attribute's value as it counts."""
        name, kind = name.rpartition(".")[2].strip("_").lower(), type(value)
        if kind not in (int, str):  # a text as the environment has it
            return value
        if name in self.sizes:
            return kind(1) if value == kind(self.sizes[name]) else value
        # Rank 0 has the number of a process alone.
        if self.ranks.get(name, 0) and value == kind(self.ranks[name]):
            self.met = True
            return kind(0) if self.alone else value
        return value


_ALONE = _Reading(World.alone())  # leaves all as it is
_READING: ContextVar[_Reading] = ContextVar("how attributes are read", default=_ALONE)


def reading() -> _Reading:
    """How attributes are read: as they are, but inside of ``both_readings``."""
    return _READING.get()


def both_readings(world: World, make: Callable[[], Any]) -> tuple[Any, Any]:
    """What is made of attributes as they are, and with this rank's numbers as those of a process alone.

    Both are the same where no attribute called rank, or the like, holds this rank's number.
    """
    own = _Reading(world)
    before = _READING.set(own)
    try:
        first = make()
        own.alone = own.met
        return first, make() if own.met else first
    finally:
        _READING.reset(before)


def attributes_of(value: Any) -> dict[str, Any]:
    """What stands in an object's ``__dict__`` and slots, less what it ignores; no attribute that computes."""
    found = own_attributes(value)
    left_out = {*ignored_by(type(value)), *_names_in(found.get(IGNORES, ()), type(value))}
    return {name: item for name, item in found.items() if name not in left_out}


def ignored_by(kind: type) -> set[str]:
    """The attributes that a class, and what it derives from, leaves out of the identity."""
    bodies = [type.__dict__["__dict__"].__get__(base) for base in type.__dict__["__mro__"].__get__(kind)]
    named = {name for body in bodies for name in _names_in(body.get(IGNORES, ()), kind)}
    return {IGNORES, *named}


def _names_in(names: Any, kind: type) -> set[str]:
    if type(names) is str:
        return {names}
    if type(names) in (tuple, list, set, frozenset) and all(type(name) is str for name in names):
        return set(names)
    # A slot or property of that name says it for each object, where it is found.
    if type(names) is MemberDescriptorType:
        return set()
    raise UsageError(
        f"{IGNORES} of {kind.__module__}.{kind.__qualname__} is of type {type(names).__name__}; expected a "
        f'tuple of attribute names, such as {IGNORES} = ("started_at",)'
    )
