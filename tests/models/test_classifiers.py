"""Classifiers by name, by factory, with random, published and read weights."""

from __future__ import annotations

import shutil
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dualeval.data.preprocessing import Preprocessing
from dualeval.errors import EXIT_USAGE, UsageError
from dualeval.models import classifiers, published
from dualeval.models.sources.fashion_cnn import FashionCNN
from dualeval.models.sources.source import WeightsSource
from dualeval.options.job import Job
from dualeval.tasks.options.image_classification import ImageClassificationOptions
from dualeval.vision_library import torchvision
from tests.vehicles.published_weights import Publish

TORCHVISION = torchvision()
NAMES: list[str] = TORCHVISION.models.list_models(module=TORCHVISION.models)

FACTORIES = """
from torch import nn


def with_classes(num_classes=5):
    return nn.Linear(4, num_classes)


def with_anything(**options):
    return nn.Linear(4, options["num_classes"])


def without_classes():
    return nn.Linear(4, 7)


def no_module():
    return "linear"


CONSTANT = 3
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working folder that holds package.models; nothing of it stays imported."""
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo/__init__.py").touch()
    (tmp_path / "zoo/models.py").write_text(FACTORIES)
    (tmp_path / "zoo/needs_more.py").write_text("import not_installed_here\n")
    (tmp_path / "zoo/relative.py").write_text("from . import models\n")
    (tmp_path / "netze.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("zoo", "models")]:
        del sys.modules[name]


def is_equal(first: nn.Module, second: nn.Module) -> bool:
    one, other = first.state_dict(), second.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def preprocessing_of(name: str, entry: Any = None) -> Preprocessing:
    found = classifiers.source_of(name).preprocessing(WeightsSource(text="DEFAULT", entry=entry))
    assert found is not None
    return found


def fails(name: str, weights: str = "random:0", num_classes: int | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        classifiers.build(name, weights, num_classes)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value)


# -- names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("resnet81", "resnet18"),
        ("ResNet50", "resnet50"),
        ("vit_b16", "vit_b_16"),
        ("fashion_cnn", "fashion-cnn"),
    ],
)
def test_nearest_names_are_offered(name: str, near: str) -> None:
    message = fails(name)
    assert f"there is no model {name!r}" in message
    assert near in message.partition("Nearest: ")[2].partition(". Give")[0].split(", ")
    assert "package.module:factory" in message


# -- factories -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("factory", "asked", "got"),
    [
        ("with_classes", None, 5),
        ("with_classes", 9, 9),
        ("with_anything", 9, 9),
        ("without_classes", None, 7),
        ("without_classes", 9, 7),
    ],
)
def test_a_factory_is_called(factory: str, asked: int | None, got: int) -> None:
    model: Any = classifiers.build(f"zoo.models:{factory}", "random:0", asked)
    assert model.out_features == got
    assert not model.training


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize("place", ["zoo/models.py", "../{here}/zoo/models.py", "{path}/zoo/models.py"])
def test_a_factory_in_a_file_is_found_by_its_path(place: str) -> None:
    """By its path from anywhere, under one name for the identity of the job."""
    source = classifiers.source_of(place.format(path=Path.cwd(), here=Path.cwd().name) + ":with_classes")
    model: Any = source.create(9)
    assert model.out_features == 9
    assert source.identity == "models:with_classes"
    assert source.sources() == [sys.modules["models"].with_classes, sys.modules["models"]]


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zoo.models:no_module", ["returned a str", "torch.nn.Module"]),
        ("zoo.models:with_clases", ["no callable 'with_clases'", "Nearest: with_classes"]),
        ("zoo.models:CONSTANT", ["no callable 'CONSTANT'"]),
        ("zoo.modules:with_classes", ["there is no module 'zoo.modules' in /"]),
        ("netz:make", ["there is no module 'netz' in /", "Nearest: netze."]),
        ("not_installed_here:make", ["no module 'not_installed_here'", "For a file give its path"]),
        ("zoo.needs_more:make", ["cannot be imported: ", "No module named 'not_installed_here'"]),
        (":make", ["expected package.module:NAME or FILE.py:NAME"]),
        ("zoo.models:", ["is a file of code", "--model zoo.models:with_classes. It has with_classes, "]),
        (".models:make", ["expected package.module:NAME or FILE.py:NAME"]),
        ("needs_more:make", ["There is a file zoo/needs_more.py. Type --model zoo/needs_more.py:make."]),
        ("zoo/relative.py:make", ["it belongs to a package: name it as PACKAGE.MODULE:NAME"]),
        ("zoo/models.py:make", ["zoo/models.py has no callable 'make'. It has with_classes"]),
        ("zoo/models.py", ["is a file of code", "Type: --model zoo/models.py:with_classes."]),
        ("zoo/x.py", ["there is no file zoo/x.py. Expected FILE.py:FUNCTION"]),
        ("zoo/model.py", ["there is no file zoo/model.py. Nearest: models.py."]),
        ("zoo.models", ["Type: --model zoo.models:with_classes."]),
    ],
)
def test_a_factory_that_is_none_is_refused(name: str, words: list[str]) -> None:
    message = fails(name)
    assert message.startswith(f"--model {name}")
    for word in words:
        assert word in message


