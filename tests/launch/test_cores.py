"""The cores of a node among its ranks, whether or not the launcher has bound these."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from dualeval.errors import UsageError
from dualeval.launch.cores import Cores, cores_near, cpu_quotas, share_of_cores
from dualeval.launch.gpus import Gpu, Sight, choose_gpus, promised_gpus
from tests.conftest import BIN, Launch
from tests.vehicles.launchers import needs, start
from tests.vehicles.requirements import CPU_CGROUPS


def on(host: str, numbers: range | list[int], **quotas: float) -> Cores:
    return Cores(host=host, numbers=list(numbers), quotas=quotas)


@pytest.mark.parametrize(
    ("everyone", "shares"),
    [
        ([on("a", range(8))], [8]),
        ([on("a", range(8))] * 4, [2] * 4),
        ([on("a", range(3))] * 3, [1] * 3),
        ([on("a", range(2))] * 4, [1] * 4),
        # Bound to cores of their own; to two sockets of four cores, two ranks on each.
        ([on("a", [0]), on("a", [1])], [1, 1]),
        ([on("a", range(4))] * 2 + [on("a", range(4, 8))] * 2, [2] * 4),
        # One rank bound to a core that the other may use as well.
        ([on("a", [0]), on("a", range(4))], [1, 3]),
        # Uneven nodes whose cores have the same numbers.
        ([on("a", range(8)), on("b", range(8)), on("b", range(8))], [8, 4, 4]),
        # A container's quota, of which its ranks have equal parts; less than one core is one thread.
        ([on("a", range(128), box=4)], [4]),
        ([on("a", range(128), box=4)] * 2, [2] * 2),
        ([on("a", range(128), box=2.5)], [2]),
        ([on("a", range(128), box=0.5)] * 2, [1] * 2),
        # Greater than the cores.
        ([on("a", range(2), box=4)] * 2, [1] * 2),
        # Two containers of a host have a quota each; a third one none.
        (
            [
                on("a", range(64), box=4),
                on("a", range(64), other=8),
                on("a", range(64), other=8),
                on("a", range(64)),
            ],
            [4, 4, 4, 16],
        ),
        # In a pod that has less than its containers together.
        ([on("a", range(64), box=4, pod=6), on("a", range(64), other=4, pod=6)], [3, 3]),
        # Groups of different hosts may have one name.
        ([on("a", range(8), box=4), on("b", range(8), box=4)], [4, 4]),
    ],
)
def test_ranks_share_the_cores_they_may_use(everyone: list[Cores], shares: list[int]) -> None:
    assert [share_of_cores(own, everyone) for own in everyone] == shares


@pytest.mark.parametrize(
    ("listed", "near"), [("0-2,8-9\n", [0, 1, 2, 8, 9]), ("5\n", [5]), ("\n", []), (None, [])]
)
def test_the_cores_near_a_pci_device(listed: str | None, near: list[int], tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:17:00.0"
    device.mkdir(parents=True)
    if listed is not None:
        (device / "local_cpulist").write_text(listed)
    assert cores_near("0000:17:00.0", tmp_path) == near
    assert cores_near("0000:18:00.0", tmp_path) == []


THREADS = """
import json, os, sys, torch
from pathlib import Path
from dualeval import connect, detect
from dualeval.world.devices import take_cores
torch.set_num_threads(7)
with connect(None, detect(os.environ), "cpu") as backend:
    found = [take_cores(backend, sets_threads=True), torch.get_num_threads()]
    Path(sys.argv[1], str(backend.world.rank)).write_text(json.dumps(found))
