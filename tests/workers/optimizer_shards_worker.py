"""Trains the embedded network with DDP and an optimizer divided over the ranks. OUT, under torchrun"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from dualeval.models.fashion_cnn import FashionCNN
from dualeval.tasks.image_classification import EMBEDDED_WEIGHTS


def main(out: Path) -> None:
    """Save OUT/one.pt (with the gathered optimizer), OUT/rank-N.pt (a shard each), OUT/plain.pt (none)."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = FashionCNN()
    model.load_state_dict(load_file(EMBEDDED_WEIGHTS))
    parallel = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.AdamW, lr=1e-4)
    torch.manual_seed(rank)
    for _ in range(2):
        optimizer.zero_grad()
        parallel(torch.rand(4, 1, 28, 28)).square().mean().backward()
        optimizer.step()
    state = parallel.state_dict()
    torch.save(
        {"model": state, "optimizer": optimizer.optim.state_dict(), "epoch": 3}, out / f"rank-{rank}.pt"
    )
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        torch.save({"model": state, "optimizer": optimizer.state_dict(), "epoch": 3}, out / "one.pt")
        torch.save(model.state_dict(), out / "plain.pt")
    # Not left to the end of the process, where torch aborts now and then.
    del model, parallel, optimizer, state
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
