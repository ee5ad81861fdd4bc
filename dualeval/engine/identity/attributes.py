"""Which attributes of classes and objects belong to the identity, and which never do."""

from __future__ import annotations

from types import MemberDescriptorType
from typing import Any

from dualeval.engine.nests import own_attributes
from dualeval.errors import UsageError

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
