"""A machine's bits: what a few kernels make of known numbers, as one short hash.

Libraries choose their kernels by CPU and by environment variables (``MKL_CBWR``, ``ONEDNN_MAX_CPU_ISA``), and
another kernel may add up a sum in another order. No list of facts tells; the bits do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from dualeval.engine import numerics

_DIGITS = 16
# Two primes: numbers that look like noise, from integers alone.
_STEP, _MODULUS = 48_271, 2**31 - 1
# A prime too, so that no two rows of a matrix are alike.
_PERIOD = 4_093


def numeric_bits(device: torch.device, precision: str) -> str:
    """Hash the bits that a few kernels give: convolutions, matrix products, sums, what lies between layers.

    Inside ``numerics.settings``. Equal hashes do not prove that every kernel gives equal bits, only these.
    """
    digest = hashlib.sha256()
    with torch.inference_mode(), numerics.autocast(precision, device):
        for name, result in _results(device, numerics.CASTS.get(precision, torch.float32)):
            digest.update(f"{name}\0{result.dtype}\0{tuple(result.shape)}\0".encode())
            digest.update(result.contiguous().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:_DIGITS]


def _results(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The kernels' results by name."""
    numbers = partial(_numbers, device=device, dtype=dtype)
    yield from _matrix_products(numbers)
    yield from _convolutions(numbers)
    yield from _between_layers(numbers)


def _matrix_products(numbers: Callable[..., Tensor]) -> Iterator[tuple[str, Tensor]]:
    # Long sums, which are added up in blocks: of one row, of few, of many.
    weight, bias = numbers(256, 1153), numbers(256)
    for rows in (1, 7, 64):
        yield f"linear {rows}", functional.linear(numbers(rows, 1153), weight, bias)
    yield "matmul", numbers(96, 384) @ numbers(384, 200)
    heads = numbers(4, 33, 64)
    yield "bmm", torch.bmm(heads, heads.transpose(1, 2))
    query = numbers(2, 4, 33, 32)
    yield "attention", functional.scaled_dot_product_attention(query, query * 0.5, query * 0.25)


def _convolutions(numbers: Callable[..., Tensor]) -> Iterator[tuple[str, Tensor]]:
    for layout in (torch.contiguous_format, torch.channels_last):
        pixels = numbers(2, 3, 33, 33).contiguous(memory_format=layout)
        planes = numbers(2, 64, 14, 14).contiguous(memory_format=layout)
        for name, inputs, shape, options in (
            ("7x7", pixels, (32, 3, 7, 7), {"stride": 2, "padding": 3}),
            ("3x3", planes, (64, 64, 3, 3), {"padding": 1}),
            ("1x1", planes, (96, 64, 1, 1), {}),
            ("depthwise", planes, (64, 1, 3, 3), {"padding": 1, "groups": 64}),
        ):
            weight = numbers(*shape).contiguous(memory_format=layout)
            yield f"{name} {layout}", functional.conv2d(inputs, weight, None, **options)


def _between_layers(numbers: Callable[..., Tensor]) -> Iterator[tuple[str, Tensor]]:
    rows = numbers(16, 1003) * 8
    planes = numbers(2, 16, 15, 15)
    for name in ("exp", "tanh", "sigmoid", "erf", "rsqrt", "log1p"):
        yield name, getattr(torch, name)(rows.abs() if name in ("rsqrt", "log1p") else rows)
    yield "gelu", functional.gelu(rows)
    yield "silu", functional.silu(rows)
    yield "softmax", rows.softmax(1)
    yield "log_softmax", rows.log_softmax(1)
    yield "layer_norm", functional.layer_norm(rows, (1003,))
    yield "group_norm", functional.group_norm(planes, 4)
    yield "sum", rows.sum(1)
    yield "mean of all", rows.mean()
    yield "avg_pool", functional.adaptive_avg_pool2d(planes, 1)
    yield "interpolate", functional.interpolate(planes, (22, 22), mode="bilinear", align_corners=False)


def _numbers(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers between -1/2 and 1/2 that are the same to the bit on every machine."""
    count = torch.Size(shape).numel()
    mixed = torch.arange(1, _PERIOD + 1) * _STEP % _MODULUS * _STEP % _MODULUS
    # Integers below 2**24, divided by a power of two: nothing is rounded anywhere.
    period = (mixed & 0xFFFFFF).double() / 2**24 - 0.5
    return period.to(dtype).repeat(-(-count // _PERIOD))[:count].reshape(shape).to(device)
