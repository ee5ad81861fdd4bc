"""A model of one's own is evaluated with the preprocessing that somebody has named, and with no other."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch import nn

import dualeval
from dualeval.cli.run import run as command
from dualeval.data.preprocessing import Preprocessing
from dualeval.errors import UsageError
from dualeval.models import classifiers
from dualeval.tasks.image_classification import ImageClassification
from tests.tasks.conftest import message_of
from tests.tasks.test_image_classification import idx_folder

SIDE = 64
NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.head = nn.Linear(3, num_classes)

    def forward(self, images):
        return self.head(images.mean((2, 3)))

def make(num_classes):
    return Net(num_classes)
"""
FUNCTIONS = """
import numpy as np
import torch

def scaled(picture):
    assert picture.mode == "RGB"
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255

def halves(picture):
    return scaled(picture)[:, ::2, ::2]

def nothing(picture):
    return picture.size

def pixels(picture):
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)

def last(picture):
    return scaled(picture).permute(1, 2, 0)
"""
SIZE = {"resize": 48, "crop": 32, "mean": (0.25,), "std": (0.5,)}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in: pictures of 64 pixels of two classes, ``nets.py`` and ``steps.py``."""
    rng = np.random.default_rng(0)
    for number in range(8):
        folder = tmp_path / "val" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "steps.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("nets", "steps"):
        # So that what a test imports is taken out again.
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        del sys.modules[name]
    return tmp_path


def made(model: str = "nets:make", **options: Any) -> ImageClassification:
    given = {"weights": "random:0", "data": Path("val"), "metrics": ["loss", "top1"], **options}
    return ImageClassification(model=model, **given)


def digest(task: ImageClassification, workers: int = 0) -> str:
    return dualeval.evaluate(task, workers=workers, batch_size=3, device="cpu").metrics_digest


def invoked(*words: str, model: str = "nets:make") -> Any:
    given = ["--model", model, "--data", "val", "--no-progress", "--workers", "0", "--device", "cpu"]
    given += [] if model.endswith(".pt") else ["--weights", "random:0"]
    return CliRunner().invoke(command, [*given, "--launcher", "none", "--dry-run", *words])


def carrying(monkeypatch: pytest.MonkeyPatch, name: str, value: Any, *, on_factory: bool = False) -> str:
    """The name of a factory which has an attribute, or whose models have it."""
    import nets  # type: ignore[import-not-found]

    def carries(num_classes: int) -> nn.Module:
        model: nn.Module = nets.make(num_classes)
        if not on_factory:
            setattr(model, name, value)
        return model

    if on_factory:
        setattr(carries, name, value)
    monkeypatch.setattr(nets, "carries", carries, raising=False)
    return "nets:carries"


# -- refused, and what to type -----------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_a_factory_is_refused_and_each_advice_can_be_typed() -> None:
    """It was resized to 256, cut to 224 and normalised by ImageNet's values."""
    message = message_of(invoked())
    assert "(missing: --resize, --crop, --mean, --std)" in message
    advice = re.findall(r"--preprocessing (?:none|imagenet|FILE\.py:FUNCTION)|--resize \d[^.]*", message)
    assert [words.split()[-1] for words in advice] == ["none", "imagenet", "FILE.py:FUNCTION", "1"]
    for words in advice:
        done = invoked(*words.replace("FILE.py:FUNCTION", "steps.py:scaled").split())
        assert done.exit_code == 0, done.output


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["--resize", "64"], "--crop, --mean, --std"),
        (["--mean", "0", "--std", "1"], "--resize, --crop"),
        (["--preprocessing", "none", "--resize", "64"], "--crop"),
        (["--preprocessing", "none", "--interpolation", "bicubic"], "--resize and --crop"),
    ],
)
def test_missing_preprocessing_options_are_named(words: list[str], missing: str) -> None:
    of_none = f"--preprocessing none leaves pictures in their own size. Give {missing}, too"
    wanted = of_none if "none" in words else f"(missing: {missing})"
    assert wanted in message_of(invoked(*words))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["imagnet"], "found 'imagnet', expected none, imagenet or FILE.py:FUNCTION"),
        (["steps.py:scale"], "steps.py has no 'scale'. Nearest: scaled"),
        (["other.py:f"], "--preprocessing other.py:f: there is no file"),
        (["steps.py:torch"], "expected none, imagenet or FILE.py:FUNCTION"),
        (["steps.py:scaled", "--crop", "3"], "--crop: the function scaled does it all. Leave --crop out"),
        (["steps.py:nothing"], "nothing returned a tuple, expected a torch.Tensor of shape (channels, "),
        (
            ["steps.py:pixels"],
            "pixels returned uint8: return floats as the model takes them, e.g. .float() / 255",
        ),
        (
            ["steps.py:last"],
            f"a tensor of shape ({SIDE}, {SIDE}, 3), expected a torch.Tensor of shape (channels, ",
        ),
    ],
)
def test_a_wrong_preprocessing_is_refused(words: list[str], said: str) -> None:
    assert said in message_of(invoked("--preprocessing", *words))


