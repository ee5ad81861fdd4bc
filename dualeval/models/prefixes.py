"""The prefixes that wrappers put before the names of tensors, and which of them a model wants removed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from dualeval.errors import UsageError
from dualeval.wording import first_of

# DataParallel, DistributedDataParallel, AveragedModel; torch.compile; the attribute of most LightningModules.
WRAPPER_PREFIXES = ("module.", "_orig_mod.", "model.")
# What AveragedModel keeps beside "module.*": how many models were averaged.
_AVERAGED = ("module.", "n_averaged")


@dataclass(frozen=True, kw_only=True)
class Unwrapped:
    """A state_dict with a prefix removed."""

    # By the names that are left; with the `_metadata` of a state_dict where there were any.
    tensors: OrderedDict[str, Tensor]
    # What was removed from each name; "" for nothing.
    prefix: str = ""
    # Names of tensors that had no such prefix, and are not among `tensors`.
    left_out: tuple[str, ...] = ()


def unwrap_for(tensors: OrderedDict[str, Tensor], own: Collection[str]) -> Unwrapped:
    """Remove as many wrappers' prefixes as give most of a model's names.

    So names that fit as they are stay as they are, also those of a model with an attribute ``module``; and
    those of an older layout, which a module converts by itself, are brought as near as can be.
    """
    names = set(own)
    # Of equals the last one: what all names begin with is a wrapper's more often than a model's.
    return max(reversed(unwrapped(tensors)), key=lambda stage: len(names & stage.tensors.keys()))


def unwrapped(tensors: OrderedDict[str, Tensor]) -> list[Unwrapped]:
    """A state_dict as it is, with the first wrapper's prefix removed, with the second's too, and so on."""
    stages = [Unwrapped(tensors=tensors)]
    while (following := _without_outermost(stages[-1])) is not None:
        stages.append(following)
    return stages


def _without_outermost(stage: Unwrapped) -> Unwrapped | None:
    for prefix in WRAPPER_PREFIXES:
        inside = [name for name in stage.tensors if name.startswith(prefix)]
        outside = [name for name in stage.tensors if not name.startswith(prefix)]
        if inside and all((prefix, name) == _AVERAGED for name in outside):
            return Unwrapped(
                tensors=_without(stage.tensors, prefix),
                prefix=stage.prefix + prefix,
                left_out=(*stage.left_out, *outside),
            )
    return None


def take_prefix(tensors: OrderedDict[str, Tensor], prefix: str, source: str) -> Unwrapped:
    """Take only the names that begin with a prefix, and remove it from them."""
    if not prefix:
        return Unwrapped(tensors=tensors)
    inside = [name for name in tensors if name.startswith(prefix) and name != prefix]
    if not inside:
        raise UsageError(
            f"--weights-prefix {prefix}: no name in {source} begins with it (found: "
            f"{first_of([*tensors], 3)}). Give a prefix that the names have, or leave it out."
        )
    # "model" is "model." also where there is a "model_ema.": what is left out is said.
    if any(name.startswith(f"{prefix}.") for name in inside):
        prefix += "."
    return Unwrapped(
        tensors=_without(tensors, prefix),
        prefix=prefix,
        left_out=tuple(name for name in tensors if not name.startswith(prefix)),
    )


def prefixes_that_fit(tensors: Mapping[str, Tensor], own: Collection[str]) -> list[str]:
    """The prefixes with each of which all of a model's names are among the tensors' names."""
    first = next(iter(own), None)
    if first is None:
        return []
    prefixes = [name[: -len(first)] for name in tensors if name.endswith(f".{first}")]
    return [prefix for prefix in prefixes if all(prefix + name in tensors for name in own)]


def _without(tensors: OrderedDict[str, Tensor], prefix: str) -> OrderedDict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it; the versions of their modules likewise."""
    inside = OrderedDict(
        (name[len(prefix) :], tensor)
        for name, tensor in tensors.items()
        if name.startswith(prefix) and name != prefix
    )
    metadata = getattr(tensors, "_metadata", None)
    if isinstance(metadata, Mapping):
        # A module's name has no dot at its end: the outermost one's is the prefix without it.
        inside._metadata = OrderedDict(  # type: ignore[attr-defined]
            (name[len(prefix) :], version)
            for name, version in metadata.items()
            if f"{name}.".startswith(prefix)
        )
    return inside
