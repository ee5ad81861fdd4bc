"""Models that are built without memory for their parameters: the values stay in files until they are used.

While such a model is built, each parameter that a module registers is put on the meta device. Before a
state_dict is loaded, a ``LateTensor`` without values takes the place of each: ``load_state_dict`` then
copies no values, but notes where they are. Buffers are as they always are.
"""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from dualeval.errors import DualevalError
from dualeval.models.checkpoints.late import LateTensor, NoValues
from dualeval.models.model_errors import first_line
from dualeval.models.plain_values import differing, tensors_and_devices

_LISTED_AT_MOST = 3
_DEVICE = Tensor.device.__get__
_local = threading.local()
# One model at a time: torch's classes are changed meanwhile.
_lock = threading.RLock()


class NotLate(Exception):
    """Why a model is built whole, in words that follow "because"."""


def late_or_whole(
    build: Callable[[], nn.Module], note: Callable[[str], object], why_whole: str | None = None
) -> nn.Module:
    """Build a model without memory for its parameters; whole where that cannot be done.

    Both ways give the same model: the same parameters, buffers and attributes.
    """
    if why_whole is None:
        states = _RandomStates()
        try:
            return _late(build, states)
        except NotLate as error:
            why_whole = str(error)
        states.restore()
    model = build()
    size = sum(parameter.nbytes for parameter in model.parameters())
    note(
        f"model: each rank builds all of it ({size / 1e6:,.1f} MB) before it keeps its part, because "
        f"{why_whole}"
    )
    return model


def is_building() -> bool:
    """Whether this thread builds a model without memory for its parameters."""
    return getattr(_local, "building", None) is not None


def prepare_to_load(model: nn.Module) -> None:
    """Let a model's parameters take note of what is loaded next; nothing where no model is built late."""
    if is_building():
        _local.building.prepare(model)


def _late(build: Callable[[], nn.Module], states: _RandomStates) -> nn.Module:
    model, drew = _attempt(build)
    if drew:
        # The values of parameters were not drawn: others that were may have come out otherwise.
        states.restore()
        other, _ = _attempt(build, shifted=True)
        drawn = differing(model, other)
        if drawn is not None:
            raise NotLate(f"its constructor draws {drawn} at random, and no file has it")
    return model


