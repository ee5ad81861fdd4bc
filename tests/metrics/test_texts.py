"""Metrics of texts: correlations against scipy, the coefficient of classes against scikit-learn, and work."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.metrics import f1_score, matthews_corrcoef

from dualeval.metrics.classification import BinaryF1
from dualeval.metrics.confusion import Matthews
from dualeval.metrics.texts import Pearson, Spearman, TextWork
from tests.vehicles.measuring import measure

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_correlations_are_those_of_scipy(ties: bool, shift: float) -> None:
    draw = np.random.default_rng(5)
    target = draw.normal(size=300)
    prediction = (0.6 * target + draw.normal(size=300)).astype(np.float32)
    if ties:
        target, prediction = target.round(), prediction.round()
    columns: dict[str, Any] = {"prediction": prediction, "target": target + shift}
    one, other = prediction.astype(np.float64), target + shift
    pairs: list[tuple[Any, Any]] = [(Pearson(), scipy.stats.pearsonr), (Spearman(), scipy.stats.spearmanr)]
    for metric, wanted in pairs:
        found = metric.compute(columns)
        assert found.values == {metric.name: pytest.approx(wanted(one, other).statistic, abs=1e-9)}
        assert found.directions == {metric.name: "higher"}
        # To the last bit in any order: sums are exact.
        turned = {name: column[::-1] for name, column in columns.items()}
        assert metric.compute(turned).values == found.values


@pytest.mark.parametrize(
    ("prediction", "target", "nonfinite"),
    [
        ([], [], {}),
        ([1.0], [2.0], {}),
        ([0.1, 0.1, 0.1], [1.0, 2.0, 3.0], {}),
        ([1.0, 2.0, 3.0], [0.1, 0.1, 0.1], {}),
        ([1.0, NAN, INF], [1.0, 2.0, 3.0], {"nan": 1, "pos_inf": 1, "neg_inf": 0}),
    ],
)
def test_no_correlation_is_none(
    prediction: list[float], target: list[float], nonfinite: dict[str, int]
) -> None:
    columns = {"prediction": np.array(prediction, np.float32), "target": np.array(target)}
    for metric in (Pearson(), Spearman()):
        found = metric.compute(columns)
        assert found.values == {metric.name: None}
        assert found.nonfinite == ({metric.name: nonfinite} if nonfinite else {})


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_matthews_coefficient_and_binary_f1_are_those_of_scikit_learn(classes: int) -> None:
    generator = torch.Generator().manual_seed(classes)
    target = torch.randint(0, classes, (200,), generator=generator)
    drawn = torch.randint(0, classes, (200,), generator=generator)
    prediction = torch.where(torch.rand(200, generator=generator) < 0.5, target, drawn)
    for found in (prediction, prediction.masked_fill(drawn == 0, -1)):
        columns = {"prediction": found, "target": target}
        wanted = matthews_corrcoef(target, found)
        assert measure(Matthews(classes), columns).values == {"mcc": pytest.approx(wanted, abs=1e-12)}
        if classes == 2:
            f1 = f1_score(target, found, labels=[1], average="macro")
            assert measure(BinaryF1(2), columns).values == {"binary_f1": pytest.approx(f1, abs=1e-12)}


def test_matthews_coefficient_goes_from_minus_1_to_1() -> None:
    def of(prediction: list[int], target: list[int]) -> Any:
        columns = {"prediction": torch.tensor(prediction), "target": torch.tensor(target)}
        return measure(Matthews(2), columns).values["mcc"]

    assert of([0, 1, 1], [0, 1, 1]) == 1
    assert of([1, 0, 0], [0, 1, 1]) == -1
    assert of([1, 1, 1], [0, 1, 1]) == 0
    assert Matthews(2).compute(torch.zeros(6, dtype=torch.int64)).values == {"mcc": None}
    assert BinaryF1(2).compute(torch.zeros(6, dtype=torch.int64)).values == {"binary_f1": None}


def test_work_warns_of_texts_that_were_cut() -> None:
    columns = {
        "tokens": torch.tensor([3, 4], dtype=torch.int32),
        "padded_tokens": torch.tensor([4, 4], dtype=torch.int32),
        "truncated": torch.tensor([False, True]),
    }
    found = measure(TextWork(), columns)
    assert (found.values, found.work) == ({}, {"tokens": 7, "padded_tokens": 8, "truncated": 1})
    assert found.warnings == ("1 text is longer than --max-length and cut there",)
    assert measure(TextWork(), {**columns, "truncated": torch.tensor([False, False])}).warnings == ()
