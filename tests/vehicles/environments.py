"""Environments of real launchers, and what dualeval is to make of them.

Each is one rank's, less what no launcher's numbers depend on. Recorded: by starting that launcher here, or
on the cluster of namespaces (``tests/cluster/hosts.py``) under Slurm 22.05; jobs and ports are as they
happened to be. The others are written from what the launcher's own documents or sources say that it sets,
named in each; nobody has run them here.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dualeval.world import World
from dualeval.world.meetings import MeetingAtStore
from dualeval.world.meetings.address import AtAddress, AtMaster, AtTorchrun
from dualeval.world.meetings.mpi import OverMpi
from dualeval.world.meetings.served import AtHorovodrun, OverPmi


@dataclass(frozen=True)
class Environment:
    """What one process of a launcher finds."""

    name: str  # how it was started
    source: str  # where the variables are from
    text: str  # the variables, as a shell would take them
    expected: World | str  # the World, or words of the error

    @property
    def variables(self) -> dict[str, str]:
        """The variables by name."""
        return read_variables(self.text)


def read_variables(text: str) -> dict[str, str]:
    """Variables by name, of a text as a shell takes it."""
    return dict(word.partition("=")[::2] for word in shlex.split(text))


def world_at(
    launcher: str,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    node_rank: int | None = None,
    **more: Any,
) -> World:
    """Make a World of its numbers, in that order."""
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node_rank,
        launcher=launcher,
        **more,
    )


def srun(
    *numbers: int, job: int, step: int = 0, sizes: tuple[int, ...], first: str = "h0", **more: Any
) -> World:
    """Make that of a step of the cluster of namespaces."""
    return world_at(
        "srun",
        *numbers,
        meeting=AtAddress(host=first, port=16384 + 131 * job + step, run_id=f"dualeval.{job}.{step}.0"),
        node_sizes=sizes,
        **more,
    )


def env(rank: int, size: int, local_rank: int = 0, *, master: tuple[str, int]) -> World:
    """Make that of plain variables: which ranks share a node, nobody has said."""
    return world_at("env", rank, size, local_rank, 1, meeting=AtMaster(address=master), placed=False)


ALONE = World.alone()
# Each: how it was started, where the variables are from, the variables as a shell would take them, and words
# of the error that comes of them, where they make no World. What is not in ``_WORLDS`` either is one process
# alone.
_TEXT = r"""
mpirun of Open MPI 4.1 | recorded here
OMPI_COMM_WORLD_LOCAL_RANK=2 OMPI_COMM_WORLD_LOCAL_SIZE=3 OMPI_COMM_WORLD_NODE_RANK=2 OMPI_COMM_WORLD_RANK=2
OMPI_COMM_WORLD_SIZE=3 OMPI_UNIVERSE_SIZE=2 PMIX_HOSTNAME=vm PMIX_NAMESPACE=257949697 PMIX_RANK=2

mpirun of Open MPI 5.0 | recorded here
OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=3 OMPI_COMM_WORLD_NODE_RANK=1 OMPI_COMM_WORLD_RANK=1
OMPI_COMM_WORLD_SIZE=3 OMPI_UNIVERSE_SIZE=2 PMIX_HOSTNAME=vm PMIX_NAMESPACE=prterun-vm-25527@1 PMIX_RANK=1

mpirun of MPICH 5.0 | recorded here
MPI_LOCALNRANKS=3 MPI_LOCALRANKID=1 PMI_FD=11 PMI_HOSTNAME=vm PMI_RANK=1 PMI_SIZE=3

horovodrun --gloo | recorded here
HOROVOD_CONTROLLER=gloo HOROVOD_CPU_OPERATIONS=gloo HOROVOD_CROSS_RANK=0 HOROVOD_CROSS_SIZE=1
HOROVOD_GLOO_IFACE=lo HOROVOD_GLOO_RENDEZVOUS_ADDR=127.0.0.1 HOROVOD_GLOO_RENDEZVOUS_PORT=13938
HOROVOD_HOSTNAME=localhost HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2 HOROVOD_RANK=1 HOROVOD_SIZE=2

