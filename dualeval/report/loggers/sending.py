"""A result sent to trackers, in a process of its own, which ends in time whatever they do.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import IO, TYPE_CHECKING, Any

from dualeval.errors import message_of, with_type
from dualeval.process_start import end_with_parent
from dualeval.report.loggers.targets import Target, is_installed
from dualeval.result import SCHEMA_VERSION, Result, result_from

if TYPE_CHECKING:
    from dualeval.report.loggers.record import Record

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
_MOST_BYTES = 2**20  # of all answers
# After so long people are told what is waited for.
_QUIET_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a result."""

    # Where it was to go.
    target: Target
    # Where it is now; empty where it is not there.
    said: str = ""
    # Why it is not there; empty where it is.
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"not logged to {self.target.text}: {self.error}"
        return f"logged to {self.target.kind}: {self.said}"


def send(
    result: Result,
    folder: Path | None,
    targets: Sequence[Target],
    step: int | None,
    limit_s: float,
    note: Callable[[str], None],
) -> list[Outcome]:
    """Write a result into trackers, all at the same time."""
    end = monotonic() + limit_s
    try:
        with _started(_content(result, folder, targets, step)) as (process, answered, printed):
            if not _has_ended(process, min(end, monotonic() + _QUIET_S)):
                there = _answers(answered)
                late = " and ".join(target.text for target in targets if target.text not in there)
                note(
                    f"still logging to {late}: it has not answered yet, and is given {limit_s:.0f} s in all. "
                    "The result is complete."
                )
            why = f"no answer within {limit_s:.0f} s"
            if _has_ended(process, end):
                why = f"its process ended with {process.returncode}: {_last_line(printed)}"
            answers = _answers(answered)
    except (OSError, ValueError, TypeError) as error:  # no process, no disk, a metric of an odd form
        return [Outcome(target=target, error=with_type(error)) for target in targets]
    return [Outcome(target=target, **answers.get(target.text, {"error": why})) for target in targets]


def _content(
    result: Result, folder: Path | None, targets: Sequence[Target], step: int | None
) -> dict[str, Any]:
    # As in the file: which run prints it makes no difference.
    fields = {"schema_version": SCHEMA_VERSION, **result.digests, **asdict(replace(result, earlier=False))}
    to = [asdict(target) for target in targets]
    return {"result": fields, "folder": None if folder is None else str(folder), "step": step, "targets": to}


@contextmanager
def _started(content: Mapping[str, Any]) -> Iterator[tuple[subprocess.Popen[bytes], IO[str], IO[str]]]:
    """The process that writes a result, and the files of its standard output and error."""
    variables = {**_DEFAULTS, **os.environ}
    variables.pop(_OF_CALLER, None)
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as answered,
        tempfile.TemporaryFile("w+", errors="replace") as printed,
    ):
        json.dump(content, given, default=str)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE, str(_ROOT)],
            stdin=given,
            stdout=answered,
            stderr=printed,
            env=variables,
            # Ctrl-C is this process's.
            start_new_session=True,
        )
        try:
            yield process, answered, printed
        finally:
            with suppress(ProcessLookupError):  # it has ended, and left nothing
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _has_ended(process: subprocess.Popen[bytes], end: float) -> bool:
    """Wait for a process until some time."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, end - monotonic()))
    return process.returncode is not None


def _answers(answered: IO[str]) -> dict[str, dict[str, str]]:
    """What has become of the result so far, by tracker."""
    # Not read as a file: the process writes at the place where this one reads.
    return dict(map(json.loads, os.pread(answered.fileno(), _MOST_BYTES, 0).splitlines()))


def _last_line(printed: IO[str]) -> str:
    printed.seek(0)
    lines = printed.read().strip().splitlines()
    return lines[-1].strip()[:_MOST_LETTERS] if lines else "nothing was printed"


# -- the process that was started ----------------------------------------------------------------------


def main() -> None:
    """Write what standard input has into trackers, and a line for each where standard output was."""
    end_with_parent(signal.SIGKILL)
    # What a tracker prints is no answer.
    answered = os.dup(1)
    os.dup2(2, 1)

    def answer(text: str, fields: dict[str, str]) -> None:
        os.write(answered, f"{json.dumps([text, fields])}\n".encode())

    write_all(json.load(sys.stdin), answer)


def write_all(content: Mapping[str, Any], answer: Callable[[str, dict[str, str]], object]) -> None:
    """Write a result into trackers; ``answer`` is called with each and what became of it."""
    from dualeval.report.loggers.record import record_of

    targets = [Target(**fields) for fields in content["targets"]]
    folder = None if content["folder"] is None else Path(content["folder"])
    try:
        record = record_of(result_from(content["result"]), folder, content["step"])
        if any(target.kind != "jsonl" for target in targets):
            record.pictures  # noqa: B018 - drawn once, and not by several threads
    except Exception as error:  # noqa: BLE001 - as below
        for target in targets:
            answer(target.text, _failure(error))
        return
    importing = Lock()  # modules that import each other do not bear it from two threads
    with ThreadPoolExecutor(len(targets)) as pool:
        for target in targets:
            pool.submit(lambda to: answer(to.text, _written(record, to, importing)), target)


def _written(record: Record, target: Target, importing: Lock) -> dict[str, str]:
    try:
        with importing:
            module = importlib.import_module(f"dualeval.report.loggers.{target.kind}")
        said = module.write(record, target)
    except Exception as error:  # noqa: BLE001 - whatever a tracker raises is reported, and costs no result
        return _failure(error)
    if record.confusions and target.kind != "jsonl" and not is_installed("matplotlib"):
        said += " (without the picture of the confusion matrix: type pip install matplotlib)"
    return {"said": said}


def _failure(error: Exception) -> dict[str, str]:
    return {"error": " ".join(message_of(error).split())[:_MOST_LETTERS]}
