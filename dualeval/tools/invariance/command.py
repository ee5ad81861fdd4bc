"""``dualeval doctor --invariance``: what other batch shapes do to the bits of a job's rows."""

from __future__ import annotations

import os
from typing import Any

import click

from dualeval.cli.options import grouped
from dualeval.cli.task_flags import TaskCommand, config_flag, job_flags, task_flags, whole_job_of
from dualeval.errors import LaunchError
from dualeval.launch import examine
from dualeval.options.evaluation import DATA, LAUNCH, MODEL, RUN
from dualeval.options.job import COMMON

_FLAG = "--invariance"


@click.command(name=f"doctor {_FLAG}", cls=TaskCommand, groups=(MODEL, DATA), last=(RUN, LAUNCH))
@task_flags
@job_flags("limit", "sample", "seed")
@config_flag
@job_flags("batch_size", "precision", "keep_batchnorm_fp32", "layout", "optimize", "on_error")
@grouped(_FLAG, group=RUN, is_flag=True, expose_value=False, help="This diagnosis.")
@job_flags("device")
def invariance(**flags: Any) -> None:
    """Compute a job's first batch in other batch shapes: which rows get other bits, and which modules do it.

    \b
    dualeval doctor --invariance
    dualeval doctor --invariance --model resnet18 --weights ckpt.pt --data /data/imagenet/val

    Type it with the job's options, as 'dualeval run' takes them; --precision and --layout show another way to
    compute it. One process. Exit code 0, whatever is found.
    """
    place = examine(os.environ, None).place
    if place.size > 1:
        raise LaunchError(
            f"'dualeval doctor {_FLAG}' is one process, but {place.launcher} has started {place.size}: every "
            "rank would compute the same. Type it by itself."
        )
    job = whole_job_of({**dict.fromkeys(COMMON), **flags, "metric": ()}, "dualeval doctor --invariance")
    from dualeval.engine.values.options import RunOptions
    from dualeval.tools.invariance.diagnosis import diagnose, print_invariance
    from dualeval.world.devices import device_here

    device = device_here(job.device, 1, place)
    if fetch := getattr(job.options, "fetch", None):
        fetch()
    diagnosis = diagnose(
        job.make_task(),
        RunOptions(**job.run_options),
        device,
        lambda sentence: click.echo(f"dualeval: note: {sentence}", err=True),
    )
    print_invariance(diagnosis)
