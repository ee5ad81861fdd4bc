"""Processes of launchers that tell a rank its number, but not in a way that dualeval reads."""

from __future__ import annotations

from collections.abc import Mapping

# By these MPI's own launchers tell a rank its number, beside variables of theirs or, as some do, alone.
_PMI = ("PMI_RANK", "PMIX_RANK")
_PMI_START = "Start with 'mpirun -np N dualeval run' or 'srun --ntasks-per-node N dualeval run'"
_TORCHRUN = "torchrun --nnodes $SKYPILOT_NUM_NODES --node-rank $SKYPILOT_NODE_RANK --nproc-per-node N"

# Of launchers whose ranks need other words to start: the variables with a process's number and with their
# number, which some do not tell; and what to type.
_UNREAD = (
    # MVAPICH2's mpirun_rsh; its mpiexec is Hydra, which is read.
    (
        *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        "Start with MVAPICH2's other launcher, 'mpiexec -n N dualeval run'",
    ),
    # IBM's Job Step Manager, under LSF.
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "jsrun -n N"),
    # Cray's older and newer launchers.
    ("ALPS_APP_PE", "", "aprun -n N"),
    ("PALS_RANKID", "", "mpiexec -n N"),
    # It starts the same command on all slots, each as a further task of a job whose script is task 1.
    (
        *("PBS_TASKNUM", ""),
        "pbsdsh tells no rank: start with 'mpirun -np N dualeval run' in the job's script",
    ),
    # Kubeflow's Trainer sets options of torchrun, and starts what is typed once in each pod.
    ("PET_NODE_RANK", "PET_NNODES", "Start with 'torchrun -m dualeval run' in each pod"),
    (
        *("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
        f'Start with \'{_TORCHRUN} --master-addr $(head -n1 <<< "$SKYPILOT_NODE_IPS") --master-port 29500 '
        "-m dualeval run'",
    ),
)


def unread_rank(environ: Mapping[str, str], known: str) -> str | None:
    """Say what was found where a process is one of several, by a launcher that is not read."""
    for rank, size, start in _UNREAD:
        is_alone = "1" in (environ.get(size), environ.get("PMI_SIZE"))
        if not environ.get(rank) or is_alone or (rank, environ[rank]) == ("PBS_TASKNUM", "1"):
            continue
        if start.endswith(" -n N"):
            # Variables that dualeval reads tell its ranks their places.
            told = f"RANK=${rank} WORLD_SIZE={f'${size}' if size else 'N'}"
            start = (
                "Type 'export MASTER_ADDR=FIRST_HOST MASTER_PORT=29500', FIRST_HOST being rank 0's, and "
                f"\"{start} bash -c '{told} exec dualeval run'\""
            )
        return _message(environ, (rank, size), known, start)
    if any(name in environ for name in _PMI) and environ.get("PMI_SIZE") != "1":
        return _message(environ, (), known, _PMI_START)
    return None


def _message(environ: Mapping[str, str], names: tuple[str, ...], known: str, start: str) -> str:
    names = (*names, *_PMI, "PMI_SIZE")
    found = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
    return (
        f"a launcher other than {known} seems to have started this process as one of several "
        f"(found: {found}). {start}, or pass --launcher none to run one process without them."
    )
