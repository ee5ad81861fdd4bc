"""What the look at the first samples costs: the embedded job, ResNet-18 on 1,000 pictures, a model of 1 GB.

Each evaluation runs in a process of its own, with two threads.

    python benchmarks/looks.py [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import machine, run_process, table, write_results
from made_pictures import write_pictures
from torch import nn
from torch.utils.data import TensorDataset

import dualeval

_TIMEOUT_S = 600
_WIDTH, _LAYERS = 4096, 16  # 1.07 GB
_RESNET = (
    "--model",
    "resnet18",
    "--weights",
    "random:0",
    "--num-classes",
    "10",
    "--preprocessing",
    "imagenet",
)


def evaluate_large() -> None:
    """Evaluate a model of 1 GB on 2,000 made samples, and print the times."""
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))).eval()
    data = TensorDataset(torch.rand(2000, _WIDTH), torch.arange(2000) % _WIDTH)
    result = dualeval.evaluate(model=model, data=data, metrics=["loss"], batch_size=64)
    print(json.dumps({"timing": result.timing, "deterministic": result.deterministic}))


def measured(arguments: list[str]) -> dict[str, Any]:
    """The result of one evaluation in a process of its own."""
    command = [sys.executable, *arguments]
    done = run_process(command, timeout_s=_TIMEOUT_S, environ={**os.environ, "OMP_NUM_THREADS": "2"})
    found: dict[str, Any] = json.loads(done.output)
    return found


def main() -> None:
    """Read the command line, measure in turns, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.large:
        evaluate_large()
        return
    host = machine()
    with tempfile.TemporaryDirectory() as folder:
        pictures = Path(folder) / "pictures"
        write_pictures(pictures, 1000, 256, 10)
        run = ["-m", "dualeval", "run", "--no-progress", "--json"]
        cases = {
            "embedded job, 10,000 images": [*run, "--out", f"{folder}/a"],
            "ResNet-18, 1,000 pictures": [*run, "--out", f"{folder}/b", "--data", str(pictures), *_RESNET],
            "16 linear layers of 1 GB, 2,000 samples": [__file__, "--large"],
        }
        rows = []
        for name, arguments in cases.items():
            fresh = ["--fresh"] if "run" in arguments else []
            found = [measured([*arguments, *fresh]) for _ in range(asked.rounds)]
            times = [result["timing"]["ranks"][0] for result in found]
            look, whole = (statistics.median(each[key] for each in times) for key in ("look", "evaluate"))
            said = str(found[0]["deterministic"])
            rows.append([name, f"{look:.3f}", f"{whole:.2f}", f"{100 * look / whole:.1f} %", said])
    page = table(["evaluation", "look, s", "loop, s", "part", "deterministic"], rows)
    write_results("looks", "What the look at the first samples costs", page, {"rows": rows}, host)


if __name__ == "__main__":
    main()
