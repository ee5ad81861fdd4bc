"""EvalPlan: every sample in one batch, every batch in one chunk, every chunk on one rank."""

from __future__ import annotations

import pytest

from dualeval.engine.plan import MAX_CHUNKS, EvalPlan

SIZES = [
    (1, 1),
    (1, 64),
    (2, 64),
    (63, 64),
    (64, 64),
    (65, 64),
    (997, 64),
    (10_000, 64),
    (10_000, 1),
    (40_000, 1),
    (2 * MAX_CHUNKS + 5, 1),
]


@pytest.mark.parametrize(("samples", "batch_size"), SIZES)
def test_chunks_cover_every_sample_once(samples: int, batch_size: int) -> None:
    plan = EvalPlan(num_samples=samples, batch_size=batch_size)
    covered = [index for chunk in range(plan.num_chunks) for index in plan.chunk_samples(chunk)]
    assert covered == list(range(samples))
    batches = [batch for chunk in range(plan.num_chunks) for batch in plan.chunk_batches(chunk)]
    assert batches == list(range(plan.num_batches))
    sizes = [len(plan.chunk_samples(chunk)) for chunk in range(plan.num_chunks)]
    assert plan.chunk_sizes().tolist() == sizes
    assert plan.samples_in(range(0, plan.num_chunks, 3)) == sum(sizes[::3])
    assert [len(plan.batch_samples(batch)) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 200])
def test_every_chunk_has_one_rank(size: int) -> None:
    plan = EvalPlan(num_samples=997, batch_size=64)
    taken = sorted(chunk for rank in range(size) for chunk in plan.static_chunks(rank, size))
    assert taken == list(range(plan.num_chunks))


def test_chunks_are_bounded_and_even() -> None:
    assert EvalPlan(num_samples=131_073 * 8, batch_size=8).num_chunks == MAX_CHUNKS == 131_072
    plan = EvalPlan(num_samples=1_281_167, batch_size=4)
    assert plan.num_batches > plan.num_chunks == MAX_CHUNKS
    lengths = {len(plan.chunk_batches(chunk)) for chunk in range(plan.num_chunks)}
    assert lengths == {2, 3}
