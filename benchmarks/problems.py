"""What is evaluated by the loops that are compared: a network, and images in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from dualeval import ModelTask
from dualeval.data.small_images import read_idx
from dualeval.models.classifiers import build
from dualeval.tasks.image_classification import EMBEDDED_WEIGHTS, FASHION_MEAN, FASHION_STD
from dualeval.tasks.image_data import ASSETS

# Debian's package dataset-fashion-mnist: 60,000 images of training and 10,000 of test.
_FULL_SET = Path("/usr/share/datasets/fashion-mnist")
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank's loop gave."""

    # From the first forward of a whole batch until loss and top1 are at hand, reductions included.
    seconds: float
    cpu_s: float  # processor seconds of this rank in them
    samples: int  # that this rank has added to the result; 0 where another rank adds them
    top1: float | None = None  # over all ranks; None where the loop does not reduce
    loss: float | None = None  # the mean over all ranks, likewise


class Stopwatch:
    """Times from the first forward of a whole batch on: what a library does before it is start-up."""

    def __init__(self) -> None:
        self.began: tuple[float, float] | None = None
        self._least = 1

    def reset(self, least: int) -> None:
        """Wait for the next forward of so many samples."""
        self.began, self._least = None, least

    def forward(self, samples: int) -> None:
        """Begin, where this is the first forward of a whole batch."""
        if self.began is None and samples >= self._least:
            self.began = perf_counter(), process_time()

    def stop(self) -> dict[str, float]:
        """Wall and processor seconds, as fields of ``Outcome``."""
        wall_s, cpu_s = perf_counter(), process_time()
        assert self.began is not None, "no problem is empty"
        return {"seconds": wall_s - self.began[0], "cpu_s": cpu_s - self.began[1]}


class Normalised(nn.Module):
    """A network that takes uint8 images, so that every loop normalises them in the same way."""

    # It decides no number: without this, dualeval would refuse ranks whose times differ.
    dualeval_identity_ignores = ("watch",)

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)
        self.watch = Stopwatch()
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Logits (n, classes) of uint8 images (n, channels, height, width)."""
        self.watch.forward(len(images))
        logits: Tensor = self.network(images.float().div_(255).sub_(self.mean).div_(self.std))
        return logits


class ReadyBatches(Dataset[tuple[Tensor, Tensor]]):
    """Images and targets in memory, read by the batch: nothing is left to collate."""

    def __init__(self, images: Tensor, targets: Tensor) -> None:
        self._images, self._targets = images, targets

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample; no loop asks for it, but that is what makes a data set."""
        return self._images[index], self._targets[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """One ready batch."""
        rows: Any = (
            slice(indices.start, indices.stop) if isinstance(indices, range) else torch.as_tensor(indices)
        )
        return self._images[rows], self._targets[rows]

    def id(self, index: int) -> str:
        """The sample's number."""
        return str(index)

    def fingerprint(self, count: int) -> str:
        """sha256 over the first targets."""
        return hashlib.sha256(self._targets[:count].numpy().data).hexdigest()


def unchanged(batch: Any) -> Any:
    """The ``collate_fn`` of ready batches."""
    return batch


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A network and images in memory."""

    network: Normalised  # in evaluation mode, on the CPU; takes uint8 images
    images: Tensor  # uint8 (n, channels, height, width)
    targets: Tensor  # int64 (n,)
    classes: int  # number of the network's outputs
    batch_size: int = 64  # samples a batch
    # Whether the data set returns ready batches; else it is a ``TensorDataset``, whose samples are collated
    # as a DataLoader does without being told.
    ready: bool = False

    def data(self) -> Dataset[Any]:
        """The images and targets as a data set."""
        return (ReadyBatches if self.ready else TensorDataset)(self.images, self.targets)

    @property
    def collate(self) -> Callable[[Any], Any] | None:
        """What a DataLoader gets as its ``collate_fn``; None for its own."""
        return unchanged if self.ready else None

    def task(self, metrics: Sequence[str] | None = None) -> ModelTask:
        """The problem as dualeval gets it; without ``metrics`` with all those of a classifier."""
        return ModelTask(model=self.network, data=self.data(), collate=self.collate, metrics=metrics)

    def first(self, count: int) -> Problem:
        """The same on the first images only."""
        return replace(self, images=self.images[:count], targets=self.targets[:count])

    def start(self) -> Stopwatch:
        """A stopwatch that begins at the next forward of a whole batch: dualeval tries two samples before."""
        self.network.watch.reset(min(self.batch_size, len(self.images)))
        return self.network.watch


def fashion_cnn() -> Problem:
    """The embedded job: its network, weights and 10,000 images."""
    images, targets = _fashion_mnist(ASSETS, "t10k")
    network = build("fashion-cnn", str(EMBEDDED_WEIGHTS), None)
    return Problem(
        network=Normalised(network, (FASHION_MEAN,), (FASHION_STD,)),
        images=images,
        targets=targets,
        classes=10,
    )


def small_cnn() -> Problem:
    """Two convolutions with random weights on 70,000 images: a forward of 3 ms, as short as one on a GPU.

    The images are all of Fashion-MNIST where Debian's package has them, or the embedded ones seven times.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(16 * 7 * 7, 10)),
        )
    if _FULL_SET.is_dir():
        parts = [_fashion_mnist(_FULL_SET, "train"), _fashion_mnist(_FULL_SET, "t10k")]
    else:
        parts = [_fashion_mnist(ASSETS, "t10k")] * 7
    images, targets = map(torch.cat, zip(*parts, strict=True))
    return Problem(
        network=Normalised(network, (FASHION_MEAN,), (FASHION_STD,)),
        images=images,
        targets=targets,
        classes=10,
    )


def _fashion_mnist(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    images, labels = (
        torch.from_numpy(read_idx(folder / f"{split}-{kind}-ubyte.gz"))
        for kind in ("images-idx3", "labels-idx1")
    )
    return images.unsqueeze(1), labels.long()


def resnet18(count: int, batch_size: int) -> Problem:
    """ResNet-18 with random weights on random images of 224 by 224."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, 3, 224, 224)
    return Problem(
        network=Normalised(build("resnet18", "random:0", None), _IMAGENET_MEAN, _IMAGENET_STD),
        images=torch.randint(256, shape, dtype=torch.uint8, generator=generator),
        targets=torch.randint(1000, shape[:1], generator=generator),
        classes=1000,
        batch_size=batch_size,
    )
