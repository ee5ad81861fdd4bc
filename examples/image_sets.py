"""Images for examples/train_with_eval.py: what lies in a folder, and what is done to each picture."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torchvision
from PIL import Image
from torch.utils.data import Dataset

import dualeval
from dualeval.data.preprocessing import Preprocessing
from dualeval.data.set_names import has_idx
from dualeval.data.small_images import read_idx
from dualeval.models.classifiers import source_of
from dualeval.tasks.image_classification import FASHION_MEAN, FASHION_STD

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class IdxPictures(Dataset[tuple[Any, int]]):
    """Grey pictures in idx files, the format of MNIST and Fashion-MNIST; ``split`` is "train" or "t10k"."""

    transform: Any = None

    def __init__(self, folder: Path, split: str) -> None:
        self.images = read_idx(folder / f"{split}-images-idx3-ubyte.gz")
        self.targets = read_idx(folder / f"{split}-labels-idx1-ubyte.gz").tolist()
        if len(self.images) != len(self.targets):
            raise dualeval.UsageError(
                f"{folder}: {len(self.images)} images and {len(self.targets)} labels in files of {split}: "
                "each image needs one label"
            )
        self.classes = range(max(self.targets, default=-1) + 1)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(Image.fromarray(self.images[index])), self.targets[index]


class Seeded(Dataset[Any]):
    """Augments a sample by seed, epoch and its number alone, whichever process reads it, and when."""

    def __init__(self, data: Any, seed: int) -> None:
        self.data, self.seed, self.epoch = data, seed, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(mixed(self.seed, self.epoch, index))
            return self.data[index]


def mixed(*numbers: int) -> int:
    """One seed of several numbers; Python's hash of numbers is the same in every process."""
    return hash(numbers) % 2**63


def open_set(folder: Path, training: bool) -> Any:
    """The pairs (picture, class) for training or validation, with their ``classes``; no transform yet.

    Raises:
        UsageError: the folder is none of those that the example knows, or a file of it is missing or damaged.
    """
    datasets = torchvision.datasets
    try:
        if has_idx(folder):
            return IdxPictures(folder, "train" if training else "t10k")
        for kind in (datasets.CIFAR10, datasets.CIFAR100):
            if (folder / kind.base_folder).is_dir():
                return kind(folder, train=training)
        if (folder / "train").is_dir() and (folder / "val").is_dir():
            return datasets.ImageFolder(folder / ("train" if training else "val"))
    except (OSError, RuntimeError) as error:
        raise dualeval.UsageError(f"--data {folder}: {error}") from error
    raise dualeval.UsageError(
        f"--data {folder}: expected a folder with train/CLASS/ and val/CLASS/, with cifar-10-batches-py or "
        "cifar-100-python, or with train-images-idx3-ubyte.gz and the other three files of Fashion-MNIST"
    )


def pixels_of(options: Namespace, data: Any) -> Preprocessing:
    """Size, channels, mean and standard deviation of the images, as evaluated.

    Raises:
        UsageError: ``--resize`` is given where images keep their size.
    """
    size, own = options.size, source_of(options.model).preprocessing() or Preprocessing()
    if isinstance(data, torchvision.datasets.ImageFolder):
        fitting = own.resize if size is None else round(size * own.resize / own.crop)
        return replace(own, resize=options.resize or fitting, crop=size or own.crop)
    if options.resize:
        raise dualeval.UsageError("--resize is for folders of images: leave it out, or give --size")
    if isinstance(data, IdxPictures):
        size = size or data.images.shape[1]
        return Preprocessing(resize=size, crop=size, channels=1, mean=(FASHION_MEAN,), std=(FASHION_STD,))
    return Preprocessing(resize=size or 32, crop=size or 32, mean=CIFAR_MEAN, std=CIFAR_STD)


def transform_of(options: Namespace, data: Any, channels: int, training: bool) -> Any:
    """What makes a picture a float tensor of so many channels; training has the augmentation asked for."""
    of, pixels = torchvision.transforms, pixels_of(options, data)
    interpolation = of.InterpolationMode(pixels.interpolation)
    augments = {
        name: training and getattr(options, name) for name in ("crop", "flip", "rand_augment", "erasing")
    }
    steps = [of.Grayscale(channels)] if pixels.channels == 1 else []
    if augments["crop"] and isinstance(data, torchvision.datasets.ImageFolder):
        steps += [of.RandomResizedCrop(pixels.crop, interpolation=interpolation)]
    else:
        steps += [of.Resize(pixels.resize, interpolation), of.CenterCrop(pixels.crop)]
        steps += [of.RandomCrop(pixels.crop, padding=pixels.crop // 8)] if augments["crop"] else []
    steps += [of.RandomHorizontalFlip()] if augments["flip"] else []
    steps += [of.RandAugment(interpolation=interpolation)] if augments["rand_augment"] else []
    steps += [of.ToTensor(), of.Normalize(pixels.mean, pixels.std)]
    steps += [of.RandomErasing(options.erasing)] if augments["erasing"] else []
    return of.Compose(steps)
