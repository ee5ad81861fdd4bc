"""What CONTRIBUTING.md names is there, and its example works as it is written."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dualeval
from dualeval.options.job import Job
from dualeval.tasks import options
from tests import requirements
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


def test_make_targets_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for name in ("CONTRIBUTING.md", "README.md"):
        targets = set(re.findall(r"\bmake ([\w-]+)", (ROOT / name).read_text("utf-8")))
        assert name != "README.md" or {"run", "test", "horovod", "gpu"} <= targets
        for target in targets if name != "README.md" else ("run", "test", "horovod", "gpu"):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


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


# -- a test whose requirements are missing is skipped by name, or fails where they are required -----------


@pytest.mark.parametrize(
    ("required", "outcome", "said"),
    [
        ("", pytest.skip.Exception, "needs mpi: there is no mpirun; type: apt install openmpi-bin"),
        ("horovod", pytest.skip.Exception, "needs mpi: there is no mpirun"),
        ("mpi,horovod", pytest.fail.Exception, "DUALEVAL_REQUIRE has mpi, but there is no mpirun"),
        ("mpy", pytest.exit.Exception, r"DUALEVAL_REQUIRE names \['mpy'\]; it knows"),
    ],
)
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, required: str, outcome: Any, said: str
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("DUALEVAL_REQUIRE", required)
    item: Any = SimpleNamespace(iter_markers=lambda name: [pytest.mark.needs("mpi").mark])
    with pytest.raises(outcome, match=said):
        requirements.check(item)
