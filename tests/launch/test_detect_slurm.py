"""Finding the World in a step of Slurm's, and what a job without a step is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualeval.errors import LaunchError
from dualeval.launch import detect, examine
from dualeval.launch.launchers.slurm import expand_hosts, expand_tasks
from dualeval.world import World
from dualeval.world.meetings.address import AtAddress
from tests.environments import read_variables, world_at
from tests.launch.test_detect import SRUN, TORCHRUN

# In an salloc shell and in a batch script there is a job and no step; a script is "process 0" of the job.
SALLOC = read_variables(
    "SLURM_JOB_ID=17 SLURM_JOBID=17 SLURM_JOB_NAME=interactive SLURM_JOB_NUM_NODES=2 "
    "SLURM_JOB_NODELIST=h[0-1] SLURM_JOB_CPUS_PER_NODE=3,1 SLURM_NNODES=2 SLURM_NODELIST=h[0-1] "
    "SLURM_TASKS_PER_NODE=3,1 SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_CLUSTER_NAME=big"
)
BATCH = SALLOC | read_variables(
    "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_GTIDS=0 SLURM_TASK_PID=174 SLURMD_NODENAME=h0"
)
# What --mpi=pmix and --mpi=pmi2 add to a step's.
PMIX = {"PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.17.3", "PMIX_HOSTNAME": "h1"}
PMI2 = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "11", "PMI_JOBID": "17.3"}


def test_srun() -> None:
    world = detect(SRUN)
    meeting = AtAddress(host="h0", port=16384 + 131 * 17 + 3, run_id="big.17.3.0")
    assert world == world_at("srun", 5, 8, 1, 4, 1, meeting=meeting, node_sizes=(4, 4))
    assert detect(SRUN, "srun") == world
    assert detect({**SRUN, "SLURM_RESTART_COUNT": "2"}).meeting == AtAddress(
        host="h0", port=16384 + 131 * 17 + 3, run_id="big.17.3.2", restarts=2
    )


def test_the_port_of_a_step_is_one_of_its_own() -> None:
    """Jobs and steps that follow each other do not meet at one port, and no client of the kernel's has it."""
    ports = {}
    for job in range(100_000, 100_050):
        for step in range(20):
            meeting = detect({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).meeting
            assert isinstance(meeting, AtAddress)
            ports[job, step] = meeting.port
    assert len(set(ports.values())) == len(ports)
    assert min(ports.values()) > 1024
    assert max(ports.values()) + 16 < 32768


@pytest.mark.parametrize(
    ("tasks", "nodes", "rank", "node", "local_size", "sizes"),
    [("2(x2),1", "rack[1-2]n3,n01-ib", 4, 2, 1, (2, 2, 1)), ("3,1(x2)", "h[0-2]", 3, 1, 1, (3, 1, 1))],
)
def test_tasks_of_uneven_nodes(
    tasks: str, nodes: str, rank: int, node: int, local_size: int, sizes: tuple[int, ...]
) -> None:
    step = read_variables(
        f"SLURM_PROCID={rank} SLURM_STEP_NUM_TASKS={sum(sizes)} SLURM_LOCALID={rank - sum(sizes[:node])} "
        f"'SLURM_STEP_TASKS_PER_NODE={tasks}' SLURM_NODEID={node} SLURM_STEP_NODELIST={nodes}"
    )
    world = detect({**SRUN, **step})
    found = (world.rank, world.node_rank, world.local_size, world.node_sizes)
    assert found == (rank, node, local_size, sizes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"SLURM_PROCID": "8"}, "SLURM_PROCID=8 is not below SLURM_STEP_NUM_TASKS=8"),
        ({"SLURM_LOCALID": "4"}, "SLURM_LOCALID=4 is not below SLURM_STEP_TASKS_PER_NODE=4"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2 is not below the number of nodes, 2"),
        ({"SLURM_STEP_NUM_TASKS": "9"}, "the tasks a node are 8 together, and not SLURM_STEP_NUM_TASKS=9"),
        ({"SLURM_STEP_NODELIST": "h[0-2]"}, "3 nodes are named, but tasks are given for 2"),
        ({"SLURM_STEP_NODELIST": "h[0-"}, "is not a list of hosts"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x"}, "is not a list of tasks per node"),
        ({"SLURM_STEP_ID": "batch"}, "SLURM_STEP_ID='batch' is not a whole number"),
        ({"SLURM_PROCID": "0"}, "with --distribution=arbitrary task 0 may run anywhere"),
        ({"SLURM_DISTRIBUTION": "arbitrary"}, "with --distribution=arbitrary task 0 may run anywhere"),
    ],
)
def test_contradictions_of_a_step(changes: dict[str, str], problem: str) -> None:
    with pytest.raises(LaunchError) as caught:
        detect({**SRUN, **changes})
    assert problem in str(caught.value)
    assert "srun --ntasks-per-node N dualeval run" in str(caught.value) or "arbitrary" in str(caught.value)


