"""Charts of a page, drawn by matplotlib: SVG that stands in HTML, in the colours of the page's theme."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from markupsafe import Markup

from dualeval.messages import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dualeval.report.page.content import Headline

# Names of colours in the page's CSS, and what matplotlib writes for them.
_PARTS = [f"part-{number}" for number in range(8)]
_COLOUR = {name: f"#1010{at:02x}" for at, name in enumerate(("ink", "muted", "line", "accent", *_PARTS), 16)}
_NAME = {colour: name for name, colour in _COLOUR.items()}
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dualeval",
    "text.parse_math": False,  # names of strangers are no formulas
    "font.size": 11,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.axisbelow", "axes.grid"), True),
    **dict.fromkeys(("text.color", "ytick.labelcolor"), _COLOUR["ink"]),
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor"), _COLOUR["muted"]),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), _COLOUR["line"]),
}
_WIDTH = 4.8  # inches
_NAME_LETTERS = 20
MOST_GROUPS, MOST_RANKS = 24, 16
_DASHED = {"color": _COLOUR["muted"], "linestyle": (0, (4, 3)), "linewidth": 1}
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"


def draw_calibration(bins: Sequence[Mapping[str, float]]) -> Markup:
    """Accuracy by confidence, and how many samples have it."""
    with _axes(3.8, rows=2, sharex=True, height_ratios=(3, 1)) as (figure, (upper, lower)):
        full = [each for each in bins if each["count"]]
        points = [[each[key] for each in full] for key in ("confidence", "accuracy")]
        upper.plot((0, 1), (0, 1), **_DASHED)
        upper.plot(*points, color=_COLOUR["accent"], marker="o", markersize=5)
        upper.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="accuracy")
        lows, counts = ([each[key] for each in bins] for key in ("low", "count"))
        widths = [0.9 * (each["high"] - each["low"]) for each in bins]
        lower.bar(lows, counts, widths, align="edge", color=_COLOUR["accent"])
        lower.set(xlabel="confidence", ylabel="samples")
        lower.locator_params(axis="y", nbins=3)
        return _svg(figure, "calibration", "Accuracy by confidence")


def draw_curves(name: str, curves: Mapping[str, Sequence[float]]) -> Markup:
    """Precision by recall, a line for each overlap."""
    with _axes(3.2) as (figure, axes):
        for (overlap, precision), colour in zip(curves.items(), _PARTS, strict=False):
            recall = [at / (len(precision) - 1) for at in range(len(precision))]
            axes.plot(recall, precision, color=_COLOUR[colour], label=overlap)
        axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="recall", ylabel="precision")
        figure.legend(loc="outside upper center", ncols=4, fontsize=9, handlelength=1.2, columnspacing=1.2)
        return _svg(figure, name, f"{name.replace('_', ' ')}, by overlap")


def draw_groups(by: str, groups: Sequence[Mapping[str, Any]], whole: Headline, name: str) -> Markup | None:
    """A metric's value and interval in each group, beside its value in all samples; None without values."""
    shown = [each for each in groups if each["metrics"].get(whole.name) is not None][:MOST_GROUPS]
    if not shown:
        return None
    scale, unit = (100.0, "percent") if whole.unit == "fraction" else (1.0, whole.unit)
    with _axes(0.9 + 0.27 * len(shown)) as (figure, axes):
        if whole.value is not None:
            axes.axvline(scale * whole.value, **_DASHED)
        for at, group in enumerate(shown):
            value = group["metrics"][whole.name]
            ends = [scale * end for end in _ends(group, whole)]
            colour = _COLOUR["muted" if group.get("small") else "accent"]
            axes.plot(ends, (at, at), color=colour, linewidth=2)
            axes.plot(scale * value, at, "o", color=colour, mfc="none" if group.get("small") else colour)
        if whole.unit == "fraction":
            low, high = axes.get_xlim()
            axes.set_xlim(max(low, -1), min(high, 101))
        elif ends := [end for each in shown if not each.get("small") for end in _ends(each, whole)]:
            # Groups of a few samples would press all others together.
            room = (max(ends) - min(ends)) / 2
            low, high = axes.get_xlim()
            axes.set_xlim(max(low, min(ends) - room), min(high, max(ends) + room))
        _name_rows(axes, [group["label"] for group in shown])
        axes.set_xlabel(printable(whole.name) + (f", {unit}" if unit else ""))
        return _svg(figure, name, f"{whole.name} by {by}, with 95 % intervals")


