"""Results logged: what a run, a session, a script and ``dualeval export`` call.

Trackers print, register functions for the end, start services, and keep one run a process, which may be the
caller's own. None of that reaches this process: they are written to by another one, which ends in time
whatever they do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any

from dualeval.errors import DualevalError, UsageError, message_of, with_type
from dualeval.process.start import end_with_parent, say_if_ended
from dualeval.report.loggers.loggers import KINDS, Target, is_installed
from dualeval.result import RESULT, Result, read_result, result_from

# Behind a run other ranks may wait for the first one: their libraries give up after minutes.
_BEHIND_A_RUN_S = 60.0
_BY_ITSELF_S = 600.0
# After so long people are told what is waited for.
_QUIET_S = 10.0
_MOST_LETTERS = 600
_MOST_BYTES = 2**20  # of all answers
# The working folder is not on its path: a file there could have the name of a module.
_CODE = """
import sys
root = sys.argv[1]
sys.path[:] = [path for path in sys.path if path]
if root not in sys.path:
    sys.path.insert(0, root)
from dualeval.report.loggers.log import main
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


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a result."""

    # Where it was to go.
    target: Target
    # Where it is now; empty where it is not there.
    text: str = ""
    # Why it is not there; empty where it is.
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"not logged to {self.target.text}: {self.error}"
        return f"logged to {self.target.kind}: {self.text}"


def log_result(
    result: Result, targets: Sequence[Target], step: int | None, note: Callable[[str], None]
) -> None:
    """Log a result that is written; a tracker that fails is a note, and costs nothing else.

    What is logged is noted too, but not the steps of a training.
    """
    folder = None if result.folder is None else Path(result.folder)

    def again(*to: Target) -> str:
        if folder is None:
            return ""
        words = [*(f"--to {target.text}" for target in to), *([] if step is None else [f"--step {step}"])]
        return f" 'dualeval export {folder} {' '.join(words)}' tries it again."

    names = " and ".join(target.text for target in targets)
    late = f"note: the result may not be logged to {names}. It is complete.{again(*targets)}"
    say_if_ended(late.removesuffix("."))
    outcomes = send(result, folder, targets, step, _BEHIND_A_RUN_S, note)
    say_if_ended("")
    for outcome in outcomes:
        if outcome.error:
            note(f"{outcome}. The result is complete.{again(outcome.target)}")
        elif step is None:  # a training would say it each epoch
            note(str(outcome))


def export_result(
    result: Result,
    folder: Path | None,
    targets: Sequence[Target],
    step: int | None,
    note: Callable[[str], None],
) -> list[str]:
    """Log a result by itself."""
    outcomes = send(result, folder, targets, step, _BY_ITSELF_S, note)
    # What has failed comes first.
    lines = [*map(str, sorted(outcomes, key=lambda outcome: not outcome.error))]
    if any(outcome.error for outcome in outcomes):
        raise DualevalError("\n".join(lines))
    return lines


def stored_result(folder: Path) -> Result:
    """Read the result of a finished run, or of ``dualeval score --out``."""
    if not os.path.isfile(folder / RESULT):  # noqa: PTH113 - False also where the name is too long
        raise UsageError(
            f"there is no {folder / RESULT}: give the output folder of a finished run. An unfinished run "
            "resumes when its own command is typed again."
        )
    return read_result(folder / RESULT)


def send(
    result: Result,
    folder: Path | None,
    targets: Sequence[Target],
    step: int | None,
    limit_s: float,
    note: Callable[[str], None],
) -> list[Outcome]:
    """Write a result into trackers, in a process of its own."""
    end = monotonic() + limit_s
    content: dict[str, Any] = {"folder": folder and str(folder), "step": step}
    content["targets"] = [asdict(target) for target in targets]
    variables = {**_DEFAULTS, **os.environ}
    variables.pop(_OF_CALLER, None)
    try:
        # As in the file: which run prints it makes no difference.
        content["result"] = json.loads(replace(result, earlier=False).to_json())
        with (
            tempfile.TemporaryFile("w+") as request,
            tempfile.TemporaryFile("w+") as answered,
            tempfile.TemporaryFile("w+", errors="replace") as printed,
        ):
            json.dump(content, request)
            request.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(_ROOT)],
                stdin=request,
                stdout=answered,
                stderr=printed,
                env=variables,
                # Ctrl-C is this process's.
                start_new_session=True,
            )
            try:
                if not _has_ended(process, min(end, monotonic() + _QUIET_S)):
                    there = _answers(answered.fileno())
                    late = " and ".join(target.text for target in targets if target.text not in there)
                    note(
                        f"still logging to {late}: it has not answered yet, and gets {limit_s:.0f} s in all. "
                        "The result is complete."
                    )
                why = f"no answer within {limit_s:.0f} s"
                if _has_ended(process, end):
                    printed.seek(0)
                    last = (printed.read().strip() or "nothing was printed").splitlines()[-1].strip()
                    why = f"its process ended with {process.returncode}: {last[:_MOST_LETTERS]}"
                answers = _answers(answered.fileno())
            finally:
                with suppress(ProcessLookupError):  # it has ended, and left nothing
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    except (OSError, ValueError, TypeError) as error:  # no process, no disk, a metric of an odd form
        return [Outcome(target=target, error=with_type(error)) for target in targets]
    return [Outcome(target=target, **answers.get(target.text, {"error": why})) for target in targets]


def _has_ended(process: subprocess.Popen[bytes], end: float) -> bool:
    """Wait for a process until some time."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, end - monotonic()))
    return process.returncode is not None


def _answers(file: int) -> dict[str, dict[str, str]]:
    """What has become of the result so far, by tracker."""
    # Not read as a file: the process writes at the place where this one reads.
    return dict(map(json.loads, os.pread(file, _MOST_BYTES, 0).splitlines()))


# -- the process that was started ----------------------------------------------------------------------


def main() -> None:
    """Write what standard input has into trackers, and a line for each where standard output was."""
    end_with_parent(signal.SIGKILL)
    # A tracker's own output is not an answer.
    answered = os.dup(1)
    os.dup2(2, 1)
    for answer in write_all(json.load(sys.stdin)):
        os.write(answered, f"{json.dumps(answer)}\n".encode())


def write_all(content: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Write a result into trackers, files first; yields each and what became of it."""
    targets = [Target(**fields) for fields in content["targets"]]
    folder = None if content["folder"] is None else Path(content["folder"])
    entry = None
    for target in sorted(targets, key=lambda target: not KINDS[target.kind].is_local):
        try:
            from dualeval.report.loggers.entry import entry_of

            entry = entry or entry_of(result_from(content["result"]), folder, content["step"])
            # Each imports its own library.
            text = import_module(f"{__package__}.{target.kind}").write(entry, target)
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises is reported, and costs no result
            yield target.text, {"error": " ".join(message_of(error).split())[:_MOST_LETTERS]}
            continue
        if entry.confusions and KINDS[target.kind].has_pictures and not is_installed("matplotlib"):
            text += " (without the picture of the confusion matrix: type pip install matplotlib)"
        yield target.text, {"text": text}
