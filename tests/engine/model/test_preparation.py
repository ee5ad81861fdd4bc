"""The model that computes, made from the model as it was built: precisions, layouts, folding, compiling."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualeval
from dualeval.engine.model import compute
from dualeval.engine.model.layouts import converter
from dualeval.engine.model.preparation import check_model, prepare
from dualeval.engine.values.options import RunOptions
from dualeval.errors import UsageError
from dualeval.options.job import Job
from tests.conftest import Launch

CPU = torch.device("cpu")
IMAGES = 24
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


PICTURES = [
    (torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(index)), index % 5)
    for index in range(IMAGES)
]


class Small(nn.Module):
    """A convolutional network; ``by_view`` takes its dimensions together as no channels-last tensor can."""

    def __init__(self, *, by_view: bool = False) -> None:
        super().__init__()
        self.by_view = by_view
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.pool, self.last = nn.MaxPool2d(2), nn.Linear(6 * 16, 5)
        self.register_buffer("steps", torch.tensor(3))

    def encode(self, images: Tensor) -> Tensor:
        found: Tensor = self.pool(functional.relu(self.norm(self.first(images))))
        return found

    def forward(self, images: Tensor) -> Tensor:
        found = self.encode(images)
        logits: Tensor = self.last(found.view(len(found), -1) if self.by_view else found.flatten(1))
        return logits


def made(make: Any = Small, **options: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make(**options).eval()
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):
                for tensor in (part.running_mean, part.running_var, part.weight, part.bias):
                    assert tensor is not None
                    tensor.data = torch.rand_like(tensor) + 0.5
        return model


def images(count: int = 4) -> Tensor:
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def outputs(model: nn.Module, *inputs: Any, **named: Any) -> Any:
    with torch.inference_mode():
        return model(*inputs, **named)


def prepared(model: nn.Module, *, owned: bool = False, **options: Any) -> nn.Module:
    return prepare(model, RunOptions(**options), owned=owned)


def evaluate(model: nn.Module, **options: Any) -> dualeval.Result:
    return dualeval.evaluate(model=model, data=PICTURES, batch_size=8, **options)


# -- precisions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("owned", [False, True])
def test_a_cast_model_has_the_numbers_of_a_cast_by_hand(precision: str, owned: bool) -> None:
    model = prepared(made(), precision=precision, owned=owned)
    assert {tensor.dtype for tensor in model.parameters()} == {HALF[precision]}
    assert {name: tensor.dtype for name, tensor in model.named_buffers()} == {
        "norm.running_mean": HALF[precision],
        "norm.running_var": HALF[precision],
        "norm.num_batches_tracked": torch.int64,
        "steps": torch.int64,
    }
    by_hand = made().to(HALF[precision], memory_format=torch.channels_last)
    given = images().to(HALF[precision]).contiguous(memory_format=torch.channels_last)
    found = outputs(model, images())
    assert found.dtype == torch.float32
    assert torch.equal(found, outputs(by_hand, given).float())


def test_batch_norms_are_kept_in_fp32() -> None:
    model = prepared(made(), precision="bf16", keep_batchnorm_fp32=True)
    dtypes = {name: tensor.dtype for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {
        *("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var")
    }
    assert outputs(model, images()).dtype == torch.float32
    whole = prepared(made(), precision="bf16")
    assert not torch.equal(outputs(model, images()), outputs(whole, images()))


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclasses.dataclass
class Given:
    values: Tensor
    numbers: Tensor


class Nested(nn.Module):
    """Takes and gives tensors in nests; says what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, given: Given, *, more: Mapping[str, Any]) -> dict[str, Any]:
        assert given.values.dtype == more["list"][0].dtype == self.layer.weight.dtype
        assert (given.numbers.dtype, more["text"]) == (torch.int64, "text")
        found = self.layer(given.values)
        return {"pair": Pair(found, given.numbers), "given": Given(found, given.numbers), "none": None}


def test_nested_inputs_and_outputs_are_cast_in_their_own_types() -> None:
    model = prepared(Nested().eval(), precision="bf16")
    given = Given(torch.rand(4, 3), torch.arange(4))
    found = outputs(model, given, more={"list": [torch.rand(2).double()], "text": "text"})
    assert (type(found["pair"]), type(found["given"]), found["none"]) == (Pair, Given, None)
    assert found["pair"].first.dtype == found["given"].values.dtype == torch.float32
    assert found["pair"].second is given.numbers
    assert given.values.dtype == torch.float32, "the batch is the caller's"


def test_recurrent_layers_are_cast() -> None:
    layer: Any = nn.LSTM(3, 4).eval()
    held: list[Any] = list(layer._flat_weights)
    found, _ = outputs(prepared(layer, precision="bf16"), torch.rand(5, 2, 3))
    assert found.dtype == torch.float32
    assert {weight.dtype for weight in layer._flat_weights} == {torch.bfloat16}
    assert {weight.dtype for weight in held} == {torch.float32}, "another list"


