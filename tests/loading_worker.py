"""Loads checkpoints one after the other, and prints what each took, in models: {path: factor}. PATH ..."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torch import nn

from dualeval.bench.peaks import peak_of_process
from dualeval.models import classifiers

WIDTH = 1024
LAYERS = 16


def stack() -> nn.Module:
    """Linear layers of 4 MB, of which the last two are one tensor."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    layers[-1].weight = layers[-2].weight
    return nn.Sequential(*layers)


def main(paths: list[str]) -> None:
    """Measure private and resident file pages: the most that was held, less what was held before."""
    nn.Linear(WIDTH, WIDTH)  # the first one makes torch's threads
    factors = {}
    for path in paths:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is from here
        before = peak_of_process()
        model = classifiers.build("tests.loading_worker:stack", path, None)
        peak = peak_of_process() - before
        factors[path] = peak / sum(parameter.nbytes for parameter in model.parameters())
        del model
    print(json.dumps(factors))


if __name__ == "__main__":
    main(sys.argv[1:])
