"""Weights: the seed of random ones; putting those of a file into a model, or saying why they do not fit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from dualeval.errors import UsageError
from dualeval.models.checkpoints import StateDict
from dualeval.models.prefixes import prefix_that_fits, take_prefix, unwrap_for
from dualeval.weights_name import is_published_name

_LISTED_AT_MOST = 8
_RANDOM = "random:"
_LARGEST_SEED = 2**64 - 1


def seed_of(weights: str) -> int | None:
    """The seed in "random:SEED"; None where the text names weights that are there.

    Raises:
        UsageError: it is no seed.
    """
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
    """Which tensors of a file a model was given.

    Attributes:
        file: as it was named.
        key: the keys that lead to the state_dict, with dots between; "" where the file is nothing else.
        prefix: what was removed from each name; "" for nothing.
        left_out: names of tensors in the state_dict that were not taken.
    """

    file: str
    key: str
    prefix: str
    left_out: tuple[str, ...]


def options_of(loaded: LoadedWeights | None) -> dict[str, str | None]:
    """The options ``weights_key`` and ``weights_prefix`` as they were used; None for nothing."""
    key, prefix = ("", "") if loaded is None else (loaded.key, loaded.prefix)
    return {"weights_key": key or None, "weights_prefix": prefix or None}


def place_in_file(loaded: LoadedWeights | None) -> str:
    """Where in a file the weights lie, to follow its name; empty where they are all of it."""
    return f", under {loaded.key!r}" if loaded is not None and loaded.key else ""


def notes_of(loaded: LoadedWeights | None) -> list[str]:
    """What people should know of how a file was read: nothing where it was taken as it is."""
    if loaded is None or not (loaded.key or loaded.prefix or loaded.left_out):
        return []
    where = f"the state_dict under {loaded.key!r} of {loaded.file}" if loaded.key else loaded.file
    removed = f", prefix {loaded.prefix!r} removed" if loaded.prefix else ""
    left_out = f", {_listed('left out', list(loaded.left_out))}" if loaded.left_out else ""
    return [f"weights: {where}{removed}{left_out}"]


def refuse_choice_without_file(weights: str | None, key: str | None, prefix: str | None) -> None:
    """Check that a choice among the tensors of a file goes with a file.

    Args:
        weights: as given with --weights.
        key: as given with --weights-key.
        prefix: as given with --weights-prefix.

    Raises:
        UsageError: it goes with the library's own weights, with random ones, or with none.
    """
    given = [f"--weights-{name}" for name, value in (("key", key), ("prefix", prefix)) if value is not None]
    if given and (weights is None or is_published_name(weights) or weights.startswith(_RANDOM)):
        beside = "without --weights" if weights is None else f"with --weights {weights}"
        raise UsageError(
            f"{' and '.join(given)} {'was' if len(given) == 1 else 'were'} given {beside}, where there is no "
            "file to choose from. Leave it out, or give --weights FILE."
        )


def load_state_dict(
    model: nn.Module, found: StateDict, *, prefix: str | None = None, source: str
) -> LoadedWeights:
    """Copy a state_dict from a file into a model, without the prefixes of wrappers before its names.

    Args:
        model: takes the values; keeps its dtypes and device.
        found: the state_dict, with the names as in the file.
        prefix: take only the names that begin with this, and remove it; None removes wrappers' prefixes where
            the names do not fit with them.
        source: where the tensors come from, for messages.

    Raises:
        UsageError: the tensors do not fit the model, as ``load_into`` says, or no name has this prefix.
    """
    own = model.state_dict().keys()
    tensors = found.tensors
    taken = unwrap_for(tensors, own) if prefix is None else take_prefix(tensors, prefix, source)
    loaded = LoadedWeights(file=str(found.path), key=found.key, prefix=taken.prefix, left_out=taken.left_out)
    chosen = [
        *([f"under {loaded.key!r}"] if loaded.key else []),
        *([f"without the prefix {loaded.prefix!r}"] if loaded.prefix else []),
    ]
    try:
        load_into(model, taken.tensors, f"{source} ({', '.join(chosen)})" if chosen else source)
    except UsageError as error:
        fitting = prefix_that_fits(tensors, own)
        if fitting is None or fitting == taken.prefix:
            raise
        raise UsageError(
            f"{error} The names that begin with {fitting!r} are those of the model: "
            f"--weights-prefix {fitting} takes them alone."
        ) from error
    return loaded


def load_into(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Copy tensors into a model; all of them, and no others.

    The model's own loading goes first: some modules convert an older layout of their tensors.

    Args:
        model: takes the values; keeps its dtypes and device.
        state: tensors by the model's names.
        source: where the tensors come from, for messages.

    Raises:
        UsageError: lists missing and unexpected names and wrong shapes; where the only difference is the
            number of classes, says so.
    """
    own = model.state_dict()
    if not hasattr(state, "_metadata") and state.keys() == own.keys():
        # A format without versions, in the present layout: MNASNet loads nothing of unknown version.
        state = OrderedDict(state)
        state._metadata = own._metadata  # type: ignore[attr-defined]
    try:
        model.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        raise _misfit(model, own, state, source, error) from error


def _misfit(
    model: nn.Module,
    own: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    source: str,
    error: Exception,
) -> UsageError:
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    shapes = {
        name: (tuple(state[name].shape), tuple(own[name].shape))
        for name in own
        if name in state and state[name].shape != own[name].shape
    }
    if not missing and not unexpected and (counts := _class_counts(shapes)):
        return UsageError(
            f"{source} is for {counts[0]} classes, but {counts[1]} were expected (from the data's class "
            "folders, or --num-classes). Give data and weights of the same classes."
        )
    parts = [
        _listed("missing in the file", missing),
        _listed("not in the model", unexpected),
        _listed("of another shape", [f"{name} {a}, the model has {b}" for name, (a, b) in shapes.items()]),
    ]
    found = "; ".join(filter(None, parts)) or str(error).splitlines()[-1].strip()
    return UsageError(
        f"{source} does not fit the model {type(model).__name__}: {found}. Give the weights of this --model."
    )


def _class_counts(shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[int, int] | None:
    """(found, wanted) where every wrong shape differs in its first dimension alone, by these two numbers."""
    pairs = {(found[0], wanted[0]) for found, wanted in shapes.values() if found and wanted}
    tails_equal = all(found[1:] == wanted[1:] for found, wanted in shapes.values())
    return next(iter(pairs)) if len(pairs) == 1 and tails_equal else None


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _LISTED_AT_MOST} more" if len(names) > _LISTED_AT_MOST else ""
    return f"{len(names)} {what}: {', '.join(names[:_LISTED_AT_MOST])}{more}"