def test_tied_weights_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).eval()
    model[1].weight = model[0].weight
    for owned in (False, True):
        tied = prepared(copy.deepcopy(model), precision="bf16", owned=owned)
        assert tied.get_parameter("0.weight") is tied.get_parameter("1.weight")


def test_a_part_that_is_called_by_itself_says_why_it_fails() -> None:
    def forward(model: Any, batch: Any) -> Tensor:
        found: Tensor = model.last(model.encode(batch[0]).flatten(1))
        return found

    assert evaluate(made(), forward=forward).samples["total"] == IMAGES
    with pytest.raises(UsageError, match=r"--precision bf16: .*model\.encode\(x\).*amp-bf16"):
        evaluate(made(), forward=forward, precision="bf16")


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (nn.Identity, {"precision": "fp16"}, "the model has no floating parameters"),
        (
            lambda: nn.Linear(3, 2),
            {"precision": "fp16", "keep_batchnorm_fp32": True},
            "the model has no batch norm",
        ),
    ],
)
def test_options_without_a_meaning_for_the_model_are_refused(
    make: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        check_model(make(), RunOptions(**options))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "amp-fp16", "amp-bf16"])
def test_batch_norms_are_kept_where_something_is_cast(precision: str) -> None:
    with pytest.raises(UsageError, match=f"keep_batchnorm_fp32: with precision {precision} nothing is cast"):
        RunOptions(precision=precision, keep_batchnorm_fp32=True)
    with pytest.raises(UsageError, match="--keep-batchnorm-fp32: with --precision"):
        Job.of(precision=precision, keep_batchnorm_fp32=True)
    with pytest.raises(UsageError, match="keep_batchnorm_fp32: optimize fold"):
        RunOptions(precision="bf16", keep_batchnorm_fp32=True, optimize="fold")


# -- folding -----------------------------------------------------------------------------------------------


def fused_by_torch(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        # Of torch's own import.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.fx.experimental.optimization import fuse
    return fuse(model)


@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
def test_folded_batch_norms_have_the_numbers_of_torchs_own_fusing(layout: str) -> None:
    model = made()
    before = {id(tensor): tensor.clone() for tensor in model.parameters()}
    folded: Any = prepared(model, optimize="fold", layout=layout)
    assert isinstance(folded.norm, nn.Identity)
    by_torch = fused_by_torch(made())
    convert = converter(layout)
    by_torch.first.weight.data = convert(by_torch.first.weight.data)
    assert torch.equal(outputs(folded, images()), outputs(by_torch, convert(images())))
    assert torch.allclose(outputs(folded, images()), outputs(made(), images()), atol=1e-5)
    assert folded.encode(images()).shape == (4, 6, 4, 4), "methods stay"
    assert all(
        torch.equal(before[id(tensor)], tensor) for tensor in made().parameters() if id(tensor) in before
    )


def test_what_follows_no_convolution_stays() -> None:
    class Shared(nn.Module):
        """A convolution whose outputs are used twice, one that is called twice, and a norm by itself."""

        def __init__(self) -> None:
            super().__init__()
            self.twice, self.shared = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
            self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(4))

        def forward(self, images: Tensor) -> Tensor:
            once = self.twice(images)
            again = self.norms[1](self.shared(self.norms[0](once) + once))
            found: Tensor = self.norms[3](self.norms[2](self.shared(again)))
            return found

    notes: list[str] = []
    model = made(Shared)
    found = prepare(copy.deepcopy(model), RunOptions(optimize="fold"), note=notes.append)
    assert torch.equal(outputs(found, images()), outputs(prepared(model), images()))
    [sentence] = notes
    assert sentence.startswith("--optimize fold: nothing was folded, because no batch norm directly follows")


