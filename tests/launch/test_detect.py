"""Finding the World in the environment: what is whole, half set, contradictory, or left over."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualeval.errors import EXIT_USAGE, LaunchError, UsageError
from dualeval.launch import detect, examine
from dualeval.launch.launchers import LAUNCHERS
from dualeval.launch.launchers.base import Variable
from dualeval.launch.launchers.srun import expand_hosts, expand_tasks
from dualeval.world import World
from dualeval.world.meetings.address import AtAddress
from tests.conftest import Launch
from tests.vehicles.environments import ENVIRONMENTS, Environment, read_variables, world_at

TORCHRUN = read_variables(
    "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 MASTER_ADDR=node0 MASTER_PORT=29500 "
    "TORCHELASTIC_RUN_ID=none"
)
HOROVODRUN = read_variables(
    "HOROVOD_RANK=5 HOROVOD_SIZE=8 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=4 "
    "HOROVOD_GLOO_RENDEZVOUS_ADDR=10.0.0.1 HOROVOD_GLOO_RENDEZVOUS_PORT=29500 HOROVOD_CROSS_RANK=1 "
    "HOROVOD_CROSS_SIZE=2 HOROVOD_HOSTNAME=node1 HOROVOD_CONTROLLER=gloo HOROVOD_CPU_OPERATIONS=gloo "
    "HOROVOD_GLOO_IFACE=eth0"
)
# As mpirun of Open MPI 4.1 and 5.0 sets them; NODE_RANK is the rank among those on the node.
OPEN_MPI = read_variables(
    "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_COMM_WORLD_NODE_RANK=1 OMPI_UNIVERSE_SIZE=8 PMIX_RANK=5"
)
# As mpirun of MPICH 5.0 sets them.
MPICH = read_variables(
    "PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4 PMI_FD=9 PMI_HOSTNAME=node1"
)
# As srun of Slurm 22.05 sets them for a step of 8 tasks on two nodes; the job had asked for 8 and 2 as well.
SRUN = read_variables(
    "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID=1 SLURM_STEP_TASKS_PER_NODE=4(x2) SLURM_NODEID=1 "
    "SLURM_STEP_NODELIST=h[0-1] SLURM_JOB_ID=17 SLURM_STEP_ID=3 SLURMD_NODENAME=h1 SLURM_CLUSTER_NAME=big "
    "SLURM_CPUS_ON_NODE=4 SLURM_GTIDS=4,5,6,7 SLURM_JOBID=17 SLURM_JOB_CPUS_PER_NODE=4(x2) "
    "SLURM_JOB_NODELIST=h[0-1] SLURM_JOB_NUM_NODES=2 SLURM_NNODES=2 SLURM_NODELIST=h[0-1] SLURM_NTASKS=8 "
    "SLURM_NTASKS_PER_NODE=4 SLURM_STEPID=3 SLURM_STEP_NUM_NODES=2 SLURM_TASKS_PER_NODE=4(x2) "
    "SLURM_TASK_PID=18"
)
FLUX = read_variables("FLUX_TASK_RANK=5 FLUX_JOB_SIZE=8 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_ID=f4 PMI_FD=9")
# By launcher: what it sets, how many of these it needs, of which the first four place a process.
RECORDED = {"horovodrun": (HOROVODRUN, 6), "openmpi": (OPEN_MPI, 4), "mpich": (MPICH, 4), "srun": (SRUN, 8)}
MASTER = {"MASTER_ADDR", "MASTER_PORT"}
MARK = "TORCHELASTIC_RUN_ID"


def test_torchs_older_launcher_sets_what_torchrun_sets(launch: Launch) -> None:
    """It also passes --local-rank, which stands before 'run' there."""
    command = [sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node=2", "-m", "dualeval"]
    finished = launch([*command, "run", "--dry-run", "--limit", "17"]).ok()
    assert json.loads(finished.stdout)["limit"] == 17


@pytest.mark.parametrize("launcher", RECORDED)
@pytest.mark.parametrize(
    "stale",
    [
        {"RANK": "3", "WORLD_SIZE": "8"},
        {"WORLD_SIZE": "4"},
        {"LOCAL_RANK": "0", "MASTER_ADDR": "h7", "MASTER_PORT": "1234"},
    ],
)
def test_left_over_variables_give_way_to_a_launcher(launcher: str, stale: dict[str, str]) -> None:
    whole, _ = RECORDED[launcher]
    found = examine({**whole, **stale})
    assert found.world == detect(whole)
    [note] = found.notes
    assert all(f"{name}={value}" in note for name, value in stale.items())
    assert f"unset {' '.join(name for name in TORCHRUN if name in stale)}'" in note
    # With torchrun's mark they are torchrun's, and something is wrong.
    with pytest.raises(LaunchError, match="half set"):
        detect({**whole, **stale, MARK: "none"})


def test_torchruns_variables_without_its_mark_count_if_none_says_else() -> None:
    """It counts where nobody says else; where another launcher does, a person has to choose."""
    unmarked = {name: value for name, value in TORCHRUN.items() if name != MARK}
    assert detect({**SRUN, **unmarked}).launcher == "torchrun"
    exported = {**unmarked, "RANK": "1"}
    with pytest.raises(
        LaunchError, match=r"srun started this process as rank 5 of 8, and .* rank 1 of 8"
    ) as caught:
        detect({**SRUN, **exported})
    assert "'unset RANK WORLD_SIZE" in str(caught.value)
    assert "--launcher srun" in str(caught.value)
    assert detect({**SRUN, **exported, MARK: "none"}).launcher == "torchrun"
    assert detect({**SRUN, **exported}, "srun") == detect(SRUN)


def test_what_was_found_is_listed() -> None:
    found = examine({**SRUN, "RANK": "3", "HOME": "/root"})
    assert list(found.variables) == [name for name in LAUNCHERS if name != "none"]
    assert found.variables["torchrun"] == (Variable(name="RANK", value="3", meaning="rank"),)
    assert {variable.name: variable.value for variable in found.variables["srun"]} == {
        name: SRUN[name] for name in list(SRUN)[:8]
    }
    assert [variable.meaning for variable in found.variables["srun"]][:5] == [
        *("rank", "size", "local rank", "local size"),
        "",
    ]
    wrong = examine({"RANK": "3"})
    assert wrong.world is None
    assert isinstance(wrong.error, LaunchError)
    with pytest.raises(LaunchError, match="half set"):
        _ = wrong.place


@pytest.mark.parametrize("launcher", RECORDED)
def test_half_set_variables_of_a_launcher_are_refused(launcher: str) -> None:
    environ, needed = RECORDED[launcher]
    for missing in list(environ)[:needed]:
        # Of MPICH's, the two PMI variables are Slurm's as well, and no trace.
        found = {name: value for name, value in environ.items() if name != missing}
        with pytest.raises(LaunchError, match=f"{launcher}'s variables are half set: {missing} is") as caught:
            detect(found)
        assert "--launcher none" in str(caught.value)
        assert "dualeval run" in str(caught.value)


WRONG = [
    ("RANK", "8", "RANK=8 is not below WORLD_SIZE=8"),
    ("RANK", "-1", "RANK='-1' is not a whole number"),
    ("RANK", "", "RANK='' is not a whole number"),
    ("WORLD_SIZE", "2.0", "WORLD_SIZE='2.0' is not a whole number"),
    ("WORLD_SIZE", "0", "RANK=5 is not below WORLD_SIZE=0"),
    ("LOCAL_RANK", "4", "LOCAL_RANK=4 is not below LOCAL_WORLD_SIZE=4"),
    ("LOCAL_RANK", "٣", "is not a whole number"),
    ("LOCAL_WORLD_SIZE", "9", "LOCAL_WORLD_SIZE=9 is above WORLD_SIZE=8"),
    ("GROUP_RANK", "one", "GROUP_RANK='one' is not a whole number"),
    ("MASTER_ADDR", "", "MASTER_ADDR is empty"),
    ("MASTER_PORT", "0", "MASTER_PORT=0 is not a port"),
    ("MASTER_PORT", "65536", "MASTER_PORT=65536 is not a port"),
]


def wrong_of(environ: Mapping[str, str]) -> list[tuple[Mapping[str, str], str, str, str]]:
    rank, size, local_rank, local_size, *others = environ
    return [
        (environ, rank, "8", f"{rank}=8 is not below {size}=8"),
        (environ, rank, "x", f"{rank}='x' is not a whole number"),
        (environ, local_rank, "4", f"{local_rank}=4 is not below {local_size}=4"),
        (environ, local_size, "9", f"{local_size}=9 is above {size}=8"),
        *((environ, name, "", name) for name in others[:2] if environ is HOROVODRUN),
    ]


@pytest.mark.parametrize(
    ("environ", "name", "value", "problem"),
    [
        *((TORCHRUN, *wrong) for wrong in WRONG),
        *(wrong for environ in (HOROVODRUN, OPEN_MPI, MPICH) for wrong in wrong_of(environ)),
    ],
)
def test_contradictory_variables_are_refused(
    environ: Mapping[str, str], name: str, value: str, problem: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        detect({**environ, name: value})
    assert problem in str(caught.value)
    assert f"{name}={value}" in str(caught.value), "the message shows what was found"
    assert "--launcher none" in str(caught.value)


def test_settings_of_a_library_are_no_trace_of_a_launcher() -> None:
    """A user's settings of a library, and what Slurm sets for a step with PMI, place no process."""
    for environ in (
        {"HOROVOD_CYCLE_TIME": "5", "HOROVOD_GLOO_IFACE": "eth0"},
        {"OMPI_MCA_btl": "tcp,self", "OMPI_ALLOW_RUN_AS_ROOT": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"SLURM_CPU_BIND": "none", "SLURM_CONF": "/etc/slurm.conf", "SLURM_NTASKS": "4"},
    ):
        assert detect(environ) == World.alone()


