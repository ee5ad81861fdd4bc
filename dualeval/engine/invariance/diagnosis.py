"""diagnose: the same rows of a job's model in batches of many shapes, and which modules tell them apart.

A diagnosis, no licence: a model that is equal here may differ on other rows, another machine or another
version, and so the batch size stays in the job's identity.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dualeval.columns import RaggedRows, Rows, to_rows
from dualeval.engine import numerics
from dualeval.engine.agreement import machine_facts
from dualeval.engine.compute import Compute
from dualeval.engine.evaluation_mode import set_evaluation_mode
from dualeval.engine.evaluator import moved
from dualeval.engine.feed import Feed, Reader
from dualeval.engine.invariance.digests import tensors_in
from dualeval.engine.invariance.modules import Differences, ModuleDifference, Watch
from dualeval.engine.invariance.settings import Setting, settings_of
from dualeval.engine.loop import unreadable
from dualeval.engine.options import RunOptions
from dualeval.engine.parts import drawn, postprocessed
from dualeval.engine.plan import EvalPlan
from dualeval.engine.row_differences import differing_rows
from dualeval.engine.samples import as_dataset
from dualeval.engine.settings_watch import is_compiled
from dualeval.errors import UsageError
from dualeval.tasks import Dataset, Task

# Beside the powers of two from 16 on.
_SMALL_SHAPES = (1, 2, 3, 4, 5, 7, 8, 16, 31, 32)
# Batches of one shape whose modules are looked at.
_WATCHED = 2
_OUTPUT = "output"

# Where the difference comes from, for people.
IN_MODULES = "modules"
IN_BATCH = "the batch itself: collate makes other inputs of these samples in a batch of this size"
AFTER_MODEL = "the task's forward or observe: the model's own outputs have the same bits"
NOT_SEEN = "not found: while the modules are looked at, the rows have the same bits"
ONE_PROGRAM = "not looked for: the model is one program, compiled or scripted, and takes no hooks"


@dataclass(frozen=True, kw_only=True)
class ColumnDifference:
    """A column, or an output of the model, whose rows differ.

    Attributes:
        rows_differ: number of rows with another bit.
        largest: the largest absolute difference of finite floats; None of other kinds.
        largest_at: the id of its sample.
    """

    rows_differ: int
    largest: float | None = None
    largest_at: str | None = None


@dataclass(frozen=True, kw_only=True)
class ShapeDiagnosis:
    """The rows in batches of one shape, beside the same rows in the job's batch.

    Attributes:
        shape: samples a batch.
        rows: number of rows that were compared.
        rows_differ: how many of them have another bit in a column or an output.
        columns: those that differ, by name.
        modules: those that cause it: other outputs for the same inputs; by order of execution.
        after: number of modules that differ as a consequence.
        cause: "modules", or in words where else it comes from; None where nothing differs.
        not_followed: modules that could not be compared.
    """

    shape: int
    rows: int
    rows_differ: int
    columns: dict[str, ColumnDifference] = field(default_factory=dict)
    modules: tuple[ModuleDifference, ...] = ()
    after: int = 0
    cause: str | None = None
    not_followed: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all rows have the same bits."""
        return not self.rows_differ


