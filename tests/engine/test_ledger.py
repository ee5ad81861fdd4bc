"""Ledger: merging by addition, and the check that every chunk was counted exactly once."""

from __future__ import annotations

import pytest
import torch

from dualeval.engine.ledger import Ledger
from dualeval.engine.plan import EvalPlan
from dualeval.errors import ExactlyOnceError
from dualeval.metrics import Mean

PLAN = EvalPlan(num_samples=10, batch_size=4)


def folded(*chunks: int) -> Ledger:
    ledger = Ledger(PLAN, [])
    ledger.fold(chunks, [len(PLAN.chunk_samples(chunk)) for chunk in chunks], [0] * len(chunks))
    return ledger


def test_each_chunk_once_is_right() -> None:
    ledger = folded(2, 0, 1)
    ledger.verify_exactly_once()
    assert ledger.totals() == (10, 0)


def test_failed_samples_count_to_their_chunk() -> None:
    ledger = folded(0, 1)
    ledger.fold([2], [1], [1])
    ledger.verify_exactly_once()
    assert ledger.totals() == (9, 1)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (
            (0, 1),
            r"1 of 3 chunks .* chunk 2 \(samples 8 to 9\): folded 0 times, 0 evaluated and 0 failed of 2",
        ),
        ((0, 1, 1, 2), r"chunk 1 \(samples 4 to 7\): folded 2 times, 8 evaluated"),
        ((), "3 of 3 chunks"),
    ],
)
def test_missing_and_double_chunks_are_named(chunks: tuple[int, ...], message: str) -> None:
    with pytest.raises(ExactlyOnceError, match=message):
        folded(*chunks).verify_exactly_once()


def test_a_chunk_with_a_wrong_count_is_named() -> None:
    ledger = folded(0, 1)
    ledger.fold([2], [1], [0])
    with pytest.raises(ExactlyOnceError, match="folded 1 times, 1 evaluated and 0 failed of 2"):
        ledger.verify_exactly_once()


def test_many_wrong_chunks_are_cut() -> None:
    plan = EvalPlan(num_samples=100, batch_size=1)
    with pytest.raises(ExactlyOnceError, match=r"and 90 more$"):
        Ledger(plan, []).verify_exactly_once()


def test_metrics_have_slots_of_their_own() -> None:
    columns = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([10.0, 30.0])}
    ledger = Ledger(PLAN, [Mean("a", name="first"), Mean("b", name="second")])
    ledger.update(columns, [2])
    values = {}
    for metric, slots in ledger.parts():
        values.update(metric.compute(slots).values)
    assert values == {"first": 1.5, "second": 20.0}
    assert ledger.values[: 3 * PLAN.num_chunks].sum() == 0
    assert len(ledger.values) == 3 * PLAN.num_chunks + 2 * Mean("a").size
    metrics = ledger.values[3 * PLAN.num_chunks :].clone()
    ledger.fold([0, 1, 2], [4, 4, 2], [0, 0, 0])
    ledger.verify_exactly_once()
    assert ledger.totals() == (10, 0)
    assert torch.equal(ledger.values[3 * PLAN.num_chunks :], metrics)
