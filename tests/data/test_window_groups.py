"""Groups of windows and of texts that a model computes at once, against plain Python."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualeval.data.token_groups import FORWARD_TOKENS, TokenizerFacts, Tokens, grouped, in_groups
from dualeval.data.windows import EncodedQuestion, WindowEncoder
from dualeval.engine.values.nests import zeros_like
from tests.vehicles.made_tokenizers import CONTEXT_WORDS, QUESTION_WORDS, Made, same_bits, split

Sample = dict[str, Tensor]

FACTS = TokenizerFacts(pad_id=7, pad_type_id=3, null_id=2, type_ids=True, left=False)


@pytest.fixture(scope="module")
def collator(made: dict[str, Made]) -> Callable[..., WindowEncoder]:
    """Makes encoders whose ``collate`` is tested: of any facts, and of a tokenizer that does not matter."""
    tokenizer = made["word_level"].tokenizer()

    def make(facts: TokenizerFacts, most_windows: int) -> WindowEncoder:
        return WindowEncoder(tokenizer, facts, max_length=64, stride=8, most_windows=most_windows)

    return make


def sample_of(lengths: Sequence[int], seed: int) -> Sample:
    """A question with windows of these lengths; no two of its tokens are alike, nor like another seed's."""
    tokens = sum(lengths)
    ids = torch.arange(tokens, dtype=torch.int32) + 1000 * seed + 10
    spans = torch.stack([ids * 2, ids * 2 + 1], dim=1)
    null = torch.tensor([(length - 1) // 2 for length in lengths], dtype=torch.int32)
    return {
        "ids": ids,
        "types": ids % 2,
        "spans": spans,
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "null": null,
    }


def rows_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """All windows of a batch in their order, each one a dict of lists."""
    rows = []
    for group in batch["groups"]:
        for row in range(len(group["null"])):
            inputs = {name: value[row].tolist() for name, value in group["inputs"].items()}
            rows.append({**inputs, "spans": group["spans"][row].tolist(), "null": int(group["null"][row])})
    return rows


def join_by_hand(
    samples: Sequence[EncodedQuestion], facts: TokenizerFacts, sizes: Sequence[int]
) -> tuple[list[dict[str, Any]], list[list[int]], list[list[int]]]:
    """Rows, places and counts of groups of these sizes, in plain Python."""
    windows = [
        (-len(window["ids"]), question, number, window)
        for question, sample in enumerate(samples)
        if sample["lengths"].any()
        for number, window in enumerate(split(sample))
    ]
    windows.sort(key=lambda window: window[:3])
    most = max([number + 1 for _, _, number, _ in windows], default=1)
    places = [[-1] * most for _ in samples]
    counts = [[0, 0, 0] for _ in samples]
    rows: list[dict[str, Any]] = []
    for size in sizes:
        group = windows[len(rows) : len(rows) + size]
        longest = max(len(window["ids"]) for *_, window in group)
        for _, question, number, window in group:
            length = len(window["ids"])
            before = longest - length if facts.left else 0
            after = longest - length - before

            def padded(values: list[Any], fill: Any, before: int = before, after: int = after) -> list[Any]:
                return [fill] * before + values + [fill] * after

            row = {
                "input_ids": padded(window["ids"], facts.pad_id),
                "attention_mask": padded([1] * length, 0),
                "spans": padded(window["spans"], [-1, -1]),
                "null": window["null"] + before,
            }
            if facts.type_ids:
                row["token_type_ids"] = padded(window["types"], facts.pad_type_id)
            places[question][number] = len(rows)
            rows.append(row)
            counts[question] = [
                count + more for count, more in zip(counts[question], (1, length, longest), strict=True)
            ]
    assert len(rows) == len(windows)
    return rows, places, counts


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_grouped_windows_are_those_joined_by_hand(
    collator: Callable[..., WindowEncoder], data: st.DataObject
) -> None:
    lengths = data.draw(
        st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=12)
    )
    # Some are so long that they are not padded to.
    longer = data.draw(st.sampled_from([1, 1, 40]))
    samples = [
        sample_of([length * (longer if seed % 2 else 1) for length in windows], seed)
        for seed, windows in enumerate(lengths)
    ]
    for place in data.draw(st.sets(st.integers(0, len(samples) - 1), max_size=2)):
        samples[place] = zeros_like(samples[place])
    most_windows = data.draw(st.sampled_from([1, 3, 8, 32]))
    facts = replace(FACTS, left=data.draw(st.booleans()), type_ids=data.draw(st.booleans()))
    before = copy.deepcopy(samples)
    batch = collator(facts, most_windows).collate(samples)
    assert same_bits(samples, before)
    assert batch.keys() == {"groups", "places", "windows", "tokens", "padded_tokens"}
    assert {batch[name].dtype for name in ("windows", "tokens", "padded_tokens")} == {torch.int32}
    for group in batch["groups"]:
        assert {value.dtype for value in (*group["inputs"].values(), group["null"])} == {torch.int64}
        assert (group["spans"].dtype, batch["places"].dtype) == (torch.int32, torch.int64)

    sizes = [len(group["null"]) for group in batch["groups"]]
    assert all(0 < size <= most_windows for size in sizes)
    rows, places, counts = join_by_hand(samples, facts, sizes)
    assert rows_of(batch) == rows
    assert batch["places"].tolist() == places
    columns = [batch[name].tolist() for name in ("windows", "tokens", "padded_tokens")]
    assert [list(row) for row in zip(*columns, strict=True)] == counts


def cost(lengths: Sequence[int], groups: Sequence[tuple[int, int]]) -> int:
    """Tokens with padding, and as many a group as another forward takes."""
    return sum((stop - first) * max(lengths[first:stop]) + FORWARD_TOKENS for first, stop in groups)


def divisions(count: int, most: int) -> list[list[tuple[int, int]]]:
    """All ways to divide so many windows into groups that follow each other."""
    found = []
    for chosen in range(1 << (count - 1)):
        ends = [place + 1 for place in range(count - 1) if chosen >> place & 1]
        groups = list(pairwise([0, *ends, count]))
        if all(stop - first <= most for first, stop in groups):
            found.append(groups)
    return found


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 12), st.integers(1, 1200)), min_size=1, max_size=8),
    most=st.integers(1, 9),
)
def test_no_division_into_groups_takes_less(lengths: list[int], most: int) -> None:
    lengths = sorted(lengths, reverse=True)
    groups = grouped(lengths, most)
    assert groups in divisions(len(lengths), most)
    assert cost(lengths, groups) == min(cost(lengths, other) for other in divisions(len(lengths), most))
    assert grouped([], most) == []


