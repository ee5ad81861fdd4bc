"""``dualeval submit``: a job for Slurm."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from dualeval.cli.run import is_flag, run
from dualeval.cli.task_flags import flags_of, jobs_of
from dualeval.errors import DualevalError, LaunchError, UsageError
from dualeval.options.evaluation import cores_for
from dualeval.options.fields import check_fields, option
from dualeval.tools.submit.look import findings

# The file in slurm/, to which the folder beside this file is a link, for each backend.
SHIPPED = {"torch": "eval.sbatch", "horovod": "eval_horovod.sbatch"}
_TEMPLATES = Path(__file__).parent / "slurm"

# Seconds before the end of its time at which a job is warned. Ranks need 5 to save and end; and Slurm, which
# looks once in a while, may be up to 60 s early.
WARNING_S = 90

# Of sbatch, which submit sets by itself, or not at all.
_OWN_OPTIONS = (
    *("--output", "--open-mode", "--signal", "--requeue", "--no-requeue", "--export", "--parsable"),
    *("--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task", "--mem", "--time"),
    *("--partition", "--account", "--qos", "--array", "--job-name"),
)

# With these of sbatch a job may find other files than there are here and now.
_MOVE_FILES = ("--chdir", "--dependency", "--begin")

# Of a job's own variables, those by which the next job's sbatch still has to find the cluster.
_CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_JWT")
_OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_", "PALS_", "OMPI_COMM_WORLD_")


def _word(default: str | None, help: str, shown: str | None = None) -> Any:
    """A field that is one word for sbatch."""
    expected = (
        "one word that sbatch takes unchanged, without white space, control characters, quotes, \\ and #"
    )
    return option(
        default, help, shown=shown, fits=lambda word: word is None or _is_plain(str(word)), expected=expected
    )


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What a job asks Slurm for: the options of ``dualeval submit``; None leaves one to the cluster."""

    nodes: int = option(1, "Number of nodes.", least=1)
    ntasks_per_node: int | None = option(None, "Ranks on each node.", shown="one per GPU, else 1", least=1)
    gpus_per_node: int | None = option(None, "GPUs on each node.", shown="none", least=1)
    # With GPUs, what `--workers` behind the dashes needs.
    cpus_per_task: int | None = option(None, "Cores for each rank.", shown="the cluster's", least=1)
    mem: str | None = _word(None, "Memory on each node, such as 64G.", "the cluster's")
    time: str | None = _word(None, "Time limit, such as 2:00:00.", "the partition's")
    partition: str | None = _word(None, "Partition.", "the cluster's")
    account: str | None = _word(None, "Account to charge.", "yours")
    qos: str | None = _word(None, "Quality of service.", "yours")
    array: str | None = _word(None, "Job array, such as 0-9; %a in ARGS is the task's number.")
    # Without `array` all of them; with it those that it names.
    shares: int | None = option(None, "Evaluate in N shares, each a task of an array.", shown="none", least=1)
    job_name: str = _word("dualeval", "Name in Slurm's lists.")
    log: str = _word("dualeval-%j.log", "File for the output; %j is the job's number.")
    backend: str = option("torch", f"Backend: {', '.join(SHIPPED)}.", choices=tuple(SHIPPED))
    setup: tuple[str, ...] = option(
        (), "Shell line before the ranks, such as 'module load cuda'.", metavar="COMMAND", is_repeated=True
    )
    # The folder where sbatch was typed is mounted too; the image's dualeval is used.
    container_image: str | None = option(None, "Image in which Pyxis starts the ranks.", metavar="IMAGE")
    container_mounts: str | None = option(
        None, "Folders for the container, besides this one.", metavar="DIR:DIR"
    )
    sbatch_option: tuple[str, ...] = option(
        (), "Any other option of sbatch.", metavar="NAME=VALUE", is_repeated=True
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.shares is not None:
            object.__setattr__(self, "array", self.array or f"1-{self.shares}")
            numbers = map(int, re.findall(r"\d+", str(self.array).partition("%")[0]))
            if any(not 1 <= number <= self.shares for number in numbers):
                raise UsageError(f"--array {self.array}: expected numbers of shares, 1 to {self.shares}")
        if self.container_mounts is not None and self.container_image is None:
            raise UsageError("--container-mounts was given without --container-image IMAGE. Give both")
        for word in self.sbatch_option:
            if not _is_plain(word):
                raise UsageError(f"--sbatch-option {word!r}: expected one word, such as constraint=a100")
            # sbatch takes the beginning of an option for it.
            name = _long(word).partition("=")[0]
            if reserved := next((option for option in _OWN_OPTIONS if option.startswith(name)), None):
                raise UsageError(
                    f"--sbatch-option {word}: 'dualeval submit' sets {reserved} itself (see its --help)"
                )


# Options of 'dualeval run' that are the batch script's to give, and what to type in their place.
_SCRIPTS_OWN = {
    "nproc": "put --nodes and --ntasks-per-node before the --",
    "launcher": "the batch script starts the ranks with srun and says so",
    "backend": "put --backend before the --",
    "share": "put --shares N before the --",
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
@flags_of(SlurmJob, *SlurmJob.__dataclass_fields__)
@click.option("--dry-run", is_flag=True, help="Print the batch script and how to submit it; submit nothing.")
@click.option(
    "--check/--no-check",
    default=None,
    help="First do all that 'dualeval run --dry-run' does; or do not even look for paths and names.",
)
@click.argument("arguments", metavar="[-- ARGS]", nargs=-1, type=click.UNPROCESSED)
def submit(dry_run: bool, check: bool | None, arguments: tuple[str, ...], **asked: Any) -> None:
    """Submit a job to Slurm; ARGS are the options of 'dualeval run'.

    \b
    dualeval submit
    dualeval submit --nodes 2 --gpus-per-node 8 -- --model resnet18 --weights ckpt.pt --data /data/val
    """
    job = SlurmJob(**{name: value for name, value in asked.items() if value is not None})
    flags, workers = _look(job, arguments, check)
    has_cores = job.cpus_per_task or any(_long(word).startswith("--cpus-per-") for word in job.sbatch_option)
    if workers and job.gpus_per_node and not has_cores:
        job = replace(job, cpus_per_task=cores_for(workers))
        count = f"{job.cpus_per_task} cores a rank, by --workers {workers}"
        click.echo(f"asks for {count}; --cpus-per-task N asks for others", err=True)
    if job.shares is not None:
        if "%a" in str(flags["out"]):
            raise UsageError(f"--out {flags['out']}: all shares use one folder, and %a differs for each")
        arguments = (*arguments, "--share", f"%a/{job.shares}")
    folder = Path(sys.executable).parent
    if dry_run:
        click.echo(sbatch_text(job), nl=False)
        command = shlex.join(_sbatch_command("sbatch", job, "FILE", arguments))
        click.echo(f"PATH={shlex.quote(str(folder))}:$PATH {command}", err=True)
        return
    job_id = _submit(job, arguments, sbatch_environ(os.environ, folder))
    click.echo(f"job {job_id}\nlog {log_path(job, Path.cwd(), job_id)}")
    if job.shares is not None:
        out = flags["out"] or f"runs/job-{job_id}"
        click.echo(f"at the end: dualeval finish {shlex.quote(str(out))}")


def _look(job: SlurmJob, arguments: Sequence[str], check: bool | None) -> tuple[dict[str, Any], int | None]:
    """Read and check the options of ``dualeval run`` now: the queue may be an hour long.

    Returns them, and how many processes read for a rank.
    """
    if job.array is not None and job.shares is None:
        # The array's first task stands for all.
        arguments = [word.replace("%a", re.findall(r"(?!0\d)\d+|$", job.array)[0]) for word in arguments]
    try:
        flags = run.make_context("dualeval run", list(arguments)).params
    except click.UsageError as error:
        raise UsageError(f"'dualeval run {shlex.join(arguments)}': {error.format_message()}") from error
    for name, remedy in _SCRIPTS_OWN.items():
        if flags[name] is not None:
            raise LaunchError(f"--{name} {flags[name]} does not go with 'dualeval submit': {remedy}.")
    jobs = jobs_of(flags)
    if check:
        command = [sys.executable, "-m", "dualeval", "run", *arguments, "--launcher", "none", "--dry-run"]
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2).returncode  # the script's is 1
        if code:
            click.get_current_context().exit(code)
    elif check is None:
        others = [_long(word).partition("=")[0] for word in job.sbatch_option]
        moves = any(option.startswith(name) for option in _MOVE_FILES for name in others)
        wrong = []
        for problem, is_seen in findings(jobs, flags["reference"]):
            if is_seen and not (job.setup or job.container_image or moves):
                wrong.append(problem)
            else:
                click.echo(f"dualeval: note: {problem} The job may see more.", err=True)
        if wrong:
            wrong.append("If only the job's nodes have it, type --no-check before the --.")
            raise UsageError("\n".join(wrong))
    return flags, jobs[0][1].workers


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
    match = re.search(r"^(\d+)(;\S+)?\s*\Z", done.stdout, re.MULTILINE)
    if match is None:
        raise DualevalError(
            f"sbatch succeeded, but printed no job number: {done.stdout!r}. Look into 'squeue'."
        )
    return match[1]


# -- what is handed to sbatch --


def sbatch_text(job: SlurmJob) -> str:
    """Fill in a backend's batch script; the words that sbatch finds after its name go to ``dualeval run``."""
    text = (_TEMPLATES / SHIPPED[job.backend]).read_text("utf-8")
    head, _, rest = text.partition("\n#SBATCH ")
    body = rest.partition("\n\n")[2]
    if job.setup:
        body = "\n".join(["set -e", *job.setup, body])
    if job.container_image is not None:
        # The image has its own dualeval.
        before, _, rest = body.partition("# The environment that was active")
        start = '"${step[@]}" dualeval run'
        body = before + rest.partition("\nfi\n\n")[2].replace(start, f"{_container(job)}\n{start}")
    return "\n".join([head, *(f"#SBATCH {directive}" for directive in directives(job)), "", body])


def directives(job: SlurmJob) -> list[str]:
    """List what a job asks for as options of sbatch, a word each."""
    asked = {
        "job-name": job.job_name,
        "nodes": job.nodes,
        "ntasks-per-node": job.ntasks_per_node or job.gpus_per_node or 1,
        "gpus-per-node": job.gpus_per_node,
        "cpus-per-task": job.cpus_per_task,
        "mem": job.mem,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "array": job.array,
        "output": _log(job),
        "open-mode": "append",
        # To the steps: with "B:" it would go to the batch shell alone.
        "signal": f"USR2@{WARNING_S}",
    }
    # Asked for, as a cluster's default may be (JobRequeue) that a job does not come back.
    options = [f"--{name}={value}" for name, value in asked.items() if value is not None]
    return [*options, "--requeue", *map(_long, job.sbatch_option)]


def _long(word: str) -> str:
    """An option of sbatch with its dashes."""
    return f"--{word.lstrip('-')}"


def _container(job: SlurmJob) -> str:
    """What srun, with Pyxis, starts the ranks in."""
    mounts = '"$PWD:$PWD"' + (f",{shlex.quote(job.container_mounts)}" if job.container_mounts else "")
    image = f"--container-image={shlex.quote(job.container_image or '')}"
    return f'step+=({image} --container-mounts={mounts} --container-workdir="$PWD")'


def log_path(job: SlurmJob, folder: Path, job_id: str) -> Path:
    """Say where Slurm writes a job's log."""
    known = {"%j": job_id, "%A": job_id, "%x": job.job_name, "%%": "%"}
    return folder / re.sub(r"%[jAx%]", lambda match: known[match[0]], _log(job))


def _log(job: SlurmJob) -> str:
    """The log's name for sbatch; the tasks of an array are named as in Slurm's lists."""
    known = {"%j": "%j" if job.array is None else "%A_%a", "%%": "%%"}
    return re.sub(r"%[%j]", lambda match: known[match[0]], job.log)


def sbatch_environ(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Make the variables for sbatch, which hands them on to the job."""
    kept = {
        name: value
        for name, value in environ.items()
        if "SLURM_JOB_ID" not in environ or not name.startswith(_OF_A_JOB) or name in _CLUSTER_VARIABLES
    }
    return {**kept, "PATH": f"{folder}{os.pathsep}{environ.get('PATH', os.defpath)}"}


def _is_plain(word: str) -> bool:
    """Whether sbatch reads a word in an #SBATCH line as it stands: it cuts at # and takes quotes away."""
    return word != "" and word.isprintable() and not set(word) & set(" \"'\\#")
