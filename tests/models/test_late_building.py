"""Models without memory for their parameters: the same model as with it, or a reason why not."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import dualeval
from dualeval.engine.identity.model import ModelIdentity
from dualeval.engine.model.late import read_all
from dualeval.engine.sharding.parameters import parameters_of
from dualeval.errors import UsageError
from dualeval.models import classifiers
from dualeval.models.checkpoints.checkpoint import read_state_dict
from dualeval.models.checkpoints.late import LateTensor
from dualeval.models.loading import load_state_dict
from dualeval.models.weights import OtherClasses
from dualeval.tasks.question_answering import QuestionAnswering
from tests.models.test_checkpoint_folders import save_distributed, sharded
from tests.vehicles import questions


def check_same(late: nn.Module, whole: nn.Module) -> None:
    """Structure, weights, buffers, flags and ties of two models are the same."""
    first, second = ModelIdentity.of(late), ModelIdentity.of(whole)
    assert first.structure == second.structure
    assert first.weights == second.weights
    own, other = (dict(model.named_parameters(remove_duplicate=False)) for model in (late, whole))
    assert list(own) == list(other)
    for name, parameter in own.items():
        assert (parameter.shape, parameter.dtype) == (other[name].shape, other[name].dtype)
        assert parameter.requires_grad == other[name].requires_grad
    assert ties(own) == ties(other)
    buffers = dict(whole.named_buffers(remove_duplicate=False))
    for name, buffer in late.named_buffers(remove_duplicate=False):
        assert type(buffer) is Tensor
        assert torch.equal(buffer, buffers[name])


def ties(parameters: dict[str, nn.Parameter]) -> set[tuple[str, ...]]:
    found: dict[int, tuple[str, ...]] = {}
    for name, parameter in parameters.items():
        found[id(parameter)] = (*found.get(id(parameter), ()), name)
    return set(found.values())


def is_late(model: nn.Module) -> bool:
    return all(isinstance(parameter, LateTensor) for parameter in model.parameters())


@pytest.mark.parametrize(
    "name",
    [
        *("fashion-cnn", "resnet18", "googlenet", "mnasnet0_5", "timm:vit_tiny_patch16_224"),
        "timm:swin_tiny_patch4_window7_224",
    ],
)
def test_a_late_classifier_is_the_same(name: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"img_size": 64} if name.startswith("timm") else {}
    if name == "googlenet":
        arguments = {"transform_input": True, "aux_logits": False}
    source = classifiers.source_of(name, arguments)
    torch.save(source.create(7).state_dict(), tmp_path / "w.pt")
    weights = source.find_weights(str(tmp_path / "w.pt"))
    notes: list[str] = []
    late = source.build_late(weights, 7, note=notes.append)
    assert is_late(late)
    assert not notes
    check_same(late, source.build(weights, 7))


class Nested(nn.Module):
    """All the ways in which a module can have parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(6)) for _ in range(2)])
        self.named = nn.ParameterDict({"one": nn.Parameter(torch.tensor(2.0))})
        self.normed = parametrizations.weight_norm(nn.Linear(6, 6))
        self.lstm = nn.LSTM(6, 6)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2)
        self.attention = nn.MultiheadAttention(6, 2)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)
        self.register_buffer("fixed", torch.arange(4.0), persistent=False)
        self.plain = [torch.full((2,), 0.5)]
        self.nothing: Tensor | None
        self.register_parameter("nothing", None)
        for scale in self.scales:
            scale.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Any:
        values = self.normed(self.embedding(tokens) * self.scales[0] * self.named["one"] + self.scales[1])
        values, _ = self.lstm(self.encoder(values))
        values, _ = self.attention(values, values, values)
        return self.head(self.norm(values.transpose(1, 2)).transpose(1, 2))


def made(make: Callable[[], nn.Module], path: Path) -> nn.Module:
    """The model with the values of a file, with memory for them."""
    model = make()
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


def save(make: Callable[[], nn.Module], path: Path) -> Path:
    torch.manual_seed(7)
    torch.save(make().state_dict(), path)
    return path


def test_a_late_model_of_ones_own_is_the_same(tmp_path: Path) -> None:
    path = save(Nested, tmp_path / "w.pt")
    late: Any = dualeval.late_model(Nested, path)
    whole = made(Nested, path)
    assert is_late(late)
    check_same(late, whole)
    assert torch.equal(late.plain[0], torch.full((2,), 0.5))
    tokens = torch.arange(8).view(2, 4)
    with torch.no_grad():
        # torch's encoder takes no short way with tensors of another class.
        assert torch.allclose(late(tokens), whole(tokens), atol=1e-6)
        read_all(late)
        assert torch.equal(late(tokens), whole(tokens))
    assert late.embedding.weight is late.head.weight


