"""A confusion matrix as a picture: counts in cells for few classes, a map and a list for many."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

# Up to so many classes each cell has its count, up to so many each row its name.
_COUNTED, _NAMED = 30, 100
# Pixels of the map of many classes, and its cells: where there are more classes, neighbours share a cell.
_MAP, _CELLS = 1000, 500
_LISTED = 24
_NAME_WIDTH = 190
_MARGIN = 24
_INK, _PALE, _LINE = (33, 37, 41), (110, 117, 125), (206, 212, 218)
# From no sample of a class to all, on a scale of square roots: a confusion of 1 % is to be seen.
_COLOURS = np.array(
    [(255, 255, 255), (222, 235, 247), (158, 202, 225), (66, 146, 198), (8, 81, 156), (8, 40, 92)], np.float64
)
_DARK = 0.5
# Where the colours of a map of many classes begin: a single sample among them is to be seen.
_FAINTEST = 0.25


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """How often each target was predicted as each class."""

    # They are 0 to classes - 1.
    classes: int
    # Rows [target, prediction, count], of the pairs that occur; a prediction of -1 is none.
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


def draw_confusion(confusion: Confusion, title: str) -> bytes:
    """Draw the matrix; returns a PNG.

    Colours are shares of the samples of each target. A last column, NaN, is there where it has entries.
    """
    counts = confusion.counts()
    has_none = bool((counts[:, 1] < 0).any())
    named = confusion.classes <= _NAMED
    group = math.ceil(confusion.classes / _CELLS)
    shares, amounts = _cells(counts, math.ceil(confusion.classes / group), group, has_none=has_none)
    cell = _cell_size(len(shares), confusion.classes)
    faintest = 0.0 if named else _FAINTEST
    height, width = (cell * size for size in shares.shape)
    label = _font(max(9, min(14, cell - 2)) if named else 12)
    names = [_fitted(confusion.name(index), label, _NAME_WIDTH) for index in range(confusion.classes)]
    names += [confusion.name(-1)] * has_none
    widest = math.ceil(max(label.getlength(name) for name in names)) if named else 40
    listed = [] if confusion.classes <= _COUNTED else _most_frequent(confusion, counts)
    left, top = _MARGIN + 26 + widest, _MARGIN + 58
    size = (
        max(left + width + _MARGIN + 90 + (480 if listed else 0), 560),
        max(top + height + widest + 60, top + 26 * len(listed) + 60 if listed else 0, top + 260),
    )
    picture = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(picture)
    draw.text((_MARGIN, _MARGIN - 6), title, _INK, _font(18))
    draw.text((_MARGIN, _MARGIN + 20), _summary(counts, confusion.classes, group), _PALE, _font(13))
    block = np.kron(_colours(shares, faintest), np.ones((cell, cell, 1), np.uint8))
    picture.paste(Image.fromarray(block), (left, top))
    if confusion.classes <= _COUNTED:
        _draw_counts(draw, amounts, shares, (left, top), cell)
    draw.rectangle((left - 1, top - 1, left + width, top + height), outline=_LINE)
    ends = (left, top, width, height)
    if named:
        _draw_names(picture, names, confusion.classes, ends, cell, label)
    else:
        _draw_ticks(picture, confusion.classes, ends, cell / group, label)
    _draw_axes(picture, ends, widest)
    _draw_scale(picture, (left + width + _MARGIN, top), faintest)
    if listed:
        _draw_list(draw, listed, (left + width + _MARGIN + 110, top))
    with io.BytesIO() as file:
        picture.save(file, "PNG", optimize=True)
        return file.getvalue()


def _cell_size(cells: int, classes: int) -> int:
    """Pixels of a cell's side."""
    if classes <= _COUNTED:
        return 52 if classes <= 12 else 40 if classes <= 20 else 32
    return max(780 // cells, 12) if classes <= _NAMED else max(_MAP // cells, 2)


def _cells(
    counts: npt.NDArray[np.int64], rows: int, group: int, *, has_none: bool
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Each cell's share of its row, and its count; a row, or column, is that of ``group`` neighbours."""
    amounts = np.zeros((rows, rows + has_none), np.int64)
    predicted = np.where(counts[:, 1] < 0, rows, counts[:, 1] // group)
    np.add.at(amounts, (counts[:, 0] // group, predicted), counts[:, 2])
    return amounts / np.maximum(amounts.sum(1, keepdims=True), 1), amounts


def _colours(shares: npt.NDArray[np.float64], faintest: float) -> npt.NDArray[np.uint8]:
    place = np.where(shares > 0, faintest + (1 - faintest) * np.sqrt(shares), 0) * (len(_COLOURS) - 1)
    below = np.minimum(place.astype(np.int64), len(_COLOURS) - 2)
    part = (place - below)[..., None]
    mixed = _COLOURS[below] * (1 - part) + _COLOURS[below + 1] * part
    return np.asarray(mixed.round(), np.uint8)


def _summary(counts: npt.NDArray[np.int64], classes: int, group: int) -> str:
    total = int(counts[:, 2].sum())
    right = int(counts[counts[:, 0] == counts[:, 1], 2].sum())
    share = f", {100 * right / total:.2f} % on the diagonal" if total else ""
    shared = f"; each cell is {group} x {group} classes" if group > 1 else ""
    return f"{classes:,} classes, {total:,} samples{share}{shared}; colours are shares of each row"


def _draw_counts(
    draw: ImageDraw.ImageDraw,
    amounts: npt.NDArray[np.int64],
    shares: npt.NDArray[np.float64],
    origin: tuple[int, int],
    cell: int,
) -> None:
    for row, column in np.argwhere(amounts).tolist():
        text = f"{amounts[row, column]:,}"
        size = max(8, min(15, cell // 3))
        while size > 7 and _font(size).getlength(text) > cell - 4:
            size -= 1
        ink = "white" if math.sqrt(shares[row, column]) > _DARK else _INK
        middle = (origin[0] + (column + 0.5) * cell, origin[1] + (row + 0.5) * cell)
        draw.text(middle, text, ink, _font(size), anchor="mm")


def _draw_names(
    picture: Image.Image,
    names: Sequence[str],
    classes: int,
    ends: tuple[int, int, int, int],
    cell: int,
    font: Any,
) -> None:
    left, top, _, height = ends
    draw = ImageDraw.Draw(picture)
    for place, name in enumerate(names):
        middle = round((place + 0.5) * cell)
        if place < classes:
            draw.text((left - 8, top + middle), name, _INK, font, anchor="rm")
        _draw_upwards(picture, (left + middle, top + height + 8), name, font, _INK)


def _draw_ticks(
    picture: Image.Image, classes: int, ends: tuple[int, int, int, int], scale: float, font: Any
) -> None:
    left, top, _, height = ends
    draw = ImageDraw.Draw(picture)
    apart = 10
    while classes / apart > 12:
        apart *= 2 if str(apart)[0] in "15" else 5
    for index in range(0, classes, apart):
        place = round((index + 0.5) * scale)
        draw.text((left - 8, top + place), f"{index:,}", _INK, font, anchor="rm")
        draw.text((left + place, top + height + 6), f"{index:,}", _INK, font, anchor="mt")


def _draw_axes(picture: Image.Image, ends: tuple[int, int, int, int], widest: int) -> None:
    left, top, width, height = ends
    draw = ImageDraw.Draw(picture)
    draw.text((left + width / 2, top + height + widest + 26), "predicted", _PALE, _font(13), anchor="mm")
    side = _turned("target", _font(13), _PALE)
    picture.paste(side, (_MARGIN - 8, top + (height - side.height) // 2))


def _draw_scale(picture: Image.Image, origin: tuple[int, int], faintest: float) -> None:
    """What the colours mean."""
    left, top = origin
    tall = 180
    column = np.linspace(1, 0, tall)[:, None] ** 2
    picture.paste(Image.fromarray(np.repeat(_colours(column, faintest), 14, axis=1)), (left, top))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((left - 1, top - 1, left + 14, top + tall), outline=_LINE)
    for percent in (0, 1, 5, 10, 25, 50, 100):
        place = top + tall * (1 - math.sqrt(percent / 100))
        more = "> " if faintest and not percent else ""
        draw.text((left + 20, place), f"{more}{percent} %", _PALE, _font(11), anchor="lm")


def _most_frequent(confusion: Confusion, counts: npt.NDArray[np.int64]) -> list[str]:
    """The pairs that are mixed up most often, as lines."""
    wrong = counts[counts[:, 0] != counts[:, 1]]
    support = np.bincount(counts[:, 0], counts[:, 2], confusion.classes)
    font = _font(13)
    lines = []
    # Equal counts in the order of the classes.
    order = np.lexsort((wrong[:, 1], wrong[:, 0], -wrong[:, 2]))
    for target, predicted, count in wrong[order][:_LISTED].tolist():
        pair = [_fitted(confusion.name(index), font, 150) for index in (target, predicted)]
        share = 100 * count / support[target]
        lines.append(f"{count:,}  ({share:.0f} %)   {pair[0]}  as  {pair[1]}")
    return lines


def _draw_list(draw: ImageDraw.ImageDraw, lines: Sequence[str], origin: tuple[int, int]) -> None:
    left, top = origin
    draw.text((left, top), "most frequent confusions (share of the target)", _INK, _font(14))
    for number, line in enumerate(lines, start=1):
        draw.text((left, top + 8 + 24 * number), line, _PALE, _font(13))


def _draw_upwards(
    picture: Image.Image, place: tuple[int, int], text: str, font: Any, colour: tuple[int, int, int]
) -> None:
    """Write a text that is read from below and ends at a place."""
    turned = _turned(text, font, colour)
    picture.paste(turned, (place[0] - turned.width // 2, place[1]))


def _turned(text: str, font: Any, colour: tuple[int, int, int]) -> Image.Image:
    height = math.ceil(font.getbbox(f"{text}|")[3])
    room = Image.new("RGB", (max(1, math.ceil(font.getlength(text))) + 1, height + 2), "white")
    ImageDraw.Draw(room).text((0, 0), text, colour, font)
    return room.rotate(90, expand=True)


def _fitted(text: str, font: Any, width: int) -> str:
    """As much of a text as there is room for."""
    text = " ".join(text.split())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}...") > width:
        text = text[:-1]
    return f"{text}..."


@cache
def _font(size: int) -> Any:
    # Pillow's own: no file of the system is read.
    return ImageFont.load_default(size)