"""


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("horovodrun", marks=[*needs("horovodrun", "horovod"), pytest.mark.long]),
        pytest.param("mpirun", marks=needs("mpirun", "mpi")),
    ],
)
@pytest.mark.parametrize("chosen", [None, pytest.param("3", marks=pytest.mark.long)])
def test_threads_are_the_share_unless_the_user_chose(
    launcher: str, chosen: str | None, launch: Launch, tmp_path: Path
) -> None:
    variables = {} if chosen is None else {"OMP_NUM_THREADS": chosen}
    command: list[str | Path] = [*start(launcher, 2), sys.executable, "-c", THREADS, tmp_path]
    launch(command, variables=variables).ok()
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in range(2):
        found = json.loads((tmp_path / str(rank)).read_text())
        # 7 is what the process had before: a choice of the user's is left alone.
        assert found == [share, 7 if chosen else share]


# -- quotas of CPU time, as containers set them: in files of both versions of cgroups, and from the kerne


CPU = "cpu,cpuacct"


def first_version(quota: int, group: str = "") -> dict[str, str]:
    """The files of a group of version 1, whose period is 100 ms."""
    below = f"{CPU}/{group}"
    return {f"{below}cpu.cfs_quota_us": f"{quota}\n", f"{below}cpu.cfs_period_us": "100000\n"}


def machine(folder: Path, cgroup: str | None, files: dict[str, str]) -> Path:
    """A folder with the files that the kernel would show; ``files`` below /sys/fs/cgroup."""
    (folder / "proc/self").mkdir(parents=True)
    if cgroup is not None:
        (folder / "proc/self/cgroup").write_text(cgroup)
    for name, content in files.items():
        file = folder / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return folder


@pytest.mark.parametrize(
    ("cgroup", "files", "quotas"),
    [
        # Docker and Kubernetes with version 2: a namespace of its own, whose root is the container.
        ("0::/\n", {"cpu.max": "400000 100000\n"}, [4.0]),
        ("0::/\n", {"cpu.max": "max 100000\n"}, []),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, [1.5]),
        # A period of its own. The outermost group of a machine has no such file.
        ("0::/user.slice\n", {"user.slice/cpu.max": "50000 20000\n"}, [2.5]),
        ("0::/user.slice\n", {"user.slice/cgroup.procs": "1\n"}, []),
        # Every group around it counts, and others' do not.
        ("0::/pod/box\n", {"pod/cpu.max": "200000 100000\n", "pod/box/cpu.max": "max 100000\n"}, [2.0]),
        ("0::/pod/box\n", {"pod/cpu.max": "2 1\n", "pod/box/cpu.max": "300000 100000\n"}, [2.0, 3.0]),
        ("0::/pod/box\n", {"pod/other/cpu.max": "2 1\n", "pod/box/cpu.max": "max 100000\n"}, []),
        # The host's namespace, with what is mounted a part of the tree.
        ("0::/docker/ab\n", {"cpu.max": "300000 100000\n"}, [3.0]),
        # A mount from outside the namespace: nobody tells under which name the container is in there.
        ("0::/../../other\n", {"cpu.max": "300000 100000\n"}, [3.0]),
        # Version 1, with Docker: the container's own part is mounted, and named as the host names it.
        (
            "11:cpu,cpuacct:/docker/ab\n10:cpuset:/docker/ab\n1:name=systemd:/docker/ab\n",
            *(first_version(250000), [2.5]),
        ),
        ("11:cpu,cpuacct:/docker/ab\n0::/\n", first_version(-1), []),
        # Version 1, a job of a batch system in groups within groups.
        (
            "4:cpuacct,cpu:/batch/job7\n",
            *(first_version(6400000, "batch/") | first_version(800000, "batch/job7/"), [8.0, 64.0]),
        ),
        # What says nothing that can be understood.
        ("4:cpu,cpuacct:/\n", {f"{CPU}/cpu.cfs_quota_us": "250000\n"}, []),
        ("0::/\n", {"cpu.max": "100000 0\n"}, []),
        ("0::/\n", {"cpu.max": "many 100000\n"}, []),
        ("garbage\n\n0::/\n", {"cpu.max": "1 2\n"}, [0.5]),
        # Nothing mounted; no cgroups in the kernel.
        ("0::/\n", {}, []),
        (None, {}, []),
    ],
)
def test_all_cpu_quotas_around_a_process_are_found(
    cgroup: str | None, files: dict[str, str], quotas: list[float], tmp_path: Path
) -> None:
    assert sorted(cpu_quotas(machine(tmp_path, cgroup, files)).values()) == quotas


def test_groups_have_names_of_their_own(tmp_path: Path) -> None:
    """Two containers that both take themselves for '/' share nothing; one that is seen in two ways is one."""
    files = {"one/cpu.max": "100000 100000\n", "two/cpu.max": "100000 100000\n"}
    first = machine(tmp_path / "first", "0::/one\n", files)
    seen: list[set[str]] = []
    for name in ("one", "two", "one"):
        folder = machine(tmp_path / str(len(seen)), "0::/\n", {})
        (folder / "sys/fs").mkdir(parents=True)
        (folder / "sys/fs/cgroup").symlink_to(first / "sys/fs/cgroup" / name)
        seen.append(set(cpu_quotas(folder)))
    assert seen[0] == seen[2] == set(cpu_quotas(first))
    assert not seen[0] & seen[1]


@pytest.fixture
def limited() -> Iterator[Path]:
    """A group of the kernel's with the time of one core, and one inside it without a limit of its own."""
    assert CPU_CGROUPS is not None
    outer = CPU_CGROUPS / f"dualeval-test-{os.getpid()}"
    inner = outer / "inner"
    inner.mkdir(parents=True)
    try:
        if (outer / "cpu.max").exists():
            (outer / "cpu.max").write_text("100000 100000")
        else:
            (outer / "cpu.cfs_quota_us").write_text("100000")
        yield inner
    finally:
        for group in (inner, outer):
            with suppress(FileNotFoundError):
                group.rmdir()