@pytest.mark.parametrize("workers", [0, 1])
def test_pictures_of_several_sizes_are_refused_without_a_resize(here: Path, workers: int) -> None:
    Image.new("RGB", (60, 50)).save(here / "val/b/9.png")
    with pytest.raises(UsageError, match=r"the first one gives \(3, 64, 64\), another one \(3, 50, 60\)"):
        digest(made(preprocessing={"preprocessing": "none"}), workers)
    digest(made(preprocessing={"preprocessing": "none", "resize": 64, "crop": 64}))


# -- named -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_four_ways_to_leave_pictures_as_they_are_have_one_digest() -> None:
    same = [
        {"preprocessing": "none"},
        {"preprocessing": "none", "resize": SIDE, "crop": SIDE},
        {"resize": SIDE, "crop": SIDE, "mean": (0.0,), "std": (1.0,)},
        {"preprocessing": "steps.py:scaled"},
    ]
    found = [digest(made(preprocessing=asked)) for asked in same]
    # In a reading process, too.
    found.append(digest(made(preprocessing=same[-1]), workers=1))
    assert len({*found}) == 1
    others = [{"preprocessing": "imagenet"}, {"preprocessing": "none", "mean": (0.5,)}]
    assert len({found[0], *(digest(made(preprocessing=asked)) for asked in others)}) == 3
    lines = [made(preprocessing=asked).description()["preprocessing"] for asked in (same[0], others[1])]
    assert lines == [
        "64 x 64 as stored, mean 0.0, std 1.0 (--preprocessing none)",
        "64 x 64 as stored, mean 0.5, std 1.0 (mean given; the rest: --preprocessing none)",
    ]


@pytest.mark.usefixtures("here")
def test_preprocessing_imagenet_has_the_default_values() -> None:
    task = made(preprocessing={"preprocessing": "imagenet", "crop": 200})
    wanted = json.loads(json.dumps(Preprocessing(crop=200).to_json()))
    assert json.loads(json.dumps(task.fingerprint()["preprocessing"])) == wanted
    assert task.description()["preprocessing"].endswith("(crop given; the rest: --preprocessing imagenet)")


def test_the_source_of_a_function_is_in_the_identity(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = made(preprocessing={"preprocessing": "steps.py:scaled"})
    dualeval.evaluate(task, out=here / "out", workers=0, device="cpu")
    monkeypatch.delitem(sys.modules, "steps")
    (here / "steps.py").write_text(FUNCTIONS.replace("/ 255", "/ 256"))
    task = made(preprocessing={"preprocessing": "steps.py:scaled"})
    with pytest.raises(UsageError, match=r"job\.source\.steps"):
        dualeval.evaluate(task, out=here / "out", workers=0, device="cpu")
    with pytest.raises(UsageError, match=r"preprocessing\.function: scaled there, halves now"):
        task = made(preprocessing={"preprocessing": "steps.py:halves"})
        dualeval.evaluate(task, out=here / "out", workers=0, device="cpu")


def test_a_path_in_a_job_file_is_relative_to_the_job_file(here: Path) -> None:
    job = 'model = "nets:make"\nweights = "random:0"\ndata = "val"\npreprocessing = "steps.py:scaled"\n'
    (here / "job.toml").write_text(job)
    (here / "elsewhere").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(here)
        patch.chdir(here / "elsewhere")
        done = CliRunner().invoke(command, ["--config", "../job.toml", "--launcher", "none", "--dry-run"])
    assert done.exit_code == 0, done.output
    assert '"function": "scaled"' in done.stdout


# -- carried by the model ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("on_factory", [False, True])
@pytest.mark.parametrize("as_list", [False, True])
def test_preprocessing_that_a_model_carries_is_the_same_as_by_flags(
    monkeypatch: pytest.MonkeyPatch, on_factory: bool, as_list: bool
) -> None:
    value = {
        name: [*given] if as_list and isinstance(given, tuple) else given for name, given in SIZE.items()
    }
    model = carrying(monkeypatch, "preprocessing", value, on_factory=on_factory)
    task, plain = made(model), made(preprocessing=SIZE)
    assert task.fingerprint()["preprocessing"] == plain.fingerprint()["preprocessing"]
    assert digest(task) == digest(plain)
    origin = "nets:carries.preprocessing" if on_factory else "model.preprocessing"
    assert task.description()["preprocessing"].endswith(f"({origin})")
    assert made(model, preprocessing={"crop": 40}).fingerprint()["preprocessing"]["crop"] == 40


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "values", [{"resize": 64, "size": 64}, {"resize": 64, "crop": 64, "mean": None, "std": None}]
)
def test_an_incomplete_dict_is_refused(monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]) -> None:
    model = carrying(monkeypatch, "preprocessing", values)
    with pytest.raises(
        UsageError, match=r"model\.preprocessing: found .* a dict with resize, crop, mean, std"
    ):
        made(model)
    assert made(model, preprocessing=SIZE)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["pretrained_cfg", "default_cfg"])
