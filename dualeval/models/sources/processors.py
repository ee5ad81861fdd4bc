"""What an image processor of transformers does to a picture, as ``Preprocessing``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dualeval.data.preprocessing import Preprocessing, Uncropped
from dualeval.errors import UsageError
from dualeval.models.model_errors import first_line
from dualeval.models.transformers_folder import LOCAL, quiet, transformers_for

PROCESSOR = "preprocessor_config.json"
# Pillow's numbers.
_INTERPOLATIONS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
# Those that resize, cut out the centre, scale and normalise, and do nothing else to a picture.
_PLAIN = (
    *("ViT", "DeiT", "Beit", "Bit", "CLIP", "Siglip", "Pvt", "Segformer", "MobileNetV1", "MobileNetV2"),
    *("Blip", "ChineseCLIP", "Flava", "PPLCNet", "MobileViT", "Levit", "ConvNext", "EfficientNet"),
)
_CONVNEXT_SQUASHES_FROM = 384
_SCALES = 1 / 255


def preprocessing_of_folder(folder: Path, model: str) -> Preprocessing:
    """The preprocessing that a folder's image processor stands for."""
    return preprocessing_of(*processor_values(folder, model))


def processor_values(folder: Path, model: str) -> tuple[dict[str, Any], str]:
    """The values of a folder's image processor, and how a message on it begins."""
    processor = transformers_for("--model hf:DIR").AutoImageProcessor.from_pretrained(folder, **LOCAL)
    kind = type(processor).__name__.removesuffix("Fast").removesuffix("Pil").removesuffix("ImageProcessor")
    values = {**processor.to_dict(), "kind": kind}
    return values, f"--model {model}: its image processor, {kind}ImageProcessor,"


def preprocessing_beside(path: Path | None, model: str) -> tuple[Any, str]:
    """The preprocessing of a processor's file beside a file of weights, and where that is."""
    folder = None if path is None else path if path.is_dir() else path.parent
    if folder is None or not (folder / PROCESSOR).is_file():
        return None, ""
    try:
        with quiet():
            return preprocessing_of_folder(folder, model), f"{PROCESSOR} beside the weights"
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{folder / PROCESSOR} cannot be read: {first_line(error)}") from error


def preprocessing_of(values: Mapping[str, Any], begin: str) -> Preprocessing:
    """The preprocessing of a processor's values."""
    return _with_sizes(_without_sizes(values, begin), values, begin)


def uncropped_of(values: Mapping[str, Any], begin: str) -> Uncropped:
    """As ``preprocessing_of``, of a processor that cuts nothing off."""
    base, size = _without_sizes(values, begin), values.get("size") or {}
    fields = {name: getattr(base, name) for name in ("mean", "std", "interpolation", "channel_order")}
    if values.get("do_center_crop"):
        raise _refusal(begin, "cuts off parts of pictures (do_center_crop)")
    if values.get("do_resize") is False:
        return Uncropped(**fields)
    if size.get("shortest_edge"):
        return Uncropped(resize=int(size["shortest_edge"]), **fields)
    height, width = int(size["height"]), int(size["width"])
    return Uncropped(resize=height, resize_width=_other(width, height), resize_mode="squash", **fields)


def _without_sizes(values: Mapping[str, Any], begin: str) -> Preprocessing:
    scales, scale = values.get("do_rescale"), values.get("rescale_factor") or _SCALES
    not_so = {
        f"is not one of {', '.join(_PLAIN)}": values["kind"] not in _PLAIN,
        f"has do_rescale {scales} and rescale_factor {scale}, expected 1/255": scales is False
        or not math.isclose(scale, _SCALES),
        "normalises twice (include_top)": values["kind"] == "EfficientNet"
        and values.get("include_top", True),
        "subtracts 1 from scaled pixels (rescale_offset)": values.get("rescale_offset"),
        "adds borders (do_pad)": values.get("do_pad"),
    }
    for what in [what for what, applies in not_so.items() if applies]:
        raise _refusal(begin, what)
    normalised = values.get("do_normalize")
    return Preprocessing(
        mean=_three(values["image_mean"]) if normalised else (0.0,) * 3,
        std=_three(values["image_std"]) if normalised else (1.0,) * 3,
        interpolation=_interpolation(values, begin),
        crop_rounding="down",
        channel_order="bgr" if values.get("do_flip_channel_order") else "rgb",
    )


def _with_sizes(base: Preprocessing, values: Mapping[str, Any], begin: str) -> Preprocessing:
    if values.get("do_resize") is False:
        raise _refusal(begin, "does not resize (do_resize)")
    size = {name: value for name, value in (values.get("size") or {}).items() if value is not None}
    shortest = size.get("shortest_edge")
    if values["kind"] == "ConvNext" and shortest is not None:
        return _of_convnext(base, values, int(shortest), begin)
    if values["kind"] == "Levit" and shortest is not None:
        shortest = int((256 / 224) * shortest)
    crop = _cropped_to(values)
    if set(size) == {"height", "width"}:
        height, width = int(size["height"]), int(size["width"])
        crop = crop or (height, width)
        base = replace(base, resize=height, resize_width=_other(width, height), resize_mode="squash")
        # Nothing is cut off: there is nothing to round.
        rounding = "nearest" if crop == (height, width) else "down"
        return replace(base, crop=crop[0], crop_width=_other(crop[1], crop[0]), crop_rounding=rounding)
    if set(size) == {"shortest_edge"}:
        if crop is None:
            raise _refusal(begin, "gives pictures of several sizes (no do_center_crop)")
        assert shortest is not None
        return replace(base, resize=int(shortest), crop=crop[0], crop_width=_other(crop[1], crop[0]))
    raise _refusal(begin, f"has size {size}, expected height and width, or shortest_edge")


def _of_convnext(base: Preprocessing, values: Mapping[str, Any], side: int, begin: str) -> Preprocessing:
    """One that cuts a small picture out of a larger one, and brings it to a large size whole."""
    if values.get("do_center_crop"):
        raise _refusal(begin, "cuts out twice (do_center_crop)")
    if side < _CONVNEXT_SQUASHES_FROM:
        return replace(base, resize=int(side / (values.get("crop_pct") or 224 / 256)), crop=side)
    return replace(base, resize=side, crop=side, resize_mode="squash", crop_rounding="nearest")


def _cropped_to(values: Mapping[str, Any]) -> tuple[int, int] | None:
    if not values.get("do_center_crop"):
        return None
    crop = values["crop_size"]
    if not isinstance(crop, Mapping):
        return int(crop), int(crop)
    return int(crop["height"]), int(crop["width"])


def _other(side: int, first: int) -> int | None:
    return None if side == first else side


def _three(values: Any) -> tuple[float, ...]:
    return (float(values),) * 3 if isinstance(values, int | float) else tuple(map(float, values))


def _interpolation(values: Mapping[str, Any], begin: str) -> str:
    # Without one the library takes 2.
    resample = values.get("resample", 2)
    number = 2 if resample is None else int(resample)
    if number not in _INTERPOLATIONS:
        raise _refusal(begin, f"has resample {number}, expected one of {_INTERPOLATIONS}")
    return _INTERPOLATIONS[number]


def _refusal(begin: str, what: str) -> UsageError:
    return UsageError(
        f"{begin} {what}. dualeval does not prepare pictures so. Give the model as package.module:factory, "
        "with --resize, --crop, --interpolation, --mean and --std for what comes nearest, and the rest in "
        "its forward."
    )