torchrun | recorded here
GROUP_RANK=0 GROUP_WORLD_SIZE=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=40603
RANK=1 TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_RUN_ID=a05c029a-9f44-49e5-8e91-e6644d1b340c
TORCHELASTIC_USE_AGENT_STORE=True WORLD_SIZE=2

one torchrun a node under srun | recorded here
GROUP_RANK=1 GROUP_WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h0 MASTER_PORT=39725 RANK=2
SLURMD_NODENAME=h1 SLURM_CLUSTER_NAME=dualeval SLURM_GTIDS=1 SLURM_JOB_ID=14 SLURM_JOB_NODELIST=h[0-1]
SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_NTASKS=2 SLURM_PROCID=1 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=h[0-1]
SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2) TORCHELASTIC_RESTART_COUNT=0
TORCHELASTIC_RUN_ID=7 TORCHELASTIC_USE_AGENT_STORE=True WORLD_SIZE=4

srun, uneven | recorded here
SLURMD_NODENAME=h1 SLURM_CLUSTER_NAME=dualeval SLURM_GTIDS=2 SLURM_JOB_ID=1 SLURM_JOB_NODELIST=h[0-1]
SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_NTASKS=3 SLURM_PROCID=2 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=h[0-1]
SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=2,1

srun with GPUs | recorded here
SLURMD_NODENAME=h0 SLURM_CLUSTER_NAME=dualeval SLURM_GPUS_ON_NODE=2 SLURM_GTIDS=0,1 SLURM_JOB_ID=2
SLURM_JOB_NODELIST=h0 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_NTASKS=2 SLURM_PROCID=1 SLURM_STEP_ID=0
SLURM_STEP_NODELIST=h0 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2

srun --mpi=pmix | recorded here
PMIX_HOSTNAME=h1 PMIX_NAMESPACE=slurm.pmix.3.0 PMIX_RANK=3 SLURMD_NODENAME=h1 SLURM_CLUSTER_NAME=dualeval
SLURM_GTIDS=2,3 SLURM_JOB_ID=3 SLURM_JOB_NODELIST=h[0-1] SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NTASKS=4
SLURM_PROCID=3 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=h[0-1] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=4
SLURM_STEP_TASKS_PER_NODE=2(x2)

srun --mpi=pmi2 | recorded here
PMI_FD=11 PMI_JOBID=4.0 PMI_RANK=2 PMI_SIZE=4 SLURMD_NODENAME=h1 SLURM_CLUSTER_NAME=dualeval SLURM_GTIDS=2,3
SLURM_JOB_ID=4 SLURM_JOB_NODELIST=h[0-1] SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_NTASKS=4 SLURM_PROCID=2
SLURM_STEP_ID=0 SLURM_STEP_NODELIST=h[0-1] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=4
SLURM_STEP_TASKS_PER_NODE=2(x2)

srun --distribution=arbitrary | recorded here
SLURMD_NODENAME=h0 SLURM_CLUSTER_NAME=dualeval SLURM_DISTRIBUTION=arbitrary SLURM_GTIDS=1,2 SLURM_JOB_ID=15
SLURM_JOB_NODELIST=h[0-1] SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=3 SLURM_PROCID=1 SLURM_STEP_ID=0
SLURM_STEP_NODELIST=h[0-1] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=2,1
-> with --distribution=arbitrary task 0 may run anywhere

a batch script | recorded here
SLURMD_NODENAME=h0 SLURM_CLUSTER_NAME=dualeval SLURM_GTIDS=0 SLURM_JOB_ID=8 SLURM_JOB_NODELIST=h[0-1]
SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=4 SLURM_PROCID=0

an salloc shell | recorded here
SLURM_CLUSTER_NAME=dualeval SLURM_JOB_ID=6 SLURM_JOB_NODELIST=h[0-1] SLURM_NTASKS=4

