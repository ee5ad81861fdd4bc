"""From what a TorchMetrics metric computes to plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from dualeval.errors import UsageError
from dualeval.metrics.exact import NONFINITE_KINDS
from dualeval.metrics.metric import Measured, Value


def measured_of(name: str, computed: Any, *, prefix: bool, direction: str | None = None) -> Measured:
    """A result as values: a number under the metric's name, a tensor as lists, a dict by its keys.

    NaN and infinities become None, and are counted under ``nonfinite``; a warning says that the metric gave
    them.
    """
    by_key = {name: computed}
    if isinstance(computed, Mapping):
        by_key = {f"{name}_{key}" if prefix else str(key): value for key, value in computed.items()}
    values: dict[str, Value] = {}
    nonfinite: dict[str, dict[str, int]] = {}
    for key, value in by_key.items():
        counts = dict.fromkeys(NONFINITE_KINDS, 0)
        values[key] = _plain(name, value, counts)
        if any(counts.values()):
            nonfinite[key] = {kind: count for kind, count in counts.items() if count}
    warnings = tuple(
        f"{key} is not finite ({', '.join(f'{count} {kind}' for kind, count in counts.items())}): "
        f"TorchMetrics' own {name} gives this for these samples"
        for key, counts in nonfinite.items()
    )
    one_number = [key for key, value in values.items() if not isinstance(value, (list, dict, str))]
    return Measured(
        values=values,
        nonfinite=nonfinite,
        directions={} if direction is None else dict.fromkeys(one_number, direction),
        warnings=warnings,
    )


def _plain(name: str, value: Any, counts: dict[str, int]) -> Value:
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        counts["nan" if math.isnan(value) else "pos_inf" if value > 0 else "neg_inf"] += 1
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(name, part, counts) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(name, part, counts) for part in value]
    raise UsageError(
        f"{name} computes a {type(value).__name__}, expected numbers, texts, and lists and dicts of them"
    )