JOIN = 'echo $$ > "$0/cgroup.procs"; exec "$@"'
# As a container is started: the outermost group that it sees is its own.
IS_SECOND = Path("/sys/fs/cgroup/cgroup.subtree_control").exists()
KIND, PLACE = ("cgroup2", "/sys/fs/cgroup") if IS_SECOND else ("cgroup -o cpu", "/sys/fs/cgroup/cpu")
MOUNT = f'umount -l {PLACE} && mount -t {KIND} none {PLACE} && exec "$@"'
ASK = "from dualeval.launch.cores import *; print(usable_cores(), own_cores().quotas)"


@pytest.mark.needs("quotas")
def test_the_kernels_own_quota_limits_the_threads(limited: Path, launch: Launch) -> None:
    """Threads, and what doctor says of them; and the same group, seen from a namespace like a container's."""
    done = launch(["sh", "-c", JOIN, limited, BIN / "dualeval", "doctor", "--json"])
    facts = json.loads(done.stdout)["ranks"]["0"]
    assert facts["threads"] == 1
    assert list(facts["cpu_quotas"].values()) == [1.0]
    container = ["unshare", "--cgroup", "--mount", "sh", "-c", MOUNT, "sh"]
    done = launch(["sh", "-c", JOIN, limited.parent, *container, sys.executable, "-c", ASK])
    assert done.stdout == f"1 {facts['cpu_quotas']}\n", done.stderr


# -- which GPU is whose, as a table of nodes and what launchers show of their GPUs -----------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """What each rank sees (a letter a GPU, "-" for none), what was asked for, and who gets which."""

    name: str
    sees: str  # by rank, the GPUs in the order of their numbers, behind the host's name
    gets: str  # by rank, the letter of its GPU, "-" for the CPU; or a part of the error
    wanted: str | None = None
    allow_shared: bool = False
    mix: bool = False
    promised: str = ""


