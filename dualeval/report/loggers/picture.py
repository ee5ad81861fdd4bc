"""A confusion matrix as a picture: counts in cells for few classes, a map and a list for many."""

from __future__ import annotations

import io
import math
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dualeval.wording import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dualeval.report.loggers.confusions import Confusion

# Up to so many classes each cell has its count, up to so many each row its name; where there are more than
# the third, neighbours share a cell.
_COUNTED, _NAMED, _CELLS = 30, 100, 500
_LISTED = 24
_NAME_LETTERS, _LISTED_LETTERS = 30, 22
_CELL, _LEAST, _MOST = 0.5, 5.0, 12.0  # inches: of a cell's side, and of the matrix's
_LETTER = 0.65  # the width of a letter, of its size
_POINTS = 72  # of an inch
# Where the colours begin: a single sample among many is to be seen.
_FAINTEST = 0.2
_DARK = 0.4
_STYLE = {"text.parse_math": False, "font.size": 10}  # names of strangers are no formulas
_PERCENTS = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 1)


def draw_confusion(confusion: Confusion, title: str) -> bytes:
    """Draw the matrix; returns a PNG.

    Colours are shares of the samples of each target, on a scale of square roots: a confusion of 1 % is to be
    seen. A last column, NaN, is there where it has entries.
    """
    from matplotlib import colormaps, style
    from matplotlib.colors import ListedColormap, PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    counts = confusion.counts()
    group = math.ceil(confusion.classes / _CELLS)
    amounts = _cells(counts, math.ceil(confusion.classes / group), group)
    shares = amounts / np.maximum(amounts.sum(1, keepdims=True), 1)
    rows, columns = amounts.shape
    side = min(max(_CELL * rows, _LEAST), _MOST)
    # Whatever the user's matplotlibrc has set, and without a word about letters that the font lacks.
    with warnings.catch_warnings(), style.context(["default", _STYLE]):
        warnings.simplefilter("ignore")
        # What is beside the matrix lies outside of the figure, which is saved with it.
        figure = Figure(figsize=(side, side))
        axes = figure.add_axes((0, 0, columns / rows, 1))
        image = axes.imshow(
            np.ma.masked_equal(shares, 0),
            ListedColormap(colormaps["Blues"](np.linspace(_FAINTEST, 1, 256))),
            norm=PowerNorm(0.5, 0, 1),
            interpolation="nearest",
            extent=(-0.5, group * columns - 0.5, group * rows - 0.5, -0.5),
            aspect="auto",
        )
        axes.set(xlabel="predicted", ylabel="target")
        axes.set_title(f"{printable(title)}\n{_summary(counts, confusion.classes, group)}", loc="left")
        right = columns / rows + 0.3 / side
        scale = figure.colorbar(
            image, figure.add_axes((right, 1 - 2.5 / side, 0.2 / side, 2.5 / side)), ticks=_PERCENTS
        )
        scale.ax.yaxis.set_major_formatter(PercentFormatter(1))
        if confusion.classes <= _NAMED:
            _name(axes, confusion, columns, size=min(10.0, 0.9 * _POINTS * side / rows))
        if confusion.classes <= _COUNTED:
            _write_counts(axes, amounts, shares, width=_POINTS * side / rows)
        else:
            figure.text(right + 1.2 / side, 1, _most_frequent(confusion, counts), verticalalignment="top")
        with io.BytesIO() as file:
            figure.savefig(file, format="png", dpi=100, bbox_inches="tight", pad_inches=0.2)
            return file.getvalue()


def _cells(counts: npt.NDArray[np.int64], rows: int, group: int) -> npt.NDArray[np.int64]:
    """Each cell's count; a row, or column, is that of ``group`` neighbours."""
    predicted = np.where(counts[:, 1] < 0, rows, counts[:, 1] // group)
    amounts = np.zeros((rows, rows + bool((counts[:, 1] < 0).any())), np.int64)
    np.add.at(amounts, (counts[:, 0] // group, predicted), counts[:, 2])
    return amounts


def _summary(counts: npt.NDArray[np.int64], classes: int, group: int) -> str:
    total = int(counts[:, 2].sum())
    right = int(counts[counts[:, 0] == counts[:, 1], 2].sum())
    share = f", {100 * right / total:.2f} % on the diagonal" if total else ""
    shared = f"; each cell is {group} x {group} classes" if group > 1 else ""
    return f"{classes:,} classes, {total:,} samples{share}{shared}; colours are shares of each row"


def _name(axes: Axes, confusion: Confusion, columns: int, *, size: float) -> None:
    names = [_fitted(confusion.name(index), _NAME_LETTERS) for index in range(confusion.classes)]
    axes.set_yticks(range(len(names)), names, fontsize=size)
    names += [confusion.name(-1)] * (columns - len(names))
    axes.set_xticks(range(columns), names, fontsize=size, rotation=90)


def _write_counts(axes: Axes, amounts: npt.NDArray[np.int64], shares: Any, *, width: float) -> None:
    for row, column in np.argwhere(amounts).tolist():
        text = f"{amounts[row, column]:,}"
        size = min(11.0, 0.9 * width / (_LETTER * len(text)))
        colour = "white" if shares[row, column] > _DARK else "black"
        axes.text(column, row, text, color=colour, fontsize=size, ha="center", va="center")


def _most_frequent(confusion: Confusion, counts: npt.NDArray[np.int64]) -> str:
    """The pairs that are mixed up most often, a line each."""
    wrong = counts[counts[:, 0] != counts[:, 1]]
    support = np.bincount(counts[:, 0], counts[:, 2], confusion.classes)
    lines = ["most frequent confusions (share of the target)\n"]
    # Equal counts in the order of the classes.
    order = np.lexsort((wrong[:, 1], wrong[:, 0], -wrong[:, 2]))
    for target, predicted, count in wrong[order][:_LISTED].tolist():
        pair = [_fitted(confusion.name(index), _LISTED_LETTERS) for index in (target, predicted)]
        lines.append(f"{count:,}  ({100 * count / support[target]:.0f} %)   {pair[0]}  as  {pair[1]}")
    return "\n".join(lines)


def _fitted(text: str, most: int) -> str:
    """As much of a name as there is room for."""
    text = printable(" ".join(text.split()))
    return text if len(text) <= most else f"{text[: most - 3]}..."
