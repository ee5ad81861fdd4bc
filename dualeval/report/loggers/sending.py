"""A record sent to trackers, each in a process of its own, which ends in time whatever its tracker does.

Trackers print, register functions for the end, start services, and keep one run a process, which may be the
caller's own. None of that reaches this process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import IO

from dualeval.report.loggers.record import Record
from dualeval.report.loggers.targets import Target

# The working folder is not on its path: a file there could have the name of a module.
_CODE = """
import sys
root = sys.argv[1]
sys.path[:] = [path for path in sys.path if path]
if root not in sys.path:
    sys.path.insert(0, root)
from dualeval.report.loggers.process import main
main()
"""
_ROOT = Path(__file__).resolve().parents[3]
# Where the user has not set them. A folder of files is what was asked for; seconds and tries bound a server
# that does not answer.
_DEFAULTS = {
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
# The service of a run that the caller's own script has open.
_OF_CALLER = ("WANDB_SERVICE",)
_LAST_LINE = 300
# After so long people are told what is waited for.
_QUIET_S = 10.0
# It ends itself, too, where nobody is left to end it.
_LATER_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a record."""

    # Where it was to go.
    target: Target
    # Where it is now; empty where it is not there.
    said: str = ""
    # Why it is not there; empty where it is.
    error: str = ""


def send(
    record: Record,
    targets: Sequence[Target],
    environ: Mapping[str, str],
    limit_s: float,
    note: Callable[[str], None] = lambda said: None,
) -> list[Outcome]:
    """Write a record into trackers, all at the same time."""
    variables = {**_DEFAULTS, **{name: environ[name] for name in environ if name not in _OF_CALLER}}
    end = monotonic() + limit_s
    quiet = min(end, monotonic() + _QUIET_S)
    with ExitStack() as stack:
        started = [stack.enter_context(_started(record, target, variables, limit_s)) for target in targets]
        for sending in started:
            if not sending.has_ended(max(0.0, quiet - monotonic())):
                note(
                    f"still logging to {sending.target.text}: it has not answered yet, and is given "
                    f"{limit_s:.0f} s in all. The result is complete."
                )
        return [sending.outcome(max(0.0, end - monotonic()), limit_s) for sending in started]


@contextmanager
def _started(
    record: Record, target: Target, variables: Mapping[str, str], limit_s: float
) -> Iterator[_Sending]:
    with (
        tempfile.TemporaryFile("w+") as content,
        tempfile.TemporaryFile("w+") as answer,
        tempfile.TemporaryFile() as printed,
    ):
        json.dump({"target": asdict(target), "record": record.to_json()}, content)
        content.seek(0)
        number = answer.fileno()
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE, str(_ROOT), str(number), str(limit_s + _LATER_S), str(os.getpid())],
            stdin=content,
            stdout=printed,
            stderr=subprocess.STDOUT,
            pass_fds=(number,),
            env=variables,
            # Ctrl-C is this process's.
            start_new_session=True,
        )
        try:
            yield _Sending(target, process, answer, printed)
        finally:
            _end(process)


class _Sending:
    """A process that writes a record into a tracker."""

    def __init__(
        self, target: Target, process: subprocess.Popen[bytes], answer: IO[str], printed: IO[bytes]
    ) -> None:
        self.target = target
        self._process = process
        self._answer = answer
        self._printed = printed

    def has_ended(self, seconds: float) -> bool:
        """Wait for it, for so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None

    def outcome(self, seconds: float, limit_s: float) -> Outcome:
        """Wait for it, for so many seconds of the limit that all had."""
        code = self._process.returncode if self.has_ended(seconds) else None
        self._answer.seek(0)
        text = self._answer.read()
        if text:
            return Outcome(target=self.target, **json.loads(text))
        if code is None:
            return Outcome(target=self.target, error=f"no answer within {limit_s:.0f} s")
        self._printed.seek(0)
        lines = self._printed.read().decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing was printed")
        return Outcome(target=self.target, error=f"its process ended with {code}: {last[:_LAST_LINE]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it has started; nothing where it has ended."""
    if process.poll() is None:
        # Before it: its children have another parent afterwards.
        for number in [*descendants(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have; none where /proc is not there."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:
        found += [number for number, above in parents.items() if above == parent]
    return found[1:]
