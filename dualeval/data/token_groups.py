"""Texts as tokens, and the groups in which a model takes them.

Within a batch texts are sorted by length and computed a group at a time, each group padded to its longest
text only. Groups follow from the lengths in the batch alone, so a text is computed in the same company at any
number of processes; what fills up is masked.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dualeval.data.rows import Rows
from dualeval.further_columns import WithColumns

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Tokens that are computed in the time which one forward more takes: more groups pad less, but cost this.
FORWARD_TOKENS = 512

# The ids and the types of a text's tokens, int32 of shape (tokens,).
Tokens = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """What a tokenizer has decided for its model."""

    # The token that fills up.
    pad_id: int
    pad_type_id: int
    # The token whose place stands for "no answer": [CLS]; None takes the first place.
    null_id: int | None
    # Whether the model is told which tokens are the question's.
    type_ids: bool
    # Whether it is filled up on the left; the context then comes before the question.
    left: bool
    # The most tokens that the model was made for; None where the tokenizer does not say it. It is not in the
    # text of these facts, which is part of identities; likewise the next.
    most_tokens: int | None = field(default=None, repr=False)
    # Whether a text that is too long loses its beginning.
    cuts_left: bool = field(default=False, repr=False)


def in_groups(texts: Sequence[Tokens], facts: TokenizerFacts) -> dict[str, Any]:
    """Divide the texts of a batch into groups; one without tokens is in none.

    ``places``, int64 (texts,), is where the row of each text is among those of all groups, -1 for none.
    """
    lengths = [len(ids) for ids, _ in texts]
    # The longest first: where memory does not suffice, it shows at once.
    order = sorted((place for place, length in enumerate(lengths) if length), key=lambda at: -lengths[at])
    ordered = [lengths[place] for place in order]
    divided = grouped(ordered, max(1, len(order)))
    groups = [[texts[place] for place in order[start:stop]] for start, stop in divided]
    places = torch.full((len(texts),), -1)
    places[order] = torch.arange(len(order))
    padded = torch.zeros(len(texts), dtype=torch.int32)
    for start, stop in divided:
        padded[order[start:stop]] = ordered[start]
    return {
        "groups": [fill_up(group, facts)[0] for group in groups],
        "places": places,
        "tokens": torch.tensor(lengths, dtype=torch.int32),
        "padded_tokens": padded,
    }


def fill_up(texts: Sequence[Tokens], facts: TokenizerFacts) -> tuple[dict[str, Tensor], list[slice]]:
    """Texts, the longest first, as one padded block, and where in its row each of them is."""
    shape = len(texts), len(texts[0][0])
    ids = torch.full(shape, facts.pad_id)
    types = torch.full(shape, facts.pad_type_id)
    mask = torch.zeros(shape, dtype=torch.int64)
    places = []
    for row, (of_ids, of_types) in enumerate(texts):
        filled = shape[1] - len(of_ids) if facts.left else 0
        place = slice(filled, filled + len(of_ids))
        ids[row, place] = of_ids.long()
        types[row, place] = of_types.long()
        mask[row, place] = 1
        places.append(place)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if facts.type_ids:
        inputs["token_type_ids"] = types
    return inputs, places


def grouped(lengths: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Divide texts, the longest first, so that they take the least: padded tokens, and a constant a group."""
    sizes = np.array(lengths, dtype=np.int64)
    # Of the first n texts: what they take at least, and where their last group begins.
    least = np.zeros(len(sizes) + 1, dtype=np.int64)
    begins = np.zeros(len(sizes) + 1, dtype=np.int64)
    for stop in range(1, len(sizes) + 1):
        first = np.arange(max(0, stop - most), stop)
        taken = least[first] + (stop - first) * sizes[first] + FORWARD_TOKENS
        best = int(taken.argmin())
        least[stop], begins[stop] = taken[best], first[best]
    groups = []
    stop = len(sizes)
    while stop:
        groups.append((int(begins[stop]), stop))
        stop = int(begins[stop])
    return groups[::-1]


class TextEncoder:
    """Encodes texts and pairs as the library's tokenizer does; cuts those that are too long."""

    def __init__(self, tokenizer: Tokenizer, facts: TokenizerFacts, *, max_length: int) -> None:
        self.max_length = max_length
        self._facts = facts
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._whole = tokenizer
        self._cut = copy.deepcopy(tokenizer)
        # Of a pair the longer text loses its tokens, one by one.
        side = "left" if facts.cuts_left else "right"
        self._cut.enable_truncation(max_length, strategy="longest_first", direction=side)

    def fingerprint(self) -> str:
        """sha256, in hex, over the tokenizer and its settings."""
        said = f"{self._cut.to_str()}\n{self._facts} {self._facts.cuts_left}"
        return hashlib.sha256(said.encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> dict[str, Any]:
        """The tokens of one text, or of a pair."""
        text, pair = texts[0], texts[1] if len(texts) > 1 else None
        found = self._whole.encode(text, pair)
        truncated = len(found) > self.max_length
        if truncated:
            found = self._cut.encode(text, pair)
        ids, types = (torch.tensor(each, dtype=torch.int32) for each in (found.ids, found.type_ids))
        return {"ids": ids, "types": types, "truncated": truncated}

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A batch of encoded texts, in groups."""
        texts = [(sample["ids"], sample["types"]) for sample in samples]
        truncated = torch.tensor([sample["truncated"] for sample in samples])
        return {**in_groups(texts, self._facts), "truncated": truncated}


class EncodedTexts(WithColumns):
    """The texts of rows as tokens, and each row's place."""

    def __init__(self, rows: Rows, columns: Sequence[str], encoder: TextEncoder) -> None:
        self._rows = rows
        self.kept = rows.kept
        self._columns = columns
        self._encoder = encoder

    def __len__(self) -> int:
        return len(self._rows)

    def id(self, index: int) -> str:
        """The row's id."""
        return self._rows.ids[index]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Encode the texts of rows; refuse an empty one."""
        return [self._encoded(index) for index in indices]

    def _encoded(self, index: int) -> dict[str, Any]:
        found = self._encoder.encode([self._rows.text(index, column) for column in self._columns])
        if not len(found["ids"]):
            raise ValueError(f"{self._rows.where(index)}: the text holds no token")
        return {**found, "row": index}

    def placeholder(self, index: int) -> dict[str, Any]:
        """What takes the place of a row that cannot be read: no tokens, as such a row never has any."""
        none: Tensor = torch.zeros(0, dtype=torch.int32)
        return {"ids": none, "types": none, "truncated": False, "row": index}

    def fingerprint(self, count: int) -> str:
        """sha256, in hex, over ids, texts and labels of the first ``count`` rows."""
        return self._rows.fingerprint(count)