def test_parameters_keep_their_strides(tmp_path: Path) -> None:
    """Kernels may give other last bits for other strides: a divided model is the same as a whole one."""

    def make() -> nn.Module:
        model = nn.Linear(2, 3)
        model.register_parameter("turned", nn.Parameter(torch.randn(7, 5).t()))
        return model

    path = save(make, tmp_path / "w.pt")
    late, whole = dualeval.late_model(make, path), made(make, path)
    assert is_late(late)
    divided = {parameter.name: parameter for parameter in parameters_of(late)}
    assert not divided["turned"].is_divided, "it would come back contiguous"
    assert divided["weight"].is_divided
    read_all(late)
    for name, parameter in late.named_parameters():
        assert parameter.stride() == whole.get_parameter(name).stride()
        assert torch.equal(parameter, whole.get_parameter(name))


def test_a_late_models_file_may_have_other_dtypes_and_one_tied_name(tmp_path: Path) -> None:
    torch.manual_seed(7)
    state = Nested().half().state_dict()
    del state["head.weight"]
    save_file(dict(state), tmp_path / "w.safetensors")
    late: Any = dualeval.late_model(Nested, tmp_path / "w.safetensors")
    assert is_late(late)
    assert late.embedding.weight is late.head.weight
    assert late.embedding.weight.dtype == torch.float32
    assert torch.equal(late.embedding.weight + 0, state["embedding.weight"].float())


def test_values_that_are_already_in_memory_are_the_same(tmp_path: Path) -> None:
    torch.save(Nested().state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    late: Any = dualeval.late_model(Nested, tmp_path / "old.pt")
    check_same(late, made(Nested, tmp_path / "old.pt"))
    rows = torch.empty(3, 6)
    late.embedding.weight.read_rows(2, 5, rows)
    assert torch.equal(rows, late.embedding.weight[2:5])


class Odd(nn.Linear):
    """Does something more when it is built."""

    def __init__(self, more: Callable[[Any], object]) -> None:
        super().__init__(3, 3)
        more(self)


def keep(model: Any) -> None:
    mine = nn.Parameter(torch.randn(3))
    model.mine, model.listed = mine, [mine]


def change_what_is_loaded(model: Any) -> None:
    def double(module: Any, keys: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(2)

    model.register_load_state_dict_post_hook(double)


class CopiesByHand(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def load_state_dict(self, state: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        with torch.no_grad():
            self.weight.data.copy_(state["weight"])
            self.bias.copy_(state["bias"] + 1)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (lambda: Odd(lambda it: it.weight.max().item()), "it needs values while it is built"),
        (
            lambda: Odd(lambda it: it.register_buffer("twice", it.bias.detach() * 2, False)),
            "computes twice from",
        ),
        (lambda: Odd(keep), "it also keeps Odd.mine"),
        (lambda: Odd(lambda it: it.register_buffer("noise", torch.randn(3), False)), "draws noise at random"),
        (lambda: Odd(change_what_is_loaded), "values are in a file"),
        (CopiesByHand, "no file gives it weight, bias"),
    ],
)
def test_what_cannot_be_late_is_built_whole_and_says_why(
    kind: Callable[[], nn.Module], why: str, tmp_path: Path
) -> None:
    path = save(kind, tmp_path / "w.pt")
    torch.manual_seed(3)
    whole = made(kind, path)
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match=f"each rank builds all of it .* because .*{why}"):
        model = dualeval.late_model(kind, path)
    assert not any(isinstance(parameter, LateTensor) for parameter in model.parameters())
    check_same(model, whole)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("1.bias"), "1 missing in the file: 1.bias"),
        (lambda state: state.update(more=torch.ones(1)), "1 not in the model: more"),
        (lambda state: state.update({"0.weight": torch.ones(2, 2)}), r"0.weight \(2, 2\)"),
        (lambda state: state.update({"0.weight": torch.ones(4, 4, dtype=torch.int8)}), "of another dtype"),
    ],
)
def test_the_messages_are_those_of_a_whole_model(
    change: Callable[[dict[str, Any]], object], said: str, tmp_path: Path
) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    state = make().state_dict()
    change(state)
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(UsageError, match=said) as late:
        dualeval.late_model(make, tmp_path / "w.pt")
    with pytest.raises(UsageError) as whole:
        load_state_dict(make(), read_state_dict(tmp_path / "w.pt"), source=f"the weights {tmp_path / 'w.pt'}")
    assert str(late.value) == str(whole.value)
    assert type(late.value) is type(whole.value)


def test_other_classes_are_told_apart(tmp_path: Path) -> None:
    source = classifiers.source_of("fashion-cnn")
    torch.save(source.create(7).state_dict(), tmp_path / "w.pt")
    with pytest.raises(OtherClasses) as raised:
        source.build_late(source.find_weights(str(tmp_path / "w.pt")), 10, note=lambda said: None)
    assert raised.value.count == 7


