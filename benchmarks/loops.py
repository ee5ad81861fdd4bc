"""The loops that are compared: dualeval, libraries as their documentation uses them, and loops by hand.

All take the same network, data in memory and batch size, on the CPU in float32, on the ranks that torchrun
has started or on one process. A loop sets up what it needs (outside of its time), evaluates, and gives mean
loss and top-1 as Python numbers. None logs, shows progress or saves anything.

Where a library lets the model be evaluated as it is, nothing wraps it in DistributedDataParallel, which
would send the buffers in each forward.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from problems import Outcome, Problem
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from dualeval.vision_library import torchvision


def world() -> tuple[int, int]:
    """This process's rank, and the number of ranks."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def bare(problem: Problem) -> Outcome:
    """Only count on the device where argmax is the target; this rank's batches, no reduction."""
    rank, size = world()
    images, targets, step = problem.images, problem.targets, problem.batch_size
    right = torch.zeros((), dtype=torch.int64)
    count = 0
    watch = problem.start()
    with torch.inference_mode():
        for first in range(rank * step, len(images), size * step):
            rows = slice(first, first + step)
            right += (problem.network(images[rows]).argmax(dim=1) == targets[rows]).sum()
            count += len(targets[rows])
    right.item()
    return Outcome(**watch.stop(), samples=count)


def dualeval(problem: Problem, layout: Literal["auto", "contiguous"] = "auto") -> Outcome:
    """The door as a user writes it; without a folder, as the others write none."""
    from dualeval import evaluate

    watch = problem.start()
    result = evaluate(
        model=problem.network,
        data=problem.data(),
        collate=problem.collate,
        metrics=["top1", "loss"],
        batch_size=problem.batch_size,
        layout=layout,
        device="cpu",
    )
    times = watch.stop()
    top1, loss = result.metrics["top1"], result.metrics["loss"]
    assert isinstance(top1, float) and isinstance(loss, float)
    # The result's count is over all ranks.
    return Outcome(
        **times, samples=result.samples["evaluated"] if world()[0] == 0 else 0, top1=top1, loss=loss
    )


def _loader(problem: Problem) -> DataLoader[Any]:
    """This rank's share, as ``DistributedSampler`` makes it: repeats samples until it is even."""
    data = problem.data()
    sampler: DistributedSampler[Any] | None = None
    if world()[1] > 1:
        if not distributed.is_initialized():
            distributed.init_process_group("gloo")
        sampler = DistributedSampler(data, shuffle=False)
    return DataLoader(data, batch_size=problem.batch_size, sampler=sampler, collate_fn=problem.collate)


def all_reduce(problem: Problem) -> Outcome:
    """By hand: sums of every batch by ``.item()``, one all_reduce of three sums at the end."""
    loader, criterion = _loader(problem), nn.CrossEntropyLoss()
    loss_sum, right, count = 0.0, 0, 0
    watch = problem.start()
    with torch.inference_mode():
        for images, targets in loader:
            logits = problem.network(images)
            loss_sum += criterion(logits, targets).item() * len(targets)
            right += (logits.argmax(dim=1) == targets).sum().item()
            count += len(targets)
        totals = torch.tensor([loss_sum, right, count], dtype=torch.float64)
        if world()[1] > 1:
            distributed.all_reduce(totals)
        loss, top1 = (totals[:2] / totals[2]).tolist()
    return Outcome(**watch.stop(), samples=count, top1=top1, loss=loss)


def torchmetrics(problem: Problem) -> Outcome:
    """Metrics updated on every batch and synchronised by ``compute``; DDP, as its page on DDP has it."""
    torchvision()  # torchmetrics imports it, and beside CPU torch only this way does that work
    from torchmetrics import MeanMetric
    from torchmetrics.classification import MulticlassAccuracy

    loader, criterion = _loader(problem), nn.CrossEntropyLoss()
    model = DistributedDataParallel(problem.network) if world()[1] > 1 else problem.network
    accuracy, mean_loss = MulticlassAccuracy(num_classes=problem.classes, average="micro"), MeanMetric()
    count = 0
    watch = problem.start()
    with torch.inference_mode():
        for images, targets in loader:
            logits = model(images)
            # update, not forward: that would compute each batch's own value too.
            mean_loss.update(criterion(logits, targets), weight=len(targets))
            accuracy.update(logits, targets)
            count += len(targets)
        loss, top1 = mean_loss.compute().item(), accuracy.compute().item()
    return Outcome(**watch.stop(), samples=count, top1=top1, loss=loss)


