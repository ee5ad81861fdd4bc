"""Evaluates a network that its task has sharded, under any launcher of torch ranks. OUT [KEY=VALUE...]"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dualeval
from dualeval.errors import DualevalError
from tests.tiny import CLASSES, FEATURES, TinyTask

WIDTH = 16


def make_model() -> nn.Sequential:
    """The same network on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(FEATURES, WIDTH),
            nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)),
            nn.Linear(WIDTH, CLASSES),
        ).eval()


def shard(model: nn.Sequential) -> nn.Sequential:
    """Divide it over all ranks, each layer a unit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class ShardedTask(TinyTask):
    """As TinyTask, of a network that is sharded, with failures on demand."""

    # What goes wrong, and where, is no part of the job.
    dualeval_ignores = ("_wrong", "_forwards")

    def __init__(self, count: int, wrong: Mapping[str, str]) -> None:
        broken = [int(index) for index in wrong.get("broken", "").split(",") if index]
        super().__init__(count, broken)
        self._wrong = dict(wrong)
        self._forwards = 0

    def build_model(self, device: torch.device) -> nn.Module:
        model = make_model().to(device)
        return shard(model) if self._wrong.get("shard", "yes") == "yes" else model

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self._forwards += 1
        if self._forwards == int(self._wrong.get("at", "0")) and self._is_here():
            self._go_wrong(model)
        if self._wrong.get("calls") == "several":
            # One call or more, as the samples are.
            parts = torch.split(batch["features"], 1 + int(batch["targets"][0]) % 4)
            return torch.cat([model(part) for part in parts])
        logits = super().forward(model, batch)
        return logits + torch.rand_like(logits) * len(self._wrong.get("draws", ""))

    def observe(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if (
            self._wrong.get("what") == "observe"
            and self._forwards == int(self._wrong["at"])
            and self._is_here()
        ):
            raise ValueError("this rank's own columns")
        return super().observe(outputs, batch)

    def _is_here(self) -> bool:
        rank = self._wrong.get("rank")
        return rank is None or int(rank) == dist.get_rank()

    def _go_wrong(self, model: Any) -> None:
        what = self._wrong["what"]
        if what in ("SIGKILL", "SIGSTOP", "SIGTERM"):
            os.kill(os.getpid(), getattr(signal, what))
        elif what == "sleep":
            # In the midst of a forward: the others are in the next unit's gather.
            model[1].register_forward_hook(lambda *args: time.sleep(3600))
        elif what == "more":
            model.append(nn.Sequential(nn.Linear(CLASSES, FEATURES), model[0], model[2]))
        elif what == "fewer":
            model._modules["1"] = nn.Identity()
        elif what == "raise":
            raise ValueError("this rank's own error")


def main(out: str, given: dict[str, str]) -> int:
    """Evaluate as the keys say; print rank 0's result."""
    count = int(given.pop("count", "53"))
    names = ("schedule", "on_error", "layout", "precision")
    options: dict[str, Any] = {name: given.pop(name) for name in names if name in given}
    options |= {"batch_size": int(given.pop("batch_size", "4")), "out": None if out == "-" else out}
    with dualeval.Session(heartbeat_timeout=float(given.pop("heartbeat", "60"))) as session:
        try:
            result = session.evaluate(ShardedTask(count, given), job=options, puts_back=False, **options)
        except DualevalError:
            return session.exit_code
        if session.world.is_main:
            print(
                json.dumps(
                    {
                        "digest": result.metrics_digest,
                        "schedule": result.job.get("schedule", ""),
                        "weights": result.weights,
                        "replay": result.replay,
                        "samples": result.data,
                    },
                    default=str,
                )
            )
    return session.exit_code


if __name__ == "__main__":
    keys = dict(argument.split("=", 1) for argument in sys.argv[2:])
    sys.exit(main(sys.argv[1], keys))
