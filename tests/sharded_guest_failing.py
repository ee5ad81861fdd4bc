"""A script with a group of its own, in which a forward fails on one rank; the next evaluation is right."""

from __future__ import annotations

import gc
import json

import torch
import torch.distributed as dist

import dualeval
from dualeval.errors import PeerError
from tests.workers.lockstep_worker import ShardedTask


def digest_of(shard: str, **wrong: str) -> str:
    """Evaluate; nothing of the sharded model is left after it."""
    try:
        return dualeval.evaluate(ShardedTask(30, {"shard": shard, **wrong}), batch_size=4).metrics_digest
    finally:
        gc.collect()


def main() -> None:
    dist.init_process_group("gloo")
    try:
        digest_of("yes", what="raise", at="3", rank="1")
        raised = "nothing"
    except (ValueError, PeerError) as error:
        raised = f"{type(error).__name__}: {error}"
    said: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(said, raised)
    digests = [digest_of("yes"), digest_of("no")]
    if dist.get_rank() == 0:
        print(json.dumps({"raised": said, "digests": digests}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
