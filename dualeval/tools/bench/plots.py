"""Plots of a report; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualeval.errors import UsageError
from dualeval.tools.bench.page import cells_of_panel, panels
from dualeval.tools.bench.plan import DATAPARALLEL, MODES, SINGLE, STAGES
from dualeval.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANEL_INCHES = (5.0, 4.0)
_DPI = 150
# Told apart without colours, too (Okabe and Ito's palette for the colours).
_STYLES = {
    "single": ("#000000", "o"),
    "dataparallel": ("#009E73", "^"),
    "torch": ("#0072B2", "s"),
    "horovod": ("#D55E00", "D"),
}
_STAGE_COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#999999")
# A mode's points beside another's at the same number of processes.
_SHIFT = 0.025


def check_plots() -> None:
    """Raise UsageError where plots cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise UsageError(
            "the plots need matplotlib, which is not installed. Type: pip install 'dualeval[plots]'; or give "
            "--no-plots."
        )


def draw(report: Mapping[str, Any], folder: Path) -> list[str]:
    """Draw the plots of a report; returns the names of the PNG files. Nothing measured, nothing drawn."""
    if not any(cell["figures"] for cell in report["cells"]):
        return []
    drawn = []
    if any(cell["figures"] and cell["figures"]["speed_up"] for cell in report["cells"]):
        drawn.append(_draw_speed_up(report, folder))
    if report["settings"]["train"]:
        drawn.append(_draw_stages(report, folder))
    return drawn


def _draw_speed_up(report: Mapping[str, Any], folder: Path) -> str:
    from matplotlib.figure import Figure

    shown = [pair for pair in panels(report["cells"]) if cells_of_panel(report["cells"], *pair)]
    columns = min(len(shown), 3)
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for number, place in enumerate(axes.flat):
        if number >= len(shown):
            place.set_axis_off()
            continue
        cells = cells_of_panel(report["cells"], *shown[number])
        _panel(place, cells)
        place.set_title("{}, batch size {}".format(*shown[number]), fontsize=10)
    axes.flat[0].set_ylim(0, 1.05 * _highest(report["cells"]))
    figure.suptitle(_title(report), fontsize=11)
    return _save(figure, folder, "speedup")


def _highest(cells: Sequence[Mapping[str, Any]]) -> float:
    """The top of all panels: the ideal of the most processes, or the best speed-up."""
    found = [cell for cell in cells if cell["figures"]]
    ups = [cell["figures"]["speed_up"]["high"] for cell in found if cell["figures"]["speed_up"]]
    return float(max(2, *(cell["processes"] for cell in found), *ups))


def _panel(axes: Axes, cells: Sequence[Mapping[str, Any]]) -> None:
    """Speed-up against processes: a line for each mode from one process on, and the ideal."""
    most = max(cell["processes"] for cell in cells)
    axes.plot([1, max(most, 2)], [1, max(most, 2)], "--", color="#777777", linewidth=1, label="ideal")
    known = [cell for cell in cells if cell["figures"]["speed_up"]]
    modes = [mode for mode in MODES if any(cell["mode"] == mode for cell in known)]
    for number, mode in enumerate(sorted(modes, key=lambda mode: mode != SINGLE)):
        own = [cell for cell in known if cell["mode"] == mode]
        ups = [cell["figures"]["speed_up"] for cell in own]
        shift = number * _SHIFT
        axes.errorbar(
            [cell["processes"] + shift for cell in own],
            [up["median"] for up in ups],
            yerr=[[up["median"] - up["low"] for up in ups], [up["high"] - up["median"] for up in ups]],
            capsize=3,
            linestyle="none" if mode == SINGLE else "-",
            label=mode,
            color=_STYLES[mode][0],
            marker=_STYLES[mode][1],
        )
    axes.set_xticks(sorted({1, *(cell["processes"] for cell in cells)}))
    split = any(cell["mode"] == DATAPARALLEL for cell in cells)
    axes.set_xlabel("processes (of dataparallel: GPUs)" if split else "processes")
    axes.set_ylabel("speed-up over one process\n(median; bars: lowest and highest round)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)


def _draw_stages(report: Mapping[str, Any], folder: Path) -> str:
    from matplotlib.figure import Figure

    cells = [cell for cell in report["cells"] if cell["figures"]]
    figure = Figure(figsize=(8.0, 1.6 + 0.4 * len(cells)), layout="constrained")
    axes = figure.subplots()
    labels = [
        f"{cell['mode']} x {cell['processes']}, {cell['precision']}, batch {cell['batch_size']}"
        for cell in cells
    ]
    left = [0.0] * len(cells)
    for stage, colour in zip(STAGES, _STAGE_COLOURS, strict=True):
        widths = [cell["figures"]["stages"][stage] * 100 for cell in cells]
        axes.barh(labels, widths, left=left, label=stage, color=colour)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("share of a step (%)")
    axes.set_xlim(0, 100)
    axes.legend(fontsize=9, ncols=len(STAGES), loc="lower center", bbox_to_anchor=(0.4, 1.0))
    figure.suptitle(_title(report), fontsize=11)
    return _save(figure, folder, "stages")


def _title(report: Mapping[str, Any]) -> str:
    what = "training steps" if report["settings"]["train"] else "evaluation"
    cores = report["settings"]["cores"]
    device = report["settings"]["device"]
    where = f"{counted(cores, 'core')} a process" if device == "cpu" else device
    return f"{report['job']['model']}, {what}, {where}, {report['when'].partition(' ')[0]}"


def _save(figure: Any, folder: Path, name: str) -> str:
    figure.savefig(folder / f"{name}.png", dpi=_DPI)
    return f"{name}.png"
