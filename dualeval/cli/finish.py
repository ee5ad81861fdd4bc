"""``dualeval finish``: make one result of the shares of a job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from dualeval.cli.options import PATH
from dualeval.cli.run import evaluate, prepared, run, without_start
from dualeval.engine.folder.layout import COMMAND, COUNT, to_mend_job
from dualeval.errors import UsageError
from dualeval.result import JOB, read_job

_REFUSED = ("--fresh", "--share", "--out", "--dry-run")
# Of the shares' command, what is of the place where they were evaluated.
_OF_A_SHARE = ("--nproc", "--launcher", "--backend", "--device", "--share", "--out")


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("out", type=PATH)
@click.option("--evaluate-missing", is_flag=True, help="Evaluate the chunks that no share has finished.")
@click.argument("options", metavar="[OPTIONS OF RUN]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def finish(context: click.Context, out: Path, evaluate_missing: bool, options: tuple[str, ...]) -> None:
    """Join the shares in OUT: check that each chunk is there once, and write the result.

    The job is that of the shares' own command; further options of 'dualeval run' go after it.

    \b
    dualeval finish runs/r18
    dualeval finish runs/r18 --evaluate-missing --nproc 2
    """
    if str(out).startswith("-"):
        raise UsageError(f"{out} stands where OUT is expected: 'dualeval finish OUT {out} ...'")
    if refused := [word for word in options if word.partition("=")[0] in _REFUSED]:
        raise UsageError(
            f"{refused[0]} does not go with 'dualeval finish'. To start all shares over, remove {out}."
        )
    start_over = f"Remove {out} to start over"
    remedy = to_mend_job(out, start_over)
    try:
        job = read_job(out, remedy)
    except FileNotFoundError:
        job = {}
    if (job.get(COUNT) or 0) < 1:
        raise UsageError(f"{out} holds no shares. 'dualeval run --share I/N --out {out} ...' evaluates one.")
    command = job.get(COMMAND)
    if command is None:
        raise UsageError(
            f"the shares in {out} were evaluated from Python: call session.evaluate with the same task and "
            "out."
        )
    folder, words = command.get("folder"), command.get("words")
    if type(folder) is not str or type(words) is not list:
        raise UsageError(
            f"{out / JOB} is damaged: its field {COMMAND} lacks the folder or the words. {remedy}"
        )
    if Path.cwd() != Path(folder):
        # Relative paths in the command begin there.
        raise UsageError(
            f"the shares in {out} were started in {folder}. Type 'cd {folder}', and there 'dualeval finish "
            f"{out.resolve()}'. If that folder no longer exists, type their command without --share."
        )
    words = [*without_start(words, _OF_A_SHARE), *options, "--out", str(out)]
    with run.make_context("dualeval finish", words, parent=context) as of_run:
        of_run.params["fresh"] = False
        jobs, invocation = prepared(of_run, of_run.params)
        more = {**invocation.run, "evaluate_missing": evaluate_missing, "start_over": start_over}
        context.exit(evaluate(jobs, replace(invocation, run=more)))