def test_timms_configuration_gives_the_preprocessing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    config = {"input_size": (3, 32, 32), "crop_pct": 0.5, "crop_mode": "center", "interpolation": "bicubic"}
    model = carrying(monkeypatch, name, {**config, "mean": (0.5,) * 3, "std": (0.25,) * 3, "url": ""})
    assert made(model).description()["preprocessing"] == (
        f"64 bicubic, crop 32, mean 0.5, std 0.25 (model.{name})"
    )
    with pytest.raises(UsageError, match=r"nothing says how its pictures are prepared.*In Python these are"):
        made(carrying(monkeypatch, name, config))


def test_a_processors_file_beside_the_weights_gives_the_preprocessing(here: Path) -> None:
    from nets import Net
    from transformers import ViTImageProcessor

    ViTImageProcessor(size={"height": 40, "width": 40}).save_pretrained(here / "ckpt")
    torch.save(Net(2).state_dict(), here / "ckpt/net.pt")
    line = made(weights="ckpt/net.pt").description()["preprocessing"]
    assert line == (
        "exactly 40 x 40 bilinear, crop 40, mean 0.5, std 0.5 (preprocessor_config.json beside the weights)"
    )
    (here / "ckpt/preprocessor_config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"preprocessor_config\.json cannot be read"):
        made(weights="ckpt/net.pt")


def test_small_images_ask_for_mean_and_std(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their own size they ask for mean and std, as they did; what a model carries answers it."""
    data = idx_folder(here, [0, 1, 1])
    with pytest.raises(
        UsageError, match=r"need --mean and --std: .* --preprocessing none stands for 0 and 1"
    ):
        made(data=data, num_classes=2)
    none = made(data=data, num_classes=2, preprocessing={"preprocessing": "none"})
    assert none.fingerprint()["preprocessing"] == {
        **dict.fromkeys(("resize", "crop", "interpolation", "channels")),
        "mean": (0.0,),
        "std": (1.0,),
    }
    resized = made(carrying(monkeypatch, "preprocessing", SIZE), data=data, num_classes=2)
    assert resized.dataset().sample_shape == (3, 32, 32)
    import steps  # type: ignore[import-not-found]

    own = made(carrying(monkeypatch, "preprocessing", steps.halves), data=data, num_classes=2)
    [(image, _)] = own.dataset().__getitems__([1])
    assert image.shape == own.dataset().sample_shape == (3, 14, 14)
    digest(own)


# -- published for the name, for other weights ---------------------------------------------------------------


def test_own_weights_of_a_torchvision_name_have_a_warning_in_the_result(here: Path) -> None:
    torch.manual_seed(0)
    torch.save(classifiers.create("squeezenet1_1", 2).state_dict(), "own.pt")
    named = {"resize": 40, "crop": 40}

    def warnings(weights: str, **given: Any) -> str:
        task = made("squeezenet1_1", weights=weights, preprocessing={**named, **given})
        dualeval.evaluate(task, out=here / f"out-{weights}-{len(given)}", workers=0, device="cpu")
        result = json.loads((here / f"out-{weights}-{len(given)}/result.json").read_text())
        return "\n".join(result["warnings"])

    said = warnings("own.pt")
    assert "the preprocessing is the default of squeezenet1_1 (40 bilinear, crop 40, ImageNet mean" in said
    assert "nothing says what own.pt was trained with" in said
    assert "give --resize, --crop, --mean and --std" in said
    for weights, given in (("own.pt", {"mean": (0.5,), "std": (0.5,)}), ("random:0", {})):
        assert "preprocessing" not in warnings(weights, **given)
    assert "preprocessing" not in warnings("own.pt", preprocessing="imagenet", mean=(0.5,), std=(0.5,))
