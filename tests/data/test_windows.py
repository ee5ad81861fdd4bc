"""Windows of tokens, against transformers' own call and against their definition in plain Python."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualeval.data.token_groups import (
    MOST_TOKENS,
    Document,
    DocumentWindows,
    collate_prompts,
    collate_sequences,
)
from dualeval.data.windows import WindowEncoder
from dualeval.errors import UsageError
from tests.vehicles.made_tokenizers import (
    ACCENTS,
    CONTEXT_WORDS,
    NAMES,
    QUESTION_WORDS,
    RIVER,
    Made,
    byte_level,
    same_bits,
    split,
)


def of_context(window: dict[str, Any]) -> list[tuple[int, tuple[int, int]]]:
    """Id and characters of a window's tokens of the context."""
    return [
        (token, (start, end))
        for token, (start, end) in zip(window["ids"], window["spans"], strict=True)
        if start >= 0
    ]


def expect_windows(tokens: Sequence[Any], room: int, stride: int) -> list[list[Any]]:
    """What each window holds of a context, by the definition."""
    parts = []
    start = 0
    while True:
        parts.append(list(tokens[start : start + room]))
        if start + room >= len(tokens):
            return parts
        start += room - stride


# Windows


def by_transformers(made: Made, question: str, context: str, max_length: int, stride: int) -> list[Any]:
    """The windows of transformers' own call. As lists: an empty string beside a string it takes for none."""
    pair = ([context], [question]) if made.facts.left else ([question], [context])
    found = made.transformers(
        *pair,
        truncation="only_first" if made.facts.left else "only_second",
        max_length=max_length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_token_type_ids=True,
    )
    sequence = 0 if made.facts.left else 1
    windows = []
    for place, ids in enumerate(found["input_ids"]):
        spans = [
            list(offsets) if of == sequence else [-1, -1]
            for offsets, of in zip(found["offset_mapping"][place], found.sequence_ids(place), strict=True)
        ]
        cls = made.transformers.cls_token_id
        null = ids.index(cls) if cls is not None else 0
        windows.append({"null": null, "ids": ids, "types": found["token_type_ids"][place], "spans": spans})
    return windows


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("question", "context"),
    [
        ("Where is it?", RIVER),
        ("q1 q2", " ".join(CONTEXT_WORDS)),
        ("q1 q2 q3", "c1 c2"),
        ("été?", ACCENTS),
        ("Where?", ""),
        ("", RIVER),
        ("", ""),
        ("q1", " \t\n "),
        ("What of [CLS] <s>?", "It is [CLS] or [SEP], <s> or </s>, [PAD] or <pad>."),
    ],
)
@pytest.mark.parametrize(("max_length", "stride"), [(48, 0), (48, 7), (40, 15), (384, 128)])
def test_windows_are_those_of_transformers(
    made: dict[str, Made], name: str, question: str, context: str, max_length: int, stride: int
) -> None:
    found = made[name].encoder(max_length=max_length, stride=stride).encode(question, context)
    assert split(found) == by_transformers(made[name], question, context, max_length, stride)
    assert {key: value.dtype for key, value in found.items()} == dict.fromkeys(
        ("ids", "types", "spans", "lengths", "null"), torch.int32
    )
    assert found["spans"].shape == (len(found["ids"]), 2)
    assert found["lengths"].sum() == len(found["ids"]) == len(found["types"])


def test_each_tokenizer_is_of_its_kind(made: dict[str, Made]) -> None:
    facts = {name: one.facts for name, one in made.items()}
    assert list(facts) == NAMES
    assert {name for name, one in facts.items() if one.left} == {"left"}
    assert {name for name, one in facts.items() if one.null_id is None} == {"without_cls"}
    assert {name for name, one in facts.items() if one.type_ids} == {"minilm", "word_level", "left"}
    assert {name: one.pad_id for name, one in facts.items() if one.pad_id} == {"byte_level": 1}
    [window] = split(made["left"].encoder(max_length=20, stride=2).encode("q1", "c1 c2"))
    assert window["null"] == 5 and window["types"] == [0, 0, 0, 1, 1, 2]


def test_the_tokenizers_own_truncation_and_padding_do_not_matter(made: dict[str, Made]) -> None:
    tokenizer = made["minilm"].tokenizer()
    assert (tokenizer.truncation["max_length"], tokenizer.padding["length"]) == (128, 128)
    bare = made["minilm"].tokenizer()
    bare.no_truncation()
    bare.no_padding()
    context = f"{RIVER} " * 8
    encoders = [
        WindowEncoder(one, made["minilm"].facts, max_length=300, stride=50, most_windows=8)
        for one in (tokenizer, bare)
    ]
    ours, plain = (encoder.encode("Where?", context) for encoder in encoders)
    assert same_bits(ours, plain)
    assert ours["lengths"].tolist()[0] == 300 and 0 < ours["lengths"].tolist()[-1] < 300
    assert encoders[0].encode("Where?", "Here.")["lengths"].tolist() == [7]
    assert encoders[0].fingerprint() == encoders[1].fingerprint()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("blank", [" ", "\t", "\n", " \n\t ", "\u00a0", "\u3000"])
