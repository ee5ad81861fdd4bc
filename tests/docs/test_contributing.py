"""What CONTRIBUTING.md names is there, and its example works as it is written."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dualeval
from dualeval.options.job import Job
from dualeval.tasks import options
from tests.conftest import ROOT
from tests.engine.test_evaluator import evaluate

PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
OPTIONS, TASK = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
NAMED = sorted(set(re.findall(r"[\w./-]+/[\w.-]*(?:::\w+)?|[\w-]+\.md", PROSE)))


def test_files_and_tests_are_there() -> None:
    checked = [name for name in NAMED if "NAME" not in name]
    assert {"tests/metrics/test_means.py", "tests/backends/", ".ci/run", "docs/metrics.md"} <= {*checked}
    for name in checked:
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), name
        assert f"\ndef {test}" in (ROOT / path).read_text("utf-8") if test else True, name


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`make ([\w-]+)`", PAGE))))
def test_make_targets_are_there(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)


def linear(num_classes: int) -> nn.Module:
    return nn.Linear(6, num_classes)


def test_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = dict(vars(options))
    exec(OPTIONS, namespace)
    monkeypatch.setattr(options, "MultilabelOptions", namespace["MultilabelOptions"], raising=False)
    monkeypatch.setitem(options.TASKS, "multilabel", namespace["MultilabelOptions"])
    file = tmp_path / "multilabel.py"
    file.write_text(TASK, "utf-8")
    spec = importlib.util.spec_from_file_location("dualeval.tasks.multilabel", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    draw = np.random.default_rng(0)
    targets = draw.integers(0, 2, (97, 3))
    inputs = draw.normal(size=(97, 6)).astype(np.float32)
    np.savez(tmp_path / "data.npz", inputs=inputs, targets=targets)
    torch.manual_seed(0)
    right = (linear(3)(torch.from_numpy(inputs)) > 0) == torch.from_numpy(targets).bool()

    given = {"model": f"{__name__}:linear", "weights": "random:0", "data": tmp_path / "data.npz"}
    result = evaluate(Job.of("multilabel", **given).make_task(), tmp_path / "out", batch_size=16)
    assert result.samples["evaluated"] == 97
    assert result.metrics["exact_match"] == right.all(1).double().mean().item()
    again = dualeval.rescore(tmp_path / "out", metrics=module.stored_metrics({}, ["exact_match"]))
    assert again.metrics_digest == result.metrics_digest
