"""An order of float32 values that leaves nothing open between equal ones."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

# As tensors: a number would be made into one at every call, which takes as long as the small kernel itself.
# Of shape () and on the CPU they go with a tensor of any device.
_SIGN = torch.tensor(31, dtype=torch.int32, device="cpu")
_MAGNITUDE = torch.tensor(0x7FFFFFFF, dtype=torch.int32, device="cpu")


def order_keys_in_place(values: Tensor) -> Tensor:
    """One int64 key for each value, larger for what comes first in its row; overwrites the values.

    Float bits, with the magnitude of the negative ones inverted, order like the floats as int32. With the
    index below them no two keys of a row are equal, so topk, whose choice among equals is open, has none.
    -0.0 and 0.0 are two values here: add 0.0 first. A NaN comes before or after all others, by its sign.
    """
    bits = values.view(torch.int32)
    bits.bitwise_xor_((bits >> _SIGN).bitwise_and_(_MAGNITUDE))
    return torch.add(_first_wins(values.shape[1], values.device), bits, alpha=1 << 32)


# Of the few models that a process evaluates, not a kernel a batch.
@lru_cache(maxsize=8)
def _first_wins(count: int, device: torch.device) -> Tensor:
    """The lower halves of the keys of a row: count - 1 for its first value, 0 for its last."""
    return torch.arange(count - 1, -1, -1, device=device)
