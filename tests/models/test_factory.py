"""Models that a function of the user's makes: quantised ones, arguments, weights that are merged."""

from __future__ import annotations

import argparse
import re
import shlex
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualeval
from dualeval.errors import UsageError
from dualeval.models import classifiers
from dualeval.models.sources.factory import _OF_TRAINING
from dualeval.models.sources.source import Loading, weights_of_file
from dualeval.models.weights import LoadedWeights
from tests.conftest import working_module
from tests.models.test_model_sources import IMAGES, deprecated, fails, identity, net, quantised

FACTORIES = """
import warnings

import torch
from torch import nn

from tests.models.test_model_sources import Net, quantised


def make(num_classes=3, widths=(), kind="plain"):
    model = Net(num_classes)
    model.said = (widths, kind)
    return model


def quantised_net(num_classes=3):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantised(Net(num_classes))


def needs_classes(num_classes):
    return Net(num_classes)
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with working_module(tmp_path, "nets_of_sources", FACTORIES, monkeypatch):
        yield


@deprecated
@pytest.mark.usefixtures("factories")
def test_a_dynamically_quantised_model_is_built_from_its_weights(tmp_path: Path) -> None:
    name, path = "nets_of_sources:quantised_net", tmp_path / "quantised.pt"
    torch.save(quantised(net()).state_dict(), path)
    model = classifiers.build(name, str(path), None)
    assert torch.equal(model(IMAGES), quantised(net())(IMAGES))
    drawn = [identity(classifiers.build(name, f"random:{seed}", None)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    torch.save(quantised(net(changed=0.5)).state_dict(), path)
    assert identity(classifiers.build(name, str(path), None)) != identity(model)


# -- arguments -----------------------------------------------------------------------------------------


OF_MODELS = """
import copy
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, kind, num_classes=3):
        super().__init__()
        self.linear, self.kind = nn.Linear(3, num_classes), kind
        if kind == "layers":
            self.parts = [nn.Linear(3, 3)]
        elif kind == "tensor":
            self.order = torch.randperm(50)
        elif kind == "buffer":
            self.register_buffer("noise", torch.randn(3), persistent=False)
        elif kind == "same":
            self.steps, self.acts = torch.arange(3), {"relu": nn.ReLU(), "lin": self.linear}
        elif kind == "copy":
            self.teacher = [copy.deepcopy(self.linear)]
        elif kind == "seeded":
            self.order = torch.randn(3, generator=torch.Generator().manual_seed(0))

    def forward(self, images):
        return self.linear(images.mean((2, 3)))
"""


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        *[("layers", "parts"), ("tensor", "order"), ("buffer", "_buffers")],
        *[("plain", None), ("same", None), ("copy", None), ("seeded", None)],
    ],
)
def test_what_is_drawn_and_in_no_checkpoint_is_refused(
    kind: str, named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with working_module(tmp_path, "of_models", OF_MODELS, monkeypatch):
        model = classifiers.create("of_models:Net", 3, {"kind": kind})
        torch.save(model.state_dict(), tmp_path / "ck.pt")
        source = classifiers.source_of("of_models:Net", {"kind": kind})
        if named is None:
            source.build(weights_of_file(str(tmp_path / "ck.pt")), 3)
        else:
            with pytest.raises(UsageError, match=f"Net draws {named} anew each time"):
                source.build(weights_of_file(str(tmp_path / "ck.pt")), 3)


OF_ARGUMENTS = """
from torch import nn

class Net(nn.Module):
    def __init__(self, activation="relu", widths=(3, 3), p_drop=0.1, lr=0.1, norm=nn.ReLU, num_classes=3):
        super().__init__()
        self.linear, self.activation = nn.Linear(3, num_classes), activation

class Lit(Net):
    def on_load_checkpoint(self, checkpoint):
        self.scale = checkpoint["scale"]
