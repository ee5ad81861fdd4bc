"""The variables by which each launcher tells a process its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A variable of a launcher's that is set.

    Attributes:
        name: its name.
        value: its value.
        meaning: which part of a World it tells, as "rank"; empty where it serves otherwise.
    """

    name: str
    value: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Variables:
    """The names that one launcher uses.

    Attributes:
        launcher: its name in ``launch.detect.PROBES``.
        rank: variable with this process's number; likewise ``size``, ``local_rank`` and ``local_size``, which
            is empty where it tells none.
        others: further variables that it always sets, and that are needed.
        optional: those of the four above that may be missing: the hosts of all ranks tell then.
        mark: a variable that it alone sets; None where the names above are its own already.
        start: what to type to start with it.
    """

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    others: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    mark: str | None = None
    start: str

    @property
    def ranks(self) -> tuple[str, ...]:
        """The four that every launcher has."""
        return (self.rank, self.size, self.local_rank, self.local_size)

    @property
    def needed(self) -> tuple[str, ...]:
        """Those without which a process cannot be placed."""
        return tuple(name for name in (*self.ranks, *self.others) if name and name not in self.optional)

    @property
    def all(self) -> tuple[str, ...]:
        """Those that are needed, the optional ones, and the mark."""
        return (*self.needed, *self.optional, *((self.mark,) if self.mark else ()))

    def found(self, environ: Mapping[str, str]) -> tuple[Variable, ...]:
        """Those that are set, with what they are read for."""
        meanings = dict(zip(self.ranks, ("rank", "size", "local rank", "local size"), strict=True))
        return tuple(
            Variable(name=name, value=environ[name], meaning=meanings.get(name, ""))
            for name in self.all
            if name in environ
        )


TORCHRUN = Variables(
    launcher="torchrun",
    rank="RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    others=("GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    mark="TORCHELASTIC_RUN_ID",
    start="torchrun --nproc-per-node N -m dualeval run",
)
# As horovodrun sets them where the ranks meet over gloo. Over MPI it starts mpirun, and the ranks are that's.
HOROVODRUN = Variables(
    launcher="horovodrun",
    rank="HOROVOD_RANK",
    size="HOROVOD_SIZE",
    local_rank="HOROVOD_LOCAL_RANK",
    local_size="HOROVOD_LOCAL_SIZE",
    others=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    start="horovodrun -np N dualeval run",
)
OPEN_MPI = Variables(
    launcher="openmpi",
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    start="mpirun -np N dualeval run",
)
# MPICH's process manager, Hydra, which Intel MPI has too. PMI_RANK and PMI_SIZE alone are no trace of it:
# Slurm sets them for a step with --mpi=pmi2.
MPICH = Variables(
    launcher="mpich",
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
    start="mpirun -np N dualeval run",
)
# The step's variables: those of the job tell what was asked for, not what was started.
SRUN = Variables(
    launcher="srun",
    rank="SLURM_PROCID",
    size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    local_size="SLURM_STEP_TASKS_PER_NODE",
    others=("SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID"),
    start="srun --ntasks-per-node N dualeval run",
)
# Those of the task; Flux's own PMI sets PMI_RANK, PMI_SIZE and PMI_FD besides. It tells no number of tasks on
# the node.
FLUX = Variables(
    launcher="flux",
    rank="FLUX_TASK_RANK",
    size="FLUX_JOB_SIZE",
    local_rank="FLUX_TASK_LOCAL_ID",
    local_size="",
    others=("FLUX_JOB_ID",),
    start="flux run -n N dualeval run",
)
# What torch.distributed reads (init_method "env://"). Many set it: PyTorchJob, AzureML, DeepSpeed, Composer,
# Ray Train, own scripts. Only some tell the place on the node.
ENV = Variables(
    launcher="env",
    rank="RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    others=("MASTER_ADDR", "MASTER_PORT"),
    optional=("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    start="RANK=0 WORLD_SIZE=N MASTER_ADDR=FIRST_HOST MASTER_PORT=29500 dualeval run",
)
ALL = (TORCHRUN, HOROVODRUN, FLUX, OPEN_MPI, MPICH, SRUN, ENV)
