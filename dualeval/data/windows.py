"""Question and text to windows of tokens, and windows to what a model takes in one forward.

A text that is too long for the model is cut into windows that overlap; each holds the whole question. All
windows of a question are in its batch, and are computed in groups (``token_groups``).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dualeval.data.squad import Questions
from dualeval.data.token_groups import TokenizerFacts, fill_up, grouped

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_NOT_CONTEXT = -1

# What ``WindowEncoder.encode`` makes of a question, all its windows one after the other.
EncodedQuestion = Mapping[str, Tensor]


class WindowEncoder:
    """Encodes questions into windows and joins windows to groups."""

    def __init__(
        self, tokenizer: Tokenizer, facts: TokenizerFacts, *, max_length: int, stride: int, most_windows: int
    ) -> None:
        self._tokenizer = tokenizer
        self.facts = facts
        self.max_length = max_length
        self.most_windows = most_windows
        self.stride = stride
        self._special = tokenizer.num_special_tokens_to_add(True)
        tokenizer.no_padding()
        # Of one text alone the strategy below has nothing to cut.
        self._uncut = copy.deepcopy(tokenizer)
        self._uncut.no_truncation()
        # A tokenizer that comes with an embedding model brings a shorter limit of its own.
        tokenizer.enable_truncation(
            max_length, stride=stride, strategy="only_first" if facts.left else "only_second"
        )

    def fingerprint(self) -> str:
        """sha256, in hex, over the tokenizer and its settings."""
        return hashlib.sha256(f"{self._tokenizer.to_str()}\n{self.facts}".encode()).hexdigest()

    def encode(self, question: str, context: str) -> dict[str, Tensor]:
        """Cut a question and its text into windows."""
        # White space before a question would become tokens with some tokenizers; SQuAD has such questions.
        question = question.lstrip()
        room = self.max_length - self._special - self._tokens_of(question)
        # A window has to go on by one token at least, where there is more than one. The library would end the
        # process.
        if room <= self.stride and self._tokens_of(context) > room:
            raise ValueError(
                f"the question leaves room for {max(room, 0)} tokens of the text in a window of "
                f"{self.max_length}, expected more than the {self.stride} that windows share: "
                "set --max-length or --stride"
            )
        pair = (context, question) if self.facts.left else (question, context)
        first = self._tokenizer.encode(*pair)
        if not len(first):
            raise ValueError("question and text hold no token")
        windows = [first, *first.overflowing]
        return {
            "ids": _flat([window.ids for window in windows]),
            "types": _flat([window.type_ids for window in windows]),
            "spans": torch.cat([self._spans(window) for window in windows]),
            "lengths": torch.tensor([len(window) for window in windows], dtype=torch.int32),
            "null": torch.tensor([self._null_place(window.ids) for window in windows], dtype=torch.int32),
        }

    def placeholder(self, question: str, context: str) -> dict[str, Tensor]:
        """As ``encode``, with as many windows of the same lengths, of tokens 0 that are not the context's.

        No window at all where ``encode`` raises ValueError: such a question never has one.
        """
        try:
            encoded = self.encode(question, context)
        except ValueError:
            none = torch.zeros(0, dtype=torch.int32)
            return {"ids": none, "types": none, "spans": none.reshape(0, 2), "lengths": none, "null": none}
        return {
            **encoded,
            "ids": torch.zeros_like(encoded["ids"]),
            "types": torch.zeros_like(encoded["types"]),
            "spans": torch.full_like(encoded["spans"], _NOT_CONTEXT),
        }

    def _tokens_of(self, text: str) -> int:
        return len(self._uncut.encode(text, add_special_tokens=False))

    def _spans(self, window: Encoding) -> Tensor:
        context = 0 if self.facts.left else 1
        spans = np.array(window.offsets, dtype=np.int32).reshape(-1, 2)
        spans[[sequence != context for sequence in window.sequence_ids]] = _NOT_CONTEXT
        return torch.from_numpy(spans)

    def _null_place(self, ids: Sequence[int]) -> int:
        wanted = self.facts.null_id
        return ids.index(wanted) if wanted in ids else 0

    def collate(self, samples: Sequence[EncodedQuestion]) -> dict[str, Any]:
        """Make one batch of encoded questions; a sample whose windows are all empty has none."""
        # (question, number of the window in it, first token, tokens)
        windows = [
            (place, number, stop - length, length)
            for place, sample in enumerate(samples)
            for number, (length, stop) in enumerate(
                zip(sample["lengths"].tolist(), sample["lengths"].cumsum(0).tolist(), strict=True)
            )
            if length
        ]
        # The longest first: where memory does not suffice, it shows at once.
        windows.sort(key=lambda window: (-window[3], window[0], window[1]))
        counts = torch.zeros((3, len(samples)), dtype=torch.int32)
        most = max((number for _, number, _, _ in windows), default=0) + 1
        places = torch.full((len(samples), most), -1)
        groups = []
        for start, stop in grouped([length for *_, length in windows], self.most_windows):
            group = windows[start:stop]
            groups.append(self._join([(samples[window[0]], window) for window in group]))
            for row, (question, number, _, length) in enumerate(group, start):
                places[question, number] = row
                counts[:, question] += torch.tensor([1, length, group[0][3]], dtype=torch.int32)
        return {
            "groups": groups,
            "places": places,
            "windows": counts[0],
            "tokens": counts[1],
            "padded_tokens": counts[2],
        }

    def _join(self, group: Sequence[tuple[EncodedQuestion, tuple[int, int, int, int]]]) -> dict[str, Any]:
        """Windows, the longest first, as one padded block."""
        ranges = [slice(first, first + length) for _, (_, _, first, length) in group]
        texts = [
            (sample["ids"][span], sample["types"][span])
            for (sample, _), span in zip(group, ranges, strict=True)
        ]
        inputs, places = fill_up(texts, self.facts)
        spans = torch.full((*inputs["input_ids"].shape, 2), _NOT_CONTEXT, dtype=torch.int32)
        null = torch.zeros(len(group), dtype=torch.int64)
        for row, ((sample, (_, number, _, _)), span, place) in enumerate(
            zip(group, ranges, places, strict=True)
        ):
            spans[row, place] = sample["spans"][span]
            null[row] = sample["null"][number] + place.start
        return {"inputs": inputs, "spans": spans, "null": null}


class EncodedQuestions:
    """Questions as windows of tokens."""

    def __init__(self, questions: Questions, encoder: WindowEncoder) -> None:
        self._questions = questions
        self._encoder = encoder

    def __len__(self) -> int:
        return len(self._questions)

    def id(self, index: int) -> str:
        """The question's id in the file."""
        return self._questions.id(index)

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Encode questions with their texts."""
        chosen = self._questions.__getitems__(indices)
        return [self._encoder.encode(question.question, question.context) for question in chosen]

    def placeholder(self, index: int) -> dict[str, Tensor]:
        """What takes a question's place where it cannot be read: windows of its lengths, without its tokens.

        The windows of the other questions are grouped and padded by it as by the question.
        """
        question = self._questions[index]
        return self._encoder.placeholder(question.question, question.context)

    def fingerprint(self, count: int) -> str:
        """sha256, in hex, over everything about the first ``count`` questions."""
        return self._questions.fingerprint(count)


def _flat(windows: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([token for window in windows for token in window], dtype=torch.int32)
