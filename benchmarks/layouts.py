"""Images per second of the evaluation loop by layout, precision and folding, relative to contiguous float32.

In one process with one thread all ways take turns; a ratio is the median over the rounds.

    python benchmarks/layouts.py [--rounds N] [--models fashion-cnn,resnet18] [--images N]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from common import machine, spread, table, take_turns, write_results
from engine import Engine
from torch import nn

from dualeval import ModelTask
from dualeval.models.sources.fashion_cnn import FashionCNN
from dualeval.vision_library import torchvision

_BATCH = 32
# Images of each model, so that a loop takes one to a few seconds.
_IMAGES = {
    "fashion-cnn": 6400,
    "resnet18": 96,
    "mobilenet_v3_large": 192,
    "vit_b_16": 32,
    "convnext_tiny": 64,
}
_WANTED = {"fashion-cnn": 2.0, "resnet18": 1.25, "vit_b_16": 0.99}
_BASE = "contiguous"
_AUTO: dict[str, dict[str, Any]] = {_BASE: {"layout": "contiguous"}, "auto": {}}
_MORE: dict[str, dict[str, Any]] = {
    "fold": {"optimize": "fold"},
    "bf16": {"precision": "bf16"},
    "bf16, batch norms fp32": {"precision": "bf16", "keep_batchnorm_fp32": True},
    "amp-bf16": {"precision": "amp-bf16"},
}


def ways_of(name: str) -> dict[str, dict[str, Any]]:
    """The options that a model is evaluated with, by their name on the page."""
    return {**_AUTO, **_MORE} if name == "resnet18" else _AUTO


def problem(name: str, images: int) -> ModelTask:
    """A model with random weights, and images of noise in memory."""
    torch.manual_seed(0)
    model: nn.Module = FashionCNN() if name == "fashion-cnn" else torchvision().models.get_model(name)
    shape = (1, 28, 28) if name == "fashion-cnn" else (3, 224, 224)
    data = torch.utils.data.TensorDataset(torch.rand(images, *shape), torch.arange(images) % 10)
    return ModelTask(model=model.eval(), data=data, metrics=["top1", "loss"], name=name)


def seconds(task: ModelTask, engine: Engine, options: Mapping[str, Any]) -> float:
    """Wall seconds of one evaluation's loop."""
    # As a guest: the model is evaluated again, another way.
    result = engine.evaluate(task, {"guest": True}, batch_size=_BATCH, workers=0, **options)
    return float(result.timing["evaluate_s"])


def measure(names: Mapping[str, int], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Images per second by model and way, a value a round; all ways of all models take turns."""
    engine = Engine()
    entries: dict[str, Callable[[], float]] = {}
    for name, images in names.items():
        task = problem(name, images)
        for way, options in ways_of(name).items():
            entries[f"{name}\0{way}"] = partial(seconds, task, engine, options)
    take_turns(1, entries)
    measured = take_turns(rounds, entries)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for key, times in measured.items():
        name, way = key.split("\0")
        found[name][way] = [names[name] / time for time in times]
    return found


def report(measured: Mapping[str, Mapping[str, list[float]]]) -> str:
    """The page's table."""
    rows = []
    for name, ways in measured.items():
        for way, speeds in ways.items():
            is_wanted = way == "auto" and name in _WANTED
            rows.append(
                [
                    *(name, way, f"{statistics.median(speeds):,.1f}"),
                    "1" if way == _BASE else spread(speeds, ways[_BASE]),
                    f"{_WANTED[name]:g}" if is_wanted else "",
                ]
            )
    return (
        "One process, one thread, wall time of the loop, ways in turns; images/s relative to contiguous "
        "float32 of the same round: median, and the middle half of the ratios in brackets. Random weights, "
        f"images of noise in memory, batch size {_BATCH}; 28 x 28 grey for fashion-cnn, else 224 x 224. "
        "Except for those named contiguous, all have --layout auto.\n\n"
        f"{table(['model', 'way', 'images/s', 'over contiguous', 'wanted at least'], rows)}"
    )


def main() -> None:
    """Measure, print and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", default=",".join(_IMAGES), help="some of the default ones, with commas")
    parser.add_argument("--images", type=int, help="of each model; for a try")
    arguments = parser.parse_args()
    names = {name: arguments.images or _IMAGES[name] for name in arguments.models.split(",")}
    host = machine()
    torch.set_num_threads(1)
    measured = measure(names, arguments.rounds)
    body = report(measured)
    figures = {"images_per_s": measured, "wanted_at_least": _WANTED}
    write_results("layouts", "Layouts and precisions", body, figures, host)


if __name__ == "__main__":
    main()
