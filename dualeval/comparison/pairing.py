"""Two finished runs' samples, paired by their ids; runs over different data are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualeval.columns.ragged import NumpyRows
from dualeval.engine.folder.finished import finished_run
from dualeval.engine.folder.row_windows import MappedColumns
from dualeval.engine.folder.stored_rows import StoredRows
from dualeval.engine.values.differences import differing_fingerprints
from dualeval.engine.values.row_comparison import same_entries
from dualeval.errors import DualevalError, UsageError
from dualeval.messages import counted
from dualeval.metrics.scores import Score, score_from
from dualeval.result import JOB, RESULT, Result, read_job

# Ids of one kind that a message names.
_NAMED = 3
_TARGET = "target"
# Module and class; no other text of a run's file is imported.
_RESAMPLED = "dualeval.metrics.detection.average_precision", "AveragePrecision"


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A finished run."""

    folder: Path
    # What result.json says.
    result: Result
    # Its Parquet file.
    rows: StoredRows
    # By metric, how the value follows from a number of each sample.
    scores: Mapping[str, Score]
    # By figure of all samples together, the metric that draws them again.
    resampled: Mapping[str, Any] = field(default_factory=dict)

    @property
    def compared(self) -> tuple[str, ...]:
        """The metrics that can be compared."""
        return (*self.scores, *self.resampled)

    def columns(self, names: Sequence[str], rows: npt.NDArray[np.int64]) -> dict[str, NumpyRows]:
        """Columns of some evaluated rows, of any form."""
        evaluated = []
        with MappedColumns(None) as mapped:
            for window in self.rows.windows(names):
                mapped.append({name: window.columns[name] for name in names})
                evaluated.append(window.evaluated)
            whole = mapped.columns()
        places = (np.cumsum(np.concatenate(evaluated)) - 1)[rows]
        return {name: whole[name][places] for name in names}


def open_run(folder: str | Path) -> ComparedRun:
    """Open a run."""
    folder = Path(folder)
    result, rows = finished_run(folder)
    resampled = _resampled_metrics(folder)
    if not result.scores and not resampled:
        raise UsageError(
            f"{folder / RESULT} does not say how a metric follows from one number per sample ('scores'). "
            f"Evaluate again with a metric that does, such as top1 or Mean: 'dualeval run ... --out {folder} "
            "--fresh'."
        )
    scores = {name: score_from(score) for name, score in result.scores.items()}
    return ComparedRun(folder=folder, result=result, rows=rows, scores=scores, resampled=resampled)


def _resampled_metrics(folder: Path) -> dict[str, Any]:
    """By figure, the metrics of a run that compare by drawing samples again, made as its job.json says."""
    options = read_job(folder)["job"].get("metric_options") or {} if (folder / JOB).is_file() else {}
    found: dict[str, Any] = {}
    for each in options.values():
        module, _, name = str(each.get("class") if isinstance(each, dict) else "").rpartition(".")
        if (module, name) == _RESAMPLED:
            metric = getattr(import_module(module), name).of_fingerprint(each)
            found |= dict.fromkeys(metric.figures, metric)
    return found


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The samples that both runs have evaluated, in the order of A."""

    a: ComparedRun
    b: ComparedRun
    # The row of each pair in A's file, shape (pairs,).
    rows_a: npt.NDArray[np.int64]
    rows_b: npt.NDArray[np.int64]
    # Of all rows of A, a `pyarrow.Array`.
    ids: Any
    # The rows in B's file of the samples that failed in A only.
    only_b: npt.NDArray[np.int64]
    # In A's file, of those that failed in B only.
    only_a: npt.NDArray[np.int64]
    # In both.
    failed_both: int
    # Sentences about the data.
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rows_a)

    @property
    def failed_a(self) -> int:
        """Number of samples that failed in A only."""
        return len(self.only_b)

    @property
    def failed_b(self) -> int:
        """Number of samples that failed in B only."""
        return len(self.only_a)

    def columns(self, name: str) -> tuple[Any, Any] | None:
        """A column of both files, as two ``pyarrow.Array``, an entry a pair; None where one lacks it."""
        both = self.a.rows.whole(name), self.b.rows.whole(name)
        if both[0] is None or both[1] is None:
            return None
        return at_rows(both[0], self.rows_a), at_rows(both[1], self.rows_b)

    def ids_of(self, pairs: npt.NDArray[np.bool_]) -> list[str]:
        """The ids of the pairs that are true in a mask of shape (pairs,)."""
        ids: list[str] = at_rows(self.ids, self.rows_a[pairs]).to_pylist()
        return ids


def at_rows(array: Any, rows: npt.NDArray[np.int64]) -> Any:
    """Rows of a ``pyarrow.Array``; the array itself where they are all of it, in order."""
    import pyarrow

    is_whole = len(rows) == len(array) and bool((rows == np.arange(len(rows))).all())
    return array if is_whole else array.take(pyarrow.array(rows))


def pair(a: ComparedRun, b: ComparedRun, *, trust_ids: bool = False) -> Pairs:
    """Pair two runs' samples by id."""
    ids, other_ids = a.rows.whole("id"), b.rows.whole("id")
    same_order = bool(ids.equals(other_ids))
    rows_b = np.arange(len(ids), dtype=np.int64) if same_order else _joined(a, b, ids, other_ids)
    notes = _check_fingerprints(a, b, same_order=same_order, trust_ids=trust_ids)
    evaluated_a, evaluated_b = _evaluated(a), _evaluated(b)[rows_b]
    both = evaluated_a & evaluated_b
    rows_a = np.flatnonzero(both).astype(np.int64)
    pairs = Pairs(
        a=a,
        b=b,
        rows_a=rows_a,
        rows_b=rows_b[both],
        ids=ids,
        only_b=rows_b[~evaluated_a & evaluated_b],
        only_a=np.flatnonzero(evaluated_a & ~evaluated_b).astype(np.int64),
        failed_both=int((~evaluated_a & ~evaluated_b).sum()),
        notes=tuple(notes),
    )
    if len(pairs) < 2:
        raise UsageError(
            f"{a.folder} and {b.folder} have {counted(len(pairs), 'sample')} "
            "that both have evaluated: at least 2 are needed"
        )
    _check_targets(pairs)
    return pairs


