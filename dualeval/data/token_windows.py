"""Documents as windows of tokens, and sequences of which a model predicts the last tokens.

The windows are those of lm-evaluation-harness (``get_rolling_token_windows`` and ``make_disjoint_window`` in
its ``lm_eval/utils.py``): each token of a document is predicted once, the first one after a prefix token.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dualeval.data.token_groups import grouped
from dualeval.errors import UsageError
from dualeval.further_columns import NO_COLUMNS, KeptColumns, WithColumns

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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

    def predicted(self, index: int) -> list[int]:
        """The tokens that a window predicts."""
        number, first, stop = self._windows[index, :3].tolist()
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
    blanks = np.array([found.start() for found in _BLANKS.finditer(text)], np.int64)
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


def collate_prompts(prompts: Sequence[Tensor], most_new: int) -> dict[str, Any]:
    """Join prompts to groups of one length each, which nothing fills up; one without tokens is in none.

    At most ``most_new`` tokens follow. ``places`` has the row of each among those of all groups, or -1.
    """
    lengths = [len(prompt) for prompt in prompts]
    order = sorted((at for at, length in enumerate(lengths) if length), key=lambda at: -lengths[at])
    places = torch.full((len(prompts),), -1)
    places[order] = torch.arange(len(order))
    groups: list[Tensor] = []
    for _, same in itertools.groupby(order, key=lambda at: lengths[at]):
        rows = torch.stack([prompts[at] for at in same]).long()
        groups += torch.split(rows, max(1, MOST_TOKENS // (rows.shape[1] + most_new)))
    return {"groups": groups, "places": places}


def _divided(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Groups of sequences, the longest first, of which none is too much for one forward."""
    for start, stop in grouped(lengths, max(1, len(lengths))):
        most = max(1, MOST_TOKENS // lengths[start])
        for first in range(start, stop, most):
            yield first, min(first + most, stop)
