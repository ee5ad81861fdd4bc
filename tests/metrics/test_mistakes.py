"""Sentences on results that common mistakes leave: where they come, also in a run, and where they do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dualeval
from dualeval.engine.scoring.rescoring import rescore, verify
from dualeval.metrics import Confusion, Mean, TopK, mistakes
from dualeval.metrics.segmentation import Overlap
from tests.docs.test_benchmarks import benchmark

Rows = Any


def said(target: Rows, prediction: Rows, samples: int | None = None, name: str = "target") -> str:
    """The one sentence, or nothing."""
    columns = {name: np.asarray(target), "prediction": np.asarray(prediction)}
    found = [*mistakes.of_rows(columns, len(columns[name]) if samples is None else samples)]
    assert len(found) <= 1
    return "".join(found)


def rows_of(classes: int, samples: int, right: float = 0.9) -> tuple[Rows, Rows]:
    generator = np.random.default_rng(classes)
    target, guess = generator.integers(0, classes, (2, samples))
    return target, np.where(generator.random(samples) < right, target, guess)


T, P = rows_of(10, 200)
BY_NAME = np.array(sorted(range(120), key=str))
MANY = rows_of(120, 1_000)
EXCHANGED = np.array([0, 1, 2, 7, 4, 5, 6, 3, 8, 9])
FEW = np.repeat([0, 1], 100)
OTHER = np.where(np.arange(200) % 15, 1 - FEW, FEW)
ORDER = "of the predictions are the target in another order of classes"
WARNED: dict[str, tuple[str, Rows, Rows]] = {
    "labels count from 1": ("are the target minus 1, 0", T + 1, P),
    "the model has a class more": ("90.0% of the predictions are the target plus 1, 1", T, P + 1),
    "two classes exchanged": (f"93.0% {ORDER} (0 as 1, 1 as 0), 7", FEW, OTHER),
    "two of ten exchanged": (f"{ORDER} (3 as 7, 7 as 3), ", T, EXCHANGED[P]),
    "sorted by name": (f"{ORDER} (2 as 10, 3 as 100, 4 as 101), ", MANY[0], BY_NAME[MANY[1]]),
    "one of the targets' classes alone": ("every prediction is class 3, the target of 1", T, 0 * P + 3),
    "one class that no target has": ("every prediction is class 12, the target of 0.0%", T, 0 * P + 12),
    "classes that no sample has": (
        *(
            "no prediction is a class that any sample has",
            T,
            20 + np.random.default_rng(3).integers(0, 3, 200),
        ),
    ),
    "fewer than by guessing": ("0.0% are right, fewer than the 9.", T, (T + 1 + np.arange(200) % 9) % 10),
    "one number": ("every prediction is 0.25, and", T / 7, 0 * P + 0.25),
    "normalised targets": ("the predictions explain ", T * 20 + 300.0, (P - 4.5) / 3),
}
NOT_WARNED: dict[str, tuple[Rows, Rows]] = {
    "right": (T, P),
    "one class of targets and predictions": (0 * T, 0 * T),
    "one class predicted, as most targets are": (T == 20, 0 * T),
    "one class predicted for few": (T[:60], 0 * T[:60]),
    "one class taken for another, and not the other way": (T, np.where(P == 3, 7, P)),
    "two classes that are alike": (T, np.where(np.isin(P, (3, 7)), np.where(MANY[0][:200] % 2, 3, 7), P)),
    "all without a class": (T, 0 * T - 1),
    "no sample": (T[:0], P[:0]),
    "numbers that are no classes": (T * 10**9, P),
    "a target that does not count": (np.where(P == 0, -100, P), 0 * P + np.where(T % 2, P, 0)),
    "one number for one": (0 * T + 1.5, 0 * P + 0.25),
    "a weak regression": (T / 7, np.random.default_rng(1).normal(size=200)),
    "a biased regression": (T / 7, P / 7 + 0.3),
    "few numbers": (T[:50] / 7, 0.0 * P[:50]),
    "numbers that are not finite": (T / 7, np.where(T > 0, np.nan, np.inf)),
}


@pytest.mark.parametrize("case", WARNED)
def test_a_mistake_is_found(case: str) -> None:
    words, target, prediction = WARNED[case]
    found = said(target, prediction)
    assert words in found and ": check first " in found, found


@pytest.mark.parametrize("case", NOT_WARNED)
def test_predictions_that_may_be_right_are_not_warned_of(case: str) -> None:
    assert said(*NOT_WARNED[case]) == ""


def test_samples_that_go_together_show_less() -> None:
    assert said(T, (T + 1 + np.arange(200) % 9) % 10, samples=20) == ""


def test_classes_of_answers_are_called_choices() -> None:
    assert "every prediction is choice 2," in said(T % 4, 0 * T + 2, name="answer")


def test_counts_of_metrics_say_the_same() -> None:
    for _, target, prediction in WARNED.values():
        if target.dtype.kind == "f":
            continue
        columns = {"target": torch.from_numpy(target), "prediction": torch.from_numpy(prediction)}
        metric = Confusion(200)
        ledger = torch.zeros(metric.size, dtype=torch.int64)
        metric.update(ledger, columns)
        assert mistakes.of_counts([(metric, ledger)], len(target)) == [said(target, prediction)]
    other = Confusion(200, prediction="rank")
    assert mistakes.of_counts([(Mean("loss"), torch.zeros(9)), (other, torch.zeros(other.size))], 9) is None


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([[0, 30, 0], [50, 30, 20], [0, 100, 0]], "every prediction is class 1, the target of 30.0%"),
        ([[1, 0, 1], [50, 30, 20], [30, 50, 20]], "2.0% are right, fewer than the 34.0% of guessing"),
        ([[20, 10, 5], [50, 30, 20], [30, 50, 20]], ""),
    ],
)
def test_mistakes_are_found_in_counts_of_pixels(counts: Any, words: str) -> None:
    slots = torch.tensor(counts).flatten() * 1000
    [found] = mistakes.of_counts([(Overlap(3, "iou", 1, (-1, 1, 1)), slots)], 200) or [""]
    assert found.startswith(words) and bool(found) == bool(words)


def test_an_honest_model_at_chance_is_warned_of_in_at_most_one_run_of_a_hundred(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A short form of benchmarks/mistakes.py."""
    simulation = benchmark(monkeypatch, "mistakes")
    generator = np.random.default_rng(4)
    for classes, size in ((2, 8), (2, 100), (3, 30), (10, 100)):
        found = simulation.at_chance(generator, classes, size, 20)
        assert np.mean([*found.values()]) <= 0.01, (classes, size, found)
        assert max(found.values()) <= 0.1, found
    assert simulation.wrong(generator, "sorted by name", 100, 300, 0.95, 5) == 1


