"""A confusion matrix as a picture: counts in cells for few classes, a map for many."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dualeval.wording import printable

if TYPE_CHECKING:
    from dualeval.report.loggers.confusions import Confusion

# Up to so many classes each cell has its count, up to so many each row its name; more than the third are not
# drawn.
_COUNTED, _NAMED, MOST_DRAWN = 20, 100, 1_000
_NAME_LETTERS = 30
_CELL, _LEAST, _MOST = 0.5, 5.0, 12.0  # inches: of a cell's side, and of the matrix's
_LABEL, _TITLE = 0.5, 0.9  # inches: of an axis' name, and above the matrix
_LETTER = 0.65  # the width of a letter, of its size
_POINTS = 72  # of an inch
# Where the colours begin: a single sample among many is to be seen.
_FAINTEST = -0.04
_DARK = 0.4
_STYLE = {"text.parse_math": False, "font.size": 10}  # names of strangers are no formulas


def draw_confusion(confusion: Confusion, title: str) -> bytes:
    """Draw the matrix; returns a PNG.

    Colours are shares of the samples of each target, on a scale of square roots: a confusion of 1 % is to be
    seen. A last column, NaN, is there where it has entries.
    """
    from matplotlib import style
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    amounts = _amounts(confusion)
    rows, columns = amounts.shape
    shares = amounts / np.maximum(amounts.sum(1, keepdims=True), 1)
    side = min(max(_CELL * rows, _LEAST), _MOST)
    width = _POINTS * side / rows  # of a cell, in points
    size = min(10.0, 0.9 * width)
    names = [_fitted(confusion.name(index)) for index in [*range(rows), -1][:columns]]
    shown = names if rows <= _NAMED else [f"{rows:,}"]
    margin = _LETTER * size * max(map(len, shown)) / _POINTS + _LABEL
    # Whatever the user's matplotlibrc has set, and without a word about letters that the font lacks.
    with warnings.catch_warnings(), style.context(["default", _STYLE]):
        warnings.simplefilter("ignore")
        # Margins are made here: matplotlib's own ways to fit a figure lay all names out twice.
        wide, high = margin + side * columns / rows + _LABEL, margin + side + _TITLE
        figure = Figure(figsize=(wide, high))
        axes = figure.add_axes((margin / wide, margin / high, side * columns / rows / wide, side / high))
        norm = PowerNorm(0.5, _FAINTEST, 1)
        axes.imshow(np.ma.masked_equal(shares, 0), "Blues", norm=norm, interpolation="nearest", aspect="auto")
        axes.set(xlabel="predicted", ylabel="target")
        figure.text(0.1 / wide, 1 - 0.1 / high, f"{printable(title)}\n{_summary(amounts)}", va="top")
        if rows <= _NAMED:
            axes.set_yticks(range(rows), names[:rows], fontsize=size)
            axes.set_xticks(range(columns), names, fontsize=size, rotation=90)
        for row, column in np.argwhere(amounts).tolist() if rows <= _COUNTED else ():
            text = f"{amounts[row, column]:,}"
            colour = "white" if shares[row, column] > _DARK else "black"
            fitting = min(11.0, 0.9 * width / (_LETTER * len(text)))
            axes.text(column, row, text, color=colour, fontsize=fitting, ha="center", va="center")
        with io.BytesIO() as file:
            figure.savefig(file, format="png", dpi=100)
            return file.getvalue()


def _amounts(confusion: Confusion) -> npt.NDArray[np.int64]:
    """Each cell's count."""
    target, prediction, count = confusion.counts().T
    classes = confusion.classes
    amounts = np.zeros((classes, classes + bool((prediction < 0).any())), np.int64)
    np.add.at(amounts, (target, np.where(prediction < 0, classes, prediction)), count)
    return amounts


def _summary(amounts: npt.NDArray[np.int64]) -> str:
    total, right = int(amounts.sum()), int(amounts.trace())
    share = f", {100 * right / total:.2f} % on the diagonal" if total else ""
    return f"{len(amounts):,} classes, {total:,} samples{share}\ncolours are shares of each row"


def _fitted(text: str) -> str:
    """As much of a name as there is room for."""
    text = printable(" ".join(text.split()))
    return text if len(text) <= _NAME_LETTERS else f"{text[: _NAME_LETTERS - 3]}..."