def test_white_space_before_a_question_does_not_matter(made: dict[str, Made], name: str, blank: str) -> None:
    encoder = made[name].encoder(max_length=48, stride=8)
    assert same_bits(encoder.encode(f"{blank}q1 is it", RIVER), encoder.encode("q1 is it", RIVER))
    assert same_bits(encoder.encode(blank, RIVER), encoder.encode("", RIVER))


def test_encoding_is_deterministic_and_remembers_nothing(made: dict[str, Made]) -> None:
    asked = dict.fromkeys(NAMES, " ".join(QUESTION_WORDS[:46])) | {
        "minilm": "a " * 46,
        "byte_level": "a" * 46,
    }
    for name in NAMES:
        encoder = made[name].encoder(max_length=48, stride=8)
        first = encoder.encode("q1 q2", RIVER)
        encoder.encode("q3", ACCENTS)
        with pytest.raises(ValueError, match="leaves room for"):
            encoder.encode(asked[name], RIVER)
        assert same_bits(encoder.encode("q1 q2", RIVER), first)
        assert same_bits(made[name].encoder(max_length=48, stride=8).encode("q1 q2", RIVER), first)


# Room for the context


@settings(max_examples=120, deadline=None)
@given(
    # Less than max_length - special, as the task sees to.
    between=st.integers(1, 40).flatmap(lambda free: st.tuples(st.just(free), st.integers(0, free - 1))),
    asked=st.one_of(st.integers(0, 12), st.integers(0, 60)),
    told=st.integers(0, 80),
)
@example(between=(13, 2), asked=11, told=80)
@example(between=(13, 2), asked=10, told=80)
@example(between=(13, 12), asked=1, told=80)
@example(between=(3, 0), asked=2, told=80)
@example(between=(14, 11), asked=2, told=80)
@example(between=(13, 11), asked=2, told=80)
@example(between=(1, 0), asked=0, told=3)
@example(between=(1, 0), asked=60, told=0)
@pytest.mark.parametrize(("name", "special"), [("word_level", 3), ("without_cls", 2), ("left", 3)])
def test_windows_of_any_lengths_are_right_or_refused(
    made: dict[str, Made], name: str, special: int, between: tuple[int, int], asked: int, told: int
) -> None:
    free, stride = between
    encoder = made[name].encoder(max_length=free + special, stride=stride)
    question, context = " ".join(QUESTION_WORDS[:asked]), " ".join(CONTEXT_WORDS[:told])
    room = free - asked
    if room <= stride and told > room:
        room = max(room, 0)
        with pytest.raises(ValueError) as caught:
            encoder.encode(question, context)
        assert str(caught.value) == (
            f"the question leaves room for {room} tokens of the text in a window of {free + special}, "
            f"expected more than the {stride} that windows share: set --max-length or --stride"
        )
        return
    numbers = made[name].tokenizer().get_vocab()
    windows = split(encoder.encode(question, context))
    words = CONTEXT_WORDS[:told]
    expected = [words] if told <= room else expect_windows(words, room, stride)
    for window, part in zip(windows, expected, strict=True):
        assert [(token, context[start:end]) for token, (start, end) in of_context(window)] == [
            (numbers[word], word) for word in part
        ]
        assert len(window["ids"]) == special + asked + len(part) <= free + special
        others = [
            token for token, (start, _) in zip(window["ids"], window["spans"], strict=True) if start < 0
        ]
        assert [token for token in others if token > 3] == [numbers[word] for word in QUESTION_WORDS[:asked]]
        assert window["null"] == (len(window["ids"]) - 1 if name == "left" else 0)


# Fingerprints


def test_fingerprint_changes_with_tokenizer_and_settings(made: dict[str, Made]) -> None:
    word = made["word_level"]
    encoders = [
        *(made[name].encoder(max_length=48, stride=8) for name in NAMES),
        word.encoder(max_length=49, stride=8),
        word.encoder(max_length=48, stride=9),
        replace(word, facts=replace(word.facts, left=True)).encoder(max_length=48, stride=8),
        replace(word, text=word.text.replace('"q7"', '"other"')).encoder(max_length=48, stride=8),
    ]
    found = [encoder.fingerprint() for encoder in encoders]
    assert len(set(found)) == len(found)
    assert all(len(one) == 64 and int(one, 16) >= 0 for one in found)


# -- documents as windows of tokens, and the sequences of a batch in groups ------------------------------


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
def test_sequences_in_groups_keep_owner_tokens_and_targets(count: int, most: int) -> None:
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
    batch = collate_prompts(prompts, [*torch.arange(7)], 4)
    assert [tuple(group.shape) for group in batch["groups"]] == [(2, 5), (3, 3), (1, 1)]
    rows = [row for group in batch["groups"] for row in group.tolist()]
    assert [rows[at] if at >= 0 else [] for at in batch["places"].tolist()] == [
        each.tolist() for each in prompts
    ]
    assert [each.tolist() for each in batch["numbers"]] == [[0, 3], [1, 4, 6], [5]]
    many = collate_prompts([torch.zeros(1000)] * 9, [torch.zeros(0)] * 9, 24)
    assert [len(group) for group in many["groups"]] == [4, 4, 1]
