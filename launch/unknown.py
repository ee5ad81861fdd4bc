"""Processes of launchers that tell a rank its number, but not in a way that dualeval reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# By these MPI's own launchers tell a rank its number, beside variables of theirs or, as some do, alone.
_PMI = ("PMI_RANK", "PMIX_RANK")
_PMI_START = "Start with 'mpirun -np N dualeval run' or 'srun --ntasks-per-node N dualeval run'"


@dataclass(frozen=True, kw_only=True)
class _Unread:
    """A launcher whose ranks need other words to start."""

    # Its variable with a process's number.
    rank: str
    # Its variable with their number; empty where it tells none.
    size: str = ""
    # What to type.
    start: str
    # The highest number of a process that is not one of several.
    first: int = -1


def _through_env(start: str, rank: str, size: str) -> str:
    """The command that tells ranks their place in variables that dualeval reads."""
    told = f"RANK=${rank} WORLD_SIZE={f'${size}' if size else 'N'}"
    return (
        f"Type 'export MASTER_ADDR=FIRST_HOST MASTER_PORT=29500', FIRST_HOST being rank 0's, and "
        f"\"{start} bash -c '{told} exec dualeval run'\""
    )


_UNREAD = (
    # MVAPICH2's mpirun_rsh; its mpiexec is Hydra, which is read.
    _Unread(
        rank="MV2_COMM_WORLD_RANK",
        size="MV2_COMM_WORLD_SIZE",
        start="Start with MVAPICH2's other launcher, 'mpiexec -n N dualeval run'",
    ),
    # IBM's Job Step Manager, under LSF.
    _Unread(
        rank="JSM_NAMESPACE_RANK",
        size="JSM_NAMESPACE_SIZE",
        start=_through_env("jsrun -n N", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ),
    # Cray's older and newer launchers.
    _Unread(rank="ALPS_APP_PE", start=_through_env("aprun -n N", "ALPS_APP_PE", "")),
    _Unread(rank="PALS_RANKID", size="PMI_SIZE", start=_through_env("mpiexec -n N", "PALS_RANKID", "")),
    # pbsdsh starts the same command on all slots, each as a further task of a job whose script is task 1.
    _Unread(
        rank="PBS_TASKNUM",
        first=1,
        start="pbsdsh tells no rank: start with 'mpirun -np N dualeval run' in the job's script",
    ),
    # Kubeflow's Trainer sets options of torchrun, and starts what is typed once in each pod.
    _Unread(
        rank="PET_NODE_RANK", size="PET_NNODES", start="Start with 'torchrun -m dualeval run' in each pod"
    ),
    _Unread(
        rank="SKYPILOT_NODE_RANK",
        size="SKYPILOT_NUM_NODES",
        start="Start with 'torchrun --nnodes $SKYPILOT_NUM_NODES --node-rank $SKYPILOT_NODE_RANK "
        '--nproc-per-node N --master-addr $(head -n1 <<< "$SKYPILOT_NODE_IPS") --master-port 29500 '
        "-m dualeval run'",
    ),
)


def unread_rank(environ: Mapping[str, str], known: str) -> str | None:
    """Say what was found where a process is one of several, by a launcher that is not read."""
    for launcher in _UNREAD:
        number = environ.get(launcher.rank, "")
        if not number or environ.get(launcher.size) == "1":
            continue
        if number.isdecimal() and int(number) <= launcher.first:
            continue
        return _message(environ, (launcher.rank, launcher.size, *_PMI), known, launcher.start)
    if any(name in environ for name in _PMI) and environ.get("PMI_SIZE") != "1":
        return _message(environ, (*_PMI, "PMI_SIZE"), known, _PMI_START)
    return None


def _message(environ: Mapping[str, str], names: tuple[str, ...], known: str, start: str) -> str:
    found = ", ".join(f"{name}={environ[name]}" for name in dict.fromkeys(names) if name in environ)
    return (
        f"a launcher other than {known} seems to have started this process as one of several "
        f"(found: {found}). {start}, or pass --launcher none to run one process without them."
    )
