"""Preprocessing of timm and transformers on real pictures: the same bits as these libraries' own code."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from dualeval.data.pictures import read_pixels
from dualeval.data.preprocessing import Preprocessing
from dualeval.errors import UsageError
from dualeval.models.sources import timm_models
from dualeval.models.sources.processors import preprocessing_of_folder
from tests.vehicles.assets import package_folder

timm_data: Any = importlib.import_module("timm.data")

# A few shapes in the fast form: wide, tall, small.
PICTURES = sorted((package_folder("foolbox") / "data").glob("imagenet_*.jpg"))
FEW = [
    pytest.param(path, marks=[] if number < 3 else pytest.mark.long) for number, path in enumerate(PICTURES)
]


def ours(path: Path, wanted: Preprocessing) -> Tensor:
    """What a model is given."""
    with path.open("rb") as file:
        pixels = read_pixels(file, wanted)
    mean, std = (
        torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (wanted.mean, wanted.std)
    )
    return pixels.float().div_(255).sub_(mean).div_(std)


def picture(path: Path) -> Image.Image:
    with Image.open(path) as found:
        return found.convert("RGB")


CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "center": {"input_size": (3, 224, 224), "crop_pct": 0.95, "interpolation": "bicubic"},
    "whole": {"input_size": (3, 64, 64), "crop_pct": 1.0, "interpolation": "bilinear"},
    "squash": {"input_size": (3, 97, 97), "crop_pct": 0.9, "crop_mode": "squash"},
    "border": {"input_size": (3, 101, 101), "crop_pct": 1.0, "crop_mode": "border"},
    "border cut": {"input_size": (3, 96, 96), "crop_pct": 0.7, "crop_mode": "border"},
    "wide": {"input_size": (3, 50, 91), "crop_pct": 0.875, "interpolation": "bicubic"},
    "wide squash": {"input_size": (3, 50, 91), "crop_pct": 1.0, "crop_mode": "squash"},
}


@pytest.mark.parametrize("path", FEW, ids=lambda path: path.stem)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_preprocessing_of_timm_has_its_bits(path: Path, config: dict[str, Any]) -> None:
    whole = timm_data.resolve_data_config(pretrained_cfg=config, args={"chans": 3} if not config else {})
    wanted = timm_models.preprocessing_of(whole, "timm:any")
    assert torch.equal(ours(path, wanted), timm_data.create_transform(**whole)(picture(path)))


def test_an_interpolation_that_only_timm_has_is_refused() -> None:
    config = timm_data.resolve_data_config(pretrained_cfg={"interpolation": "random"})
    with pytest.raises(UsageError, match="interpolation 'random'"):
        timm_models.preprocessing_of(config, "timm:any")


PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTImageProcessor", {}),
    "vit, wide": ("ViTImageProcessor", {"size": {"height": 40, "width": 71}, "resample": 3}),
    "vit, plain": ("ViTImageProcessor", {"do_normalize": False, "resample": 0}),
    "deit": ("DeiTImageProcessor", {"size": {"height": 75, "width": 75}, "crop_size": 64}),
    "bit": ("BitImageProcessor", {}),
    "clip, odd": ("CLIPImageProcessor", {"size": {"shortest_edge": 99}, "crop_size": 82}),
    "convnext, cut": ("ConvNextImageProcessor", {"size": {"shortest_edge": 223}}),
    "convnext, whole": ("ConvNextImageProcessor", {"size": {"shortest_edge": 384}}),
    "levit": ("LevitImageProcessor", {"size": {"shortest_edge": 111}, "crop_size": 96}),
    "mobilevit": ("MobileViTImageProcessor", {"size": {"shortest_edge": 120}, "crop_size": 97}),
    "mobilenet": ("MobileNetV2ImageProcessor", {}),
    "siglip": ("SiglipImageProcessor", {"image_mean": [0.4, 0.5, 0.6]}),
    "efficientnet": ("EfficientNetImageProcessor", {"include_top": False}),
}


def processor(folder: Path, name: str, values: dict[str, Any]) -> Any:
    """A processor with Pillow, and its file in a folder."""
    import transformers

    made = getattr(transformers, name)(**values)
    made.save_pretrained(folder)
    return transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")


@pytest.mark.parametrize("path", FEW, ids=lambda path: path.stem)
@pytest.mark.parametrize(("name", "values"), PROCESSORS.values(), ids=PROCESSORS)
def test_preprocessing_of_transformers_has_its_bits(
    path: Path, name: str, values: dict[str, Any], tmp_path: Path
) -> None:
    library = processor(tmp_path, name, values)
    assert "Pil" in type(library).__name__
    own = np.asarray(library(picture(path))["pixel_values"][0])
    found = ours(path, preprocessing_of_folder(tmp_path, "hf:any"))
    assert found.numpy().dtype == own.dtype
    assert np.array_equal(found.numpy(), own)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("ViTImageProcessor", {"rescale_factor": 1 / 127.5}, ["rescale_factor 0.00784", "expected 1/255"]),
        ("ViTImageProcessor", {"do_rescale": False}, ["do_rescale False"]),
        ("ViTImageProcessor", {"do_resize": False}, ["does not resize"]),
        ("ViTImageProcessor", {"resample": 4}, ["resample 4"]),
        ("BitImageProcessor", {"do_center_crop": False}, ["several sizes"]),
        ("EfficientNetImageProcessor", {}, ["normalises twice"]),
        ("EfficientNetImageProcessor", {"include_top": False, "rescale_offset": True}, ["rescale_offset"]),
        ("PerceiverImageProcessor", {}, ["PerceiverImageProcessor", "is not one of ViT"]),
        ("ConvNextImageProcessor", {"do_center_crop": True, "crop_size": 8}, ["cuts out twice"]),
    ],
)
def test_steps_that_dualeval_does_not_do_are_refused(
    name: str, values: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    processor(tmp_path, name, values)
    with pytest.raises(UsageError) as caught:
        preprocessing_of_folder(tmp_path, "hf:any")
    for word in [*words, "package.module:factory"]:
        assert word in str(caught.value)


def test_steps_that_are_not_used_leave_an_identity_as_it_was() -> None:
    said = Preprocessing().to_json()
    assert said == {
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "resize": 256,
        "crop": 224,
        "interpolation": "bilinear",
        "channels": 3,
    }
    used = Preprocessing(resize_mode="squash", crop_rounding="down").to_json()
    assert json.loads(json.dumps(used)) == {
        **json.loads(json.dumps(said)),
        "resize_mode": "squash",
        "crop_rounding": "down",
    }


def test_steps_are_said_in_words() -> None:
    assert str(Preprocessing(resize_mode="squash", resize=224)) == (
        "exactly 224 x 224 bilinear, crop 224, ImageNet mean and std"
    )
    wide = Preprocessing(resize_mode="cover", resize=50, resize_width=90, crop=40, crop_width=80)
    assert str(wide) == "covering 50 x 90 bilinear, crop 40 x 80, ImageNet mean and std"
    bordered = Preprocessing(resize_mode="inside", crop=256, padding=(128, 128, 128), channel_order="bgr")
    assert str(bordered).startswith("BGR, inside of 256 x 256 bilinear, crop 256 padded with 128, ")