class Folding(nn.Module):
    """A convolution, and a batch norm behind it that each class below uses in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.other = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)


class LeftOut(Folding):
    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        found = self.first(images)
        return self.norm(found) if mask is not None else self.other(found)  # type: ignore[no-any-return]


class Penalised(Folding):
    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.norm(self.first(images))
        return found + self.first.weight.sum() + self.norm.running_mean.sum()  # type: ignore[union-attr]


class Training(Folding):
    def train(self, mode: bool = True) -> Training:
        super().train(mode)
        self.norm.train(True)
        return self

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.first(images))  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [LeftOut, Penalised, Training])
def test_a_norm_stays_where_folding_would_change_a_number(make: Any) -> None:
    model = made(make)
    found = prepare(copy.deepcopy(model), RunOptions(optimize="fold"))
    assert isinstance(found.norm, nn.BatchNorm2d)
    assert torch.equal(outputs(found, images()), outputs(prepared(model), images()))


@pytest.mark.parametrize("count", [1, IMAGES])
def test_a_forward_of_ones_own_that_takes_a_folded_part_alone_is_refused(count: int) -> None:
    def of_convolution(model: Any, batch: Any) -> Any:
        return model.first(batch[0]).mean((2, 3))

    def of_something_else(model: Any, batch: Any) -> Any:
        return model.norm(2 * model.first(batch[0])).mean((2, 3))

    def encoded(model: Any, batch: Any) -> Any:
        return model.encode(batch[0]).mean((2, 3))

    for forward in (of_convolution, of_something_else):
        task = dualeval.ModelTask(model=made(), data=PICTURES[:count], forward=forward)
        with pytest.raises(UsageError, match=r"--optimize fold: first and norm are one operation now"):
            dualeval.evaluate(task, optimize="fold", batch_size=8)
    # Both are one part of the model, which does what it did.
    task = dualeval.ModelTask(model=made(), data=PICTURES, forward=encoded)
    folded, plain = (dualeval.evaluate(task, optimize=each, batch_size=8) for each in ("fold", None))
    assert folded.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-5)


def test_a_forward_of_the_object_is_not_the_one_that_is_traced() -> None:
    model = made()
    model.forward = lambda images: model.last(model.encode(images).flatten(1) * 2)
    with pytest.raises(UsageError, match=r"forward of this Small is an attribute of the object"):
        prepared(model, optimize="fold")


def test_folding_a_model_that_cannot_be_traced_is_refused() -> None:
    class Branching(Small):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images if images.sum() > 0 else -images)

    with pytest.raises(
        UsageError, match=r"--optimize fold: torch\.fx cannot follow the forward of Branching"
    ):
        prepared(made(Branching), optimize="fold")


# -- evaluations -------------------------------------------------------------------------------------------

PREPARATIONS: list[dict[str, Any]] = [
    {},
    {"layout": "contiguous"},
    {"precision": "fp16"},
    {"precision": "bf16", "keep_batchnorm_fp32": True},
    {"optimize": "fold"},
    {"optimize": "fold", "precision": "bf16"},
]


@pytest.mark.parametrize("options", PREPARATIONS, ids=str)
def test_a_guests_model_is_afterwards_as_it_was(options: dict[str, Any]) -> None:
    model = made().to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(images()).square().sum()
    held = {
        name: (id(tensor), tensor.data_ptr(), tensor.stride(), tensor.dtype, tensor.clone())
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    attributes = {name: dict(vars(part)) for name, part in model.named_modules()}
    digest = evaluate(model, **options).metrics_digest
    assert attributes == {name: vars(part) for name, part in model.named_modules()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        *facts, values = held[name]
        assert [id(tensor), tensor.data_ptr(), tensor.stride(), tensor.dtype] == facts, name
        assert torch.equal(tensor, values), name
    # The model of a checkpoint is contiguous.
    saved = made(Small)
    saved.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert evaluate(saved, **options).metrics_digest == digest
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("options", PREPARATIONS, ids=str)
def test_threads_change_no_bit(options: dict[str, Any]) -> None:
    before = torch.get_num_threads()
    try:
        digests = set()
        for threads in (1, 3):
            torch.set_num_threads(threads)
            model = prepared(made(), **options)
            task = dualeval.ModelTask(model=model, data=PICTURES)
            assert compute.usable_threads(task, model, CPU, threads, 3) == threads
            digests.add(evaluate(made(), **options).metrics_digest)
    finally:
        torch.set_num_threads(before)
    assert len(digests) == 1


def test_each_preparation_is_a_job_of_its_own(tmp_path: Path) -> None:
    results = [
        evaluate(made(), out=tmp_path / str(number), **options) for number, options in enumerate(PREPARATIONS)
    ]
    assert len({result.fingerprint for result in results}) == len(PREPARATIONS)
    assert {json.dumps(result.weights) for result in results} == {json.dumps(results[0].weights)}
    for number, options in enumerate(PREPARATIONS):
        again = evaluate(made(), out=tmp_path / str(number), **options)
        assert (again.earlier, again.replay) == (True, "same bits")


RUN = (sys.executable, "-m", "dualeval", "run", "--limit", "640", "--no-progress")


def digest_of(out: Path) -> tuple[str, str]:
    result = json.loads((out / "result.json").read_text())
    return result["metrics_digest"], result["job"]["layout"]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("--precision fp16", (1, 2, 3)),
        ("--precision bf16 --keep-batchnorm-fp32", (1, 2, 3)),
        ("--optimize fold", (1, 2, 3)),
        ("--optimize compile --limit 200", (1, 2)),
    ],
)
def test_ranks_change_no_bit(launch: Launch, tmp_path: Path, words: str, sizes: tuple[int, ...]) -> None:
    for size in sizes:
        command = [*RUN, *words.split(), "--nproc", str(size)]
        launch([*command, "--out", tmp_path / str(size)], timeout=300).ok()
    assert len({digest_of(tmp_path / str(size)) for size in sizes}) == 1


def test_without_a_compiler_nothing_begins(launch: Launch, tmp_path: Path) -> None:
    words: list[str | Path] = ["--optimize", "compile", "--out", tmp_path / "out"]
    done = launch([*RUN, *words], variables={"PATH": str(tmp_path), "CXX": "nosuch-compiler"}, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "--optimize compile: torch.compile failed: " in done.stderr
    assert "It needs a C++ compiler" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out/result.json").exists()
