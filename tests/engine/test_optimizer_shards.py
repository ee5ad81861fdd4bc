"""Checkpoints of trainings whose optimizer was divided over the ranks: their parameters are whole."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dualeval.models.checkpoints import read_state_dict
from dualeval.result import Result
from dualeval.tasks.image_classification import EMBEDDED_WEIGHTS, ImageClassification
from tests.conftest import ROOT, Launch
from tests.engine.test_evaluator import evaluate
from tests.launchers import start
from tests.models.test_checkpoint_folders import save_deepspeed


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, launch: Launch) -> Path:
    """What two ranks with a ZeroRedundancyOptimizer have saved."""
    folder = tmp_path_factory.mktemp("written")
    worker: list[str | Path] = [sys.executable, ROOT / "tests/workers/optimizer_shards_worker.py", folder]
    launch([*start("torchrun", 2), *worker], variables={"OMP_NUM_THREADS": "1"}).ok()
    return folder


def evaluated(weights: Path) -> Result:
    """The first pictures with these weights, in this process."""
    task = ImageClassification(model="fashion-cnn", weights=str(weights), data=ROOT / "dualeval/assets")
    return evaluate(task, None, batch_size=32, limit=160)


def test_two_ranks_divided_the_optimizer_and_trained_whole_parameters(written: Path) -> None:
    shards, whole = (
        [torch.load(written / f"{name}.pt", weights_only=True)["optimizer"]["state"] for name in names]
        for names in (("rank-0", "rank-1"), ("one",))
    )
    assert {len(shard) for shard in shards} & {0, len(whole[0])} == set(), "each rank has a part of it"
    assert sum(map(len, shards)) == len(whole[0])
    trained = torch.load(written / "plain.pt", weights_only=True)
    assert not torch.equal(trained["classifier.1.weight"], load_file(EMBEDDED_WEIGHTS)["classifier.1.weight"])
    other = torch.load(written / "rank-1.pt", weights_only=True)["model"]
    for name, _ in parameters(trained):
        assert torch.equal(other[f"module.{name}"], trained[name])


def parameters(state: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in state.items() if name.endswith(("weight", "bias"))]


@pytest.mark.parametrize("name", ["one.pt", "rank-0.pt"])
def test_only_the_parameters_are_taken(written: Path, name: str) -> None:
    found = read_state_dict(written / name)
    wanted = torch.load(written / "plain.pt", weights_only=True)
    assert found.key == "model"
    assert list(found.tensors) == [f"module.{name}" for name in wanted]
    assert all(torch.equal(found.tensors[f"module.{name}"], wanted[name]) for name in wanted)


def test_the_result_is_that_of_the_plain_state_dict(written: Path, tmp_path: Path) -> None:
    save_deepspeed(torch.load(written / "plain.pt", weights_only=True), tmp_path)
    wanted = evaluated(written / "plain.pt")
    for weights in (written / "one.pt", written / "rank-0.pt", tmp_path):
        found = evaluated(weights)
        assert found.metrics_digest == wanted.metrics_digest
        assert found.weights == wanted.weights
