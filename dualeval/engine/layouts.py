"""Memory layouts: how the four dimensions of weights and images lie in memory, and which one a model gets.

Torch calls them memory formats. In a contiguous batch of images a channel's pixels lie together, in a
channels-last one the channels of a pixel do. The numbers are the same; kernels and last bits are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.engine.sharding.fsdp import class_of, is_sharded
from dualeval.errors import UsageError, with_type
from dualeval.options.choices import AUTO, CHANNELS_LAST, CONTIGUOUS

# Of a weight of a convolution in two dimensions: channels out, channels in, height, width; and of images.
_IMAGE_DIMENSIONS = 4
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
# Layers of transformers, and of networks built like them: their products of matrices want the channels of a
# place together, and so they bring their images into that order themselves.
_OF_TRANSFORMERS = (nn.LayerNorm, nn.MultiheadAttention)
_NORMS_BY_NAME = ("LayerNorm", "RMSNorm")
_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")
# Options of the run that a trial of the layout leaves out.
OF_TRIAL: Mapping[str, Any] = {"precision": "fp32", "keep_batchnorm_fp32": False, "optimize": None}
# Packages whose models compute channels-last as they are.
_KNOWN = ("torch", "torchvision", "dualeval")


def layout_of(model: nn.Module, asked: str) -> str:
    """The layout that a model is computed in.

    ``auto`` looks at the kinds of the model's layers alone, so that it is the same on every machine and at
    every number of ranks. Channels-last is a model with a convolution in two dimensions (``nn.Conv2d``,
    ``nn.ConvTranspose2d``), and without layers of transformers (``nn.LayerNorm``, ``nn.MultiheadAttention``,
    or a class with LayerNorm or RMSNorm in its name). All others are contiguous: ViT, Swin, ConvNeXt, MaxViT,
    those without such a convolution, and programs that are fixed (``fixed_part``).
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
        if not any(_has_images_dimensions(tensor) for tensor in _tensors(model)):
            raise UsageError(
                f"--layout {asked}: the model has no weight of four dimensions, as convolutions of images "
                "have. Leave it out."
            )
        if not is_sharded(model) and (kind := _foreign_tensor(model)) is not None:
            raise UsageError(
                f"--layout {asked}: a tensor of the model is a {kind}, which can take no other layout. Leave "
                "it out."
            )
    return asked


def is_changeable(model: nn.Module) -> bool:
    """Whether other tensors can take the places of a model's parameters and buffers."""
    return fixed_part(model) is None and _foreign_tensor(model) is None


def layout_by_trial(
    model: nn.Module, asked: str, compute_in: Callable[[str], object]
) -> tuple[str, str | None]:
    """As ``layout_of``, and a sentence where "auto" is contiguous because a forward of one's own fails else.

    ``compute_in`` computes the first samples in a layout. Numbers are not compared.
    """
    layout = layout_of(model, asked)
    if asked != AUTO or layout != CHANNELS_LAST or not _has_own_code(model):
        return layout, None
    failure = _failure_of(compute_in, CHANNELS_LAST)
    if failure is None:
        return layout, None
    # What fails in both layouts the first batch raises again: not for the layout.
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
    """Whether a part of a model is code of somebody's own, which may not compute channels-last.

    ``Tensor.view`` cannot take a channels-last tensor's dimensions together.
    """
    return any(class_of(module).__module__.partition(".")[0] not in _KNOWN for module in model.modules())


def fixed_part(model: nn.Module) -> str | None:
    """What of a model is a program that computes one dtype and layout only, in words; None for nothing."""
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
    """What brings a floating tensor of four dimensions into a layout; others stay as they are."""
    is_last = layout == CHANNELS_LAST
    memory_format = torch.channels_last if is_last else torch.contiguous_format

    def convert(tensor: Tensor) -> Tensor:
        if not _has_images_dimensions(tensor):
            return tensor
        found = tensor.contiguous(memory_format=memory_format)
        _, channels, height, width = tensor.shape
        inner = (1, width * channels, channels) if is_last else (height * width, width, 1)
        strides = channels * height * width, *inner
        # Of one channel, or one pixel, both layouts are the same memory, and torch leaves the strides as they
        # are. Convolutions choose their kernel by these, and hand them on to all that follows.
        return found if found.stride() == strides else found.as_strided(found.shape, strides)

    return convert


def _is_convolutional(model: nn.Module) -> bool:
    kinds = {class_of(module) for module in model.modules()}
    if any(issubclass(kind, _OF_TRANSFORMERS) for kind in kinds):
        return False
    if any(name in kind.__name__ for kind in kinds for name in _NORMS_BY_NAME):
        return False
    return any(issubclass(kind, _CONVOLUTIONS) for kind in kinds)


def _is_exported(module: nn.Module) -> bool:
    # The graph of symbolic_trace calls modules and functions; that of an export the operators themselves.
    return isinstance(module, torch.fx.GraphModule) and any(
        isinstance(node.target, torch._ops.OpOverload) for node in module.graph.nodes
    )


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _foreign_tensor(model: nn.Module) -> str | None:
    """The first tensor of a class of its own, as those of a sharded model."""
    for tensor in _tensors(model):
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout is not torch.strided:
            return type(tensor).__name__
    return None


def _has_images_dimensions(tensor: Tensor) -> bool:
    return tensor.ndim == _IMAGE_DIMENSIONS and tensor.is_floating_point()
