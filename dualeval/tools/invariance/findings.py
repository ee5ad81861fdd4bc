"""What a diagnosis of batch shapes has found, in plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dualeval.tools.invariance.settings import Setting
from dualeval.tools.invariance.watched_modules import ModuleDifference

# Where the difference comes from, for people.
IN_MODULES = "modules"
IN_BATCH = "the batch itself: collate makes other inputs of these samples in a batch of this size"
AFTER_MODEL = "the task's forward or observe: the model's own outputs have the same bits"
NOT_SEEN = "not found: while the modules are looked at, the rows have the same bits"
ONE_PROGRAM = "not looked for: the model is one program, compiled or scripted, and takes no hooks"


@dataclass(frozen=True, kw_only=True)
class ColumnDifference:
    """A column, or an output of the model, whose rows differ."""

    # Number of rows with another bit.
    rows_differ: int
    # The largest absolute difference of finite floats; None of other kinds.
    largest: float | None = None
    # The id of its sample.
    largest_at: str | None = None


@dataclass(frozen=True, kw_only=True)
class ShapeDiagnosis:
    """The rows in batches of one shape, beside the same rows in the job's batch."""

    shape: int
    # Number of rows that were compared.
    rows: int
    # How many of them have another bit in a column or an output.
    rows_differ: int
    # Those that differ, by name.
    columns: dict[str, ColumnDifference] = field(default_factory=dict)
    # Those that cause it: other outputs for the same inputs; by order of execution.
    modules: tuple[ModuleDifference, ...] = ()
    # Number of modules that differ as a consequence.
    after: int = 0
    # "modules", or in words where else it comes from; None where nothing differs.
    cause: str | None = None
    # Modules that could not be compared.
    not_followed: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all rows have the same bits."""
        return not self.rows_differ


@dataclass(frozen=True, kw_only=True)
class SettingDiagnosis:
    """All shapes in one precision and layout."""

    setting: Setting
    # Why it was not tried; None where it was.
    problem: str | None = None
    # From the smallest; the last is the job's own shape, computed a second time.
    shapes: tuple[ShapeDiagnosis, ...] = ()
    # Sentences for people.
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What a job's model makes of the same rows in batches of other shapes."""

    # What was looked at, in words, by label.
    description: dict[str, str]
    batch_size: int
    # Number of rows that were looked at: the job's first batch.
    rows: int
    # Number of samples of the job.
    samples: int
    # Number of samples of the job's last batch, where it is shorter; else None.
    last_batch: int | None
    # Device, model, cpu_capability, bits and versions.
    machine: dict[str, Any]
    # The job's own first.
    settings: tuple[SettingDiagnosis, ...]
    # Sentences for people.
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        content = asdict(self)
        for setting, of in zip(content["settings"], self.settings, strict=True):
            for shape, known in zip(setting["shapes"], of.shapes, strict=True):
                shape["equal"] = known.equal
        return {"schema_version": 1, **content}
