"""Wording that all messages share: the names nearest to a wrong one, and numbers of things."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Sequence


def did_you_mean(name: object, known: Iterable[object], *, most: int = 1, cutoff: float = 0.6) -> str:
    """A sentence with the known names nearest to a wrong one, after a space; "" if none is near."""
    near = difflib.get_close_matches(str(name), list(map(str, known)), n=most, cutoff=cutoff)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def nearest(name: str, known: Iterable[str], *, most: int = 3, cutoff: float = 0.6) -> str:
    """Like ``did_you_mean``, phrased to be followed by the list of all known names."""
    names = dict.fromkeys(known)
    near = [each for each in names if each.lower() == name.lower()][:most]
    near = near or difflib.get_close_matches(name, names, n=most, cutoff=cutoff)
    return f" Nearest: {', '.join(near)}." if near else ""


def counted(number: int, what: str) -> str:
    """A number of things: "1 rank", "1,024 ranks"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def listed(names: Iterable[str], most: int = 8) -> str:
    """The first names, and how many more there are."""
    shown = [*names]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return f"{', '.join(shown[:most])}{more}"


def first_of(names: Sequence[object], most: int) -> str:
    """The first names, and ", ..." if there are more."""
    return ", ".join(map(str, names[:most])) + (", ..." if len(names) > most else "")


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: JSON may contain half of a surrogate pair, escaped."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(text: str) -> str:
    """An untrusted text for a terminal: control characters, which could move its cursor, become ``\\x1b``."""
    if text.isprintable():
        return text
    return "".join(each.encode("unicode_escape").decode() if _is_control(each) else each for each in text)


def _is_control(letter: str) -> bool:
    """Whether a letter controls the terminal or the direction of writing, or cannot stand in XML."""
    turns = "\u202a" <= letter <= "\u202e" or "\u2066" <= letter <= "\u2069"
    # Not allowed in XML.
    if letter in "\ufffe\uffff":
        return True
    return turns or (letter != "\t" and unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp"))


def printable_lines(text: str) -> str:
    """Like ``printable``, for a text that may have several lines."""
    return "\n".join(map(printable, text.split("\n")))


def csv_cell(text: str) -> str:
    """An untrusted text for a CSV file: a spreadsheet would compute one that begins like a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def written(value: object) -> str:
    """A value as a text that can be written: JSON may escape half of a surrogate pair."""
    return str(value).encode(errors="backslashreplace").decode()
