"""Why a model cannot take its inputs: what torch says of it, in words that lead to the mend."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import FrameType

import torch
from torch import Tensor, nn

from dualeval.errors import text_of
from dualeval.torch_errors import TorchError


def why_model_failed(error: BaseException, model: nn.Module) -> str | None:
    """What does not fit between a model and what it was given."""
    calls = list(_calls(error))
    message = text_of(error)
    if isinstance(error, IndexError):
        return _index_of_embedding(calls, model) or _target_out_of_range(calls)
    if not isinstance(error, (RuntimeError, TypeError, ValueError)):
        return None
    if TorchError.ON_DEVICE.search(message):
        return (
            "an index was out of range on the GPU: most often a label that the model has no class for, or a "
            "token that its embedding has no row for. Run with --device cpu, which says which one"
        )
    if (kinds := _two_kinds(message, calls, model)) is not None:
        return kinds
    layer = next((call for call in reversed(calls) if _is_leaf(call)), None)
    if layer is None or not TorchError.WRONG_SHAPE.search(message):
        return None
    return f"{_layer(layer, model)} cannot take {_inputs_of(layer)}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text without its full stop; its type where there is no text."""
    lines = text_of(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def channels_of(error: BaseException) -> tuple[int, int] | None:
    """Where a convolution was given another number of channels than it has: its own, and those given."""
    for call in reversed(list(_calls(error))):
        layer = call.f_locals.get("self")
        # _ConvNd is the base of all of them.
        channels = getattr(layer, "in_channels", None)
        inputs = call.f_locals.get("input", call.f_locals.get("x"))
        if isinstance(layer, nn.Module) and isinstance(channels, int):
            if isinstance(inputs, Tensor) and inputs.ndim > 1 and inputs.shape[1] != channels:
                return channels, int(inputs.shape[1])
            return None
    return None


def floating_dtypes(model: nn.Module) -> list[torch.dtype]:
    """The floating dtypes of a model's parameters, each once, in their order."""
    return list(dict.fromkeys(each.dtype for each in model.parameters() if each.is_floating_point()))


def _calls(error: BaseException) -> Iterator[FrameType]:
    """The calls that an error came through: layers of the model, and functions of torch."""
    return (frame for frame, _ in traceback.walk_tb(error.__traceback__))


def _is_leaf(call: FrameType) -> bool:
    layer = call.f_locals.get("self")
    return call.f_code.co_name == "forward" and isinstance(layer, nn.Module) and not list(layer.children())


def _layer(call: FrameType, model: nn.Module) -> str:
    layer = call.f_locals["self"]
    name = next((name for name, module in model.named_modules() if module is layer), "")
    text = str(layer)
    short = text if len(text) <= 100 and "\n" not in text else type(layer).__name__
    return f"the layer {name!r}, {short}," if name else f"the layer {short}"


def _inputs_of(call: FrameType) -> str:
    tensors = [value for name, value in call.f_locals.items() if isinstance(value, Tensor)]
    shown = [f"a tensor of shape {tuple(each.shape)} and {_dtype(each.dtype)}" for each in tensors[:2]]
    return " and ".join(shown) or "what it was given"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _index_of_embedding(calls: list[FrameType], model: nn.Module) -> str | None:
    """The index that an embedding has no row for."""
    for call in reversed(calls):
        layer, indices = call.f_locals.get("self"), call.f_locals.get("input")
        if isinstance(layer, nn.Embedding) and isinstance(indices, Tensor):
            outside = indices[(indices < 0) | (indices >= layer.num_embeddings)]
            if not outside.numel():
                return None
            rows = layer.num_embeddings
            return (
                f"{_layer(call, model)} has {rows} rows and was given the index {int(outside.flatten()[0])}, "
                f"expected 0 to {rows - 1}. Inputs and model have different vocabularies (or a text is "
                "longer than the model has positions): give data that were tokenised with this model's own "
                "tokenizer"
            )
    return None


def _target_out_of_range(calls: list[FrameType]) -> str | None:
    """The target that a loss has no class for."""
    for call in reversed(calls):
        outputs, targets = call.f_locals.get("input"), call.f_locals.get("target")
        if call.f_code.co_name not in ("cross_entropy", "nll_loss") or not (
            isinstance(outputs, Tensor) and isinstance(targets, Tensor)
        ):
            continue
        classes = outputs.shape[0 if outputs.ndim == 1 else 1]
        ignored = targets == call.f_locals.get("ignore_index", -100)
        outside = targets[((targets < 0) | (targets >= classes)) & ~ignored]
        if not outside.numel():
            return None
        return (
            f"{call.f_code.co_name} was given the target {int(outside.flatten()[0])} and outputs of shape "
            f"{tuple(outputs.shape)}, expected targets of 0 to {classes - 1} (the classes are dimension "
            f"{0 if outputs.ndim == 1 else 1} of the outputs), or {call.f_locals.get('ignore_index', -100)} "
            "for what does not count. Give data and model of the same classes or vocabulary"
        )
    return None


def _two_kinds(message: str, calls: list[FrameType], model: nn.Module) -> str | None:
    """Inputs of one dtype for parameters of another."""
    layer = next((call for call in reversed(calls) if isinstance(call.f_locals.get("self"), nn.Module)), None)
    if layer is None or not TorchError.OTHER_DTYPE.search(message):
        return None
    module = layer.f_locals["self"]
    dtypes = floating_dtypes(module) or floating_dtypes(model)
    inputs = next((value for value in layer.f_locals.values() if isinstance(value, Tensor)), None)
    if not dtypes or inputs is None or inputs.dtype in dtypes:
        return None
    cause = f"the model has {_dtype(dtypes[0])} parameters and was given {_dtype(inputs.dtype)} inputs"
    if dtypes[0] == torch.float32:
        return (
            f"{cause}, expected float32. Make the samples float32 (tensor.float(), array.astype('float32')); "
            "or, if the model takes another dtype, give forward="
        )
    half = ", and --precision amp-bf16 for half precision" if dtypes[0].itemsize < 4 else ""
    return f"{cause}, expected the same. Return model.float(){half}; or cast the inputs in forward="
