"""A short test of a backend in place: every operation right, and how long reductions take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from dualeval.backends.base import OPS, Backend

SMALL_BYTES = 8
LARGE_BYTES = 64 * 2**20
_SMALL_ROUNDS = 50
_LARGE_ROUNDS = 3


def check_operations(backend: Backend) -> dict[str, str | None]:
    """Run every operation once on values whose outcome is known. A collective.

    Those on tensors run on host tensors, and on tensors of the backend's device where that is another.
    """
    found: dict[str, str | None] = {}
    for device in _devices(backend):
        label = "" if device.type == "cpu" else f" on {device.type}"
        found |= {f"{name}{label}": check(backend, device) for name, check in _TENSOR_CHECKS.items()}
    return {**found, **{name: check(backend) for name, check in _CHECKS.items()}}


def measure_all_reduce(backend: Backend) -> dict[str, dict[str, float]]:
    """Time all_reduce of host tensors, and of the backend's device's where that is another. A collective."""
    return {device.type: _measure_on(backend, device) for device in _devices(backend)}


def _devices(backend: Backend) -> list[torch.device]:
    host = torch.device("cpu")
    # Every rank has to bring a device's tensors, or none.
    with_device = all(backend.all_gather_json(backend.device.type != "cpu"))
    return [host, backend.device] if with_device else [host]


def _measure_on(backend: Backend, device: torch.device) -> dict[str, float]:
    small = torch.zeros(SMALL_BYTES // 8, dtype=torch.int64, device=device)
    large = torch.zeros(LARGE_BYTES // 4, dtype=torch.float32, device=device)
    own = [median(_times(backend, small, _SMALL_ROUNDS)), min(_times(backend, large, _LARGE_ROUNDS))]
    slowest = [max(times) for times in zip(*backend.all_gather_json(own), strict=True)]
    return {"latency_us": slowest[0] * 1e6, "bandwidth_gb_s": LARGE_BYTES / slowest[1] / 1e9}


def _times(backend: Backend, tensor: Tensor, rounds: int) -> list[float]:
    backend.all_reduce(tensor, "sum")
    times = []
    for _ in range(rounds):
        backend.barrier()
        start = perf_counter()
        backend.all_reduce(tensor, "sum")
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        times.append(perf_counter() - start)
    return times


def _all_reduce(backend: Backend, device: torch.device) -> str | None:
    size, rank = backend.world.size, backend.world.rank
    expected = {"sum": size * (size - 1) // 2, "min": 0, "max": size - 1}
    for op in OPS:
        for dtype in (torch.int64, torch.float32, torch.bool):
            own = torch.tensor([rank, 1], device=device).to(dtype)
            ones = {"sum": size, "min": 1, "max": 1}[op]
            wanted = torch.tensor([expected[op], ones]).to(dtype)
            if problem := _compared(backend.all_reduce(own, op), wanted):
                return f"{op} of {dtype}: {problem}"
    return None


def _reduce_mean(backend: Backend, device: torch.device) -> str | None:
    size, rank = backend.world.size, backend.world.rank
    own = torch.tensor([float(rank)], dtype=torch.float64, device=device)
    # Rank r counts r + 1 times: the mean of a ragged shard, not the mean of means.
    mean = backend.reduce_mean(own, weight=float(rank + 1))
    weights = sum(range(1, size + 1))
    wanted = sum(r * (r + 1) for r in range(size)) / weights
    return None if abs(mean.item() - wanted) < 1e-9 else f"got {mean.item()}, expected {wanted}"


def _broadcast(backend: Backend, device: torch.device) -> str | None:
    last = backend.world.size - 1
    own = torch.full((3,), backend.world.rank, dtype=torch.bfloat16, device=device)
    return _compared(backend.broadcast(own, last), torch.full((3,), last, dtype=torch.bfloat16))


def _ragged(rank: int) -> Tensor:
    return torch.full((rank % 3, 2), rank, dtype=torch.int16)


def _gather(backend: Backend, device: torch.device) -> str | None:
    pieces = backend.gather(_ragged(backend.world.rank).to(device), dst=0)
    if not backend.world.is_main:
        return None if pieces is None else "a rank other than 0 was given pieces"
    return _compared_pieces(pieces or [], backend.world.size)


def _all_gather(backend: Backend, device: torch.device) -> str | None:
    pieces = backend.all_gather(_ragged(backend.world.rank).to(device))
    return _compared_pieces(pieces, backend.world.size)


def _broadcast_json(backend: Backend) -> str | None:
    value = {"text": "é", "number": 2**60}
    told = backend.broadcast_json(value if backend.world.is_main else None)
    return None if told == value else f"got {told}, expected {value}"


def _barrier(backend: Backend) -> str | None:
    backend.barrier()
    return None


def _compared(found: Tensor, wanted: Tensor) -> str | None:
    found = found.cpu()
    same = found.dtype == wanted.dtype and found.shape == wanted.shape and bool((found == wanted).all())
    return None if same else f"got {found.tolist()}, expected {wanted.tolist()}"


def _compared_pieces(pieces: list[Tensor], size: int) -> str | None:
    if len(pieces) != size:
        return f"got {len(pieces)} pieces, expected {size}"
    problems = (_compared(piece, _ragged(rank)) for rank, piece in enumerate(pieces))
    return next((problem for problem in problems if problem), None)


_CHECKS: Mapping[str, Callable[[Backend], str | None]] = {
    "broadcast_json": _broadcast_json,
    "barrier": _barrier,
}
_TENSOR_CHECKS: Mapping[str, Callable[[Backend, torch.device], str | None]] = {
    "all_reduce": _all_reduce,
    "reduce_mean": _reduce_mean,
    "broadcast": _broadcast,
    "gather": _gather,
    "all_gather": _all_gather,
}
