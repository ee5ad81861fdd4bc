"""How a model is built, prepared, computed again and evaluated; runs that are not plain do it otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

import torch
from torch import nn

from dualeval.engine.checks.replay import EvaluatesBatch, StoredBatch
from dualeval.engine.control.progress import Stage
from dualeval.engine.device.divided import has_late
from dualeval.engine.device.numerics import NumericSettings
from dualeval.engine.identity.model import ModelIdentity
from dualeval.engine.job.evaluation import Evaluation
from dualeval.engine.job.run_state import Run
from dualeval.engine.loop.forward import evaluate_all, evaluate_alone, settle_layout
from dualeval.engine.loop.loop import Loop
from dualeval.engine.model.preparation import check_initialized, check_model, prepare
from dualeval.tasks import Dataset, Task


class Strategy:
    """Of a plain run: each rank has the whole model, made for this run, and computes batches by itself."""

    def __init__(self, task: Task, run: Run) -> None:
        self._task, self._run = task, run

    def lasting(self) -> AbstractContextManager[object]:
        """The context of the whole run: what the process has is put back at its end."""
        return nullcontext()

    def build(self) -> nn.Module:
        """The task's model, on the device."""
        return moved(built(self._task.build_model, self._run), self._run.device)

    def prepare(
        self, dataset: Dataset, model: nn.Module, stack: ExitStack
    ) -> tuple[nn.Module, ModelIdentity]:
        """The model that computes, and the identity of the model as it was built; decides the layout.

        The stack holds the contexts that last as long as the model computes.
        """
        run = self._run
        identity = ModelIdentity.of(model, partial(run.control.progress.inside, Stage.COLLECTIVE))
        check_model(model, run.options)
        # After the identity: hooks that are set here are no part of the model.
        stack.enter_context(self.computing(model))
        settle_layout(self._task, dataset, model, run)
        model = prepare(model, run.options, owned=not run.guest, note=lambda text: run.note_all([text]))
        return model, identity

    def computing(self, model: nn.Module) -> AbstractContextManager[object]:
        """The context in which a model computes, from its first batch on."""
        return nullcontext()

    def evaluate_again(self, evaluation: Evaluation, stored: Sequence[StoredBatch]) -> EvaluatesBatch:
        """For ``prove``: a function that computes a finished batch again, on the rank that calls it."""
        return partial(evaluate_alone, evaluation)

    def evaluate_remaining(self, evaluation: Evaluation, loop: Loop, settings: NumericSettings) -> list[str]:
        """Compute every batch of the loop; returns warnings."""
        return evaluate_all(evaluation, loop, settings)


def built(build: Callable[[torch.device], nn.Module], run: Run) -> nn.Module:
    """The model that a method of the task builds, where the task has put it."""
    with run.precision.forward_context(run.device)():
        model = build(run.device)
    check_initialized(model)
    return model


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to the device, unless a part is there already: then its author has placed it."""
    if has_late(model):
        from dualeval.engine.model.late import read_all

        read_all(model)
    kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    return model.to(device) if kinds and device.type not in kinds else model
