"""Which preprocessing a segmentation job has: as of image classification, but nothing is cut off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from dualeval.data.preprocessing import Normalisation, OwnPreprocessing, Preprocessing, Uncropped
from dualeval.errors import UsageError
from dualeval.models.segmenters import published_uncropped
from dualeval.models.sources import ModelSource, WeightsSource
from dualeval.tasks.image_preprocessing import ChosenPreprocessing, named_preprocessing

PIXELS = ("resize", "interpolation", "channels", "mean", "std")


def choose_preprocessing(
    model: ModelSource, weights: WeightsSource, num_classes: int | None, named: Any, asked: Mapping[str, Any]
) -> ChosenPreprocessing:
    """What was asked for, and else what is published for the model or comes with it; never a guess."""
    base = _base(named, f"--preprocessing {named}")
    own = None
    if base is None and not {"mean", "std"} <= asked.keys():
        base = _base(*model.carried_preprocessing(weights, num_classes))
        own = published_uncropped(model, weights) if base is None else None
    if base is not None and isinstance(base.values, OwnPreprocessing):
        if asked:
            flag = f"--{next(iter(asked))}"
            raise UsageError(f"{flag}: the function {base.values} does it all. Leave {flag} out.")
        return base
    if base is None and own is None and not {"mean", "std"} <= asked.keys():
        raise UsageError(
            f"--model {model.name}: nothing says how its pictures are prepared. Wrong values give wrong "
            "metrics: give those of the model's training. Type --preprocessing none (pictures as they are, "
            "scaled to [0, 1]), --preprocessing imagenet (own size, ImageNet's mean and std), "
            "--preprocessing FILE.py:FUNCTION (from a PIL picture to a tensor), or --mean M --std S, and "
            "--resize N where pictures were resized."
        )
    values, origin, warning = Uncropped(mean=(0.0,), std=(1.0,)), "given", ""
    if base is not None:
        assert isinstance(base.values, Uncropped)
        values, origin = base.values, base.origin
    elif own is not None:
        values, origin = own
        if weights.path is not None and weights.entry is None and weights.text:
            warning = (
                f"the preprocessing is that of {model.name} ({values}): nothing says what {weights.text} was "
                "trained with. Other values change the metrics: give --resize, --mean and --std of its "
                "training, or --preprocessing none or imagenet for pictures in their own size."
            )
    if asked and origin != "given":
        origin = f"{', '.join(asked)} given; the rest: {origin}"
    if "resize" in asked:  # of the shorter side, whatever the model's is of
        values = replace(values, resize_mode="shorter", resize_width=None)
    return ChosenPreprocessing(values=replace(values, **asked), origin=origin, warning=warning)


def _base(named: Any, origin: str) -> ChosenPreprocessing | None:
    """As ``named_preprocessing``; its words and fields stand for no crop here."""
    names = {field.name for field in fields(Uncropped)}
    if isinstance(named, Mapping) and {"mean", "std"} <= named.keys() <= names:
        given: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in named.items()}
        return ChosenPreprocessing(values=Uncropped(**given), origin=origin)
    found = named_preprocessing(named, origin)
    if found is None or isinstance(found.values, OwnPreprocessing):
        return found
    if isinstance(found.values, Preprocessing) and named != "imagenet":
        raise UsageError(
            f"{origin}: it cuts a part out of each picture, and masks are compared whole. Give a dict with "
            "mean and std, and perhaps resize, or a function of a PIL picture."
        )
    values: Normalisation = Uncropped(mean=found.values.mean, std=found.values.std)
    return ChosenPreprocessing(values=values, origin=found.origin)


def preprocessing_to_json(values: Normalisation) -> dict[str, Any]:
    """What is done, by field; the function's name where it is one."""
    if isinstance(values, OwnPreprocessing):
        return {**dict.fromkeys(PIXELS), "function": str(values)}
    return asdict(values)
