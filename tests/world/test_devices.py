"""Where each rank computes, with played GPUs: torch says that they are there, and nothing runs on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dualeval.backends.base import Backend
from dualeval.backends.single import SingleBackend
from dualeval.errors import DualevalError, UsageError
from dualeval.world import World, devices
from dualeval.world.devices import connect, device_here, take_device
from tests.conftest import Launch
from tests.vehicles.launchers import check_torchrun_reports, start
from tests.vehicles.played_gpus import played_gpus, played_uuid

ALONE = World.alone()
# What the driver of a MIG slice answers, in C, and a torch that says something else.
DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 7; return ordinal > 1; }
int cuDeviceGetUuid(char *uuid, int device) { memset(uuid, 99, 16); return 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, device, 16); return 0; }
"""


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Let played GPUs pass their trial; the list of those that were made current."""
    current: list[torch.device] = []
    monkeypatch.setattr(devices, "_problem_with", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.mark.parametrize(
    ("wanted", "hint"),
    [
        *((wanted, "") for wanted in ("gpu", "", "cuda:", "cuda:-1", "cpu:0", "cuda:0 ", 0)),
        *((wanted, r".* are not supported: type --device cpu") for wanted in ("mps", "mps:0", "xpu:1")),
    ],
)
def test_what_is_no_device_is_refused(wanted: Any, hint: str) -> None:
    with pytest.raises(UsageError, match=f"is not a device: expected cpu, cuda{hint}"):
        connect(None, ALONE, wanted)


def test_the_cpu_where_no_gpu_is_seen(works: list[torch.device]) -> None:
    with connect(None, ALONE) as backend:
        assert backend.device == torch.device("cpu")
    for wanted in ("cuda", "cuda:0"):
        with pytest.raises(UsageError, match=f"--device {wanted}: rank 0 on .* Type"):
            connect(None, ALONE, wanted)
    assert works == []


@pytest.mark.parametrize(
    ("wanted", "index"),
    [(None, 0), ("cpu", None), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), (torch.device("cuda", 1), 1)],
)
def test_the_device_asked_for_is_taken_and_the_first_gpu_by_default(
    wanted: str | torch.device | None, index: int | None, works: list[torch.device]
) -> None:
    expected = torch.device("cpu") if index is None else torch.device("cuda", index)
    with played_gpus("AB"), connect(None, ALONE, wanted) as backend:
        assert backend.device == expected
    assert works == ([] if index is None else [expected])


def test_a_promised_gpu_that_is_not_seen_is_an_error(works: list[torch.device]) -> None:
    promised = replace(ALONE, promised_gpus="SLURM_GPUS_ON_NODE=4")
    with pytest.raises(UsageError, match=r"although SLURM_GPUS_ON_NODE=4 promises one on .* --device cpu"):
        connect(None, promised)
    with connect(None, promised, "cpu") as backend:
        assert backend.device == torch.device("cpu")
    with played_gpus("A"), connect(None, promised) as backend:
        assert backend.device == torch.device("cuda", 0)


def test_torchs_reason_why_no_gpu_is_seen_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")

    def unavailable() -> bool:
        import warnings

        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old\nmore", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    assert devices.look(ALONE).reason == (
        f"torch {torch.__version__} sees no GPU with CUDA_VISIBLE_DEVICES=7: CUDA initialization: The NVIDIA "
        "driver on your system is too old"
    )


def test_a_gpu_that_is_seen_and_does_not_work_is_named() -> None:
    """This torch has no CUDA, so that a played GPU breaks when it is used."""
    with (
        played_gpus("A"),
        pytest.raises(DualevalError, match=r"rank 0 on .*: GPU 0 \(Played A\) does not work: "),
    ):
        connect(None, ALONE)


def test_a_callers_group_keeps_the_callers_gpu(
    works: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = SingleBackend(ALONE)
    backend.owns_group = False
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with played_gpus("ABC"):
        take_device(backend)
        assert backend.device == torch.device("cuda", 1)
        take_device(backend, "cuda:2")
        assert backend.device == torch.device("cuda", 2)
        assert works == [], "what is current is the caller's"
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        take_device(backend)
        assert backend.device == torch.device("cuda", 0), "a caller that has not used CUDA has chosen none"
    assert works == [torch.device("cuda", 0)]


@pytest.mark.parametrize(("is_used", "current"), [(False, None), (True, 0)])
def test_gpu_0_of_every_rank_is_no_choice_of_a_callers(
    works: list[torch.device], monkeypatch: pytest.MonkeyPatch, is_used: bool, current: int | None
) -> None:
    """It is current where nobody has chosen one: all ranks computed there, or refused to, from the second
    evaluation on."""
    seen = [{"number": n, "id": f"GPU-{played_uuid(letter)}", "name": "H"} for n, letter in enumerate("AB")]
    other = {"rank": 0, "host": "m", "gpus": seen, "reason": "", "promised": "", "current": current}
    backend = _Several([])
    backend.world = replace(backend.world, rank=1, local_rank=1)
    backend.owns_group = False

    def all_gather_json(value: Any) -> list[Any]:
        return [{**value, "sight": other}, value] if isinstance(value, dict) else [None, value]

    monkeypatch.setattr(backend, "all_gather_json", all_gather_json)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_used)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with played_gpus("AB"):
        take_device(backend)
    assert backend.device == torch.device("cuda", 1)
    # What a caller has used stays as it is; where it has used nothing, "cuda" is its rank's own from here on.
    assert works == ([] if is_used else [torch.device("cuda", 1)])


def test_two_ranks_on_one_gpu_and_two_slices_of_one_are_known(
    works: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = uuid.UUID(bytes=b"W" * 16)
    names = {"cuDeviceGetUuid": whole, "cuDeviceGetUuid_v2": played_uuid("A")}
    monkeypatch.setattr(devices, "_driver_uuid", lambda number, function: names[function])
    for letter, other_whole, shared in (
        ("A", f"GPU-{whole}", True),
        ("B", f"GPU-{whole}", True),
        ("B", "GPU-another", False),
    ):
        gpu = {"number": 0, "id": f"GPU-{played_uuid(letter)}", "name": "H", "whole": other_whole}
        backend = _Several([{"sight": {"rank": 1, "host": "m", "gpus": [gpu], "reason": "", "promised": ""}}])
        with played_gpus("A"), mock.patch.object(backend, "use_device") as used:
            take_device(backend, "cuda:0")
            used.assert_called_once_with(torch.device("cuda", 0), shared=shared)
            if letter == "B":  # two slices are two GPUs, each a rank's own without a word
                take_device(backend)
                assert used.call_args == mock.call(torch.device("cuda", 0), shared=shared)


@pytest.mark.parametrize(
    ("near", "others", "cores", "found"),
    [
        # Of two sockets with four cores, ranks 0 and 1 at the first one; or all at the first.
        ([0, 1, 2, 3], [[0, 1, 2, 3], [4, 5], [4, 5]], 2, [0, 1, 2, 3]),
        ([0, 1, 2, 3], [[0, 1, 2, 3]] * 3, 2, []),
        # A quarter of a core is not one.
        ([0, 1], [[0, 1]] * 7, 1, []),
        # Of cores that are not this process's, none counts.
        ([3, 98, 99], [], 1, [3]),
        ([98, 99], [], 1, []),
        ([], [], 1, []),
    ],
)
def test_the_cores_near_a_gpu_are_for_its_readers_if_they_are_enough(
    works: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
    near: list[int],
    others: list[list[int]],
    cores: int,
    found: list[int],
) -> None:
    asked = mock.Mock(return_value=near)
    monkeypatch.setattr(devices, "cores_near", asked)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    backend = _Several([])
    backend.world = replace(ALONE, size=1 + len(others), local_size=1 + len(others))

    def all_gather_json(value: Any) -> list[Any]:
        if "sight" in value:
            gpus = [[{"number": 0, "id": str(rank), "name": "H"}] for rank in range(len(others))]
            sights = [{**value["sight"], "rank": 1 + rank, "gpus": of} for rank, of in enumerate(gpus)]
            return [value, *({**value, "sight": sight} for sight in sights)]
        return [value, *({**value, "near": of} for of in others)]

    monkeypatch.setattr(backend, "all_gather_json", all_gather_json)
    with played_gpus("A"):
        assert take_device(backend, cores=cores) == found
    asked.assert_called_once_with("ffff:41:00.0")


class _OverNccl(SingleBackend):
    """What a backend does with tensors on GPUs, as far as it can be seen without one."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._sends_from = frozenset(["cuda"])

    def carrier(self, device: torch.device) -> torch.device:
        return Backend.carrier(self, device)