def test_nothing_is_left_changed_and_other_threads_are_not_touched(tmp_path: Path) -> None:
    path = save(lambda: nn.Linear(3, 3), tmp_path / "w.pt")
    load, state = nn.Module.load_state_dict, torch.get_rng_state()
    beside: list[nn.Module] = []

    def make() -> nn.Module:
        thread = threading.Thread(target=lambda: beside.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        return nn.Linear(3, 3)

    assert is_late(dualeval.late_model(make, path))
    assert not beside[0].weight.is_meta

    def fails() -> nn.Module:
        raise ZeroDivisionError("of the constructor")

    with pytest.raises(ZeroDivisionError):
        dualeval.late_model(fails, path)
    assert nn.Module.load_state_dict is load
    assert not nn.Linear(1, 1).weight.is_meta
    assert len(state) == len(torch.get_rng_state())


def test_random_weights_are_built_whole_and_wrong_arguments_refused(tmp_path: Path) -> None:
    notes: list[str] = []
    source = classifiers.source_of("fashion-cnn")
    model = source.build_late(source.find_weights("random:3"), 10, note=notes.append)
    check_same(model, source.build(source.find_weights("random:3"), 10))
    assert "drawn at random" in notes[0]
    with pytest.raises(UsageError, match="expected a function that makes the model"):
        dualeval.late_model(nn.Linear(1, 1), tmp_path)


def stack() -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))


@pytest.mark.parametrize("form", ["zip", "one", "several", "distributed", "optimizer"])
def test_a_rank_reads_its_part(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    state = stack().state_dict()
    path = tmp_path / form
    optimizer = {name: torch.ones(2, *value.shape) for name, value in state.items()}
    if form == "zip":
        torch.save({"model": state, "optimizer": optimizer}, path)
    elif form == "one":
        path = tmp_path / "w.safetensors"
        save_file(state, path)
    elif form == "several":
        sharded(state, path, size=600_000)
    else:
        save_distributed({"model": state, **({"optimizer": optimizer} if form == "optimizer" else {})}, path)
    counts: list[int] = []
    read = os.preadv

    def counted(*arguments: Any) -> int:
        counts.append(read(*arguments))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counted)
    late = dualeval.late_model(stack, path)
    assert is_late(late)
    # Of a DCP folder each part has a directory of its own.
    assert sum(counts) < (40_000 * len(state) if path.is_dir() and form != "several" else 20_000)
    parts: dict[str, list[Tensor]] = {}
    for rank in range(2):
        named: list[tuple[str, Any]] = list(late.named_parameters())
        for name, parameter in named:
            half = len(parameter) // 2
            rows = torch.empty(half, *parameter.shape[1:])
            before = sum(counts)
            parameter.read_rows(rank * half, (rank + 1) * half, rows)
            assert sum(counts) - before == rows.nbytes
            parts.setdefault(name, []).append(rows)
    for name, both in parts.items():
        assert torch.equal(torch.cat(both), state[name])


def test_an_evaluation_without_shards_reads_a_late_model(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Linear(4, 3)

    path = save(make, tmp_path / "w.pt")
    torch.manual_seed(0)
    data = list(zip(torch.rand(40, 4), torch.randint(3, (40,)), strict=True))
    late = dualeval.evaluate(model=lambda: dualeval.late_model(make, path), data=data, workers=0)
    whole = dualeval.evaluate(model=lambda: made(make, path), data=data, workers=0)
    assert late.metrics == whole.metrics
    assert late.metrics_digest == whole.metrics_digest


# -- the built-in tasks, on real forms of files --------------------------------------------------------------

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return questions.write_questions(tmp_path_factory.mktemp("data") / "squad.json", unanswerable=False)


def answers(model: Path, data: Path, **options: Any) -> QuestionAnswering:
    return QuestionAnswering(model=model, data=data, batch_size=4, max_length=64, stride=16, **options)


@pytest.mark.parametrize("form", ["one", "several", "pickled", "half", "weights"])
def test_a_late_model_of_questions_is_the_same(form: str, tiny: Path, data: Path, tmp_path: Path) -> None:
    library = questions.transformers()
    folder, options = tmp_path / "model", {}
    shutil.copytree(tiny, folder)
    model = library.AutoModelForQuestionAnswering.from_pretrained(tiny)
    if form == "several":
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="1MB")
        assert (folder / "model.safetensors.index.json").is_file()
    elif form == "pickled":
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    elif form == "half":
        model.half().save_pretrained(folder)
    elif form == "weights":
        torch.save({"model": model.state_dict()}, tmp_path / "w.pt")
        options["weights"] = str(tmp_path / "w.pt")
    task = answers(folder, data, **options)
    late = task.build_late(CPU)
    assert is_late(late)
    again = answers(folder, data, **options)
    whole = again.build_model(CPU)
    check_same(late, whole)
    assert list(task.notes()) == list(again.notes())
    assert task.options() == again.options()
    batch = task.collate(task.dataset().__getitems__([0, 1]))
    with torch.no_grad():
        for one, other in zip(task.forward(late, batch), again.forward(whole, batch), strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])


def test_a_folder_whose_values_the_library_rounds_is_loaded_by_it(
    tiny: Path, data: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"dtype": "float16"}))
    task = answers(tmp_path / "model", data)
    late = task.build_late(CPU)
    assert not any(isinstance(parameter, LateTensor) for parameter in late.parameters())
    check_same(late, answers(tmp_path / "model", data).build_model(CPU))
    assert "each rank builds all of it" in task.notes()[-1]
    assert "several dtypes (torch.float16, torch.float32)" in task.notes()[-1]