srun of both components, rank 0 | recorded here
SLURMD_NODENAME=h1 SLURM_CLUSTER_NAME=dualeval SLURM_DISTRIBUTION=cyclic SLURM_GTIDS=0,1 SLURM_HET_SIZE=2
SLURM_JOB_ID=11 SLURM_JOB_NODELIST=h[0-1] SLURM_JOB_NODELIST_HET_GROUP_0=h1
SLURM_JOB_NODELIST_HET_GROUP_1=h0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=3 SLURM_PROCID=0
SLURM_STEP_ID=0 SLURM_STEP_NODELIST=h[0-1] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=3
SLURM_STEP_TASKS_PER_NODE=1,2

srun of both components, rank 2 | recorded here
SLURMD_NODENAME=h0 SLURM_CLUSTER_NAME=dualeval SLURM_DISTRIBUTION=cyclic SLURM_GTIDS=2 SLURM_HET_SIZE=2
SLURM_JOB_ID=11 SLURM_JOB_NODELIST=h[0-1] SLURM_JOB_NODELIST_HET_GROUP_0=h1
SLURM_JOB_NODELIST_HET_GROUP_1=h0 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_NTASKS=3 SLURM_PROCID=2
SLURM_STEP_ID=0 SLURM_STEP_NODELIST=h[0-1] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=3
SLURM_STEP_TASKS_PER_NODE=1,2

a heterogeneous step in one allocation | recorded here
SLURMD_NODENAME=h0 SLURM_CLUSTER_NAME=dualeval SLURM_DISTRIBUTION=block SLURM_GTIDS=1,2 SLURM_JOB_ID=13
SLURM_JOB_NODELIST=h[0-1] SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_NTASKS=3 SLURM_PROCID=1 SLURM_STEP_ID=0
SLURM_STEP_NODELIST=h[0-1] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=2,1
-> node 1 of this step is h0, and lists h0, h1: a heterogeneous step.*'srun --het-group=0,1 dualeval run'

no launcher | recorded here
HOME=/root OMP_NUM_THREADS=1 SLURM_CONF=/etc/slurm.conf

flux run | flux-core's flux-environment(7)
FLUX_JOB_ID=ƒ26oXq7 FLUX_JOB_SIZE=8 FLUX_JOB_NNODES=2 FLUX_TASK_RANK=5 FLUX_TASK_LOCAL_ID=1
FLUX_KVS_NAMESPACE=job-1234 FLUX_URI=local:///run/flux/local PMI_RANK=5 PMI_SIZE=8 PMI_FD=14
FLUX_PMI_LIBRARY_PATH=/usr/lib/flux/libpmi.so

flux run of one task | flux-core's flux-environment(7)
FLUX_JOB_ID=ƒ26oXq7 FLUX_JOB_SIZE=1 FLUX_TASK_RANK=0 FLUX_TASK_LOCAL_ID=0 PMI_RANK=0 PMI_SIZE=1 PMI_FD=14

flux run -o pmi=none | flux-core's flux-environment(7)
FLUX_JOB_ID=ƒ26oXq7 FLUX_JOB_SIZE=8 FLUX_JOB_NNODES=2 FLUX_TASK_RANK=5 FLUX_TASK_LOCAL_ID=1
-> no PMI \(PMI_FD is missing\).*--env=MASTER_ADDR=FIRST_HOST

flux run -o pmi=none with an address | flux-core's flux-environment(7)
FLUX_JOB_ID=ƒ26oXq7 FLUX_JOB_SIZE=8 FLUX_TASK_RANK=5 FLUX_TASK_LOCAL_ID=1 MASTER_ADDR=n1 MASTER_PORT=29500

flux run in a Flux that mpirun has started
| flux-core's flux-environment(7), and Open MPI's variables of the shell
FLUX_JOB_ID=ƒ26oXq7 FLUX_JOB_SIZE=8 FLUX_TASK_RANK=5 FLUX_TASK_LOCAL_ID=1 PMI_RANK=5 PMI_SIZE=8 PMI_FD=14
OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1
-> openmpi started this process as rank 0 of 2, and the variables of flux say rank 5 of 8

