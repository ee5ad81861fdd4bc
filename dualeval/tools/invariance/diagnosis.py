"""diagnose: the same rows of a job's model in batches of many shapes, and which modules tell them apart.

A diagnosis, no licence: a model that is equal here may differ on other rows, another machine or another
version, and so the batch size stays in the job's identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dualeval.columns import Rows
from dualeval.engine import numerics
from dualeval.engine.building import moved
from dualeval.engine.compute import is_compiled
from dualeval.engine.evaluation_mode import set_evaluation_mode
from dualeval.engine.layouts import OF_TRIAL, layout_by_trial
from dualeval.engine.machines import machine_facts
from dualeval.engine.options import RunOptions
from dualeval.engine.parts import drawn
from dualeval.engine.plan import EvalPlan
from dualeval.engine.preparation import compiler_settings
from dualeval.engine.row_comparison import differing_rows
from dualeval.engine.samples import as_dataset
from dualeval.errors import UsageError
from dualeval.tasks import Task
from dualeval.tools.invariance.computed import Batches, ColumnRows, Computed
from dualeval.tools.invariance.findings import (
    AFTER_MODEL,
    IN_BATCH,
    IN_MODULES,
    NOT_SEEN,
    ONE_PROGRAM,
    Diagnosis,
    SettingDiagnosis,
    ShapeDiagnosis,
)
from dualeval.tools.invariance.settings import Setting, settings_of
from dualeval.tools.invariance.watched_modules import Differences, ModuleDifference, Watch

# Beside the powers of two from 16 on.
_SMALL_SHAPES = (1, 2, 3, 4, 5, 7, 8, 16, 31, 32)
# Batches of one shape whose modules are looked at.
_WATCHED = 2


def diagnose(
    task: Task,
    options: RunOptions,
    device: torch.device,
    *,
    precisions: Sequence[str] = (),
    layouts: Sequence[str] = (),
    step: Callable[[str], object] = lambda said: None,
) -> Diagnosis:
    """Compute the job's first batch in many shapes, in every precision and layout that can be had."""
    notes: list[str] = []
    with numerics.settings(options.precision, device) as held:
        with numerics.autocast(options.precision, device):
            model = task.build_model(device)
        model = moved(model, device)
        notes += [*task.notes(), *set_evaluation_mode(model), *held.check_after_build()]
    dataset = drawn(as_dataset(task.dataset()), options, notes.append)
    if not len(dataset):
        raise UsageError("the data set is empty: nothing to evaluate")
    count = len(dataset) if options.limit is None else min(options.limit, len(dataset))
    plan = EvalPlan(num_samples=count, batch_size=options.batch_size)
    rows = len(plan.batch_samples(0))
    if rows == 1:
        raise UsageError(
            f"doctor --invariance: the job's batch has one sample (--batch-size {options.batch_size}, "
            f"{count:,} samples), and there is no smaller one to compare with. Give a larger --batch-size."
        )
    last = len(plan.batch_samples(plan.num_batches - 1))
    batches = Batches(task, dataset, options, device, rows)
    options = replace(options, layout=_layout(task, model, batches, options, device, notes))
    settings = settings_of(model, options, device, precisions=precisions, layouts=layouts)
    shapes = shapes_of(rows, last)
    found = []
    for setting in settings:
        if setting.refused is not None:
            found.append(SettingDiagnosis(setting=setting, problem=setting.refused))
            continue
        step(f"{setting.name}: {rows} rows in {len(shapes)} shapes, {shapes[0]} to {shapes[-1]}")
        try:
            own = setting.options(options)
            found.append(_diagnose_setting(setting, task, model, batches, own, device, shapes))
        except (UsageError, RuntimeError) as error:
            # An operation that this precision has not; in the job's own the job would fail, too.
            if setting.of_job:
                raise
            found.append(SettingDiagnosis(setting=setting, problem=str(error).partition("\n")[0]))
    return Diagnosis(
        description=dict(task.description()),
        batch_size=options.batch_size,
        rows=rows,
        samples=count,
        last_batch=last if last != options.batch_size and plan.num_batches > 1 else None,
        machine=machine_facts(device, task.libraries, options.precision),
        settings=tuple(found),
        notes=tuple(notes),
    )


def _layout(
    task: Task,
    model: nn.Module,
    batches: Batches,
    options: RunOptions,
    device: torch.device,
    notes: list[str],
) -> str:
    """The layout that the job's comes to, as in a run."""

    def compute_in(layout: str) -> None:
        with numerics.settings("fp32", device):
            Computed(task, model, batches, replace(options, layout=layout, **OF_TRIAL), device)

    layout, said = layout_by_trial(model, options.layout, compute_in)
    notes += [] if said is None else [said]
    return layout


