"""Putting the weights of a file into a model, or saying why they do not fit.

Of several names for one tensor of the model, such as an embedding that is also the weight of the output, the
file may have one.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.errors import UsageError
from dualeval.messages import listed
from dualeval.models.checkpoints.checkpoint import StateDict, saved_in, unread_beside
from dualeval.models.checkpoints.finding import is_read
from dualeval.models.checkpoints.late import LateTensor
from dualeval.models.prefixes import advice_of, fitting_prefixes, stripped, warning_of
from dualeval.models.weights import LoadedWeights, OtherClasses, OtherShapes

# Which are converted to each other. Not the eighth-size ones: these go with scales, as integers do.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_OTHER_WEIGHTS = " Give the weights of this --model."
_LARGER = " They belong to a larger network: give its --model, or save the weights without the rest."
# Names that say in which form weights were saved, and what to do with it.
_FORMS = {
    r"_mask$": " The model is pruned: call torch.nn.utils.prune.remove(module, 'weight') first, then save.",
    r"\.lora_": " They are an adapter's: call merge_and_unload() of peft's model, and save what it returns.",
}
# How torch's layers, and its weight_norm and parametrizations, name what has a row for each output.
_OF_OUTPUTS = ("weight", "bias", "original")
_PIECE_BYTES = 1 << 22


def load_state_dict(
    model: nn.Module, state: StateDict, *, prefix: str | None = None, source: str
) -> LoadedWeights:
    """Copy a state_dict from a file into a model, without the prefixes of wrappers before its names."""
    expected = model.state_dict().keys()
    tensors = state.tensors
    stage, beside = stripped(tensors, model, _tied(model), prefix, source)
    fitting = fitting_prefixes(tensors, expected)
    loaded = LoadedWeights(
        file=str(state.path),
        key=state.key,
        prefix=stage.prefix,
        left_out=stage.left_out,
        unread=unread_beside(saved_in(state.path)) if state.path.is_dir() else (),
        warning=warning_of(source, beside, [each for each in fitting if each != stage.prefix]),
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
        raise UsageError(f"{str(error).removesuffix(_OTHER_WEIGHTS)} {advice_of(fitting)}") from error
    return loaded


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
