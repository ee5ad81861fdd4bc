"""Weights: the seed of random ones; putting those of a file into a model, or saying why they do not fit.

A file's names may have a prefix that the model's have not. Of several names for one tensor of the model, such
as an embedding that is also the weight of the output, the file may have one.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.errors import UsageError
from dualeval.messages import counted, first_of, listed
from dualeval.models.checkpoints.checkpoint import StateDict, saved_in, unread_beside
from dualeval.models.checkpoints.finding import is_read
from dualeval.models.checkpoints.late import LateTensor
from dualeval.models.weights_name import is_published_name

# Which are converted to each other. Not the eighth-size ones: these go with scales, as integers do.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_OTHER_WEIGHTS = " Give the weights of this --model."
_LARGER = " They belong to a larger network: give its --model, or save the weights without the rest."
# Names that say in which form weights were saved, and what to do with it.
_FORMS = {
    r"_mask$": " The model is pruned: call torch.nn.utils.prune.remove(module, 'weight') first, then save.",
    r"\.lora_": " They are an adapter's: call merge_and_unload() of peft's model, and save what it returns.",
}
_RANDOM = "random:"
_LARGEST_SEED = 2**64 - 1
# How torch's layers, and its weight_norm and parametrizations, name what has a row for each output.
_OF_OUTPUTS = ("weight", "bias", "original")


def seed_of(weights: str) -> int | None:
    """The seed in "random:SEED"; None where the text names weights that are there."""
    if not weights.startswith(_RANDOM):
        return None
    text = weights.removeprefix(_RANDOM)
    if not text.isdecimal() or int(text) > _LARGEST_SEED:
        raise UsageError(
            f"--weights {weights}: expected random:SEED with a whole number up to {_LARGEST_SEED}, "
            "such as random:0"
        )
    return int(text)


@dataclass(frozen=True, kw_only=True)
class LoadedWeights:
    """Which tensors of a file a model was given."""

    # As it was named.
    file: str
    # The keys that lead to the state_dict, with dots between; "" where the file is nothing else.
    key: str
    # What was removed from each name; "" for nothing.
    prefix: str
    # Names of tensors in the state_dict that were not taken.
    left_out: tuple[str, ...]
    # Files in a folder that look like weights, and were not read.
    unread: tuple[str, ...] = ()
    # What a reader of the numbers should know of tensors that were left out.
    warning: str | None = None


class OtherClasses(UsageError):
    """Weights are for another number of classes than the model, and differ in nothing else."""

    def __init__(self, those_are: str, count: int, wanted: int) -> None:
        self.text = f"{those_are} for {count} classes, but {wanted} were expected"
        super().__init__(f"{self.text}. Give --num-classes {count}, or weights and data of the same classes.")
        # The number of classes that they are for.
        self.count = count


class OtherShapes(UsageError):
    """Weights have tensors of other shapes than the model's."""

    def __init__(self, message: str, sizes: Mapping[int, int]) -> None:
        super().__init__(message)
        # The first dimensions of these, by those of the model's.
        self.sizes = sizes


def options_of(loaded: LoadedWeights | None) -> dict[str, str | None]:
    """The options ``weights_key`` and ``weights_prefix`` as they were used; None for nothing."""
    key, prefix = ("", "") if loaded is None else (loaded.key, loaded.prefix)
    return {"weights_key": key or None, "weights_prefix": prefix or None}


def place_in_file(loaded: LoadedWeights | None) -> str:
    """Where in a file the weights lie, to follow its name; empty where they are all of it."""
    return f", under {loaded.key!r}" if loaded is not None and loaded.key else ""


def notes_of(loaded: LoadedWeights | None) -> list[str]:
    """What people should know of how a file was read: nothing where it was taken as it is."""
    if loaded is None:
        return []
    where = f"the state_dict under {loaded.key!r} of {loaded.file}" if loaded.key else loaded.file
    removed = f", prefix {loaded.prefix!r} removed" if loaded.prefix else ""
    left_out = f", {len(loaded.left_out)} left out: {listed(loaded.left_out)}" if loaded.left_out else ""
    how = f"weights: {where}{removed}{left_out}" if loaded.key or removed or left_out else ""
    unread = f"weights: not read in {loaded.file}: {listed(loaded.unread)}" if loaded.unread else ""
    return [*filter(None, [how, unread])]


