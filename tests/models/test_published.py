"""The weights that torchvision publishes: by name, from the cache, and by path under any name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from dualeval.errors import UsageError
from dualeval.models import classifiers, published
from dualeval.models.sources import WeightsSource
from dualeval.vision_library import torchvision
from tests.published_weights import Publish, cache, publish

__all__ = ["cache", "publish"]  # fixtures

# Imported here, not in the first test that needs it: the import sets an environment variable.
TORCHVISION = torchvision()
# Small, with two kinds of weights: resized to 256, and to 232.
MODEL = "mobilenet_v2"
LONG = "MobileNet_V2_Weights"


@pytest.fixture(scope="module")
def networks() -> list[nn.Module]:
    return [classifiers.build(MODEL, f"random:{seed}", None) for seed in range(2)]


@pytest.fixture
def both(networks: list[nn.Module], publish: Publish, cache: Path) -> list[Path]:
    """The files of both kinds, in the cache."""
    return [
        publish(MODEL, f"IMAGENET1K_V{number}", network, cache)
        for number, network in enumerate(networks, start=1)
    ]


def bias(model: nn.Module) -> list[float]:
    values: list[float] = model.state_dict()["classifier.1.weight"][0].tolist()
    return values


def refused(model: str, weights: str) -> str:
    with pytest.raises(UsageError) as caught:
        classifiers.source_of(model).find_weights(weights)
    return str(caught.value)


def resize_of(source: WeightsSource) -> int:
    found = classifiers.source_of(MODEL).preprocessing(source)
    assert found is not None
    return found.resize


# -- by name -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize(
    ("weights", "number", "resize"),
    [
        ("IMAGENET1K_V1", 0, 256),
        ("IMAGENET1K_V2", 1, 232),
        ("DEFAULT", 1, 232),
        (f"{LONG}.IMAGENET1K_V1", 0, 256),
        (f"{LONG}.DEFAULT", 1, 232),
    ],
)
def test_weights_by_name(networks: list[nn.Module], weights: str, number: int, resize: int) -> None:
    """With the preprocessing that belongs to them: not to others of the same model."""
    source = classifiers.source_of(MODEL).find_weights(weights)
    assert bias(classifiers.build(MODEL, source, None)) == bias(networks[number])
    assert resize_of(source) == resize
    assert (
        classifiers.source_of(MODEL).preprocessing_origin(source)
        == f"those of {LONG}.IMAGENET1K_V{number + 1}"
    )


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("model", "weights", "words"),
    [
        (
            MODEL,
            "IMAGENET1K_V3",
            ["no weights of this name", "IMAGENET1K_V1, IMAGENET1K_V2, DEFAULT", "Near"],
        ),
        (MODEL, "imagenet1k_v2", ["does not exist", "Nearest: IMAGENET1K_V2"]),
        (MODEL, "default", ["does not exist", "Nearest: DEFAULT"]),
        (MODEL, "ResNet50_Weights.IMAGENET1K_V1", ["mobilenet_v2 has no weights of this name"]),
        (MODEL, f"{LONG}.IMAGENET1K_V9", ["no weights of this name", "Nearest: IMAGENET1K_V"]),
        ("fashion-cnn", "IMAGENET1K_V1", ["whose own weights are shipped", "Leave --weights out"]),
        ("package.models:make", "IMAGENET1K_V1", ["package.models:make has no weights of its own"]),
        ("vgg16", "IMAGENET1K_FEATURES", ["without its classifier", "IMAGENET1K_V1, DEFAULT"]),
        (MODEL, "IMAGENET1K_V1", ["is not in the local cache", "--download"]),
    ],
)
def test_a_name_that_is_none(model: str, weights: str, words: list[str]) -> None:
    message = refused(model, weights)
    for word in words:
        assert word in message


def test_a_missing_file_is_no_misspelt_name() -> None:
    assert "torchvision" not in refused(MODEL, "somewhere/best.pt")
    assert "torchvision" not in refused(MODEL, "best.pt")


def test_a_damaged_file_in_the_cache(both: list[Path]) -> None:
    """DEFAULT stands for what was published, and says so in the result."""
    content = bytearray(both[1].read_bytes())
    content[len(content) // 2] ^= 1
    both[1].write_bytes(content)
    for weights in ("DEFAULT", str(both[1])):
        message = refused(MODEL, weights)
        assert f"has the name of torchvision's {LONG}.IMAGENET1K_V2, but not its bytes" in message
        assert "--download" in message
    classifiers.source_of(MODEL).find_weights("IMAGENET1K_V1")


# -- by path -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])
def test_a_published_file_is_known_by_its_bytes(both: list[Path], tmp_path: Path, number: int) -> None:
    copy = shutil.copy(both[number], tmp_path / "renamed.bin")
    for path in (both[number], copy):
        source = classifiers.source_of(MODEL).find_weights(str(path))
        assert str(source.entry) == f"{LONG}.IMAGENET1K_V{number + 1}"
        assert resize_of(source) == (256, 232)[number]


def test_another_file_is_not(both: list[Path], tmp_path: Path) -> None:
    """Also one of the same tensors: it may have been trained further, with another recipe."""
    torch.save(
        torch.load(both[1], weights_only=True), tmp_path / "mine.pt", _use_new_zipfile_serialization=False
    )
    assert classifiers.source_of(MODEL).find_weights(str(tmp_path / "mine.pt")).entry is None


@pytest.mark.parametrize(
    ("model", "entry", "attribute", "value"),
    [
        ("vit_b_16", "IMAGENET1K_V1", "image_size", 224),
        ("vit_b_16", "IMAGENET1K_SWAG_E2E_V1", "image_size", 384),
        ("vit_l_16", "IMAGENET1K_SWAG_LINEAR_V1", "image_size", 224),
        ("inception_v3", "IMAGENET1K_V1", "transform_input", True),
    ],
)
def test_a_network_is_built_for_its_weights(model: str, entry: str, attribute: str, value: object) -> None:
    with torch.device("meta"):
        network = classifiers.source_of(model).create(None, entry=published.entry_named(model, entry))
    assert getattr(network, attribute) == value
