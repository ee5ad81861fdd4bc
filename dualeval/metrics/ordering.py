"""An order of float32 values that leaves nothing open between equal ones."""

from __future__ import annotations

import torch
from torch import Tensor


def order_keys_in_place(values: Tensor) -> Tensor:
    """One int64 key for each value, larger for what comes first in its row; overwrites the values.

    Float bits, with the magnitude of the negative ones inverted, order like the floats as int32. With the
    index below them no two keys of a row are equal, so topk, whose choice among equals is open, has none.
    -0.0 and 0.0 are two values here: add 0.0 first. A NaN comes before or after all others, by its sign.

    Args:
        values: float32 of shape (rows, n), n at most 2**32.
    """
    bits = values.view(torch.int32)
    bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))
    first_wins = torch.arange(values.shape[1] - 1, -1, -1, device=values.device)
    return torch.add(first_wins, bits, alpha=1 << 32)
