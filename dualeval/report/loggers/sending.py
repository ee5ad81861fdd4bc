"""A result sent to trackers, each in a process of its own, which ends in time whatever its tracker does.

Trackers print, register functions for the end, start services, and keep one run a process, which may be the
caller's own. None of that reaches this process.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any

from dualeval.errors import message_of, with_type
from dualeval.report.loggers.targets import Target, is_installed
from dualeval.result import SCHEMA_VERSION, Result, result_from

# The working folder is not on its path: a file there could have the name of a module.
_CODE = """
import sys
root = sys.argv[1]
sys.path[:] = [path for path in sys.path if path]
if root not in sys.path:
    sys.path.insert(0, root)
from dualeval.report.loggers.sending import main
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
_OF_CALLER = "WANDB_SERVICE"
_MOST_LETTERS = 600
# After so long people are told what is waited for.
_QUIET_S = 10.0
# It ends itself, too, where nobody is left to end it.
_LATER_S = 5.0
_LOOK_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a result."""

    # Where it was to go.
    target: Target
    # Where it is now; empty where it is not there.
    said: str = ""
    # Why it is not there; empty where it is.
    error: str = ""
    # What of it is not there, with what to type; empty where it is whole.
    lacks: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"not logged to {self.target.text}: {self.error}"
        return f"logged to {self.target.kind}: {self.said}{self.lacks}"


def send(
    result: Result,
    folder: Path | None,
    targets: Sequence[Target],
    step: int | None,
    limit_s: float,
    note: Callable[[str], None],
) -> list[Outcome]:
    """Write a result into trackers, all at the same time."""
    variables = {**_DEFAULTS, **os.environ}
    variables.pop(_OF_CALLER, None)
    end = monotonic() + limit_s
    quiet = min(end, monotonic() + _QUIET_S)
    try:
        content = _content(result, folder, step)
        with ExitStack() as stack:
            started = [
                stack.enter_context(_started(target, content, variables, limit_s)) for target in targets
            ]
            for sending in started:
                if not sending.has_ended(quiet):
                    note(
                        f"still logging to {sending.target.text}: it has not answered yet, and is given "
                        f"{limit_s:.0f} s in all. The result is complete."
                    )
            return [sending.outcome(end, limit_s) for sending in started]
    except (OSError, ValueError, TypeError) as error:  # no process, no disk, a metric of an odd form
        return [Outcome(target=target, error=with_type(error)) for target in targets]


def _content(result: Result, folder: Path | None, step: int | None) -> dict[str, Any]:
    # As in the file: which run prints it makes no difference.
    fields = {"schema_version": SCHEMA_VERSION, **result.digests, **asdict(replace(result, earlier=False))}
    return {"result": fields, "folder": None if folder is None else str(folder), "step": step}


@contextmanager
def _started(
    target: Target, content: Mapping[str, Any], variables: Mapping[str, str], limit_s: float
) -> Iterator[_Sending]:
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as answer,
        tempfile.TemporaryFile("w+", errors="replace") as printed,
    ):
        json.dump({**content, "target": asdict(target)}, given, default=str)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE, str(_ROOT), str(limit_s + _LATER_S), str(os.getpid())],
            stdin=given,
            stdout=answer,
            stderr=printed,
            env=variables,
            # Ctrl-C is this process's.
            start_new_session=True,
        )
        try:
            yield _Sending(target=target, process=process, answer=answer, printed=printed)
        finally:
            if process.poll() is None:
                _end(process.pid)
            process.wait()


@dataclass(frozen=True, kw_only=True)
class _Sending:
    """A process that writes a result into a tracker."""

    target: Target
    process: subprocess.Popen[bytes]
    # Files of its standard output and error.
    answer: IO[str]
    printed: IO[str]

    def has_ended(self, end: float) -> bool:
        """Wait for it until some time."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, end - monotonic()))
        return self.process.returncode is not None

    def outcome(self, end: float, limit_s: float) -> Outcome:
        """Wait for it until some time, with which the limit of all is over."""
        has_ended = self.has_ended(end)
        self.answer.seek(0)
        if text := self.answer.read():
            return Outcome(target=self.target, **json.loads(text))
        if not has_ended:
            return Outcome(target=self.target, error=f"no answer within {limit_s:.0f} s")
        self.printed.seek(0)
        lines = [*filter(None, map(str.strip, self.printed.read().split("\n")))]
        last = lines[-1][:_MOST_LETTERS] if lines else "nothing was printed"
        return Outcome(target=self.target, error=f"its process ended with {self.process.returncode}: {last}")


def _end(pid: int) -> None:
    """End a process, and what it has started, also in sessions of their own, before it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:
        found += [number for number, above in parents.items() if above == parent]
    for number in reversed(found):
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


# -- the process that was started ----------------------------------------------------------------------


def main() -> None:
    """Write what standard input has into a tracker, and the answer where standard output was.

    Arguments of the process: the package's folder, the most seconds that it may take, and the process that
    waits for it.
    """
    # What a tracker prints is no answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    limit_s, waiting = float(sys.argv[2]), int(sys.argv[3])
    threading.Thread(target=_end_in_time, args=(limit_s, waiting), daemon=True).start()
    with answer:
        json.dump(written(json.load(sys.stdin)), answer)


def _end_in_time(limit_s: float, waiting: int) -> None:
    """End this process where it takes too long or nobody waits for it any more."""
    end = monotonic() + limit_s
    while monotonic() < end and os.getppid() == waiting:
        sleep(_LOOK_S)
    _end(os.getpid())


def written(content: Mapping[str, Any]) -> dict[str, str]:
    """Write a result into a tracker: what became of it, as fields of ``Outcome``."""
    from dualeval.report.loggers.record import record_of

    target = Target(**content["target"])
    folder = None if content["folder"] is None else Path(content["folder"])
    try:
        record = record_of(result_from(content["result"]), folder, content["step"])
        said = importlib.import_module(f"dualeval.report.loggers.{target.kind}").write(record, target)
    except Exception as error:  # noqa: BLE001 - whatever a tracker raises is reported, and costs no result
        return {"error": " ".join(message_of(error).split())[:_MOST_LETTERS]}
    if not record.confusions or target.kind == "jsonl" or is_installed("matplotlib"):
        return {"said": said}
    lacks = " (without the picture of the confusion matrix: type pip install matplotlib)"
    return {"said": said, "lacks": lacks}
