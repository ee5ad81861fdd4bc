"""Checkpoints as training scripts write them: which state_dict is taken, what is read, what may not run."""

from __future__ import annotations

import argparse
import collections
import datetime
import random
import types
from collections.abc import Callable, Iterator
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # here, not with the first optimizer: the import sets an environment variable
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.serialization import get_safe_globals, safe_globals

from dualeval.models.checkpoints.checkpoint import read_state_dict
from dualeval.models.checkpoints.finding import KNOWN_KEYS
from dualeval.models.loading import load_state_dict
from dualeval.models.weights import LoadedWeights, notes_of
from tests.models.test_checkpoint_folders import refused
from tests.models.test_weights import CANARY, Canary, assert_equal, small


def train(model: nn.Module, steps: int = 2) -> tuple[torch.optim.Optimizer, AveragedModel]:
    """Train a few steps, as a script does; returns the optimizer and the average of the weights."""
    torch.manual_seed(1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(torch.rand(5, 4)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
    return optimizer, average


EVERYTHING: dict[str, Any] = {
    "namespace in namespace": argparse.Namespace(inner=argparse.Namespace(path=Path("a"))),
    "simple namespace": types.SimpleNamespace(lr=0.1),
    "windows path": PureWindowsPath("C:/data"),
    "scalars": [np.float32(1), np.int64(2), np.bool_(True), np.str_("a"), np.datetime64("2020-01-01")],
    "arrays": [np.zeros((2, 3)), np.zeros((3, 2)).T, np.array(["a"]), np.zeros(2, dtype=[("x", "f4")])],
    "array of objects": np.array([1, None, {"a": Path("b")}], dtype=object),
    "dtype": np.dtype("float16"),
    "numpy random state": np.random.get_state(),
    "python random state": random.getstate(),
    "torch random state": torch.get_rng_state(),
    "date and time": [
        datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
        datetime.date(2026, 1, 2),
        datetime.timedelta(seconds=3),
    ],
    "defaultdict": collections.defaultdict(list, {"loss": [1.0]}),
    "nested defaultdict": {"meters": collections.defaultdict(float, {"top1": 0.5})},
    "deque": collections.deque([0.5, 0.25], maxlen=20),
    "counter": collections.Counter("abba"),
    "set and range": [{1, 2}, frozenset([3]), range(4), slice(1, 2)],
    "types": [int, str, list],
    "path as a key": {Path("a"): 1},
}


def loaded(path: Path, key: str | None = None) -> tuple[dict[str, Tensor], LoadedWeights]:
    """What a model has after a file was loaded, and what was said of it."""
    model = small()
    for tensor in model.state_dict().values():
        tensor.zero_()
    found = load_state_dict(model, read_state_dict(path, key), source=f"the weights {path}")
    return model.state_dict(), found


# -- what is read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zip_format", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", EVERYTHING)
def test_a_state_dict_is_read_whatever_lies_beside_it(
    tmp_path: Path, state: dict[str, Tensor], name: str, zip_format: bool
) -> None:
    content = {"before": EVERYTHING[name], "model": state, "after": [EVERYTHING[name]]}
    torch.save(content, tmp_path / "w.pt", _use_new_zipfile_serialization=zip_format)
    assert_equal(read_state_dict(tmp_path / "w.pt").tensors, state)


@pytest.mark.parametrize(
    ("one", "other", "value"),
    [
        (b"numpy._core.multiarray", b"numpy.core.multiarray", np.float64(1)),
        (b"numpy._core.multiarray", b"numpy.core.multiarray", np.zeros(3)),
        (b"pathlib\nPosixPath", b"pathlib._local\nPosixPath", Path("a")),
    ],
    ids=["scalar of numpy 1", "array of numpy 1", "path of Python 3.13"],
)
def test_types_named_as_in_other_versions_are_read(
    tmp_path: Path, state: dict[str, Tensor], one: bytes, other: bytes, value: object
) -> None:
    torch.save({"model": state, "x": value}, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    content = (tmp_path / "w.pt").read_bytes()
    assert one in content or other in content
    for old, new in ((one, other), (other, one)):
        (tmp_path / "w.pt").write_bytes(content.replace(old, new))
        assert_equal(read_state_dict(tmp_path / "w.pt").tensors, state)


class Calls:
    """Pickles to a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def reconstruct_of(value: np.ndarray[Any, Any] | np.generic) -> Callable[..., Any]:
    """What pickle calls to make such a value."""
    function: Callable[..., Any] = value.__reduce__()[0]  # type: ignore[assignment]
    return function


def test_admitted_types_are_not_made(tmp_path: Path, state: dict[str, Tensor]) -> None:
    """numpy would ask for an exabyte, and a Namespace for an attribute that takes no value."""
    for call in (
        Calls(reconstruct_of(np.zeros(1)), np.ndarray, (2**60,), b"d"),
        Calls(argparse.Namespace, 1, 2, 3),
    ):
        torch.save({"model": state, "x": call}, tmp_path / "w.pt")
        assert_equal(read_state_dict(tmp_path / "w.pt").tensors, state)


def hidden(content: Any) -> dict[str, Any]:
    """Something that should not be read, in each of the things that are."""
    array = np.empty(1, dtype=object)
    array[0] = content
    history: collections.defaultdict[str, Any] = collections.defaultdict(list, a=content)
    return {
        "alone": content,
        "Namespace": argparse.Namespace(a=content),
        "SimpleNamespace": types.SimpleNamespace(a=content),
        "array of objects": array,
        "array in a Namespace": argparse.Namespace(a=array),
        "defaultdict": history,
        "deque": collections.deque([content]),
        "argument of a path": Calls(Path, content),
        "argument of a timedelta": Calls(datetime.timedelta, content),
        "argument of a scalar": Calls(reconstruct_of(np.float64(1)), np.dtype("O"), content),
        "what a defaultdict makes": Calls(collections.defaultdict, content),
    }


@pytest.mark.parametrize("zip_format", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("place", hidden(None))
def test_no_code_of_a_checkpoint_runs_wherever_it_hides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: dict[str, Tensor], place: str, zip_format: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {"model": state, "x": hidden(Canary())[place]}
    torch.save(content, "w.pt", _use_new_zipfile_serialization=zip_format)
    assert "cannot be read as plain tensors (Unsupported global: GLOBAL" in refused(Path("w.pt"))
    assert not Path(CANARY).exists()


class Config:
    """A class that a program has told torch to take from files."""


@pytest.fixture
def admitted_by_the_program() -> Iterator[list[Any]]:
    entries: list[Any] = [Config, np.dtype, (Path, "pathlib.PosixPath")]
    with safe_globals(entries):
        yield entries


def test_types_that_a_program_admits_stay_admitted(
    tmp_path: Path, state: dict[str, Tensor], admitted_by_the_program: list[Any]
) -> None:
    torch.save({"model": state, "c": Config(), "n": np.float32(1), "p": Path("a")}, tmp_path / "w.pt")
    assert_equal(read_state_dict(tmp_path / "w.pt").tensors, state)
    assert set(admitted_by_the_program) <= set(get_safe_globals())


def test_reading_leaves_no_type_admitted(tmp_path: Path, state: dict[str, Tensor]) -> None:
    before = set(get_safe_globals())
    torch.save({"model": state, "x": Path("a")}, tmp_path / "w.pt")
    torch.save(Canary(), tmp_path / "bad.pt")
    read_state_dict(tmp_path / "w.pt")
    refused(tmp_path / "bad.pt")
    assert set(get_safe_globals()) == before


# -- which state_dict is taken -----------------------------------------------------------------------------


@pytest.mark.parametrize("key", KNOWN_KEYS)
def test_a_state_dict_under_a_known_key_is_found_and_noted(
    tmp_path: Path, state: dict[str, Tensor], key: str
) -> None:
    optimizer, _ = train(small())
    torch.save({"epoch": 3, "optimizer": optimizer.state_dict(), key: state}, tmp_path / "w.pt")
    values, found = loaded(tmp_path / "w.pt")
    assert_equal(values, state)
    assert found.key == key
    assert notes_of(found) == [f"weights: the state_dict under {key!r} of {tmp_path / 'w.pt'}"]


def test_of_model_and_average_neither_wins_silently(tmp_path: Path) -> None:
    """As torchvision's references save them with --model-ema."""
    model = small()
    _, average = train(model)
    path = tmp_path / "w.pt"
    torch.save({"model": model.state_dict(), "model_ema": average.state_dict(), "epoch": 1}, path)
    message = refused(path)
    assert f"{path} holds 2 state_dicts: model (9 tensors), model_ema (10 tensors)." in message
    assert "--weights-key KEY" in message
    values, found = loaded(path, "model")
    assert_equal(values, model.state_dict())
    assert not torch.equal(values["0.weight"], average.module.state_dict()["0.weight"])
    values, found = loaded(path, "model_ema")
    assert_equal(values, average.module.state_dict())
    assert notes_of(found) == [
        f"weights: the state_dict under 'model_ema' of {path}, prefix 'module.' removed, "
        "1 left out: n_averaged"
    ]


def test_a_state_dict_under_two_keys_is_one(tmp_path: Path, state: dict[str, Tensor]) -> None:
    torch.save({"state_dict": state, "model": state}, tmp_path / "w.pt")
    assert read_state_dict(tmp_path / "w.pt").key == "state_dict"


def test_unknown_keys_are_offered(tmp_path: Path, state: dict[str, Tensor]) -> None:
    torch.save({"generator": state, "critic": {"weights": dict(state)}}, tmp_path / "w.pt")
    message = refused(tmp_path / "w.pt")
    assert "holds no state_dict (found: generator, critic)" in message
    assert "generator (9 tensors), critic.weights (9 tensors); --weights-key KEY" in message


@pytest.mark.parametrize(
    ("above", "key", "said"),
    [("", None, "(found: 0.weight, 0"), ("net", None, "(found: net)"), ("net", "net", "under the key net (")],
)
def test_arrays_of_numpy_are_named(tmp_path: Path, above: str, key: str | None, said: str) -> None:
    arrays = {name: value.numpy() for name, value in small().state_dict().items()}
    torch.save({above: arrays} if above else arrays, tmp_path / "w.pt")
    message = refused(tmp_path / "w.pt", key)
    assert "holds numpy arrays" in message and said in message
    assert "torch.as_tensor(value)" in message


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (lambda s: {"generator": s, "critic": s}, "generator"),
        (lambda s: {"a": {"b": {"c": s}}}, "a.b.c"),
        (lambda s: {"a.b": s, "a": {"c": 1}}, "a.b"),
        (lambda s: {"a.b": {"c.d": s}}, "a.b.c.d"),
        (lambda s: {"models": {0: s, 1: {}}}, "models.0"),
    ],
)
def test_a_key_leads_to_a_state_dict_at_any_depth(
    tmp_path: Path, state: dict[str, Tensor], content: Callable[[Any], Any], key: str
) -> None:
    torch.save(content(state), tmp_path / "w.pt")
    found = read_state_dict(tmp_path / "w.pt", key)
    assert found.key == key
    assert_equal(found.tensors, state)


def test_below_a_key_a_state_dict_is_looked_for_in_the_same_way(
    tmp_path: Path, state: dict[str, Tensor]
) -> None:
    path = tmp_path / "w.pt"
    torch.save({"teacher": {"state_dict": state, "epoch": 1}, "model": state}, path)
    assert read_state_dict(path, "teacher").key == "teacher.state_dict"
    torch.save({"teacher": {"net": dict(state), "model": dict(state)}}, path)
    message = refused(path, "teacher")
    assert "2 state_dicts: teacher.net (9 tensors), teacher.model (9 tensors)" in message
    torch.save({"teacher": {"epoch": 1, "own": state}}, path)
    message = refused(path, "teacher")
    assert "holds no state_dict under the key teacher (found: epoch, own)" in message
    assert "teacher.own (9 tensors)" in message


def test_a_key_that_leads_nowhere_is_refused(tmp_path: Path, state: dict[str, Tensor]) -> None:
    path = tmp_path / "w.pt"
    moments = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2)}}}
    torch.save({"model": state, "epoch": 3, "args": argparse.Namespace(), "optimizer": moments}, path)
    message = refused(path, "modle")
    assert message.startswith(f"--weights-key modle: {path} holds no such key (found: model, epoch, args")
    assert "State_dicts lie under model (9 tensors)." in message
    assert "holds no such key" in refused(path, "model.0")
    assert "holds no state_dict under the key epoch (found: int)" in refused(path, "epoch")
    assert "(found: Tensor)" in refused(path, "model.0.weight")
    assert "(found: an object)" in refused(path, "args")


