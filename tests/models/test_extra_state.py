"""What modules keep beside tensors in a state_dict: handed on where it is plain, else refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualeval.errors import UsageError
from dualeval.models.checkpoints import read_state_dict
from dualeval.models.weights import load_state_dict


class Scaled(nn.Module):
    """A module with an extra state."""

    def __init__(self, scale: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.scale = scale

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        if state == "unknown":
            raise KeyError(state)
        self.scale = state


@pytest.mark.parametrize("key", ["", "model"])
@pytest.mark.parametrize("scale", [None, 2.5, {"a": [1, "b", None]}])
def test_an_extra_state_is_handed_on(tmp_path: Path, scale: Any, key: str) -> None:
    state = nn.Sequential(Scaled(scale)).state_dict()
    torch.save({key: state} if key else state, tmp_path / "w.pt")
    model = nn.Sequential(Scaled("nothing yet"))
    load_state_dict(model, read_state_dict(tmp_path / "w.pt"), source="the weights w.pt")
    assert model[0].scale == scale
    wrapped = {f"module.{name}": value for name, value in state.items()}
    torch.save(wrapped, tmp_path / "w.pt")
    model = nn.Sequential(Scaled("nothing yet"))
    load_state_dict(model, read_state_dict(tmp_path / "w.pt"), source="the weights w.pt")
    assert model[0].scale == scale


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (Path("a"), "the model Scaled: 1 not plain: _extra_state."),
        ({"a": [np.float32(1)]}, "the model Scaled: 1 not plain: _extra_state."),
        ("unknown", "do not fit the model Scaled: 'unknown'"),
    ],
)
def test_an_extra_state_that_cannot_be_read(tmp_path: Path, scale: Any, said: str) -> None:
    torch.save(Scaled(scale).state_dict(), tmp_path / "w.pt")
    found = read_state_dict(tmp_path / "w.pt")
    with pytest.raises(UsageError) as caught:
        load_state_dict(Scaled(), found, source="the weights w.pt")
    assert said in str(caught.value)
    with pytest.raises(UsageError, match="1 not in the model: _extra_state"):
        load_state_dict(nn.LayerNorm(2, bias=False), found, source="the weights w.pt")
