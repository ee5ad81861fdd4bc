"""One rank that trains, with or without evaluations in between: ``guest_worker.py FOLDER BACKEND EVALUATES``.

Writes into FOLDER/rank-N.json a hash of all that training has come to, and the digests of the evaluations.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from dualeval.engine.options import RunOptions
from dualeval.launch import detect
from dualeval.world.devices import connect
from tests.sessions import joined, run_task
from tests.tiny import CLASSES, FEATURES, TinyTask

EPOCHS = 3


class Caching(nn.Linear):
    """Keeps a tensor of its first forward, as rotary embeddings keep theirs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self._kept: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self._kept is None:
            self._kept = torch.ones(self.out_features) + 0
        return super().forward(input) * self._kept


class TrainedTask(TinyTask):
    """Evaluates the model that is being trained; its reading draws random numbers from all generators."""

    # The copies of a thread each would keep what the model is to keep.
    thread_safe = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__(200)
        self.model = model

    def build_model(self, device: torch.device) -> nn.Module:
        return self.model.eval()

    def collate(self, samples: Any) -> dict[str, Tensor]:
        random.random(), np.random.rand(), torch.rand(1)
        return super().collate(samples)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        Caching(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, CLASSES)
    )


def main() -> None:
    folder, name, evaluates = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "evaluates"
    world = detect(os.environ)
    torch.set_num_threads(2)
    model = make_model()
    trained: nn.Module = model
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if name == "torch":
        torch.distributed.init_process_group("gloo")
        trained = nn.parallel.DistributedDataParallel(model)
    else:
        import horovod.torch as hvd  # type: ignore[import-untyped, import-not-found, unused-ignore]

        hvd.init()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    generator = torch.Generator().manual_seed(world.rank)
    data = TensorDataset(
        torch.rand(96, FEATURES, generator=generator), torch.randint(CLASSES, (96,), generator=generator)
    )
    torch.manual_seed(world.rank)
    random.seed(world.rank)
    np.random.seed(world.rank)
    found: dict[str, Any] = {"digests": []}
    with connect(name, world, "cpu") as backend, joined(backend) as control:
        for epoch in range(EPOCHS):
            if evaluates:
                task = TrainedTask(trained)
                options = RunOptions(batch_size=16, workers=1 if epoch == 1 else 0)
                result = run_task(task, backend, control, options, guest=True)
                found["digests"].append(result.metrics_digest)
            trained.train() if epoch == 0 else None
            assert all(module.training for module in trained.modules())
            optimizer.zero_grad()
            # A backward after an evaluation whose forward came before it.
            kept = trained(data[:16][0]).square().mean()
            if evaluates and epoch == 0:
                task = TrainedTask(trained)
                result = run_task(task, backend, control, RunOptions(batch_size=16), guest=True)
                found["digests"].append(result.metrics_digest)
            kept.backward()
            optimizer.step()
            for inputs, targets in DataLoader(data, batch_size=16, sampler=RandomSampler(data)):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(trained(inputs), targets)
                loss = loss + random.random() * 1e-3 * trained(inputs).mean() * np.random.rand()
                loss.backward()
                optimizer.step()
        state = [model.state_dict(), optimizer.state_dict()["state"], torch.rand(2), torch.get_num_threads()]
        found["state"] = hashlib.sha256(str(_lists(state)).encode()).hexdigest()
        control.meet()
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(found))
    if name == "torch":
        torch.distributed.destroy_process_group()


def _lists(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double().tolist()
    if isinstance(value, dict):
        return {key: _lists(part) for key, part in value.items()}
    return [_lists(part) for part in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
