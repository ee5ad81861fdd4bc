"""What is handed to Slurm: the text of a batch script, as a pure function of what the job asks for.

``slurm/eval.sbatch`` and ``slurm/eval_horovod.sbatch`` are this text for the defaults, one a backend;
``dualeval submit`` hands over the text for its options.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dualeval.errors import UsageError

# The file in slurm/ that holds the text for the defaults, for each backend.
SHIPPED = {"torch": "eval.sbatch", "horovod": "eval_horovod.sbatch"}
_LIBRARIES = {"torch": "torch.distributed", "horovod": "Horovod"}

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

_FIND_DUALEVAL = """\
# The environment that was active when sbatch was typed; else .venv in the folder where it was typed.
if ! type -P dualeval > /dev/null; then
  folder=${SLURM_SUBMIT_DIR:-$PWD}/.venv/bin
  if [[ ! -x $folder/dualeval ]]; then
    echo "There is no dualeval on the PATH of $(hostname), and none in $folder." \\
      "Activate its environment before you type sbatch, or type sbatch in the folder that holds .venv." >&2
    exit 2
  fi
  export PATH=$folder:$PATH
fi

""".splitlines()

_SET_UP = """\
# From Slurm 22.05 on, srun does not take sbatch's --cpus-per-task by itself.
unset SRUN_CPUS_PER_TASK
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
  export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
fi

# The job's number. One task of an array may have the number of the whole array: ARRAY_TASK names it alone.
job=${SLURM_JOB_ID:-}
if [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then
  job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi

# The output folder: a job that is queued again resumes there, and status.json records how the ranks ended. It
# is that of the last --out, as 'dualeval run' reads it; else one with the job's number, which stays the same.
out=
config=
device=
option=
mixed=
words=()
for word in "$@"; do
  if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
    # As in the name of Slurm's log: all tasks get the same options.
    word=${word//%a/$SLURM_ARRAY_TASK_ID}
  fi
  if [[ -z $option && $word == --fresh && ${SLURM_RESTART_COUNT:-0} != 0 ]]; then
    # Only for the first start: now it would remove the finished work of that one.
    continue
  fi
  words+=("$word")
  if [[ -n $option ]]; then
    value=$word
  elif [[ $word == --out || $word == --config || $word == --device ]]; then
    option=$word
    continue
  else
    option=${word%%=*}
    value=${word#*=}
  fi
  case $option in
    --out) out=$value ;;
    --config) config=$value ;;
    --device) device=$value ;;
    --mix-machines) mixed=yes ;;
  esac
  option=
done
if [[ -n $option ]]; then
  echo "$option needs a value." >&2
  exit 2
fi
if [[ -z $out ]]; then
  out=runs/job-${job:?"there is no job; type 'sbatch' before this file, or --out FOLDER after it"}
  words+=(--out "$out")
fi

# If this job has GPUs, a node without a working one is an error, and not a run on its CPU.
gpus=${SLURM_GPUS_ON_NODE:-${SLURM_JOB_GPUS:+some}}  # the latter has numbers: 0 is GPU 0
gpus=${gpus:-${SLURM_GPUS_PER_NODE:-${SLURM_GPUS:-0}}}
if [[ $gpus != 0 && -z $device && -z $mixed ]] &&
  ! { [[ -n $config ]] && grep -qsE "^[[:space:]]*[\\"']?device[\\"']?[[:space:]]*=" "$config"; }; then
  words+=(--device cuda)
fi

step=(srun --export=ALL --kill-on-bad-exit=1)
if ((${SLURM_HET_SIZE:-1} > 1)); then
  # By itself srun starts the first component of a heterogeneous job alone.
  step+=("--het-group=0-$((SLURM_HET_SIZE - 1))")
fi

# Which status.json is there: one that is older than the ranks does not describe them.
written() { stat --format='%i %y' "$out/status.json" 2> /dev/null || true; }
# It has one key per line.
says() { grep -qsE "^  \\"$1\\": $2,?$" "$out/status.json"; }
before=$(written)

# --export=ALL: the PATH from above reaches the ranks after 'sbatch --export=NONE' too. --launcher: variables
# of torchrun may be left over in the shell. No trap: SIGTERM ends this shell, and Slurm then ends the ranks
# as scancel does, with time to save. If the shell forwarded SIGTERM to srun, srun would kill them at once.
code=0
""".splitlines()

_AFTERWARDS = """\
# Only the warning queues a job again: scancel (SIGTERM) means an end, and a failure would repeat. If nothing
# was finished before the warning, the next start would not get further.
warned=
if [[ $(written) == "$before" ]]; then
  # 140: it came before Python took signals.
  if ((code == 75 || code == 128 + 12)); then warned=early; fi
