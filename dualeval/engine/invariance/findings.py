"""What a diagnosis of batch shapes has found, in plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dualeval.engine.invariance.modules import ModuleDifference
from dualeval.engine.invariance.settings import Setting

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
