"""``dualeval run`` with several models: each has a folder and a result of its own, and one table has all."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dualeval.atomic_files import write_text
from dualeval.data.cache import DataCache
from dualeval.engine.control.progress import Stage
from dualeval.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, DualevalError, UsageError, text_of
from dualeval.options.several import TABLES, Candidate, candidates_of, fingerprint_of, found_models
from dualeval.process.speech import say
from dualeval.process.start import unwritten
from dualeval.report.models_table import DONE, FAILED, ModelRow, ModelsTable
from dualeval.result import JOB, RESULT, STATUS, json_text, sha256_of_json

if TYPE_CHECKING:
    from dualeval.engine.folder.lease import Lease
    from dualeval.engine.session import Session
    from dualeval.options.job import Job
    from dualeval.report.loggers.loggers import Target
    from dualeval.result import Result

# Evaluates one model, into that folder, with data that may have been read for another one.
Evaluate = Callable[["Job", Path, DataCache], "Result"]


def exit_code_of(rows: Sequence[ModelRow]) -> int:
    """0 where all models are done, 2 where all that failed had wrong input, 1 where others did."""
    codes = {row.exit_code for row in rows} - {EXIT_DONE}
    if not codes:
        return EXIT_DONE
    return EXIT_USAGE if codes == {EXIT_USAGE} else EXIT_FAILED


def try_out(
    jobs: Sequence[tuple[str | None, Job]], session: Session, try_one: Callable[[Job], dict[str, Any]]
) -> tuple[int, dict[str, Any]]:
    """Try each model without its loop; a collective. Returns the exit code, and what is printed."""
    named = found_models(jobs) if session.world.is_main else None
    session.control.meet()
    models, rows = [], []
    for candidate in candidates_of(jobs, session.backend.broadcast_json(named, src=0)):
        used, failure = session.attempt(partial(try_one, candidate.job))
        if failure is None:
            models.append({"name": candidate.name, "job": used})
        else:
            if session.world.is_main:
                say(f"dualeval: error: {candidate.name}: {text_of(failure)}")
            models.append({"name": candidate.name, "error": text_of(failure)})
        rows.append(ModelRow(name=candidate.name, exit_code=failure.exit_code if failure else EXIT_DONE))
    return exit_code_of(rows), {"models": models}


class Models:
    """Several models, evaluated one after the other by the same ranks."""

    def __init__(
        self,
        jobs: Sequence[tuple[str | None, Job]],
        *,
        out: Path | None,
        targets: Sequence[Target],
        as_json: bool,
        evaluate: Evaluate,
    ) -> None:
        self._jobs = jobs
        self._out = out
        self._targets = targets
        self._as_json = as_json
        self._evaluate = evaluate
        self._launch: str | None = None
        self._written: tuple[Path, ModelsTable] | None = None

    def evaluate(self, session: Session) -> list[ModelRow]:
        """Evaluate each model in an open session; a collective. Returns a row for each."""
        folder, candidates, lease = self._begin(session)
        rows = [ModelRow(name=each.name, folder=str(folder / each.name)) for each in candidates]
        cache = DataCache()
        try:
            self._write(session, folder, rows)
            for number, candidate in enumerate(candidates):
                rows[number] = self._attempt(session, candidate, rows[number], rows, cache)
                self._write(session, folder, rows)
                self._log(session, rows[number])
            if session.world.is_main:
                self._show(folder, rows)
        finally:
            if lease is not None:
                lease.close()
        return rows

    @property
    def closing(self) -> str | None:
        """On rank 0, what is said where the run has ended early; None where nothing was written yet."""
        if self._written is None:
            return None
        folder, table = self._written
        done = sum(row.status == DONE for row in table.rows)
        return (
            f"{done} of {len(table.rows)} models are done, and the table is in {folder}. Type the same "
            f"command again, with --out {folder}, to go on."
        )

    def _attempt(
        self,
        session: Session,
        candidate: Candidate,
        row: ModelRow,
        rows: Sequence[ModelRow],
        cache: DataCache,
    ) -> ModelRow:
        name, number, count = candidate.name, rows.index(row) + 1, len(rows)
        if session.world.is_main:
            session.note(f"model {number} of {count}: {name}")
        done = sum(each.status == DONE for each in rows)
        assert row.folder is not None
        result, failure = session.attempt(
            partial(self._evaluate, candidate.job, Path(row.folder), cache),
            progress=f"{done} of {count} models are done.",
            last=number == count,
        )
        if failure is None:
            return replace(row, status=DONE, result=result, exit_code=EXIT_DONE)
        reason = text_of(failure) if failure.where is None else f"{failure.where}: {text_of(failure)}"
        if session.world.is_main:
            say(f"dualeval: error: model {name}: {reason}")
        return replace(row, status=FAILED, reason=reason, exit_code=failure.exit_code)

    # -- the folder --------------------------------------------------------------------------------

    def _begin(self, session: Session) -> tuple[Path, list[Candidate], Lease | None]:
        """Have rank 0 look for the models and take the folder; all ranks get the same."""
        message: dict[str, Any] | None = None
        lease = None
        if session.world.is_main:
            named = found_models(self._jobs)
            folder = self._folder(session)
            lease = _take_folder(folder, session)
            message = {"folder": str(folder), "found": named}
        session.control.meet()
        message = session.backend.broadcast_json(message, src=0)
        assert message is not None
        return Path(message["folder"]), candidates_of(self._jobs, message["found"]), lease

    def _folder(self, session: Session) -> Path:
        """The folder of all models: the one that was asked for, that of this launch, or a new one."""
        from dualeval.atomic_files import check_path
        from dualeval.engine.folder.opening import launch_of

        self._launch = launch_of(session.world)
        if self._out is not None:
            check_path(self._out)
            if single := [name for name in (RESULT, JOB, STATUS) if (self._out / name).exists()]:
                raise UsageError(
                    f"{self._out} holds a run of one model ({single[0]}), and several models need a folder "
                    "of their own. Give another --out."
                )
            return self._out.absolute()
        mark = f"several-{sha256_of_json(fingerprint_of(self._jobs))[:8]}"
        for path in sorted(Path("runs").glob(f"*-{mark}"), reverse=True):
            # A launcher starts the ranks of a launch again, after an error.
            if self._launch is not None and _launch_there(path) == self._launch:
                return path.absolute()
        now = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
        new = [f"{now}{again}-{mark}" for again in ("", *(f".{n}" for n in range(2, 100)))]
        return next(path.absolute() for name in new if not (path := Path("runs") / name).exists())

    def _write(self, session: Session, folder: Path, rows: Sequence[ModelRow]) -> None:
        """Write the table anew, so that it is there whatever ends the run."""
        if not session.world.is_main:
            return
        session.control.progress.step(Stage.WRITE)
        table = ModelsTable(rows)
        self._written = folder, table
        content = {**table.to_json(whole=False), "launch": self._launch}
        texts = (json_text(content, allow_nan=False), table.to_csv(), table.to_markdown())
        try:
            for name, text in zip(TABLES, texts, strict=True):
                write_text(folder / name, text)
        except OSError as error:
            raise DualevalError(
                f"{folder / name} cannot be written: {error.strerror or error}. The models that are done "
                "have their results: make room, and type the same command again."
            ) from error

    # -- what is shown -----------------------------------------------------------------------------

    def _log(self, session: Session, row: ModelRow) -> None:
        """Log one result, under the model's name."""
        from dualeval.report.loggers.log import log_result
        from dualeval.report.loggers.loggers import of_model

        if row.result is None or not self._targets or not session.world.is_main:
            return
        # A tracker may take its time; the others wait where the next model begins.
        session.control.progress.step(Stage.IDLE)
        log_result(row.result, [of_model(target, row.name) for target in self._targets], None, session.note)

    def _show(self, folder: Path, rows: Sequence[ModelRow]) -> None:
        table = ModelsTable(rows)
        if self._as_json:
            content = {**table.to_json(whole=True), "exit_code": exit_code_of(rows)}
            click.echo(json_text(content, allow_nan=False), nl=False)
        else:
            table.print()
            click.echo(f"files  {folder}: {', '.join(TABLES)}, and a folder for each model")
        if problem := unwritten():
            say(f"dualeval: note: standard output cannot be written ({problem.strerror}); see {folder}")


def _take_folder(folder: Path, session: Session) -> Lease:
    """Make the folder, and keep other runs of several models out of it."""
    from dualeval.engine.folder.lease import Lease

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lease = Lease.take(
            folder,
            secrets.token_hex(4),
            waiting=lambda: session.control.progress.step(Stage.SETUP),
            lost=lambda reason: session.control.give_up(reason, rank=session.world.rank),
        )
    except OSError as error:
        raise UsageError(
            f"the output folder {folder} cannot be written: {error.strerror or error}. Give another --out."
        ) from error
    # Of tables that a killed run has begun; no other run writes here now.
    for partial_table in (file for name in TABLES for file in folder.glob(f"{name}.*.partial")):
        partial_table.unlink(missing_ok=True)
    return lease


def _launch_there(folder: Path) -> str | None:
    """Which launch has begun a folder."""
    try:
        launch = json.loads((folder / TABLES[0]).read_text("utf-8"))["launch"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(launch) if launch is not None else None