elif says state '"stopped"' && says signal '"SIGUSR2"'; then
  if says chunks_saved '[1-9][0-9]*'; then warned=late; else warned=early; fi
fi

if [[ $warned == early ]]; then
  echo "dualeval: a signal came before anything was finished. If a rank failed (see above), srun sent it" \\
    "to the others. If it was Slurm's warning before the end, type sbatch with more --time," \\
    "or with a later warning (--signal=USR2@30)." >&2
elif [[ $warned == late ]]; then
  code=75
  # Before: Slurm ends this script at once, or soon.
  echo "dualeval: Slurm is asked to queue job $job again, to resume in $out." >&2
  if scontrol requeue "$job"; then
    sleep 60
  else
    echo "dualeval: Slurm does not queue this job again. To resume, type the same line with --out $out." >&2
  fi
fi
exit "$code"
""".splitlines()


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What a job asks Slurm for. Every field is also an option of ``dualeval submit``."""

    # What the ranks talk over, one of `SHIPPED`.
    backend: str = "torch"
    nodes: int = 1
    # Ranks on each; None is one a GPU, and one where no GPU is asked for.
    ntasks_per_node: int | None = None
    # GPUs on each; None asks for none.
    gpus_per_node: int | None = None
    # Cores for each rank; None leaves it to the cluster, which mostly gives one.
    cpus_per_task: int | None = None
    # Memory on each node ("64G"); None leaves it to the cluster, as do the next four.
    mem: str | None = None
    # Most time that it may take ("2:00:00").
    time: str | None = None
    # Where it waits.
    partition: str | None = None
    # Whom it is charged to.
    account: str | None = None
    # Quality of service.
    qos: str | None = None
    # Numbers of the tasks of a job array ("0-9", "1,3,5%2"): one evaluation each; None is no array.
    array: str | None = None
    # The name in Slurm's lists.
    job_name: str = "dualeval"
    # File for the output of all ranks; Slurm puts the job's number for %j, in an array that of the array and
    # the task.
    log: str = "dualeval-%j.log"
    # Lines of shell before anything else, such as "module load cuda".
    setup: tuple[str, ...] = ()
    # What Pyxis starts the ranks in, with the folder where sbatch was typed; its dualeval is used. None for
    # no container.
    container_image: str | None = None
    # Other folders that the container gets ("/data:/data").
    container_mounts: str | None = None
    # Any other options of sbatch, as "constraint=a100" or "exclusive".
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
    """Write the batch script of a job; the words that sbatch finds after its name go to ``dualeval run``."""
    file = f"slurm/{SHIPPED[job.backend]}"
    lines = [
        "#!/usr/bin/env bash",
        f"# Evaluates a model with dualeval under Slurm, over {_LIBRARIES[job.backend]}: one rank per task.",
        "#",
        f"#   sbatch {file}",
        f"#   sbatch {file} --model resnet18 --weights ckpt.pt --data /data/val --out runs/r18",
        f"#   sbatch --nodes 2 --ntasks-per-node 4 --cpus-per-task 8 {file}",
        f"#   sbatch --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 {file}",
        f"#   sbatch --array 0-9 {file} --weights step-%a.pt --model resnet18 --data /data/val",
        "#",
        "# Options before the file's name go to sbatch and override the #SBATCH lines; options after it go",
        "# to 'dualeval run'. Relative paths start in the folder where sbatch was typed. Without options it",
        "# evaluates the 10,000 embedded images. With GPUs, ask for as many tasks as GPUs. In the options of",
        "# an array %a is the task's number.",
        "#",
        f"# {WARNING_S} s before its time is up Slurm warns the ranks: they save what is finished and exit.",
        "# Then the job is queued again and resumes in its output folder; so it does if a node is lost.",
        "#",
        *(f"#SBATCH {directive}" for directive in directives(job)),
        "",
        *(["set -e", *job.setup] if job.setup else []),
        "set -euo pipefail",
        "",
        *(_FIND_DUALEVAL if job.container_image is None else []),
        *_SET_UP,
        *_container(job),
        f'"${{step[@]}}" dualeval run --launcher srun --backend {job.backend} "${{words[@]}}" || code=$?',
        "",
        *_AFTERWARDS,
        "",
    ]
    return "\n".join(lines)


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


def _container(job: SlurmJob) -> list[str]:
    """What srun, with Pyxis, starts the ranks in."""
    if job.container_image is None:
        return []
    mounts = '"$PWD:$PWD"' + (f",{shlex.quote(job.container_mounts)}" if job.container_mounts else "")
    image = f"--container-image={shlex.quote(job.container_image)}"
    return [f'step+=({image} --container-mounts={mounts} --container-workdir="$PWD")']


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
