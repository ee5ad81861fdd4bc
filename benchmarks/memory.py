"""Peak memory of a rank at 10,000 and at 100,000 samples, on a data set that is not held in memory.

Every run is a process of its own (or a torchrun of its own), evaluates through the engine and writes
its rows to Parquet. Of several ranks the largest counts.

    python benchmarks/memory.py           # a table
    python benchmarks/memory.py --json    # {"1": {"10000": bytes, "100000": bytes}, "2": {...}}
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import ONE_THREAD, machine, python_or_torchrun, run_process, table, write_results
from engine import Engine
from torch import Tensor, nn

from dualeval import connect, detect
from dualeval.metrics import Metric, RowMetric
from dualeval.metrics.classification import classification_metric, default_metrics, observe_logits
from dualeval.tasks import Task
from dualeval.tools.bench.measuring import peak_of_process

SIZES = (1, 2)
SAMPLES = (10_000, 100_000)
WANTED = 20_000_000
_TIMEOUT_S = 120
_CLASSES = 10
_PIXELS = 28 * 28
_SEED = 20


class Generated:
    """28x28 uint8 images and labels that are computed from a seed and the sample's index at every read."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def id(self, index: int) -> str:
        """The sample's number."""
        return f"{index:07d}"

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """One ready batch: images uint8 (n, 784) and targets int64 (n,)."""
        index = torch.as_tensor(indices).unsqueeze(1) + (_SEED << 32)
        # In place: temporaries of a few hundred kB each would fragment the heap that is measured here.
        numbers = index * 6_364_136_223_846_793_005 + torch.arange(_PIXELS + 1) * 1_442_695_040_888_963_407
        numbers.bitwise_xor_(numbers >> 29).mul_(3_202_034_522_624_059_733)
        numbers.bitwise_right_shift_(40).bitwise_and_(0xFF)
        return {"images": numbers[:, :_PIXELS].to(torch.uint8), "targets": numbers[:, _PIXELS] % _CLASSES}

    def fingerprint(self, count: int) -> str:
        """sha256 of the seed and the count: nothing else decides the samples."""
        return hashlib.sha256(f"{_SEED} {count}".encode()).hexdigest()


class TinyTask(Task):
    """A linear classifier on generated images."""

    name = "benchmark-memory"
    rows = ("target", "prediction", "confidence", "loss", "top")
    wants_workers = False
    thread_safe = True

    def __init__(self, count: int) -> None:
        self._dataset = Generated(count)

    def dataset(self) -> Generated:
        """The generated images."""
        return self._dataset

    def collate(self, samples: Any) -> Any:
        """Pass on what is a batch already."""
        return samples

    def build_model(self, device: torch.device) -> nn.Module:
        """A linear layer with weights from the seed."""
        torch.manual_seed(_SEED)
        return nn.Linear(_PIXELS, _CLASSES).to(device).eval()

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        """Logits (n, 10)."""
        return model(batch["images"].float().div_(255))

    def observe(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The columns of a classification."""
        return observe_logits(outputs, batch["targets"], 5)

    def metrics(self) -> Sequence[Metric | RowMetric]:
        """The default metrics."""
        return [classification_metric(name, _CLASSES) for name in default_metrics(_CLASSES)]

    def fingerprint(self) -> dict[str, Any]:
        """The seed."""
        return {"seed": _SEED}


def evaluate(count: int, folder: Path) -> None:
    """Be one rank: evaluate ``count`` samples and write this rank's peak in bytes to folder/RANK.peak."""
    world = detect(os.environ)
    engine = Engine(connect(None, world, "cpu"))
    result = engine.evaluate(TinyTask(count), out=folder / "out")
    assert result.samples["evaluated"] == count
    engine.control.leave()
    engine.backend.close()
    (folder / f"{world.rank}.peak").write_text(str(peak_of_process()))


def measure(size: int, count: int) -> int:
    """Evaluate ``count`` samples on ``size`` new processes; returns the largest peak of a rank in bytes."""
    with tempfile.TemporaryDirectory(prefix="dualeval-memory-") as folder:
        arguments = [str(Path(__file__).resolve()), "--rank-of", folder, "--samples", str(count)]
        command = python_or_torchrun(size, *arguments)
        run_process(command, timeout_s=_TIMEOUT_S, environ=ONE_THREAD)
        peaks = [int(path.read_text()) for path in Path(folder).glob("*.peak")]
    assert len(peaks) == size, f"{len(peaks)} of {size} ranks wrote their peak"
    return max(peaks)


def main() -> None:
    """Measure every size; print JSON, or print a table and write it to the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print bytes and write nothing")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--samples", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        evaluate(arguments.samples, arguments.rank_of)
        return
    host = machine()
    peaks = {str(size): {str(count): measure(size, count) for count in SAMPLES} for size in SIZES}
    if arguments.json:
        print(json.dumps(peaks))
        return
    rows = []
    for size, by_count in peaks.items():
        few, many = (by_count[str(count)] for count in SAMPLES)
        rows.append([size, f"{few / 1e6:.1f}", f"{many / 1e6:.1f}", f"{(many - few) / 1e6:+.1f}"])
    head = ["ranks", *(f"MB at {count:,}" for count in SAMPLES), "difference"]
    body = (
        f"Wanted: a difference of at most {WANTED / 1e6:.0f} MB. Largest peak of a rank (VmHWM), each run in "
        f"new processes; generated 28x28 images, a linear model, rows to Parquet.\n\n{table(head, rows)}"
    )
    write_results("memory", "Peak memory of a rank", body, {"peaks": peaks}, host)


if __name__ == "__main__":
    main()
