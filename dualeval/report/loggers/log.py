"""Results logged: what a run, a session, a script and ``dualeval export`` call."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dualeval.errors import DualevalError, UsageError
from dualeval.process_start import say_if_ended
from dualeval.report.loggers.sending import send
from dualeval.report.loggers.targets import Target
from dualeval.result import RESULT, Result, read_result

# Behind a run other ranks may wait for the first one: their libraries give up after minutes.
_BEHIND_A_RUN_S = 60.0
_BY_ITSELF_S = 600.0


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
    said = [*map(str, sorted(outcomes, key=lambda outcome: not outcome.error))]
    if any(outcome.error for outcome in outcomes):
        raise DualevalError("\n".join(said))
    return said


def stored_result(folder: Path) -> Result:
    """Read the result of a finished run, or of ``dualeval score --out``."""
    if not os.path.isfile(folder / RESULT):  # noqa: PTH113 - False also where the name is too long
        raise UsageError(
            f"there is no {folder / RESULT}: give the output folder of a finished run. A run that has not "
            "come to its end resumes where its own command is typed again."
        )
    return read_result(folder / RESULT)
