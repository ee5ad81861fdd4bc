"""``dualeval submit``: hand a job to Slurm."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from dualeval.cli.grouped import Words
from dualeval.cli.run import is_flag, run
from dualeval.cli.task_flags import jobs_of
from dualeval.errors import DualevalError, LaunchError, UsageError
from dualeval.tools.submit.sbatch import SHIPPED, SlurmJob, directives, log_path, sbatch_environ, sbatch_text

# Options of 'dualeval run' that are the batch script's to give, and what to type in their place.
_SCRIPTS_OWN = {
    "nproc": "put --nodes and --ntasks-per-node before the --",
    "launcher": "the batch script starts the ranks with srun and says so",
    "backend": "put --backend before the --",
}


class _Submit(click.Command):
    """A command that knows where the options of ``dualeval run`` belong."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(context, args)
        except click.NoSuchOption as error:
            if not is_flag(error.option_name):
                raise
            raise UsageError(
                f"{error.option_name} is an option of 'dualeval run': it belongs after two dashes, "
                f"as in 'dualeval submit -- {error.option_name} ...'"
            ) from error


@click.command(cls=_Submit)
@click.option("--nodes", type=int, default=1, show_default=True, help="Number of nodes.")
@click.option("--ntasks-per-node", type=int, help="Ranks on each node.  [default: one per GPU, else 1]")
@click.option("--gpus-per-node", type=int, help="GPUs on each node.  [default: none]")
@click.option("--cpus-per-task", type=int, help="Cores for each rank.  [default: the cluster's]")
@click.option("--mem", help="Memory on each node, such as 64G.  [default: the cluster's]")
@click.option("--time", help="Time limit, such as 2:00:00.  [default: the partition's]")
@click.option("--partition", help="Partition.  [default: the cluster's]")
@click.option("--account", help="Account to charge.  [default: yours]")
@click.option("--qos", help="Quality of service.  [default: yours]")
@click.option("--array", help="Job array, such as 0-9; %a in ARGS is a task's number.")
@click.option("--job-name", default="dualeval", show_default=True, help="Name in Slurm's lists.")
@click.option(
    "--log", default="dualeval-%j.log", show_default=True, help="File for the output; %j is the job's number."
)
@click.option(
    "--backend",
    type=Words(tuple(SHIPPED), "NAME"),
    default="torch",
    show_default=True,
    help=f"Backend: {', '.join(SHIPPED)}.",
)
@click.option(
    "--setup",
    multiple=True,
    metavar="COMMAND",
    help="Shell line before the ranks, such as 'module load cuda'.",
)
@click.option("--container-image", metavar="IMAGE", help="Image in which Pyxis starts the ranks.")
@click.option("--container-mounts", metavar="DIR:DIR", help="Folders for the container, besides this one.")
@click.option(
    "--sbatch-option", multiple=True, metavar="NAME=VALUE", help="Any other option of sbatch; repeatable."
)
@click.option("--dry-run", is_flag=True, help="Print the batch script and how to submit it; submit nothing.")
@click.argument("arguments", metavar="[-- ARGS]", nargs=-1, type=click.UNPROCESSED)
def submit(dry_run: bool, arguments: tuple[str, ...], **asked: Any) -> None:
    """Submit a job to Slurm; ARGS are the options of 'dualeval run'.

    \b
    dualeval submit
    dualeval submit --nodes 2 --gpus-per-node 8 -- --model resnet18 --weights ckpt.pt --data /data/val
    """
    job = SlurmJob(**asked)
    _check_arguments(arguments)
    folder = Path(sys.executable).parent
    if dry_run:
        click.echo(sbatch_text(job), nl=False)
        command = shlex.join(_sbatch_command("sbatch", job, "FILE", arguments))
        click.echo(f"PATH={shlex.quote(str(folder))}:$PATH {command}", err=True)
        return
    job_id = _submit(job, arguments, sbatch_environ(os.environ, folder))
    click.echo(f"job {job_id}\nlog {log_path(job, Path.cwd(), job_id)}")


def _check_arguments(arguments: Sequence[str]) -> None:
    """Read the options of ``dualeval run`` now: the queue may be an hour long."""
    try:
        flags = run.make_context("dualeval run", list(arguments)).params
    except click.UsageError as error:
        raise UsageError(f"'dualeval run {shlex.join(arguments)}': {error.format_message()}") from error
    for name, remedy in _SCRIPTS_OWN.items():
        if flags[name] is not None:
            raise LaunchError(f"--{name} {flags[name]} does not go with 'dualeval submit': {remedy}.")
    jobs_of(flags)


def _sbatch_command(sbatch: str, job: SlurmJob, script: str, arguments: Sequence[str]) -> list[str]:
    # The directives stand in the script too, but there the user's SBATCH_ variables would win over them.
    # --export: what SBATCH_EXPORT says may keep the PATH from the job.
    return [sbatch, "--parsable", "--export=ALL", *directives(job), script, *arguments]


def _submit(job: SlurmJob, arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """Hand a job to sbatch; returns the number that Slurm gave it."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise LaunchError(
            "There is no sbatch on the PATH. Type this on a login node of a Slurm cluster, or start without "
            "Slurm: 'dualeval run --nproc N' or 'torchrun --nproc-per-node N -m dualeval run'."
        )
    if shutil.which("dualeval", path=environ["PATH"]) is None:
        raise LaunchError(
            f"The job would find no command 'dualeval': there is none in {Path(sys.executable).parent}, nor "
            "on the PATH. Type 'pip install -e .' in the checkout first."
        )
    parent = Path(job.log).parent
    if "%" not in str(parent) and not parent.is_dir():
        raise UsageError(
            f"--log {job.log}: there is no folder {parent}, and Slurm would write no log. "
            f"Type 'mkdir -p {parent}' first."
        )
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".sbatch") as script:
        script.write(sbatch_text(job))
        script.flush()
        command = _sbatch_command(sbatch, job, script.name, arguments)
        done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise UsageError(f"sbatch refused the job (exit code {done.returncode}): {done.stderr.strip()}")
    click.echo(done.stderr, nl=False, err=True)
    # "4711", or "4711;cluster"; a site's wrapper may talk before it.
    found = re.search(r"^(\d+)(;\S+)?\s*\Z", done.stdout, re.MULTILINE)
    if found is None:
        raise DualevalError(
            f"sbatch ended well, but printed no job's number: {done.stdout!r}. Look into 'squeue'."
        )
    return found[1]
