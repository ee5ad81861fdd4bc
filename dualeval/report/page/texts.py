"""Texts of strangers, made so that they show what they are: names of files and classes, texts and errors."""

from __future__ import annotations

import re

# Control characters but tab and the ends of lines, what turns the direction of a line, and what no UTF-8 has.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def printable(text: str) -> str:
    r"""The text with what cannot be seen as an escape: ESC as \x1b."""
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def shortened(text: str, letters: int) -> str:
    """The text in one line, and its middle left out where it is longer."""
    text = " ".join(text.split())
    half = (letters - 1) // 2
    return text if len(text) <= letters else f"{text[: letters - 1 - half]}…{text[-half:]}"
