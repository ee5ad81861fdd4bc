"""Which texts of ``--weights`` and ``--model`` are names, and which are paths."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dualeval.errors import UsageError

# Members of torchvision's enumerations, such as IMAGENET1K_V1, or with the enumeration's name before them.
# In capitals behind the dot: my_Weights.pt is a file.
_NAME = re.compile(r"\w+_Weights\.[A-Z][A-Z0-9_]*|DEFAULT|IMAGENET[A-Z0-9_]*")


def is_published_name(weights: str) -> bool:
    """Whether a value of ``--weights`` is such a name: ``DEFAULT``, ``IMAGENET1K_V1``, ``X_Weights.NAME``."""
    return _NAME.fullmatch(weights) is not None


def is_path_of_weights(weights: str) -> bool:
    """Whether a value of ``--weights`` names a file: no published name, and not ``random:SEED``."""
    return not is_published_name(weights) and not weights.startswith("random:")


def check_weights_file(weights: str, hint: str = "") -> None:
    """Check that a file of weights is there; ``hint`` is for a word that may have been meant as a name."""
    path = Path(weights)
    if not os.path.exists(path):  # noqa: PTH110 - False also where the name is too long
        shown = "" if path.suffix or len(path.parts) > 1 or not hint else f" {hint}"
        raise UsageError(
            f"weights file {path} does not exist. Give a checkpoint with --weights PATH.{shown.rstrip()}"
        )


# The suffixes of files that are a whole model.
PROGRAM_SUFFIXES = (".pt2", ".pt", ".pth", ".ts", ".torchscript", ".jit", ".ptc")
_FOLDER = "hf:"


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
