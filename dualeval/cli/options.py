"""Options that several commands have, and what they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dualeval.cli.grouped import flag_for, grouped, with_flags
from dualeval.errors import EXIT_DONE, DualevalError
from dualeval.options.evaluation import LAUNCH
from dualeval.options.job import COMMON
from dualeval.process_start import end_with, unwritten

if TYPE_CHECKING:
    from dualeval.engine.session import Session
    from dualeval.report.loggers import Target
    from dualeval.result import Result

_T = TypeVar("_T")

METRIC = click.option(
    "--metric", multiple=True, help="Metric to compute; give it again for more.  [default: all]"
)
CLUSTER = click.option(
    "--cluster",
    metavar="COLUMN",
    help="Column of samples that go together, for intervals.  [default: the run's own]",
)
BY = click.option(
    "--by", multiple=True, metavar="COLUMN", help="Column, or A*B for a cross; give it again for more."
)
BINS = with_flags(flag_for(COMMON["bins"]))
ONLY_JSON = click.option("--json", "as_json", is_flag=True, help="Print only JSON on standard output.")
ALLOW_SHARED_GPU = grouped(
    "--allow-shared-gpu", group=LAUNCH, is_flag=True, help="Let several ranks of a node share a GPU."
)


def show(result: Result, *, as_json: bool, kept: Path | None) -> None:
    """Show a result on standard output, as a table or as the text of result.json."""
    from dualeval.report.table import print_result

    if as_json:
        click.echo(result.to_json(), nl=False)
    else:
        print_result(result)
    problem = unwritten()
    if problem is None:
        return
    said = f"standard output cannot be written ({problem.strerror})"
    if kept is None:
        raise DualevalError(f"{said}, and the result is kept nowhere else: give --out DIR.")
    click.echo(f"dualeval: note: {said}; the result is in {kept}", err=True)


def evaluate_and_show(
    session: Session,
    evaluate: Callable[[Session], Result],
    *,
    as_json: bool,
    targets: Sequence[Target] = (),
) -> int:
    """Evaluate in a session of its own; returns the exit code, the same on every rank."""
    from dualeval.result import RESULT

    code, result = work_in_session(session, evaluate)
    if result is not None and session.world.is_main:
        kept = None if result.folder is None else Path(result.folder) / RESULT
        try:
            show(result, as_json=as_json, kept=kept)
        finally:
            # Also where whoever reads the table has seen enough of it, as head.
            if targets:
                from dualeval.report.loggers.log import log_result

                log_result(result, targets, None, session.note)
    return code


def work_in_session(
    session: Session, work: Callable[[Session], _T], code_of: Callable[[Any], int] | None = None
) -> tuple[int, _T | None]:
    """Do something in a session of its own; returns the exit code, and what came of it if anything did."""
    from dualeval.engine.end.process import end_process

    try:
        with session:
            try:
                done = work(session)
                ended = EXIT_DONE if code_of is None else code_of(done)
                # It is on the disk: a signal that comes when the session takes none any more is too late.
                end_with(ended)
            except BaseException as error:
                code = session.conclude(error)
                end_with(code)
                if session.control.stopping is not None:
                    # A launcher may leave a second between SIGTERM and SIGKILL.
                    end_process(code)
                raise
    except Exception:
        if not session.is_concluded:
            raise
        return session.exit_code, None
    return ended, done