def test_the_placeholder_of_a_question_without_windows_has_none(made: dict[str, Made]) -> None:
    """No run can read it, so in no run are there windows of it."""
    encoder = made["word_level"].encoder(max_length=16, stride=4)
    asked = " ".join(QUESTION_WORDS[:12]), " ".join(CONTEXT_WORDS)
    with pytest.raises(ValueError, match="room for 1 tokens"):
        encoder.encode(*asked)
    other = encoder.encode("q1", "c1 c2")
    batch = encoder.collate([other, encoder.placeholder(*asked)])
    assert same_bits(batch["groups"], encoder.collate([other])["groups"])
    assert batch["windows"].tolist() == [1, 0]
    assert encoder.collate([encoder.placeholder(*asked)])["groups"] == []


# -- texts: what the model takes of each, and where each text's row is -----------------------------------


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
    assert found["tokens"].tolist() == lengths
    for (ids, types), place, width in zip(texts, found["places"], found["padded_tokens"], strict=True):
        if not len(ids):
            assert (place, width) == (-1, 0)
            continue

        def padded(values: list[int], fill: int, width: int = width) -> list[int]:
            around = [fill] * (width - len(values))
            return [*around, *values] if left else [*values, *around]

        wanted = {
            "input_ids": padded(ids.tolist(), FACTS.pad_id),
            "attention_mask": padded([1] * len(ids), 0),
        }
        if type_ids:
            wanted["token_type_ids"] = padded(types.tolist(), FACTS.pad_type_id)
        assert {name: value.tolist() for name, value in rows[place].items()} == wanted
