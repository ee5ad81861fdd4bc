"""Memory layouts: how the four dimensions of weights and images lie in memory, and which one a model gets.

Torch calls them memory formats. In a contiguous batch of images, the pixels of a channel are adjacent; in a
channels-last batch, the channels of a pixel. The numbers are the same; kernels and last bits are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.engine.device.divided import class_of, is_sharded
from dualeval.engine.values.nests import map_tensors
from dualeval.errors import UsageError, with_type
from dualeval.options.choices import AUTO, CHANNELS_LAST, CONTIGUOUS

# Dimensions of images, and of weights of 2d convolutions (channels out, channels in, height, width).
_IMAGE_DIMENSIONS = 4
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
# Layers of transformers and similar networks: their matrix products need the channels of a position together,
# so that they bring images into that order themselves.
_OF_TRANSFORMERS = (nn.LayerNorm, nn.MultiheadAttention)
_NORMS_BY_NAME = ("LayerNorm", "RMSNorm")
_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")
# Options of a trial of the layout, in place of the run's.
OF_TRIAL: Mapping[str, Any] = {"precision": "fp32", "keep_batchnorm_fp32": False, "optimize": None}
# Packages whose models compute channels-last as they are.
_KNOWN = ("torch", "torchvision", "dualeval")


def layout_of(model: nn.Module, asked: str) -> str:
    """The layout that a model is computed in.

    ``auto`` looks at the kinds of the model's layers alone, so that it is the same on every machine and at
    every number of ranks. It gives channels-last to models with a convolution in two dimensions
    (``nn.Conv2d``, ``nn.ConvTranspose2d``) and without layers of transformers (``nn.LayerNorm``,
    ``nn.MultiheadAttention``, or a class with LayerNorm or RMSNorm in its name). All others are contiguous:
    ViT, Swin, ConvNeXt, MaxViT, models without such a convolution, and fixed programs (``fixed_part``).
    """
    if asked == AUTO:
        can_change = is_changeable(model) or is_sharded(model)
        return CHANNELS_LAST if _is_convolutional(model) and can_change else CONTIGUOUS
    if asked == CHANNELS_LAST:
        if (part := fixed_part(model)) is not None:
            raise UsageError(
                f"--layout {asked}: {part}, and what it does with its images was fixed when it was made. "
                "Convert the model before (model.to(memory_format=torch.channels_last)), or leave --layout "
                "out."
            )
        if not any(each.ndim == _IMAGE_DIMENSIONS and each.is_floating_point() for each in _tensors(model)):
            raise UsageError(
                f"--layout {asked}: the model has no weight of four dimensions, such as those of image "
                "convolutions. Leave it out."
            )
        if not is_sharded(model) and (kind := _foreign_tensor(model)) is not None:
            raise UsageError(
                f"--layout {asked}: a tensor of the model is a {kind}, whose layout cannot be changed. Leave "
                "it out."
            )
    return asked


def is_changeable(model: nn.Module) -> bool:
    """Whether a model's parameters and buffers can be replaced by other tensors."""
    return fixed_part(model) is None and _foreign_tensor(model) is None


def layout_by_trial(
    model: nn.Module, asked: str, compute_in: Callable[[str], object]
) -> tuple[str, str | None]:
    """Like ``layout_of``, with a sentence if "auto" is contiguous because the model fails channels-last.

    ``compute_in`` computes the first samples in a layout. Numbers are not compared.
    """
    layout = layout_of(model, asked)
    if asked != AUTO or layout != CHANNELS_LAST or not _has_own_code(model):
        return layout, None
    failure = _failure_of(compute_in, CHANNELS_LAST)
    if failure is None:
        return layout, None
    # A failure in both layouts is not the layout's; the first batch raises it again.
    if _failure_of(compute_in, CONTIGUOUS) is not None:
        return CONTIGUOUS, None
    return CONTIGUOUS, f"layout {CONTIGUOUS}: channels-last, the model fails ({with_type(failure)})"