def test_the_innermost_launcher_counts() -> None:
    assert detect({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}).meeting.restarts == 2
    outer = {**SRUN, **OPEN_MPI, **MPICH}
    assert detect({**outer, **HOROVODRUN, **TORCHRUN}).launcher == "torchrun"
    assert detect({**outer, **HOROVODRUN}).launcher == "horovodrun"
    assert detect({**outer, **HOROVODRUN, **TORCHRUN}, "mpich").launcher == "mpich"


def test_elastic_horovodrun_is_refused() -> None:
    with pytest.raises(LaunchError, match="elastic mode") as caught:
        detect({**HOROVODRUN, "HOROVOD_ELASTIC": "1"})
    assert "horovodrun -np N dualeval run" in str(caught.value)


def test_all_of_torchruns_variables_make_a_rank_and_a_part_is_refused() -> None:
    """All of them make a rank, with or without the mark; an address makes none; else it is an error.

    Without the mark those that torch.distributed reads are enough, whoever has set them.
    """
    needed = set(TORCHRUN) - {MARK}
    env = {"RANK", "WORLD_SIZE", *MASTER}
    for count in range(len(TORCHRUN) + 1):
        for names in combinations(TORCHRUN, count):
            environ = {name: TORCHRUN[name] for name in names}
            if set(names) >= needed:
                assert detect(environ).launcher == "torchrun"
            elif MARK not in names and set(names) >= env:
                assert detect(environ).launcher == "env"
            elif set(names) <= MASTER:
                assert detect(environ) == World.alone()
            else:
                with pytest.raises(LaunchError) as caught:
                    detect(environ)
                found, missing = set(names), needed - set(names)
                assert all(f"{name}={TORCHRUN[name]}" in str(caught.value) for name in found)
                assert all(name in str(caught.value).partition("(found")[0] for name in missing)
                assert "torchrun --nproc-per-node" in str(caught.value)
                assert "--launcher none" in str(caught.value)
            assert detect(environ, "none") == World.alone()


