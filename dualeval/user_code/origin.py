"""Whose code a file is (the user's own, an installed distribution's, Python's), and its lines in an error.

Own code is what belongs neither to this package nor to an installed distribution or the standard library.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FrameType

DEBUG_VARIABLE = "DUALEVAL_DEBUG"
# Of a recursion without an end the last ones say enough.
_SHOWN_AT_MOST = 6
# Not resolved: two of its folders are links, and a traceback names files by the way that led to them.
PACKAGE = f"{Path(__file__).absolute().parents[1]}{os.sep}"
_NAME = __name__.split(".")[0]
# Code that was typed, and lies in no file.
_TYPED = ("<string>", "<stdin>", "<ipython-input", "<python-input")
_CYTHON = (".pyx", ".pxi")
_ATTRIBUTE = "_dualeval_own_code"


@cache
def library_of(file: Path) -> str | None:
    """The installed distribution that owns a file, as NAME-VERSION; "python"; None for the user's own.

    Not by where it lies: a checkout may be on the path, a distribution may be installed anywhere (pip's
    --target, conda, Spack), and the user's own file may lie among the installed ones.
    """
    on_path = {*map(Path, map(os.path.abspath, sys.path))}
    for folder in on_path.intersection(file.parents):
        owner = _owner(folder, file.relative_to(folder).parts[0].partition(".")[0])
        if owner is not None:
            return owner
    for folder in {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}:
        if file.is_relative_to(folder):
            first = file.relative_to(folder).parts[0].partition(".")[0]
            return "python" if first in sys.stdlib_module_names else None
    return None


@cache
def _owner(folder: Path, name: str) -> str | None:
    """Which distribution in a folder has installed a top-level module or package, if any has."""
    distributions = sorted([*folder.glob("*-*.dist-info"), *folder.glob("*-*.egg-info")])
    # Most often it has the module's name; an editable install has no version in the name of its .egg-info.
    distributions.sort(key=lambda path: path.name.partition("-")[0].lower() != name.lower())
    installed = re.compile(rf"^{re.escape(name)}(?:[./]|$)", re.MULTILINE)
    for path in distributions:
        # Debian's have no RECORD.
        listed = next((path / file for file in ("RECORD", "top_level.txt") if (path / file).is_file()), None)
        if listed is not None and installed.search(listed.read_text("utf-8", "replace")):
            return path.stem
    return None


def wants_debug(environ: Mapping[str, str]) -> bool:
    """Whether the environment asks for whole tracebacks."""
    return environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def own_code(error: BaseException) -> str:
    """The lines of the user's own code that an error came through, as a traceback shows them."""
    for each in _chain(error):
        lines: str = getattr(each, _ATTRIBUTE, "") or _lines(each)
        if lines:
            return lines
    return ""


def keep_own_code(error: BaseException, lines: str) -> None:
    """Give an error lines that are shown for it: those of another process, whose traceback is lost."""
    setattr(error, _ATTRIBUTE, lines)


def is_raised_by_own_code(error: BaseException) -> bool:
    """Whether the statement that has raised an error is the user's own."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # A parameter whose values are in a file (``late_model``) computes in frames of this package.
    while frames and frames[-1].f_code.co_filename.startswith(PACKAGE):
        frames.pop()
    return bool(frames) and _is_own(frames[-1])


def _chain(error: BaseException) -> Iterator[BaseException]:
    following: BaseException | None = error
    seen: set[int] = set()
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        hidden = None if following.__suppress_context__ else following.__context__
        following = following.__cause__ or hidden


def _lines(error: BaseException) -> str:
    frames = list(traceback.walk_tb(error.__traceback__))
    inside = next(
        (place for place, (frame, _) in enumerate(frames) if frame.f_code.co_filename.startswith(PACKAGE)), 0
    )
    # What calls this package is not what has failed.
    of_user = [(frame, line) for frame, line in frames[inside:] if _is_own(frame)]
    return "".join(traceback.StackSummary.extract(iter(of_user[-_SHOWN_AT_MOST:])).format())


def _is_own(frame: FrameType) -> bool:
    filename = frame.f_code.co_filename
    if filename.startswith("<"):
        # A method that dataclasses have made is of "<string>", too.
        module = str(frame.f_globals.get("__name__"))
        return filename.startswith(_TYPED) and module.split(".")[0] != _NAME
    if filename.endswith(_CYTHON) and not Path(filename).exists():
        return False  # of a library: Cython names its sources by a path inside of their package
    path = Path(filename).absolute()
    return not str(path).startswith(PACKAGE) and library_of(path) is None