class _Several(SingleBackend):
    """A rank that hears what others would say."""

    def __init__(self, others: Sequence[Any]) -> None:
        super().__init__(replace(ALONE, size=2, local_size=2))
        self._others = others

    def all_gather_json(self, value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [value, *({**value, **other} for other in self._others)]
        return [value, *(None for _ in self._others)]


def test_who_shares_a_gpu_sends_from_host_memory() -> None:
    gpu, host = torch.device("cuda", 0), torch.device("cpu")
    for shared, carrier in ((False, gpu), (True, host)):
        backend = _OverNccl(ALONE)
        backend.use_device(gpu, shared=shared)
        assert backend.carrier(gpu) == carrier
        assert backend.carrier(host) == host


def test_ranks_with_different_options_are_told(works: list[torch.device]) -> None:
    asked = {"--device": "cuda:7", "--allow-shared-gpu": False, "--mix-machines": False}
    sight = {"rank": 1, "host": "m", "gpus": [], "reason": "", "promised": ""}
    with pytest.raises(UsageError, match=r"rank 1 on m were given different --device \(None and cuda:7\)"):
        take_device(_Several([{"asked": asked, "sight": sight}]))


def test_a_device_is_chosen_before_ranks_are_started(works: list[torch.device]) -> None:
    with played_gpus("AB"):
        assert device_here(None, 2, ALONE) == torch.device("cuda", 1)
        assert device_here(None, 5, ALONE, allow_shared_gpu=True) == torch.device("cuda", 0)
        assert device_here("cpu", 5, ALONE) == torch.device("cpu")
        with pytest.raises(UsageError, match="would compute on one GPU, Played A"):
            device_here(None, 3, ALONE)
        with pytest.raises(UsageError, match=r"--device cuda:2: rank 0 on .* sees GPU 0, 1"):
            device_here("cuda:2", 1, ALONE)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_slice_is_known_by_its_own_id(tmp_path: Path, launch: Launch) -> None:
    """The driver knows the slices of a GPU, torch only the whole."""
    source = tmp_path / "driver.c"
    source.write_text(DRIVER)
    library = str(tmp_path / "libcuda.so.1")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(source)], check=True, timeout=60)
    code = (
        "from dualeval.world.devices import look\nfrom dualeval.world import World\n"
        "from tests.vehicles.played_gpus import played_gpus\n"
        "with played_gpus('ABC'): print(*(f'{gpu.id} {gpu.whole}' for gpu in look(World.alone()).gpus))"
    )
    finished = launch(
        [sys.executable, "-c", code],
        variables={"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])},
    ).ok()
    driver = [f"GPU-{uuid.UUID(bytes=bytes([7 + number] * 16))}" for number in range(2)]
    whole = f"GPU-{uuid.UUID(bytes=bytes([99] * 16))}"
    assert finished.stdout.split() == [driver[0], whole, driver[1], whole, f"GPU-{played_uuid('C')}"]


def ranks(*letters: str) -> str:
    """A shell's words that start dualeval on a rank, which sees the GPUs of its number."""
    cases = " ".join(f"{rank}) export PLAYED_GPUS={seen};;" for rank, seen in enumerate(letters))
    return f'case $RANK in {cases} esac; exec {sys.executable} -m tests.vehicles.played_gpus "$@"'


@pytest.mark.parametrize(
    ("letters", "code", "message"),
    [
        (("A,B", ""), 2, "rank 1 on {host} cannot compute on a GPU (torch {torch} is built without CUDA)"),
        (("A", "B"), 1, "rank 0 on {host}: GPU 0 (Played A) does not work: "),
    ],
)
def test_ranks_meet_and_name_the_node(
    letters: tuple[str, str], code: int, message: str, launch: Launch, tmp_path: Path
) -> None:
    """With GPUs here and none there, ranks used to wait for each other for half an hour."""
    import socket

    worker = ["bash", "-c", ranks(*letters), "-", "run", "--limit", "64", "--out", str(tmp_path / "out")]
    finished = launch(
        [*start("torchrun", 2), *worker], variables={"PYTHONPATH": str(Path(__file__).parents[2])}
    )
    assert finished.returncode != 0
    expected = message.format(host=socket.gethostname(), torch=torch.__version__)
    # Wrong input is said once in all, any other failure by each rank that lives to say it.
    assert finished.stderr.count(expected) in ([1] if code == 2 else [1, 2]), finished.stderr
    check_torchrun_reports(finished.stderr, code)
    assert not (tmp_path / "out").exists()
