"""Gathers: the collectives inside of a sharded model's forward, watched and kept in one order.

A unit's parameters are gathered when it is called. A rank that waits there is in a collective for who watches
it. Gathers have no names: where one rank gathers one layer and another rank another, they would mix their
parameters without a word. So every forward has to call the units in the order of the first one, which all
ranks compute with the same samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn

from dualeval.engine.accelerator import is_out_of_memory
from dualeval.engine.control.plane import ControlPlane
from dualeval.engine.progress import Position
from dualeval.engine.sharding.detect import is_of_fsdp, is_unit
from dualeval.engine.sharding.reads import reads_refused
from dualeval.errors import BackendError, UsageError, text_of
from dualeval.world import World

if TYPE_CHECKING:
    from dualeval.engine.context import RunContext


class Gathers:
    """Watches the gathers of a model's units, as long as this context lasts; without units nothing.

    Args:
        model: what is evaluated.
        control: where the ranks hear of each other.
        world: this process's place.
        owned: this run has divided the model, and not its caller.

    Attributes:
        is_complete: whether the last forward came to its end: no other rank waits in it for this one.
    """

    def __init__(self, model: nn.Module, control: ControlPlane, world: World, *, owned: bool = False) -> None:
        self._model = model
        self._owned = owned
        self._control = control
        self._progress = control.progress
        self._world = world
        self.is_complete = False
        self._handles: list[Any] = []
        self._order: list[str] | None = None
        self._seen: list[str] = []
        # The unit that is gathered at this moment, and what the rank was at before.
        self._gathered: str | None = None
        self._before = Position()
        self._lengths: list[tuple[list[Any], int]] = []

    def __enter__(self) -> Gathers:
        for name, module in self._model.named_modules():
            if is_unit(module):
                self._watch(name or "the model itself", module)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def order(self) -> tuple[str, ...]:
        """The units in the order of the first forward; empty before it."""
        return tuple(self._order or ())

    def _watch(self, name: str, module: nn.Module) -> None:
        if not any(map(is_of_fsdp, module._forward_pre_hooks.values())):
            self._handles.append(_WatchedState(module, partial(self._begin, name), self._end))
            return
        before = module.register_forward_pre_hook(partial(self._begin, name))
        after = module.register_forward_pre_hook(self._end)
        self._handles += [before, after]
        # Directly around FSDP's own: what other hooks do is no gather.
        hooks = module._forward_pre_hooks
        others = [number for number in hooks if number not in (before.id, after.id)]
        for number in others:
            if is_of_fsdp(hooks[number]):
                place = others.index(number)
                others[place : place + 1] = [before.id, number, after.id]
                break
        ordered = [(number, hooks[number]) for number in others]
        hooks.clear()
        hooks.update(ordered)

    def _begin(self, name: str, module: nn.Module, inputs: Any) -> None:
        place = len(self._seen)
        self._seen.append(name)
        if self._order is not None and self._world.size > 1 and self._order[place : place + 1] != [name]:
            wanted = self._order[place] if place < len(self._order) else "no further one"
            raise UsageError(_other_order(f"this one calls {name}", f"the first one {wanted}"))
        self._gathered, self._before = name, self._progress.position
        self._progress.step("collective", self._before.chunk)

    def _end(self, module: nn.Module, inputs: Any) -> None:
        self._gathered = None
        self._progress.step(self._before.stage, self._before.chunk)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around one forward of the model.

        Raises:
            BackendError: a gather broke.
            UsageError: the forward calls the units in another order than the first one.
        """
        self.is_complete = False
        self._seen.clear()
        before = _lengths_of_records(self._model)
        try:
            with reads_refused(owned=self._owned):
                yield
            self._check_end()
        except Exception as error:
            if self._gathered is None or not isinstance(error, RuntimeError) or is_out_of_memory(error):
                _end_forward(self._model)
                if self._handles:
                    self._control.fails_everywhere(error)
                raise
            said = text_of(error).strip().rstrip(".") or type(error).__name__
            raise BackendError(
                f"torch.distributed broke on rank {self._world.rank} of {self._world.size} while gathering "
                f"the parameters of {self._gathered}: {said}. Where another rank failed first, its message "
                "has the cause."
            ) from error
        finally:
            self._gathered = None
            _cut(before)
        self.is_complete = True

    def _check_end(self) -> None:
        if self._order is None:
            self._order = list(self._seen)
        elif len(self._seen) < len(self._order) and self._world.size > 1:
            raise UsageError(
                _other_order("this one ends", f"the first one calls {self._order[len(self._seen)]}")
            )


class _WatchedState:
    """Watches a unit that gathers in its forward itself: a hook would change what it computes.

    Args:
        module: the unit.
        begin: called before it is gathered.
        end: called behind that.
    """

    def __init__(
        self, module: Any, begin: Callable[[nn.Module, Any], None], end: Callable[[nn.Module, Any], None]
    ) -> None:
        self._state = module._get_fsdp_state()
        gather = self._state._pre_forward

        def watched(module: nn.Module, args: Any, kwargs: Any) -> Any:
            begin(module, args)
            gathered = gather(module, args, kwargs)
            end(module, args)
            return gathered

        self._state._pre_forward = watched

    def remove(self) -> None:
        """Watch it no longer."""
        del self._state._pre_forward


@contextmanager
def gathers_watched(model: nn.Module, context: RunContext) -> Iterator[RunContext]:
    """The context with the gathers of a model, watched for as long as this lasts."""
    owned = context.options.shard is not None
    with Gathers(model, context.control, context.backend.world, owned=owned) as gathers:
        yield replace(context, gathers=gathers)


def _other_order(here: str, there: str) -> str:
    return (
        f"the forward does not call the units of the sharded model in one order: where {here}, {there}. "
        "Ranks would then wait for each other in different layers, and mix their parameters. The layers that "
        "a forward calls may not depend on the data: evaluate a model that is whole on each rank, or let "
        "fully_shard have the part that chooses as one unit."
    )


def _end_forward(model: nn.Module) -> None:
    """Have FSDP forget a forward that has raised: the next one begins anew."""
    inner = {part for unit in filter(is_unit, model.modules()) for part in unit.modules() if part is not unit}
    for module in model.modules():
        if is_unit(module) and module not in inner:
            unit: Any = module
            # Of one that was never called there is nothing to forget; torch 2.8 cannot.
            if hasattr(unit, "reset_iter_state") and unit._get_fsdp_state()._is_root:
                unit.reset_iter_state()


def _lengths_of_records(model: nn.Module) -> list[tuple[list[Any], int]]:
    """The lists in which FSDP notes each forward for a backward, and their lengths."""
    # Only a backward shortens them: an evaluation would fill memory, and leave them for the next training.
    found: dict[int, list[Any]] = {}
    for module in model.modules():
        if is_unit(module):
            unit: Any = module
            state = unit._get_fsdp_state()
            # Torch 2.8 to 2.12 have one group a unit, and no such list.
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            # Of the root alone, and not before its first forward.
            records = [getattr(state._comm_ctx, "post_forward_order", None)]
            records += [group._post_forward_indices for group in groups if group is not None]
            found |= {id(record): record for record in records if record is not None}
    return [(record, len(record)) for record in found.values()]


def _cut(lengths: list[tuple[list[Any], int]]) -> None:
    for record, length in lengths:
        del record[length:]
