"""Texts, or pairs of them, as tokens."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dualeval.data.rows import Rows
from dualeval.data.token_groups import TokenizerFacts, in_groups
from dualeval.further_columns import WithColumns

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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
