"""A model divided over the ranks: what it is, and the model that computes.

Torch's FSDP gathers a unit's parameters before its forward and lets them go behind it. That moves bits and
computes none, so that the numbers are those of the whole model.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dualeval.engine import numerics
from dualeval.engine.identity import ModelIdentity
from dualeval.engine.identity.model import WeightsDigests
from dualeval.engine.layouts import converter
from dualeval.engine.options import RunOptions
from dualeval.engine.preparation import dtype_in, set_door
from dualeval.engine.run_state import Run
from dualeval.engine.sharding.parameters import Parameter, Reading, parameters_of, put
from dualeval.engine.sharding.torch_fsdp import of_rows, refuse_own_rows, set_strides
from dualeval.engine.sharding.units import units_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Of mallopt(3).
_M_MMAP_THRESHOLD = -3
_MAPPED_FROM_BYTES = 128 * 1024


class ShardedModel:
    """Divides a model over the ranks of a mesh. Every rank makes one, and calls the same.

    It begins with a model that has no values of parameters any more, for ``check_model`` and ``layout_of``;
    ``filled`` gives the model that computes.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, run: Run) -> None:
        self._model = model
        self._mesh = mesh
        self._run = run
        self._device = run.backend.device
        self._parameters = parameters_of(model)
        self._digests = WeightsDigests.of(model)
        self._identity = ModelIdentity.with_weights(model, {})
        for parameter in self._parameters:
            _put_all(model, parameter, _empty(parameter, parameter.dtype))

    def filled(self) -> tuple[nn.Module, ModelIdentity]:
        """The model that computes, and the identity of the model as it was built; called once, by all."""
        identity = self._read()
        return self._divided(self._run.options), identity

    def _read(self) -> ModelIdentity:
        """Read this rank's part of the model, and learn what all of it is: the identity of the whole one."""
        control, backend = self._run.control, self._run.backend
        reading = Reading(self._parameters, backend, self._identity.hasher)
        for parameter in self._parameters:
            control.progress.step("setup")
            reading.read(parameter)
        # Here a rank that could not read is heard of.
        control.meet()
        weights = self._digests.fingerprint(reading.digests())
        return replace(self._identity, weights=weights)

    def _divided(self, options: RunOptions) -> nn.Module:
        """Divide the model, and give it its values."""
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        model, layout = self._model, options.layout
        convert = converter(layout)
        _convert_buffers(model, lambda module, buffer: convert(self._computed(module, buffer, options)))
        whole, sizes, dtypes = set(), {}, {}
        for parameter in self._parameters:
            module = model.get_submodule(parameter.name.rpartition(".")[0])
            dtypes[parameter.name] = dtype_in(module, parameter.dtype, options)
            if parameter.is_divided:
                made = _empty(parameter, dtypes[parameter.name])
                sizes[id(made)] = made.nbytes
            else:
                value = self._computed(module, parameter.take_rows(), options)
                made = nn.Parameter(convert(value), requires_grad=False)
                whole.add(made)
            _put_all(model, parameter, made)
        place = CPUOffloadPolicy() if options.offload else OffloadPolicy()
        for unit in units_of(model, sizes):
            # The model itself, too: torch would keep its own parameters gathered behind its forward.
            fully_shard(
                unit, mesh=self._mesh, reshard_after_forward=True, offload_policy=place, ignored_params=whole
            )
            refuse_own_rows(unit)
            set_strides(unit, convert)
        device = torch.device("cpu") if options.offload else self._device
        for parameter in self._parameters:
            if parameter.is_divided:
                rows = convert(parameter.take_rows().to(device, dtypes[parameter.name]))
                divided = of_rows(rows, self._mesh, torch.Size(parameter.shape))
                _put_all(model, parameter, nn.Parameter(divided, requires_grad=False))
        dtype = numerics.CASTS.get(options.precision)
        if dtype is not None or any(len(parameter.shape) == 4 for parameter in self._parameters):
            set_door(model, dtype, layout)
        return model

    def _computed(self, module: nn.Module, tensor: Tensor, options: RunOptions) -> Tensor:
        return tensor.detach().to(self._device, dtype_in(module, tensor.dtype, options))


def _empty(parameter: Parameter, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="meta"), requires_grad=False)


def _put_all(model: nn.Module, parameter: Parameter, made: nn.Parameter) -> None:
    for name in parameter.names:
        put(model, name, made)


def _convert_buffers(model: nn.Module, convert: Callable[[nn.Module, Tensor], Tensor]) -> None:
    # One that several modules share is converted once.
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                if id(buffer) not in made:
                    made[id(buffer)] = buffer, convert(module, buffer)
                module._buffers[name] = made[id(buffer)][1]


# -- memory -----------------------------------------------------------------------------------------------


def return_large_blocks() -> None:
    """Have the C library give each large block back to the system as soon as it is freed, from now on.

    glibc raises the size from which it does so, up to 32 MiB, as blocks are freed, and keeps smaller ones in
    a heap for each thread. Units are gathered by several threads: a model of 1 GB on two ranks then took 1.4
    GB of a rank instead of 0.57. The price is that pages of gathered units are mapped again each time.
    Other C libraries do not have the call.
    """
    if sys.platform != "linux":
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)


def release() -> None:
    """Let go of what an evaluation has left in cycles, and in the frames of an error that is under way."""
    error = sys.exc_info()[1]
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
