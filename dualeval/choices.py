"""Options that take one of a few words or a whole number, and the one check of them.

The command line, the job file and Python take the same values and refuse the same ones.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from dualeval.errors import UsageError

PRECISIONS = ("fp32", "tf32", "amp-bf16", "amp-fp16")
ON_ERROR = ("stop", "skip")
DATA_FINGERPRINTS = ("ends", "content")
SCHEDULES = ("static", "dynamic")


def check_choice(option: str, value: object, known: Sequence[str]) -> None:
    """Check that an option has one of its values.

    Args:
        option: as the caller has typed it, such as "--schedule" or "schedule".
        value: what was given.
        known: its values.

    Raises:
        UsageError: it has another one; offers the nearest.
    """
    if value not in known:
        near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UsageError(f"{option} {value!r}: expected one of {', '.join(known)}.{hint}")


def check_count(option: str, value: object, least: int) -> None:
    """Check that an option is a whole number that is large enough; None passes.

    Args:
        option: as the caller has typed it.
        value: what was given.
        least: the smallest number that it may be.

    Raises:
        UsageError: it is no such number.
    """
    if value is None:
        return
    # A bool is an int for Python.
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{option} {value!r}: expected a whole number of at least {least}")