def _attempt(build: Callable[[], nn.Module], *, shifted: bool = False) -> tuple[nn.Module, bool]:
    """Build a model without memory for its parameters, and say whether its constructor drew any values."""
    with _building(shifted) as building:
        try:
            model = build()
        except (NotLate, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if building.refusal is not None:
                raise NotLate(building.refusal) from error
            if isinstance(error, DualevalError) and not _is_of_meta(error):
                raise
            # Whatever it is: if it has another reason, it comes again where the model is built whole.
            raise NotLate(f"its constructor needs values ({first_line(error)})") from error
        if not isinstance(model, nn.Module):
            raise NotLate("it is no nn.Module")
        building.check(model)
    return model, building.drew


def _is_of_meta(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised from, is of a tensor without values."""
    while error is not None:
        if isinstance(error, NotImplementedError) or "meta tensor" in str(error):
            return True
        error = error.__cause__
    return False


class _OnMeta(nn.Parameter):
    """A parameter without values, which says that it is on the CPU: constructors make buffers where it is."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As for any tensor on the meta device, but where it is asked for its device."""
        if func == _DEVICE:
            return torch.device("cpu")
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
            # nn.Parameter(parameter) wants what detach gives to be of the same class.
            return made.as_subclass(cls) if func is Tensor.detach else made


class _Building:
    """A model that is being built without memory for its parameters."""

    def __init__(self, shifted: bool) -> None:
        # Values can be loaded; nothing reads or changes them.
        self.is_open = True
        # What was done all the same, in words that follow "because"; None for nothing.
        self.refusal: str | None = None
        # Whether values were drawn from torch's generator.
        self.drew = False
        self._shifted = shifted
        self._random = torch.get_rng_state()
        # By the parameter as it was made, so that two modules that share one share it here too.
        self._on_meta: Any = WeakIdKeyDictionary()
        self._storages: list[tuple[str, StorageWeakRef]] = []
        self._replaced: list[tuple[str, weakref.ref[Tensor]]] = []

    def refuse(self, why: str) -> NoValues:
        """Note that something was done that cannot be done without values."""
        self.refusal = self.refusal or why
        return NoValues(why)

    def registered(self, module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        """The parameter on the meta device, for torch to take in place of one; None for the same one."""
        if self._shifted:
            torch.rand(1)
        if type(parameter) is not nn.Parameter or parameter.device.type != "cpu":
            return None
        if parameter.layout != torch.strided or parameter.is_quantized:
            return None
        found: nn.Parameter | None = self._on_meta.get(parameter)
        if found is not None:
            return found
        where = f"{type(module).__name__}.{name}"
        if parameter.numel():
            storage = StorageWeakRef(parameter.untyped_storage())  # type: ignore[no-untyped-call]
            if any(storage.cdata == other.cdata for _, other in self._storages):
                raise self._not_late(f"{where} and another parameter are one and the same memory")
            self._storages.append((where, storage))
        made = _OnMeta(torch.empty_like(parameter.detach(), device="meta"), parameter.requires_grad)
        vars(made).update(vars(parameter))
        self._on_meta[parameter] = made
        return made

    def _not_late(self, why: str) -> NotLate:
        self.refusal = self.refusal or why
        return NotLate(why)

    def prepare(self, model: nn.Module) -> None:
        """Put a late tensor without values in the place of each parameter that is on the meta device."""
        # Here, because the state may be set back before the model is returned.
        self.drew = self.drew or not torch.equal(self._random, torch.get_rng_state())
        made: dict[int, tuple[nn.Parameter, LateTensor]] = {}
        for prefix, module in model.named_modules():
            for name, parameter in list(module._parameters.items()):
                if not isinstance(parameter, _OnMeta) and not _is_on_meta(parameter):
                    continue
                if id(parameter) not in made:
                    late: Any = nn.Parameter(
                        LateTensor.without_values(parameter, self), parameter.requires_grad
                    )
                    vars(late).update(vars(parameter))
                    made[id(parameter)] = parameter, late
                    self._replaced.append((f"{prefix}.{name}".lstrip("."), weakref.ref(parameter)))
                setattr(module, name, made[id(parameter)][1])
            if isinstance(module, nn.RNNBase):
                module._init_flat_weights()  # its own list of its parameters

    def check(self, model: nn.Module) -> None:
        """Check that a model is as it would be with memory for its parameters."""
        if self.refusal is not None:
            raise NotLate(self.refusal)
        self.prepare(model)
        parameters = dict(model.named_parameters())
        late = {name: value for name, value in parameters.items() if isinstance(value, LateTensor)}
        unset = [name for name, value in late.items() if not value.has_values]
        if unset:
            raise NotLate(f"no file gives it {_listed(unset)}")
        if parameters and not late:
            raise NotLate("it is made with its values, as programs are")
        for what, value in tensors_and_devices(model):
            device = value if isinstance(value, torch.device) else value.device
            if device.type == "meta" or isinstance(value, _OnMeta):
                raise NotLate(f"its constructor makes {what} of the values of parameters")
        held = self._held()
        if held:
            gc.collect()  # what an error or a cycle still holds is not the model's
            held = self._held()
        if held:
            raise NotLate(f"it keeps {_listed(held)} also in another place than its parameters")

    def _held(self) -> list[str]:
        """Parameters, as they were made or on the meta device, that something still refers to."""
        made = [name for name, storage in self._storages if not storage.expired()]  # type: ignore[no-untyped-call]
        return made + [name for name, reference in self._replaced if reference() is not None]


@contextmanager
def _building(shifted: bool) -> Iterator[_Building]:
    """Have what this thread builds put its parameters on the meta device."""
    building = _Building(shifted)
    thread = threading.get_ident()

    def register(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        return building.registered(module, name, parameter) if threading.get_ident() == thread else None

    load = nn.Module.load_state_dict

    def load_state_dict(module: nn.Module, *arguments: Any, **named: Any) -> Any:
        if threading.get_ident() == thread:
            building.prepare(module)
        return load(module, *arguments, **named)

    with _lock:
        hook = register_module_parameter_registration_hook(register)  # type: ignore[arg-type]
        # A constructor may load by itself, as those of timm do.
        nn.Module.load_state_dict = load_state_dict  # type: ignore[assignment, method-assign]
        _local.building = building
        try:
            yield building
        finally:
            _local.building = None
            building.is_open = False
            nn.Module.load_state_dict = load  # type: ignore[method-assign]
            hook.remove()


class _RandomStates:
    """The states of all generators on the host, as they are now."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    def restore(self) -> None:
        """Set them back."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def _is_on_meta(parameter: nn.Parameter | None) -> bool:
    """Whether it is a plain one on the meta device, as conversions make of those that are put there."""
    return type(parameter) is nn.Parameter and parameter.is_meta


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED_AT_MOST} more" if len(names) > _LISTED_AT_MOST else ""
    return f"{', '.join(names[:_LISTED_AT_MOST])}{more}"
