"""Loggers: finished results in trackers. Here the texts ``KIND:WHERE`` of ``--logger`` and ``loggers=``."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from dualeval.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9_.-]")


class Kind(NamedTuple):
    """A kind of logger; its module here has its name, and a function ``write``."""

    # What stands behind the colon.
    where: str
    example: str
    # Needs the package of its name, which is pip's extra of that name, too.
    has_package: bool = False
    # Keeps several runs in one place, so that the steps of a training need a name.
    has_names: bool = False
    # Is written here, and waits for no server.
    is_local: bool = False
    # Shows the picture of a confusion matrix.
    has_pictures: bool = True


KINDS: dict[str, Kind] = {
    "tensorboard": Kind("DIR", "runs/tb", has_package=True, is_local=True),
    "wandb": Kind("PROJECT", "my-project", has_package=True, has_names=True),
    "mlflow": Kind("URI", "file:mlruns", has_package=True, has_names=True),
    "jsonl": Kind("FILE", "results.jsonl", is_local=True, has_pictures=False),
}
_EXAMPLES = ", ".join(f"{name}:{kind.example}" for name, kind in KINDS.items())


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a result is logged."""

    # As it was given.
    text: str
    # One of `KINDS`.
    kind: str
    # A folder, project, address or file.
    where: str
    # Of the tracker's run, which several results share; None for one of its own.
    name: str | None


def targets_of(texts: Sequence[str] | str, step: int | None, option: str = "loggers") -> list[Target]:
    """Read the texts of several loggers."""
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise UsageError(f"step={step!r}: expected a whole number of at least 0, such as the epoch, or None")
    if isinstance(texts, str):
        texts = [texts]
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{option}={texts!r}: expected texts such as {_EXAMPLES}")
    return [_target(text, step, option) for text in dict.fromkeys(texts)]


def _target(text: str, step: int | None, option: str) -> Target:
    kind, colon, where = text.partition(":")
    if not colon or kind not in KINDS or not where:
        forms = ", ".join(f"{name}:{known.where}" for name, known in KINDS.items())
        raise UsageError(f"{option} {text!r}: expected one of {forms}; for example {_EXAMPLES}")
    name = None
    if KINDS[kind].has_names:
        where, sharp, name = where.partition("#")
        if sharp and not _NAME.fullmatch(name):
            raise UsageError(
                f"{option} {text!r}: {name!r} is not a name of a run: expected 1 to 64 letters, digits, '-', "
                "'_' and '.'"
            )
        name = name or None
        if name is None and step is not None:
            raise UsageError(
                f"{option} {text!r} with step={step}: the steps of a training go to one run, which needs a "
                f"name. Type {kind}:{where}#NAME."
            )
    return Target(text=text, kind=kind, where=where, name=name)


def of_model(target: Target, model: str) -> Target:
    """Where the result of one of several models is logged, so that each has a run of its own there."""
    if KINDS[target.kind].where == "DIR":
        where = str(Path(target.where) / model)
        return replace(target, text=f"{target.kind}:{where}", where=where)
    if target.name is None:
        return target  # the run is called as the result's folder, which has the model's name
    name = _NOT_IN_NAME.sub("-", f"{target.name}-{model}")
    return replace(target, text=f"{target.kind}:{target.where}#{name}", name=name)


def counted_from(text: str, folder: Path) -> str:
    """A logger of a job file, whose path counts from the file's folder."""
    kind, colon, where = text.partition(":")
    if kind == "mlflow" and where.startswith("file:") and not where.startswith("file:/"):
        return f"{kind}:file:{folder.absolute() / where.removeprefix('file:')}"
    if kind not in KINDS or not KINDS[kind].is_local or not where:
        return text
    return f"{kind}{colon}{folder / where}"


def check_installed(targets: Sequence[Target], option: str = "loggers") -> None:
    """Check, without imports, that the packages of loggers are installed."""
    for target in targets:
        if KINDS[target.kind].has_package and not is_installed(target.kind):
            raise UsageError(
                f"{option} {target.text!r} needs the package {target.kind}, which is not installed here. "
                f"Type: pip install 'dualeval[{target.kind}]'"
            )


def is_installed(module: str) -> bool:
    """Whether a package is installed here, without its import."""
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # an import that failed before has left a module without a spec
        return False
    # A plain folder of that name, such as W&B's own 'wandb', is found too; it has no file to load.
    return spec is not None and spec.origin is not None
