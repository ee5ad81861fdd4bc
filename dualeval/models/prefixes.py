"""Names of a file's tensors that have a prefix which the model's have not, and tensors beside the model's."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from dualeval.errors import UsageError
from dualeval.messages import counted, first_of, listed

# DataParallel, DistributedDataParallel, AveragedModel; torch.compile; the attribute of most LightningModules.
_WRAPPER_PREFIXES = ("module.", "_orig_mod.", "model.")
# What torch.compile, FSDP and activation checkpointing put into the names of the modules that they wrap.
_WITHIN = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_PLAIN = partial(_WITHIN.sub, "")
_WITHOUT_PARALLEL = partial(re.compile(r"(?<=\.)module\.").sub, "")
_Tensors = OrderedDict[str, Tensor]
# They decide no number: of averaged models (torch's, mmengine's), of batch norms, of thop.
_COUNTER = re.compile(r"(n_averaged|steps|(.+\.)?(num_batches_tracked|total_ops|total_params))$")


@dataclass(frozen=True, kw_only=True)
class _Unwrapped:
    """A state_dict with a prefix removed."""

    # By the names that are left; with the `_metadata` of a state_dict where there were any.
    tensors: _Tensors
    # What was removed from each name; "" for nothing.
    prefix: str = ""
    # Names of tensors that had no such prefix, and are not among `tensors`.
    left_out: tuple[str, ...] = ()


def stripped(
    tensors: _Tensors, model: nn.Module, ties: list[list[str]], prefix: str | None, source: str
) -> tuple[_Unwrapped, list[str]]:
    """The tensors by names without the prefix of a wrapper, and the names of those beside the model's."""
    expected = model.state_dict().keys()
    stage = _unwrap_for(tensors, expected) if prefix is None else _take_prefix(tensors, prefix, source)
    return (stage, []) if prefix == "" else _without_rest(_unwrap_within(stage, expected), expected, ties)


def fitting_prefixes(tensors: _Tensors, expected: Collection[str]) -> list[str]:
    """The prefixes with each of which all of a model's names are among the tensors' names."""
    return _fitting(tensors, expected) or _fitting(_renamed(tensors, _PLAIN), expected)


def warning_of(source: str, beside: list[str], fitting: list[str]) -> str | None:
    """What to say of tensors beside those of the model, and what to type to take others."""
    if not beside:
        return None
    tops = dict.fromkeys(re.sub(r"(?<=\.).*", "*", name) for name in beside)
    typed = " or ".join(f"--weights-prefix {prefix}" for prefix in fitting)
    mend = f"To evaluate these, type {typed}" if typed else "Check that --model is what was trained"
    return f"{source} hold {counted(len(beside), 'tensor')} that the model lacks: {listed(tops)}. {mend}"


def advice_of(fitting: list[str]) -> str:
    if len(fitting) == 1:
        return (
            f"The names that begin with {fitting[0]!r} are those of the model: --weights-prefix {fitting[0]} "
            "takes only these."
        )
    return (
        f"The names that begin with one of {len(fitting)} prefixes are those of the model: "
        f"{listed(map(repr, fitting))}. They can give different results. Say which are "
        f"meant: --weights-prefix {fitting[0]} takes the first."
    )


def _unwrap_for(tensors: _Tensors, expected: Collection[str]) -> _Unwrapped:
    """Remove as many wrappers' prefixes as give most of a model's names.

    So names that fit as they are stay as they are, also those of a model with an attribute ``module``; and
    those of an older layout, which a module converts by itself, are brought as near as can be.
    """
    names = set(expected)
    # Of equals the last one: what all names begin with is a wrapper's more often than a model's.
    return max(reversed(_stages(tensors)), key=lambda stage: len(names & stage.tensors.keys()))


def _stages(tensors: _Tensors) -> list[_Unwrapped]:
    """A state_dict as it is, with the first wrapper's prefix removed, with the second's too, and so on."""
    stages = [_Unwrapped(tensors=tensors)]
    while (following := _without_outermost(stages[-1])) is not None:
        stages.append(following)
    return stages