def _failure_of(compute_in: Callable[[str], object], layout: str) -> Exception | None:
    try:
        with torch.random.fork_rng(devices=[]):
            compute_in(layout)
    except Exception as error:  # noqa: BLE001 - `layout_by_trial` decides by it
        return error
    return None


def _has_own_code(model: nn.Module) -> bool:
    """Whether a part of a model is the user's own code, which may fail channels-last.

    ``Tensor.view``, for instance, cannot merge the dimensions of a channels-last tensor.
    """
    return any(class_of(module).__module__.partition(".")[0] not in _KNOWN for module in model.modules())


def fixed_part(model: nn.Module) -> str | None:
    """In words, the part of a model that is a program for one dtype and layout only; None without any."""
    for name, module in model.named_modules():
        place = f"its part {name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            return f"{place} is a TorchScript program"
        if _is_exported(module):
            return f"{place} is a program of torch.export"
        if type(module).__module__.startswith(_QUANTISED):
            return f"{place} is quantised"
    return None


def converter(layout: str) -> Callable[[Tensor], Tensor]:
    """A function that brings floating tensors of four dimensions into a layout; others stay as they are."""
    is_last = layout == CHANNELS_LAST
    memory_format = torch.channels_last if is_last else torch.contiguous_format

    def convert(tensor: Tensor) -> Tensor:
        if tensor.ndim != _IMAGE_DIMENSIONS or not tensor.is_floating_point():
            return tensor
        converted = tensor.contiguous(memory_format=memory_format)
        _, channels, height, width = tensor.shape
        inner = (1, width * channels, channels) if is_last else (height * width, width, 1)
        strides = channels * height * width, *inner
        # With one channel, or one pixel, both layouts are the same memory, and torch keeps the strides.
        # Convolutions choose their kernels by the strides, and pass these on to the layers that follow.
        return converted if converted.stride() == strides else converted.as_strided(converted.shape, strides)

    return convert


def set_door(model: nn.Module, dtype: torch.dtype | None, layout: str) -> None:
    """Have a call of the model bring its inputs into dtype and layout, and its outputs back to float32.

    This sets an attribute of the object and no hook: hooks are part of the identity, and allow only one
    thread. The attribute is a method, so that a copy of the model gets its own.
    """
    convert_layout = converter(layout)

    def arrive(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return map_tensors(arrive, value)
        return convert_layout(value.to(dtype) if dtype and value.is_floating_point() else value)

    def leave(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype == dtype else tensor

    held = vars(model).get("forward")
    of_class = type(model).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args = tuple(map(arrive, args))
        kwargs = dict(zip(kwargs, map(arrive, kwargs.values()), strict=True))
        outputs = of_class(self, *args, **kwargs) if held is None else held(*args, **kwargs)
        return outputs if dtype is None else map_tensors(leave, outputs)

    if held is None:
        functools.update_wrapper(forward, of_class)
    vars(model)["forward"] = MethodType(forward, model)


def _is_convolutional(model: nn.Module) -> bool:
    kinds = {class_of(module) for module in model.modules()}
    if any(issubclass(kind, _OF_TRANSFORMERS) for kind in kinds):
        return False
    if any(name in kind.__name__ for kind in kinds for name in _NORMS_BY_NAME):
        return False
    return any(issubclass(kind, _CONVOLUTIONS) for kind in kinds)


def _is_exported(module: nn.Module) -> bool:
    # A graph of symbolic_trace calls modules and functions; a graph of an export calls operators.
    return isinstance(module, torch.fx.GraphModule) and any(
        isinstance(node.target, torch._ops.OpOverload) for node in module.graph.nodes
    )


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _foreign_tensor(model: nn.Module) -> str | None:
    """The class of the first tensor that is not torch's plain one, as a sharded model's; None without any."""
    for tensor in _tensors(model):
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout is not torch.strided:
            return type(tensor).__name__
    return None
