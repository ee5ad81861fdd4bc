"""Several models in one run: which they are, and what each one is called."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import Any, TypeAlias

from dualeval.errors import UsageError
from dualeval.messages import first_of
from dualeval.options.job import MODELS_KEY, WEIGHTS, WILD, Job, pattern_of
from dualeval.result import JOB, MODELS, RESULT, STATUS

_NUMBER = re.compile(r"([0-9]+)")
# All that the name of a folder may not have on some disk, or an entry of a table.
_ODD = re.compile(r"[^\w.+=@-]+")
# The table in its forms; it lies beside the models' folders, with what keeps other runs out.
TABLES = (MODELS, "models.csv", "models.md")
# Names that no model's folder may have: these, and the files that a run of one model would have there.
_RESERVED = (*TABLES, "lease.json", RESULT, JOB, STATUS)
_LISTED = 5
# Of a model: its name, the number of its job, and its file where a pattern has found that. Plain values.
ModelFile: TypeAlias = "tuple[str, int, str | None]"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One of several models."""

    # Of its folder and its row; no other has it.
    name: str
    job: Job


def found_models(jobs: Sequence[tuple[str | None, Job]]) -> list[ModelFile]:
    """Find the files of all patterns, and name every model; one rank does, as files may come meanwhile."""
    models: list[ModelFile] = []
    for number, (name, job) in enumerate(jobs):
        pattern = pattern_of(job)
        if pattern is None:
            models.append((_checked_name(name) if name else _name_of(job), number, None))
            continue
        paths = expanded(pattern)
        front = f"{_checked_name(name)}-" if name else ""
        for path, short in zip(paths, names_of(pattern, paths), strict=True):
            models.append((front + short, number, path))
    counts = Counter(name for name, _, _ in models)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise UsageError(
            f"{counts[twice[0]]} of the models are called {twice[0]}: give each a name of its own in its "
            f'table [[{MODELS_KEY}]], as in name = "{twice[0]}-a"'
        )
    return models


def candidates_of(jobs: Sequence[tuple[str | None, Job]], models: Sequence[ModelFile]) -> list[Candidate]:
    """The models with their jobs, of what a rank has found."""
    made = []
    for name, number, path in models:
        job = jobs[number][1]
        if path is not None:
            job = replace(job, options=replace(job.options, weights=path))
        made.append(Candidate(name=name, job=job))
    return made


def expanded(pattern: str, *, refuses: bool = True) -> list[str]:
    """The files and folders that a pattern fits, in natural order: epoch2 before epoch10."""
    # A Path's own glob takes no absolute pattern.
    paths = glob(pattern, recursive=True)  # noqa: PTH207
    if not paths and refuses:
        folder = _fixed_part(pattern)
        raise UsageError(f"--weights {pattern}: no file or folder matches. {_there(folder)}")
    return sorted(paths, key=lambda path: ([*map(_natural, _NUMBER.split(path))], path))


def _natural(piece: str) -> tuple[int, int, str]:
    return (0, int(piece), "") if piece.isdecimal() and piece.isascii() else (1, 0, piece)


def _fixed_part(pattern: str) -> Path:
    """The folder below which a pattern looks."""
    parts = Path(pattern).parts
    first = next(number for number, part in enumerate(parts) if WILD.search(part))
    return Path(*parts[:first])


def _there(folder: Path) -> str:
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        return f"{folder} cannot be listed: {error.strerror}."
    return f"In {folder} there is {first_of(names, _LISTED) or 'nothing'}."


def names_of(pattern: str, paths: Sequence[str]) -> list[str]:
    """What the models of a pattern are called: what is below its fixed part, less its own suffix.

    A name does not depend on the other files, so that the same command finds its folder again when there are
    more of them. Only where two come to the same name, each has some letters of its path's hash behind it.
    """
    fixed, suffix = _fixed_part(pattern), Path(pattern).suffix
    is_fixed = bool(suffix) and not WILD.search(suffix)
    names = []
    for path in paths:
        below = Path(path).relative_to(fixed).as_posix() if fixed.parts else Path(path).as_posix()
        names.append(_safe(below.removesuffix(suffix) if is_fixed else below))
    counts = Counter(names)
    return [
        name if counts[name] == 1 else f"{name}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
        for name, path in zip(names, paths, strict=True)
    ]


def _name_of(job: Job) -> str:
    """The name of a model that was given none: its model and weights."""
    model, weights = (getattr(job.options, name, None) for name in ("model", WEIGHTS))
    parts = [_short(value) for value in (model, weights) if value is not None]
    return _safe("-".join(parts)) if parts else "model"


def _short(value: Any) -> str:
    """The end of a path, without its suffix; any other text as it is."""
    text = str(value)
    path = Path(text)
    return path.stem if path.name != text and path.suffix else path.name


def _safe(text: str) -> str:
    name = _ODD.sub("-", text.encode("utf-8", "backslashreplace").decode()).strip("-.") or "model"
    return f"{name}-model" if name in _RESERVED else name


def _checked_name(name: str) -> str:
    if _safe(name) != name:
        raise UsageError(
            f"[[{MODELS_KEY}]]: name = {name!r}: expected letters, digits and . _ - + = @, such as "
            f"{_safe(name)}"
        )
    return name


def fingerprint_of(jobs: Sequence[tuple[str | None, Job]]) -> list[Any]:
    """All that the jobs are, as plain values."""
    return [[name, job.to_json()] for name, job in jobs]
