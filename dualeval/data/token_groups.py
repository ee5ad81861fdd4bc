"""Texts as tokens, and the groups in which a model takes them.

Within a batch texts are sorted by length and computed a group at a time, each group padded to its longest
text only. Groups follow from the lengths in the batch alone, so a text is computed in the same company at any
number of processes; what fills up is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
