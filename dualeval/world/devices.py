"""The choice of each rank's device and cores: ranks report what they see, and all choose alike."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from dualeval import backends
from dualeval.backends.base import Backend
from dualeval.errors import BackendError, DualevalError, UsageError
from dualeval.launch.cores import Cores, cores_near, own_cores, share_of_cores
from dualeval.launch.gpus import Gpu, Sight, as_callers_chose, choose_gpus
from dualeval.world import World, host_identity
from dualeval.world.waiting import STARTED, waiting

_CPU = torch.device("cpu")
_OTHER_GPUS = " Apple's GPUs (mps) and Intel's (xpu) are not supported: type --device cpu."


def connect(
    name: str | None,
    world: World,
    device: str | torch.device | None = None,
    *,
    allow_shared_gpu: bool = False,
    mix_machines: bool = False,
) -> Backend:
    """Join the ranks of a world, and choose where each computes. A collective.

    Args:
        name: the backend, as for ``dualeval.backends.connect``.
        world: this process's place, from ``dualeval.detect``.
        device, allow_shared_gpu, mix_machines: as for ``take_device``.

    Raises:
        UsageError: there is no such backend, or no such device here, or two ranks would share a GPU.
        LaunchError: this backend cannot run under this launcher, or its library is missing or broken.
        BackendError: the group could not be joined.
        DualevalError: a GPU does not work.
    """
    wanted = str(device) if isinstance(device, torch.device) else device
    check_name(wanted)
    backend = backends.connect(name, world)
    try:
        take_device(backend, wanted, allow_shared_gpu=allow_shared_gpu, mix_machines=mix_machines)
    except BaseException as error:
        # An error that all ranks raise alike breaks no group: they leave it together, and may join another.
        backend.close(failed=isinstance(error, BackendError) or not isinstance(error, DualevalError))
        raise
    return backend


def take_device(
    backend: Backend,
    wanted: str | None = None,
    *,
    allow_shared_gpu: bool = False,
    mix_machines: bool = False,
    cores: int = 1,
) -> list[int]:
    """Choose the device of this rank's model and batches, try it, and set ``backend.device``. A collective.

    If the caller has opened the group and already computes on GPUs, its current GPU is taken and stays
    current; but GPU 0 only if no other rank has it, too. Returns the cores near the GPU, if ``cores`` of them
    or more are this rank's; else none.
    """
    check_name(wanted)
    # Before GPUs are looked at, which initializes CUDA.
    computes = _computes_already()
    sight = _look_if_wanted(backend.world, wanted)
    if sight.gpus and not backend.owns_group and computes and ":" not in (wanted or ""):
        sight = replace(sight, current=torch.cuda.current_device())
    asked = {"--device": wanted, "--allow-shared-gpu": allow_shared_gpu, "--mix-machines": mix_machines}
    reports = backend.all_gather_json({"asked": asked, "sight": asdict(sight)})
    everyone = [_sight(report["sight"]) for report in reports]
    everyone = as_callers_chose(everyone, allow_shared=allow_shared_gpu)
    _refuse_differing([report["asked"] for report in reports], everyone)
    chosen = choose_gpus(everyone, wanted, allow_shared=allow_shared_gpu, mix=mix_machines)
    gpu = chosen[backend.world.rank]
    device = _CPU if gpu is None else torch.device("cuda", gpu.number)
    near: list[int] = []
    if any(chosen):
        own = {"problem": None, "near": [], "host": ""} if gpu is None else _tried(device)
        reports = backend.all_gather_json(own)
        _refuse_broken(everyone, chosen, [report["problem"] for report in reports])
        # GPUs of several ranks may be near the same few cores.
        others = [each["near"] for each in reports if each["host"] == own["host"]]
        sharing = sum(not set(own["near"]).isdisjoint(each) for each in others)
        near = own["near"] if len(own["near"]) >= cores * sharing else []
    has_chosen = not backend.owns_group and (computes or ":" in (wanted or ""))
    if gpu is not None and not has_chosen:
        # Allocations on "cuda" and pinned memory use the current device, by default 0 on all ranks.
        torch.cuda.set_device(device)
    ids = [each.whole or each.id for each in chosen if each is not None]
    backend.use_device(device, shared=len(set(ids)) < len(ids))
    return near


def take_cores(backend: Backend, *, sets_threads: bool) -> int:
    """Divide the cores of each node among its ranks; returns this rank's number of cores.

    A collective.
    """
    mine = own_cores()
    alone = backend.world.size == 1
    with waiting(backend.world, "the cores of all ranks", STARTED):
        everyone = [mine] if alone else [Cores(**cores) for cores in backend.all_gather_json(asdict(mine))]
    share = share_of_cores(mine, everyone)
    # torch counts the cores that a process may use, but ignores other ranks and quotas.
    chosen = "OMP_NUM_THREADS" in os.environ or (alone and torch.get_num_threads() <= share)
    if sets_threads and not chosen:
        torch.set_num_threads(share)
    return share


def device_here(
    wanted: str | None, ranks: int, world: World, *, allow_shared_gpu: bool = False
) -> torch.device:
    """The device that ``take_device`` would choose for the last rank here, before any rank is started."""
    check_name(wanted)
    seen = _look_if_wanted(world, wanted)
    everyone = [replace(seen, rank=rank) for rank in range(ranks)]
    gpu = choose_gpus(everyone, wanted, allow_shared=allow_shared_gpu)[-1]
    return _CPU if gpu is None else torch.device("cuda", gpu.number)


def check_name(wanted: str | None) -> None:
    """Raise UsageError for a device that ``take_device`` does not know."""
    if wanted is not None and not re.fullmatch(r"cpu|cuda(:[0-9]+)?", str(wanted)):
        raise UsageError(
            f"--device {wanted!r} is not a device: expected cpu, cuda (one GPU per rank) or cuda:N."
            f"{_OTHER_GPUS if re.match('mps|xpu', str(wanted)) else ''}"
        )


def _look_if_wanted(world: World, wanted: str | None) -> Sight:
    """Like ``look``, but without looking if the CPU is wanted: CUDA would be initialized for nothing."""
    return Sight(rank=world.rank, host=socket.gethostname()) if wanted == "cpu" else look(world)


def look(world: World) -> Sight:
    """The GPUs that this rank sees."""
    sight = Sight(rank=world.rank, host=socket.gethostname(), promised=world.promised_gpus)
    with warnings.catch_warnings(record=True) as warned:
        # torch warns about a GPU that it cannot use, and says why.
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable:
        return replace(sight, gpus=tuple(_gpu(number) for number in range(torch.cuda.device_count())))
    if not (torch.version.cuda or torch.version.hip):
        return replace(sight, reason=f"torch {torch.__version__} is built without CUDA")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limited = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible}"
    why = "".join(f": {str(warning.message).splitlines()[0]}" for warning in warned[:1])
    return replace(sight, reason=f"torch {torch.__version__} sees no GPU{limited}{why}")


def _refuse_broken(
    everyone: Sequence[Sight], chosen: Sequence[Gpu | None], problems: Sequence[str | None]
) -> None:
    """Raise if a rank's GPU failed when it was tried."""
    for sight, gpu, problem in zip(everyone, chosen, problems, strict=True):
        if gpu is not None and problem is not None:
            raise DualevalError(
                f"{sight.where}: GPU {gpu.number} ({gpu.name}) does not work: {problem}. Fix that node "
                f"or leave it out, or type --device cpu to compute on CPUs."
            )