def _evaluated(run: ComparedRun) -> npt.NDArray[np.bool_]:
    """Which samples could be read: the others have no values."""
    if not run.rows.names:
        raise UsageError(f"{run.rows.path} has no columns that a metric could read")
    return np.asarray(run.rows.whole(run.rows.names[0]).is_valid())


def _joined(a: ComparedRun, b: ComparedRun, ids: Any, other_ids: Any) -> npt.NDArray[np.int64]:
    """For each row of A that of B with the same id, by a hash table."""
    import pyarrow.compute

    for run, run_ids in ((a, ids), (b, other_ids)):
        distinct = pyarrow.compute.count_distinct(run_ids).as_py()
        if distinct != len(run_ids):
            raise DualevalError(
                f"{run.rows.path} is damaged: it has {len(run_ids):,} rows and {distinct:,} different ids. "
                f"'dualeval verify {run.folder}' names them."
            )
    matches = pyarrow.compute.index_in(ids, value_set=other_ids)
    only_a = ids.filter(matches.is_null())
    only_b = other_ids.filter(pyarrow.compute.index_in(other_ids, value_set=ids).is_null())
    if len(only_a) or len(only_b):
        source = "--tasks" if "tasks" in a.result.job else "--data"  # a harness's tasks name their own data
        raise UsageError(
            f"{a.folder} and {b.folder} are runs over different samples: {len(ids) - len(only_a):,} ids are "
            f"in both, {len(only_a):,} only in A{_named(only_a)}, {len(only_b):,} only in B{_named(only_b)}. "
            f"A comparison needs pairs: evaluate both over the same samples ({source}, --limit, or "
            "--sample and --seed)."
        )
    rows: npt.NDArray[np.int64] = matches.to_numpy().astype(np.int64)
    return rows


def _named(ids: Any) -> str:
    """The first few ids in brackets."""
    first = ", ".join(ids.slice(0, _NAMED).to_pylist())
    return f" ({first}{', ...' if len(ids) > _NAMED else ''})" if first else ""


def _check_fingerprints(a: ComparedRun, b: ComparedRun, *, same_order: bool, trust_ids: bool) -> list[str]:
    """Check what the runs have noted of their data, beyond the ids; returns what could not be checked."""
    if not same_order:
        return [
            "The runs have their samples in different orders, and were paired by id. The fingerprints of the "
            "data depend on the order, so they were not compared."
        ]
    what = differing_fingerprints(vars(a.result), vars(b.result))
    if not what:
        return []
    if trust_ids:
        return [
            f"The data's fingerprints differ in {what}; equal ids were taken for equal samples (--trust-ids)."
        ]
    raise UsageError(
        f"{a.folder} and {b.folder} have the same ids, but over different data: the fingerprints differ in "
        f"{what}. If equal ids are the same samples anyway, for example if only a transform in your data set "
        "differs, or --iou-type, add --trust-ids to dualeval compare (in Python trust_ids=True)."
    )


def _check_targets(pairs: Pairs) -> None:
    """Check that both runs have the same true classes."""
    import pyarrow

    columns = pairs.columns(_TARGET)
    if columns is None or pyarrow.types.is_nested(columns[0].type) or columns[0].equals(columns[1]):
        return
    differing = ~same_entries(*columns)
    if differing.any():
        named = _named(at_rows(pairs.ids, pairs.rows_a[differing]))
        raise UsageError(
            f"{pairs.a.folder} and {pairs.b.folder} have different targets for {int(differing.sum()):,} "
            f"samples{named}: they were not evaluated against the same labels."
        )
