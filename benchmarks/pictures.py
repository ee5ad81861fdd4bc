"""Pictures per second from JPEG files: dualeval against torchvision's ImageFolder and torch's DataLoader.

A folder of JPEGs in the sizes of ImageNet is made of crops and mirror images of real photographs. A plain
loop (``ImageFolder``, ``Resize(256)``, ``CenterCrop(224)``, ``ToTensor``, ``Normalize``, ``DataLoader``,
mean loss and top-1) and whole runs of dualeval take turns in one process, with the same number of reading
processes and one thread each.

First each way of reading a picture is timed alone, file by file, at its best of some rounds: that is nearly
the same on a busy machine.

    python benchmarks/pictures.py [--files 1000] [--rounds 7] [--network cheap] [--photographs FOLDER]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from common import machine, median_ratio, spread, table, take_turns, write_results
from engine import Engine
from PIL import Image
from torch import Tensor, nn

from dualeval.data.image_sets.class_folders import ImageFolder
from dualeval.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from dualeval.tasks.image_classification import ImageClassification
from dualeval.vision_library import torchvision

WANTED = 1.2
PLAIN, OURS = "ImageFolder + DataLoader", "dualeval"
_CLASSES = 10
_BATCH = 32
# Most photographs of ImageNet are of one of these sizes.
_SIZES = [(500, 375)] * 6 + [(375, 500)] * 2 + [(500, 333), (333, 500)]
_QUALITIES = (75, 85, 90, 95)
# Files that ResNet-18 takes about half a minute for on one core.
_FILES_OF_RESNET = 320
# Read file by file.
_READ_ALONE, _ROUNDS_ALONE = 200, 15


class Cheap(nn.Module):
    """Ten logits that depend on each picture and cost next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, _CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (n, classes) of normalised images (n, 3, height, width)."""
        logits: Tensor = self.head(images[:, :, ::32, ::32].mean((2, 3)))
        return logits


def cheap() -> Cheap:
    """The cheap network."""
    return Cheap()


def resnet18() -> nn.Module:
    """ResNet-18 with ten classes."""
    model: nn.Module = torchvision().models.resnet18(num_classes=_CLASSES)
    return model


def photographs() -> Path:
    """The folder of the photographs that the tests use."""
    found = find_spec("foolbox")
    if found is None or not found.submodule_search_locations:
        raise SystemExit(
            "foolbox, whose photographs are used, is not installed (make test): --photographs FOLDER"
        )
    return Path(found.submodule_search_locations[0]) / "data"


def write_files(folder: Path, source: Path, count: int) -> None:
    """Write crops and mirror images of a folder's JPEGs, evenly over the classes; the same ones each time."""
    draw = random.Random(0)
    originals = []
    for path in sorted(source.glob("*.jpg")):
        with Image.open(path) as image:
            originals.append(image.convert("RGB"))
    for number in range(count):
        original, (width, height) = originals[number % len(originals)], draw.choice(_SIZES)
        # The largest part of the wanted shape, and of it 60 to 100 %.
        scale = min(original.width / width, original.height / height) * draw.uniform(0.6, 1)
        left = draw.uniform(0, original.width - scale * width)
        upper = draw.uniform(0, original.height - scale * height)
        box = (left, upper, left + scale * width, upper + scale * height)
        made = original.resize((width, height), Image.Resampling.BICUBIC, box)
        if draw.random() < 0.5:
            made = made.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        own = folder / f"class{number % _CLASSES}"
        own.mkdir(parents=True, exist_ok=True)
        made.save(own / f"{number:05}.jpg", quality=draw.choice(_QUALITIES))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured in turns."""

    network: str  # the function here that makes it: "cheap" or "resnet18"
    folder: Path  # the files
    count: int  # how many they are
    workers: int  # reading processes

    def task(self) -> ImageClassification:
        """dualeval's task."""
        return ImageClassification(
            model=f"pictures:{self.network}",
            weights="random:0",
            data=self.folder,
            preprocessing={"preprocessing": "imagenet"},
        )


