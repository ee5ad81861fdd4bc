"""Texts as tokens, and the groups in which a model takes them.

Within a batch texts are sorted by length and computed a group at a time, each group padded to its longest
text only. Groups follow from the lengths in the batch alone, so a text is computed in the same company at any
number of processes; what fills up is masked.

A long document becomes windows, and a sequence has the tokens that a model predicts at its end.
The windows are those of lm-evaluation-harness (``get_rolling_token_windows`` and ``make_disjoint_window`` in
its ``lm_eval/utils.py``): each token of a document is predicted once, the first one after a prefix token.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dualeval.columns.of_data import NO_COLUMNS, KeptColumns, WithColumns
from dualeval.data.table import DataRows
from dualeval.errors import UsageError

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
    # How many tokens the model knows.
    known: int = field(default=sys.maxsize, repr=False)
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
    refuse_unknown([ids], facts.known)
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
        costs = least[first] + (stop - first) * sizes[first] + FORWARD_TOKENS
        best = int(costs.argmin())
        least[stop], begins[stop] = costs[best], first[best]
    groups = []
    stop = len(sizes)
    while stop:
        groups.append((int(begins[stop]), stop))
        stop = int(begins[stop])
    return groups[::-1]


def refuse_unknown(ids: Iterable[Tensor], known: int) -> None:
    """Refuse a token without an embedding: in the midst of a run it would end a GPU's context."""
    if (largest := max((int(each.max()) for each in ids), default=0)) >= known:
        raise UsageError(
            f"a text has the token {largest} of its tokenizer, and the model knows {known}, from 0 on. Give "
            "a model and a tokenizer that belong together."
        )