def test_left_over_variables_are_refused_with_the_line_that_unsets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without torchrun's mark the shell is to blame, and the message has the line that cleans it."""
    for name in os.environ.keys() & TORCHRUN.keys():
        monkeypatch.delenv(name)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(LaunchError, match=r"left over or another tool's.*'unset RANK'"):
        detect(os.environ)
    with pytest.raises(LaunchError, match=r"left over or another tool's.*'unset RANK WORLD_SIZE'"):
        detect({"WORLD_SIZE": "8", "RANK": "3"})
    with pytest.raises(LaunchError, match="env's variables are half set: MASTER_PORT is missing"):
        detect({"WORLD_SIZE": "8", "RANK": "3", "MASTER_ADDR": "h0"}, "env")
    with pytest.raises(LaunchError, match="torchrun started this process") as caught:
        detect({"RANK": "3", MARK: "none"})
    assert "unset" not in str(caught.value)


def test_the_launcher_option_decides() -> None:
    assert detect(TORCHRUN, "none") == World.alone()
    assert detect(TORCHRUN, "torchrun") == detect(TORCHRUN)
    with pytest.raises(
        LaunchError, match="--launcher torchrun was given, but no variable of torchrun is set"
    ):
        detect({}, "torchrun")


@pytest.mark.parametrize(
    ("name", "near"),
    [("torchrn", "torchrun"), ("None", "none"), ("horovod", "horovodrun"), ("open_mpi", "openmpi")],
)
def test_an_unknown_launcher_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"Did you mean {near}\\?") as caught:
        detect({}, name)
    assert not isinstance(caught.value, LaunchError)


# Slow is the machine where it is, with others at work on it.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.sampled_from([*TORCHRUN, *HOROVODRUN, *OPEN_MPI, *MPICH, *list(SRUN)[:8], *FLUX]),
        st.text(max_size=3) | st.sampled_from("0123"),
    )
)
def test_any_environment_is_a_world_or_a_launch_error(environ: dict[str, str]) -> None:
    try:
        world = detect(environ)
    except LaunchError:
        return
    assert 0 <= world.local_rank < (world.local_size if world.placed else world.size) <= world.size
    assert 0 <= world.rank < world.size


