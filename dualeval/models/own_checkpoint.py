"""late_model: a model of the caller's own whose values stay in its checkpoint until a rank uses its part."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

from torch import nn

from dualeval.errors import UsageError
from dualeval.models.checkpoints import read_state_dict
from dualeval.models.late_building import late_or_whole
from dualeval.models.weights import load_state_dict


def late_model(
    make: Callable[[], nn.Module],
    weights: str | Path,
    *,
    key: str | None = None,
    prefix: str | None = None,
    trust: bool = False,
) -> nn.Module:
    """Make a model without memory for its parameters, for an evaluation with ``shard``.

    The values stay in the checkpoint. Each rank reads its own part when the model is sharded; until then,
    an operation reads the parameters that it needs, and does not keep them. ``model.to("cpu")`` reads all.

    Args:
        make: makes the model, with any values; may be called up to three times.
        weights: a checkpoint in any form that ``--weights`` takes.
        key: where the state_dict lies in it, as ``--weights-key``; None finds the only one.
        prefix: take only the names that begin with this, without it, as ``--weights-prefix``.
        trust: also read files that run code when they are read, as ``--trust-checkpoint``.

    Returns:
        The model on the CPU, in evaluation mode. Where it cannot be made so it is made whole, with a warning
        that says why.

    Raises:
        UsageError: the checkpoint cannot be read, or does not fit the model.
    """
    if not callable(make) or isinstance(make, nn.Module):
        raise UsageError(
            f"late_model was given a {type(make).__name__}: expected a function that makes the model, as "
            "late_model(lambda: Net(width=8), 'checkpoint.pt')"
        )

    def build() -> nn.Module:
        model = make()
        if not isinstance(model, nn.Module):
            raise UsageError(f"late_model: make() returned a {type(model).__name__}, expected an nn.Module")
        found = read_state_dict(Path(weights), key, trust=trust)
        load_state_dict(model, found, prefix=prefix, source=f"the weights {weights}")
        return model.eval()

    return late_or_whole(build, lambda said: warnings.warn(said, stacklevel=3))
