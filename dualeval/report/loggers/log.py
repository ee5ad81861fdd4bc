"""Results logged: what a run, a session, a script and ``dualeval export`` call."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from dualeval.errors import DualevalError, UsageError, text_of
from dualeval.process_start import say_if_ended
from dualeval.report.loggers.record import record_of
from dualeval.report.loggers.sending import Outcome, send
from dualeval.report.loggers.targets import Target
from dualeval.result import RESULT, Result, read_result, read_status

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
    outcomes = _logged(result, folder, targets, step, _BEHIND_A_RUN_S, note)
    say_if_ended("")
    for outcome in outcomes:
        target = outcome.target
        if outcome.error:
            note(f"not logged to {target.text}: {outcome.error}. The result is complete.{again(target)}")
        elif step is None:  # a training would say it each epoch
            note(f"logged to {target.kind}: {outcome.said}")


def export_result(
    result: Result,
    folder: Path | None,
    targets: Sequence[Target],
    step: int | None,
    note: Callable[[str], None] = lambda said: None,
) -> list[str]:
    """Log a result by itself."""
    outcomes = _logged(result, folder, targets, step, _BY_ITSELF_S, note)
    failed = [
        f"not logged to {outcome.target.text}: {outcome.error}" for outcome in outcomes if outcome.error
    ]
    said = [f"logged to {outcome.target.kind}: {outcome.said}" for outcome in outcomes if not outcome.error]
    if failed:
        raise DualevalError("\n".join([*failed, *said]))
    return said


def _logged(
    result: Result,
    folder: Path | None,
    targets: Sequence[Target],
    step: int | None,
    limit_s: float,
    note: Callable[[str], None],
) -> list[Outcome]:
    if not targets:
        return []
    try:
        # As in the file: which run prints it makes no difference.
        record = record_of(replace(result, earlier=False), folder, step)
        return send(record, targets, os.environ, limit_s, note)
    except (DualevalError, OSError) as error:
        return [Outcome(target=target, error=text_of(error)) for target in targets]
    except Exception as error:  # noqa: BLE001 - a metric of an odd form costs no result either
        said = f"its record cannot be made ({type(error).__name__}: {text_of(error)})"
        return [Outcome(target=target, error=said) for target in targets]


def stored_result(folder: Path) -> Result:
    """Read the result of a finished run, or of ``dualeval score --out``."""
    if not os.path.isdir(folder):  # noqa: PTH112 - False also where the name is too long
        raise UsageError(f"there is no folder {folder}. Give the output folder of a finished run.")
    if (folder / RESULT).is_file():
        return read_result(folder / RESULT)
    status = read_status(folder)
    if status is None:
        raise UsageError(
            f"{folder} holds no run: it has no {RESULT}. Give the output folder of a finished run."
        )
    raise UsageError(
        f"{folder} holds no finished run: its state is '{status.state}'. Type the run's own command again, "
        f"with --out {folder}; it resumes from there."
    )