flux run in a Flux that srun has started, before Flux removed Slurm's variables
| flux-core's issue 5206, and the variables of srun as recorded
FLUX_JOB_ID=ƒ26oXq7 FLUX_JOB_SIZE=8 FLUX_TASK_RANK=5 FLUX_TASK_LOCAL_ID=1 PMI_RANK=5 PMI_SIZE=8 PMI_FD=14
SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE='1(x2)' SLURM_NODEID=0
SLURM_STEP_NODELIST=h[0-1] SLURM_JOB_ID=3 SLURM_STEP_ID=0

a worker of a PyTorchJob | Kubeflow training-operator, pkg/controller.v1/pytorch/envvar.go
PYTHONUNBUFFERED=1 MASTER_PORT=23456 MASTER_ADDR=evaluate-master-0 WORLD_SIZE=3 RANK=2 PET_MASTER_PORT=23456
PET_MASTER_ADDR=evaluate-master-0 PET_NPROC_PER_NODE=auto PET_NODE_RANK=2 PET_NNODES=3

a PyTorchJob of a master alone | Kubeflow training-operator, pkg/controller.v1/pytorch/envvar.go
MASTER_PORT=23456 MASTER_ADDR=localhost WORLD_SIZE=1 RANK=0

a PyTorchJob with nprocPerNode, without torchrun
| Kubeflow training-operator, pkg/controller.v1/pytorch/envvar.go
MASTER_PORT=23456 MASTER_ADDR=evaluate-master-0 WORLD_SIZE=16 RANK=1 PET_NPROC_PER_NODE=8 PET_NODE_RANK=1
PET_NNODES=2
-> this pod is to start 8 ranks .*'torchrun -m dualeval run', which reads the PET_ variables

a TrainJob of Kubeflow's Trainer, without torchrun | Kubeflow trainer, pkg/constants/constants.go
PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_NODE_RANK=0 PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29500
-> one of several \(found: PET_NODE_RANK=0, PET_NNODES=2\).*'torchrun -m dualeval run' in each pod

a TrainJob of one node | Kubeflow trainer, pkg/constants/constants.go
PET_NNODES=1 PET_NPROC_PER_NODE=1 PET_NODE_RANK=0 PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29500

AzureML, distribution PyTorch | AzureML, how-to-train-distributed-gpu
WORLD_SIZE=8 RANK=5 LOCAL_RANK=1 NODE_RANK=1 MASTER_ADDR=10.0.0.4 MASTER_PORT=6105
AZ_BATCHAI_JOB_NAME=evaluate AZUREML_RUN_ID=evaluate_1

DeepSpeed's launcher | DeepSpeed, deepspeed/launcher/launch.py
CUDA_VISIBLE_DEVICES=0,1,2,3 MASTER_ADDR=worker-0 MASTER_PORT=29500 WORLD_SIZE=8 CROSS_RANK=1 CROSS_SIZE=2
LOCAL_SIZE=4 RANK=6 LOCAL_RANK=2

Composer's launcher | Composer, composer/cli/launcher.py
RANK=6 WORLD_SIZE=8 LOCAL_RANK=2 LOCAL_WORLD_SIZE=4 NODE_RANK=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=29400
PYTHONUNBUFFERED=1 NCCL_ASYNC_ERROR_HANDLING=1

a worker of Ray Train | Ray, python/ray/train/torch/config.py
MASTER_ADDR=10.0.0.7 MASTER_PORT=41231 LOCAL_RANK=0 RANK=3 LOCAL_WORLD_SIZE=1 WORLD_SIZE=4 NODE_RANK=3
ACCELERATE_TORCH_DEVICE=cuda:0

a script's own ranks under srun, set from Slurm's
| scripts that export RANK=$SLURM_PROCID, and srun's variables as recorded
RANK=2 LOCAL_RANK=0 WORLD_SIZE=3 MASTER_ADDR=h0 MASTER_PORT=29500 SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=3
SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_NODEID=1 SLURM_STEP_NODELIST=h[0-1] SLURM_JOB_ID=1
SLURM_STEP_ID=0 SLURMD_NODENAME=h1 SLURM_CLUSTER_NAME=dualeval

