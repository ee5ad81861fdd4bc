"""One rank of ``collectives.py``: every operation through ``Backend``, and the library's own call beside it.

Started by the launcher of the backend; writes FOLDER/RANK.json with this rank's seconds.

    LAUNCHER python benchmarks/collectives_rank.py --backend NAME --folder FOLDER --budget SECONDS
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from common import take_turns
from torch import Tensor
from torch.nn import functional

from dualeval import Backend, World, connect, detect

BYTES = (8, 2**20, 64 * 2**20)
_DTYPES = {"all_reduce": (torch.int64, torch.float32)}
OPERATIONS = ("all_reduce", "broadcast", "gather", "all_gather")
_ROUNDS = (8, 200)  # at least and at most

Call = Callable[[], Any]
# By what the call leaves behind: "new" as Backend does, a new tensor and the argument untouched; "own" what
# the library does at its least, into tensors that are there already; "any" as "new", but for tensors that may
# be of other lengths on other ranks.
Calls = dict[str, Call]


# -- the libraries' own calls, as a careful user would write them --------------------------------------


class Library(ABC):
    """The bare calls of a library on one tensor."""

    barrier: Call  # the library's own

    @abstractmethod
    def calls(self, tensor: Tensor) -> dict[str, Calls]:
        """By operation, the calls."""


class TorchLibrary(Library):
    """torch.distributed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.barrier = dist.barrier

    def calls(self, tensor: Tensor) -> dict[str, Calls]:
        """As in ``Library``."""
        size, is_root = self._world.size, self._world.is_main
        own = _filled_like(tensor)
        parts = [_filled_like(tensor) for _ in range(size)]

        def all_reduce() -> Tensor:
            result = tensor.clone()
            dist.all_reduce(result)
            return result

        def broadcast() -> Tensor:
            result = tensor.clone() if is_root else torch.empty_like(tensor)
            dist.broadcast(result, 0)
            return result

        def gather(sent: Tensor = tensor) -> list[Tensor] | None:
            results = [torch.empty_like(sent) for _ in range(size)] if is_root else None
            dist.gather(sent, results, 0)
            return results

        def all_gather(sent: Tensor = tensor) -> list[Tensor]:
            results = [torch.empty_like(sent) for _ in range(size)]
            dist.all_gather(results, sent)
            return results

        def of_any_length(gather: Callable[[Tensor], list[Tensor] | None]) -> list[Tensor] | None:
            lengths = [int(length) for length in all_gather(torch.tensor(tensor.numel()))]
            longest = max(lengths)
            short = tensor.numel() < longest
            results = gather(functional.pad(tensor, (0, longest - tensor.numel())) if short else tensor)
            return results and [part[:length] for part, length in zip(results, lengths, strict=True)]

        return {
            "all_reduce": {"new": all_reduce, "own": partial(dist.all_reduce, own)},
            "broadcast": {"new": broadcast, "own": partial(dist.broadcast, own, 0)},
            "gather": {
                "new": gather,
                "own": partial(dist.gather, tensor, parts if is_root else None, 0),
                "any": partial(of_any_length, gather),
            },
            "all_gather": {
                "new": all_gather,
                "own": partial(dist.all_gather, parts, tensor),
                "any": partial(of_any_length, all_gather),
            },
        }