# -- random weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["random:7", "file"])
def test_the_global_generator_is_neither_used_nor_disturbed(tmp_path: Path, weights: str) -> None:
    if weights == "file":
        weights = str(tmp_path / "w.pt")
        torch.save(FashionCNN().state_dict(), weights)
    built = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = torch.rand(3)
        torch.manual_seed(seed)
        built.append(classifiers.build("fashion-cnn", weights, None))
        assert torch.equal(torch.rand(3), expected)
    assert is_equal(*built)


@pytest.mark.parametrize("weights", ["random:", "random:x", "random:-1", "random:1.5", f"random:{2**64}"])
def test_a_seed_is_a_whole_number(weights: str) -> None:
    message = fails("fashion-cnn", weights)
    assert f"--weights {weights}: expected random:SEED" in message
    assert "random:0" in message


# -- default weights -----------------------------------------------------------------------------------


def cached_name(name: str) -> str:
    return str(TORCHVISION.models.get_model_weights(name).DEFAULT.url.rpartition("/")[2])


@pytest.mark.parametrize(
    "name", ["googlenet", "inception_v3", "vit_b_16", "vit_h_14", "maxvit_t", "resnet18"]
)
def test_default_weights_are_of_the_network_that_is_built(name: str) -> None:
    """In number of parameters; vit_h_14's are for larger images. On no device, so nothing is drawn."""
    with torch.device("meta"):
        entry = TORCHVISION.models.get_model_weights(name).DEFAULT
        model = classifiers.source_of(name).create(None, entry=entry)
    # torchvision drops these heads after loading, and counts without them.
    heads = ("aux1.", "aux2.") if name == "googlenet" else ()
    count = sum(p.numel() for n, p in model.named_parameters() if not n.startswith(heads))
    assert count == TORCHVISION.models.get_model_weights(name).DEFAULT.meta["num_params"]


def test_old_names_in_densenets_files_are_read(tmp_path: Path) -> None:
    """The published files say denselayer1.norm.1.weight; torchvision renames them on the way."""
    wanted = classifiers.build("densenet121", "random:1", 2)
    old: OrderedDict[str, Tensor] = OrderedDict()
    for name, tensor in wanted.state_dict().items():
        for layer in ("norm", "conv"):
            for number in "12":
                if "denselayer" in name:
                    name = name.replace(f".{layer}{number}.", f".{layer}.{number}.")
        old[name] = tensor
    assert "features.denseblock1.denselayer1.norm.1.weight" in old
    torch.save(old, tmp_path / "w.pth")
    assert is_equal(classifiers.build("densenet121", str(tmp_path / "w.pth"), 2), wanted)


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("googlenet", ("aux1.", "aux2.")),
        pytest.param("inception_v3", ("AuxLogits.",), marks=pytest.mark.long),
    ],
)
def test_what_no_tensor_shows_is_asked_for_and_heads_are_those_of_the_file(
    name: str, heads: tuple[str, ...], tmp_path: Path
) -> None:
    """torchvision's own constructor changes an argument of these where they begin with published weights."""
    state = classifiers.build(name, "random:1", 2).state_dict()
    bare = {key: tensor for key, tensor in state.items() if not key.startswith(heads)}
    torch.save(state, tmp_path / "w.pt")
    torch.save(bare, tmp_path / "bare.pt")
    with pytest.raises(
        UsageError, match=r"type --model-arg transform_input=True; else --model-arg transform_"
    ):
        classifiers.build(name, str(tmp_path / "w.pt"), 2)
    for said in (True, False):
        given = {"transform_input": said}
        built = classifiers.build(name, str(tmp_path / "w.pt"), 2, arguments=given)
        assert built.transform_input == said
        assert [*built.state_dict()] == [*state]
    assert [*classifiers.build(name, str(tmp_path / "bare.pt"), 2, arguments=given).state_dict()] == [*bare]
    given["aux_logits"] = False
    assert [*classifiers.build(name, str(tmp_path / "w.pt"), 2, arguments=given).state_dict()] == [*bare]


