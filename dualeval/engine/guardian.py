"""Guardian: a small process that writes down the end of a run that could not do so itself.

Where several ranks run, the others do. A process alone that is killed, or whose C code holds Python's lock
until faulthandler ends it, would leave a status.json that says "running".
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

# Its standard input ends with the process that it guards; but reading processes, which were forked from that
# one, may hold the other end for some seconds more.
_CODE = """
import json, os, select, sys

status, run, pid, message = sys.argv[1:]
awaited = [0]
try:
    awaited.append(os.pidfd_open(int(pid)))
except (OSError, AttributeError):
    pass
select.select(awaited, [], [])
try:
    with open(status, encoding="utf-8") as file:
        found = json.load(file)
    if (found["state"], found["run"]) == ("running", run):
        found.update(state="failed", exit_code=1, reason=message)
        partial = f"{status}.{run}.partial"
        with open(partial, "w", encoding="utf-8") as file:
            file.write(json.dumps(found, indent=2, ensure_ascii=False) + "\\n")
        os.replace(partial, status)
        sys.stderr.write(f"dualeval: error: {message}\\n")
except (OSError, ValueError, KeyError):
    pass
"""
_GONE_WITHIN_S = 1.0


class Guardian:
    """Guards this process until ``leave``.

    Args:
        status: the run's status.json.
        run: what names the run in it.
        stacks: where stacks are found that faulthandler has written.
    """

    def __init__(self, status: Path, run: str, stacks: Path) -> None:
        message = (
            f"the process (pid {os.getpid()}) ended without a word: it was killed, or C code held Python's "
            f"lock for too long; then {stacks} has its stacks. Type the same command again to go on."
        )
        # Signals that this process waits for in a thread are blocked there, too: it ends with its input.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CODE, str(status), run, str(os.getpid()), message],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )

    def leave(self) -> None:
        """Guard no longer: how the run ended has been written down."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        # It has nothing to do but to read one file.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GONE_WITHIN_S)
