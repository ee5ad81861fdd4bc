"""The ranks of examples/train_with_eval.py, joined by torch.distributed or by Horovod."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

import dualeval


class TorchRanks:
    """The ranks of torchrun, or one process alone; DistributedDataParallel averages the gradients."""

    name = "torch"

    def __init__(self, world: dualeval.World, device: torch.device) -> None:
        self.rank, self.size = world.rank, world.size
        kind = "nccl" if device.type == "cuda" else "gloo"
        if world.launcher == "none":
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(kind, store=store, rank=0, world_size=1)
        else:
            dist.init_process_group(kind)

    def join(self, model: nn.Module, optimizer: Any, state: Any) -> tuple[nn.Module, Any]:
        """The model and the optimizer that work together with those of the other ranks."""
        if state is not None:
            optimizer.load_state_dict(state)
        return nn.parallel.DistributedDataParallel(model), optimizer

    def step(self, optimizer: Any, scaler: Any) -> None:
        scaler.step(optimizer)

    def gather(self, own: Any) -> list[Any]:
        everyone = [None] * self.size
        dist.all_gather_object(everyone, own)
        return everyone

    def share(self, of_rank_0: Any) -> Any:
        held = [of_rank_0]
        dist.broadcast_object_list(held)
        return held[0]

    def sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def broadcast(self, tensors: dict[str, Tensor]) -> None:
        for tensor in tensors.values():
            dist.broadcast(tensor, src=0)

    def leave(self) -> None:
        # DistributedDataParallel is part of a cycle. Freed after the group, at the end of the interpreter, it
        # aborts the process now and then.
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()


class HorovodRanks:
    """The ranks of horovodrun; Horovod's optimizer averages the gradients."""

    name = "horovod"

    def __init__(self) -> None:
        import horovod.torch as hvd

        hvd.init()
        self.hvd, self.rank, self.size = hvd, hvd.rank(), hvd.size()

    def join(self, model: nn.Module, optimizer: Any, state: Any) -> tuple[nn.Module, Any]:
        """The model and the optimizer that work together with those of the other ranks."""
        self.broadcast(model.state_dict())
        optimizer = self.hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=_WithoutBfloat16
        )
        if state is not None:  # rank 0's on every rank: no broadcast_optimizer_state is needed
            optimizer.load_state_dict(state)
        return model, optimizer

    def step(self, optimizer: Any, scaler: Any) -> None:
        optimizer.synchronize()  # the scaler looks at the average
        with optimizer.skip_synchronize():
            scaler.step(optimizer)

    def gather(self, own: Any) -> list[Any]:
        return list(self.hvd.allgather_object(own, name="gather"))

    def share(self, of_rank_0: Any) -> Any:
        return self.hvd.broadcast_object(of_rank_0, root_rank=0, name="share")

    def sum(self, tensor: Tensor) -> Tensor:
        total: Tensor = self.hvd.allreduce(tensor, op=self.hvd.Sum, name="sum")
        return total

    def broadcast(self, tensors: dict[str, Tensor]) -> None:
        sent = {name: _as_half(tensor) for name, tensor in tensors.items()}
        self.hvd.broadcast_parameters(sent, root_rank=0)

    def leave(self) -> None:
        self.hvd.shutdown()


def _as_half(tensor: Tensor) -> Tensor:
    """The same memory with a type that Horovod knows: it has no bfloat16."""
    return tensor.view(torch.float16) if tensor.dtype == torch.bfloat16 else tensor


class _WithoutBfloat16:
    """Averages gradients in bfloat16 as fp32; others as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(dtype)


Ranks = TorchRanks | HorovodRanks
# By launcher; horovodrun starts mpirun where Horovod is built with MPI.
BACKENDS = {"none": "torch", "torchrun": "torch", "env": "torch"}
BACKENDS |= dict.fromkeys(("horovodrun", "openmpi", "mpich"), "horovod")


def device_of(world: dualeval.World, kind: str) -> torch.device:
    """The device of this rank: a GPU of its own, or the CPU.

    Raises:
        UsageError: there is no GPU for it.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if world.local_rank >= torch.cuda.device_count():
        raise dualeval.UsageError(
            f"--device cuda: rank {world.rank} is number {world.local_rank} on its node, which has "
            f"{torch.cuda.device_count()} GPUs: start one rank a GPU, or give --device cpu"
        )
    return torch.device("cuda", world.local_rank)


def join_ranks(world: dualeval.World, backend: str | None, device: torch.device) -> Ranks:
    """Join the ranks that a launcher has started, in its own way or in the one asked for.

    Raises:
        UsageError: the launcher has none, or Horovod does not find the launcher's ranks.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if (backend or BACKENDS.get(world.launcher)) == "torch":
        return TorchRanks(world, device)
    if backend is None and world.launcher not in BACKENDS:
        raise dualeval.UsageError(
            f"{world.launcher} started these ranks: have it start torchrun or horovodrun, as the files in "
            "examples/scripts do, or give --backend"
        )
    ranks = HorovodRanks()
    if (ranks.rank, ranks.size) != (world.rank, world.size):
        raise dualeval.UsageError(
            f"{world.launcher} started rank {world.rank} of {world.size}, and Horovod has joined as rank "
            f"{ranks.rank} of {ranks.size}: start it with horovodrun"
        )
    return ranks
