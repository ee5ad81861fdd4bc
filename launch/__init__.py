"""Who started this process: the launcher, and this process's place among the ranks.

It imports no backend. Begin with ``detect.py``; a launcher is a file of ``launchers/``.
Callers: joining, world, cli, tools. Keep: the environment is read and never written; a variable that is
missing is an error, never rank 0.
"""

from __future__ import annotations

if __name__ != "dualeval.launch":
    # A second import under another name would make two classes of one: two World probes, two tables.
    raise ImportError(f"This package is 'dualeval.launch', not {__name__!r}: write 'import dualeval.launch'.")

from dualeval.launch.detect import Detection, detect, examine

__all__ = ["Detection", "detect", "examine"]
