"""Confusion matrices and figures of classes: of a result's metrics, or else of the run's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt

from dualeval.errors import DualevalError
from dualeval.report.loggers.picture import Confusion
from dualeval.result import PREDICTIONS

if TYPE_CHECKING:
    from dualeval.result import Result

_TARGET, _PREDICTION = "target", "prediction"
# Whole numbers beyond are no classes of which a matrix could be drawn.
_MOST_CLASSES = 100_000
_PER_CLASS = "per_class"


def confusions_of(result: Result, folder: Path | None, names: Sequence[str | None]) -> dict[str, Confusion]:
    """The confusion matrices of a result, by name; without one that of predictions.parquet."""
    matrices = {
        name: Confusion(classes=value["classes"], entries=value["entries"], names=names)
        for name, value in result.metrics.items()
        if is_confusion(value)
    }
    if not matrices and folder is not None and (folder / PREDICTIONS).is_file():
        of_rows = _of_rows(folder / PREDICTIONS, result, names)
        if of_rows is not None:
            matrices["confusion_matrix"] = of_rows
    return matrices


def figures_of(result: Result, confusions: Mapping[str, Confusion]) -> dict[str, dict[str, list[Any]]]:
    """Figures of each class by table and column: those among the metrics, or else those of a matrix."""
    found: dict[str, dict[str, list[Any]]] = {}
    for name, value in result.metrics.items():
        if name.endswith(_PER_CLASS):
            columns = value if isinstance(value, dict) else {name.removesuffix(f"_{_PER_CLASS}"): value}
            lists = {column: values for column, values in columns.items() if isinstance(values, list)}
            if lists:
                found[name] = lists
    if not found:
        for name, confusion in confusions.items():
            prefix = name.removesuffix("confusion_matrix")
            found[f"{prefix}{_PER_CLASS}"] = _figures(confusion)
    return found


def is_confusion(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a metric's value is a matrix as ``metrics.Confusion`` gives it."""
    if not isinstance(value, dict) or value.keys() != {"classes", "entries"}:
        return False
    classes = value["classes"]
    is_count = isinstance(classes, int) and not isinstance(classes, bool)
    return is_count and 0 < classes <= _MOST_CLASSES and isinstance(value["entries"], list)


def _figures(confusion: Confusion) -> dict[str, list[Any]]:
    """Precision, recall and F1 as ``metrics.PrecisionRecall`` defines them, and the counts."""
    counts = confusion.counts()
    right = _sums(counts[counts[:, 0] == counts[:, 1]], 0, confusion.classes)
    support = _sums(counts, 0, confusion.classes)
    predicted = _sums(counts[counts[:, 1] >= 0], 1, confusion.classes)
    return {
        "precision": _shares(right, predicted),
        "recall": _shares(right, support),
        "f1": _shares(2 * right, predicted + support),
        "support": support.tolist(),
        "predicted": predicted.tolist(),
    }


def _sums(counts: npt.NDArray[np.int64], column: int, classes: int) -> npt.NDArray[np.int64]:
    sums = np.zeros(classes, np.int64)
    np.add.at(sums, counts[:, column], counts[:, 2])
    return sums


def _shares(parts: npt.NDArray[np.int64], wholes: npt.NDArray[np.int64]) -> list[float]:
    shares: list[float] = (parts / np.maximum(wholes, 1)).tolist()
    return shares


def _of_rows(path: Path, result: Result, names: Sequence[str | None]) -> Confusion | None:
    """The matrix of a run's rows; None where they have no classes."""
    import pyarrow
    import pyarrow.parquet

    try:
        schema = pyarrow.parquet.read_schema(path)
        for name in (_TARGET, _PREDICTION):
            if name not in schema.names or not pyarrow.types.is_integer(schema.field(name).type):
                return None
        found: dict[tuple[int, int], int] = {}
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=[_TARGET, _PREDICTION]):
                columns = [batch.column(name).drop_null().to_numpy() for name in (_TARGET, _PREDICTION)]
                pairs, counts = np.unique(np.stack(columns).astype(np.int64), axis=1, return_counts=True)
                for target, prediction, count in zip(*pairs.tolist(), counts.tolist(), strict=True):
                    if target < 0:
                        continue  # what a task leaves out, as -1 or -100
                    found[target, prediction] = found.get((target, prediction), 0) + count
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DualevalError(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from error
    given = result.job.get("num_classes")
    largest = max((max(pair) for pair in found), default=-1)
    least = min((prediction for _, prediction in found), default=0)
    classes = max(largest + 1, len(names), given if isinstance(given, int) else 0)
    if not found or least < -1 or classes > _MOST_CLASSES:
        return None
    entries = [[target, prediction, count] for (target, prediction), count in sorted(found.items())]
    return Confusion(classes=classes, entries=entries, names=names)
