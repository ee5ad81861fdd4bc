"""Seconds of each built-in task's loop beside a loop by hand, which does the same in plain torch.

In one process, on one thread, both take turns; the ratio is the median over the rounds. The engine's time is
the evaluation loop of a whole run (``timing.evaluate_s``: reading, all metrics, journal and rows included),
the hand's from the first sample to its one number. The numbers must agree. What dualeval tries before its
first batch (``look``) costs the same for any number of samples: it is in the time, and named. CPU time, from
the first batch on, leaves out that and waiting for a core. A task is a line of ``CASES``.

    python benchmarks/tasks.py [--rounds N] [--case NAME]
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from common import machine, median_ratio, spread, table, take_turns, write_results
from engine import Engine
from PIL import Image
from tasks_language import language_modeling
from tasks_text import text_classification
from torch import Tensor
from torch.utils.data import DataLoader

from dualeval import Task
from dualeval.tasks.segmentation import Segmentation
from dualeval.vision_library import torchvision

WANTED_AT_MOST = 1.1


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One job, as dualeval gets it and by hand."""

    # A new task for each round.
    task: Callable[[], Task]
    # What people write; returns the value of the metric.
    by_hand: Callable[[], float]
    metric: str
    samples: int
    batch_size: int


# -- segmentation --------------------------------------------------------------------------------------

_PICTURES, _SIDE, _CLASSES, _BATCH, _IGNORED = 480, 160, 21, 8, 255


class _Folder(torch.utils.data.Dataset[Any]):
    """Pictures and masks of two folders, as torch's tutorials read them."""

    def __init__(self, root: Path) -> None:
        self._paths = sorted((root / "img").iterdir())
        self._masks = root / "masks"

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        path = self._paths[index]
        with Image.open(path) as image, Image.open(self._masks / f"{path.stem}.png") as mask:
            pixels = torchvision().transforms.functional.to_tensor(image.convert("RGB"))
            return (pixels - 0.5) / 0.25, torch.from_numpy(np.array(mask)).long()