"""


@pytest.fixture
def with_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with working_module(tmp_path, "of_arguments", OF_ARGUMENTS, monkeypatch):
        yield


GELU = {"activation": "gelu"}
HELD: dict[str, dict[str, Any]] = {
    "lightning": {"hyper_parameters": GELU},
    "namespace": {"args": argparse.Namespace(**GELU, scale=torch.ones(2))},
    "module that was given one": {"hyper_parameters": {"config": types.SimpleNamespace(**GELU)}},
    "script's own": {"model_args": {"activation": "gelu"}, "args": {"activation": "relu"}},
    "beside": {"activation": "gelu", "epoch": 3},
}


@pytest.mark.usefixtures("with_arguments")
@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("held", [*HELD])
def test_arguments_that_no_tensor_shows_are_asked_for(held: str, trust: bool, tmp_path: Path) -> None:
    path, objects = tmp_path / "ck.pt", {"object": Path} if trust else {}
    torch.save({"state_dict": net_of("Net").state_dict(), **HELD[held], **objects}, path)

    def built(*typed: str) -> Any:
        given = classifiers.arguments_of(typed)
        source = classifiers.source_of("of_arguments:Net", given, trust=trust)
        return source.build(weights_of_file(str(path)), 3)

    with pytest.raises(UsageError) as error:
        built()
    said = str(error.value)
    assert "saved with other arguments: activation is 'gelu', called with 'relu'. Type " in said
    forms = re.findall("--model-arg ([^ ]+)", said)
    assert [built(form).activation for form in forms] == ["gelu", "relu"]


@pytest.mark.usefixtures("with_arguments")
def test_arguments_are_typed_as_a_shell_takes_them(tmp_path: Path) -> None:
    path, held = tmp_path / "ck.pt", {"activation": "leaky relu", "widths": [4, None]}
    torch.save({"state_dict": net_of("Net").state_dict(), "hyper_parameters": held}, path)
    with pytest.raises(UsageError) as error:
        classifiers.build("of_arguments:Net", str(path), 3)
    of_file, of_call = str(error.value).rpartition("Type ")[2].split(" to take those of the file, or ")
    typed = [shlex.split(each.removesuffix(" to keep these."))[1::2] for each in (of_file, of_call)]
    assert [classifiers.arguments_of(each) for each in typed] == [
        held,
        {"activation": "relu", "widths": (3, 3)},
    ]


@pytest.mark.usefixtures("with_arguments")
def test_no_alarm_where_arguments_decide_nothing(tmp_path: Path) -> None:
    held = {
        "activation": "relu",
        "widths": [3.0, 3],
        "p_drop": 0.5,
        "lr": 0.3,
        "num_classes": 5,
        "other": 1,
        "norm": "batch",
        "optimizer_states": [],
        "kwargs": {"activation": "gelu"},
    }
    torch.save({"state_dict": net_of("Net").state_dict(), "hyper_parameters": held}, tmp_path / "ck.pt")
    classifiers.build("of_arguments:Net", str(tmp_path / "ck.pt"), 3)
    # As argparse has what nobody gave, and a text of the same number.
    held = {"activation": None, "widths": "(3, 3)", "norm": ""}
    torch.save({"state_dict": net_of("Net").state_dict(), "args": held}, tmp_path / "ck.pt")
    classifiers.build("of_arguments:Net", str(tmp_path / "ck.pt"), 3)


@pytest.mark.parametrize(
    "name",
    ["seed", "mode", "name", "path", "resume", "model"]
    + ["drop_path_rate", "attn_drop", "hidden_dropout_prob", "dropout1", "p_drop", "max_lr", "lr_scheduler"],
)
def test_arguments_of_training_decide_nothing(name: str) -> None:
    assert _OF_TRAINING.fullmatch(name)


@pytest.mark.parametrize("name", ["drop_cls_token", "dropkey", "beta_schedule", "num_steps", "temperature"])
def test_other_arguments_decide(name: str) -> None:
    assert not _OF_TRAINING.fullmatch(name)


@pytest.mark.usefixtures("with_arguments")
@pytest.mark.parametrize(("name", "lightning"), [("Lit", True), ("Lit", False), ("Net", True)])
def test_on_load_checkpoint_is_not_called(name: str, lightning: bool, tmp_path: Path) -> None:
    path, loaded = tmp_path / "ck.pt", list[LoadedWeights]()
    version = {"pytorch-lightning_version": "2.5"} if lightning else {}
    torch.save({"state_dict": net_of("Net").state_dict(), "scale": 2.0, **version}, path)
    source = classifiers.source_of(f"of_arguments:{name}")
    source.build(weights_of_file(str(path)), 3, Loading(on_load=loaded.append))
    warning = loaded[0].warning or ""
    assert warning.startswith("Lit.on_load_checkpoint is not called") == (name == "Lit" and lightning)
    assert bool(warning) == (name == "Lit" and lightning)


def net_of(name: str) -> Any:
    return classifiers.create(f"of_arguments:{name}", 3)


MERGES = """
import torch
from torch import nn

