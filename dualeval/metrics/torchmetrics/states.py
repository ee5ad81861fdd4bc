"""What a TorchMetrics metric keeps between updates, and by which route it can be computed."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualeval.errors import UsageError
from dualeval.metrics.exact import SUM_SLOTS

# Sums of floats in the ledger take 560 bytes each.
_MOST_FLOATS = 4_096
# What TorchMetrics' base class keeps besides states, and what torch does.
_BASE = {
    *("_update_count", "_computed", "_forward_cache", "_cache", "_is_synced", "_update_signature"),
    *("_to_sync", "_should_unsync", "_enable_grad", "_dtype_convert", "update", "compute"),
}
_LEFT_OUT = frozenset({*_BASE, *vars(nn.Module())})


class StateKind(enum.Enum):
    """How a state is merged."""

    INTEGER = "sum of integers"
    FLOAT = "sum of floats"
    CONSTANT = "set once"


@dataclass(frozen=True, kw_only=True)
class State:
    """A state that is kept in the ledger."""

    # The attribute of the metric.
    name: str
    # How it is merged.
    kind: StateKind
    shape: torch.Size

    @property
    def size(self) -> int:
        """Its slots of the ledger; of float sums one more, which counts the updates that gave float64."""
        elements = self.shape.numel()
        if self.kind is StateKind.CONSTANT:
            return 0
        return elements if self.kind is StateKind.INTEGER else 1 + elements * SUM_SLOTS


def isolated(metric: Any) -> Any:
    """A copy of a metric that has seen nothing, lies on the CPU, and never speaks with other processes.

    In a process that has a torch process group TorchMetrics' own ``compute`` would merge the ranks' states a
    second time, and wait for ranks that do not compute.
    """
    clone = copy.deepcopy(metric).to("cpu")
    for part in filter(is_metric, clone.modules() if _takes_double(clone) else ()):
        part._dtype = torch.float64
        for name, default in part._defaults.items():
            if isinstance(default, Tensor) and default.is_floating_point():
                part._defaults[name] = default.double()
    for part in clone.modules():
        if hasattr(part, "distributed_available_fn"):
            part.distributed_available_fn = _never
        if hasattr(part, "validate_args"):
            # TorchMetrics 1.9 forgets it in AUROC and its kin: BinaryAUROC takes ten classes for scores.
            part.validate_args = True
    clone.reset()
    return clone


def _takes_double(metric: Any) -> bool:
    """Whether a metric gets floats as float64, so that sums and squares of what is far from zero hold.

    Not a user's own, nor one that compares in the floats' precision, as 0.3 with a float32 of 0.3.
    """
    parts = [part for part in metric.modules() if is_metric(part)]
    compare = any(hasattr(part, "threshold") or hasattr(part, "n_bins") for part in parts)
    return not compare and all(type(part).__module__.startswith("torchmetrics.") for part in parts)


def _never() -> bool:
    return False


def fresh(pristine: Any) -> Any:
    """A copy of a metric without metrics inside it, in microseconds; its states are its own."""
    clone = copy.copy(pristine)
    clone.reset()
    return clone


def networks_in(metric: Any) -> list[str]:
    """Classes of modules with weights inside a metric, which would be evaluated within ``update``."""
    return [
        type(part).__name__
        for part in metric.modules()
        if not is_metric(part) and (part._parameters or part._buffers)
    ]


def is_metric(value: Any) -> bool:
    """Whether a value's class is derived from TorchMetrics' ``Metric``."""
    return any(kind.__module__ == "torchmetrics.metric" for kind in type(value).__mro__)


def states_of(metric: Any) -> list[State] | None:
    """The states of a metric that become sums in the ledger; None where one cannot, or there is none."""
    states: list[State] = []
    inner = [part for part in metric.modules() if part is not metric]
    if type(metric).__name__ == "MultilabelRankingLoss":
        return None  # an update none of whose samples counts is counted as one sample
    if any(hasattr(part, "_reductions") for part in inner):
        return None  # a wrapper's update decides what reaches the states of the metric inside it
    for name, default in metric._defaults.items():
        merged = getattr(metric._reductions[name], "__name__", None)
        if not isinstance(default, Tensor) or default.is_complex():
            return None
        if merged == "dim_zero_mean" and default.any():
            # Such as a parameter that is kept as a state; that update leaves it alone is checked each time.
            kind = StateKind.CONSTANT
        elif merged != "dim_zero_sum" or default.any():
            return None
        else:
            kind = StateKind.FLOAT if default.is_floating_point() else StateKind.INTEGER
        states.append(State(name=name, kind=kind, shape=default.shape))
    floats = sum(state.shape.numel() for state in states if state.kind is StateKind.FLOAT)
    return states if any(state.size for state in states) and floats <= _MOST_FLOATS else None


def check_additive(
    metric: Any, states: list[State], update: Callable[[Any, range], object], samples: int
) -> None:
    """Check on some samples that an update adds to the states, and to nothing else."""
    most = samples - max(samples // 3, 1)  # of unequal parts the mean of means is another one
    halves = range(most), range(most, samples)
    alone = [copy.deepcopy(metric) for _ in halves]
    both, whole, differs = copy.deepcopy(metric), copy.deepcopy(metric), False
    before = _others(both, states)
    for one, half in zip(alone, halves, strict=True):
        update(one, half)
        update(both, half)
    update(whole, range(samples))
    name = type(metric).__name__
    for attribute, now in _others(both, states).items():
        if now != before.get(attribute):
            raise _changed(name, attribute)
    for state in states:
        if state.kind is StateKind.CONSTANT:
            continue
        values = [checked(one, state) for one in alone]
        together, added = checked(both, state).to(torch.float64), values[0].to(torch.float64) + values[1]
        once, least = checked(whole, state).to(torch.float64), 1e-6 * _largest(added)
        differs |= not torch.allclose(together, once, rtol=2e-5, atol=least, equal_nan=True)
        # Floats are rounded within an update; the sums of one batch differ by no more than that.
        if not torch.allclose(together, added, rtol=1e-3, atol=least, equal_nan=True):
            raise UsageError(
                f"update of {name} does not add to its state {state.name!r}, though that is merged by a sum: "
                f"two updates one after the other give {together.tolist()}, and the sum of both alone "
                f"{added.tolist()}. {HOW_BY_ROWS}"
            )
    if differs and is_own(metric):
        _refuse_batches(name, both, whole)


def is_own(metric: Any) -> bool:
    """Whether a metric's class is none of the library's."""
    return not type(metric).__module__.startswith("torchmetrics.")


def _refuse_batches(name: str, halves: Any, whole: Any) -> None:
    """Refuse a metric that computes another value where the same samples come in two parts."""
    try:
        of_parts, of_whole = (_numbers(each.compute()) for each in (halves, whole))
        agrees = torch.allclose(of_parts, of_whole, rtol=2e-5, atol=1e-8, equal_nan=True)
    except (ValueError, RuntimeError, TypeError, LookupError, ArithmeticError):
        return  # too few samples for it, or no numbers
    if not agrees:
        raise UsageError(
            f"the value of {name} depends on the batches: the same samples give {of_whole.tolist()} in one "
            f"update and {of_parts.tolist()} in two, as a mean of the batches' means does. Let "
            f"update add sums over samples. {HOW_BY_ROWS}"
        )


def _numbers(value: Any) -> Tensor:
    entries = [*value.values()] if isinstance(value, Mapping) else value
    if isinstance(entries, (list, tuple)):
        return torch.cat([_numbers(entry) for entry in entries])
    return torch.as_tensor(entries).to(torch.float64).reshape(-1)


def check_attributes(before: Any, metric: Any) -> None:
    """Refuse that an update has given an attribute besides the states another value."""
    others = vars(before)
    for name, value in vars(metric).items():
        old = others.get(name)
        if value is old or name in _LEFT_OUT or name in metric._defaults:
            continue
        if _comparable(value) != _comparable(old):
            raise _changed(type(metric).__name__, name)


def _changed(name: str, attribute: str) -> UsageError:
    return UsageError(
        f"update of {name} changes its attribute {attribute!r}, which is not a state (add_state): sums of "
        f"its states do not hold all that it has seen. {HOW_BY_ROWS}"
    )


HOW_BY_ROWS = "Give by_rows=True: the metric is then computed from all rows, on rank 0."


def checked(metric: Any, state: State) -> Tensor:
    """A state's tensor after an update."""
    value = getattr(metric, state.name)
    wanted = f"a tensor of shape {tuple(state.shape)}"
    if not isinstance(value, Tensor):
        fault = f"a {type(value).__name__}"
    elif value.shape != state.shape:
        fault = f"of shape {tuple(value.shape)}"
    elif state.kind is StateKind.INTEGER and (value.is_floating_point() or value.is_complex()):
        fault, wanted = f"of {value.dtype}", "integers"
    elif state.kind is StateKind.CONSTANT and not torch.equal(
        value, metric._defaults[state.name].to(value.dtype)
    ):
        fault, wanted = f"{value.tolist()}", f"{metric._defaults[state.name].tolist()}, as before the update"
    else:
        return value
    raise UsageError(
        f"the state {state.name!r} of {type(metric).__name__} is {fault} after an update, expected {wanted}. "
        f"Where the metric has an argument that fixes it, such as num_classes, give that. {HOW_BY_ROWS}"
    )


def _largest(values: Tensor) -> float:
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _others(metric: Any, states: list[State]) -> dict[str, Any]:
    """What a metric's attributes besides its states hold."""
    left_out = _LEFT_OUT.union(state.name for state in states)
    return {name: _comparable(value) for name, value in vars(metric).items() if name not in left_out}


def _comparable(value: Any) -> Any:
    """A copy of tensors and containers that can be compared."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_comparable(part) for part in value]
    return {key: _comparable(part) for key, part in value.items()} if isinstance(value, Mapping) else value
