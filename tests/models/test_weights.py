"""Checkpoints of every kind: what is read, what is refused, and what is said of tensors that do not fit."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dualeval.errors import EXIT_USAGE, UsageError
from dualeval.models import checkpoints
from dualeval.models.checkpoints.late import LateTensor
from dualeval.models.weights import load_into

CANARY = "canary"


class Canary:
    """Unpickling this runs code: it makes the file named ``CANARY`` in the working folder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (CANARY, "w")


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def read_state_dict(path: Path) -> dict[str, Tensor]:
    return checkpoints.read_state_dict(path).tensors


@pytest.fixture
def state() -> dict[str, Tensor]:
    return small().state_dict()


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", ["w.pt", "w.pth", "w.bin", "w"])
@pytest.mark.parametrize("zip_format", [True, False], ids=["zip", "legacy"])
def test_reads_what_torch_saved(
    tmp_path: Path, state: dict[str, Tensor], name: str, zip_format: bool
) -> None:
    torch.save(state, tmp_path / name, _use_new_zipfile_serialization=zip_format)
    assert_equal(read_state_dict(tmp_path / name), state)


def test_reads_safetensors(tmp_path: Path, state: dict[str, Tensor]) -> None:
    save_file(state, tmp_path / "w.safetensors")
    found = read_state_dict(tmp_path / "w.safetensors")
    assert_equal(dict(sorted(found.items())), dict(sorted(state.items())))


def test_a_safetensors_header_of_any_length(tmp_path: Path) -> None:
    lengths = set()
    for letters in range(1, 257, 8):
        path = tmp_path / f"{letters}.safetensors"
        save_file({"w" * letters: torch.ones(2)}, path)
        lengths.add(path.read_bytes()[0])
        assert list(read_state_dict(path)) == ["w" * letters]
    assert 0x80 in lengths, "the byte that a pickle begins with"


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_values_stay_in_the_file_until_they_are_used(
    tmp_path: Path, state: dict[str, Tensor], name: str
) -> None:
    path = tmp_path / name
    if name == "w.pt":
        torch.save(state, path)
    else:
        save_file(state, path)
    found = read_state_dict(path)
    assert all(isinstance(tensor, LateTensor) for tensor in found.values())
    assert str(path) not in Path("/proc/self/maps").read_text()
    os.truncate(path, path.stat().st_size)  # as it is, but for its time
    os.utime(path, ns=(0, 0))
    with pytest.raises(UsageError, match=f"{name} has changed while it was read"):
        load_into(small(), found, name)


@pytest.mark.parametrize("content", ["whole module", "state_dict and more", "canary"])
@pytest.mark.parametrize("zip_format", [True, False], ids=["zip", "legacy"])
def test_pickled_objects_are_refused_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, zip_format: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = {
        "whole module": small(),
        "state_dict and more": {"state_dict": small().state_dict(), "config": Canary()},
        "canary": Canary(),
    }[content]
    torch.save(saved, "w.pt", _use_new_zipfile_serialization=zip_format)
    with pytest.raises(UsageError, match=r"w\.pt cannot be read as plain tensors") as caught:
        read_state_dict(Path("w.pt"))
    message = str(caught.value)
    assert "torch.save(model.state_dict(), PATH)" in message
    assert "weights_only" not in message  # torch's advice to switch the protection off
    assert ("Sequential" if content == "whole module" else "open") in message
    assert caught.value.exit_code == EXIT_USAGE
    assert not Path(CANARY).exists()


def test_the_canary_sings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Canary())).close()  # noqa: S301 - the code that it runs is ours
    assert Path(CANARY).exists()


def test_a_plain_pickle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for suffix in (".pt", ".safetensors"):
        path = Path("w").with_suffix(suffix)
        path.write_bytes(pickle.dumps(Canary()))
        with pytest.raises(UsageError, match=f"w{suffix}"):
            read_state_dict(path)
    assert not Path(CANARY).exists()


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


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_other_files_are_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"w{suffix}"
    for content in (b"<html>404</html>", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=f"w{suffix}"):
            read_state_dict(path)


