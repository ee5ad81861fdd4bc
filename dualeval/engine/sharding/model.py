"""A model divided over the ranks: its identity, and the model that computes.

Torch's FSDP gathers a unit's parameters before its forward and frees them after it. That moves bits and
computes none, so the numbers are those of the whole model.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dualeval.engine.control.progress import Stage
from dualeval.engine.identity.model import ModelIdentity, model_fingerprint
from dualeval.engine.job.run_state import Run
from dualeval.engine.model.layouts import converter, set_door
from dualeval.engine.model.preparation import convert_each
from dualeval.engine.sharding.fsdp import has_forward, of_rows, refuse_own_rows, set_strides
from dualeval.engine.sharding.parameters import Parameter, Reading, parameters_of, put
from dualeval.engine.values.options import RunOptions
from dualeval.options.evaluation import precision_of
from dualeval.options.precision import Precision

_LARGEST_PART = 32
_SMALLEST_PART = 1024
# Often a forward calls their children one by one, and not the containers.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# From mallopt(3).
_M_MMAP_THRESHOLD = -3
_MAPPED_FROM_BYTES = 128 * 1024


class ShardedModel:
    """Divides a model over the ranks of a mesh. Every rank makes one, and calls the same methods.

    At first the model's parameters have no values, for ``check_model`` and ``layout_of``; ``filled`` returns
    the model that computes.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, run: Run) -> None:
        self._model = model
        self._mesh = mesh
        self._run = run
        self._device = run.backend.device
        self._parameters = parameters_of(model)
        self._identity = ModelIdentity.of(model, weights={})
        for parameter in self._parameters:
            _put_all(model, parameter, _empty(parameter, parameter.dtype))

    def filled(self) -> tuple[nn.Module, ModelIdentity]:
        """The model that computes, and the identity of the model as built; all ranks call this, once."""
        identity = self._read()
        return self._divided(self._run.options), identity

    def _read(self) -> ModelIdentity:
        """Read this rank's part of the model; returns the identity of the whole model."""
        control, backend = self._run.control, self._run.backend
        reading = Reading(self._parameters, backend, self._identity.hasher)
        for parameter in self._parameters:
            control.progress.step(Stage.SETUP)
            reading.read(parameter)
        # Raises if another rank could not read its part.
        control.meet()
        weights = model_fingerprint(self._model, digests=reading.digests())
        return replace(self._identity, weights=weights)

    def _divided(self, options: RunOptions) -> nn.Module:
        """Divide the model, and give it its values."""
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        model, layout, precision = self._model, options.layout, precision_of(options)
        convert = converter(layout)
        convert_each(
            ((module, module._buffers) for module in model.modules()),
            lambda module, buffer: convert(self._computed(module, buffer, precision)),
        )
        whole, sizes, dtypes = set(), {}, {}
        for parameter in self._parameters:
            module = model.get_submodule(parameter.name.rpartition(".")[0])
            dtypes[parameter.name] = precision.dtype_in(module, parameter.dtype)
            if parameter.is_divided:
                made = _empty(parameter, dtypes[parameter.name])
                sizes[id(made)] = made.nbytes
            else:
                value = self._computed(module, parameter.take_rows(), precision)
                made = nn.Parameter(convert(value), requires_grad=False)
                whole.add(made)
            _put_all(model, parameter, made)
        place = CPUOffloadPolicy() if options.offload else OffloadPolicy()
        for unit in units_of(model, sizes):
            # Also for the model itself, whose parameters torch would keep gathered after its forward.
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
        if precision.dtype is not None or any(len(parameter.shape) == 4 for parameter in self._parameters):
            set_door(model, precision.dtype, layout)
        return model

    def _computed(self, module: nn.Module, tensor: Tensor, precision: Precision) -> Tensor:
        return tensor.detach().to(self._device, precision.dtype_in(module, tensor.dtype))


def _empty(parameter: Parameter, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="meta"), requires_grad=False)


def _put_all(model: nn.Module, parameter: Parameter, made: nn.Parameter) -> None:
    for name in parameter.names:
        put(model, name, made)


# -- units -------------------------------------------------------------------------------------------------


def units_of(model: nn.Module, sizes: Mapping[int, int]) -> list[nn.Module]:
    """The modules whose parameters are gathered together while they compute; the model itself is the last.

    A module with at most 1/32 of the model's bytes is a unit. A larger module is divided into its children,
    and is itself a unit for the parameters directly in it; less than 1/1024 stays with the module above. So a
    rank holds the unit that computes, the units around it, and its own part of all others.

    Three kinds of modules are no units, and their parameters belong to the module above: modules that nobody
    calls (``nn.Sequential``, ``nn.ModuleList``, ``nn.ModuleDict`` and others without a forward), modules that
    share a parameter with a module outside of them, and ``nn.TransformerEncoderLayer``, which computes in
    another way, with other bits, if it or a part has a hook. Modules that read the parameters of their
    children without calling them (``is_indivisible``) are not divided.
    """
    whole = sum(sizes.values())
    paths = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    uses = _uses(model)
    done: dict[int, set[int]] = {}
    units: list[nn.Module] = []

    def is_alone(module: nn.Module, parameters: set[int]) -> bool:
        inside = _uses(module)
        return all(inside[name] * paths[id(module)] == uses[name] for name in parameters)

    def divide(module: nn.Module) -> set[int]:
        """The parameters of a module that are in no unit found so far."""
        if id(module) in done:  # it is there under several names
            return done[id(module)]
        left = {id(parameter) for parameter in module.parameters()} & sizes.keys()
        is_large = _LARGEST_PART * sum(sizes[name] for name in left) > whole
        if (is_large and not is_indivisible(module)) or type(module) in _CONTAINERS:
            left = {id(parameter) for parameter in module.parameters(recurse=False)} & sizes.keys()
            left = left.union(*map(divide, module.children()))
        is_small = _SMALLEST_PART * sum(sizes[name] for name in left) < whole
        can_be = is_called(module) and not isinstance(module, nn.TransformerEncoderLayer)
        if module is not model and left and not is_small and can_be and is_alone(module, left):
            units.append(module)
            left = set()
        done[id(module)] = left
        return left

    divide(model)
    return [*units, model]


def is_called(module: nn.Module) -> bool:
    """Whether others call a module: not a container, and not a module without a forward."""
    return type(module) not in _CONTAINERS and has_forward(module)


def is_indivisible(module: nn.Module) -> bool:
    """Whether a module of torch's reads the parameters of its children without calling them."""
    return isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer)


def _uses(module: nn.Module) -> Counter[int]:
    """How many names each parameter has inside of a module."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))


# -- memory -----------------------------------------------------------------------------------------------


def return_large_blocks() -> None:
    """From now on, have the C library return each large block to the system as soon as it is freed.

    As blocks are freed, glibc raises the size from which it does so, up to 32 MiB, and keeps smaller blocks
    in a heap per thread. Several threads gather units: without this call, a model of 1 GB on two ranks took
    1.4 GB per rank instead of 0.57. The price is that pages of gathered units are mapped again each time.
    Other C libraries do not have the call.
    """
    if sys.platform != "linux":
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)


def release() -> None:
    """Free what an evaluation has left in reference cycles, and in the frames of the current error."""
    error = sys.exc_info()[1]
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
