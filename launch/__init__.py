"""Who started this process."""

from __future__ import annotations

if __name__ != "dualeval.launch":
    # A second import under another name would make two classes of one: two World probes, two tables.
    raise ImportError(f"This package is 'dualeval.launch', not {__name__!r}: write 'import dualeval.launch'.")

from dualeval.launch.detect import Detection, detect, examine

__all__ = ["Detection", "detect", "examine"]
