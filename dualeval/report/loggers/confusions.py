"""Confusion matrices and figures of classes, of a result's metrics or else of its rows; and the picture."""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt

from dualeval.errors import DualevalError
from dualeval.messages import printable
from dualeval.result import PREDICTIONS, class_names

if TYPE_CHECKING:
    from dualeval.result import Result

_PAIR = ["target", "prediction"]
# No matrix can be drawn of classes with larger numbers.
_MOST_CLASSES = 100_000
# Lists in the order of the classes; figures of each class under its name.
_PER_CLASS, _BY_CLASS = "per_class", "by_class"
_ROWS_AT_ONCE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """How often each target was predicted as each class."""

    # They are 0 to classes - 1.
    classes: int
    # Rows [target, prediction, count], of the pairs that occur; a prediction of -1 means none.
    entries: Sequence[Sequence[int]]
    # Of the classes, as far as they are known; empty where none is.
    names: Sequence[str | None] = ()

    def name(self, index: int) -> str:
        """What a class is called: its name, or else its number."""
        if index < 0:
            return "NaN"
        named = self.names[index] if index < len(self.names) else None
        return str(index) if named is None else named

    def counts(self) -> npt.NDArray[np.int64]:
        """Targets, predictions and counts, shape (entries, 3)."""
        return np.array(self.entries, np.int64).reshape(-1, 3)


def confusions_of(result: Result, folder: Path | None) -> dict[str, Confusion]:
    """The confusion matrices of a result, by name; without one that of predictions.parquet."""
    names = class_names(result)
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
    figures: dict[str, dict[str, list[Any]]] = {}
    for name, value in result.metrics.items():
        if name.endswith(_BY_CLASS) and isinstance(value, dict) and value:
            rows: list[Any] = [*value.values()]
            figures[name] = {column: [row[column] for row in rows] for column in rows[0]}
        if name.endswith(_PER_CLASS):
            columns = value if isinstance(value, dict) else {name.removesuffix(f"_{_PER_CLASS}"): value}
            lists = {column: values for column, values in columns.items() if isinstance(values, list)}
            if lists:
                figures[name] = lists
    if not figures:
        for name, confusion in confusions.items():
            figures[f"{name.removesuffix('confusion_matrix')}{_PER_CLASS}"] = _figures(confusion)
    return figures


