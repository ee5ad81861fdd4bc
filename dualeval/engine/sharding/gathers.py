"""Gathers: the collectives inside a sharded model's forward, watched and kept in one order.

The call of a unit gathers its parameters; a rank that waits there is in stage "collective". Gathers have no
names: if ranks gathered different layers at once, they would silently mix their parameters. So every call of
the model has to call the units in the order of the first forward, which all ranks compute with the same
samples.

A task may call its model more often for one batch than for another, such as for texts of several windows.
Before each call the ranks agree on the host that there is one more; a rank that has none left calls the model
with earlier inputs, and discards the outputs.

A rank whose forward raises takes part in the remaining gathers: in a user's script nothing else would free
the other ranks, which wait for it there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from dualeval.backends.base import Backend
from dualeval.engine.control.plane import ControlPlane
from dualeval.engine.control.progress import Position, Stage
from dualeval.engine.device.accelerator import is_out_of_memory
from dualeval.engine.device.divided import is_of_fsdp, is_unit
from dualeval.engine.sharding.fsdp import reads_refused
from dualeval.errors import BackendError, PeerError, UsageError, text_of


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One call of the model in the first forward."""

    # Its inputs.
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    # The units that it calls, in their order.
    order: list[str] = field(default_factory=list)


class Gathers:
    """Watches the gathers of a model's units within this context; without units it does nothing."""

    def __init__(self, model: nn.Module, control: ControlPlane, backend: Backend, *, owned: bool) -> None:
        self._model = model
        self._owned = owned
        self._control = control
        self._progress = control.progress
        self._backend = backend
        self._world = backend.world
        # Whether the last forward is complete, so that no other rank waits in it for this one.
        self.is_complete = False
        # Functions that end the watching.
        self._undo: list[Callable[[], None]] = []
        self._units: dict[str, Any] = {}
        # The calls of the first forward, which are the same on all ranks.
        self._first: list[_Call] = []
        self._is_first = True
        # Number of calls in the present forward, and the units that the last call has called.
        self._calls = 0
        self._seen: list[str] = []
        # Whether this rank calls the model only because others do.
        self._is_filling_in = False
        # The unit that is being gathered, and what the rank was doing before.
        self._gathered: str | None = None
        self._before = Position()

    def __enter__(self) -> Gathers:
        self._units = {name: module for name, module in self._model.named_modules() if is_unit(module)}
        for name, module in self._units.items():
            self._watch(name, module)
        if self._units and "" not in self._units:
            hook = self._model.register_forward_pre_hook(self._begin_call, prepend=True, with_kwargs=True)
            self._undo.append(hook.remove)
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._units.clear()
        self._first.clear()

    def _watch(self, name: str, module: Any) -> None:
        """Note the begin and end of a gather around FSDP's own hook alone: other hooks gather nothing."""
        hooks = module._forward_pre_hooks
        number = next(number for number, hook in hooks.items() if is_of_fsdp(hook))
        gather = hooks[number]

        @wraps(gather)
        def watched(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._begin(name, module, args, kwargs)
            gathered = gather(module, args, kwargs)
            self._gathered = None
            self._progress.step(self._before.stage, self._before.chunk)
            return gathered

        hooks[number] = watched
        self._undo.append(partial(hooks.__setitem__, number, gather))

    # -- calls of the model --------------------------------------------------------------------------------

    def _begin_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before each call of the model, which all ranks make."""
        self._check_end_of_call()
        if not self._is_filling_in:
            self._another_call(here=True)
            if self._is_first:
                self._first.append(_Call(args=args, kwargs=kwargs))
        self._calls += 1
        self._seen.clear()

    def _another_call(self, *, here: bool) -> bool:
        """Whether any rank calls the model once more; a collective."""
        if self._world.size == 1:
            return here
        return bool(self._backend.all_reduce(torch.tensor([here], dtype=torch.int64), "max"))

    def _fill_in(self) -> None:
        """Call the model, with inputs of the first forward, as long as another rank has calls left."""
        self._is_filling_in = True
        try:
            while self._another_call(here=False):
                call = self._next_call
                self._model(*call.args, **call.kwargs)
            self._check_end_of_call()
        finally:
            self._is_filling_in = False

    @property
    def _next_call(self) -> _Call:
        return self._first[min(self._calls, len(self._first) - 1)]

    @property
    def _order(self) -> list[str] | None:
        """The units that the present call has to call, in order; None before the first call."""
        if not self._first:
            return None
        # A call beyond those of the first forward has to repeat its last call.
        return self._first[min(self._calls, len(self._first)) - 1].order

    def _check_end_of_call(self) -> None:
        if not self._calls or self._is_first or self._world.size == 1:
            return
        order = self._order or []
        if len(self._seen) < len(order):
            wanted = _named(order[len(self._seen)])
            raise UsageError(_other_order("this one ends", f"the first one calls {wanted}"))

    def _join_gathers_left(self) -> bool:
        """After a forward that raised, take part in the other ranks' remaining gathers."""
        knows = self._units and not self._is_first and self._gathered is None
        if not knows or not all(map(_gathers_at_its_call, self._units.values())):
            return False
        try:
            if self._calls:
                self._gather((self._order or [])[len(self._seen) :])
            while self._another_call(here=False):
                call = self._next_call
                self._calls += 1
                self._gather(call.order)
        except (RuntimeError, BackendError):
            return False  # what the forward has raised is the error to report
        return True

    def _gather(self, names: Sequence[str]) -> None:
        for name in names:
            with self._progress.inside(Stage.COLLECTIVE):
                self._units[name].unshard()
            self._units[name].reshard()

    # -- gathers -------------------------------------------------------------------------------------------

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not name:
            self._begin_call(module, args, kwargs)
        elif not self._calls:
            # The task calls parts of the model, not the model itself: all of them count as one call.
            self._calls = 1
            if self._is_first:
                self._first.append(_Call(args=(), kwargs={}))
        self._check_order(name)
        self._gathered, self._before = _named(name), self._progress.position
        self._progress.step(Stage.COLLECTIVE, self._before.chunk)

    def _check_order(self, name: str) -> None:
        place = len(self._seen)
        order = self._order
        if order is not None and self._is_first:
            order.append(name)
        elif order is not None and self._world.size > 1 and order[place : place + 1] != [name]:
            wanted = _named(order[place]) if place < len(order) else "no further one"
            raise UsageError(_other_order(f"this one calls {_named(name)}", f"the first one {wanted}"))
        self._seen.append(name)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around one forward of the task, which calls the model once or more often."""
        self.is_complete = False
        self._calls = 0
        self._seen.clear()
        try:
            with reads_refused(owned=self._owned) if self._units else nullcontext():
                yield
                if self._units:
                    self._check_end_of_call()
                    self._fill_in()
        except (BackendError, PeerError):
            raise
        except Exception as error:
            if self._gathered is None or not isinstance(error, RuntimeError) or is_out_of_memory(error):
                _end_forward(self._units.values())
                self.is_complete = self._join_gathers_left()
                self._control.is_missed = bool(self._units) and not self.is_complete and self._world.size > 1
                raise
            text = text_of(error).strip().rstrip(".") or type(error).__name__
            raise BackendError(
                f"torch.distributed broke on rank {self._world.rank} of {self._world.size} while gathering "
                f"the parameters of {self._gathered}: {text}. Where another rank failed first, its message "
                "has the cause."
            ) from error
        finally:
            self._gathered = None
            _forget_records(self._units.values())
        self._is_first = False
        self.is_complete = True


def _named(name: str) -> str:
    return name or "the model itself"


def _gathers_at_its_call(unit: Any) -> bool:
    """Whether a unit is gathered by its own call, and not ahead of it by another unit's."""
    # Before torch 2.13, which has reset_iter_state, a forward that raised leaves units gathered.
    return not unit._get_fsdp_state()._states_to_forward_prefetch and hasattr(unit, "reset_iter_state")


def _other_order(here: str, there: str) -> str:
    return (
        f"the forward does not always call the units of the sharded model in the same order: where {here}, "
        f"{there}. Ranks would then wait for each other in different layers, and mix their parameters. The "
        "layers that a forward calls may not depend on the data: evaluate a model that is whole on each "
        "rank, or call fully_shard in build_model, with the part that chooses as one unit."
    )


def _end_forward(units: Collection[Any]) -> None:
    """Have FSDP forget a forward that raised, so that the next one begins anew."""
    inner = {part for unit in units for part in unit.modules() if part is not unit}
    for unit in units:
        # A unit that was never called has nothing to forget; torch 2.8 cannot forget.
        is_outer = unit not in inner and hasattr(unit, "reset_iter_state")
        if is_outer and unit._get_fsdp_state()._is_root:
            unit.reset_iter_state()


def _forget_records(units: Collection[Any]) -> None:
    """Empty the lists in which FSDP notes each forward for a backward."""
    # Only a backward empties them: an evaluation would fill memory, and leave them for the next training.
    for unit in units:
        state = unit._get_fsdp_state()
        # Torch 2.8 to 2.12 have one group per unit, and no such list.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in filter(None, groups):
            group._post_forward_indices.clear()
        # Only the root has this list, from its first forward on.
        getattr(state._comm_ctx, "post_forward_order", []).clear()