def shapes_of(rows: int, last: int) -> list[int]:
    """The shapes to try, rising: small ones, powers of two, the job's last batch's, and the job's own."""
    powers = [1 << power for power in range(4, rows.bit_length())]
    return sorted({shape for shape in (*_SMALL_SHAPES, *powers, last) if shape < rows} | {rows})


def _diagnose_setting(
    setting: Setting,
    task: Task,
    model: nn.Module,
    batches: Batches,
    options: RunOptions,
    device: torch.device,
    shapes: Sequence[int],
) -> SettingDiagnosis:
    with numerics.settings(options.precision, device) as held, compiler_settings(options.optimize):
        computed = Computed(task, model, batches, options, device)
        # The job's own shape a second time, first: without equal bits there nothing else means anything.
        again, _ = computed.compare(shapes[-1])
        tracer = _Tracer(computed, batches.rows)
        found, failed = [], []
        for shape in shapes[:-1]:
            try:
                diagnosis, differing = computed.compare(shape)
            except (UsageError, RuntimeError) as error:
                # A batch norm in training mode, for instance, cannot take one sample.
                said = str(error).partition("\n")[0].removeprefix("this batch cannot be computed: ")
                failed.append(f"batches of {shape} cannot be computed: {said}")
                continue
            found.append(tracer.explained(diagnosis, differing) if differing else diagnosis)
        notes = [*computed.notes, *failed, *tracer.notes, *held.check_after_loop()]
    if not again.equal:
        notes.append(
            f"the model does not give the same bits twice for one batch of {again.shape}: what differs in "
            "other shapes may have nothing to do with the shape"
        )
    return SettingDiagnosis(setting=setting, shapes=(*found, again), notes=tuple(notes))


class _Tracer:
    """Finds the modules that make rows differ; looks at the job's batch once, when it is first needed."""

    def __init__(self, computed: Computed, rows: int) -> None:
        model = computed.model
        self._is_program = is_compiled(model) or isinstance(model, torch.jit.ScriptModule)
        self._watch = Watch(model, rows)
        self._computed = computed
        self._rows = rows
        self._job: Any = None
        self._watched: dict[str, Rows] = {}
        self.notes: list[str] = []

    def explained(self, diagnosis: ShapeDiagnosis, differing: Sequence[range]) -> ShapeDiagnosis:
        """The same with the modules that cause it."""
        if self._is_program:
            return replace(diagnosis, cause=ONE_PROGRAM)
        self._look_at_job(differing[0])
        found = []
        is_seen = False
        for samples in differing[:_WATCHED]:
            with self._watch.hashes() as calls:
                columns = self._computed.columns(samples)
            is_seen |= any(
                len(ColumnRows.of(name).add(rows, self._watched.get(name), samples))
                for name, rows in columns.items()
            )
            found.append(self._watch.differences(calls, self._job))
        modules: dict[str, ModuleDifference] = {}
        for each in found:
            for module in each.modules:
                known = modules.get(module.name)
                if known is None or module.rows > known.rows:
                    modules[module.name] = module
        return replace(
            diagnosis,
            modules=tuple(modules.values()),
            after=max(each.after for each in found),
            cause=_cause(found, modules, is_seen=is_seen),
            not_followed=tuple(dict.fromkeys(name for each in found for name in each.not_followed)),
        )

    def _look_at_job(self, smaller: range) -> None:
        if self._job is not None:
            return
        whole = range(self._rows)
        with self._watch.shapes() as own:
            self._computed.columns(whole)
        with self._watch.shapes() as other:
            self._computed.columns(smaller)
        self._watch.learn(own, other, len(smaller))
        with self._watch.hashes() as self._job:
            self._watched = self._computed.columns(whole)
        if any(len(differing_rows(rows, self._computed.job[name])) for name, rows in self._watched.items()):
            self.notes.append(
                "a fused kernel is left out where modules are looked at, and the rows have other bits then: "
                "the modules named are those of the computation without it"
            )


def _cause(found: Sequence[Differences], modules: Mapping[str, Any], *, is_seen: bool) -> str:
    if modules:
        return IN_MODULES
    if any(each.inputs_differ for each in found):
        return IN_BATCH
    return AFTER_MODEL if is_seen else NOT_SEEN
