"""samples_digest: other samples have another one, whatever the metrics say, and the same ones the same."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualeval
from dualeval.engine.samples.samples import wrap
from dualeval.engine.samples.subset import blocks_of, digest_of, hashes_of_ids, joined
from dualeval.errors import UsageError
from dualeval.metrics import Mean
from dualeval.result import Result
from dualeval.world import World
from tests.engine.test_evaluator import evaluate, rows
from tests.vehicles.tiny import TinyTask


class Named(torch.utils.data.Dataset[Any]):
    """Samples of equal values, whose names are all that tells them apart."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.reads = 0

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        return {"x": torch.ones(1), "name": self.names[index]}


def of_names(names: Sequence[str], *, ids: Any = None, out: Path | None = None) -> Result:
    data = wrap(Named(names), ids=ids or list(names), fingerprint="one")
    task = dualeval.ModelTask(
        model=nn.Identity().eval(),
        data=data,
        forward=lambda model, batch: model(batch["x"]),
        observe=lambda outputs, batch: {"one": outputs[:, 0]},
        metrics=[Mean("one")],
    )
    return evaluate(task, out)


def by_hand(ids: Sequence[str]) -> str:
    """As docs/result-files.md has it."""
    size = max(64, math.ceil(len(ids) / 1024))
    blocks = [[*ids[first : first + size]] for first in range(0, len(ids), size)]

    def hashed(value: Any) -> str:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    return hashed([len(ids), *map(hashed, blocks)])


@pytest.mark.parametrize("count", [1, 64, 65, 130])
def test_the_digest_is_what_the_docs_say_at_any_number_of_ranks(count: int) -> None:
    data = Named([f"é {index}" for index in range(count)])
    samples = wrap(data, ids=data.names)
    wanted = by_hand(data.names)
    assert digest_of(count, data.names) == wanted
    for size in (1, 2, 3, 7):
        worlds = [replace(World.alone(), rank=rank, size=size) for rank in range(size)]
        hashes = [hashes_of_ids(samples, count, world, lambda: None)[0] for world in worlds]
        assert joined(count, hashes) == wanted
        assert sum(map(len, hashes)) == len(blocks_of(count))


def test_other_samples_have_other_digests_of_equal_metrics() -> None:
    found = [of_names(names) for names in ("abc", "abcd", "abx", "acb")]
    assert len({result.metrics_digest for result in found}) == 1
    assert len({result.samples_digest for result in found}) == 4
    assert of_names("abc").samples_digest == found[0].samples_digest == by_hand("abc")


def test_the_digest_is_the_same_without_a_folder_in_a_part_and_again(tmp_path: Path, out: Path) -> None:
    ids = [f"tiny/{index}" for index in range(200)]
    for folder in (None, out, out):
        assert evaluate(TinyTask(200, [3]), folder, on_error="skip").samples_digest == by_hand(ids)
    assert json.loads((out / "result.json").read_text())["samples_digest"] == by_hand(ids)
    assert evaluate(TinyTask(200), None, limit=70).samples_digest == by_hand(ids[:70])
    drawn = evaluate(TinyTask(200), tmp_path / "drawn", sample=70)
    assert drawn.samples_digest == by_hand(rows(tmp_path / "drawn")["id"])


def test_a_loop_of_ones_own_has_the_samples_digest() -> None:
    with dualeval.Session(launcher="none") as session:
        for batch in session.batches(wrap(Named("abc"), ids=list("abc"))):
            session.add(batch, one=batch["x"][:, 0])
        assert session.result().samples_digest == by_hand("abc")


def test_ids_that_cost_the_reading_of_a_sample_are_not_read_for_it() -> None:
    data = Named("abc")
    assert hashes_of_ids(wrap(data, ids="name"), 3, World.alone(), lambda: None)[0] == []
    assert data.reads == 0
    assert of_names("abc", ids="name").samples_digest is None
    held = [data[index] for index in range(3)]
    samples = wrap(held, ids="name")
    assert joined(3, [hashes_of_ids(samples, 3, World.alone(), lambda: None)[0]]) == by_hand("abc")


@pytest.mark.parametrize("ids", [list("abcb"), lambda index: "abcb"[index], "name"])
def test_two_samples_of_one_id_are_refused_before_anything_is_evaluated(ids: Any, tmp_path: Path) -> None:
    held = [Named("abcb")[index] for index in range(4)]
    options: dict[str, Any] = {"metrics": [], "observe": lambda outputs, batch: {"one": outputs[:, 0]}}
    model = nn.Identity()
    with pytest.raises(UsageError, match="2 samples have the id 'b': each sample needs an id of its own"):
        dualeval.evaluate(model=model, data=wrap(held, ids=ids), out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    # Each of those that are evaluated has its own.
    first = dualeval.evaluate(model=model, data=wrap(held, ids=ids), limit=3, **options)
    assert first.samples["evaluated"] == 3