variables of the shell under srun | the same, exported before srun
RANK=0 WORLD_SIZE=3 MASTER_ADDR=h0 MASTER_PORT=29500 SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=3 SLURM_LOCALID=0
SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_NODEID=1 SLURM_STEP_NODELIST=h[0-1] SLURM_JOB_ID=1 SLURM_STEP_ID=0
SLURMD_NODENAME=h1 SLURM_CLUSTER_NAME=dualeval
-> srun started this process as rank 2 of 3, and the variables of env, .* say rank 0 of 3

RANK and WORLD_SIZE alone | a shell
RANK=3 WORLD_SIZE=8
-> MASTER_ADDR, MASTER_PORT are missing.*set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT

Lightning's own processes | Lightning Fabric, subprocess_script.py: no RANK
MASTER_ADDR=127.0.0.1 MASTER_PORT=41231 NODE_RANK=0 LOCAL_RANK=1 WORLD_SIZE=2
-> RANK, LOCAL_WORLD_SIZE, GROUP_RANK are missing

mpirun_rsh of MVAPICH2 | MVAPICH2, mpispawn.c
MV2_COMM_WORLD_RANK=0 MV2_COMM_WORLD_SIZE=4 MV2_COMM_WORLD_LOCAL_RANK=0 MV2_COMM_WORLD_LOCAL_SIZE=2 PMI_ID=0
PMI_PORT=n1:4711
-> found: MV2_COMM_WORLD_RANK=0, MV2_COMM_WORLD_SIZE=4\).*'mpiexec -n N dualeval run'

jsrun | test programs of Open MPI that read it
JSM_NAMESPACE_RANK=0 JSM_NAMESPACE_SIZE=12 JSM_NAMESPACE_LOCAL_RANK=0 JSM_NAMESPACE_LOCAL_SIZE=6 PMIX_RANK=0
PMIX_NAMESPACE=1
-> JSM_NAMESPACE_RANK=0.*jsrun -n N bash -c 'RANK=\$JSM_NAMESPACE_RANK WORLD_SIZE=\$JSM_

aprun | Cray's aprun(1)
ALPS_APP_PE=0 ALPS_APP_ID=4711 ALPS_APP_DEPTH=1
-> ALPS_APP_PE=0\).*aprun -n N bash -c 'RANK=\$ALPS_APP_PE WORLD_SIZE=N exec

mpiexec of PALS | HPE's PALS, as scripts of its sites read it
PALS_RANKID=3 PALS_LOCAL_RANKID=1 PALS_NODEID=0 PMI_RANK=3 PMI_SIZE=8
-> PALS_RANKID=3, PMI_RANK=3, PMI_SIZE=8.*RANK=.PALS_RANKID WORLD_SIZE=N exec

pbsdsh | OpenPBS, pbsdsh(1): each is a further task of the job
PBS_JOBID=4711.server PBS_TASKNUM=2 PBS_NODENUM=1 PBS_VNODENUM=1 PBS_ENVIRONMENT=PBS_BATCH
-> PBS_TASKNUM=2\). pbsdsh tells no rank: start with 'mpirun -np N dualeval run'

the script of a PBS job | OpenPBS, as recorded by its users
PBS_JOBID=4711.server PBS_TASKNUM=1 PBS_NODENUM=0 PBS_ENVIRONMENT=PBS_BATCH

prun of PRRTE | PMIx's standard
PMIX_RANK=0 PMIX_NAMESPACE=prun.1
-> found: PMIX_RANK=0\). Start with 'mpirun -np N dualeval run' or 'srun

a launcher that nobody knows | PMI-1, as several have it
PMI_RANK=3 PMI_SIZE=8
-> a launcher other than torchrun, .* seems to have .*PMI_RANK=3