def _ends(group: Mapping[str, Any], whole: Headline) -> Sequence[float]:
    value = group["metrics"][whole.name]
    return group["intervals"].get(whole.name) or (value, value)


def draw_seconds(ranks: Sequence[Mapping[str, Any]], stages: Sequence[str]) -> Markup:
    """Each rank's seconds, split."""
    shown = ranks[:MOST_RANKS]
    with _axes(1.2 + 0.3 * len(shown)) as (figure, axes):
        before = [0.0] * len(shown)
        for stage, colour in zip(stages, _PARTS, strict=False):
            seconds = [float(each.get(stage) or 0) for each in shown]
            axes.barh(range(len(shown)), seconds, 0.62, before, color=_COLOUR[colour], label=stage)
            before = [at + more for at, more in zip(before, seconds, strict=True)]
        _name_rows(axes, [f"rank {each['rank']}" for each in shown])
        axes.set_xlabel("seconds")
        figure.legend(loc="outside upper center", ncols=4, fontsize=9, handlelength=0.9, columnspacing=1.2)
        return _svg(figure, "seconds", "Seconds of each rank by what they were spent on")


def _name_rows(axes: Axes, names: Sequence[object]) -> None:
    texts = [_shortened(printable(str(name))) for name in names]
    axes.set_yticks(range(len(names)), texts)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.locator_params(axis="x", nbins=4)


def _shortened(name: str) -> str:
    half = _NAME_LETTERS // 2 - 1
    return name if len(name) <= _NAME_LETTERS else f"{name[:half]}…{name[-half:]}"


@contextmanager
def _axes(height: float, rows: int = 1, **options: Any) -> Iterator[tuple[Figure, Any]]:
    """Axes in the style of this file, whatever the caller's script, or its matplotlibrc, has set."""
    from matplotlib import style
    from matplotlib.figure import Figure

    with warnings.catch_warnings(), style.context(["default", _STYLE]):
        # Of letters that matplotlib's font lacks: the browser has them.
        warnings.simplefilter("ignore")
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        yield figure, figure.subplots(rows, **options)


def _svg(figure: Figure, name: str, label: str) -> Markup:
    """The chart without what a Content-Security-Policy forbids, and with ids that no other chart has."""
    with io.StringIO() as file:
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
        drawn = file.getvalue()
    root, used = ElementTree.fromstring(drawn), {*re.findall(r"#([\w.-]+)", drawn)}
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{_SVG}style", f"{_SVG}metadata"):
                parent.remove(child)
    for element in root.iter():
        _plain(element, name, used)
    del root.attrib["width"], root.attrib["height"]
    root.attrib |= {"role": "img", "aria-label": printable(label), "class": "chart"}
    return Markup(ElementTree.tostring(root, "unicode"))


def _plain(element: ElementTree.Element, name: str, used: set[str]) -> None:
    """Turn an element's style into attributes and classes, and have its ids begin with a chart's name."""
    element.tag = element.tag.removeprefix(_SVG)
    classes = []
    for pair in element.attrib.pop("style", "").split(";"):
        key, _, value = (part.strip() for part in pair.partition(":"))
        if value in _NAME:
            classes.append(f"{key}-{_NAME[value]}")
        elif key not in ("", "font-family"):
            element.set(key, value)
    if classes:
        element.set("class", " ".join(classes))
    if (identity := element.attrib.pop("id", None)) in used:
        element.set("id", f"{name}-{identity}")
    if target := element.attrib.pop(_LINK, None):
        element.set("href", target.replace("#", f"#{name}-"))
    if clip := element.get("clip-path"):
        element.set("clip-path", clip.replace("#", f"#{name}-"))
