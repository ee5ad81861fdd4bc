"""Which machines have computed a result, and which may add to it.

A machine is described by ``machine_facts``: device type and model, CPU capability, versions, and the bits of
a few kernels. Machines of one kind (device type, versions, libraries' sources) may add to each other's
results: last bits can differ, and the result says so. Machines of different kinds may do so only if the user
allows it.

The bits are a short hash of the kernels' results for known numbers. Libraries choose their kernels by CPU and
by environment variables (``MKL_CBWR``, ``ONEDNN_MAX_CPU_ISA``), and another kernel may add up a sum in
another order. No list of facts shows this; the bits do.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dualeval.engine.device.accelerator import accelerator_of
from dualeval.engine.values.differences import differences
from dualeval.errors import UsageError
from dualeval.options.precision import Precision

Machine = Mapping[str, Any]

# Libraries of every run; a task names others on which its results depend.
_LIBRARIES = ("dualeval", "torch", "numpy")
_DIGITS = 16
# Two primes: numbers that look like noise, from integers alone.
_STEP, _MODULUS = 48_271, 2**31 - 1
# A prime too, so that no two rows of a matrix are alike.
_PERIOD = 4_093


def machine_facts(
    device: torch.device, libraries: Sequence[str], precision: Precision | None = None
) -> dict[str, Any]:
    """Facts of this rank's machine that can change a bit: device model, CPU capability, versions, bits."""
    versions = {"python": platform.python_version()}
    for library in (*_LIBRARIES, *libraries):
        try:
            versions[library] = version(library)
        except PackageNotFoundError:  # run from a checkout that is not installed
            versions[library] = "not installed"
    versions["torch"] = torch.__version__
    accelerator = accelerator_of(device)
    versions |= accelerator.versions()
    return {
        "device": device.type,
        "model": accelerator.model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "versions": versions,
        **({} if precision is None else {"bits": numeric_bits(device, precision)}),
        # After the bits, whose kernels load the accelerator's libraries.
        **({"runtime": runtime} if (runtime := accelerator.runtime()) else {}),
    }


def kind_of(machine: Machine) -> dict[str, Any]:
    """Device type, versions, and hashes of the libraries' sources of a machine."""
    return {name: machine[name] for name in ("device", "versions", "libraries")}


def is_same(one: Machine, other: Machine) -> bool:
    """Whether two machines are the same; ``runtime`` counts if both have it, which older results do not."""
    one_sided = {"runtime"} - (one.keys() & other.keys())
    names = (one.keys() | other.keys()) - {"chunks"} - one_sided
    return all(one.get(name) == other.get(name) for name in names)


def check_kinds_of_ranks(machines: Sequence[Machine], hosts: Sequence[str], *, mix: bool) -> None:
    """Check that all ranks are of one kind."""
    for rank, machine in enumerate(machines):
        differing = differences(kind_of(machines[0]), kind_of(machine))
        if differing and not mix:
            shown = "; ".join(f"{name}: {first} on rank 0, {other} there" for name, first, other in differing)
            raise UsageError(
                f"rank {rank} on {hosts[rank]} computes on another kind of machine than rank 0 on {hosts[0]} "
                f"({shown}). Start all ranks on the same devices and versions, or add --mix-machines: the "
                "result then says homogeneous: false."
            )


def check_kinds_in_folder(
    folder: object, machines: Iterable[Machine], here: Machine, start_over: str, *, mix: bool
) -> None:
    """Check that the work in a folder was computed on this kind of machine."""
    for machine in machines:
        differing = differences(kind_of(machine), kind_of(here))
        if differing and not mix:
            shown = "; ".join(f"{name}: {there} there, {now} now" for name, there, now in differing)
            raise UsageError(
                f"{folder} holds work from another kind of machine ({shown}). {start_over}; "
                "--mix-machines continues from it, and the result then has homogeneous: false."
            )


def chunks_by_machine(counts: Iterable[tuple[Machine, int]]) -> list[dict[str, Any]]:
    """Add up the chunks of equal machines."""
    counted: list[dict[str, Any]] = []
    for machine, chunks in counts:
        if not chunks:
            continue
        for known in counted:
            if is_same(machine, known):
                known["chunks"] += chunks
                break
        else:
            counted.append({**machine, "chunks": chunks})
    return counted


def numeric_bits(device: torch.device, precision: Precision) -> str:
    """Hash the results of a few kernels: convolutions, matrix products, sums, and operations between layers.

    To be called inside ``numerics.settings``. Equal hashes prove equal bits only for these kernels.
    """
    digest = hashlib.sha256()
    with torch.inference_mode(), precision.forward_context(device)():
        for name, result in _results(device, precision.dtype or torch.float32):
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
    # Long sums, which kernels add up in blocks: for one row, for few, for many.
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