class Low(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.a, self.b, self.merged = nn.Parameter(torch.randn(1, 3)), nn.Parameter(torch.randn(3, 1)), False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (self.b @ self.a) * (-1 if mode else 1)
            self.merged = not mode  # nothing is returned: eval() of it gives None

    def forward(self, x):
        y = super().forward(x)
        return y if self.merged else y + x @ self.a.T @ self.b.T

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.norm = Low(), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.low(x))

def trained():
    return Net()

def evaluated():
    net = Net()
    net.eval()
    return net
"""


def test_a_model_whose_train_returns_nothing_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then ``eval()`` returns None."""
    with working_module(tmp_path, "merges", MERGES, monkeypatch):
        made = classifiers.create("merges:Low", None)
        torch.save(made.state_dict(), tmp_path / "ck.pt")
        module = classifiers.source_of(made)
        path = str(tmp_path / "ck.pt")
        found = [
            module.build(module.find_weights(None), None),
            *(classifiers.build("merges:Low", weights, None) for weights in ("random:0", path)),
        ]
        with pytest.warns(UserWarning, match="builds all of it"):
            found.append(dualeval.late_model(lambda: classifiers.create("merges:Low", None), path))
        assert [type(each).__name__ for each in found] == ["Low"] * 4


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("factory", ["trained", "evaluated"])
def test_weights_that_eval_merges_are_those_of_the_file(
    factory: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As loralib's layers: what is merged are the weights of the file, not those that were drawn."""
    with working_module(tmp_path, "merges", MERGES, monkeypatch), torch.no_grad():
        model = classifiers.create("merges:trained", 3)
        torch.save(model.state_dict(), tmp_path / "ck.pt")
        model.eval()
        source, weights = classifiers.source_of(f"merges:{factory}"), weights_of_file(str(tmp_path / "ck.pt"))
        found = source.build_late(weights, 3, note=lambda said: None) if late else source.build(weights, 3)
        assert not any(each.training for each in found.modules())
        pixels = torch.rand(2, 3)
        assert torch.equal(found.to("cpu")(pixels), model(pixels))


@pytest.mark.usefixtures("factories")
def test_a_factory_gets_its_arguments_and_wrong_ones_are_named() -> None:
    arguments = classifiers.arguments_of(["widths=[2, 4]", "kind=wide one"])
    assert arguments == {"widths": [2, 4], "kind": "wide one"}
    model: Any = classifiers.create("nets_of_sources:make", 5, arguments)
    assert model.said == ([2, 4], "wide one")
    assert model.linear.out_features == 5
    message = fails("nets_of_sources:make", "random:0", arguments={"depth": 3})
    assert "is called with depth" in message
    assert "--model-arg NAME=VALUE" in message
    message = fails("nets_of_sources:needs_classes", "random:0")
    assert "needs_classes(num_classes) is called with no arguments" in message
    assert "Give --num-classes N" in message
    assert "has no callable 'foo'. It has make, " in fails("nets_of_sources:foo", "random:0")


def test_a_torchvision_model_gets_its_arguments() -> None:
    model = classifiers.create("squeezenet1_1", 2, {"dropout": 0.25})
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.25]
    assert "cannot be made with --model-arg depth" in fails(
        "squeezenet1_1", "random:0", arguments={"depth": 3}
    )
    assert "chosen with --weights" in fails("resnet18", "random:0", arguments={"weights": "DEFAULT"})
    assert "fashion-cnn takes no arguments" in fails("fashion-cnn", "random:0", arguments={"depth": 3})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["depth"], "--model-arg depth: expected NAME=VALUE"),
        (["2=3"], "--model-arg 2=3: expected NAME=VALUE"),
        (["num_classes=3"], "--num-classes"),
        (["a=1", "a=2"], "--model-arg a is given twice"),
    ],
)
def test_malformed_arguments_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        classifiers.arguments_of(words)
