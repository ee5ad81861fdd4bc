"""Errors where a caller's model, functions and samples do not fit together."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.data.preprocessing import Normalisation, OwnPreprocessing
from dualeval.errors import DualevalError, UsageError
from dualeval.metrics.classification import are_probabilities
from dualeval.user_code.origin import is_raised_by_own_code

FORWARD = "Give forward=, a function (model, batch) -> outputs"
OBSERVE = "Give observe=, a function (outputs, batch) -> dict of columns with one row for each sample"
ONE_LOGIT = (
    "the targets are bool, and the model returns one number per sample, a logit or a probability. Make two "
    "logits of a logit: forward=lambda model, batch: torch.nn.functional.pad(model(batch[0]).reshape(-1, "
    "1), (1, 0)); of a probability, of model(batch[0]).logit(1e-7)"
)
# Names of what is to be predicted, in samples that are dicts.
TARGETS = ("target", "targets", "label", "labels", "y")
# And of what a model returns in a dict, or an object with attributes, as those of transformers do.
OUTPUTS = ("logits", "out", "output", "prediction", "predictions")


def check_call(argument: str, function: Any, arguments: tuple[str, ...]) -> None:
    """Check that a function can be called with so many arguments."""
    try:
        signature = inspect.signature(function) if function is not None else None
    except (TypeError, ValueError):  # of some that are written in C nothing is known
        return
    if signature is None:
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise UsageError(
            f"{argument} is {name}{signature}, and is called as {name}({', '.join(arguments)}): expected a "
            f"function that takes {'these' if arguments else 'no arguments, as lambda: Net(10)'}"
        ) from error


def refuse_probabilities(model: str, outputs: Tensor, hint: str = "") -> None:
    """Check that a classifier returned logits."""
    if are_probabilities(outputs):
        raise UsageError(
            f"{model} returned probabilities (each row lies between 0 and 1 and sums to 1), expected logits: "
            "of these loss, confidence and ece would be wrong. Leave out its softmax, or return torch.log of "
            f"the probabilities.{hint}"
        )


def no_tensor(outputs: Any, batch: Any) -> UsageError:
    """The error of a model with several outputs, none of which has a known name."""
    return UsageError(
        f"the model returned {describe(outputs)}, expected a tensor, or what holds one as "
        f"{', '.join(OUTPUTS)}. {_advice(outputs, _input_of(batch))}"
    )


def _input_of(batch: Any) -> str:
    """How the input of a batch is written."""
    if isinstance(batch, Mapping):
        name = next((name for name in batch if name not in TARGETS), "input")
        return f"batch[{name!r}]"
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return f"batch.{next((name for name in batch._fields if name not in TARGETS), 'input')}"
    return "batch[0]" if isinstance(batch, (tuple, list)) else "batch"


def describe(outputs: Any) -> str:
    """What a model has returned, for messages."""
    if isinstance(outputs, Tensor):
        return str(tuple(outputs.shape))
    if isinstance(outputs, Mapping):
        return f"a {type(outputs).__name__} of {', '.join(map(repr, outputs)) or 'nothing'}"
    if isinstance(outputs, (tuple, list)):
        kinds = ", ".join(type(value).__name__ for value in outputs)
        return f"a {type(outputs).__name__} of {len(outputs)} values ({kinds})"
    return a_kind(outputs)


def tensors_in(outputs: Any) -> list[Any]:
    """The keys or places of the tensors in a dict, list or tuple."""
    if isinstance(outputs, Mapping):
        return [name for name, value in outputs.items() if isinstance(value, Tensor)]
    if isinstance(outputs, (tuple, list)):
        return [number for number, value in enumerate(outputs) if isinstance(value, Tensor)]
    return []


def _advice(outputs: Any, inputs: str) -> str:
    """How the tensor that is meant is taken out."""
    places = tensors_in(outputs)
    if not places:
        return f"{OBSERVE}."
    return (
        f"Wrap it: forward=lambda model, batch: model({inputs})[{places[0]!r}]. {OBSERVE}, where several are "
        "wanted."
    )


def a_kind(value: Any) -> str:
    """What kind of thing a value is, for messages."""
    return "None" if value is None else f"a {type(value).__name__}"


def why_no_classes(outputs: Tensor, target: Tensor) -> str:
    """What there is in place of logits and labels."""
    shapes = (
        f"The outputs have shape {tuple(outputs.shape)} and {outputs.dtype}, the targets "
        f"{tuple(target.shape)} and {target.dtype}; logits are floats of shape (samples, classes) and labels "
        "integers of shape (samples,)."
    )
    if outputs.ndim == target.ndim + 1 > 2 and not target.is_floating_point():
        return f"{shapes} For logits at each position give metrics=[dualeval.metrics.IoU(CLASSES)]."
    if outputs.ndim != 2 or outputs.shape[1] < 2:
        return shapes
    if target.ndim == 1 and target.is_floating_point():
        return f"{shapes} Make the targets integers, as with target.long()."
    if target.ndim == 2 and target.shape[1] == 1:
        return f"{shapes} Drop the second dimension of the targets, as with target.squeeze(1)."
    if target.ndim == 2 and target.shape == outputs.shape:
        if {*target.flatten().tolist()} <= {0, 1} and (target.sum(1) == 1).all():
            return f"{shapes} From targets with a 1 at one class per sample, take target.argmax(1)."
        return f"{shapes} {OBSERVE}: one for each number, as {{'a': (outputs - batch[1])[:, 0].abs()}}."
    return shapes


def why_no_target(target: Any) -> str:
    """What there is in place of a batch of targets."""
    if target is None:
        return "The samples have no target: give pairs (input, target), or dicts with the key 'label'."
    first = next(iter(target), None) if isinstance(target, (list, tuple)) else target
    return f"The targets are not numbers, such as {first!r}: give each class a number."


def refuse_other_task(model: str | None, data: Path | None) -> None:
    """Refuse what is meant for question answering."""
    if data is not None and data.suffix == ".json" and not data.is_dir():
        reason = f"--data {data} is a JSON file, expected a folder of images or a manifest (.jsonl)"
    elif model is not None and (Path(model) / "config.json").is_file():
        reason = f"--model {model} is a folder with a config.json (of an image classifier: hf:{model})"
    else:
        return
    raise UsageError(
        f"the task is image-classification: {reason}. For questions on texts type: dualeval run --task "
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


def refused_images(
    error: Exception, name: str, model: nn.Module, images: Tensor, size: str, wanted: Normalisation
) -> DualevalError:
    """The error of a model that failed on a few images: they do not fit it, or its own code is wrong."""
    from dualeval.models.model_errors import channels_of, first_line, floating_dtypes
    from dualeval.torch_errors import TorchError

    shape = tuple(images.shape[1:])
    text = first_line(error)
    # torch says by these what shapes and dtypes do not fit; any other is an error of the code.
    if is_raised_by_own_code(error) or not isinstance(error, (RuntimeError, AssertionError, ValueError)):
        kind = type(error).__name__
        what = kind if text == kind else f"{kind}: {text}"
        return DualevalError(
            f"the code of the model {name} raised {what} (its input: float32 images of shape "
            f"{shape}, channels, height, width)"
        )
    begin = f"the model {name} cannot take images of shape {shape} (channels, height, width)"
    others = [str(kind).removeprefix("torch.") for kind in floating_dtypes(model) if kind != torch.float32]
    if others and TorchError.ANY_TYPE.search(text):
        return UsageError(
            f"{begin}: its parameters are {', '.join(others)}, and images come as float32 ({text}). Return "
            "model.float() from its function; --precision amp-bf16 or amp-fp16 computes in half precision."
        )
    if (channels := channels_of(error)) is not None and channels[1] == shape[0]:
        return UsageError(
            f"{begin}: a layer takes {channels[0]}, and the images have {channels[1]} channels ({text}). "
            f"{_of_channels(channels[0], wanted)}"
        )
    flat = TorchError.WRONG_WIDTH.search(text)
    if flat is not None and shape[0] == 3 and int(flat[1]) == 3 * int(flat[2]):
        return UsageError(
            f"{begin}: a layer takes a third of these values ({text}). {_of_channels(1, wanted)}"
        )
    return UsageError(f"{begin}: {text}. Set the size with {size}, or give data of the model's size.")


def _of_channels(count: int, wanted: Normalisation) -> str:
    if isinstance(wanted, OwnPreprocessing):
        return f"Let the function {wanted} return {count} channels."
    if count in (1, 3):
        is_of_colours = count == 1 and len(wanted.mean) > 1
        values = " and the --mean and --std of the model's training" if is_of_colours else ""
        return f"Give --channels {count}{values}."
    return f"Pictures have 3 channels, or 1 with --channels 1: make {count} of them in the model's forward."


def no_logits(name: str, outputs: object, images: int) -> UsageError:
    """The error of a model that returned no logits."""
    begin = f"the model {name} returned {describe(outputs)} for {images} images, expected logits of shape "
    places = tensors_in(outputs)
    if not places:
        return UsageError(f"{begin}(images, classes).")
    return UsageError(
        f"{begin}(images, classes). Wrap it in a module whose forward returns the tensor that is meant: "
        f"return self.model(images)[{places[0]!r}]."
    )


def copy_sharing_tensors(model: nn.Module) -> nn.Module:
    """A copy of the modules that shares their tensors: what a forward keeps is no part of the model."""
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    try:
        return copy.deepcopy(model, shared)
    except Exception:  # noqa: BLE001 - whatever stands in the way; it is then tried itself
        return model
