"""Weights as ``--weights`` names them, and what a model was given of a file; nothing here reads one."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dualeval.errors import UsageError
from dualeval.messages import listed
from dualeval.urls import url_of

# -- which texts of --weights and --model are names, and which are paths -------------------------------

# Members of torchvision's enumerations, such as IMAGENET1K_V1, or with the enumeration's name before them.
# In capitals behind the dot: my_Weights.pt is a file.
_NAME = re.compile(r"\w+_Weights\.[A-Z][A-Z0-9_]*|DEFAULT|IMAGENET[A-Z0-9_]*")


def is_published_name(weights: str) -> bool:
    """Whether a value of ``--weights`` is such a name: ``DEFAULT``, ``IMAGENET1K_V1``, ``X_Weights.NAME``."""
    return _NAME.fullmatch(weights) is not None


def is_path_of_weights(weights: str) -> bool:
    """Whether a value of ``--weights`` names a file: no published name, and not ``random:SEED``."""
    return not is_published_name(weights) and not weights.startswith(_RANDOM)


def check_weights_file(weights: str, hint: str = "") -> None:
    """Check that a file of weights is there; ``hint`` is for a word that may have been meant as a name."""
    if url_of(weights):
        return  # it is asked for when it is fetched
    path = Path(weights)
    if not os.path.exists(path):  # noqa: PTH110 - False also where the name is too long
        shown = "" if path.suffix or len(path.parts) > 1 or not hint else f" {hint}"
        raise UsageError(
            f"weights file {path} does not exist. Give a checkpoint with --weights PATH.{shown.rstrip()}"
        )


def weights_at(weights: str) -> Path:
    """The file that a value of ``--weights`` names; of one in a store its copy on this machine."""
    if (url := url_of(weights)) is None:
        return Path(weights)
    from dualeval.data.stores.copies import local_copy

    return local_copy("--weights", url)


def full_name(weights: str, path: Path) -> str:
    """Weights as options of a job have them: their address, or else the absolute path."""
    return url_of(weights) or str(path.absolute())


# The suffixes of files that are a whole model.
PROGRAM_SUFFIXES = (".pt2", ".pt", ".pth", ".ts", ".torchscript", ".jit", ".ptc")
_FOLDER = "hf:"
_RANDOM = "random:"
_LARGEST_SEED = 2**64 - 1


def function_beside(text: str, folder: Path) -> str:
    """A value of ``--preprocessing`` in a job file: a path in it counts from the file's folder."""
    file, colon, function = text.rpartition(":")
    return f"{folder / file}:{function}" if colon and file.endswith(".py") else text


def model_beside(model: str, folder: Path) -> str:
    """A value of ``--model`` in a job file: its path, if it is one, counts from the file's folder."""
    if model.startswith(_FOLDER):
        return f"{_FOLDER}{folder / model.removeprefix(_FOLDER)}"
    is_path = Path(model).suffix in PROGRAM_SUFFIXES and ":" not in model
    return str(folder / model) if is_path else model


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


# -- what was taken of a file --------------------------------------------------------------------------


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
