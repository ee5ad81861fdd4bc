"""A user's own code: how it is found, and the lines of it that an error came through, for a traceback.

Own code is what belongs neither to this package nor to an installed distribution or the standard library.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from dualeval.user_code.origin import library_of

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