SkyPilot on two nodes | SkyPilot, environment variables
SKYPILOT_NODE_RANK=0 SKYPILOT_NUM_NODES=2 SKYPILOT_NUM_GPUS_PER_NODE=8
-> SKYPILOT_NODE_RANK=0, SKYPILOT_NUM_NODES=2\).*torchrun --nnodes \$SKYPILOT_NUM_NODES
"""
_WORLDS = {
    "mpirun of Open MPI 4.1": world_at("openmpi", 2, 3, 2, 3, mpi=True, meeting=OverMpi()),
    "mpirun of Open MPI 5.0": world_at("openmpi", 1, 3, 1, 3, mpi=True, meeting=OverMpi()),
    "mpirun of MPICH 5.0": world_at("mpich", 1, 3, 1, 3, mpi=True, meeting=OverMpi()),
    "horovodrun --gloo": world_at(
        "horovodrun", 1, 2, 1, 2, meeting=AtHorovodrun(address=("127.0.0.1", 13938))
    ),
    "torchrun": world_at(
        *("torchrun", 1, 2, 1, 2, 0),
        meeting=AtTorchrun(address=("localhost", 40603), launch_id="a05c029a-9f44-49e5-8e91-e6644d1b340c"),
    ),
    "one torchrun a node under srun": world_at(
        "torchrun", 2, 4, 0, 2, 1, meeting=AtTorchrun(address=("h0", 39725), launch_id="7")
    ),
    "srun, uneven": srun(2, 3, 0, 1, 1, job=1, sizes=(2, 1)),
    "srun with GPUs": srun(1, 2, 1, 2, 0, job=2, sizes=(2,), promised_gpus="SLURM_GPUS_ON_NODE=2"),
    "srun --mpi=pmix": srun(3, 4, 1, 2, 1, job=3, sizes=(2, 2), mpi=True),
    "srun --mpi=pmi2": srun(2, 4, 0, 2, 1, job=4, sizes=(2, 2), mpi=True),
    "srun of both components, rank 0": srun(0, 3, 0, 2, 0, job=11, sizes=(2, 1), first="h1"),
    "srun of both components, rank 2": srun(2, 3, 0, 1, 1, job=11, sizes=(2, 1), first="h1"),
    "flux run": world_at("flux", 5, 8, 1, 1, placed=False, meeting=OverPmi(descriptor=14)),
    "flux run of one task": world_at("flux", 0, 1, 0, 1, 0, node_sizes=(1,), meeting=MeetingAtStore()),
    "flux run -o pmi=none with an address": world_at(
        "flux", 5, 8, 1, 1, placed=False, meeting=AtAddress(host="n1", port=29500, run_id="flux.ƒ26oXq7")
    ),
    "flux run in a Flux that srun has started, before Flux removed Slurm's variables": world_at(
        "flux", 5, 8, 1, 1, placed=False, meeting=OverPmi(descriptor=14)
    ),
    "a worker of a PyTorchJob": env(2, 3, master=("evaluate-master-0", 23456)),
    "a PyTorchJob of a master alone": world_at(
        "env", 0, 1, 0, 1, 0, node_sizes=(1,), meeting=MeetingAtStore()
    ),
    "AzureML, distribution PyTorch": env(5, 8, 1, master=("10.0.0.4", 6105)),
    "DeepSpeed's launcher": env(6, 8, 2, master=("worker-0", 29500)),
    "Composer's launcher": env(6, 8, 2, master=("10.0.0.1", 29400)),
    "a worker of Ray Train": env(3, 4, master=("10.0.0.7", 41231)),
    "a script's own ranks under srun, set from Slurm's": srun(2, 3, 0, 1, 1, job=1, sizes=(2, 1)),
}


def _read() -> Iterator[Environment]:
    for block in _TEXT.strip().split("\n\n"):
        name, _, rest = block.partition("|")
        source, _, rest = rest.partition("\n")
        text, _, error = rest.partition("-> ")
        expected = " ".join(error.split("\n")) or _WORLDS.get(name.strip(), ALONE)
        yield Environment(name.strip(), source.strip(), text, expected)


ENVIRONMENTS = [*_read()]
