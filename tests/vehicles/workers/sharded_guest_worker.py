"""Trains a network with FSDP2, without and with evaluations in between: FOLDER, under torchrun.

Writes into FOLDER/rank-N.json a hash of all that training has come to, and the digests of the evaluations: of
the sharded model, and of a plain copy of it.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import dualeval
from dualeval.result import Result

EPOCHS = 2
SAMPLES = 37
CHANNELS, SIDE, CLASSES = 3, 8, 5


def make_model() -> nn.Sequential:
    """A network whose default layout is channels-last."""
    return nn.Sequential(
        nn.Conv2d(CHANNELS, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.Sequential(nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(8, 6, 3, padding=1)),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, CLASSES),
    )


def data() -> list[tuple[Tensor, int]]:
    """The same samples on every rank."""
    generator = torch.Generator().manual_seed(3)
    images = torch.rand(SAMPLES, CHANNELS, SIDE, SIDE, generator=generator)
    return [(image, index % CLASSES) for index, image in enumerate(images)]


def evaluated(model: nn.Module, samples: list[tuple[Tensor, int]]) -> Result:
    """An evaluation with three batches more on one rank than on another."""
    result = dualeval.evaluate(model=model, data=samples, batch_size=4, workers=0)
    assert isinstance(result, Result)
    return result


def trained(*, evaluates: bool) -> tuple[str, list[dict[str, Any]]]:
    """Train with or without evaluations in between; a hash of all that it has come to, and what they gave."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = make_model()
    for part in (model[0], model[2], model[5]):
        fully_shard(part)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples = data()
    torch.manual_seed(rank)
    found = []
    for epoch in range(EPOCHS):
        images, targets = zip(*samples[rank + epoch :: dist.get_world_size()], strict=True)
        for _ in range(2):
            optimizer.zero_grad()
            loss: Any = nn.functional.cross_entropy(model(torch.stack(images)), torch.tensor(targets))
            loss.backward()
            optimizer.step()
        if evaluates:
            before = [len(module._forward_pre_hooks) for module in model.modules()]
            results = {"sharded": evaluated(model, samples), "whole": evaluated(whole(model), samples)}
            assert [len(module._forward_pre_hooks) for module in model.modules()] == before
            assert all(module.training for module in model.modules())
            found.append({name: facts(result) for name, result in results.items()})
    state = hashlib.sha256()
    trained_state: dict[str, Any] = dict(get_model_state_dict(model))
    for name, value in sorted(trained_state.items()):
        own = value.to_local() if hasattr(value, "to_local") else value
        state.update(name.encode() + own.contiguous().numpy().tobytes())
    state.update(torch.get_rng_state().numpy().tobytes())
    # Not left to the end of the process, where torch aborts now and then.
    del model, optimizer
    gc.collect()
    return state.hexdigest(), found


def whole(model: nn.Module) -> nn.Module:
    """A plain copy; a collective."""
    with torch.random.fork_rng():
        copy = make_model()
    copy.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    return copy


def facts(result: Result) -> dict[str, Any]:
    """What is to be equal, and what is not."""
    return {
        "digest": result.metrics_digest,
        "weights": result.weights["fingerprint"],
        "layout": result.job["layout"],
        "schedule": result.job.get("schedule"),
    }


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    said = {"trains": trained(evaluates=False), "evaluates": trained(evaluates=True)}
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