# -- what is made of the environments of real launchers -------------------------------------------------


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda environment: environment.name)
def test_each_environment_of_the_table_is_a_world_or_an_error(environment: Environment) -> None:
    if isinstance(environment.expected, World):
        assert detect(environment.variables) == environment.expected
        return
    with pytest.raises(LaunchError, match=environment.expected) as caught:
        detect(environment.variables)
    assert caught.value.exit_code == EXIT_USAGE
    assert "--launcher none" in str(caught.value)
    assert detect(environment.variables, "none") == World.alone()


def test_the_table_is_large_and_names_its_sources() -> None:
    assert len({environment.name for environment in ENVIRONMENTS}) == len(ENVIRONMENTS) >= 40
    assert all(environment.source for environment in ENVIRONMENTS)


# -- a step of Slurm's, and what a job without a step is -------------------------------------------------


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


def test_variables_of_srun_make_a_rank() -> None:
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
    ("changes", "problem"),
    [
        ({"SLURM_PROCID": "8"}, "SLURM_PROCID=8 is not below SLURM_STEP_NUM_TASKS=8"),
        ({"SLURM_LOCALID": "4"}, "SLURM_LOCALID=4 is not below SLURM_STEP_TASKS_PER_NODE=4"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2 is not below the number of nodes, 2"),
        ({"SLURM_STEP_NUM_TASKS": "9"}, "the tasks per node are 8 together, and not SLURM_STEP_NUM_TASKS=9"),
        ({"SLURM_STEP_NODELIST": "h[0-2]"}, "3 nodes are named, but tasks are given for 2"),
        ({"SLURM_STEP_NODELIST": "h[0-"}, "is not a list of hosts"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x"}, "is not a list of tasks per node"),
        ({"SLURM_STEP_ID": "batch"}, "SLURM_STEP_ID='batch' is not a whole number"),
        ({"SLURM_PROCID": "0"}, "with --distribution=arbitrary task 0 may run anywhere"),
    ],
)
def test_contradictory_variables_of_a_step_are_refused(changes: dict[str, str], problem: str) -> None:
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
def test_a_task_without_its_steps_variables_is_refused(name: str) -> None:
    """A batch script is number 0; who is not was started beside others."""
    with pytest.raises(LaunchError, match="srun's variables are half set: SLURM_STEP_NUM_TASKS"):
        detect({**BATCH, name: "3"})
    assert detect({**BATCH, name: "3"}, "none") == World.alone()


def test_torchruns_numbers_count_inside_srun() -> None:
    """torchrun's agent is the task; the ranks are torchrun's."""
    agent = {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    found = examine({**agent, "SLURM_LOCALID": "0", **TORCHRUN})
    assert found.world == detect(TORCHRUN)
    assert found.notes == ()
    assert found.outer == ("srun started torchrun, as rank 1 of 2; torchrun's numbers count.",)


# -- slurm's short forms of hosts and tasks, against what ``scontrol show hostnames`` prints for them ---


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("h0", ["h0"]),
        ("h[0-1]", ["h0", "h1"]),
        ("rack[1-2]n[3-4]", ["rack1n3", "rack1n4", "rack2n3", "rack2n4"]),
        ("n[01-04,7]-ib", ["n01-ib", "n02-ib", "n03-ib", "n04-ib", "n7-ib"]),
        ("login,n[9-11],gpu-a[099-101].cluster", ["login", "n9", "n10", "n11"]
         + [f"gpu-a{n}.cluster" for n in ("099", "100", "101")]),
        ("a[1,3-4,08]", ["a1", "a3", "a4", "a08"]),
        ("r[1-2]-[1-2]x", ["r1-1x", "r1-2x", "r2-1x", "r2-2x"]),
        *(("1", (1,)), ("1(x2)", (1, 1)), ("2(x2),1", (2, 2, 1)), ("3,1(x2),16", (3, 1, 1, 16))),
    ],
)  # fmt: skip
def test_lists_of_hosts_and_tasks_are_expanded(text: str, found: list[str] | tuple[int, ...]) -> None:
    assert (expand_hosts(text) if isinstance(found, list) else expand_tasks(text)) == found


NO_HOSTS = ["", ",", "a,", ",a", "a,,b", "n[", "n[1-", "n]", "n[]", "n[a]", "n[1-2", "n[3-1]", "n[1--2]"]
NO_TASKS = ["", "x", "2(x)", "2x2", "2(x2", "-1", "1,,2", "1.5"]


def test_texts_that_are_no_hosts_and_no_tasks_are_refused() -> None:
    for text in NO_HOSTS:
        with pytest.raises(ValueError, match=r"not a (list of hosts|name of hosts|range of numbers)"):
            expand_hosts(text)
    for text in NO_TASKS:
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
