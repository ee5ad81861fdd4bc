"""``dualeval pack``: write the decoded pictures of a data set into one file, from which runs read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dualeval.cli.options import PATH, grouped
from dualeval.cli.task_flags import TaskCommand, config_flag, job_flags, task_flags, whole_job_of
from dualeval.errors import UsageError
from dualeval.options.evaluation import DATA, MODEL, RUN
from dualeval.tools.starts import check_no_rank

# Those that have a method to_pack.
_TASKS = ("image-classification", "segmentation")
_OUT: dict[str, Any] = {"type": PATH, "required": True, "metavar": "FILE.pack"}
_WORKERS: dict[str, Any] = {"type": click.IntRange(min=0), "metavar": "N"}


@click.command(cls=TaskCommand, groups=(MODEL, DATA), last=(RUN,))
@task_flags
@config_flag
@job_flags("keep")
@grouped("--workers", group=RUN, **_WORKERS, help="Reading processes.  [default: one per core]")
@grouped("--out", group=RUN, **_OUT, help="The pack; an unfinished one goes on.")
def pack(out: Path, workers: int | None, **flags: Any) -> None:
    """Decode, resize and crop the pictures of a data set once, for runs that read them from one file.

    \b
    dualeval pack --model resnet50 --weights DEFAULT --data /data/val --out val.pack
    dualeval run --model resnet50 --weights DEFAULT --data val.pack

    The model or --resize, --crop, ... say what is done to the pictures, as for 'dualeval run'.
    """
    if out.suffix != ".pack":
        name = out.with_suffix(".pack")
        raise UsageError(f"--out {out}: a pack's name ends with .pack, as in --out {name}")
    check_no_rank(None, "'dualeval pack' starts its processes itself. Type it without a launcher before it.")
    job = whole_job_of(flags, "dualeval pack")
    if job.task not in _TASKS:
        raise UsageError(f"--task {job.task}: only pictures and masks are packed ({', '.join(_TASKS)}).")
    from dualeval.tools.pack.packing import pack_job

    click.echo(pack_job(job, out, workers))
