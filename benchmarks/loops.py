"""Evaluation loops as people write them by hand, and the bare loop that all are measured against.

All take the same model, data in memory and batch size, and normalise uint8 images as ``dualeval`` does.
None wraps the model in DistributedDataParallel but Accelerate's, whose ``prepare`` does so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, process_time

import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dualeval.vision_library import torchvision


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model and images in memory.

    Attributes:
        model: in evaluation mode, on the CPU.
        images: uint8 (n, channels, height, width).
        targets: int64 (n,).
        mean: of pixels scaled to [0, 1], a value a channel.
        std: likewise.
        batch_size: samples a batch.
    """

    model: nn.Module
    images: Tensor
    targets: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    batch_size: int

    def normaliser(self) -> Callable[[Tensor], Tensor]:
        """What turns uint8 images into the model's input."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return lambda images: images.float().div_(255).sub_(mean).div_(std)

    def first(self, count: int) -> Problem:
        """The same model on the first images only."""
        return Problem(
            model=self.model,
            images=self.images[:count],
            targets=self.targets[:count],
            mean=self.mean,
            std=self.std,
            batch_size=self.batch_size,
        )

    def loader(self) -> DataLoader[tuple[Tensor, ...]]:
        """This rank's share, as ``DistributedSampler`` makes it: repeats samples until it is even."""
        dataset = TensorDataset(self.images, self.targets)
        sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(dataset, shuffle=False)
        return DataLoader(dataset, batch_size=self.batch_size, sampler=sampler)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank's loop gave.

    Attributes:
        seconds: of the loop, with its final reduction.
        cpu_s: processor seconds of this rank in it.
        samples: counted by this rank.
        top1: over all ranks; None where the loop does not reduce.
        loss: the mean over all ranks, likewise.
    """

    seconds: float
    cpu_s: float
    samples: int
    top1: float | None = None
    loss: float | None = None


class _Stopwatch:
    """Wall and processor time since it was made."""

    def __init__(self) -> None:
        self._start, self._cpu = perf_counter(), process_time()

    def stop(self) -> dict[str, float]:
        """The two, as fields of ``Outcome``."""
        return {"seconds": perf_counter() - self._start, "cpu_s": process_time() - self._cpu}


def bare(problem: Problem, rank: int = 0, size: int = 1) -> Outcome:
    """Only count on the device where argmax is the target; this rank's batches, no reduction."""
    normalise = problem.normaliser()
    right = torch.zeros((), dtype=torch.int64)
    count = 0
    watch = _Stopwatch()
    with torch.inference_mode():
        for first in range(rank * problem.batch_size, len(problem.images), size * problem.batch_size):
            rows = slice(first, first + problem.batch_size)
            logits = problem.model(normalise(problem.images[rows]))
            right += (logits.argmax(dim=1) == problem.targets[rows]).sum()
            count += len(logits)
    right.item()
    return Outcome(**watch.stop(), samples=count)


def all_reduce(problem: Problem) -> Outcome:
    """``.item()`` on every batch, one all_reduce of three sums at the end."""
    normalise, loader, criterion = problem.normaliser(), problem.loader(), nn.CrossEntropyLoss()
    loss_sum, right, count = 0.0, 0, 0
    watch = _Stopwatch()
    with torch.inference_mode():
        for images, targets in loader:
            logits = problem.model(normalise(images))
            loss_sum += criterion(logits, targets).item() * len(targets)
            right += (logits.argmax(dim=1) == targets).sum().item()
            count += len(targets)
        totals = torch.tensor([loss_sum, right, count], dtype=torch.float64)
        distributed.all_reduce(totals)
        loss, top1 = (totals[:2] / totals[2]).tolist()
    return Outcome(**watch.stop(), samples=count, top1=top1, loss=loss)


def torchmetrics(problem: Problem) -> Outcome:
    """MulticlassAccuracy and MeanMetric, updated on every batch, synchronised by ``compute``."""
    torchvision()  # torchmetrics imports it, and beside CPU torch only this way does that work
    from torchmetrics import MeanMetric
    from torchmetrics.classification import MulticlassAccuracy

    normalise, loader, criterion = problem.normaliser(), problem.loader(), nn.CrossEntropyLoss()
    with torch.inference_mode():
        classes = problem.model(normalise(problem.images[:2])).shape[1]
    accuracy, mean_loss = MulticlassAccuracy(num_classes=classes, average="micro"), MeanMetric()
    count = 0
    watch = _Stopwatch()
    with torch.inference_mode():
        for images, targets in loader:
            logits = problem.model(normalise(images))
            mean_loss.update(criterion(logits, targets), weight=len(targets))
            accuracy.update(logits, targets)
            count += len(targets)
        loss, top1 = mean_loss.compute().item(), accuracy.compute().item()
    return Outcome(**watch.stop(), samples=count, top1=top1, loss=loss)


def accelerate(problem: Problem) -> Outcome:
    """``gather_for_metrics`` of losses, predictions and targets on every batch; the main process counts."""
    from accelerate import Accelerator  # type: ignore[import-not-found, import-untyped, unused-ignore]

    threads = torch.get_num_threads()
    accelerator = Accelerator(cpu=True)
    dataset = TensorDataset(problem.images, problem.targets)
    model, loader = accelerator.prepare(
        copy.deepcopy(problem.model), DataLoader(dataset, batch_size=problem.batch_size)
    )
    torch.set_num_threads(threads)  # Accelerate takes all cores
    normalise, criterion = problem.normaliser(), nn.CrossEntropyLoss(reduction="none")
    losses: list[Tensor] = []
    right, count = 0, 0
    watch = _Stopwatch()
    with torch.inference_mode():
        for images, targets in loader:
            logits = model(normalise(images))
            gathered = accelerator.gather_for_metrics(
                (criterion(logits, targets), logits.argmax(dim=1), targets)
            )
            losses.append(gathered[0])
            right += (gathered[1] == gathered[2]).sum().item()
            count += len(gathered[2])
        loss = torch.cat(losses).mean().item()
    times = watch.stop()
    # Every rank has gathered all samples; they count once.
    counted = count if accelerator.is_main_process else 0
    return Outcome(**times, samples=counted, top1=right / count, loss=loss)
