"""Trains the embedded network as many do, and saves it: ``checkpoint_worker.py WHAT OUT``, under torchrun.

- ``model``: divided by FSDP; saves OUT/folder, of all ranks, and OUT/whole.pt, of rank 0.
- ``optimizer``: DDP with an optimizer divided over the ranks; saves OUT/one.pt (with the gathered optimizer),
  OUT/rank-N.pt (a shard each) and OUT/plain.pt (none).
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as get_optimizer_state
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from dualeval.models.sources.fashion_cnn import FashionCNN
from dualeval.tasks.image_classification import EMBEDDED_WEIGHTS


def save_divided_model(out: Path, model: FashionCNN) -> None:
    torch.manual_seed(0)
    fully_shard(model.features)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(torch.rand(4, 1, 28, 28)).square().mean().backward()
    optimizer.step()
    states = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state(model, optimizer)}
    save({**states, "epoch": 3}, checkpoint_id=out / "folder")
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(whole, out / "whole.pt")


def save_divided_optimizer(out: Path, model: FashionCNN) -> None:
    rank = dist.get_rank()
    parallel = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.AdamW, lr=1e-4)
    torch.manual_seed(rank)
    for _ in range(2):
        optimizer.zero_grad()
        parallel(torch.rand(4, 1, 28, 28)).square().mean().backward()
        optimizer.step()
    saved = {"model": parallel.state_dict(), "epoch": 3}
    torch.save({**saved, "optimizer": optimizer.optim.state_dict()}, out / f"rank-{rank}.pt")
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        torch.save({**saved, "optimizer": optimizer.state_dict()}, out / "one.pt")
        torch.save(model.state_dict(), out / "plain.pt")


def main(what: str, out: Path) -> None:
    model = FashionCNN()
    model.load_state_dict(load_file(EMBEDDED_WEIGHTS))
    {"model": save_divided_model, "optimizer": save_divided_optimizer}[what](out, model)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1], Path(sys.argv[2]))
    # Not left to the end of the process, where torch aborts now and then.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