class TextEncoder:
    """Encodes texts and pairs as the library's tokenizer does; cuts those that are too long."""

    def __init__(self, tokenizer: Tokenizer, facts: TokenizerFacts, *, max_length: int) -> None:
        self.max_length = max_length
        self.facts = facts
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._whole = tokenizer
        self._cut = copy.deepcopy(tokenizer)
        # Of a pair the longer text loses its tokens, one by one.
        side = "left" if facts.cuts_left else "right"
        self._cut.enable_truncation(max_length, strategy="longest_first", direction=side)

    def fingerprint(self) -> str:
        """sha256, in hex, over the tokenizer and its settings."""
        text = f"{self._cut.to_str()}\n{self.facts} {self.facts.cuts_left}"
        return hashlib.sha256(text.encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> dict[str, Any]:
        """The tokens of one text, or of a pair."""
        text, pair = texts[0], texts[1] if len(texts) > 1 else None
        encoding = self._whole.encode(text, pair)
        truncated = len(encoding) > self.max_length
        if truncated:
            encoding = self._cut.encode(text, pair)
        ids, types = (torch.tensor(each, dtype=torch.int32) for each in (encoding.ids, encoding.type_ids))
        return {"ids": ids, "types": types, "truncated": truncated}

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A batch of encoded texts, in groups."""
        texts = [(sample["ids"], sample["types"]) for sample in samples]
        truncated = torch.tensor([sample["truncated"] for sample in samples])
        return {**in_groups(texts, self.facts), "truncated": truncated}


class EncodedTexts(WithColumns):
    """The texts of rows as tokens, and each row's place."""

    def __init__(self, rows: DataRows, columns: Sequence[str], encoder: TextEncoder) -> None:
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
        tokens = self._encoder.encode([self._rows.text(index, column) for column in self._columns])
        if not len(tokens["ids"]):
            raise ValueError(f"{self._rows.where(index)}: the text holds no token")
        return {**tokens, "row": index}

    def placeholder(self, index: int) -> dict[str, Any]:
        """What takes the place of a row that cannot be read: no tokens, as such a row never has any."""
        none: Tensor = torch.zeros(0, dtype=torch.int32)
        return {"ids": none, "types": none, "truncated": False, "row": index}

    def fingerprint(self, count: int) -> str:
        """sha256, in hex, over ids, texts and labels of the first ``count`` rows."""
        return self._rows.fingerprint(count)


# One forward computes at most so many tokens with padding, or one sequence: logits are the most memory.
MOST_TOKENS = 4096
_BLANKS = re.compile(r"\s+")


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text whose tokens are predicted, or what is wrong with it."""

    # Unique in the data.
    name: str
    text: str
    # Why it cannot be evaluated, with where it is; "" for nothing.
    wrong: str = ""


def rolling(tokens: int, max_length: int, stride: int) -> Iterator[tuple[int, int]]:
    """The tokens that each window of a document predicts, as (first, stop).

    The first window predicts up to ``max_length`` tokens, each later one up to ``stride``. ``stride`` is what
    the harness writes as ``max_seq_len - context_len + 1``.
    """
    stop = min(tokens, max_length)
    yield 0, stop
    while stop < tokens:
        first, stop = stop, min(stop + stride, tokens)
        yield first, stop


class DocumentWindows(WithColumns):
    """The windows of documents, as a data set: a sample is a window.

    All tokens are kept, 4 bytes each; the texts are not.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        tokenizer: Tokenizer,
        *,
        prefix: int,
        max_length: int,
        stride: int,
        kept: KeptColumns = NO_COLUMNS,
    ) -> None:
        self._names = [document.name for document in documents]
        self._wrong = [document.wrong for document in documents]
        self._max_length = max_length
        # Of each window: its document, the first token that it predicts and the one behind its last, and how
        # many bytes and words of the text these are.
        windows: list[tuple[int, int, int, int, int]] = []
        tokens, self._hashes = [], []
        for number, document in enumerate(documents):
            self._hashes.append(hashlib.sha256(document.text.encode()).digest())
            encoding = None if document.wrong else tokenizer.encode(document.text, add_special_tokens=False)
            if not encoding:
                self._wrong[number] = document.wrong or f"{document.name}: the text has no token"
                windows.append((number, 0, 0, 0, 0))
                tokens.append(np.zeros(0, np.int32))
                continue
            spans = list(rolling(len(encoding), max_length, stride))
            starts = [0, *(_start(encoding, first) for first, _ in spans[1:])]
            sizes = _sizes(document.text, starts)
            windows += [(number, *span, *size) for span, size in zip(spans, sizes, strict=True)]
            tokens.append(np.array([prefix, *encoding.ids], np.int32))
        self._windows = np.array(windows, np.int64).reshape(-1, 5)
        self.kept = kept.select(self._windows[:, 0])
        self._tokens = tokens
        self._first_windows = np.searchsorted(self._windows[:, 0], np.arange(len(documents)))

    def __len__(self) -> int:
        return len(self._windows)

    def id(self, index: int) -> str:
        """The document's name, and which of its windows it is."""
        document = int(self._windows[index, 0])
        return f"{self._names[document]}/{index - int(self._first_windows[document])}"

    def document(self, index: int) -> str:
        """The name of the document that a window is of."""
        return self._names[int(self._windows[index, 0])]

    def span(self, index: int) -> tuple[int, int, int]:
        """A window's document, and in it the first token that it predicts and the one behind its last."""
        number, first, stop = self._windows[index, :3].tolist()
        return number, first, stop

    def predicted(self, index: int) -> list[int]:
        """The tokens that a window predicts."""
        number, first, stop = self.span(index)
        tokens: list[int] = self._tokens[number][first + 1 : stop + 1].tolist()
        return tokens

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Windows as sequences; of a document that is wrong there is one, which cannot be read."""
        return [self._sample(index, is_read=True) for index in indices]

    def placeholder(self, index: int) -> dict[str, Any]:
        """What takes the place of a window that cannot be read: no sequence."""
        return self._sample(index, is_read=False)

    def _sample(self, index: int, *, is_read: bool) -> dict[str, Any]:
        number, first, stop, size, words = self._windows[index].tolist()
        if is_read and self._wrong[number]:
            raise UsageError(self._wrong[number])
        # The tokens begin with the prefix. All windows but those of a short document are of one length.
        block = self._tokens[number][max(0, stop - self._max_length) : stop + 1]
        sequences = [(torch.from_numpy(block), stop - first)] if stop else []
        return {"sequences": sequences, "tokens": stop - first, "bytes": size, "words": words}

    def fingerprint(self, count: int) -> str:
        """sha256, in hex, over the documents of the first ``count`` windows, and these windows."""
        digest = hashlib.sha256(self._windows[:count].tobytes())
        for number in np.unique(self._windows[:count, 0]).tolist():
            digest.update(repr((self._names[number], self._wrong[number], self._hashes[number])).encode())
        return digest.hexdigest()


def _start(encoding: Any, token: int) -> int:
    """The character at which a token begins; 0 where the tokenizer does not say it."""
    span = encoding.token_to_chars(token)
    return 0 if span is None else int(span[0])


def _sizes(text: str, starts: Sequence[int]) -> list[tuple[int, int]]:
    """How many bytes and words of a text each window predicts, of where they begin.

    They add up to what the harness counts, ``len(text.encode("utf-8"))`` and
    ``len(re.split(r"\\s+", text))``. A word belongs to the window in which the white space before it begins.
    """
    # Some tokenizers say a place behind the next token's.
    begins = np.maximum.accumulate(np.array(starts, np.int64))
    ends = [*begins[1:].tolist(), len(text)]
    blanks = np.array([match.start() for match in _BLANKS.finditer(text)], np.int64)
    words = np.diff(np.searchsorted(blanks, [*begins.tolist(), len(text)]))
    words[0] += 1
    sizes = [len(text[begin:end].encode()) for begin, end in zip(begins.tolist(), ends, strict=True)]
    return list(zip(sizes, words.tolist(), strict=True))


def collate_sequences(samples: Sequence[Sequence[tuple[Tensor, int]]]) -> dict[str, Any]:
    """Join the sequences of a batch's samples to groups, each of about one length.

    They are filled up behind their last token. A causal model computes nothing of what follows a token, so
    what fills up changes no bit of the others, and needs no mask.

    A sequence is its tokens, and how many of the last are predicted, whose places in each row ``predicted``
    has. ``places`` says where each sequence is among those of all groups, ``owners`` whose it is.
    """
    sequences = list(itertools.chain.from_iterable(samples))
    order = sorted(range(len(sequences)), key=lambda at: -len(sequences[at][0]))
    lengths = [len(sequences[at][0]) - 1 for at in order]
    groups = []
    for start, stop in _divided(lengths):
        inputs, targets = torch.zeros((2, stop - start, lengths[start]), dtype=torch.int64)
        predicted = []
        for row, at in enumerate(order[start:stop]):
            tokens, count = sequences[at]
            length = len(tokens) - 1
            inputs[row, :length], targets[row, :length] = tokens[:-1], tokens[1:]
            predicted.append((length - count, length))
        groups.append({"inputs": inputs, "targets": targets, "predicted": predicted})
    places = torch.zeros(len(order), dtype=torch.int64)
    places[order] = torch.arange(len(order))
    owners = torch.tensor([owner for owner, each in enumerate(samples) for _ in each], dtype=torch.int64)
    return {"groups": groups, "places": places, "owners": owners}


def collate_prompts(prompts: Sequence[Tensor], numbers: Sequence[Tensor], most_new: int) -> dict[str, Any]:
    """Join prompts to groups of one length each, which nothing fills up; one without tokens is in none.

    At most ``most_new`` tokens follow, which ``numbers`` draw. ``places`` has the row of each among those of
    all groups, or -1.
    """
    lengths = [len(prompt) for prompt in prompts]
    order = sorted((at for at, length in enumerate(lengths) if length), key=lambda at: -lengths[at])
    places = torch.full((len(prompts),), -1)
    places[order] = torch.arange(len(order))
    groups: list[Tensor] = []
    of_groups: list[Tensor] = []
    for length, same in itertools.groupby(order, key=lambda at: lengths[at]):
        of_length, most = [*same], max(1, MOST_TOKENS // (length + most_new))
        groups += torch.split(torch.stack([prompts[at] for at in of_length]).long(), most)
        of_groups += torch.split(torch.stack([numbers[at] for at in of_length]), most)
    return {"groups": groups, "numbers": of_groups, "places": places}


def _divided(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Groups of sequences, the longest first, of which none is too much for one forward."""
    for start, stop in grouped(lengths, max(1, len(lengths))):
        most = max(1, MOST_TOKENS // lengths[start])
        for first in range(start, stop, most):
            yield first, min(first + most, stop)
