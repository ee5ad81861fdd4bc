"""A metric's score gives its value again, from the columns alone."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from dualeval.errors import UsageError
from dualeval.metrics import Mean, Metric, Ratio, TopK
from dualeval.metrics.scores import Score, score_from
from dualeval.metrics.squad import F1, ExactMatch

DRAWN = torch.Generator().manual_seed(3)
COLUMNS = {
    "loss": torch.rand(200, generator=DRAWN),
    "tokens": torch.randint(1, 9, (200,), generator=DRAWN),
    "rank": torch.randint(0, 7, (200,), generator=DRAWN),
    "exact_match": torch.rand(200, generator=DRAWN) < 0.6,
    "f1": torch.rand(200, generator=DRAWN, dtype=torch.float64),
    "has_answer": torch.rand(200, generator=DRAWN) < 0.5,
}
TRANSFORMS = {None: float, "exp": math.exp, "sqrt": math.sqrt, "log": math.log}


@pytest.mark.parametrize(
    "metric",
    [
        Mean("loss"),
        Mean("exact_match"),
        Mean("loss", weight="tokens", transform="exp"),
        Mean("loss", transform="sqrt"),
        Ratio("loss", "tokens", transform="log"),
        TopK(3),
        ExactMatch(parts=True),
        F1(parts=True),
        F1(parts=False),
    ],
    ids=lambda metric: str(metric.name),
)
def test_a_score_gives_the_value(metric: Metric) -> None:
    ledger = torch.zeros(metric.size, dtype=torch.int64)
    metric.update(ledger, COLUMNS)
    measured = metric.compute(ledger)
    assert set(measured.scores) == set(measured.values)
    rows: dict[str, Any] = {name: column.numpy() for name, column in COLUMNS.items()}
    for key, score in measured.scores.items():
        again = score_from(json.loads(json.dumps(score.to_json())))
        assert again == score
        assert set(score.columns) <= set(metric.columns)
        y, x, counts = again.terms(rows)
        assert not y[~counts].any() and not x[~counts].any()
        value = score.factor * TRANSFORMS[score.transform](math.fsum(y) / math.fsum(x))
        assert value == pytest.approx(measured.values[key], rel=1e-12)


def test_only_what_a_score_says_is_written() -> None:
    assert Score(column="rank", below=5).to_json() == {"column": "rank", "below": 5}


def test_what_is_no_score() -> None:
    with pytest.raises(UsageError, match="expected the fields of a Score"):
        score_from({"colum": "rank"})


def test_numbers_of_any_kind() -> None:
    rows = {"right": np.array([True, False]), "weight": np.array([3, 1], np.uint8)}
    y, x, _ = Score(column="right", weight="weight").terms(rows)
    assert (y.tolist(), x.tolist()) == ([3.0, 0.0], [3.0, 1.0])
