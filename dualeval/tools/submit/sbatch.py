"""What is handed to Slurm: ``slurm/eval.sbatch`` or ``eval_horovod.sbatch``, with what a job asks for."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dualeval.errors import UsageError

# The file in slurm/, to which the folder beside this file is a link, for each backend.
SHIPPED = {"torch": "eval.sbatch", "horovod": "eval_horovod.sbatch"}
_TEMPLATES = Path(__file__).parent / "slurm"

# Seconds before the end of its time at which a job is warned. Ranks need 5 to save and end; and Slurm, which
# looks once in a while, may be up to 60 s early.
WARNING_S = 90

_COUNTS = ("nodes", "ntasks_per_node", "gpus_per_node", "cpus_per_task")
_WORDS = ("job_name", "mem", "time", "partition", "account", "qos", "array", "log")
# Of sbatch, which submit sets by options of its own, or not at all.
_OWN_OPTIONS = {"--" + name.replace("_", "-") for name in (*_COUNTS, *_WORDS)} | {
    *("--output", "--open-mode", "--signal", "--requeue", "--no-requeue", "--export", "--parsable")
}

# Of a job's own variables, those by which the next job's sbatch still has to find the cluster.
_CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_JWT")
_OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_", "PALS_", "OMPI_COMM_WORLD_")


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What a job asks Slurm for: the options of ``dualeval submit``; None leaves one to the cluster."""

    # One of `SHIPPED`.
    backend: str = "torch"
    nodes: int = 1
    # None is one a GPU, and one where no GPU is asked for.
    ntasks_per_node: int | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    # One evaluation for each task of the array.
    array: str | None = None
    job_name: str = "dualeval"
    # For %j Slurm puts the job's number, in an array that of the array and the task.
    log: str = "dualeval-%j.log"
    setup: tuple[str, ...] = ()
    # For Pyxis, with the folder where sbatch was typed; the image's dualeval is used.
    container_image: str | None = None
    container_mounts: str | None = None
    sbatch_option: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.backend not in SHIPPED:
            raise UsageError(
                f"--backend {self.backend!r}: a batch script has one of: {', '.join(SHIPPED)}. "
                "For MPI write your own, with 'srun --mpi=pmix dualeval run --backend mpi'."
            )
        for name in _COUNTS:
            count = getattr(self, name)
            if count is not None and count < 1:
                raise UsageError(f"{_option(name)} {count}: expected a whole number of at least 1")
        if self.container_mounts is not None and self.container_image is None:
            raise UsageError("--container-mounts was given without --container-image IMAGE. Give both")
        given = [(name, getattr(self, name)) for name in _WORDS]
        for name, word in [*given, *(("sbatch_option", word) for word in self.sbatch_option)]:
            if word is not None and not _is_plain(word):
                raise UsageError(
                    f"{_option(name)} {word!r}: expected one word that sbatch takes as it stands, without "
                    "white space, control characters, quotes, \\ and #"
                )
        for word in self.sbatch_option:
            # sbatch takes the beginning of an option for it.
            name = _long(word).partition("=")[0]
            if own := next((option for option in sorted(_OWN_OPTIONS) if option.startswith(name)), None):
                raise UsageError(
                    f"--sbatch-option {word}: 'dualeval submit' sets {own} itself (see its --help)"
                )


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
    given = [f"--{name}={value}" for name, value in asked.items() if value is not None]
    return [*given, "--requeue", *map(_long, job.sbatch_option)]


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
    return folder / re.sub(r"%[jAx%]", lambda found: known[found[0]], _log(job))


def _log(job: SlurmJob) -> str:
    """The log's name for sbatch; the tasks of an array are named as in Slurm's lists."""
    return job.log if job.array is None else re.sub(r"%[%j]", _of_task, job.log)


def _of_task(found: re.Match[str]) -> str:
    return "%A_%a" if found[0] == "%j" else found[0]


def sbatch_environ(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Make the variables for sbatch, which hands them on to the job."""
    kept = {
        name: value
        for name, value in environ.items()
        if "SLURM_JOB_ID" not in environ or not name.startswith(_OF_A_JOB) or name in _CLUSTER_VARIABLES
    }
    return {**kept, "PATH": f"{folder}{os.pathsep}{environ.get('PATH', os.defpath)}"}


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_plain(word: str) -> bool:
    """Whether sbatch reads a word in an #SBATCH line as it stands: it cuts at # and takes quotes away."""
    return word != "" and word.isprintable() and not set(word) & set(" \"'\\#")
