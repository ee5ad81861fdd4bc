"""A short test of a backend in place: every operation right, and how long reductions take."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor

from dualeval.backends.base import Backend, Op

SMALL_BYTES = 8
LARGE_BYTES = 64 * 2**20
_SMALL_ROUNDS = 50
_LARGE_ROUNDS = 3


def check_operations(backend: Backend) -> dict[str, str | None]:
    """Run every operation once on values whose outcome is known. A collective.

    Those on tensors run on host tensors, and on tensors of the backend's device where that is another.
    """
    problems: dict[str, str | None] = {}
    for device in _devices(backend):
        label = "" if device.type == "cpu" else f" on {device.type}"
        for name, of, outcome, wanted in _outcomes(backend, device):
            problem = None if outcome == wanted else f"{of}got {outcome}, expected {wanted}"
            problems[name + label] = problems.get(name + label) or problem
    value = {"text": "é", "number": 2**60}
    told = backend.broadcast_json(value if backend.world.is_main else None)
    backend.barrier()
    problem = None if told == value else f"got {told}, expected {value}"
    return {**problems, "broadcast_json": problem, "barrier": None}


def _outcomes(backend: Backend, device: torch.device) -> Iterator[tuple[str, str, Any, Any]]:
    """The operations on tensors: name, what of, outcome and what that has to be."""
    size, rank = backend.world.size, backend.world.rank
    values = torch.tensor([rank, 1], device=device)
    for op, expected in {"sum": [size * (size - 1) // 2, size], "min": [0, 1], "max": [size - 1, 1]}.items():
        for dtype in (torch.int64, torch.float32, torch.bool):
            reduced = backend.all_reduce(values.to(dtype), cast(Op, op))
            wanted = torch.tensor(expected).to(dtype).tolist()
            yield "all_reduce", f"{op} of {dtype}: ", reduced.tolist(), wanted
    # Rank r counts r + 1 times: the mean of a ragged shard, not the mean of means.
    mean = backend.reduce_mean(values[:1].double(), weight=float(rank + 1))
    exact = sum(r * (r + 1) for r in range(size)) / sum(range(1, size + 1))
    yield "reduce_mean", "", round(mean.item(), 6), round(exact, 6)
    sent = backend.broadcast(values.bfloat16(), size - 1)
    yield "broadcast", "", sent.tolist(), torch.tensor([size - 1, 1]).bfloat16().tolist()
    ragged = [[[r, r]] * (r % 3) for r in range(size)]
    piece = torch.full((rank % 3, 2), rank, dtype=torch.int16, device=device)
    pieces = backend.gather(piece, dst=0)
    gathered = None if pieces is None else [each.tolist() for each in pieces]
    yield "gather", "", gathered, ragged if backend.world.is_main else None
    yield "all_gather", "", [each.tolist() for each in backend.all_gather(piece)], ragged


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
    seconds = [median(_times(backend, small, _SMALL_ROUNDS)), min(_times(backend, large, _LARGE_ROUNDS))]
    slowest = [max(times) for times in zip(*backend.all_gather_json(seconds), strict=True)]
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
