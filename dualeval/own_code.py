"""The lines of a user's own code that an error came through: what is shown of a traceback.

Own code is what lies neither in this package nor among installed packages and the standard library.
"""

from __future__ import annotations

import os
import site
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

DEBUG_VARIABLE = "DUALEVAL_DEBUG"
# Of a recursion without an end the last ones say enough.
_SHOWN_AT_MOST = 6
# Not resolved: two of its folders are links, and a traceback names files by the way that led to them.
_PACKAGE = f"{Path(__file__).absolute().parent}{os.sep}"
# Code that was typed, and lies in no file.
_TYPED = ("<string>", "<stdin>", "<ipython-input", "<python-input")
_ATTRIBUTE = "_dualeval_own_code"


def wants_debug(environ: Mapping[str, str]) -> bool:
    """Whether the environment asks for whole tracebacks."""
    return environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def own_code(error: BaseException) -> str:
    """The lines of the user's own code that an error came through, as a traceback shows them.

    Args:
        error: raised; of one that was raised from another, the first of the chain that has any.

    Returns:
        Ends with a line feed; "" where there are none.
    """
    for each in _chain(error):
        found: str = getattr(each, _ATTRIBUTE, "") or _lines(each)
        if found:
            return found
    return ""


def keep_own_code(error: BaseException, lines: str) -> None:
    """Give an error lines that are shown for it: those of another process, whose traceback is lost."""
    setattr(error, _ATTRIBUTE, lines)


def is_raised_by_own_code(error: BaseException) -> bool:
    """Whether the statement that has raised an error is the user's own."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_own(frames[-1].filename)


def _chain(error: BaseException) -> Iterator[BaseException]:
    following: BaseException | None = error
    seen: set[int] = set()
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        hidden = None if following.__suppress_context__ else following.__context__
        following = following.__cause__ or hidden


def _lines(error: BaseException) -> str:
    frames = list(traceback.extract_tb(error.__traceback__))
    inside = next((place for place, frame in enumerate(frames) if frame.filename.startswith(_PACKAGE)), 0)
    # What calls this package is not what has failed.
    typed = [
        frame.f_globals.get("__name__") == "__main__" for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    own = [
        frame
        for place, frame in enumerate(frames)
        # A dataclass's generated methods are "<string>" as well, and nobody has typed them.
        if place >= inside and _is_own(frame.filename) and (typed[place] or frame.filename != "<string>")
    ]
    return "".join(traceback.StackSummary.from_list(own[-_SHOWN_AT_MOST:]).format())


def _is_own(filename: str) -> bool:
    if filename.startswith("<"):
        return filename.startswith(_TYPED)
    path = str(Path(filename).absolute())
    if path.startswith(_PACKAGE) or f"{os.sep}site-packages{os.sep}" in path:
        return False
    return not path.startswith(_libraries())


@cache
def _libraries() -> tuple[str, ...]:
    """The folders of the standard library and of installed packages."""
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), str(Path(os.__file__).absolute().parent)]
    return tuple({folder.rstrip(os.sep) + os.sep for folder in folders})