def warnings_of(loaded: LoadedWeights | None) -> list[str]:
    """What a reader of the numbers should know of how a file was read."""
    return [] if loaded is None or loaded.warning is None else [loaded.warning]


def refuse_choice_without_file(weights: str | None, key: str | None, prefix: str | None, trust: bool) -> None:
    """Check that a choice among the tensors of a file goes with a file."""
    options = [f"--weights-{name}" for name, value in (("key", key), ("prefix", prefix)) if value is not None]
    options += ["--trust-checkpoint"] if trust else []
    if options and (weights is None or is_published_name(weights) or weights.startswith(_RANDOM)):
        beside = "without --weights" if weights is None else f"with --weights {weights}"
        raise UsageError(
            f"{' and '.join(options)} {'was' if len(options) == 1 else 'were'} given {beside}, where there "
            "is no file to choose from. Leave it out, or give --weights FILE."
        )


def load_state_dict(
    model: nn.Module, state: StateDict, *, prefix: str | None = None, source: str
) -> LoadedWeights:
    """Copy a state_dict from a file into a model, without the prefixes of wrappers before its names."""
    expected = model.state_dict().keys()
    tensors = state.tensors
    stage = _unwrap_for(tensors, expected) if prefix is None else _take_prefix(tensors, prefix, source)
    stage, beside = _without_rest(_unwrap_within(stage, expected), model) if prefix != "" else (stage, [])
    fitting = _prefixes_that_fit(tensors, expected) or _prefixes_that_fit(_renamed(tensors, _PLAIN), expected)
    loaded = LoadedWeights(
        file=str(state.path),
        key=state.key,
        prefix=stage.prefix,
        left_out=stage.left_out,
        unread=unread_beside(saved_in(state.path)) if state.path.is_dir() else (),
        warning=_warning(source, beside, [each for each in fitting if each != stage.prefix]),
    )
    chosen = [
        *([f"under {loaded.key!r}"] if loaded.key else []),
        *([f"without the prefix {loaded.prefix!r}"] if loaded.prefix else []),
    ]
    try:
        load_into(model, stage.tensors, f"{source} ({', '.join(chosen)})" if chosen else source)
    except UsageError as error:
        if not fitting or stage.prefix in fitting:
            raise
        raise UsageError(f"{str(error).removesuffix(_OTHER_WEIGHTS)} {_advice(fitting)}") from error
    return loaded


def _warning(source: str, beside: list[str], fitting: list[str]) -> str | None:
    """What to say of tensors beside those of the model, and what to type to take others."""
    if not beside:
        return None
    tops = dict.fromkeys(re.sub(r"(?<=\.).*", "*", name) for name in beside)
    typed = " or ".join(f"--weights-prefix {prefix}" for prefix in fitting)
    mend = f"To evaluate these, type {typed}" if typed else "Check that --model is what was trained"
    return f"{source} hold {counted(len(beside), 'tensor')} that the model lacks: {listed(tops)}. {mend}"


def _advice(fitting: list[str]) -> str:
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


def load_into(model: nn.Module, state: Mapping[str, Any], source: str) -> None:
    """Copy tensors into a model, one after the other; all of them, and no others.

    The model's own loading goes first: some modules convert an older layout of their tensors. It is left in
    training mode, for ``eval`` to merge what is loaded.
    """
    expected = model.state_dict()
    state = _with_tied_names(model, state, source)
    unread = [name for name, value in state.items() if name in expected and not is_read(value)]
    if unread:
        raise UsageError(
            f"{source} cannot be put into the model {type(model).__name__}: {len(unread)} not plain: "
            f"{listed(unread)}. Extra state of a module may be None, numbers, text, tensors, or lists and "
            "dicts of these. Save it so (get_extra_state)."
        )
    kinds = _changed_kinds(expected, state)
    if kinds:
        raise _misfit(model, expected, state, source, kinds)
    if not hasattr(state, "_metadata") and state.keys() == expected.keys():
        # A format without versions, in the present layout: MNASNet loads nothing of unknown version.
        state = OrderedDict(state)
        state._metadata = expected._metadata  # type: ignore[attr-defined]
    # In evaluation mode, some keep weights that were merged of the ones that are replaced: loralib's layers.
    model.train(True)
    kept = model.state_dict(keep_vars=True)
    # A module may still make them of others, or load less strictly than torch does and say nothing.
    lacking = {
        name: (value, value._version)
        for name, value in kept.items()
        if name not in state and isinstance(value, Tensor)
    }
    try:
        refused = model.load_state_dict(state)
    # Beside torch's own errors, those of a module's set_extra_state.
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        unread_late = [value.failure for value in state.values() if isinstance(value, LateTensor)]
        for failure in filter(None, unread_late):
            raise failure from error
        raise _misfit(model, expected, state, source, [], error) from error
    now = model.state_dict(keep_vars=True)
    left = [
        name
        for name, (value, version) in lacking.items()
        if (now[name].is_meta if value.is_meta else value._version == version)
    ]
    if left or any(getattr(refused, names, None) for names in ("missing_keys", "unexpected_keys")):
        raise _misfit(model, expected, state, source, [])


