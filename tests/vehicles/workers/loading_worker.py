"""Loads checkpoints one after the other, and prints what each took, in models: {path: factor}.

[--part] PATH ...; with --part as rank 0 of 2 loads its part of a sharded model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.models import classifiers
from dualeval.tools.bench.measuring import peak_of_process

WIDTH = 1024
LAYERS = 16


def stack() -> nn.Module:
    """Linear layers of 4 MB, of which the last two are one tensor."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    layers[-1].weight = layers[-2].weight
    return nn.Sequential(*layers)


def main(paths: list[str], *, part: bool = False) -> None:
    """Measure private and resident file pages: the most that was held, less what was held before."""
    nn.Linear(WIDTH, WIDTH)  # the first one makes torch's threads
    factors = {}
    for path in paths:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is from here
        before = peak_of_process()
        if part:
            model, kept = first_half(path)
        else:
            model, kept = classifiers.build("tests.vehicles.workers.loading_worker:stack", path, None), {}
        peak = peak_of_process() - before
        factors[path] = peak / sum(parameter.nbytes for parameter in model.parameters())
        del model, kept
    print(json.dumps(factors))


def first_half(path: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model without memory for its parameters, after a forward, and the first half of their rows."""
    source = classifiers.source_of("tests.vehicles.workers.loading_worker:stack")
    model = source.build_late(source.find_weights(path), None, note=sys.exit)
    with torch.inference_mode():
        model(torch.zeros(1, WIDTH))
    kept: dict[str, Tensor] = {}
    parameters: list[tuple[str, Any]] = list(model.named_parameters())
    for name, parameter in parameters:
        kept[name] = torch.empty(len(parameter) // 2, *parameter.shape[1:])
        parameter.read_rows(0, len(kept[name]), kept[name])
    return model, kept


if __name__ == "__main__":
    is_part = sys.argv[1] == "--part"
    main(sys.argv[1 + is_part :], part=is_part)
