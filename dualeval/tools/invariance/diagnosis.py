"""``diagnose``: the same rows of a job's model in batches of many shapes, and how that is shown.

A diagnosis, no licence: a model that is equal here may differ on other rows, another machine or another
version, and so the batch size stays in the job's identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import nn

from dualeval.columns.ragged import NumpyRows
from dualeval.engine.device import numerics
from dualeval.engine.device.machines import machine_facts
from dualeval.engine.loop.strategy import moved
from dualeval.engine.model.compute import is_compiled
from dualeval.engine.model.layouts import OF_TRIAL, layout_by_trial
from dualeval.engine.model.preparation import compiler_settings, set_evaluation_mode
from dualeval.engine.samples.samples import as_dataset
from dualeval.engine.samples.subset import drawn
from dualeval.engine.values.options import RunOptions
from dualeval.engine.values.plan import EvalPlan
from dualeval.engine.values.row_comparison import differing_rows
from dualeval.errors import UsageError
from dualeval.messages import listed
from dualeval.options.evaluation import precision_of
from dualeval.options.precision import FP32
from dualeval.report.table import labelled, make_console, print_line
from dualeval.tasks import Task
from dualeval.tools.invariance.computed import Batches, ColumnRows, Computed, ShapeDiagnosis
from dualeval.tools.invariance.inspector import ModuleInspector

# Beside the powers of two from 16 on.
_SMALL_SHAPES = (1, 2, 3, 4, 5, 7, 8, 16, 31, 32)
# Batches of one shape whose modules are looked at.
_INSPECTED = 2

# Where a difference comes from, if not from modules; for people.
IN_BATCH = "the batch itself: collate makes different inputs from these samples in a batch of this size"
AFTER_MODEL = "the task's forward or observe: the model's own outputs have the same bits"
NOT_SEEN = "not found: while the modules are inspected, the rows have the same bits"
ONE_PROGRAM = "not searched: the model is one program, compiled or scripted, and takes no hooks"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What a job's model makes of the same rows in batches of other shapes."""

    # What was looked at, in words, by label.
    description: Mapping[str, str]
    # The job's; its layout as it comes to.
    options: RunOptions
    # Number of rows that were looked at, the job's first batch, and of the job's samples.
    rows: int
    samples: int
    # Number of samples of the job's last batch, where it is shorter; else None.
    last_batch: int | None
    machine: Mapping[str, Any]
    # From the smallest; the last is the job's own shape, computed a second time.
    shapes: Sequence[ShapeDiagnosis]
    # Sentences for people.
    notes: Sequence[str]


