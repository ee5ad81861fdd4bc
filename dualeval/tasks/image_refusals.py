"""Errors where a model does not take the images, or model and data are of another task."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from dualeval.errors import DualevalError, UsageError
from dualeval.models.model_errors import channels_of, first_line, floating_dtypes
from dualeval.own_code import is_raised_by_own_code
from dualeval.tasks.refusals import described, tensors_in


def refuse_other_task(model: str | None, data: Path | None) -> None:
    """Refuse what is meant for question answering."""
    if data is not None and data.suffix == ".json" and not data.is_dir():
        found = f"--data {data} is a JSON file, expected a folder of images or a manifest (.jsonl)"
    elif model is not None and (Path(model) / "config.json").is_file():
        found = f"--model {model} is a folder with a config.json (of an image classifier: hf:{model})"
    else:
        return
    raise UsageError(
        f"the task is image-classification: {found}. For questions on texts type: dualeval run --task "
        f"question-answering --model {model or 'DIR'} --data {data or 'FILE.json'}"
    )


def refuse_other_shapes(images: Iterable[Tensor], shape: tuple[int, int, int]) -> None:
    """Refuse pictures that are not as large as the first one of the data, where nothing makes them so."""
    for image in images:
        if image.shape != shape:
            raise UsageError(
                f"pictures have several sizes: the first one gives {tuple(shape)}, another one "
                f"{tuple(image.shape)} (channels, height, width). Give --resize and --crop, as in --resize "
                "64 --crop 64, or a preprocessing function that brings all of them to one size."
            )


def refused_images(error: Exception, name: str, model: nn.Module, images: Tensor, size: str) -> DualevalError:
    """The error of a model that failed on a few images: they do not fit it, or its own code is wrong."""
    shape = tuple(images.shape[1:])
    said = first_line(error)
    # torch says by these what shapes and dtypes do not fit; any other is an error of the code.
    if is_raised_by_own_code(error) or not isinstance(error, (RuntimeError, AssertionError, ValueError)):
        kind = type(error).__name__
        what = kind if said == kind else f"{kind}: {said}"
        return DualevalError(
            f"the code of the model {name} raised {what} (its input: float32 images of shape "
            f"{shape}, channels, height, width)"
        )
    begin = f"the model {name} cannot take images of shape {shape} (channels, height, width)"
    others = [str(kind).removeprefix("torch.") for kind in floating_dtypes(model) if kind != torch.float32]
    if others and "type" in said:
        return UsageError(
            f"{begin}: its parameters are {', '.join(others)}, and images come as float32 ({said}). Return "
            "model.float() from its function; --precision amp-bf16 or amp-fp16 computes in half precision."
        )
    if (channels := channels_of(error)) is not None and channels[1] == shape[0]:
        return UsageError(
            f"{begin}: a layer takes {channels[0]}, and the images have {channels[1]} channels ({said}). "
            f"{_of_channels(channels[0])}"
        )
    return UsageError(f"{begin}: {said}. Set the size with {size}, or give data of the model's size.")


def _of_channels(own: int) -> str:
    if own in (1, 3):
        values = " and the --mean and --std of the model's training" if own == 1 else ""
        return f"Give --channels {own}{values}."
    return f"Pictures have 3 channels, or 1 with --channels 1: make {own} of them in the model's forward."


def no_logits(name: str, outputs: object, images: int) -> UsageError:
    """The error of a model that returned no logits."""
    begin = f"the model {name} returned {described(outputs)} for {images} images, expected logits of shape "
    places = tensors_in(outputs)
    if not places:
        return UsageError(f"{begin}(images, classes).")
    return UsageError(
        f"{begin}(images, classes). Wrap it in a module whose forward returns the tensor that is meant: "
        f"return self.model(images)[{places[0]!r}]."
    )
