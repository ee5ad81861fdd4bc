"""How a language model answers prompts: where an answer ends, what draws its tokens, what of a text it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.models.generation import MOST_DRAWN, NONE, Pick, Way, drawn, greedy
from dualeval.models.text_models import CausalTokens


@dataclass(kw_only=True, eq=False)
class Answering:
    """Answers of at most so many tokens."""

    tokens: CausalTokens
    most: int
    # Texts that end an answer, and are no part of it.
    stops: Sequence[str]
    # What ends the thoughts that come before an answer.
    think_end: str | None
    # 0: each token is the likeliest one.
    temperature: float
    top_p: float
    seed: int

    def continue_as(self, way: Way, ends: Sequence[int], count: int, device: torch.device) -> None:
        """Say how the model is continued, and which of its ``count`` tokens end a text."""
        # A text that is a special token is in no text.
        of_texts = (self.tokens.fast.token_to_id(text) for text in self.stops)
        special = {each for each in of_texts if each is not None and not self.tokens.text([each])}
        self._way, self._of_model = way, {*ends}
        self._last = [each for each in {*ends, *special} if each < count]
        self._ends = torch.zeros(count, dtype=torch.bool, device=device)
        self._ends[self._last] = True

    def numbers(self, name: str, count: int) -> Tensor:
        """What draws the tokens of ``count`` answers to a prompt: it follows from the prompt's name, not from
        where it is computed.
        """
        if not self.temperature:
            return torch.zeros((count, 0), dtype=torch.int64)
        seed = sha256(f"{self.seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:7], "big"))
        return torch.randint(MOST_DRAWN, (count, self.most), generator=generator)

    def answer(self, model: nn.Module, batch: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
        """Of each group of prompts the tokens of their answers, and which of them met a NaN."""
        is_over = self._is_over if self.stops else None

        def picking(numbers: Tensor) -> Pick | None:
            if not self.temperature:
                return None
            return lambda logits, place: drawn(logits, numbers[:, place], self.temperature, self.top_p)

        return [
            greedy(
                model, prompts, self._ends, self.most, way=self._way, pick=picking(numbers), is_over=is_over
            )
            for prompts, numbers in zip(batch["groups"], batch["numbers"], strict=True)
        ]

    def is_full(self, ids: Sequence[int]) -> bool:
        """Whether neither a token nor a text has ended an answer."""
        return ids[-1] != NONE and ids[-1] not in self._last and not self.read(ids)[2]

    def read(self, ids: Sequence[int]) -> tuple[str, bool, bool]:
        """The answer in generated tokens, whether it has come to one, and whether a text has ended it."""
        text, is_thought = self.thought(ids)
        if not is_thought:
            return text, False, False
        place = min((text.find(stop) for stop in self.stops if stop in text), default=None)
        return text[:place], True, place is not None

    def thought(self, ids: Sequence[int]) -> tuple[str, bool]:
        """What follows the thoughts in generated tokens, if these came to their end; else all, and False."""
        ids = [token for token in ids if token != NONE and token not in self._of_model]
        if self.think_end is None:
            return self.tokens.text(ids), True
        tag = self.tokens.fast.token_to_id(self.think_end)
        # A special token is in no text.
        thoughts = len(ids) - ids[::-1].index(tag) if tag in ids else 0
        _, mark, text = self.tokens.text(ids[thoughts:]).rpartition(self.think_end)
        return (text.lstrip(), True) if mark or thoughts else (text, False)

    def _is_over(self, ids: Sequence[int]) -> bool:
        """Whether a text has ended an answer; all of it is read only where its last tokens have one."""
        # A character may take four tokens.
        tail = self.tokens.text(ids[-4 * max(map(len, self.stops)) - 4 :])
        return any(stop in tail for stop in self.stops) and self.read(ids)[2]
