"""The best answer of each window and of each question, from start and end logits, on their device.

No step waits for the device, and none leaves open which of two equal values it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualeval.metrics.ordering import order_keys_in_place

_NOWHERE = -1
_WORST = torch.iinfo(torch.int64).min


@dataclass(frozen=True, kw_only=True)
class Spans:
    """The best answer of each window, or of each question; tensors of one value each."""

    # Bool, whether there is an answer.
    answered: Tensor
    # Int32, the character of the context at which it begins; -1 without an answer.
    start: Tensor
    # Int32, the character behind it; -1 likewise.
    end: Tensor
    # Float32, its start logit plus its end logit; -inf without an answer.
    score: Tensor
    # Float32, the same for the place of "no answer"; over windows the least.
    null_score: Tensor
    # Bool, whether a logit is NaN; there is no answer then.
    nan: Tensor
    # Bool, whether a logit is infinite.
    inf: Tensor


def best_spans(
    start_logits: Tensor,
    end_logits: Tensor,
    *,
    mask: Tensor,
    characters: Tensor,
    null: Tensor,
    n_best: int,
    most_tokens: int,
) -> Spans:
    """Choose the best answer of each window.

    Candidates are the pairs of one of the ``n_best`` best starts and one of the ``n_best`` best ends among
    the context's tokens, that do not end before they begin, are not too long and hold a character. The
    largest sum of both logits, as float32, wins; of equal ones that which begins first, then the shorter one.
    """
    # -0.0 + 0.0 is 0.0: their bits must not differ in the keys.
    start, end = start_logits.float() + 0.0, end_logits.float() + 0.0
    context = characters[..., 0] >= 0
    real = mask.bool()
    nan = ((start.isnan() | end.isnan()) & real).any(dim=1)
    inf = ((start.isinf() | end.isinf()) & real).any(dim=1)
    null_score = (start + end).gather(1, null.unsqueeze(1)).squeeze(1)

    most = min(n_best, start.shape[1])
    first, last = _best(start, context, most), _best(end, context, most)
    pair_first = first.unsqueeze(2).expand(-1, most, most).flatten(1)
    pair_last = last.unsqueeze(1).expand(-1, most, most).flatten(1)
    from_character = characters[..., 0].gather(1, pair_first)
    to_character = characters[..., 1].gather(1, pair_last)
    score = start.gather(1, pair_first) + end.gather(1, pair_last)
    allowed = (
        context.gather(1, pair_first)
        & context.gather(1, pair_last)
        & (pair_last >= pair_first)
        & (pair_last - pair_first < most_tokens)
        & (to_character > from_character)
        & (score > -torch.inf)
    )
    # Order keys leave 32 bits for what decides between equal scores.
    keys = order_keys_in_place(score.clone()) >> 32 << 32
    keys = keys - (pair_first * start.shape[1] + pair_last)
    place = keys.masked_fill_(~allowed, _WORST).argmax(dim=1, keepdim=True)
    answered = allowed.any(dim=1) & ~nan

    def of_best(values: Tensor, otherwise: float) -> Tensor:
        return values.gather(1, place).squeeze(1).masked_fill(~answered, otherwise)

    return Spans(
        answered=answered,
        start=of_best(from_character, _NOWHERE),
        end=of_best(to_character, _NOWHERE),
        score=of_best(score, -torch.inf),
        null_score=null_score,
        nan=nan,
        inf=inf,
    )


def _best(logits: Tensor, context: Tensor, count: int) -> Tensor:
    """Places of the context's best tokens, the best first, of equal ones the first; int64 (windows, n)."""
    keys = order_keys_in_place(logits.masked_fill(~context, -torch.inf))
    return torch.topk(keys.masked_fill_(~context, _WORST), count, dim=1).indices


def best_of_windows(windows: Sequence[Spans], places: Tensor) -> Spans:
    """Choose the best answer of each question among its windows'; of equal ones the first."""
    absent = places < 0
    inside = places.clamp(min=0)

    def of_questions(name: str) -> Tensor:
        values: Tensor = torch.cat([getattr(group, name) for group in windows])
        return values[inside]

    answered = of_questions("answered") & ~absent
    # The keys fall with the place, so that of equal scores the first is the largest.
    keys = order_keys_in_place(of_questions("score").clone()).masked_fill_(~answered, _WORST)
    place = keys.argmax(dim=1, keepdim=True)
    nan = (of_questions("nan") & ~absent).any(dim=1)
    none = ~answered.any(dim=1) | nan

    def of_best(name: str, otherwise: float) -> Tensor:
        return of_questions(name).gather(1, place).squeeze(1).masked_fill(none, otherwise)

    return Spans(
        answered=~none,
        start=of_best("start", _NOWHERE),
        end=of_best("end", _NOWHERE),
        score=of_best("score", -torch.inf),
        null_score=of_questions("null_score").masked_fill(absent, torch.inf).amin(dim=1),
        nan=nan,
        inf=(of_questions("inf") & ~absent).any(dim=1),
    )


def columns_of(spans: Spans) -> Mapping[str, Tensor]:
    """The columns of one batch's questions: those of ``Spans``, and ``null_odds``."""
    return {
        "start": spans.start,
        "end": spans.end,
        "score": spans.score,
        "null_odds": torch.nan_to_num(spans.null_score - spans.score, nan=torch.finfo(torch.float32).max),
        "nan_logits": spans.nan,
        "inf_logits": spans.inf,
    }
