"""Checkpoints of every kind: what is read, what is refused, and what is said of tensors that do not fit."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dualeval.errors import UsageError
from dualeval.models.checkpoints import checkpoint
from dualeval.models.loading import load_into, load_state_dict

CANARY = "canary"


class Canary:
    """Unpickling this runs code: it makes the folder named ``CANARY`` in the working folder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (CANARY,)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def read_state_dict(path: Path) -> dict[str, Tensor]:
    return checkpoint.read_state_dict(path).tensors


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", ["w.pt", "w.pth", "w.bin", "w"])
@pytest.mark.parametrize("zip_format", [True, False], ids=["zip", "legacy"])
def test_files_that_torch_saved_are_read(
    tmp_path: Path, state: dict[str, Tensor], name: str, zip_format: bool
) -> None:
    torch.save(state, tmp_path / name, _use_new_zipfile_serialization=zip_format)
    assert_equal(read_state_dict(tmp_path / name), state)


@pytest.mark.parametrize("name", ["w.pt", "legacy.pt", "w.safetensors"])
def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path, state: dict[str, Tensor], name: str) -> None:
    path = tmp_path / name
    if name == "w.safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=name == "w.pt")
    whole = path.read_bytes()
    for length in {0, 1, 2, 7, 8, 9, *range(10, len(whole), len(whole) // 60), len(whole) - 1}:
        path.write_bytes(whole[:length])
        with pytest.raises(UsageError, match=name) as caught:
            read_state_dict(path)
        assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.pt", tmp_path / "none.safetensors"):
        with pytest.raises(UsageError, match=r"does not exist.*--weights PATH"):
            read_state_dict(path)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"epoch": 3, "lr": 0.1}, "found: epoch, lr"),
        ({"weight": torch.ones(1), "epoch": 3}, "found: weight, epoch"),
        ({0: torch.ones(1)}, "found: 0"),
        ({"state_dict": {"a": [1, 2]}}, "found: state_dict"),
        ({}, "found: )"),
        ([torch.ones(1)], "found: list"),
        (torch.ones(1), "found: Tensor"),
    ],
    ids=str,
)
def test_what_holds_no_state_dict_is_refused(tmp_path: Path, content: object, found: str) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(UsageError, match="holds no state_dict") as caught:
        read_state_dict(tmp_path / "w.pt")
    assert found in str(caught.value)
    assert "model_state_dict" in str(caught.value)


def misfit(state: dict[str, Tensor]) -> str:
    with pytest.raises(UsageError) as caught:
        load_into(small(), state, "the weights w.pt")
    assert str(caught.value).startswith("the weights w.pt ")
    return str(caught.value)


def test_all_that_does_not_fit_is_said_at_once(state: dict[str, Tensor]) -> None:
    del state["0.bias"]
    message = misfit({**state, "stray": torch.ones(1), "2.weight": torch.ones(7, 3)})
    assert "do not fit the model Sequential: 1 missing in the file: 0.bias; " in message
    for part in ("1 not in the model: stray", "1 of another shape: 2.weight (7, 3), the model has (2, 3)"):
        assert part in message


def test_another_number_of_classes_is_said_so(state: dict[str, Tensor]) -> None:
    message = misfit({**state, "2.weight": torch.ones(7, 3), "2.bias": torch.ones(7)})
    assert "are for 7 classes, but 2 were expected" in message
    assert "--num-classes" in message


def test_one_tensor_of_another_size_is_no_number_of_classes(state: dict[str, Tensor]) -> None:
    """A layer with other outputs has another weight and another bias; a table of positions has no outputs."""
    message = misfit({**state, "0.bias": torch.ones(8)})
    assert "1 of another shape: 0.bias (8,), the model has (3,)" in message
    model = small()
    model.register_parameter("table", nn.Parameter(torch.zeros(9, 2)))
    with pytest.raises(UsageError) as caught:
        load_into(model, {**model.state_dict(), "table": torch.ones(25, 2)}, "the weights w.pt")
    assert "1 of another shape: table (25, 2), the model has (9, 2)" in str(caught.value)


def test_another_vocabulary_is_no_number_of_classes() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))
    with pytest.raises(UsageError, match=r"1 of another shape: 0\.weight \(12, 4\), the model has \(10, 4\)"):
        load_into(model, {**model.state_dict(), "0.weight": torch.ones(12, 4)}, "the weights w.pt")


