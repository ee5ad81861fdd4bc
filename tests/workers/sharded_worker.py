"""Trains the embedded network a step with FSDP, and saves it as a folder and whole. OUT, under torchrun"""

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

from dualeval.models.fashion_cnn import FashionCNN
from dualeval.tasks.image_classification import EMBEDDED_WEIGHTS


def main(out: Path) -> None:
    """Save OUT/folder, of all ranks, and OUT/whole.pt, of rank 0."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = FashionCNN()
    model.load_state_dict(load_file(EMBEDDED_WEIGHTS))
    fully_shard(model.features)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(torch.rand(4, 1, 28, 28)).square().mean().backward()
    optimizer.step()
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state(model, optimizer),
        "epoch": 3,
    }
    save(state, checkpoint_id=out / "folder")
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(whole, out / "whole.pt")
    # Not left to the end of the process, where torch aborts now and then.
    del model, optimizer, state
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