def test_a_key_for_a_plain_state_dict_is_refused(tmp_path: Path, state: dict[str, Tensor]) -> None:
    torch.save(state, tmp_path / "w.pt")
    save_file(state, tmp_path / "w.safetensors")
    for name in ("w.pt", "w.safetensors"):
        message = refused(tmp_path / name, "model")
        assert "--weights-key model" in message
        assert "one state_dict, with no keys above it" in message
        assert "--weights-prefix" in message


# -- several state_dicts: none wins silently, and what is none does not count ------------------------------


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
    "a copy further in": (lambda s: {"model": s, "deep": {"best": dict(s)}}, "deep.best (9 tensors)"),
    "without counters": (
        lambda s: {"model": s, "deep": {name: value for name, value in s.items() if value.dim()}},
        "deep (8 tensors)",
    ),
    "arrays beside it": (lambda s: {"model": s, "deep": arrays(s)}, "deep ("),
    "of other shapes": (lambda s: {"model": s, "deep": {f"net.{n}": torch.ones(2) for n in s}}, "deep (9 "),
    "with a number more": (
        lambda s: {"model": s, "avg": {**behind("", s), "n": 1}},
        "avg (9 tensors, and n)",
    ),
}


@pytest.mark.parametrize("name", RIVALS)
def test_of_several_state_dicts_none_is_taken_silently(
    tmp_path: Path, state: dict[str, Tensor], name: str
) -> None:
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
        (lambda s: {"model": s, "optimizer": {"weights": dict(s)}}, "model"),
        (lambda s: {"model": s, "deep": {"best": dict([*s.items()][:2])}}, "model"),
        (lambda s: {"model": s, "deep": {n.replace(".weight", ".exp_avg"): s[n] for n in s}}, "model"),
        (lambda s: {"model": s, "history": [[0.5, {"loss": torch.ones(1)}]]}, "model"),
    ],
)
def test_what_is_no_other_state_dict_is_no_rival(
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
def test_a_key_that_two_things_answer_to_is_refused(
    tmp_path: Path, state: dict[str, Tensor], content: Callable[[Any, Any], Any], key: str
) -> None:
    path = tmp_path / "w.pt"
    torch.save(content(state, behind("", state)), path)
    assert f"--weights-key {key}: {path} holds 2 things under this key" in refused(path, key)
    if key == "ema.model":
        assert "holds 2 state_dicts: ema.model (9 tensors), ema.model (9 tensors)" in refused(path)
