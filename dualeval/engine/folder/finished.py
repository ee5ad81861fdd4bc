"""A finished run's folder, opened to read."""

from __future__ import annotations

import os
from pathlib import Path

from dualeval.engine.folder.layout import refuse_unfinished
from dualeval.engine.folder.stored_rows import StoredRows
from dualeval.errors import DualevalError, UsageError
from dualeval.result import JOB, PREDICTIONS, RESULT, STATUS, Result, checksum_of, read_result, read_status


def finished_run(folder: Path) -> tuple[Result, StoredRows]:
    """Open the result and the rows of a finished run."""
    check_finished(folder)
    if not (folder / PREDICTIONS).is_file():
        raise UsageError(
            f"{folder} holds a finished run, but no {PREDICTIONS} any more: there are no rows to compute "
            "metrics from."
        )
    result = read_result(folder / RESULT)
    recorded = result.files.get(PREDICTIONS)
    if recorded is not None and recorded != checksum_of(folder / PREDICTIONS):
        raise DualevalError(
            f"{folder / PREDICTIONS} is not the file that the run wrote: its size or sha256 differs from "
            f"{RESULT}. 'dualeval verify {folder}' says which numbers it changes."
        )
    return result, StoredRows(folder / PREDICTIONS)


def check_finished(folder: Path) -> None:
    """Check that a folder holds a finished run."""
    wanted = "Give the output folder of a finished run."
    if not os.path.isdir(folder):  # noqa: PTH112 - False also where the name is too long
        raise UsageError(f"there is no folder {folder}. {wanted}")
    for file in (folder / name for name in (STATUS, RESULT, JOB, PREDICTIONS)):
        if file.exists() and not file.is_file():
            raise UsageError(f"{file} is not a regular file. {wanted}")
    refuse_unfinished(folder)
    status, has_result = read_status(folder), (folder / RESULT).is_file()
    if status is not None and status.state == "done" and has_result:
        return
    if status is not None:
        problem = f"{RESULT} is missing" if status.state == "done" else f"its state is '{status.state}'"
        raise UsageError(
            f"{folder} holds no finished run: {problem}. Type the run's own command "
            f"again, with --out {folder}; it resumes from there."
        )
    if not has_result:
        raise UsageError(f"{folder} holds no run: it has no {STATUS}. {wanted}")
    if (folder / PREDICTIONS).is_file():
        raise UsageError(
            f"{folder} has no readable {STATUS}, which says whether its run has finished. Type the run's own "
            f"command again, with --out {folder}: it rewrites {STATUS}."
        )
    of = read_result(folder / RESULT).job.get("rows_of")
    raise UsageError(f"{folder} holds metrics of 'dualeval score', and no rows: those are in {of}. {wanted}")