def _without_outermost(stage: _Unwrapped) -> _Unwrapped | None:
    for prefix in _WRAPPER_PREFIXES:
        inside = [name for name in stage.tensors if name.startswith(prefix)]
        outside = [name for name in stage.tensors if not name.startswith(prefix)]
        if inside and all(_COUNTER.match(name) for name in outside):
            return _Unwrapped(
                tensors=_without(stage.tensors, prefix),
                prefix=stage.prefix + prefix,
                left_out=(*stage.left_out, *outside),
            )
    return None


def _take_prefix(tensors: _Tensors, prefix: str, source: str) -> _Unwrapped:
    """Take only the names that begin with a prefix, and remove it from them."""
    if not prefix:
        return _Unwrapped(tensors=tensors)
    inside = [name for name in tensors if name.startswith(prefix) and name != prefix]
    if not inside:
        raise UsageError(
            f"--weights-prefix {prefix}: no name in {source} begins with it (found: "
            f"{first_of([*tensors], 3)}). Give a prefix that the names have, or leave it out."
        )
    # "model" is "model." also where there is a "model_ema.": what is left out is said.
    if any(name.startswith(f"{prefix}.") for name in inside):
        prefix += "."
    return _Unwrapped(
        tensors=_without(tensors, prefix),
        prefix=prefix,
        left_out=tuple(name for name in tensors if not name.startswith(prefix)),
    )


def _fitting(tensors: Mapping[str, Tensor], expected: Collection[str]) -> list[str]:
    first = next(iter(expected), None)
    if first is None:
        return []
    prefixes = [name[: -len(first)] for name in tensors if name.endswith(f".{first}")]
    return [prefix for prefix in prefixes if all(prefix + name in tensors for name in expected)]


def _without(tensors: _Tensors, prefix: str) -> _Tensors:
    """The tensors whose names begin with a prefix, without it; the versions of their modules likewise."""
    return _renamed(
        tensors, lambda name: name[len(prefix) :] if name.startswith(prefix) and name != prefix else None
    )


def _renamed(tensors: _Tensors, rename: Callable[[str], str | None]) -> _Tensors:
    """Tensors and versions of modules by other names, or None; as they are if two would have one name."""
    named = {name: new for name in tensors if (new := rename(name)) is not None}
    if len(set(named.values())) < len(named):
        return tensors
    made = OrderedDict((new, tensors[name]) for name, new in named.items())
    metadata = getattr(tensors, "_metadata", None)
    if isinstance(metadata, Mapping):
        # A module is renamed as a tensor in it would be.
        made._metadata = OrderedDict(  # type: ignore[attr-defined]
            (new.rpartition(".")[0], version)
            for name, version in metadata.items()
            if (new := rename(f"{name}.x" if name else "x")) is not None
        )
    return made


def _unwrap_within(stage: _Unwrapped, expected: Collection[str]) -> _Unwrapped:
    """Remove what wrappers of some modules put into names; ``module.`` where that makes all names fit."""
    if any(_WITHIN.search(name) for name in expected):
        return stage
    tensors = _renamed(stage.tensors, _PLAIN)
    parallel = _renamed(tensors, _WITHOUT_PARALLEL)
    fits = not {*expected} <= tensors.keys() and {*expected} <= parallel.keys()
    return replace(stage, tensors=parallel if fits else tensors)


def _without_rest(
    stage: _Unwrapped, expected: Collection[str], ties: list[list[str]]
) -> tuple[_Unwrapped, list[str]]:
    """Leave out counters, and what lies beside all that a model needs: under other top-level names.

    Not under one that differs from the model's in a number: a deeper network has layer5 beside layer4. Nor
    a tensor without a module, but for mmcv's averages: it can be a token that a model begins with.
    """
    there = {name for names in ties if any(each in stage.tensors for each in names) for name in names}
    if {*expected} - stage.tensors.keys() - there:
        return stage, []
    tops = {numbered(name.partition(".")[0]) for name in expected}
    rest = [name for name in stage.tensors if name not in expected]
    beside = [
        name
        for name in rest
        if ("." in name and numbered(name.partition(".")[0]) not in tops) or name.startswith("ema_")
    ]
    counters = [name for name in rest if name not in beside and _COUNTER.match(name)]
    out = {*counters, *beside}
    tensors = _renamed(stage.tensors, lambda name: None if name in out else name)
    return replace(stage, tensors=tensors, left_out=(*stage.left_out, *counters)), beside


def numbered(name: str) -> str:
    """What the names of modules that are counted have in common."""
    return re.sub(r"\d+", "#", name)
