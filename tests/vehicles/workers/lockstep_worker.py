"""Evaluates a network that its task has sharded, under any launcher of torch ranks.

``lockstep_worker.py OUT [KEY=VALUE...]``, or ``uneven FOLDER``, ``failing`` or ``attempts`` in place of OUT.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dualeval
from dualeval.engine.values import plan
from dualeval.errors import DualevalError, PeerError, UsageError
from dualeval.result import Result
from tests.vehicles.tiny import CLASSES, FEATURES, TinyTask

WIDTH = 16
# What may be wrong with a task.
WRONG = ("shard", "broken", "calls", "draws", "what", "at", "rank")


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
        return logits + torch.rand_like(logits) if "draws" in self._wrong else logits

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
    options: dict[str, Any] = {"batch_size": 4, "out": None if out == "-" else out}
    with dualeval.Session(heartbeat_timeout=float(given.pop("heartbeat", "60"))) as session:
        try:
            result = session.evaluate(ShardedTask(53, given), puts_back=False, **options)
        except DualevalError:
            return session.exit_code
        if session.world.is_main:
            print(json.dumps({"digest": result.metrics_digest, "replay": result.replay}))
    return session.exit_code


def evaluated(count: int, **given: Any) -> Result:
    """One evaluation, of options and of what goes wrong; nothing of the sharded model is left after it."""
    wrong = {name: given.pop(name) for name in WRONG if name in given}
    try:
        return dualeval.evaluate(ShardedTask(count, wrong), batch_size=4, **given)
    finally:
        gc.collect()


def uneven(folder: Path) -> None:
    """The sharded network and the whole one over data of many shapes, by one group: FOLDER/found.json."""
    dist.init_process_group("gloo")
    found: dict[str, dict[str, Any]] = {}
    cases: dict[str, dict[str, Any]] = {
        "prime": {"count": 29},
        "fewer samples than ranks": {"count": 2},
        "one batch more": {"count": 13},
        "batches that cannot be read": {"count": 30, "broken": "0,1,2,3,8,29", "on_error": "skip"},
        "readers": {"count": 17, "workers": 1},
        "several calls a batch": {"count": 17, "calls": "several"},
        "several batches a chunk": {"count": 29},
    }
    for name, case in cases.items():
        with mock.patch.object(
            plan, "MAX_CHUNKS", 5 if name == "several batches a chunk" else plan.MAX_CHUNKS
        ):
            sharded, whole = (evaluated(**case, shard=shard) for shard in ("yes", "no"))
        found[name] = {"sharded": sharded.metrics_digest, "whole": whole.metrics_digest}
        found[name]["schedules"] = [result.job.get("schedule", "static") for result in (sharded, whole)]
        found[name]["deterministic"] = [sharded.deterministic, whole.deterministic]
    for name, first, then in (("resumed whole", "yes", "no"), ("resumed sharded", "no", "yes")):
        out = folder / first
        earlier = evaluated(21, shard=first, out=out)
        again = evaluated(21, shard=then, out=out)
        assert again.earlier
        found[name] = {"sharded": earlier.metrics_digest, "whole": again.metrics_digest}
        found[name]["replay"] = again.replay
    for name, options in (("unreadable", {"broken": "21"}), ("dynamic", {"schedule": "dynamic"})):
        # As each session ends with its error, the next evaluation opens another one.
        try:
            evaluated(30, shard="yes", **options)
        except UsageError as error:
            found[name] = {"sharded": "", "whole": "", "error": str(error)}
        dist.barrier()
    drawn = evaluated(13, shard="yes", draws="x")
    found["drawn"] = {"sharded": "", "whole": "", "result": [drawn.deterministic, drawn.warnings]}
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def failing() -> None:
    """In a group of the script's own a forward fails on one rank; the next evaluation is right."""
    dist.init_process_group("gloo")
    try:
        evaluated(30, shard="yes", what="raise", at="3", rank="1")
        raised = "nothing"
    except (ValueError, PeerError) as error:
        raised = f"{type(error).__name__}: {error}"
    said: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(said, raised)
    digests = [evaluated(30, shard=shard).metrics_digest for shard in ("yes", "no")]
    if dist.get_rank() == 0:
        print(json.dumps({"raised": said, "digests": digests}))
    dist.barrier()
    dist.destroy_process_group()


ATTEMPTS: dict[str, dict[str, str]] = {
    "good": {},
    "everywhere": {"what": "raise", "at": "3"},
    "good after everywhere": {},
    "columns of one rank": {"what": "observe", "at": "3", "rank": "1"},
    "good after columns": {},
    "forward of one rank": {"what": "raise", "at": "3", "rank": "1"},
    "good at last": {},
}


def attempts() -> int:
    """Several attempts in one session, some of which fail; print what becomes of each."""
    with dualeval.Session() as session:

        def attempt(task: ShardedTask) -> Callable[[], Result]:
            return lambda: session.evaluate(task, batch_size=4, puts_back=False, last=True)

        for name, wrong in ATTEMPTS.items():
            _, failure = session.attempt(attempt(ShardedTask(30, wrong)), last=name == "good at last")
            if session.world.is_main:
                print(f"{name}: {'done' if failure is None else failure}", flush=True)
    return session.exit_code


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "uneven":
        torch.set_num_threads(1)
        uneven(Path(rest[0]))
    elif what == "failing":
        torch.set_num_threads(1)
        failing()
    else:
        sys.exit(attempts() if what == "attempts" else main(what, dict(word.split("=", 1) for word in rest)))