# -- in a run ------------------------------------------------------------------------------------------


class Shifted(nn.Module):
    """Knows the class, and gives the next one."""

    def forward(self, inputs: Tensor) -> Tensor:
        return 9 * inputs.roll(1, 1)


def one_hot(samples: int = 200) -> TensorDataset:
    target = torch.arange(samples) % 9
    return TensorDataset(nn.functional.one_hot(target, 10).float(), target)


@pytest.mark.parametrize("metrics", [None, [TopK(1)], ["loss"]])
@pytest.mark.parametrize("writes", [True, False])
def test_a_run_warns_of_a_mistake_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], metrics: Any, writes: bool
) -> None:
    out = tmp_path / "out" if writes else None
    given = {"model": Shifted().eval(), "data": one_hot(), "metrics": metrics, "launcher": "none"}
    result = dualeval.evaluate(**given, out=out)
    [warning] = [sentence for sentence in result.warnings if "check first" in sentence]
    assert capsys.readouterr().err.count(warning) == 1
    assert warning.startswith("100.0% of the predictions are the target plus 1, 0.0% are right: check first")
    if out is None:
        return
    assert json.loads((out / "result.json").read_text())["warnings"] == result.warnings
    assert dualeval.evaluate(**given, out=out).warnings == result.warnings
    assert rescore(out, metrics=[TopK(1)]).warnings.count(warning) == 1
    if metrics == [TopK(1)]:
        assert not [check for check in verify(out, metrics) if check.differences]


def test_a_logit_of_class_1_is_no_regression() -> None:
    targets = np.arange(200) % 2.0
    [said] = mistakes.of_rows({"target": targets, "prediction": 8 * targets - 4}, 200)
    assert "torch.nn.functional.pad(outputs" in said
    scores = {"target": targets, "prediction": 8 * targets - 4}
    assert not [*mistakes.of_rows(scores, 200, reads=("prediction", "target"))]  # as those of BinaryAUROC
