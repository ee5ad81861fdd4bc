"""Checkpoints with several state_dicts: none wins silently, and what is none does not count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # here, not with the first optimizer: the import sets an environment variable
from torch import Tensor, nn

from dualeval.models.checkpoints import read_state_dict
from tests.models.test_checkpoints import refused
from tests.models.test_weights import assert_equal, small


@pytest.fixture
def state() -> dict[str, Tensor]:
    return small().state_dict()


def behind(prefix: str, state: dict[str, Tensor], **others: Tensor) -> dict[str, Tensor]:
    """The same under other names, as copies."""
    return {**{prefix + name: tensor.clone() for name, tensor in state.items()}, **others}


def arrays(state: dict[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in state.items()}


RIVALS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "and an extra state": (lambda s: {"model": {**s, "_extra_state": None}, "ema": behind("", s)}, "model ("),
    "arrays": (lambda s: {"model": arrays(s), "model_ema": behind("", s)}, "model (0 tensors, and 0.weight"),
    "an average inside": (lambda s: {"model": {**s, "ema": behind("", s)}}, "model (9 tensors, and ema)"),
    "an average in the file": (lambda s: {**s, "ema": behind("", s)}, "the file itself (9 tensors, and ema)"),
    "in a list": (
        lambda s: {"net": s, "ema": {"stds": [0.1, 0.2], "emas": [behind("", s), behind("", s)]}},
        "ema.emas.0 (9 tensors), ema.emas.1 (9 tensors)",
    ),
    "by decay": (
        lambda s: {"model": s, "ema": {0.999: behind("", s), 0.9999: behind("", s)}},
        "ema.0.999 (9 tensors), ema.0.9999 (9 tensors)",
    ),
    "of another layout in a tuple": (
        lambda s: {"model": s, "ema": (nn.Linear(9, 9).state_dict(), 0.999)},
        "ema.0 (2 tensors)",
    ),
    "behind a prefix": (lambda s: {"model": s, "teacher": behind("backbone.", s)}, "teacher (9 tensors)"),
    "the known one behind a prefix": (
        lambda s: {"model": behind("backbone.", s), "slow": behind("", s)},
        "slow (9 tensors)",
    ),
    "with a number more": (
        lambda s: {"model": s, "avg": {**behind("", s), "n": 1}},
        "avg (9 tensors, and n)",
    ),
}


@pytest.mark.parametrize("name", RIVALS)
def test_none_wins_silently(tmp_path: Path, state: dict[str, Tensor], name: str) -> None:
    make, said = RIVALS[name]
    torch.save(make(state), tmp_path / "w.pt")
    message = refused(tmp_path / "w.pt")
    assert "They can give different results." in message
    assert said in message
    assert "--weights-key KEY, such as --weights-key" in message
    # The one that is offered can be taken.
    key = message.partition("such as --weights-key ")[2].split(". ")[0].removesuffix(".")
    assert read_state_dict(tmp_path / "w.pt", key).key == key


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (lambda s: {"ema": (s, 0.999)}, "ema.0"),
        (lambda s: {"model": s, "ema": {"decay": 0.9, "updates": torch.tensor(3)}}, "model"),
        (lambda s: {"model": s, "net": {"out": Path("a"), "lr": np.float64(1)}}, "model"),
        (lambda s: {"model": s, "loss": {"weight": torch.ones(3), "0.weight": torch.ones(3, 4)}}, "model"),
        (lambda s: {"model": s, "head": {"weight": s["2.weight"], "bias": s["2.bias"]}}, "model"),
        (lambda s: {"model": s, "optimizer": {"exp_avg": behind("", s)}}, "model"),
        (lambda s: {"model": s, "history": [[0.5, {"loss": torch.ones(1)}]]}, "model"),
    ],
)
def test_what_is_no_rival(
    tmp_path: Path, state: dict[str, Tensor], content: Callable[[Any], Any], key: str
) -> None:
    torch.save(content(state), tmp_path / "w.pt")
    found = read_state_dict(tmp_path / "w.pt")
    assert found.key == key
    assert_equal(found.tensors, state)


@pytest.mark.parametrize(
    ("kind", "key"),
    [(torch.optim.SGD, "optimizer"), (torch.optim.AdamW, "opt"), (torch.optim.Adagrad, "opt")],
)
def test_an_optimizer_is_no_rival(tmp_path: Path, kind: Any, key: str) -> None:
    """Also of a model of one tensor, and where it lies under a known key with the model."""
    for model in (small(), nn.Linear(1, 1, bias=False)):
        optimizer = kind(model.parameters(), lr=0.1)
        model(torch.ones(2, 4 if isinstance(model, nn.Sequential) else 1)).sum().backward()
        optimizer.step()
        torch.save({"model": {"net": model.state_dict(), key: optimizer.state_dict()}}, tmp_path / "w.pt")
        assert read_state_dict(tmp_path / "w.pt").key == "model.net"


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (lambda a, b: {"ema": {"model": a}, "ema.model": b}, "ema.model"),
        (lambda a, b: {1: a, "1": b}, "1"),
        (lambda a, b: {"x": [a], "x.0": b}, "x.0"),
    ],
)
def test_a_key_that_two_things_answer_to(
    tmp_path: Path, state: dict[str, Tensor], content: Callable[[Any, Any], Any], key: str
) -> None:
    path = tmp_path / "w.pt"
    torch.save(content(state, behind("", state)), path)
    assert f"--weights-key {key}: 2 things in {path} answer to it" in refused(path, key)
    if key == "ema.model":
        assert "holds 2 state_dicts: ema.model (9 tensors), ema.model (9 tensors)" in refused(path)
    torch.save(content(state, state), path)
    assert_equal(read_state_dict(path, key).tensors, state)
