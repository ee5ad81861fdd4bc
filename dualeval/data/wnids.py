"""WordNet's ids of ImageNet's 1,000 classes, by which ILSVRC-2012 names its folders."""

from __future__ import annotations

import functools
from pathlib import Path

# Facts, a line a class; tests/write_wnids.py has written it.
WNIDS_FILE = Path(__file__).resolve().parent.parent / "assets" / "imagenet_wnids.txt"


@functools.cache
def imagenet_wnids() -> tuple[str, ...]:
    """The wnid of each class of ILSVRC-2012, by its index: they are in the order of their names."""
    return tuple(WNIDS_FILE.read_text("ascii").split())
