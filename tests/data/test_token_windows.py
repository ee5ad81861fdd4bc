"""Documents as windows of tokens, their bytes and words, and the sequences of a batch in groups."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from dualeval.data.token_groups import (
    MOST_TOKENS,
    Document,
    DocumentWindows,
    collate_prompts,
    collate_sequences,
)
from dualeval.errors import UsageError
from tests.made_tokenizers import ACCENTS, RIVER, byte_level

PREFIX = 0


def windows_of(*texts: str, max_length: int = 16, stride: int = 16) -> DocumentWindows:
    documents = [
        Document(name=f"d{number}", text=text, wrong="" if text else f"d{number} is empty")
        for number, text in enumerate(texts)
    ]
    tokenizer, _ = byte_level()
    return DocumentWindows(documents, tokenizer, prefix=PREFIX, max_length=max_length, stride=stride)


def tokens_of(text: str) -> list[int]:
    ids: list[int] = byte_level()[0].encode(text, add_special_tokens=False).ids
    return ids


def seen(sequence: tuple[Tensor, int]) -> list[tuple[list[int], int]]:
    """Each predicted token, behind those from which it is predicted."""
    tokens, predicted = sequence[0].tolist(), sequence[1]
    return [(tokens[:place], tokens[place]) for place in range(len(tokens) - predicted, len(tokens))]


def by_definition(tokens: list[int], length: int, stride: int) -> list[tuple[list[int], int]]:
    """As the harness defines it, written for one token at a time.

    The first ``length`` tokens see the prefix and all before them. A later one is predicted by a window that
    ends after a whole number of strides, or at the end; its input is ``length`` tokens.
    """
    found = []
    for place, token in enumerate(tokens):
        if place < length:
            found.append(([PREFIX, *tokens[:place]], token))
            continue
        end = min(length + ((place - length) // stride + 1) * stride, len(tokens))
        found.append((tokens[end - length - 1 : place], token))
    return found


@pytest.mark.parametrize(("length", "stride"), [(16, 16), (16, 1), (16, 5), (2, 2), (400, 100)])
@pytest.mark.parametrize("text", ["x", RIVER[:16], RIVER[:17], RIVER, f"{RIVER} {RIVER}"])
def test_windows_are_those_of_the_definition(length: int, stride: int, text: str) -> None:
    windows = windows_of(text, max_length=length, stride=stride)
    samples = windows.__getitems__(range(len(windows)))
    found = [each for sample in samples for sequence in sample["sequences"] for each in seen(sequence)]
    assert found == by_definition(tokens_of(text), length, stride)
    assert [windows.id(index) for index in range(len(windows))] == [f"d0/{n}" for n in range(len(windows))]


@pytest.mark.parametrize("stride", [1, 3, 16])
def test_bytes_and_words_add_up_to_the_definitions(stride: int) -> None:
    draw = random.Random(0)
    hard = ["".join(draw.choice("aé東😀 \t\n\u00a0\u2003") for _ in range(200)) + "x" for _ in range(20)]
    for text in [RIVER, ACCENTS, f"  {ACCENTS}\r\n\r\n", "x", "a  b", *hard]:
        windows = windows_of(text, stride=stride)
        samples = windows.__getitems__(range(len(windows)))
        assert sum(each["bytes"] for each in samples) == len(text.encode("utf-8"))
        assert sum(each["words"] for each in samples) == len(re.split(r"\s+", text))
        assert sum(each["tokens"] for each in samples) == len(tokens_of(text))
        assert min(each["words"] for each in samples) >= 0


def test_an_empty_document_is_a_sample_that_cannot_be_read() -> None:
    windows = windows_of("abc", "", "d")
    assert [windows.id(index) for index in range(len(windows))] == ["d0/0", "d1/0", "d2/0"]
    assert len(windows.__getitems__([0, 2])) == 2
    with pytest.raises(UsageError, match="d1 is empty"):
        windows.__getitems__([1])
    assert windows.placeholder(1)["sequences"] == []
    assert [windows.document(index) for index in range(3)] == ["d0", "d1", "d2"]


def test_the_fingerprint_is_of_the_windows_asked_for() -> None:
    one, other = windows_of("abc", RIVER), windows_of("abc", f"{RIVER}.")
    assert one.fingerprint(1) == other.fingerprint(1)
    assert one.fingerprint(2) != other.fingerprint(2)
    assert one.fingerprint(2) != one.fingerprint(3)


def drawn(count: int, most: int) -> list[list[tuple[Tensor, int]]]:
    draw = torch.Generator().manual_seed(3)
    found = []
    for _ in range(count):
        lengths = torch.randint(2, most, (2,), generator=draw).tolist()
        found.append([(torch.randint(1, 99, (length,), generator=draw), length // 2) for length in lengths])
    return found


@pytest.mark.parametrize(("count", "most"), [(1, 5), (9, 40), (6, 3000)])
def test_sequences_in_groups(count: int, most: int) -> None:
    samples = drawn(count, most)
    batch = collate_sequences(samples)
    flat = [(owner, *each) for owner, own in enumerate(samples) for each in own]
    rows: list[tuple[Any, ...]] = [
        (inputs, targets, span)
        for group in batch["groups"]
        for inputs, targets, span in zip(group["inputs"], group["targets"], group["predicted"], strict=True)
    ]
    assert len(rows) == len(flat)
    for (owner, tokens, predicted), place, found in zip(flat, batch["places"], batch["owners"], strict=True):
        inputs, targets, (first, stop) = rows[place]
        assert owner == found and stop == len(tokens) - 1 and stop - first == predicted
        assert inputs[:stop].tolist() == tokens[:-1].tolist()
        assert targets[first:stop].tolist() == tokens[-predicted:].tolist()
    for group in batch["groups"]:
        assert len(group["inputs"]) == 1 or group["inputs"].numel() <= MOST_TOKENS


def test_prompts_of_one_length_are_together() -> None:
    lengths = [5, 3, 0, 5, 3, 1, 3]
    prompts = [torch.full((length,), place, dtype=torch.int32) for place, length in enumerate(lengths)]
    assert collate_sequences([[], []])["groups"] == []
    batch = collate_prompts(prompts, 4)
    assert [tuple(group.shape) for group in batch["groups"]] == [(2, 5), (3, 3), (1, 1)]
    rows = [row for group in batch["groups"] for row in group.tolist()]
    assert [rows[at] if at >= 0 else [] for at in batch["places"].tolist()] == [
        each.tolist() for each in prompts
    ]
    many = collate_prompts([torch.zeros(1000)] * 9, 24)
    assert [len(group) for group in many["groups"]] == [4, 4, 1]
