"""What a causal language model says of tokens: how likely they are, and which one it takes next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dualeval.errors import UsageError

# Stands for no token.
NONE = -1


def is_of_library(model: nn.Module) -> bool:
    """Whether it is a model of transformers, which can keep what it computed of earlier tokens."""
    return hasattr(model, "generation_config") and hasattr(model, "prepare_inputs_for_generation")


def logits_of(outputs: Any) -> Any:
    """The logits among a model's outputs: their ``logits``, or the outputs themselves."""
    return getattr(outputs, "logits", outputs)


def losses_of(model: nn.Module, group: Mapping[str, Any]) -> Tensor:
    """The negative log-likelihood of the predicted tokens of each row, float64 (rows,).

    In float32 for each token, and added up in float64.
    """
    logits = logits_of(model(group["inputs"], **({"use_cache": False} if is_of_library(model) else {})))
    # A row at a time: the logits are large, and this takes as much again.
    return torch.stack(
        [
            cross_entropy(row[first:stop].float(), targets[first:stop], reduction="none").double().sum()
            for row, targets, (first, stop) in zip(logits, group["targets"], group["predicted"], strict=True)
        ]
    )


def greedy(model: nn.Module, prompts: Tensor, ends: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The most likely next token, again and again; of equal logits the one with the lowest index.

    ``prompts`` are int64 (rows, tokens), ``ends`` says of each token whether it is the last of its row. The
    tokens are int64 (rows, most), ``NONE`` behind the last of each; with them, which rows met a NaN.
    """
    of_library = is_of_library(model)
    found = prompts.new_full((len(prompts), most), NONE)
    is_open = torch.ones(len(prompts), dtype=torch.bool, device=prompts.device)
    has_nan = ~is_open
    given, cache = prompts, None
    for place in range(most):
        if of_library:
            outputs = model(input_ids=given, past_key_values=cache, use_cache=True)
            cache = outputs.past_key_values
        else:
            outputs = model(given)
        last = logits_of(outputs)[:, -1].float()
        has_nan |= is_open & last.isnan().any(1)
        token = last.argmax(1)
        found[:, place] = token.where(is_open, NONE)
        is_open &= ~ends[token]
        if not is_open.any():
            break
        given = token[:, None] if of_library else torch.cat([given, token[:, None]], 1)
    return found, has_nan


def end_tokens(model: nn.Module, of_tokenizer: Sequence[int | None]) -> list[int]:
    """The tokens that end a text: the tokenizer's, and those that the model's own configuration names."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return sorted(
        {each for each in (*of_tokenizer, *(own if isinstance(own, list) else [own])) if each is not None}
    )


class CausalTokens:
    """A tokenizer as a causal language model uses it."""

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if prefix is None:
            raise UsageError(
                f"the tokenizer in {folder} has no token for the beginning of a text, nor one for its end: "
                "nothing can stand before its first token. Give a causal language model, or set bos_token or "
                "eos_token in its tokenizer_config.json."
            )
        # What stands before a document.
        self.prefix = int(prefix)
        self.ends = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        # Some put the token of the beginning before every text.
        self._begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        self.fast = tokenizer.backend_tokenizer
        self.fast.no_padding()
        self.fast.no_truncation()
        self.count = 1 + max(self.fast.get_vocab().values())

    def fingerprint(self) -> str:
        """sha256, in hex, over the tokenizer and what stands before a text."""
        said = f"{self.fast.to_str()}\n{self.prefix} {self._begins}"
        return sha256(said.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that is not empty, as the tokenizer begins one."""
        ids: list[int] = self.fast.encode(text, add_special_tokens=False).ids
        return [self.prefix, *ids] if self._begins else ids

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of a context, and those of what follows it.

        As lm-evaluation-harness has them (``_encode_pair`` in its ``lm_eval/api/model.py``): white space at
        the end of the context belongs to what follows; both are encoded together, and what has more tokens
        than the context alone follows. An empty context is the prefix.
        """
        if not context:
            return [self.prefix], self.fast.encode(continuation, add_special_tokens=False).ids
        stem = context.rstrip()
        before = self.encode(stem)
        return before, self.encode(context + continuation)[len(before) :]

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens, without those that end or begin one."""
        return str(self.fast.decode(ids, skip_special_tokens=True))

    def with_newline(self, count: int) -> list[int]:
        """Which of the first ``count`` tokens hold the end of a line."""
        return [each for each in range(min(count, self.count)) if "\n" in self.fast.decode([each])]
