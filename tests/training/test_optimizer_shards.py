"""Checkpoints of trainings whose optimizer was divided over the ranks: their parameters are whole."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from dualeval.models.checkpoints.checkpoint import read_state_dict
from dualeval.result import Result
from dualeval.tasks.image_classification import EMBEDDED_WEIGHTS, ImageClassification
from tests.conftest import ROOT, Launch
from tests.engine.test_evaluator import evaluate
from tests.models.test_checkpoint_folders import save_deepspeed
from tests.vehicles.launchers import start


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, launch: Launch) -> Path:
    """What two ranks with a ZeroRedundancyOptimizer have saved."""
    folder = tmp_path_factory.mktemp("written")
    script = ROOT / "tests/vehicles/workers/checkpoint_worker.py"
    worker: list[str | Path] = [sys.executable, script, "optimizer", folder]
    launch([*start("torchrun", 2), *worker], variables={"OMP_NUM_THREADS": "1"}).ok()
    of_rank, whole = (
        torch.load(folder / f"{name}.pt", weights_only=True)["optimizer"]["state"]
        for name in ("rank-0", "one")
    )
    assert 0 < len(of_rank) < len(whole), "each rank has a part of it"
    return folder


def evaluated(weights: Path) -> Result:
    """The first pictures with these weights, in this process."""
    task = ImageClassification(model="fashion-cnn", weights=str(weights), data=ROOT / "dualeval/assets")
    return evaluate(task, None, batch_size=32, limit=160)


def test_the_result_is_that_of_the_plain_state_dict(written: Path, tmp_path: Path) -> None:
    assert read_state_dict(written / "one.pt").key == "model"
    save_deepspeed(torch.load(written / "plain.pt", weights_only=True), tmp_path)
    wanted = evaluated(written / "plain.pt")
    assert wanted.weights != evaluated(EMBEDDED_WEIGHTS).weights, "they were trained"
    for weights in (written / "one.pt", written / "rank-0.pt", tmp_path):
        found = evaluated(weights)
        assert found.metrics_digest == wanted.metrics_digest
        assert found.weights == wanted.weights
