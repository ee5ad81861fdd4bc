"""Which GPU is whose, as a table of nodes and what launchers show of their GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dualeval.errors import UsageError
from dualeval.launch.gpus import Gpu, Sight, choose_gpus, promised_gpus


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
def test_who_gets_which(case: Case) -> None:
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
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, ""),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, ""),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-1234"}, "NVIDIA_VISIBLE_DEVICES=GPU-1234"),
        ({"NVIDIA_VISIBLE_DEVICES": "MIG-1234"}, "NVIDIA_VISIBLE_DEVICES=MIG-1234"),
    ],
)
def test_promises(environ: dict[str, str], promise: str) -> None:
    assert promised_gpus(environ) == promise
