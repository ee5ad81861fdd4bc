"""The task image-classification: what makes a job, what does not fit together, and what a batch becomes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from dualeval.data.small_images import SmallImages
from dualeval.errors import EXIT_USAGE, DualevalError, UsageError
from dualeval.models.sources.fashion_cnn import FashionCNN
from dualeval.tasks.image_classification import (
    EMBEDDED_WEIGHTS,
    FASHION_MEAN,
    FASHION_STD,
    ImageClassification,
)
from dualeval.user_code.origin import own_code
from tests.conftest import working_module
from tests.data.test_idx import idx, write

CPU = torch.device("cpu")

MODELS = """
import torch
from torch import nn


class Fixed(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))
        self.output = output

    def forward(self, images):
        return self.output(images)


def three(): return Fixed(lambda images: images.mean((2, 3)))
def vector(): return Fixed(lambda images: images.mean((1, 2, 3)))
def one_row(): return Fixed(lambda images: images.mean((2, 3))[:1])
def pair(): return Fixed(lambda images: (images.mean((2, 3)), None))


class Keeping(Fixed):
    def forward(self, images):
        self.last = self.output(images)
        return self.last


def keeping(): return Keeping(lambda images: images.mean((2, 3)))
def softmax(): return Fixed(lambda images: images.mean((2, 3)).softmax(1))
def half_softmax(): return Fixed(lambda images: images.mean((2, 3)).softmax(1).half())
def log_softmax(): return Fixed(lambda images: images.mean((2, 3)).log_softmax(1))
def sigmoid(): return Fixed(lambda images: images.mean((2, 3)).sigmoid())


def picky(error):
    def output(images):
        assert error is not AssertionError
        raise error("only 32x32.\\nMore of it.")
    return Fixed(output)


def asserts(): return picky(AssertionError)
def raises_value(): return picky(ValueError)
def raises_runtime(): return picky(RuntimeError)
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working folder with ``shapes``, a module of small models."""
    with working_module(tmp_path, "shapes", MODELS, monkeypatch):
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes with two images each."""
    root = tmp_path_factory.mktemp("folder")
    for target, name in enumerate("abc"):
        (root / name).mkdir()
        for number in range(2):
            Image.new("RGB", (50, 40), (100 * target, 50, number)).save(root / name / f"{number}.png")
    return root


def small(folder: Path, model: str = "squeezenet1_1", **changes: Any) -> ImageClassification:
    """A task on the folder with images of 40 pixels."""
    named = {"preprocessing": "imagenet"} if ":" in model else {}
    preprocessing = {**named, "resize": 40, "crop": 40, **changes.pop("preprocessing", {})}
    arguments = {"weights": "random:0", "data": folder, **changes}
    return ImageClassification(model=model, preprocessing=preprocessing, **arguments)


def refused(task: ImageClassification) -> str:
    with pytest.raises(UsageError) as caught:
        task.build_model(CPU)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value)


def idx_folder(folder: Path, labels: list[int], side: int = 28) -> Path:
    write(folder / "t10k-images-idx3-ubyte.gz", idx(np.zeros((len(labels), side, side), np.uint8)))
    write(folder / "t10k-labels-idx1-ubyte.gz", idx(np.array(labels, np.uint8)))
    return folder


# -- what makes a job ----------------------------------------------------------------------------------


def test_the_task_without_arguments_is_the_embedded_job() -> None:
    task = ImageClassification()
    data = task.dataset()
    assert isinstance(data, SmallImages)
    assert data is task.dataset()
    assert (len(data), data.id(9_999), data.sample_shape) == (10_000, "t10k-09999", (1, 28, 28))
    assert not task.wants_workers
    model = task.build_model(CPU)
    assert isinstance(model, FashionCNN)
    assert not model.training
    batch = task.collate(data.__getitems__(range(500)))
    with torch.inference_mode():
        columns = task.observe(task.forward(model, batch), batch)
    assert (columns["prediction"] == batch["targets"]).float().mean() > 0.9
    assert set(task.rows) <= set(columns)
    assert [metric.name for metric in task.metrics()][:3] == ["loss", "top1", "top5"]
    assert task.fingerprint()["model"] == "fashion-cnn"
    assert task.notes() == [], "of the embedded weights nothing is said"
    ready = data.__getitems__(range(3))
    assert task.collate(ready) is ready


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"data": Path()}, "--data was given without --model"),
        ({"weights": "DEFAULT"}, "--weights was given without --model"),
        ({"model": "resnet18", "data": Path()}, "resnet18 was given without --weights.*random:SEED"),
        ({"preprocessing": {"interpolation": "bicubic"}}, "does not apply to the idx files in"),
    ],
)
def test_arguments_that_make_no_job_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ImageClassification(**arguments)


