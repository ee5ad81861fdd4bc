"""A run with ``shard``: the model is divided over the ranks while it is built, and computes in lockstep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

from torch import nn

from dualeval.engine.device.divided import has_late
from dualeval.engine.guest import as_it_was
from dualeval.engine.identity.model import ModelIdentity
from dualeval.engine.loop.forward import settle_layout
from dualeval.engine.loop.strategy import built
from dualeval.engine.model.preparation import check_model
from dualeval.engine.sharding.fsdp import check_torch
from dualeval.engine.sharding.lockstep import Lockstep
from dualeval.engine.sharding.model import ShardedModel, release, return_large_blocks
from dualeval.engine.sharding.parameters import check_owned
from dualeval.tasks import Dataset, Task


class Sharded(Lockstep):
    """Of a run with ``shard``: each rank has a part of each parameter."""

    @contextmanager
    def lasting(self) -> Iterator[None]:
        run = self._run
        check_torch()
        if run.device.type == "cpu":
            return_large_blocks()
        with run.backend.mesh() as self._mesh:
            try:
                with as_it_was(self._task) if run.guest else nullcontext() as self._caller:
                    yield
            finally:
                # A group that ends before the model that uses it may abort the process.
                release()

    def build(self) -> nn.Module:
        """The task's model, which stays where it was built."""
        model = built(self._task.build_late, self._run)
        check_owned(self._task, model, self._caller)
        return model

    def prepare(
        self, dataset: Dataset, model: nn.Module, stack: ExitStack
    ) -> tuple[nn.Module, ModelIdentity]:
        """As of any run; a collective."""
        task, run = self._task, self._run
        if type(task).build_late is Task.build_late and not has_late(model):
            size = sum(parameter.nbytes for parameter in model.parameters())
            run.note_all(
                [
                    f"model: each rank has built all of it ({size / 1e6:,.1f} MB) before it keeps its part. "
                    "Build it by dualeval.late_model, and each rank reads only its part"
                ]
            )
        sharded = ShardedModel(model, self._mesh, run)
        check_model(model, run.options)
        settle_layout(task, dataset, model, run)
        model, identity = sharded.filled()
        self.settle_schedule(model)
        stack.enter_context(self.computing(model))
        return model, identity