class HorovodLibrary(Library):
    """Horovod, which has no gather to one rank: its user takes allgather."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._hvd: Any = importlib.import_module("horovod.torch")
        self.barrier = self._hvd.barrier

    def calls(self, tensor: Tensor) -> dict[str, Calls]:
        """As in ``Library``; allgather takes any lengths, and returns a new tensor always."""
        hvd, size, is_root = self._hvd, self._world.size, self._world.is_main
        own = _filled_like(tensor)
        # One name a shape and type, as a training loop has one a parameter.
        suffix = f"{tensor.dtype}.{tensor.numel()}"

        def gathered() -> list[Tensor]:
            return list(hvd.allgather(tensor, name=f"bare.allgather.{suffix}").chunk(size))

        return {
            "all_reduce": {
                "new": partial(hvd.allreduce, tensor, op=hvd.Sum, name=f"bare.new.allreduce.{suffix}"),
                "own": partial(hvd.allreduce_, own, op=hvd.Sum, name=f"bare.own.allreduce.{suffix}"),
            },
            "broadcast": {
                "new": partial(hvd.broadcast, tensor, 0, name=f"bare.new.broadcast.{suffix}"),
                "own": partial(hvd.broadcast_, own, 0, name=f"bare.own.broadcast.{suffix}"),
            },
            "gather": {"new": lambda: gathered() if is_root else gathered() and None},
            "all_gather": {"new": gathered},
        }


class MpiLibrary(Library):
    """mpi4py, with buffers."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._comm = self._mpi.COMM_WORLD
        self.barrier = self._comm.Barrier

    def calls(self, tensor: Tensor) -> dict[str, Calls]:
        """As in ``Library``."""
        mpi, comm, size, is_root = self._mpi, self._comm, self._world.size, self._world.is_main
        own = _filled_like(tensor).numpy()
        room = _filled_like(tensor.expand(size, -1).contiguous()).numpy()

        def all_reduce() -> Tensor:
            result = torch.empty_like(tensor)
            comm.Allreduce(tensor.numpy(), result.numpy(), mpi.SUM)
            return result

        def broadcast() -> Tensor:
            result = tensor.clone() if is_root else torch.empty_like(tensor)
            comm.Bcast(result.numpy(), 0)
            return result

        def gather() -> list[Tensor] | None:
            results = tensor.new_empty(size, tensor.numel()) if is_root else None
            comm.Gather(tensor.numpy(), None if results is None else results.numpy(), 0)
            return None if results is None else list(results)

        def all_gather() -> list[Tensor]:
            results = tensor.new_empty(size, tensor.numel())
            comm.Allgather(tensor.numpy(), results.numpy())
            return list(results)

        def of_any_length(*, to_all: bool) -> list[Tensor] | None:
            lengths = comm.allgather(tensor.numel())
            receives = to_all or is_root
            results = tensor.new_empty(sum(lengths)) if receives else None
            room = None if results is None else [results.numpy(), lengths]
            if to_all:
                comm.Allgatherv(tensor.numpy(), room)
            else:
                comm.Gatherv(tensor.numpy(), room, 0)
            return None if results is None else list(torch.split(results, lengths))

        return {
            "all_reduce": {"new": all_reduce, "own": partial(comm.Allreduce, mpi.IN_PLACE, own, mpi.SUM)},
            "broadcast": {"new": broadcast, "own": partial(comm.Bcast, own, 0)},
            "gather": {
                "new": gather,
                "own": partial(comm.Gather, tensor.numpy(), room if is_root else None, 0),
                "any": partial(of_any_length, to_all=False),
            },
            "all_gather": {
                "new": all_gather,
                "own": partial(comm.Allgather, tensor.numpy(), room),
                "any": partial(of_any_length, to_all=True),
            },
        }


LIBRARIES: dict[str, Callable[[World], Library]] = {
    "torch": TorchLibrary,
    "horovod": HorovodLibrary,
    "mpi": MpiLibrary,
}


def _filled_like(tensor: Tensor) -> Tensor:
    # Not zeros_like: memory that was never written to would be read from one page of zeros.
    return torch.empty_like(tensor).fill_(0)


# -- measuring ----------------------------------------------------------------------------------------


def measure(backend: Backend, budget_s: float) -> list[dict[str, Any]]:
    """Measure every operation, type and size; a value of ``seconds`` is this rank's, a round."""
    library = LIBRARIES[backend.name](backend.world)
    cases = []
    for operation in OPERATIONS:
        for dtype in _DTYPES.get(operation, (torch.float32,)):
            for size in BYTES:
                tensor = _values(backend.world, dtype, size)
                bare = library.calls(tensor)[operation]
                calls: Calls = {"Backend": partial(getattr(backend, operation), tensor), **bare}
                outcomes = [call() for name, call in calls.items() if name != "own"]
                assert all(_same(outcomes[0], other) for other in outcomes[1:]), f"{operation} of {dtype}"
                del outcomes
                case = {"operation": operation, "dtype": str(dtype).removeprefix("torch."), "bytes": size}
                cases.append({**case, "seconds": _take_turns(backend, library, budget_s, calls)})
    seconds = _take_turns(backend, library, budget_s, {"Backend": backend.barrier, "new": library.barrier})
    cases.append({"operation": "barrier", "dtype": "", "bytes": 0, "seconds": seconds})
    return cases


def _values(world: World, dtype: torch.dtype, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(world.rank)
    # Whole numbers: their float32 sum is the same in any order.
    return torch.randint(100, (size // dtype.itemsize,), generator=generator).to(dtype)


def _same(ours: Any, bare: Any) -> bool:
    if isinstance(ours, list):
        return isinstance(bare, Sequence) and all(map(torch.equal, ours, bare))
    return bare is None if ours is None else torch.equal(ours, bare)


def _take_turns(
    backend: Backend, library: Library, budget_s: float, calls: Mapping[str, Call]
) -> dict[str, list[float]]:
    """Call all in turns, as many rounds as the time allows: the same number on every rank."""
    turns = {name: partial(_seconds, library, call) for name, call in calls.items()}
    take_turns(1, turns)
    start = perf_counter()
    take_turns(1, turns)
    round_s = torch.tensor(perf_counter() - start, dtype=torch.float64)
    least, most = _ROUNDS
    fitting = int(budget_s / backend.all_reduce(round_s, "max").item())
    return take_turns(min(most, max(least, fitting)), turns)


def _seconds(library: Library, call: Call) -> float:
    library.barrier()
    start = perf_counter()
    result = call()
    seconds = perf_counter() - start
    del result  # not before: to give back what it holds is no part of the call
    return seconds


def main() -> None:
    """Be one rank."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=LIBRARIES, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--budget", type=float, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    world = detect(os.environ)
    with connect(arguments.backend, world, "cpu") as backend:
        cases = measure(backend, arguments.budget)
        (arguments.folder / f"{world.rank}.json").write_text(json.dumps(cases))


if __name__ == "__main__":
    main()