def is_confusion(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a metric's value is a matrix as ``metrics.Confusion`` gives it."""
    if not isinstance(value, dict) or value.keys() != {"classes", "entries"}:
        return False
    is_count = isinstance(value["classes"], int) and 0 < value["classes"] <= _MOST_CLASSES
    return is_count and isinstance(value["entries"], list)


def _figures(confusion: Confusion) -> dict[str, list[Any]]:
    """Precision, recall and F1 as ``metrics.PrecisionRecall`` defines them, and the counts."""
    target, prediction, count = confusion.counts().T
    # Sums as floats are exact up to 2**53.
    support = np.bincount(target, count, confusion.classes)
    right = np.bincount(target, count * (target == prediction), confusion.classes)
    predicted = np.bincount(prediction + 1, count, confusion.classes + 1)[1:]
    return {
        "precision": (right / np.maximum(predicted, 1)).tolist(),
        "recall": (right / np.maximum(support, 1)).tolist(),
        "f1": (2 * right / np.maximum(predicted + support, 1)).tolist(),
        "support": support.astype(int).tolist(),
        "predicted": predicted.astype(int).tolist(),
    }


def _of_rows(path: Path, result: Result, names: Sequence[str | None]) -> Confusion | None:
    """The matrix of a run's rows; None where they have no classes."""
    import pyarrow
    import pyarrow.parquet

    counts: Counter[tuple[int, int]] = Counter()
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            types = {field.name: field.type for field in file.schema_arrow}
            if not all(name in types and pyarrow.types.is_integer(types[name]) for name in _PAIR):
                return None
            for rows in file.iter_batches(_ROWS_AT_ONCE, columns=_PAIR):
                table = pyarrow.Table.from_batches([rows]).drop_null()
                pairs = table.group_by(_PAIR).aggregate([([], "count_all")]).to_pydict()
                for target, prediction, count in zip(*pairs.values(), strict=True):
                    counts[target, prediction] += count
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DualevalError(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from error
    # Without what a task leaves out, as -1 or -100.
    entries = sorted([*pair, count] for pair, count in counts.items() if pair[0] >= 0)
    num_classes = result.job.get("num_classes")
    largest = max((max(target, prediction) for target, prediction, _ in entries), default=-1)
    least = min((prediction for _, prediction, _ in entries), default=0)
    classes = max(largest + 1, len(names), num_classes if isinstance(num_classes, int) else 0)
    if not entries or least < -1 or classes > _MOST_CLASSES:
        return None
    return Confusion(classes=classes, entries=entries, names=names)


# -- the picture ---------------------------------------------------------------------------------------

# Up to so many classes each cell has its count, up to so many each row its name; more than the third are not
# drawn.
_COUNTED, _NAMED, MOST_DRAWN = 20, 100, 1_000
_NAME_LETTERS = 30
_DARK = 0.4
_STYLE = {"text.parse_math": False, "font.size": 10}  # names of strangers are no formulas


def draw_confusion(confusion: Confusion, title: str) -> bytes:
    """Draw the matrix, counts in cells for few classes and a map for many; returns a PNG.

    Colours are shares of the samples of each target, on a scale of square roots: a confusion of 1 % is to be
    seen. A last column, NaN, is there where it has entries.
    """
    from matplotlib import style
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    target, prediction, count = confusion.counts().T
    rows = confusion.classes
    amounts = np.zeros((rows, rows + bool((prediction < 0).any())), np.int64)
    np.add.at(amounts, (target, np.where(prediction < 0, rows, prediction)), count)
    shares = amounts / np.maximum(amounts.sum(1, keepdims=True), 1)
    total, right = int(amounts.sum()), int(amounts.trace())
    share = f", {100 * right / total:.2f} % on the diagonal" if total else ""
    summary = f"{rows:,} classes, {total:,} samples{share}\ncolours are shares of each row"
    side = min(max(0.5 * rows, 5.0), 12.0)  # inches
    size = min(10.0, 65 * side / rows)  # of letters: 0.9 of a cell's 72 points an inch
    # Whatever the user's matplotlibrc has set, and without a word about letters that the font lacks.
    with warnings.catch_warnings(), style.context(["default", _STYLE]):
        warnings.simplefilter("ignore")
        figure = Figure(figsize=(side, side))
        axes = figure.add_axes((0, 0, 1, 1))
        norm = PowerNorm(0.5, -0.04, 1)  # the colours begin where a single sample among many is seen
        axes.imshow(np.ma.masked_equal(shares, 0), "Blues", norm=norm, interpolation="nearest", aspect="auto")
        axes.set(xlabel="predicted", ylabel="target")
        axes.set_title(f"{printable(title)}\n{summary}", loc="left", fontsize=10)
        if rows <= _NAMED:
            names = [_fitted(confusion.name(at)) for at in [*range(rows), -1][: amounts.shape[1]]]
            axes.set_yticks(range(rows), names[:rows], fontsize=size)
            axes.set_xticks(range(len(names)), names, fontsize=size, rotation=90)
        for row, column in np.argwhere(amounts).tolist() if rows <= _COUNTED else ():
            text = f"{amounts[row, column]:,}"
            colour = "white" if shares[row, column] > _DARK else "black"
            fitting = min(11.0, 100 * side / rows / len(text))
            axes.text(column, row, text, color=colour, fontsize=fitting, ha="center", va="center")
        with io.BytesIO() as file:
            figure.savefig(file, format="png", dpi=100, bbox_inches="tight")
            return file.getvalue()


def _fitted(text: str) -> str:
    """As much of a name as there is room for."""
    text = printable(" ".join(text.split()))
    return text if len(text) <= _NAME_LETTERS else f"{text[: _NAME_LETTERS - 3]}..."
