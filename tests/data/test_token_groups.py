"""Texts of a batch in groups: what the model takes of each, and where each text's row is."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualeval.data.token_groups import TokenizerFacts, Tokens, in_groups

FACTS = TokenizerFacts(pad_id=7, pad_type_id=3, null_id=2, type_ids=True, left=False)


def text_of(length: int, seed: int) -> Tokens:
    ids = torch.arange(length, dtype=torch.int32) + 1000 * seed + 10
    return ids, ids % 2


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 9), st.sampled_from([40, 700])), min_size=1, max_size=12),
    left=st.booleans(),
    type_ids=st.booleans(),
)
def test_each_text_is_in_the_row_that_its_place_says(lengths: list[int], left: bool, type_ids: bool) -> None:
    texts = [text_of(length, seed) for seed, length in enumerate(lengths)]
    found = in_groups(texts, replace(FACTS, left=left, type_ids=type_ids))
    rows = [
        {name: values[row] for name, values in group.items()}
        for group in found["groups"]
        for row in range(len(group["input_ids"]))
    ]
    assert len(rows) == sum(length > 0 for length in lengths)
    for (ids, types), place, length, tokens, padded in zip(
        texts,
        *(found[name].tolist() for name in ("places",)),
        lengths,
        found["tokens"],
        found["padded_tokens"],
        strict=True,
    ):
        assert tokens == length
        if not length:
            assert (place, padded) == (-1, 0)
            continue
        row = rows[place]
        filled = len(row["input_ids"]) - length
        assert padded == len(row["input_ids"])
        real = row["attention_mask"].bool()
        assert real.tolist() == (
            [False] * filled + [True] * length if left else [True] * length + [False] * filled
        )
        assert torch.equal(row["input_ids"][real], ids.long())
        assert (row["input_ids"][~real] == FACTS.pad_id).all()
        if type_ids:
            assert torch.equal(row["token_type_ids"][real], types.long())
            assert (row["token_type_ids"][~real] == FACTS.pad_type_id).all()
        assert ("token_type_ids" in row) == type_ids


def test_a_text_without_tokens_moves_no_other() -> None:
    texts = [text_of(length, seed) for seed, length in enumerate([3, 8, 3])]
    none = (torch.zeros(0, dtype=torch.int32),) * 2
    whole, found = (in_groups(each, FACTS) for each in (texts, [texts[0], none, *texts[1:]]))
    assert found["places"].tolist() == [whole["places"][0], -1, *whole["places"][1:]]
    for one, other in zip(whole["groups"], found["groups"], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert in_groups([none], FACTS)["groups"] == []