@pytest.mark.parametrize("environ", [SALLOC, BATCH, {**SRUN, **BATCH, "SLURM_STEP_ID": str(0xFFFFFFFA)}])
def test_a_job_without_a_step_is_one_process(environ: dict[str, str]) -> None:
    """And it is said, because whoever has asked for four tasks expects four."""
    found = examine(environ)
    assert found.world == World.alone()
    [note] = found.notes
    assert "job 17" in note
    assert "'srun dualeval run'" in note
    assert examine({**environ, "SLURM_NTASKS": "1"}).notes == ()


def test_pmi_of_another_step_is_no_way_into_mpi() -> None:
    """A shell that srun --mpi=pmix has opened hands its variables on to the steps that start there."""
    for other in ({**PMIX, "PMIX_NAMESPACE": "slurm.pmix.17.13"}, {**PMI2, "PMI_JOBID": "17.4"}):
        assert detect({**SRUN, **other}).mpi is False
    # Cray's has the job's number alone.
    assert detect({**SRUN, **PMI2, "PMI_JOBID": "17"}).mpi is True


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_LOCALID"])
def test_a_task_without_its_steps_variables(name: str) -> None:
    """A batch script is number 0; who is not was started beside others."""
    with pytest.raises(LaunchError, match="srun's variables are half set: SLURM_STEP_NUM_TASKS"):
        detect({**BATCH, name: "3"})
    assert detect({**BATCH, name: "3"}, "none") == World.alone()


def test_torchrun_inside_srun() -> None:
    """torchrun's agent is the task; the ranks are torchrun's."""
    agent = {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    found = examine({**agent, "SLURM_LOCALID": "0", **TORCHRUN})
    assert found.world == detect(TORCHRUN)
    assert found.notes == ()
    assert found.outer == ("srun started torchrun, as rank 1 of 2; torchrun's numbers count.",)


# -- slurm's short forms of hosts and tasks, against what ``scontrol show hostnames`` prints for them ---


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("h0", ["h0"]),
        ("h[0-1]", ["h0", "h1"]),
        ("rack[1-2]n[3-4]", ["rack1n3", "rack1n4", "rack2n3", "rack2n4"]),
        ("n[01-04,7]-ib", ["n01-ib", "n02-ib", "n03-ib", "n04-ib", "n7-ib"]),
        ("login,n[9-11],gpu-a[099-101].cluster", ["login", "n9", "n10", "n11"]
         + [f"gpu-a{n}.cluster" for n in ("099", "100", "101")]),
        ("a[1,3-4,08]", ["a1", "a3", "a4", "a08"]),
        ("r[1-2]-[1-2]x", ["r1-1x", "r1-2x", "r2-1x", "r2-2x"]),
    ],
)  # fmt: skip
def test_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text", ["", ",", "a,", ",a", "a,,b", "n[", "n[1-", "n]", "n[]", "n[a]", "n[1-2", "n[3-1]", "n[1--2]"]
)
def test_no_hosts(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a list of hosts|not a name of hosts|not a range of numbers"):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("text", "tasks"), [("1", (1,)), ("1(x2)", (1, 1)), ("2(x2),1", (2, 2, 1)), ("3,1(x2),16", (3, 1, 1, 16))]
)
def test_tasks(text: str, tasks: tuple[int, ...]) -> None:
    assert expand_tasks(text) == tasks


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2x2", "2(x2", "-1", "1,,2", "1.5"])
def test_no_tasks(text: str) -> None:
    with pytest.raises(ValueError, match="not a list of tasks per node"):
        expand_tasks(text)


@given(st.lists(st.text("abz-.019", min_size=1, max_size=5), min_size=1, max_size=5))
def test_names_without_brackets_stay(names: list[str]) -> None:
    assert expand_hosts(",".join(names)) == names


@given(st.text("n[]-,012", max_size=12))
def test_any_text_is_hosts_or_a_value_error(text: str) -> None:
    try:
        hosts = expand_hosts(text)
    except ValueError:
        return
    assert hosts
    assert not any(set("[],") & set(host) for host in hosts)
