"""A model left in training mode: set to evaluation, and said; what cannot be set is said too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # here, not with the first export: the import sets an environment variable
from torch import nn

from dualeval.engine.evaluation_mode import set_evaluation_mode
from dualeval.result import Result
from tests.engine.test_evaluator import evaluate
from tests.tiny import CLASSES, FEATURES, TinyTask


class Dropping(TinyTask):
    """Its model drops half of what it sees, unless it is in evaluation mode."""

    def __init__(self, *, training: bool, last: nn.Module | None = None) -> None:
        super().__init__(200)
        self._training = training
        self._last = nn.Dropout(0.5) if last is None else last

    def build_model(self, device: torch.device) -> nn.Module:
        model = nn.Sequential(super().build_model(device), self._last)
        return model.train(self._training)

    def notes(self) -> list[str]:
        return [f"a model of {CLASSES} classes"]


class Stubborn(nn.Dropout):
    """Stays in training mode, as for Monte Carlo dropout."""

    def train(self, mode: bool = True) -> Stubborn:
        return super().train(True)


def run(task: TinyTask, out: Path) -> tuple[Result, list[str]]:
    notes: list[str] = []
    result = evaluate(task, out, batch_size=16, note=notes.append)
    return result, notes


def test_a_model_in_training_mode_is_set_to_evaluation(tmp_path: Path) -> None:
    wanted, [own] = run(Dropping(training=False), tmp_path / "a")
    assert own == "a model of 7 classes"
    found, [own, note] = run(Dropping(training=True), tmp_path / "b")
    assert note == (
        "the model was in training mode, and was set to evaluation mode (3 modules: the model itself, 0, 1)"
    )
    assert found.metrics_digest == wanted.metrics_digest


def test_a_part_in_training_mode_is_set_too(tmp_path: Path) -> None:
    class Part(Dropping):
        def build_model(self, device: torch.device) -> nn.Module:
            model = super().build_model(device)
            model.get_submodule("1").train()
            return model

    wanted, _ = run(Dropping(training=False), tmp_path / "a")
    found, [_, note] = run(Part(training=False), tmp_path / "b")
    assert "(1 module: 1)" in note
    assert found.metrics_digest == wanted.metrics_digest


def test_what_stays_in_training_mode_is_said(tmp_path: Path) -> None:
    _, [_, first, second, *_] = run(Dropping(training=True, last=Stubborn(0.5)), tmp_path / "out")
    assert "was set to evaluation mode (2 modules: the model itself, 0)" in first
    assert "stays in training mode after model.eval() in 1 module: 1: a train() of the model's own" in second


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_exported_graph_has_no_modes() -> None:
    example: tuple[Any, ...] = (torch.zeros(2, FEATURES),)
    model = torch.export.export(nn.Sequential(nn.Linear(FEATURES, 3), nn.Dropout()), example).module()
    [note] = set_evaluation_mode(model)
    assert "cannot be set to evaluation mode" in note
    assert "export it after model.eval()" in note