def segmentation(folder: Path, pictures: int = _PICTURES) -> Pair:
    """torchvision's smallest network on JPEGs of one size with indexed masks; random weights."""
    draw = np.random.default_rng(0)
    for name in ("img", "masks"):
        (folder / name).mkdir()
    for number in range(pictures):
        coarse = draw.integers(0, 256, (_SIDE // 8, _SIDE // 8, 3), np.uint8)
        Image.fromarray(coarse).resize((_SIDE, _SIDE)).save(folder / f"img/{number:03}.jpg")
        labels = draw.integers(0, _CLASSES, (_SIDE // 8, _SIDE // 8), np.uint8).repeat(8, 0).repeat(8, 1)
        labels[draw.random(labels.shape) < 0.05] = _IGNORED
        Image.fromarray(labels).save(folder / f"masks/{number:03}.png")
    torch.manual_seed(0)
    get = torchvision().models.get_model
    net = get("lraspp_mobilenet_v3_large", weights=None, weights_backbone=None, num_classes=_CLASSES).eval()

    def by_hand() -> float:
        confusion = torch.zeros(_CLASSES, _CLASSES, dtype=torch.int64)
        with torch.inference_mode():
            for images, labels in DataLoader(_Folder(folder), batch_size=_BATCH):
                predicted = net(images)["out"].argmax(1)
                counts = labels != _IGNORED
                places = labels[counts] * _CLASSES + predicted[counts]
                confusion += torch.bincount(places, minlength=_CLASSES**2).view_as(confusion)
        right = confusion.diag()
        union = confusion.sum(0) + confusion.sum(1) - right
        return float((right[union > 0].double() / union[union > 0]).mean())

    def task() -> Task:
        masks = folder / "masks"
        return Segmentation(model=net, data=folder / "img", masks=masks, mean=(0.5,), std=(0.25,))

    return Pair(task=task, by_hand=by_hand, metric="mean_iou", samples=pictures, batch_size=_BATCH)


CASES: Mapping[str, Callable[[Path], Pair]] = {
    "segmentation": segmentation,
    "text-classification": lambda folder: Pair(**text_classification(folder)),
    "language-modeling": lambda folder: Pair(**language_modeling(folder)),
}


# -- turns ---------------------------------------------------------------------------------------------


def measured(pair: Pair, rounds: int, out: Path) -> tuple[dict[str, list[tuple[float, float]]], list[float]]:
    """By loop: wall and processor seconds, a pair a round; and the seconds of each look."""
    engine = Engine()
    values: dict[str, float] = {}
    looks: list[float] = []

    def ours() -> tuple[float, float]:
        task, stamps = pair.task(), [0.0, 0.0]
        collate = task.collate

        def first(samples: Any) -> Any:
            # Of the loop: what is tried before it is of fewer samples.
            if not stamps[0] and len(samples) == pair.batch_size:
                stamps[0] = process_time()
            return collate(samples)

        def show(done: int, total: int) -> None:
            # The engine's last report, after the last flush, ends the loop.
            stamps[1] = process_time()

        task.collate = first  # type: ignore[method-assign]
        # The layout of the loop by hand; channels-last is what dualeval takes by itself.
        options: dict[str, Any] = {"layout": "contiguous", "workers": 0, "fresh": True}
        result = engine.evaluate(task, {"show": show}, out=out, batch_size=pair.batch_size, **options)
        assert result.chunks["resumed"] == 0, "the folder was emptied"
        value = result.metrics[pair.metric]
        assert isinstance(value, float)
        values["dualeval"] = value
        looks.append(result.timing["ranks"][0]["look"])
        return result.timing["evaluate_s"], stamps[1] - stamps[0]

    def theirs() -> tuple[float, float]:
        start, start_cpu = perf_counter(), process_time()
        values["by hand"] = pair.by_hand()
        return perf_counter() - start, process_time() - start_cpu

    loops = {"dualeval": ours, "by hand": theirs}
    take_turns(1, loops)
    found = take_turns(rounds, loops)
    assert math.isclose(values["dualeval"], values["by hand"], rel_tol=1e-3), values
    return found, looks[1:]


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--case", choices=CASES, action="append")
    arguments = parser.parse_args()
    host = machine()
    torch.set_num_threads(1)
    rows, figures = [], {}
    for name in arguments.case or CASES:
        with tempfile.TemporaryDirectory(prefix="dualeval-tasks-") as folder:
            pair = CASES[name](Path(folder))
            found, looks = measured(pair, arguments.rounds, Path(folder) / "out")
        (ours, ours_cpu), (theirs, theirs_cpu) = (zip(*found[loop], strict=True) for loop in found)
        ratios = {"wall": median_ratio(ours, theirs), "cpu": median_ratio(ours_cpu, theirs_cpu)}
        figures[name] = {"ratios": ratios, "seconds": found, "looks": looks}
        speeds = [f"{pair.samples / statistics.median(loop):,.1f}" for loop in (theirs, ours)]
        speeds.append(f"{statistics.median(looks):.2f}")
        spreads = [f"**{spread(ours, theirs)}**", spread(ours_cpu, theirs_cpu)]
        rows.append([name, *speeds, *spreads, f"{WANTED_AT_MOST}"])
    head = [
        "task",
        "by hand, samples/s",
        "dualeval, samples/s",
        "look, s",
        "time over by hand",
        "by CPU time",
        "at most",
    ]
    body = (
        f"One process, one thread, {arguments.rounds} rounds taken in turns; the median of dualeval's "
        "seconds over those by hand, and the middle half of the ratios in brackets.\n\n"
        f"{table(head, rows)}"
    )
    write_results("tasks", "Built-in tasks beside loops by hand", body, {"cases": figures}, host)


if __name__ == "__main__":
    main()
