"""What each value of --precision means, row by row."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dualeval.engine.values.options import RunOptions
from dualeval.errors import UsageError
from dualeval.options.evaluation import precision_of

# By name: the type of weights and inputs, that of a product in a forward, and the tolerance of a replay.
ROWS = {
    "fp32": (None, torch.float32, 1e-3),
    "tf32": (None, torch.float32, 1e-2),
    "amp-fp16": (None, torch.float16, 2e-2),
    "amp-bf16": (None, torch.bfloat16, 1e-1),
    "fp16": (torch.float16, torch.float32, 2e-2),
    "bf16": (torch.bfloat16, torch.float32, 1e-1),
}


def product() -> torch.dtype:
    return torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("outside", [False, True])
def test_a_precision_casts_computes_and_compares(name: str, *, outside: bool) -> None:
    precision = precision_of(RunOptions(precision=name))
    assert precision.dtype_in(nn.BatchNorm1d(1), torch.float32) == (ROWS[name][0] or torch.float32)
    assert precision.dtype_in(nn.Linear(1, 1), torch.int64) == torch.int64
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
        with precision.forward_context(torch.device("cpu"))():
            assert (precision.dtype, product(), precision.tolerance) == ROWS[name]
        assert product() == (torch.bfloat16 if outside else torch.float32)


@pytest.mark.parametrize(("kind", "has_it"), [("gfx90a:sramecc+:xnack-", False), ("gfx942:sramecc+", True)])
def test_tf32_is_refused_on_a_gpu_of_amds_without_it(
    monkeypatch: pytest.MonkeyPatch, kind: str, has_it: bool
) -> None:
    """An MI200 is gfx90a, an MI300 gfx942; torch knows them by these names."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    played = {
        "device": lambda device: nullcontext(),
        "get_device_properties": lambda *_: SimpleNamespace(gcnArchName=kind),
        "get_device_name": lambda *_: "AMD Instinct MI210",
    }
    for name, function in played.items():
        monkeypatch.setattr(torch.cuda, name, function)
    precision = precision_of(RunOptions(precision="tf32"))
    if has_it:
        precision.check(torch.device("cuda", 0))
        return
    with pytest.raises(
        UsageError, match=r"tf32: AMD Instinct MI210 has no TF32, .* from the MI300 on .* \(fp32\)"
    ):
        precision.check(torch.device("cuda", 0))