def test_images_are_scaled_in_float32_whatever_a_factory_sets(folder: Path, models: None) -> None:
    images = torch.arange(3 * 40 * 40).remainder(256).to(torch.uint8).reshape(1, 3, 40, 40)
    found = []
    for dtype in (torch.float32, torch.float64):
        task = small(folder, "shapes:three")
        torch.set_default_dtype(dtype)
        try:
            model = task.build_model(CPU)
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(task.forward(model, {"images": images}))
    assert torch.equal(*found)


# -- what does not fit together ------------------------------------------------------------------------


def test_a_label_beyond_the_classes_of_the_model_is_refused(tmp_path: Path) -> None:
    task = ImageClassification(
        model="fashion-cnn", weights=str(EMBEDDED_WEIGHTS), data=idx_folder(tmp_path, [0, 10, 9])
    )
    message = refused(task)
    assert "t10k-00001: the label is 10" in message
    assert "has 10 classes (labels 0 to 9)" in message
    # The largest one in range.
    ImageClassification(model="fashion-cnn", data=idx_folder(tmp_path, [0, 9])).build_model(CPU)


def test_an_input_size_that_the_model_cannot_take_is_refused(tmp_path: Path, folder: Path) -> None:
    message = refused(ImageClassification(model="fashion-cnn", data=idx_folder(tmp_path, [1], side=32)))
    assert "the model fashion-cnn cannot take images of shape (1, 32, 32)" in message
    message = refused(small(folder, "alexnet"))
    assert "the model alexnet cannot take images of shape (3, 40, 40)" in message
    assert "--resize and --crop" in message


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("asserts", "AssertionError"),
        ("raises_value", "ValueError: only 32x32"),
        ("raises_runtime", "RuntimeError: only 32x32"),
    ],
)
def test_an_error_in_a_models_own_code_is_not_blamed_on_the_size(folder: Path, name: str, said: str) -> None:
    with pytest.raises(DualevalError) as caught:
        small(folder, f"shapes:{name}").build_model(CPU)
    message = str(caught.value)
    assert f"the code of the model shapes:{name} raised {said} (its input: float32 images of" in message
    assert "More of it" not in message
    assert "--resize" not in message
    assert "shapes.py" in own_code(caught.value)


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("vector", "(2,) for 2 images, expected logits of shape (images, classes)"),
        ("one_row", "(1, 3) for 2 images"),
        ("pair", "a tuple of 2 values (Tensor, NoneType) for 2 images"),
        ("softmax", "probabilities (each row lies between 0 and 1 and sums to 1), expected logits"),
        ("half_softmax", "probabilities"),
    ],
    ids=str,
)
def test_outputs_that_are_no_logits_are_refused(folder: Path, name: str, found: str) -> None:
    assert f"returned {found}" in refused(small(folder, f"shapes:{name}"))


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("name", ["log_softmax", "sigmoid", "three"])
def test_logits_of_any_kind_are_taken(folder: Path, name: str) -> None:
    small(folder, f"shapes:{name}", weights="random:0").build_model(CPU)