def _computes_already() -> bool:
    """Whether this process uses CUDA, and may thus have chosen its current GPU."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _refuse_differing(asked: Sequence[Mapping[str, object]], everyone: Sequence[Sight]) -> None:
    """Raise if ranks were given different options: each would choose by its own."""
    for options, sight in zip(asked, everyone, strict=True):
        for name, value in options.items():
            if value != asked[0][name]:
                raise UsageError(
                    f"{everyone[0].where} and {sight.where} were given different {name} "
                    f"({asked[0][name]} and {value}). Start every rank with the same options."
                )


def _gpu(number: int) -> Gpu:
    properties = torch.cuda.get_device_properties(number)
    known = _driver_uuid(number, "cuDeviceGetUuid_v2") or getattr(properties, "uuid", None)
    # torch's UUID is that of a slice or of the whole GPU, by its version of CUDA.
    whole = _driver_uuid(number, "cuDeviceGetUuid")
    return Gpu(
        number=number,
        id=f"{host_identity()}:{number}" if known is None else f"GPU-{known}",
        name=str(properties.name),
        whole="" if whole is None else f"GPU-{whole}",
    )


def _driver_uuid(number: int, function: str) -> uuid.UUID | None:
    """The UUID of a GPU by NVIDIA's driver; None without one.

    For a slice of a GPU (MIG), cuDeviceGetUuid_v2 returns the slice's own, cuDeviceGetUuid the whole GPU's.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        ask = getattr(driver, function)
    except (OSError, AttributeError):  # another maker's GPU, or a driver older than CUDA 11.4
        return None
    device = ctypes.c_int()
    buffer = ctypes.create_string_buffer(16)
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), number) or ask(buffer, device):
        return None
    return uuid.UUID(bytes=buffer.raw)


def _problem_with(device: torch.device) -> str | None:
    """Why a visible GPU cannot compute; None if it can."""
    try:
        torch.zeros(1, device=device).add_(1)
        torch.cuda.synchronize(device)
    except Exception as error:  # noqa: BLE001 - told to all ranks, each of which raises it
        return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return None


def _tried(device: torch.device) -> dict[str, Any]:
    """What this rank tells the others of its GPU: why it cannot compute, and the rank's cores near it."""
    properties = torch.cuda.get_device_properties(device.index)
    place = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    # Older versions of torch do not know the address.
    near = [] if -1 in place else cores_near("{:04x}:{:02x}:{:02x}.0".format(*place))
    return {
        "problem": _problem_with(device),
        "host": host_identity(),
        "near": sorted({*near} & os.sched_getaffinity(0)),
    }


def _sight(report: Mapping[str, Any]) -> Sight:
    """A Sight from its JSON."""
    return Sight(**{**report, "gpus": tuple(Gpu(**gpu) for gpu in report["gpus"])})