def test_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.pt", tmp_path / "none.safetensors"):
        with pytest.raises(UsageError, match=r"does not exist.*--weights PATH"):
            read_state_dict(path)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"epoch": 3, "lr": 0.1}, "found: epoch, lr"),
        ({"weight": torch.ones(1), "epoch": 3}, "found: weight, epoch"),
        ({0: torch.ones(1)}, "found: 0"),
        ({"state_dict": {"a": [1, 2]}}, "found: a"),
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


def test_loads_all_values(state: dict[str, Tensor]) -> None:
    model = small()
    for tensor in model.state_dict().values():
        tensor.zero_()
    load_into(model, state, "w.pt")
    assert_equal(model.state_dict(), state)


def test_loads_into_the_models_own_dtype(state: dict[str, Tensor]) -> None:
    model = small()
    halves = {name: t.half() if t.is_floating_point() else t for name, t in state.items()}
    load_into(model, halves, "w.pt")
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert torch.equal(model.state_dict()["0.weight"], halves["0.weight"].float())


def test_the_tensors_are_copied(state: dict[str, Tensor]) -> None:
    model = small()
    load_into(model, state, "w.pt")
    state["0.weight"].zero_()
    assert model.state_dict()["0.weight"].any()


def test_all_that_does_not_fit_is_said_at_once(state: dict[str, Tensor]) -> None:
    del state["0.bias"]
    message = misfit({**state, "stray": torch.ones(1), "2.weight": torch.ones(7, 3)})
    assert "do not fit the model Sequential: 1 missing in the file: 0.bias; " in message
    for part in ("1 not in the model: stray", "1 of another shape: 2.weight (7, 3), the model has (2, 3)"):
        assert part in message


def test_long_lists_are_cut(state: dict[str, Tensor]) -> None:
    message = misfit({**state, **{f"stray{number}": torch.ones(1) for number in range(11)}})
    assert "11 not in the model: stray0, stray1," in message
    assert "stray7 and 3 more" in message
    assert "stray8" not in message


def test_another_number_of_classes_is_said_so(state: dict[str, Tensor]) -> None:
    message = misfit({**state, "2.weight": torch.ones(7, 3), "2.bias": torch.ones(7)})
    assert "are for 7 classes, but 2 were expected" in message
    assert "--num-classes" in message


def test_other_shapes_are_no_number_of_classes(state: dict[str, Tensor]) -> None:
    """Two different pairs of first dimensions: another model, not another number of classes."""
    message = misfit({**state, "2.bias": torch.ones(7), "0.bias": torch.ones(8)})
    assert "classes" not in message
    assert "2 of another shape" in message


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
    state = {**model.state_dict(), "0.weight": torch.ones(12, 4)}
    with pytest.raises(UsageError) as caught:
        load_into(model, state, "the weights w.pt")
    message = str(caught.value)
    assert "the weights w.pt have 12 rows in the embedding 0.weight, and the model 10" in message
    assert "the vocabulary" in message
    assert "weights, config.json and tokenizer of one and the same model" in message
    assert "classes" not in message


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


def test_a_format_without_versions_has_the_present_layout(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "w.safetensors")
    model = Renamed()
    load_into(model, read_state_dict(tmp_path / "w.safetensors"), "w.safetensors")
    assert model.weight.tolist() == [1, 1]


def test_what_a_module_says_itself_is_passed_on() -> None:
    later: OrderedDict[str, Tensor] = OrderedDict(weight=torch.ones(2))
    later._metadata = OrderedDict({"": {"version": 3}})  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="do not fit the model Renamed: version 3"):
        load_into(Renamed(), later, "w.pt")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64])
def test_other_kinds_of_numbers_are_refused(state: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Quantized weights have scales beside them; without these they are other weights."""
    message = misfit({**state, "0.weight": (state["0.weight"] * 100).to(dtype)})
    assert f"1 of another dtype: 0.weight {dtype}, the model has torch.float32" in message


def test_eighth_size_floats_and_floats_for_integers_are_refused(state: dict[str, Tensor]) -> None:
    message = misfit({**state, "2.bias": state["2.bias"].to(torch.float8_e4m3fn)})
    assert "2.bias torch.float8_e4m3fn, the model has torch.float32" in message
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