@pytest.mark.parametrize(
    ("mean", "std"), [((0.5, 0.5), (0.5,)), ((0.5,), (0.5, 0.5)), ((0.5,) * 4, (0.5,) * 3)]
)
def test_mean_and_std_of_another_number_of_channels_are_refused(
    folder: Path, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    message = refused(small(folder, preprocessing={"mean": mean, "std": std}))
    assert f"--mean has {len(mean)} values and --std {len(std)}, expected 3 of each" in message


# -- what a batch becomes ------------------------------------------------------------------------------


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("mean", "std"), [((0.1, 0.2, 0.3), (0.5, 0.25, 1.0)), ((0.5,), (0.5,)), ((0.5,), (0.5, 0.25, 1.0))]
)
def test_channels_are_normalised(folder: Path, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """(pixel / 255 - mean) / std for each channel; the batch itself is untouched."""
    task = small(folder, "shapes:three", preprocessing={"mean": mean, "std": std})
    model = task.build_model(CPU)
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    images[1] = torch.tensor([51, 102, 255], dtype=torch.uint8).view(3, 1, 1)
    before = images.clone()
    # This model's output is each channel's mean.
    found = task.forward(model, {"images": images}).tolist()
    means, stds = (values * 3 if len(values) == 1 else values for values in (mean, std))
    for row, pixels in zip(found, ((0, 0, 0), (0.2, 0.4, 1.0)), strict=True):
        wanted = [(p - m) / s for p, m, s in zip(pixels, means, stds, strict=True)]
        assert row == pytest.approx(wanted, rel=1e-5)
    assert torch.equal(images, before)


def test_the_embedded_means_are_those_of_the_training_set() -> None:
    data = ImageClassification().dataset()
    assert isinstance(data, SmallImages)
    images = data.__getitems__(range(10_000))["images"].double() / 255
    # Of the test set here: close to those of the training set that the constants are.
    assert images.mean() == pytest.approx(FASHION_MEAN, abs=2e-3)
    assert images.std() == pytest.approx(FASHION_STD, abs=2e-3)
    preprocessing = ImageClassification().fingerprint()["preprocessing"]
    assert (preprocessing["mean"], preprocessing["std"]) == ((FASHION_MEAN,), (FASHION_STD,))


# -- checkpoints ---------------------------------------------------------------------------------------


def test_key_and_prefix_choose_the_weights(tmp_path: Path) -> None:
    """Of a model of zeros, and the trained one as its average."""
    path, trained = tmp_path / "w.pt", load_file(EMBEDDED_WEIGHTS)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in trained.items()}
    average = {f"net.{name}": tensor for name, tensor in trained.items()}
    torch.save({"model": zeros, "ema": {"state_dict": average}}, path)
    task = ImageClassification(
        model="fashion-cnn", weights=str(path), weights_key="ema", weights_prefix="net."
    )
    model = task.build_model(CPU)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())
    assert task.loaded_weights is not None
    assert (task.loaded_weights.key, task.loaded_weights.prefix) == ("ema.state_dict", "net.")
    assert task.notes() == [
        f"weights: the state_dict under 'ema.state_dict' of {path}, prefix 'net.' removed"
    ]
    assert task.description()["weights"] == f"{path}, under 'ema.state_dict'"
    used = {name: task.options()[name] for name in ("weights_key", "weights_prefix", "data_fingerprint")}
    assert used == {"weights_key": "ema.state_dict", "weights_prefix": "net.", "data_fingerprint": "content"}


RESNET = {"model": "resnet18", "data": "fashion-mnist"}


@pytest.mark.parametrize(
    ("option", "arguments", "words"),
    [
        ("weights_key", {}, "was given without --weights"),
        ("weights_prefix", {"model": "fashion-cnn"}, "was given without --weights"),
        ("weights_key", {**RESNET, "weights": "DEFAULT"}, "was given with --weights DEFAULT"),
        ("weights_prefix", {**RESNET, "weights": "random:0"}, "was given with --weights random:0"),
    ],
)
def test_key_or_prefix_needs_a_file(option: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} {words}") as caught:
        ImageClassification(**{**arguments, option: "model"})
    assert "Leave it out, or give --weights FILE" in str(caught.value)


@pytest.mark.usefixtures("models")
def test_trying_the_model_leaves_it_as_it_was_built(folder: Path) -> None:
    """What a forward keeps may differ in its last bits between machines; the identity is taken before any."""
    model = small(folder, "shapes:keeping").build_model(CPU)
    assert "last" not in vars(model)