# Launchers' ways of showing GPUs, as their documents describe them: none was recorded on GPUs.
CASES = [
    Case(name="one rank, one GPU", sees="n:A", gets="A"),
    Case(name="one rank, four GPUs", sees="n:ABCD", gets="A"),
    Case(name="torchrun, 4 on 4", sees="n:ABCD n:ABCD n:ABCD n:ABCD", gets="A B C D"),
    Case(name="torchrun, 2 on 4", sees="n:ABCD n:ABCD", gets="A B"),
    Case(name="torchrun, two nodes", sees="n:AB n:AB m:CD m:CD", gets="A B C D"),
    Case(name="mpirun --map-by node", sees="n:AB m:CD n:AB m:CD", gets="A C B D"),
    Case(name="srun --gpus-per-task=1, own alone", sees="n:A n:B m:C m:D", gets="A B C D"),
    Case(name="srun --gpus-per-task=2", sees="n:AB n:CD", gets="A C"),
    Case(
        name="srun --gpu-bind=closest, tasks in turn over two sockets",
        sees="n:ABCD n:EFGH n:ABCD n:EFGH n:ABCD n:EFGH n:ABCD n:EFGH",
        gets="A E B F C G D H",
    ),
    Case(name="srun --gpu-bind=closest, tasks in blocks", sees="n:AB n:AB n:CD n:CD", gets="A B C D"),
    Case(name="srun --gpu-bind=map_gpu:1,0", sees="n:B n:A", gets="B A"),
    Case(name="a wrapper that exports CUDA_VISIBLE_DEVICES=LOCAL_RANK", sees="n:A n:B n:C", gets="A B C"),
    Case(name="a wrapper that reverses the order", sees="n:BA n:BA", gets="B A"),
    Case(name="each rank its own first, and all others", sees="n:AB n:BA", gets="A B"),
    Case(name="cgroups: a rank with fewer comes later", sees="n:AB n:A", gets="B A"),
    Case(name="cgroups: a chain of exchanges", sees="n:ABC n:AB n:A", gets="C B A"),
    Case(name="containers on one host, a GPU each", sees="c1:A c2:B", gets="A B"),
    Case(
        name="containers on one host that show one GPU",
        sees="c1:A c2:A",
        gets="rank 0 on c1 and rank 1 on c2",
    ),
    Case(name="MIG: a slice each", sees="n:A n:B", gets="A B"),
    Case(name="3 ranks on 2", sees="n:AB n:AB n:AB", gets="rank 0 on n and rank 2 on n would compute on one"),
    Case(name="3 ranks on 2, shared", sees="n:AB n:AB n:AB", gets="A B A", allow_shared=True),
    Case(name="5 ranks on 2, shared", sees="n:AB n:AB n:AB n:AB n:AB", gets="A B A B A", allow_shared=True),
    Case(name="shared among those that have to", sees="n:A n:A n:A n:ABC", gets="A A A B", allow_shared=True),
    Case(name="both see one, the second node is fine", sees="n:A n:A m:B", gets="--allow-shared-gpu to let"),
    Case(name="no GPU anywhere", sees="n:- n:- m:-", gets="- - -"),
    Case(name="no GPU, asked for", sees="n:- n:-", gets="--device cuda: ranks 0, 1 on n", wanted="cuda"),
    Case(name="GPUs, not asked for", sees="n:AB n:AB", gets="- -", wanted="cpu"),
    Case(name="cpu beside promised GPUs", sees="n:- m:-", gets="- -", wanted="cpu", promised="G=1"),
    Case(
        name="a node without", sees="n:AB n:AB m:- m:-", gets="ranks 2, 3 on m cannot compute on a GPU (why)"
    ),
    Case(name="a node without, mixed", sees="n:AB n:AB m:- m:-", gets="A B - -", mix=True),
    Case(
        name="a node without, asked for", sees="n:A m:-", gets="rank 1 on m cannot", wanted="cuda", mix=True
    ),
    Case(name="promised, none works", sees="n:- m:-", gets="although G=1 promises one on n", promised="G=1"),
    Case(
        name="promised, one node without, mixed",
        sees="n:A m:-",
        gets="rank 1 on m cannot compute on a GPU (why), although G=1 promises one on m",
        promised="G=1",
        mix=True,
    ),
    Case(name="cuda:1 on all", sees="n:AB n:AB m:CD", gets="B B D", wanted="cuda:1"),
    Case(name="cuda:1, one sees one", sees="n:AB m:C", gets="rank 1 on m sees GPU 0.", wanted="cuda:1"),
    Case(name="cuda:0, one sees none", sees="n:A m:-", gets="rank 1 on m sees none: why", wanted="cuda:0"),
]


