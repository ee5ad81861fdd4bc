"""The mpirun of MPICH's process manager, Hydra, which Intel MPI and MVAPICH2 have too."""

from __future__ import annotations

from dualeval.launch.launchers import openmpi
from dualeval.launch.launchers.base import Launcher

LAUNCHER = Launcher(
    name="mpich",
    title="mpirun (MPICH)",
    page="mpirun",
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
    # PMI_RANK and PMI_SIZE alone are no trace of it: Slurm sets them for a step with --mpi=pmi2.
    trace=("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    start="mpirun -np N dualeval run",
    backends=openmpi.LAUNCHER.backends,
    starts_mpi=True,
    ways=openmpi.LAUNCHER.ways,
)