def diagnose(
    task: Task, options: RunOptions, device: torch.device, step: Callable[[str], object] = lambda text: None
) -> Diagnosis:
    """Compute the job's first batch in many shapes."""
    notes: list[str] = []
    with numerics.settings(precision_of(options), device) as held:
        with precision_of(options).forward_context(device)():
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
    shapes = shapes_of(rows, last)
    step(f"{rows} rows in {len(shapes)} shapes, {shapes[0]} to {shapes[-1]}")
    return Diagnosis(
        description=dict(task.description()),
        options=options,
        rows=rows,
        samples=count,
        last_batch=last if last != options.batch_size and plan.num_batches > 1 else None,
        machine=machine_facts(device, task.libraries, precision_of(options)),
        shapes=_diagnose_shapes(task, model, batches, options, device, shapes, notes),
        notes=notes,
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
        with numerics.settings(FP32, device):
            Computed(task, model, batches, replace(options, layout=layout, **OF_TRIAL), device)

    layout, note = layout_by_trial(model, options.layout, compute_in)
    notes += [] if note is None else [note]
    return layout


def shapes_of(rows: int, last: int) -> list[int]:
    """The shapes to try, rising: small ones, powers of two, the job's last batch's, and the job's own."""
    powers = [1 << power for power in range(4, rows.bit_length())]
    return sorted({shape for shape in (*_SMALL_SHAPES, *powers, last) if shape < rows} | {rows})


def _diagnose_shapes(
    task: Task,
    model: nn.Module,
    batches: Batches,
    options: RunOptions,
    device: torch.device,
    shapes: Sequence[int],
    notes: list[str],
) -> list[ShapeDiagnosis]:
    with numerics.settings(precision_of(options), device) as held, compiler_settings(options.optimize):
        computed = Computed(task, model, batches, options, device)
        # The job's own shape a second time, first: without equal bits there nothing else means anything.
        again, _ = computed.compare(shapes[-1])
        tracer = _Tracer(computed, batches.rows)
        diagnoses, failed = [], []
        for shape in shapes[:-1]:
            try:
                diagnosis, differing = computed.compare(shape)
            except (UsageError, RuntimeError) as error:
                # A batch norm in training mode, for instance, cannot take one sample.
                reason = str(error).partition("\n")[0].removeprefix("this batch cannot be computed: ")
                failed.append(f"batches of {shape} cannot be computed: {reason}")
                continue
            diagnoses.append(tracer.explained(diagnosis, differing) if differing else diagnosis)
        notes += [*computed.notes, *failed, *tracer.notes, *held.check_after_loop()]
    if again.rows_differ:
        notes.append(
            f"the model does not give the same bits twice for one batch of {again.shape}: differences in "
            "other shapes may have nothing to do with the shape"
        )
    return [*diagnoses, again]


class _Tracer:
    """Finds the modules that make rows differ; looks at the job's batch once, when it is first needed."""

    def __init__(self, computed: Computed, rows: int) -> None:
        model = computed.model
        self._is_program = is_compiled(model) or isinstance(model, torch.jit.ScriptModule)
        self._inspector = ModuleInspector(model, rows)
        self._computed = computed
        self._rows = rows
        self._job: Any = None
        self._inspected: dict[str, NumpyRows] = {}
        self.notes: list[str] = []

    def explained(self, diagnosis: ShapeDiagnosis, differing: Sequence[range]) -> ShapeDiagnosis:
        """The same with the modules that cause it."""
        if self._is_program:
            return replace(diagnosis, cause=ONE_PROGRAM)
        self._look_at_job(differing[0])
        differences = []
        is_seen = False
        for samples in differing[:_INSPECTED]:
            with self._inspector.hashes() as calls:
                columns = self._computed.columns(samples)
            is_seen |= any(
                len(ColumnRows(name).add(rows, self._inspected.get(name), samples))
                for name, rows in columns.items()
            )
            differences.append(self._inspector.differences(calls, self._job))
        modules = {name: kind for each in differences for name, kind in each.modules.items()}
        cause = None
        if not modules:
            in_batch = any(each.inputs_differ for each in differences)
            cause = IN_BATCH if in_batch else AFTER_MODEL if is_seen else NOT_SEEN
        return replace(diagnosis, modules=modules, after=max(each.after for each in differences), cause=cause)

    def _look_at_job(self, smaller: range) -> None:
        if self._job is not None:
            return
        whole = range(self._rows)
        with self._inspector.shapes() as job_shapes:
            self._computed.columns(whole)
        with self._inspector.shapes() as other:
            self._computed.columns(smaller)
        self._inspector.learn(job_shapes, other, len(smaller))
        with self._inspector.hashes() as self._job:
            self._inspected = self._computed.columns(whole)
        if any(len(differing_rows(rows, self._computed.job[name])) for name, rows in self._inspected.items()):
            self.notes.append(
                "inspecting modules leaves out a fused kernel, which gives the rows other bits: the modules "
                "named are those of the computation without it"
            )


# Of a table that a file takes.
_WIDTH = 120
# Modules that are named of one shape.
_NAMED = 3
_NO_LICENCE = (
    "This is a diagnosis, not a guarantee: even if all rows are equal, other samples, another machine or "
    "another version may differ. The batch size stays in the job's identity."
)


def print_invariance(diagnosis: Diagnosis) -> None:
    """Print a diagnosis of batch shapes."""
    console = make_console(_WIDTH)
    line = partial(print_line, console)
    for label, text in _facts(diagnosis):
        line(labelled(label, text))
    line("")
    console.print(_table(diagnosis))
    for note in diagnosis.notes:
        line(f"note: {note}", style="yellow")
    line(_NO_LICENCE)


def _facts(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    yield from diagnosis.description.items()
    last = diagnosis.last_batch
    ragged = "" if last is None else f"; the last batch of {diagnosis.samples:,} samples has {last}"
    yield "batch size", f"{diagnosis.options.batch_size}{ragged}"
    yield "computed in", f"{diagnosis.options.precision}, {diagnosis.options.layout}"
    yield "rows", f"{diagnosis.rows} samples, the job's first batch, each compared with itself in that batch"
    machine = diagnosis.machine
    threads = ", one thread per kernel" if machine["device"] == "cpu" else ""
    yield (
        "machine",
        f"{machine['model']}, {machine['cpu_capability']}, torch {machine['versions']['torch']}{threads}",
    )


def _table(diagnosis: Diagnosis) -> Table:
    """A line for shapes that follow each other and say the same."""
    table = Table("shapes", "rows that differ", "largest difference", "made by")
    groups: list[tuple[list[str], list[ShapeDiagnosis]]] = []
    for shape in diagnosis.shapes:
        is_own = shape is diagnosis.shapes[-1]
        behind = " (again)" if is_own else " (last batch)" if shape.shape == diagnosis.last_batch else ""
        if not groups or _cells_of(groups[-1][1][0]) != _cells_of(shape):
            groups.append(([], []))
        groups[-1][0].append(f"{shape.shape}{behind}")
        groups[-1][1].append(shape)
    for names, shapes in groups:
        name, amount = max((_amount(shape) for shape in shapes), key=lambda pair: pair[1])
        largest = name if amount < 0 else f"{name} {amount:.2g}"
        table.add_row(", ".join(names), _differ(shapes[0]), largest, _made_by(shapes[0]))
    return table


def _cells_of(shape: ShapeDiagnosis) -> tuple[str, str, str]:
    return _differ(shape), _amount(shape)[0], _made_by(shape)


def _differ(shape: ShapeDiagnosis) -> str:
    return f"{shape.rows_differ} of {shape.rows}" if shape.rows_differ else "none"


def _amount(shape: ShapeDiagnosis) -> tuple[str, float]:
    """The column that counts most, the outputs and the loss before all others, and its largest difference.

    All columns and -1 where none is of floats.
    """
    largest = {name: amount for name, amount in shape.columns.items() if amount is not None}
    if not largest:
        return ", ".join(shape.columns), -1.0
    first = min(largest, key=lambda name: (not name.startswith("output"), name != "loss"))
    return first, largest[first]


def _made_by(shape: ShapeDiagnosis) -> str:
    if not shape.modules:
        return shape.cause or ""
    named = [f"{name or 'the model itself'} ({kind})" for name, kind in shape.modules.items()]
    after = f"; {shape.after} after it" if shape.after else ""
    return f"{listed(named, _NAMED)}{after}"