def accelerate(problem: Problem) -> Outcome:
    """``gather_for_metrics`` of losses, predictions and targets on every batch."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    # The model stays as it is: "You don't need to prepare a model if it is used only for inference".
    loader = accelerator.prepare(
        DataLoader(problem.data(), batch_size=problem.batch_size, collate_fn=problem.collate)
    )
    criterion = nn.CrossEntropyLoss(reduction="none")
    losses: list[Tensor] = []
    right, count = 0, 0
    watch = problem.start()
    with torch.inference_mode():
        for images, targets in loader:
            logits = problem.network(images)
            gathered = accelerator.gather_for_metrics(
                (criterion(logits, targets), logits.argmax(dim=1), targets)
            )
            losses.append(gathered[0])
            right += (gathered[1] == gathered[2]).sum().item()
            count += len(gathered[2])
        loss = torch.cat(losses).mean().item()
    times = watch.stop()
    # Every rank has gathered all samples; they count once.
    return Outcome(
        **times, samples=count if accelerator.is_main_process else 0, top1=right / count, loss=loss
    )


def ignite(problem: Problem) -> Outcome:
    """``create_supervised_evaluator`` with its Accuracy and Loss."""
    from ignite import distributed as idist
    from ignite.engine import create_supervised_evaluator
    from ignite.metrics import Accuracy, Loss

    size = world()[1]
    if size > 1 and not distributed.is_initialized():
        idist.initialize("gloo")
    count = 0

    def prepare(batch: list[Tensor], device: object, non_blocking: bool) -> tuple[Tensor, Tensor]:
        nonlocal count
        count += len(batch[1])
        return batch[0], batch[1]

    # It divides the batch size by the number of ranks.
    loader = idist.auto_dataloader(
        problem.data(), batch_size=problem.batch_size * size, collate_fn=problem.collate
    )
    evaluator = create_supervised_evaluator(
        problem.network,
        metrics={"top1": Accuracy(), "loss": Loss(nn.CrossEntropyLoss())},
        prepare_batch=prepare,
    )
    watch = problem.start()
    found = evaluator.run(loader).metrics
    return Outcome(**watch.stop(), samples=count, top1=found["top1"], loss=found["loss"])


def lightning(problem: Problem) -> Outcome:
    """``Trainer.validate`` of a module that logs a TorchMetrics accuracy and the loss."""
    torchvision()  # as for torchmetrics
    from lightning import LightningModule, Trainer
    from torchmetrics.classification import MulticlassAccuracy

    class Validated(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = problem.network
            self.accuracy = MulticlassAccuracy(num_classes=problem.classes, average="micro")
            self.count = 0

        def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
            images, targets = batch
            logits = self.network(images)
            self.count += len(targets)
            self.accuracy.update(logits, targets)
            self.log("top1", self.accuracy)
            loss = nn.functional.cross_entropy(logits, targets)
            self.log("loss", loss, sync_dist=True, batch_size=len(targets))

    size = world()[1]
    trainer = Trainer(
        accelerator="cpu",
        devices=size,
        strategy="ddp" if size > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Validated()
    loader = DataLoader(problem.data(), batch_size=problem.batch_size, collate_fn=problem.collate)
    watch = problem.start()
    [found] = trainer.validate(module, loader, verbose=False)
    return Outcome(**watch.stop(), samples=module.count, top1=found["top1"], loss=found["loss"])


BARE = "bare loop: argmax, no reduction"
# By the names in tables.
LOOPS: dict[str, Callable[[Problem], Outcome]] = {
    BARE: bare,
    # Channels-last, as both networks are convolutional; all other loops leave the model as it is.
    "dualeval": dualeval,
    "dualeval, contiguous": partial(dualeval, layout="contiguous"),
    "by hand: all_reduce": all_reduce,
    "TorchMetrics with DDP": torchmetrics,
    "Accelerate": accelerate,
    "pytorch-ignite": ignite,
    "Lightning": lightning,
}
LIBRARIES = ("TorchMetrics with DDP", "Accelerate", "pytorch-ignite", "Lightning")
