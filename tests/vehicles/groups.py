"""Which tests one worker of ``pytest -n 3 --dist loadgroup`` runs, one after the other.

All others may run beside any other test, on another worker: what a test needs of the machine (a port, a
folder, a host) is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

# Fixtures of a module or more that take seconds or a minute to make, by their names.
MADE_ONCE = {"built", "cluster", "digest", "embedded", "evaluate", "wanted", "written"}
MADE_ONCE |= {"of_ends", "of_two_ranks", "run_of_images"}


def mark(items: Sequence[pytest.Item]) -> None:
    """Give the tests that ask for what is made once the group of their file, or that of the cluster."""
    for item in items:
        made_once = MADE_ONCE.intersection(getattr(item, "fixturenames", ()))
        if made_once and not item.get_closest_marker("xdist_group"):
            # Its tests stop its hosts and wait for its queue to be empty, whichever file they are in.
            group = "cluster" if "cluster" in made_once else item.path.stem
            item.add_marker(pytest.mark.xdist_group(group))


def tell(items: Sequence[pytest.Item]) -> None:
    """Put the groups where the scheduler of pytest-xdist looks for them: into the names of the tests.

    pytest-xdist 3.8 writes them into a field that pytest 9.2 no longer reads, and then has no groups, without
    a word: https://github.com/pytest-dev/pytest-xdist/issues/1386.
    """
    for item in items:
        anything: Any = item
        told = getattr(item, "_nodeid", item.nodeid)
        if told != item.nodeid:
            anything._id = type(anything._id).parse(told)
