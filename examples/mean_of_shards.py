"""The collectives of dualeval alone: the mean and the values of shards of different lengths.

The launcher is detected and decides the library:

    torchrun --nproc-per-node 2 examples/mean_of_shards.py
    horovodrun -np 2 python examples/mean_of_shards.py
    mpirun -np 2 python examples/mean_of_shards.py
    srun -n 2 python examples/mean_of_shards.py
"""

import os

import torch

import dualeval

with dualeval.connect(None, dualeval.detect(os.environ)) as backend:
    rank = backend.world.rank
    losses = torch.arange(3.0 + rank)  # a shard of this rank's own: 3 values on rank 0, 4 on rank 1, ...
    mean = backend.reduce_mean(losses.mean(), weight=len(losses))  # of all values, not of the means
    total = backend.all_reduce(torch.tensor(len(losses)))  # int64: exact; a new tensor on every rank
    shards = backend.gather(losses)  # the shards in rank order on rank 0, None on the others
    name = backend.broadcast_json({"run": "first"} if rank == 0 else None)["run"]  # no pickle
    backend.barrier()  # all ranks are here
    if shards is not None:
        assert torch.isclose(torch.cat(shards).mean(), mean)
        print(f"{name}: {backend.world.size} ranks, {total} losses, mean {mean:.4f}", flush=True)
