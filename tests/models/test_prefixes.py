"""Prefixes before the names in a checkpoint: removed where the model wants it, and only there."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # here, not with the first torch.compile: the import sets an environment variable
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from dualeval.errors import UsageError
from dualeval.models.checkpoints.checkpoint import StateDict, read_state_dict
from dualeval.models.late_building import late_model
from dualeval.models.loading import load_state_dict
from dualeval.models.weights import LoadedWeights, notes_of, warnings_of
from tests.models.test_weights import Renamed, assert_equal, small


class Holder(nn.Module):
    """A model that keeps another under a name of its choice, as wrappers and LightningModules do."""

    def __init__(self, name: str, inner: nn.Module | None = None, **others: nn.Module) -> None:
        super().__init__()
        self.add_module(name, small() if inner is None else inner)
        for other, module in others.items():
            self.add_module(other, module)


def saved(path: Path, state: dict[str, Tensor]) -> StateDict:
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return read_state_dict(path)


def load(model: nn.Module, found: StateDict, prefix: str | None = None) -> LoadedWeights:
    for tensor in model.state_dict().values():
        tensor.zero_()
    return load_state_dict(model, found, prefix=prefix, source="the weights w.pt")


def refused(model: nn.Module, found: StateDict, prefix: str | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        load(model, found, prefix)
    return str(caught.value)


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
@pytest.mark.parametrize(
    "prefix",
    [
        *("module.", "_orig_mod.", "model."),
        *("module._orig_mod.", "_orig_mod.module.", "module.module.", "model._orig_mod.", "model.model."),
    ],
)
def test_prefixes_of_wrappers_are_removed(
    tmp_path: Path, state: dict[str, Tensor], prefix: str, name: str
) -> None:
    found = saved(tmp_path / name, {prefix + name: tensor for name, tensor in state.items()})
    model = small()
    loaded = load(model, found)
    assert_equal(model.state_dict(), state)
    assert loaded.prefix == prefix
    assert notes_of(loaded) == [f"weights: {tmp_path / name}, prefix {prefix!r} removed"]


def test_prefixes_of_real_wrappers_are_removed(tmp_path: Path, state: dict[str, Tensor]) -> None:
    wrappers: dict[str, Any] = {
        "module.": nn.DataParallel(small()),
        "_orig_mod.": torch.compile(small(), backend="eager"),
        "_orig_mod.module.": torch.compile(nn.DataParallel(small()), backend="eager"),
        "model.": Holder("model"),
        "module.module.": AveragedModel(nn.DataParallel(small())),
    }
    for prefix, wrapper in wrappers.items():
        model = small()
        assert load(model, saved(tmp_path / "w.pt", wrapper.state_dict())).prefix == prefix
        assert_equal(model.state_dict(), state)


@pytest.mark.parametrize("name", ["module", "model", "_orig_mod"])
def test_a_models_own_attribute_is_no_prefix(tmp_path: Path, name: str) -> None:
    model = Holder(name)
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loaded = load(model, saved(tmp_path / "w.pt", wanted))
    assert_equal(model.state_dict(), wanted)
    assert notes_of(loaded) == []


def test_what_lacks_behind_a_prefix_is_named_without_it(tmp_path: Path, state: dict[str, Tensor]) -> None:
    del state["0.bias"]
    found = saved(tmp_path / "w.pt", {f"module.{name}": tensor for name, tensor in state.items()})
    message = refused(small(), found)
    assert message.startswith(
        "the weights w.pt (without the prefix 'module.') do not fit the model Sequential"
    )
    assert "1 missing in the file: 0.bias." in message


def test_a_models_own_count_is_not_left_out(tmp_path: Path) -> None:
    """A model that is an AveragedModel itself."""
    model = AveragedModel(small())
    wanted = {name: tensor.clone() + 1 for name, tensor in model.state_dict().items()}
    loaded = load(model, saved(tmp_path / "w.pt", wanted))
    assert_equal(model.state_dict(), wanted)
    assert loaded.left_out == ()


@pytest.mark.parametrize("stray", ["n_averages", "x.n_averaged", "b"])
def test_a_prefix_that_not_all_names_have_stays(tmp_path: Path, state: dict[str, Tensor], stray: str) -> None:
    names = {stray: torch.zeros(1), **{f"module.{name}": tensor for name, tensor in state.items()}}
    message = refused(small(), saved(tmp_path / "w.pt", names))
    assert "10 not in the model" in message
    assert "Give the weights of this" not in message, "they are the weights of this model"
    assert "The names that begin with 'module.' are those of the model: --weights-prefix module." in message


def test_a_module_converts_its_older_layout_behind_a_prefix(tmp_path: Path) -> None:
    old: OrderedDict[str, Tensor] = OrderedDict({"module.kernel": torch.ones(2)})
    old._metadata = OrderedDict({"": {"version": 1}, "module": {"version": 1}})  # type: ignore[attr-defined]
    model = Renamed()
    load(model, saved(tmp_path / "w.pt", old))
    assert model.weight.tolist() == [1, 1]


# -- names within, and what lies beside the model's ------------------------------------------------------


def inside(state: dict[str, Tensor], wrapper: str, *, of: str = "1.", before: str = "") -> dict[str, Tensor]:
    """The names of a model one of whose modules is wrapped."""
    return {before + name.replace(of, f"{of}{wrapper}."): tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("wrapper", "before"),
    [
        *(("_orig_mod", ""), ("_orig_mod", "model."), ("_orig_mod", "module._orig_mod."), ("module", "")),
        *(("module", "model."), ("_orig_mod.module", ""), ("_fsdp_wrapped_module", "model.")),
    ],
)
def test_the_wrapper_of_a_part_of_a_model_is_removed(
    tmp_path: Path, state: dict[str, Tensor], wrapper: str, before: str
) -> None:
    """The versions of its modules as well: without them a batch norm may count anew."""
    names = OrderedDict(inside(state, wrapper, before=before))
    names._metadata = OrderedDict({f"{before}1.{wrapper}": {"version": 1}})  # type: ignore[attr-defined]
    del names[f"{before}1.{wrapper}.num_batches_tracked"]
    model = small()
    if wrapper == "_orig_mod":  # as it lacks one, module. does not make all names fit
        assert load(model, saved(tmp_path / "w.pt", names)).prefix == before
        assert_equal(model.state_dict(), state)
    names[f"{before}1.{wrapper}.num_batches_tracked"] = state["1.num_batches_tracked"]
    load(model, saved(tmp_path / "w.pt", names))
    assert_equal(model.state_dict(), state)


def test_module_within_names_that_then_lack_one_stays(tmp_path: Path, state: dict[str, Tensor]) -> None:
    names = inside(state, "module")
    del names["2.bias"]
    assert "not in the model: 1.module.weight" in refused(small(), saved(tmp_path / "w.pt", names))


COUNTS = {f"{module}total_ops": torch.zeros(1) for module in ("", "0.", "2.")}


@pytest.mark.parametrize(
    ("others", "left_out", "warning"),
    [
        (COUNTS, tuple(COUNTS), None),
        ({"2.num_batches_tracked": torch.zeros(())}, ("2.num_batches_tracked",), None),
        (
            {"aux.bias": torch.zeros(1), "aux.num_batches_tracked": torch.zeros(1)},
            (),
            "2 tensors that the model lacks: aux.*. Check that --model is what was trained",
        ),
        (
            {"ema_0_bias": torch.zeros(1)},
            (),
            "1 tensor that the model lacks: ema_0_bias. Check that --model is what was trained",
        ),
    ],
)
def test_what_lies_beside_is_left_out(
    tmp_path: Path, state: dict[str, Tensor], others: Any, left_out: Any, warning: str | None
) -> None:
    for prefix in ("", "module."):
        names = {prefix + name: tensor for name, tensor in {**state, **others}.items()}
        model = small()
        loaded = load(model, saved(tmp_path / "w.pt", names))
        assert_equal(model.state_dict(), state)
        assert loaded.left_out == left_out
        assert warnings_of(loaded) == ([] if warning is None else [f"the weights w.pt hold {warning}"])


def test_a_teacher_beside_is_left_out_and_can_be_asked_for(tmp_path: Path, state: dict[str, Tensor]) -> None:
    names = {**state, **{f"ema.{name}": tensor + 1 for name, tensor in state.items()}}
    for before in ("", "module."):
        found = saved(tmp_path / "w.pt", {before + name: tensor for name, tensor in names.items()})
        model = small()
        loaded = load(model, found)
        assert_equal(model.state_dict(), state)
        [said] = warnings_of(loaded)
        assert said.endswith(f" lacks: ema.*. To evaluate these, type --weights-prefix {before}ema.")
        again = load(model, found, f"{before}ema.")
        assert_equal(model.state_dict(), {name: tensor + 1 for name, tensor in state.items()})
        assert not warnings_of(again)
    with pytest.warns(UserWarning, match="9 tensors that the model lacks"):
        late_model(small, tmp_path / "w.pt")


@pytest.mark.parametrize("other", ["2.more.bias", "3.bias", "cls_token"])
def test_a_part_of_the_model_itself_stays_refused(
    tmp_path: Path, state: dict[str, Tensor], other: str
) -> None:
    """One in its modules, a further one of those that are counted, and a tensor of its own."""
    found = saved(tmp_path / "w.pt", {**state, other: torch.zeros(1), "aux.bias": torch.zeros(1)})
    message = refused(small(), found)
    assert f"1 not in the model: {other}. They belong to a larger network" in message


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (("0.weight_orig", "0.weight_mask"), "is pruned: call torch.nn.utils.prune.remove(module, 'weight')"),
        (("0.base_layer.weight", "0.lora_A.weight"), "They are an adapter's: call merge_and_unload()"),
    ],
)
def test_forms_that_are_known_by_their_names(
    tmp_path: Path, state: dict[str, Tensor], others: tuple[str, ...], words: str
) -> None:
    names = {**state, **dict.fromkeys(others, state.pop("0.weight"))}
    del names["0.weight"]
    assert words in refused(small(), saved(tmp_path / "w.pt", names))


# -- --weights-prefix --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
@pytest.mark.parametrize("prefix", ["student.", "student", "student.backbone.", "student.backbone"])
def test_only_names_with_the_prefix_are_taken(
    tmp_path: Path, state: dict[str, Tensor], prefix: str, name: str
) -> None:
    inner = f"{prefix.removesuffix('.')}."
    found = saved(
        tmp_path / name,
        {
            "teacher.0.weight": torch.zeros(1),
            "weight": torch.zeros(1),
            **{inner + name: tensor for name, tensor in state.items()},
        },
    )
    model = small()
    loaded = load(model, found, prefix)
    assert_equal(model.state_dict(), state)
    assert loaded.prefix == inner
    assert sorted(loaded.left_out) == ["teacher.0.weight", "weight"]
    [note] = notes_of(loaded)
    assert f"prefix {inner!r} removed, 2 left out: " in note


def test_a_prefix_without_a_dot_is_removed(tmp_path: Path, state: dict[str, Tensor]) -> None:
    found = saved(tmp_path / "w.pt", {f"ema_{name}": tensor for name, tensor in state.items()})
    model = small()
    assert load(model, found, "ema_").prefix == "ema_"
    assert_equal(model.state_dict(), state)


def test_no_prefix_at_all_may_be_asked_for(tmp_path: Path, state: dict[str, Tensor]) -> None:
    found = saved(tmp_path / "w.pt", {f"module.{name}": tensor for name, tensor in state.items()})
    assert "9 not in the model: module.0.weight" in refused(small(), found, "")
    load(Holder("module"), found, "")


@pytest.mark.parametrize("prefix", ["modul", "teacher.", "module.0.weight", "0."])
def test_a_prefix_that_no_name_has_is_refused(tmp_path: Path, state: dict[str, Tensor], prefix: str) -> None:
    found = saved(tmp_path / "w.pt", {f"module.{name}": tensor for name, tensor in state.items()})
    message = refused(small(), found, prefix)
    if prefix == "modul":
        assert "do not fit" in message
    else:
        assert f"--weights-prefix {prefix}: no name in the weights w.pt begins with it" in message
        assert "(found: module.0.weight, module.0.bias, module.1.weight, ...)" in message


def test_the_prefix_that_would_fit_is_offered(tmp_path: Path, state: dict[str, Tensor]) -> None:
    """As in a LightningModule with a metric or a loss that has tensors of its own."""
    wrapper = Holder("model", train_top1=nn.BatchNorm1d(2))
    found = saved(tmp_path / "w.pt", wrapper.state_dict())
    message = refused(small(), found)
    assert "do not fit the model Sequential" in message
    assert (
        "The names that begin with 'model.' are those of the model: --weights-prefix model. takes" in message
    )
    model = small()
    load(model, found, "model.")
    assert_equal(model.state_dict(), state)


def test_all_prefixes_that_would_fit_are_offered(tmp_path: Path, state: dict[str, Tensor]) -> None:
    names = {prefix + name: tensor for prefix in ("model.", "ema.") for name, tensor in state.items()}
    message = refused(small(), saved(tmp_path / "w.pt", names))
    assert "one of 2 prefixes are those of the model: 'model.', 'ema.'. They can give different" in message
    for prefix in ("model.", "ema", "ema."):
        load(small(), saved(tmp_path / "w.pt", names), prefix)