def _changed_kinds(expected: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """Tensors whose values would become others in the model's dtype, by more than rounding."""
    return [
        f"{name} {value.dtype}, the model has {expected[name].dtype}"
        for name, value in state.items()
        if isinstance(value, Tensor) and isinstance(expected.get(name), Tensor)
        if not _keeps_its_kind(value, expected[name].dtype)
    ]


def _keeps_its_kind(value: Tensor, wanted: torch.dtype) -> bool:
    if value.dtype == wanted:
        return True
    if value.is_quantized:
        return False
    if wanted in _FLOATS or wanted.is_complex:
        return value.dtype in _FLOATS or (wanted.is_complex and value.is_complex())
    if value.is_complex() or wanted.is_floating_point:
        return False
    # Whole numbers that fit: an older library's uint8 for bool, or a counter that was cast with all the rest.
    return bool(torch.equal(value.to(wanted).to(value.dtype), value))


def _misfit(
    model: nn.Module,
    expected: Mapping[str, Any],
    state: Mapping[str, Any],
    source: str,
    kinds: list[str],
    error: Exception | None = None,
) -> UsageError:
    missing = [name for name in expected if name not in state]
    unexpected = [name for name in state if name not in expected]
    shapes = {
        name: (tuple(state[name].shape), tuple(expected[name].shape))
        for name in expected
        if isinstance(expected[name], Tensor) and isinstance(state.get(name), Tensor)
        if state[name].shape != expected[name].shape
    }
    if not missing and not unexpected and not kinds and (counts := _class_counts(model, expected, shapes)):
        return OtherClasses(f"{source} are", *counts)
    differing = {
        "missing in the file": missing,
        "not in the model": unexpected,
        "of another shape": [f"{name} {a}, the model has {b}" for name, (a, b) in shapes.items()],
        "of another dtype": kinds,
    }
    message = str(error).strip() or type(error).__name__
    clauses = [f"{len(names)} {what}: {listed(names)}" for what, names in differing.items() if names]
    differs = "; ".join(clauses) or message.splitlines()[-1].strip()
    advice = _LARGER if unexpected and not (missing or shapes or kinds) else _OTHER_WEIGHTS
    if kinds:
        advice = " Integers in place of weights are quantized ones: save them as floats."
    of_form = (mend for form, mend in _FORMS.items() if any(re.search(form, name) for name in unexpected))
    return OtherShapes(
        f"{source} do not fit the model {type(model).__name__}: {differs}.{next(of_form, advice)}",
        {wanted[0]: shape[0] for shape, wanted in shapes.values() if shape and wanted},
    )


def _class_counts(
    model: nn.Module, names: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
) -> tuple[int, int] | None:
    """(saved, wanted) outputs, where layers differ in these alone: the first dimension of weight and bias."""
    pairs = {(shape[0], wanted[0]) for shape, wanted in shapes.values() if shape and wanted}
    tails_equal = all(shape[1:] == wanted[1:] for shape, wanted in shapes.values())
    if len(pairs) != 1 or not tails_equal:
        return None
    for name in shapes:
        last = name.rpartition(".")[2]
        pair = [name.removesuffix(last) + part for part in ("weight", "bias")]
        if not last.startswith(_OF_OUTPUTS) or any(part in names and part not in shapes for part in pair):
            return None
        if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding):
            return None  # its rows are a vocabulary
    return pairs.pop()


# -- names with a prefix that the model's have not -----------------------------------------------------

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
    tensors: OrderedDict[str, Tensor]
    # What was removed from each name; "" for nothing.
    prefix: str = ""
    # Names of tensors that had no such prefix, and are not among `tensors`.
    left_out: tuple[str, ...] = ()


