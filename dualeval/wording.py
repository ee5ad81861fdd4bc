"""What messages of every part say alike: the names nearest to a wrong one, and numbers of things."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from dualeval.errors import UsageError


def did_you_mean(name: object, known: Iterable[object], *, most: int = 1, cutoff: float = 0.6) -> str:
    """A sentence with the known names nearest to a wrong one, after a space; "" where none is near."""
    near = difflib.get_close_matches(str(name), list(map(str, known)), n=most, cutoff=cutoff)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def refuse_url(what: str, text: str) -> None:
    """Check that a path is none of an object store or of the web."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text):
        raise UsageError(f"{what} {text} is a URL, expected a path: copy it to a disk first, or mount it.")


def nearest(name: str, known: Iterable[str], *, most: int = 3, cutoff: float = 0.6) -> str:
    """As ``did_you_mean``, in the words of a list that all known names follow."""
    names = dict.fromkeys(known)
    near = [each for each in names if each.lower() == name.lower()][:most]
    near = near or difflib.get_close_matches(name, names, n=most, cutoff=cutoff)
    return f" Nearest: {', '.join(near)}." if near else ""


def counted(number: int, what: str) -> str:
    """A number of things: "1 rank", "1,024 ranks"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """A text for a terminal: what would steer it, as an escape sequence does, as ``\\xNN``."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