@dataclass(frozen=True, kw_only=True)
class SettingDiagnosis:
    """All shapes in one precision and layout.

    Attributes:
        setting: which.
        problem: why it was not tried; None where it was.
        shapes: from the smallest; the last is the job's own shape, computed a second time.
        notes: sentences for people.
    """

    setting: Setting
    problem: str | None = None
    shapes: tuple[ShapeDiagnosis, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What a job's model makes of the same rows in batches of other shapes.

    Attributes:
        description: what was looked at, in words, by label.
        batch_size: the job's.
        rows: number of rows that were looked at: the job's first batch.
        samples: number of samples of the job.
        last_batch: number of samples of the job's last batch, where it is shorter; else None.
        machine: device, model, cpu_capability, bits and versions.
        settings: the job's own first.
        notes: sentences for people.
    """

    description: dict[str, str]
    batch_size: int
    rows: int
    samples: int
    last_batch: int | None
    machine: dict[str, Any]
    settings: tuple[SettingDiagnosis, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        content = asdict(self)
        for setting, of in zip(content["settings"], self.settings, strict=True):
            for shape, known in zip(setting["shapes"], of.shapes, strict=True):
                shape["equal"] = known.equal
        return {"schema_version": 1, **content}


def diagnose(
    task: Task,
    options: RunOptions,
    device: torch.device,
    *,
    only: Sequence[str] = (),
    step: Callable[[str], object] = lambda said: None,
) -> Diagnosis:
    """Compute the job's first batch in many shapes, in every precision that the device can do.

    Args:
        task: the job's.
        options: of which the data's part, ``batch_size``, ``on_error`` and how the model is computed count.
        device: what computes.
        only: precisions, where not all are wanted beside the job's own.
        step: called with a few words before each setting.

    Raises:
        UsageError: task, data, weights and options do not fit together, a sample cannot be read, or the job's
            batches have one sample.
    """
    notes: list[str] = []
    settings = settings_of(options, device, **({"precisions": only} if only else {}))
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
    batches = _Batches(task, dataset, options, device, rows)
    shapes = shapes_of(rows, last)
    found = []
    for setting in settings:
        if setting.refused is not None:
            found.append(SettingDiagnosis(setting=setting, problem=setting.refused))
            continue
        step(f"{setting.name}: {rows} rows in {len(shapes)} shapes, {shapes[0]} to {shapes[-1]}")
        try:
            found.append(_diagnose_setting(setting, task, model, batches, options, device, shapes))
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


def shapes_of(rows: int, last: int) -> list[int]:
    """The shapes to try, rising: small ones, powers of two, the job's last batch's, and the job's own."""
    powers = [1 << power for power in range(4, rows.bit_length())]
    return sorted({shape for shape in (*_SMALL_SHAPES, *powers, last) if shape < rows} | {rows})


def batches_of(shape: int, rows: int) -> list[range]:
    """Batches of one shape that have all rows; the last may begin among those of the one before."""
    found = [range(first, first + shape) for first in range(0, rows - shape + 1, shape)]
    return found if found[-1].stop == rows else [*found, range(rows - shape, rows)]


class _HeldSamples:
    """The first samples of a data set, read once; ready batches are read as they are asked for."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._samples: dict[int, Any] = {}
        if hasattr(dataset, "placeholder"):
            self.placeholder = dataset.placeholder

    def __len__(self) -> int:
        return len(self._dataset)

    def id(self, index: int) -> str:
        return self._dataset.id(index)

    def fingerprint(self, count: int) -> str:
        return self._dataset.fingerprint(count)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        if any(index not in self._samples for index in indices):
            read = self._dataset.__getitems__(indices)
            if not isinstance(read, list) or len(read) != len(indices):
                return read
            self._samples.update(zip(indices, read, strict=True))
        # A collate may take entries out of its samples.
        return [
            copy.copy(sample) if isinstance(sample, dict | list) else sample
            for sample in (self._samples[index] for index in indices)
        ]


class _Batches:
    """The job's first samples in batches of any shape, on the device."""

    def __init__(
        self, task: Task, dataset: Dataset, options: RunOptions, device: torch.device, rows: int
    ) -> None:
        self.dataset = dataset
        self.rows = rows
        self._device = device
        self._stops = options.on_error == "stop"
        self._reader = Reader(_HeldSamples(dataset), task, fill=not self._stops)

    def data(self, samples: range) -> Any:
        """Collate some of the samples, as the task does; None where none of them can be read.

        Raises:
            UsageError: one cannot be read, where that ends a run; or none of the job's batch can.
        """
        [batch] = Feed(self._reader, [samples], workers=0, device=self._device)
        if batch.failed and (self._stops or (batch.data is None and len(samples) == self.rows)):
            raise unreadable(self.dataset, batch.failed[0], skips=not self._stops)
        return batch.data


class _WithOutputs:
    """A task's forward and observe, whose columns have the model's outputs beside them, a row a sample."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.samples = 0

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return self._task.forward(model, batch)

    def observe(self, outputs: Any, batch: Any) -> Any:
        columns: Any = self._task.observe(outputs, batch)
        if not isinstance(columns, Mapping):
            return columns
        return {
            **columns,
            **{
                f"{_OUTPUT}{path}": tensor.float() if tensor.dtype == torch.bfloat16 else tensor
                for path, tensor in tensors_in(outputs)
                if tensor.ndim and len(tensor) == self.samples and tensor.layout is torch.strided
            },
        }


class _Computed:
    """A model in one setting: computes batches, and compares their rows with those of the job's batch."""

    def __init__(
        self, task: Task, model: nn.Module, batches: _Batches, precision: str, device: torch.device
    ) -> None:
        self._task, self._model, self._batches = task, model, batches
        self._beside = _WithOutputs(task)
        self._compute = Compute(cast(Task, self._beside), model, device, precision, 1)
        self.job = self.columns(range(batches.rows))

    def columns(self, samples: range) -> dict[str, Rows]:
        """The columns that the job keeps of a batch, or all, and the model's outputs; none without data."""
        data = self._batches.data(samples)
        if data is None:
            return {}
        self._beside.samples = len(samples)
        made = self._compute.start(data)()
        outputs = {name: column for name, column in made.items() if _is_output(name)}
        observed = {name: column for name, column in made.items() if name not in outputs}
        found = postprocessed(self._task, self._batches.dataset, observed, samples)
        kept = [name for name in self._task.rows or found if name in found]
        return {name: to_rows(column) for name, column in {**{n: found[n] for n in kept}, **outputs}.items()}

    def compare(self, shape: int) -> tuple[ShapeDiagnosis, list[range]]:
        """Compute all rows in batches of a shape; returns what differs, and the batches in which it does."""
        differing, compared = (np.zeros(self._batches.rows, np.bool_) for _ in range(2))
        columns: dict[str, _Column] = {}
        found = []
        for samples in batches_of(shape, self._batches.rows):
            wrong = False
            own_columns = self.columns(samples)
            compared[samples.start : samples.stop] |= bool(own_columns)
            for name, own in own_columns.items():
                rows = columns.setdefault(name, _Column()).add(own, self.job.get(name), samples)
                differing[rows] = True
                wrong |= bool(len(rows))
            if wrong:
                found.append(samples)
        diagnosis = ShapeDiagnosis(
            shape=shape,
            rows=int(compared.sum()),
            rows_differ=int(differing.sum()),
            columns={
                name: column.difference(self._batches.dataset)
                for name, column in columns.items()
                if column.rows
            },
        )
        return diagnosis, found


@dataclass
class _Column:
    rows: set[int] = field(default_factory=set)
    largest: float | None = None
    largest_at: int | None = None

    def add(self, own: Rows, job: Rows | None, samples: range) -> npt.NDArray[np.intp]:
        """Compare rows with the same ones of the job's batch; returns the numbers of those that differ."""
        if job is None:
            wrong = np.arange(len(samples))
        else:
            beside = job[samples.start : samples.stop]
            if _kind(own) != _kind(beside):
                wrong = np.arange(len(samples))
            else:
                wrong = differing_rows(own, beside)
                self._measure(own, beside, wrong, samples)
        found: npt.NDArray[np.intp] = wrong + samples.start
        self.rows.update(found.tolist())
        return found

    def _measure(self, own: Rows, job: Rows, wrong: npt.NDArray[np.intp], samples: range) -> None:
        if isinstance(own, RaggedRows) or isinstance(job, RaggedRows) or own.dtype.kind != "f":
            return
        for place in wrong.tolist():
            with np.errstate(invalid="ignore"):
                moved = np.abs(own[place].astype(np.float64) - job[place].astype(np.float64))
            largest = float(np.max(moved, where=np.isfinite(moved), initial=-1.0))
            if largest >= 0 and (self.largest is None or largest > self.largest):
                self.largest, self.largest_at = largest, samples[place]

    def difference(self, dataset: Dataset) -> ColumnDifference:
        at = None if self.largest_at is None else dataset.id(self.largest_at)
        return ColumnDifference(rows_differ=len(self.rows), largest=self.largest, largest_at=at)


def _kind(rows: Rows) -> tuple[Any, ...]:
    values = rows.values if isinstance(rows, RaggedRows) else rows
    return type(rows), values.dtype, values.shape[1:]


def _is_output(name: str) -> bool:
    return name.startswith(_OUTPUT) and name[len(_OUTPUT) : len(_OUTPUT) + 1] in ("", ".", "[")


def _diagnose_setting(
    setting: Setting,
    task: Task,
    model: nn.Module,
    batches: _Batches,
    options: RunOptions,
    device: torch.device,
    shapes: Sequence[int],
) -> SettingDiagnosis:
    with numerics.settings(setting.precision, device) as held:
        computed = _Computed(task, model, batches, setting.precision, device)
        # The job's own shape a second time, first: without equal bits there nothing else means anything.
        again, _ = computed.compare(shapes[-1])
        tracer = _Tracer(model, computed, batches.rows)
        found = []
        for shape in shapes[:-1]:
            diagnosis, differing = computed.compare(shape)
            found.append(tracer.explained(diagnosis, differing) if differing else diagnosis)
        notes = [*tracer.notes, *held.check_after_loop()]
    if not again.equal:
        notes.append(
            f"the model does not give the same bits twice for one batch of {again.shape}: what differs in "
            "other shapes may have nothing to do with the shape"
        )
    return SettingDiagnosis(setting=setting, shapes=(*found, again), notes=tuple(notes))


class _Tracer:
    """Finds the modules that make rows differ; looks at the job's batch once, when it is first needed."""

    def __init__(self, model: nn.Module, computed: _Computed, rows: int) -> None:
        self._is_program = is_compiled(model) or isinstance(model, torch.jit.ScriptModule)
        self._watch = Watch(model, rows)
        self._computed = computed
        self._rows = rows
        self._job: Any = None
        self._watched: dict[str, Rows] = {}
        self.notes: list[str] = []

    def explained(self, diagnosis: ShapeDiagnosis, differing: Sequence[range]) -> ShapeDiagnosis:
        """The same with the modules that cause it.

        Args:
            diagnosis: of a shape that differs.
            differing: the batches in which it does.
        """
        if self._is_program:
            return replace(diagnosis, cause=ONE_PROGRAM)
        self._look_at_job(differing[0])
        found = []
        is_seen = False
        for samples in differing[:_WATCHED]:
            with self._watch.hashes() as calls:
                columns = self._computed.columns(samples)
            is_seen |= any(
                len(_Column().add(rows, self._watched.get(name), samples)) for name, rows in columns.items()
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
