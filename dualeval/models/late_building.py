"""Models that are built without memory for their parameters: the values stay in files until they are used.

While such a model is built, each parameter that a module registers is put on the meta device, and
``load_state_dict`` puts the tensors of a file in their places as they are: their values are not copied.
Buffers, and other tensors that constructors make, are as they always are.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from dualeval.errors import DualevalError, UsageError, text_of
from dualeval.messages import listed
from dualeval.models.checkpoints.checkpoint import read_state_dict
from dualeval.models.checkpoints.late import InMemory, LateTensor
from dualeval.models.loading import are_equal, load_state_dict
from dualeval.models.model_errors import first_line
from dualeval.models.weights import warnings_of
from dualeval.torch_errors import TorchError

_DEVICE = Tensor.device.__get__
_local = threading.local()
# One model at a time: torch's classes are changed meanwhile.
_lock = threading.RLock()


class NotLate(Exception):
    """Why a model is built whole, in words that follow "because"."""


def late_model(
    make: Callable[[], nn.Module],
    weights: str | Path,
    *,
    key: str | None = None,
    prefix: str | None = None,
    trust: bool = False,
) -> nn.Module:
    """Make a model without memory for its parameters, for an evaluation with ``shard``.

    The values stay in the checkpoint. Each rank reads its own part when the model is sharded; until then,
    an operation reads the parameters that it needs, and does not keep them. ``model.to("cpu")`` reads all.

    Args:
        make: makes the model, with any values; may be called up to three times.
        weights: a checkpoint in any form that ``--weights`` takes.
        key: where the state_dict lies in it, as ``--weights-key``; None finds the only one.
        prefix: take only the names that begin with this, without it, as ``--weights-prefix``.
        trust: also read files that run code when they are read, as ``--trust-checkpoint``.

    Returns:
        The model on the CPU, in evaluation mode. Where it cannot be made so it is made whole, with a warning
        that says why.

    Raises:
        UsageError: the checkpoint cannot be read, or does not fit the model.
    """
    if not callable(make) or isinstance(make, nn.Module):
        raise UsageError(
            f"late_model was given a {type(make).__name__}: expected a function that makes the model, as "
            "late_model(lambda: Net(width=8), 'checkpoint.pt')"
        )

    def build() -> nn.Module:
        model = make()
        if not isinstance(model, nn.Module):
            raise UsageError(f"late_model: make() returned a {type(model).__name__}, expected an nn.Module")
        state = read_state_dict(Path(weights), key, trust=trust)
        loaded = load_state_dict(model, state, prefix=prefix, source=f"the weights {weights}")
        for warning in warnings_of(loaded):
            warnings.warn(warning, stacklevel=2)
        model.eval()
        return model

    return late_or_whole(build, lambda warning: warnings.warn(warning, stacklevel=3))


def late_or_whole(
    build: Callable[[], nn.Module], note: Callable[[str], object], why_whole: str | None = None
) -> nn.Module:
    """Build a model without memory for its parameters; whole where that cannot be done.

    Both ways give the same model: the same parameters, buffers and attributes.
    """
    if why_whole is None:
        state = torch.get_rng_state()
        try:
            return _late(build)
        except NotLate as error:
            why_whole = str(error)
        torch.set_rng_state(state)
    model = build()
    size = sum(parameter.nbytes for parameter in model.parameters())
    note(
        f"model: each rank builds all of it ({size / 1e6:,.1f} MB) before it keeps its part, because "
        f"{why_whole}"
    )
    return model


def is_building() -> bool:
    """Whether this thread builds a model without memory for its parameters."""
    return getattr(_local, "is_building", False)


def _late(build: Callable[[], nn.Module]) -> nn.Module:
    model, building = _attempt(build)
    if building.drew and building.others:
        # The values of parameters were not drawn: others that were may have come out otherwise.
        _, again = _attempt(build, shifted=True)
        for (name, value), (_, other) in zip(building.others, again.others, strict=True):
            if not are_equal(value, other):
                raise NotLate(f"its constructor draws {name} at random, and no file has it")
    return model


def _attempt(build: Callable[[], nn.Module], *, shifted: bool = False) -> tuple[nn.Module, _Building]:
    with _building(shifted) as building:
        try:
            model = build()
        except (NotLate, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            without = _of_want_of_values(error)
            if without is None and isinstance(error, DualevalError):
                raise
            # Whatever it is: if it has another reason, it comes again where the model is built whole.
            raise NotLate(f"it needs values while it is built ({first_line(without or error)})") from error
        building.check(model)
    return model, building


def _of_want_of_values(error: BaseException | None) -> BaseException | None:
    """An error, or what it was raised from, that is of a tensor without values or of one in a file."""
    while error is not None:
        if isinstance(error, NotImplementedError) or TorchError.NO_VALUES.search(text_of(error)):
            return error
        error = error.__cause__
    return None


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
        self._random = torch.get_rng_state()
        # Whether values were drawn from torch's generator.
        self.drew = False
        # Tensors that no file gives: buffers that are not saved, and those in plain attributes.
        self.others: list[tuple[str, Tensor]] = []
        self._shifted = shifted
        # By the parameter as it was made, so that two modules that share one share it here too.
        self._on_meta: Any = WeakIdKeyDictionary()
        # Of the parameters as they were made, and on the meta device.
        self._storages: list[tuple[str, StorageWeakRef]] = []
        self._is_loading = False

    def register(self, module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        """The parameter on the meta device, for torch to take in place of one; None for the same one."""
        if self._shifted:
            torch.rand(1)
        if self._is_loading or type(parameter) is not nn.Parameter or parameter.device.type != "cpu":
            return None
        if parameter.layout != torch.strided or parameter.is_quantized:
            return None
        made: nn.Parameter | None = self._on_meta.get(parameter)
        if made is None:
            made = _OnMeta(torch.empty_like(parameter.detach(), device="meta"), parameter.requires_grad)
            self._on_meta[parameter] = made
            where = f"{type(module).__name__}.{name}"
            for each in (parameter, made):
                storage = StorageWeakRef(each.untyped_storage())  # type: ignore[no-untyped-call]
                self._storages.append((where, storage))
        return made

    def load(self, load: Callable[[], Any], module: nn.Module) -> Any:
        """Load a state_dict by putting its tensors in place, and leave the values of parameters in files."""
        # Here, because the state may be set back before the model is returned.
        self.drew = self.drew or not torch.equal(self._random, torch.get_rng_state())
        before = [(each, dict(each._parameters), dict(each._buffers)) for each in module.modules()]
        self._is_loading = True
        try:
            result = load()
            made: dict[int, nn.Parameter] = {}
            for each, parameters, buffers in before:
                for name, parameter in parameters.items():
                    _put_parameter(each, name, parameter, made)
                for name, buffer in buffers.items():
                    _put_values(each._buffers, name, buffer)
                if isinstance(each, nn.RNNBase):
                    each._init_flat_weights()  # its own list of its parameters
        finally:
            self._is_loading = False
        return result

    def check(self, model: nn.Module) -> None:
        """Check that a model is as it would be with memory for its parameters."""
        unset = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if unset:
            raise NotLate(f"no file gives it {listed(unset, 3)}")
        of_file = {id(value) for value in model.state_dict(keep_vars=True).values()}
        for what, value in _tensors_and_devices(model):
            if value.type == "meta" if isinstance(value, torch.device) else value.is_meta:
                raise NotLate(f"its constructor computes {what} from parameter values")
            if isinstance(value, Tensor) and id(value) not in of_file:
                self.others.append((what, value))
        held = self._held()
        if held:
            gc.collect()  # what an error or a cycle still holds is not the model's
            held = self._held()
        if held:
            raise NotLate(f"it also keeps {listed(held, 3)} outside its parameters")

    def _held(self) -> list[str]:
        """Parameters, as they were made or on the meta device, that something still refers to."""
        return [name for name, storage in self._storages if not storage.expired()]  # type: ignore[no-untyped-call]


def _put_parameter(
    module: nn.Module, name: str, before: nn.Parameter | None, made: dict[int, nn.Parameter]
) -> None:
    """Have a parameter that was loaded as it was before, but for its values; tied ones stay tied."""
    loaded: Any = module._parameters.get(name)
    if before is None or loaded is None or loaded is before:
        return
    if not before.is_meta:
        _put_values(module._parameters, name, before)
        return
    if id(before) not in made:
        is_late = isinstance(loaded, LateTensor) and loaded.dtype == loaded.source.dtype
        source = loaded.source if is_late else InMemory(values=_values_of(loaded))
        # With the strides of the model: they decide last bits.
        strides = before.stride() if before.shape == loaded.shape else None
        late: Any = LateTensor(source, before.dtype, strides)
        made[id(before)] = nn.Parameter(late, before.requires_grad)
    setattr(module, name, made[id(before)])


def _put_values(held: dict[str, Any], name: str, before: Tensor | None) -> None:
    """Have a tensor that was loaded in its own memory."""
    loaded = held.get(name)
    if before is None or loaded is None or loaded is before:
        return
    if before.shape == loaded.shape:
        with torch.no_grad():
            held[name] = before.copy_(loaded)
    else:  # some modules take buffers of other shapes than they have made
        held[name] = _values_of(loaded).to(before.dtype)


def _values_of(loaded: Tensor) -> Tensor:
    return loaded.read() if isinstance(loaded, LateTensor) else loaded.detach()


def _tensors_and_devices(model: nn.Module) -> Iterator[tuple[str, Tensor | torch.device]]:
    """All buffers, and the tensors and devices in plain attributes, each with its name."""
    yield from model.named_buffers()
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                for leaf in tree_leaves(value):
                    if isinstance(leaf, (Tensor, torch.device)):
                        yield f"{prefix}.{name}".lstrip("."), leaf


@contextmanager
def _building(shifted: bool) -> Iterator[_Building]:
    """Have what this thread builds put its parameters on the meta device."""
    building = _Building(shifted)

    def register(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        return building.register(module, name, parameter) if is_building() else None

    load = nn.Module.load_state_dict

    def load_state_dict(module: nn.Module, state: Any, strict: bool = True, assign: bool = False) -> Any:
        if is_building():
            return building.load(lambda: load(module, state, strict, assign=True), module)
        return load(module, state, strict, assign)

    with _lock:
        hook = register_module_parameter_registration_hook(register)  # type: ignore[arg-type]
        # A constructor may load by itself, as those of timm do.
        nn.Module.load_state_dict = load_state_dict  # type: ignore[assignment, method-assign]
        _local.is_building = True
        try:
            yield building
        finally:
            _local.is_building = False
            nn.Module.load_state_dict = load  # type: ignore[method-assign]
            hook.remove()
