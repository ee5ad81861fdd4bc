"""How a language model continues prompts, token by token, with whatever it keeps of earlier tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.errors import UsageError

# Stands for no token.
NONE = -1
# The outputs in which models of transformers give what the next call takes by the same name: attention's keys
# and values, and the states of recurrent models.
_CACHES = ("past_key_values", "cache_params", "state")
# Probabilities as whole numbers: their sums are exact, and the same on every device.
_ONE = 2.0**40
# Of the numbers that draw a token, the first that is too large.
MOST_DRAWN = 2**62
# The logits, float32 (rows, vocabulary), and which token of the answer it is: the token of each row.
Pick = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a model is asked for the next token."""

    # The output that goes into the next call; None: all tokens are computed again.
    cache: str | None = None
    # What begins the answers of an encoder-decoder model; None for others.
    start: int | None = None


def is_of_library(model: nn.Module) -> bool:
    """Whether it is a model of transformers, which can keep what it computed of earlier tokens."""
    return hasattr(model, "generation_config") and hasattr(model, "prepare_inputs_for_generation")


def logits_of(outputs: Any) -> Any:
    """The logits among a model's outputs: their ``logits``, or the outputs themselves."""
    return getattr(outputs, "logits", outputs)


class _Texts:
    """Tokens of several texts of one length, which a model continues."""

    def __init__(self, model: nn.Module, prompts: Tensor, way: Way) -> None:
        self._model, self._way = model, way
        self.tokens = prompts if way.start is None else prompts.new_full((len(prompts), 1), way.start)
        self._options: dict[str, Any] = {} if way.start is None else {"input_ids": prompts}
        if is_of_library(model):
            self._options["use_cache"] = way.cache is not None
        # How many tokens the cache has.
        self.kept = 0

    def logits(self) -> Tensor:
        """Those of the tokens that follow, float32 (rows, vocabulary)."""
        way, new, options = self._way, self.tokens[:, self.kept :], self._options
        if way.start is None:
            outputs = self._model(new, **options)
        else:
            outputs = self._model(decoder_input_ids=new, **options)
            options.pop("input_ids", None)
            options["encoder_outputs"] = (outputs.encoder_last_hidden_state,)
        cache = None if way.cache is None else getattr(outputs, way.cache, None)
        if way.cache is not None and cache is not None:
            options[way.cache], self.kept = cache, self.tokens.shape[1]
        elif way.cache is not None:
            options["use_cache"] = False
        return logits_of(outputs)[:, -1].float()  # type: ignore[no-any-return]

    def add(self, token: Tensor) -> None:
        self.tokens = torch.cat([self.tokens, token[:, None]], 1)


@torch.inference_mode()
def way_of(model: nn.Module, tokens: Tensor) -> Way:
    """The quickest way that gives the logits of a model which computes all tokens again.

    A cache that is passed on wrongly gives other tokens and no error, so each is tried, on ``tokens``, int64
    (rows, tokens).
    """
    config, start = getattr(model, "config", None), None
    if getattr(config, "is_encoder_decoder", False):
        named = (getattr(each, "decoder_start_token_id", None) for each in (model.generation_config, config))
        if (start := next((each for each in named if each is not None), None)) is None:
            raise UsageError(
                "the model has an encoder, and no decoder_start_token_id, which begins its answers. Set it "
                "in its generation_config.json."
            )
    slow = Way(start=start)
    if not is_of_library(model):
        return slow
    whole = _after(_Texts(model, tokens[:, :-1], slow), tokens[:, -1])
    for cache in _CACHES:
        texts = _Texts(model, tokens[:, :-1], way := Way(cache=cache, start=start))
        try:
            texts.logits()
            last = _after(texts, tokens[:, -1])
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):  # it takes no such argument
            continue
        if texts.kept and (last - whole).abs().max() <= 1e-5 + 1e-3 * whole.abs().max():
            return way
    return slow


def _after(texts: _Texts, token: Tensor) -> Tensor:
    texts.add(token)
    return texts.logits()


def greedy(
    model: nn.Module,
    prompts: Tensor,
    ends: Tensor,
    most: int,
    *,
    way: Way | None = None,
    pick: Pick | None = None,
    is_over: Callable[[list[int]], bool] | None = None,
) -> tuple[Tensor, Tensor]:
    """The most likely next token, again and again; of equal logits the one with the lowest index.

    ``prompts`` are int64 (rows, tokens), ``ends`` says of each token whether it is the last of its row. The
    tokens are int64 (rows, most), ``NONE`` behind the last of each; with them, which rows met a NaN.
    ``pick`` chooses other tokens than the most likely ones, ``is_over`` ends a row by its tokens.
    """
    texts = _Texts(model, prompts, way or Way(cache=_CACHES[0] if is_of_library(model) else None))
    tokens = prompts.new_full((len(prompts), most), NONE)
    is_open = torch.ones(len(prompts), dtype=torch.bool, device=prompts.device)
    has_nan = ~is_open
    said: list[list[int]] = [[] for _ in prompts]
    for place in range(most):
        last = texts.logits()
        has_nan |= is_open & last.isnan().any(1)
        token = last.argmax(1) if pick is None else pick(last, place)
        tokens[:, place] = token.where(is_open, NONE)
        is_open &= ~ends[token]
        if is_over is not None:
            for ids, new in zip(said, token.tolist(), strict=True):
                ids.append(new)
            still = [each and not is_over(ids) for each, ids in zip(is_open.tolist(), said, strict=True)]
            is_open = torch.tensor(still, device=is_open.device)
        if not is_open.any():
            break
        texts.add(token)
    return tokens, has_nan


def drawn(logits: Tensor, numbers: Tensor, temperature: float, top_p: float) -> Tensor:
    """A token of each row, by the number below ``MOST_DRAWN`` that belongs to it, int64 (rows,).

    Of the likeliest tokens that have ``top_p`` together, each with its share of what these have. Logits that
    another batch rounds otherwise move the borders between tokens as little as the shares.
    """
    shares = (logits.double() / temperature).nan_to_num().softmax(1)
    shares = (shares * _ONE).long()
    likeliest, order = shares.sort(dim=1, descending=True, stable=True)
    before = likeliest.cumsum(1) - likeliest
    is_kept = before < top_p * shares.sum(1, keepdim=True)
    # In the vocabulary's order: two tokens that are nearly equally likely may change places in the other.
    borders = shares.where(is_kept.scatter(1, order, is_kept), 0).cumsum(1)
    # 48 bits: with more, the product may be rounded up to the sum, which belongs to no token.
    wanted = ((numbers >> 14) / 2.0**48 * borders[:, -1]).long()
    return (borders <= wanted[:, None]).sum(1)