def sights(case: Case) -> list[Sight]:
    found = []
    for rank, text in enumerate(case.sees.split()):
        host, _, letters = text.partition(":")
        gpus = tuple(Gpu(number=n, id=letter, name="H") for n, letter in enumerate(letters.strip("-")))
        reason = "" if gpus else "why"
        found.append(Sight(rank=rank, host=host, gpus=gpus, reason=reason, promised=case.promised))
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_rank_gets_its_gpu_or_the_reason_is_said(case: Case) -> None:
    everyone = sights(case)

    def choose() -> list[Gpu | None]:
        return choose_gpus(everyone, case.wanted, allow_shared=case.allow_shared, mix=case.mix)

    if " on " in case.gets or "--" in case.gets:
        with pytest.raises(UsageError) as caught:
            choose()
        assert case.gets in str(caught.value)
        return
    chosen = choose()
    assert " ".join("-" if gpu is None else gpu.id for gpu in chosen) == case.gets
    for sight, gpu in zip(everyone, chosen, strict=True):
        assert gpu is None or gpu in sight.gpus, "a rank gets one of those that it sees, by its own number"


def test_a_large_job_is_divided_at_once() -> None:
    letters = [f"{node}.{n}" for node in range(256) for n in range(8)]
    everyone = [
        Sight(
            rank=rank,
            host=f"n{rank // 8}",
            gpus=tuple(Gpu(number=n, id=letters[rank // 8 * 8 + n], name="H") for n in range(8)),
        )
        for rank in range(2048)
    ]
    assert [gpu and gpu.id for gpu in choose_gpus(everyone)] == letters


@pytest.mark.parametrize(
    ("environ", "promise"),
    [
        ({}, ""),
        ({"SLURM_GPUS_ON_NODE": "8"}, "SLURM_GPUS_ON_NODE=8"),
        ({"SLURM_GPUS_ON_NODE": "0"}, ""),
        ({"SLURM_GPUS_ON_NODE": "0", "SLURM_JOB_GPUS": "0,1"}, ""),
        ({"SLURM_STEP_GPUS": "0"}, "SLURM_STEP_GPUS=0"),
        ({"SLURM_JOB_GPUS": "0,1"}, "SLURM_JOB_GPUS=0,1"),
        ({"SLURM_JOB_GPUS": "0"}, "SLURM_JOB_GPUS=0"),
        # A shell of salloc and a batch script have the number of a step, which is no step of tasks.
        ({"SLURM_JOB_GPUS": "0", "SLURM_STEP_ID": "4294967291"}, "SLURM_JOB_GPUS=0"),
        # srun --gres=none in a job with GPUs: Slurm takes away the step's variables, and not the job's.
        ({"SLURM_JOB_GPUS": "0", "SLURM_STEP_ID": "3"}, ""),
        ({"SLURM_JOB_GPUS": "0,1", "SLURM_STEP_GPUS": "1", "SLURM_STEP_ID": "3"}, "SLURM_STEP_GPUS=1"),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, ""),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, ""),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-1234"}, "NVIDIA_VISIBLE_DEVICES=GPU-1234"),
        ({"NVIDIA_VISIBLE_DEVICES": "MIG-1234"}, "NVIDIA_VISIBLE_DEVICES=MIG-1234"),
    ],
)
def test_variables_that_promise_gpus_are_known(environ: dict[str, str], promise: str) -> None:
    assert promised_gpus(environ) == promise