def _unwrap_for(tensors: OrderedDict[str, Tensor], expected: Collection[str]) -> _Unwrapped:
    """Remove as many wrappers' prefixes as give most of a model's names.

    So names that fit as they are stay as they are, also those of a model with an attribute ``module``; and
    those of an older layout, which a module converts by itself, are brought as near as can be.
    """
    names = set(expected)
    # Of equals the last one: what all names begin with is a wrapper's more often than a model's.
    return max(reversed(unwrapped(tensors)), key=lambda stage: len(names & stage.tensors.keys()))


def unwrapped(tensors: OrderedDict[str, Tensor]) -> list[_Unwrapped]:
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


def _take_prefix(tensors: OrderedDict[str, Tensor], prefix: str, source: str) -> _Unwrapped:
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


def _prefixes_that_fit(tensors: Mapping[str, Tensor], expected: Collection[str]) -> list[str]:
    """The prefixes with each of which all of a model's names are among the tensors' names."""
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


def _without_rest(stage: _Unwrapped, model: nn.Module) -> tuple[_Unwrapped, list[str]]:
    """Leave out counters, and what lies beside all that a model needs: under other top-level names.

    Not under one that differs from the model's in a number: a deeper network has layer5 beside layer4. Nor
    a tensor without a module, but for mmcv's averages: it can be a token that a model begins with.
    """
    expected = model.state_dict().keys()
    there = {name for names in _tied(model) if any(each in stage.tensors for each in names) for name in names}
    if expected - stage.tensors.keys() - there:
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


# -- several names of one tensor -----------------------------------------------------------------------

_PIECE_BYTES = 1 << 22


def _with_tied_names(model: nn.Module, state: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """A state_dict with the names that a file has left out because another name has the same tensor."""
    left_out: dict[str, Any] = {}
    for names in _tied(model):
        there = [name for name in names if isinstance(state.get(name), Tensor)]
        for name in there[1:]:
            if not are_equal(state[there[0]], state[name]):
                raise UsageError(
                    f"{source} have different values for {there[0]} and {name}, which are one tensor in the "
                    f"model {type(model).__name__}. Give weights of a model that ties them, or a model that "
                    "does not."
                )
        if there:
            left_out |= {name: state[there[0]] for name in names if name not in state}
    if not left_out:
        return state
    whole: OrderedDict[str, Any] = OrderedDict({**state, **left_out})
    if hasattr(state, "_metadata"):
        whole._metadata = state._metadata  # type: ignore[attr-defined]
    return whole


def _tied(model: nn.Module) -> list[list[str]]:
    """The names in the state_dict of each tensor that has more than one."""
    kept = model.state_dict(keep_vars=True)
    by_place: dict[object, list[str]] = {}
    for name, value in kept.items():
        if isinstance(value, Tensor):
            by_place.setdefault(_place(value), []).append(name)
    return [names for names in by_place.values() if len(names) > 1]


def _place(value: Tensor) -> object:
    """What two names of one tensor have in common; two parameters may lie in the same memory."""
    if isinstance(value, LateTensor) or value.layout != torch.strided or nn.parameter.is_lazy(value):
        return id(value)
    begin = value.data_ptr() if value.numel() else 0
    return (begin, value.dtype, value.shape, value.stride()) if begin else id(value)


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether the bits are equal; NaN is equal to itself."""
    if one is other or one.shape != other.shape or one.dtype != other.dtype:
        return one is other
    if isinstance(one, LateTensor) and isinstance(other, LateTensor) and one.source == other.source:
        return True
    # Some rows at a time: two large tensors of files are not held for it.
    rows = max(1, _PIECE_BYTES * len(one) // max(1, one.nbytes)) if one.ndim else 1
    count = len(one) if one.ndim else 1
    return all(
        torch.equal(_bytes_of(one, first, min(first + rows, count)), _bytes_of(other, first, first + rows))
        for first in range(0, count, rows)
    )


def _bytes_of(value: Tensor, first: int, last: int) -> Tensor:
    """Some rows; a tensor without dimensions is one."""
    if isinstance(value, LateTensor):
        last = min(last, len(value)) if value.ndim else 1
        rows = torch.empty((last - first, *value.shape[1:]), dtype=value.dtype)
        value.read_rows(first, last, rows)
    else:
        rows = value.detach()[first:last] if value.ndim else value.detach()
    return rows.contiguous().view(-1).view(torch.uint8)