def test_mnasnet_needs_to_know_its_version(tmp_path: Path) -> None:
    """Which torch.save keeps, as tests/models/test_late_building.py tries it."""
    wanted = classifiers.build("mnasnet0_5", "random:1", 2)
    save_file(wanted.state_dict(), tmp_path / "w.safetensors")
    assert is_equal(classifiers.build("mnasnet0_5", str(tmp_path / "w.safetensors"), 2), wanted)


def test_nothing_is_downloaded_where_it_is_cached(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *_, **__: pytest.fail("downloaded"))
    (cache / cached_name("resnet18")).touch()
    published.download("resnet18", "DEFAULT")
    published.download("resnet18", "IMAGENET1K_V1")
    published.download("fashion-cnn", "DEFAULT")
    assert [path.name for path in cache.iterdir()] == [cached_name("resnet18")]


def test_nothing_is_downloaded_for_a_task_that_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *_, **__: pytest.fail("downloaded"))
    options = Job.of(model="resnet18", weights="DEFAULT", download=True).options
    assert isinstance(options, ImageClassificationOptions)
    options.fetch()
    with pytest.raises(UsageError, match="without --data"):
        options.make()


# -- preprocessing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_preprocessing_is_that_of_the_weights(name: str) -> None:
    entries = list(TORCHVISION.models.get_model_weights(name))
    for entry in entries:
        found = preprocessing_of(name, entry)
        preset = entry.transforms()
        assert [found.resize, found.crop] == [*preset.resize_size, *preset.crop_size]
        assert found.interpolation == preset.interpolation.value
        assert (tuple(found.mean), tuple(found.std)) == (tuple(preset.mean), tuple(preset.std))
    assert preprocessing_of(name) == preprocessing_of(name, entries[0])


@pytest.mark.parametrize("name", ["fashion-cnn", "zoo.models:make"])
def test_a_model_without_published_weights_has_no_preprocessing(name: str) -> None:
    """It was ImageNet's."""
    assert classifiers.source_of(name).preprocessing() is None


# -- the weights that torchvision publishes: by name, from the cache, and by path under any name ---------


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
def test_weights_by_name_have_their_own_preprocessing(
    networks: list[nn.Module], weights: str, number: int, resize: int
) -> None:
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
        (MODEL, "IMAGENET1K_V3", ["no weights of this name", "K_V1, IMAGENET1K_V2, DEFAULT", "Near"]),
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
def test_a_name_of_weights_that_is_none_is_refused(model: str, weights: str, words: list[str]) -> None:
    message = refused(model, weights)
    for word in words:
        assert word in message


def test_a_missing_file_is_no_misspelt_name() -> None:
    assert "torchvision" not in refused(MODEL, "somewhere/best.pt")
    assert "torchvision" not in refused(MODEL, "best.pt")


def test_a_damaged_file_in_the_cache_is_refused(both: list[Path]) -> None:
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


def test_another_file_of_the_same_tensors_is_no_published_one(both: list[Path], tmp_path: Path) -> None:
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