class Renamed(nn.Module):
    """Loads its first version, in which ``weight`` was called ``kernel``."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *others: Any) -> None:
        if metadata.get("version") not in (1, 2):
            raise ValueError(f"version {metadata.get('version')}")
        if metadata["version"] == 1:
            state[prefix + "weight"] = state.pop(prefix + "kernel")
        super()._load_from_state_dict(state, prefix, metadata, *others)


def test_a_module_may_convert_an_older_layout(tmp_path: Path) -> None:
    """As in torchvision's MNASNet and transformers; the versions lie beside the tensors of a state_dict."""
    old: OrderedDict[str, Tensor] = OrderedDict(kernel=torch.ones(2))
    old._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    torch.save(old, tmp_path / "w.pt")
    model = Renamed()
    load_into(model, read_state_dict(tmp_path / "w.pt"), "w.pt")
    assert model.weight.tolist() == [1, 1]


def test_what_a_module_says_itself_is_passed_on() -> None:
    later: OrderedDict[str, Tensor] = OrderedDict(weight=torch.ones(2))
    later._metadata = OrderedDict({"": {"version": 3}})  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="do not fit the model Renamed: version 3"):
        load_into(Renamed(), later, "w.pt")


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_other_kinds_of_numbers_are_refused(state: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Quantized weights have scales beside them; without these they are other weights."""
    message = misfit({**state, "0.weight": (state["0.weight"] * 100).to(dtype)})
    assert f"1 of another dtype: 0.weight {dtype}, the model has torch.float32" in message
    message = misfit({**state, "1.num_batches_tracked": torch.tensor(0.5)})
    assert "1.num_batches_tracked torch.float32, the model has torch.int64" in message


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [torch.int64, torch.int32])
def test_other_sizes_of_a_kind_are_taken(
    state: dict[str, Tensor], dtype: torch.dtype, count: torch.dtype
) -> None:
    model = small()
    others = {
        name: tensor.to(dtype if tensor.is_floating_point() else count) for name, tensor in state.items()
    }
    load_into(model, others, "w.pt")
    assert torch.equal(model.state_dict()["0.weight"], others["0.weight"].float())


def test_integers_that_do_not_fit_are_refused() -> None:
    model = nn.Module()
    model.register_buffer("mask", torch.zeros(2, dtype=torch.bool))
    load_into(model, {"mask": torch.tensor([1, 0], dtype=torch.uint8)}, "w.pt")
    assert model.state_dict()["mask"].tolist() == [True, False]
    with pytest.raises(UsageError, match=r"mask torch\.int64, the model has torch\.bool"):
        load_into(model, {"mask": torch.tensor([2, 0])}, "w.pt")


def test_a_counter_that_was_cast_with_all_the_rest_is_taken(state: dict[str, Tensor]) -> None:
    """As ``{name: value.half() for name, value in state.items()}`` leaves it."""
    model = small()
    load_into(model, {**state, "1.num_batches_tracked": torch.tensor(7.0).half()}, "w.pt")
    assert model.state_dict()["1.num_batches_tracked"] == 7


# -- what modules keep beside tensors: handed on where it is plain, else refused by name ---------------------


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
    load_state_dict(model, checkpoint.read_state_dict(tmp_path / "w.pt"), source="the weights w.pt")
    assert model[0].scale == scale
    wrapped = {f"module.{name}": value for name, value in state.items()}
    torch.save(wrapped, tmp_path / "w.pt")
    model = nn.Sequential(Scaled("nothing yet"))
    load_state_dict(model, checkpoint.read_state_dict(tmp_path / "w.pt"), source="the weights w.pt")
    assert model[0].scale == scale


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (Path("a"), "the model Scaled: 1 not plain: _extra_state."),
        ({"a": [np.float32(1)]}, "the model Scaled: 1 not plain: _extra_state."),
        ("unknown", "do not fit the model Scaled: 'unknown'"),
    ],
)
def test_an_extra_state_that_cannot_be_read_is_named(tmp_path: Path, scale: Any, said: str) -> None:
    torch.save(Scaled(scale).state_dict(), tmp_path / "w.pt")
    found = checkpoint.read_state_dict(tmp_path / "w.pt")
    with pytest.raises(UsageError) as caught:
        load_state_dict(Scaled(), found, source="the weights w.pt")
    assert said in str(caught.value)
    with pytest.raises(UsageError, match="1 not in the model: _extra_state"):
        load_state_dict(nn.LayerNorm(2, bias=False), found, source="the weights w.pt")
