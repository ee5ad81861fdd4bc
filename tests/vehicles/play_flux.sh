#!/usr/bin/env bash
# Gives a rank of MPICH's mpirun the variables that Flux would: Hydra serves the same PMI-1 as Flux.
set -euo pipefail
export FLUX_TASK_RANK=$PMI_RANK FLUX_JOB_SIZE=$PMI_SIZE FLUX_TASK_LOCAL_ID=$MPI_LOCALRANKID
export FLUX_JOB_ID=ƒ26oXq7 FLUX_JOB_NNODES=1 FLUX_URI=local:///run/flux/local
unset MPI_LOCALRANKID MPI_LOCALNRANKS
exec "$@"