def image_folder(folder: Path) -> Any:
    """torchvision's data set, with the usual steps."""
    library: Any = torchvision()
    transforms = library.transforms
    steps = transforms.Compose(
        [
            transforms.Resize(256),
            transforms.CenterCrop(224),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )
    return library.datasets.ImageFolder(folder, steps)


def read_alone(folder: Path) -> dict[str, float]:
    """Milliseconds a picture by way of reading, without batches and model: the mean of each file's best."""
    theirs, wanted = image_folder(folder), Preprocessing(resize=256, crop=224)
    own = ImageFolder(folder, wanted)
    ways: dict[str, Callable[[int], Any]] = {
        PLAIN: lambda index: theirs[index],
        OURS: lambda index: own.__getitems__([index]),
    }
    count = min(_READ_ALONE, len(theirs))
    best = {name: [float("inf")] * count for name in ways}
    for _ in range(_ROUNDS_ALONE):
        for name, read in ways.items():
            for index in range(count):
                start = perf_counter()
                read(index)
                best[name][index] = min(best[name][index], perf_counter() - start)
    return {name: 1000 * statistics.mean(seconds) for name, seconds in best.items()}


def plain(setting: Setting, model: nn.Module) -> tuple[float, float]:
    """Seconds of the plain loop, and its top-1."""
    data = image_folder(setting.folder)
    start = perf_counter()
    loader = torch.utils.data.DataLoader(data, batch_size=_BATCH, num_workers=setting.workers)
    loss, hits = 0.0, 0
    with torch.inference_mode():
        for images, targets in loader:
            logits = model(images)
            loss += float(nn.functional.cross_entropy(logits, targets, reduction="sum"))
            hits += int((logits.argmax(1) == targets).sum())
    return perf_counter() - start, hits / len(data)


def ours(setting: Setting, engine: Engine, out: Path) -> tuple[float, float]:
    """Seconds of the loop of a whole run, with all metrics, journal and rows, and its top-1."""
    options: dict[str, Any] = {"out": out, "batch_size": _BATCH, "workers": setting.workers, "fresh": True}
    result = engine.evaluate(setting.task(), **options)
    top1 = result.metrics["top1"]
    assert isinstance(top1, float)
    return result.timing["evaluate_s"], top1


def measure(setting: Setting, rounds: int) -> dict[str, list[float]]:
    """Pictures per second by loop, one value a round."""
    engine = Engine()
    model = setting.task().build_model(torch.device("cpu")).eval()
    with tempfile.TemporaryDirectory(prefix="dualeval-pictures-") as folder:
        out = Path(folder) / "out"
        entries: dict[str, Callable[[], tuple[float, float]]] = {
            PLAIN: lambda: plain(setting, model),
            OURS: lambda: ours(setting, engine, out),
        }
        take_turns(1, entries)
        measured = take_turns(rounds, entries)
    # Of ResNet-18 another layout in memory gives other last bits, and no other class.
    tops = {round(top1, 6) for turns in measured.values() for _, top1 in turns}
    assert len(tops) == 1, f"the loops differ in top-1: {tops}"
    return {name: [setting.count / seconds for seconds, _ in turns] for name, turns in measured.items()}


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--network", choices=("cheap", "resnet18"), action="append")
    parser.add_argument("--photographs", type=Path)
    arguments = parser.parse_args()
    host = machine()
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {}
    alone: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="dualeval-jpegs-") as folder:
        source = arguments.photographs or photographs()
        for network in arguments.network or ("cheap", "resnet18"):
            count = arguments.files if network == "cheap" else min(arguments.files, _FILES_OF_RESNET)
            files = Path(folder) / network
            write_files(files, source, count)
            alone = alone or read_alone(files)
            for workers in (0, 1):
                setting = Setting(network=network, folder=files, count=count, workers=workers)
                found[f"{network}, {workers} reading processes"] = measure(setting, arguments.rounds)
    body = _text(found, alone, arguments.rounds, arguments.files)
    ratios = {
        name: {of: median_ratio(rates, by[PLAIN]) for of, rates in by.items()} for name, by in found.items()
    }
    figures = {"ratios": ratios, "alone_ms": alone, "wanted_at_least": WANTED, "pictures_per_s": found}
    write_results("pictures", "Reading JPEG files", body, figures, host)


def _text(found: dict[str, dict[str, list[float]]], alone: dict[str, float], rounds: int, files: int) -> str:
    rows = []
    for name, by in found.items():
        speeds = [f"{statistics.median(by[loop]):,.0f}" for loop in (PLAIN, OURS)]
        rows.append([name, *speeds, f"**{spread(by[OURS], by[PLAIN])}**"])
    head = ["network", *(f"{loop}, pictures/s" for loop in (PLAIN, OURS)), "dualeval over plain"]
    alone_rows = [[name, f"{ms:.2f}", f"{alone[PLAIN] / ms:.2f}"] for name, ms in alone.items()]
    qualities = ", ".join(map(str, _QUALITIES))
    return (
        f"{files} JPEG files (for ResNet-18 {_FILES_OF_RESNET} at most) of 500 x 375, 375 x 500, 500 x 333 "
        f"and 333 x 500 pixels, qualities {qualities}, 4:2:0, in the page cache; resize 256, crop 224, batch "
        f"{_BATCH}, one process and one thread, {rounds} rounds in turns, after one that is not counted. "
        "With one reading process two cores are used. The ratio is the median over the rounds, with the "
        "middle half in brackets. The plain loop counts mean loss and top-1; dualeval is a whole run, with "
        "all metrics, journal and rows. The cheap network is the mean of a few pixels and a linear layer."
        "\n\n"
        f"{table(head, rows)}\n"
        "## Reading alone\n\n"
        "Reading, decoding, resizing and cropping one picture, without batches and model, in one thread: the "
        f"mean over {min(_READ_ALONE, files)} files of the best of {_ROUNDS_ALONE} rounds.\n\n"
        f"{table(['way', 'ms a picture', 'speed over plain'], alone_rows)}"
    )


if __name__ == "__main__":
    main()
