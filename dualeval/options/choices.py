"""Options that take one of a few words, a whole number or a number a channel, and the one check of them.

The command line, the job file and Python take the same values and refuse the same ones.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Sequence

from dualeval.errors import UsageError
from dualeval.messages import did_you_mean

AUTO, CONTIGUOUS, CHANNELS_LAST = "auto", "contiguous", "channels-last"
LAYOUTS = (AUTO, CONTIGUOUS, CHANNELS_LAST)
FOLD, COMPILE = "fold", "compile"
OPTIMIZATIONS = (FOLD, COMPILE)
FSDP = "fsdp"
SHARDINGS = (FSDP,)
ON_ERROR = ("stop", "skip")
DATA_FINGERPRINTS = ("ends", "content")
CLASS_ORDERS = ("name", "number")
SPLITS = ("test", "train", "val")
# What a quotation mark at the beginning of a table's cell is: part of the text, or around the cell.
PLAIN_QUOTES, STANDARD_QUOTES = QUOTINGS = ("none", "standard")
# What two answers may differ in.
IGNORED = ("case", "punctuation", "articles", "whitespace")
STATIC, DYNAMIC, LOCKSTEP = "static", "dynamic", "lockstep"
SCHEDULES = (STATIC, DYNAMIC, LOCKSTEP)
# The value of --keep that keeps no column of the data.
NO_COLUMN = "none"
LARGEST_COUNT = 2**63 - 1  # of an int64, as tensors and files have it


def check_choice(option: str, value: object, known: Sequence[object]) -> None:
    """Check that an option has one of its values."""
    if value not in known:
        hint = did_you_mean(value, known, cutoff=0.4)
        raise UsageError(f"{option} {value!r}: expected one of {', '.join(map(str, known))}.{hint}")


def check_kind(option: str, value: object, fits: bool, expected: str) -> None:
    """Check that an option is of its kind."""
    if not fits:
        raise UsageError(f"{option} {reprlib.repr(value)}: expected {expected}")


def check_count(option: str, value: object, least: int) -> None:
    """Check that an option is a whole number that is large enough; None passes."""
    if value is None:
        return
    # A bool is an int for Python.
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{option} {value!r}: expected a whole number of at least {least}")
    if value > LARGEST_COUNT:
        raise UsageError(
            f"{option} {value}: expected a whole number from {least} to {LARGEST_COUNT} (64 bits)"
        )


def columns_of_groups(by: Sequence[str]) -> tuple[str, ...]:
    """The columns that ``by`` names: each text is one, or a cross of several with ``*``."""
    return tuple(dict.fromkeys(name.strip() for text in by for name in text.split("*")))


def check_groups(by: Sequence[str], bins: object, *, sign: str = "") -> None:
    """Check where columns of numbers are cut into groups; ``sign`` is what stands before options' names."""
    if not isinstance(bins, (tuple, list)) or (
        bins and not (_numbers(bins, math.isfinite) and list(bins) == sorted({*bins}))
    ):
        raise UsageError(f"{sign}bins {shown_bins(bins)}: expected numbers that ascend, such as 0,40,60")
    for text in by:
        if not all(columns_of_groups([text])):
            raise UsageError(
                f"{sign}by {text!r}: a column's name is missing, expected for example age or age*sex"
            )
    if bins and not by:
        raise UsageError(f"{sign}bins says where the columns of {sign}by are cut: give {sign}by, too")


def shown_bins(bins: object) -> str:
    """Where columns are cut, as it is typed: 40, and not 40.0."""
    if not isinstance(bins, (tuple, list)):
        return _joined(bins)
    return _joined([int(edge) if isinstance(edge, float) and edge.is_integer() else edge for edge in bins])


def check_mean(option: str, values: object) -> None:
    """Check the mean of pixels, a number a channel; None passes."""
    if values is not None and not _numbers(values, lambda value: 0 <= value <= 1):
        raise UsageError(
            f"{option} {_joined(values)}: expected numbers from 0 to 1, one per channel: the mean of pixels "
            "scaled to [0, 1]. Divide the mean of pixels from 0 to 255 by 255."
        )


def check_std(option: str, values: object) -> None:
    """Check the standard deviation of pixels, a number a channel; None passes."""
    if values is not None and not _numbers(values, lambda value: 0 < value < math.inf):
        raise UsageError(
            f"{option} {_joined(values)}: expected numbers above 0, one per channel: the standard deviation "
            "of pixels scaled to [0, 1]"
        )


def _numbers(values: object, fits: Callable[[float], bool]) -> bool:
    return (
        isinstance(values, (tuple, list))
        and bool(values)
        and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
        and all(map(fits, values))
    )


def _joined(values: object) -> str:
    return ",".join(map(str, values)) if isinstance(values, (tuple, list)) else repr(values)
