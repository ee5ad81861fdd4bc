"""The plot of a report: speed-up against processes; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualeval.errors import UsageError
from dualeval.tools.bench.page import cells_of_panel, panels
from dualeval.tools.bench.plan import DATAPARALLEL, MODES, SINGLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SPEED_UP = "speedup.png"
_PANEL_INCHES = (5.0, 4.0)
_DPI = 150
# Told apart without colours, too (Okabe and Ito's palette for the colours).
_STYLES = {
    "single": ("#000000", "o"),
    "dataparallel": ("#009E73", "^"),
    "torch": ("#0072B2", "s"),
    "horovod": ("#D55E00", "D"),
}


def check_plots() -> None:
    """Raise UsageError where plots cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise UsageError(
            "the plots need matplotlib, which is not installed. Type: pip install 'dualeval[plots]'; or give "
            "--no-plots."
        )


def draw(report: Mapping[str, Any], folder: Path) -> list[str]:
    """Draw a report; returns the names of the files, none where no speed-up is known."""
    known = [cell for cell in report["cells"] if cell["figures"] and cell["figures"]["speed_up"]]
    if not known:
        return []
    from matplotlib.figure import Figure

    shown = panels(known)
    figure = Figure(figsize=(_PANEL_INCHES[0] * len(shown), _PANEL_INCHES[1]), layout="constrained")
    axes = figure.subplots(1, len(shown), squeeze=False, sharey=True)
    for place, (precision, batch_size) in zip(axes.flat, shown, strict=True):
        _panel(place, cells_of_panel(known, precision, batch_size))
        place.set_title(f"{precision}, batch size {batch_size}", fontsize=10)
    axes.flat[0].set_ylim(bottom=0)
    settings = report["settings"]
    what = "training steps" if settings["train"] else "evaluation"
    figure.suptitle(
        f"{report['job']['model']}, {what}, {settings['device']}, cores a process: {settings['cores']}",
        fontsize=11,
    )
    figure.savefig(folder / _SPEED_UP, dpi=_DPI)
    return [_SPEED_UP]


def _panel(axes: Axes, cells: Sequence[Mapping[str, Any]]) -> None:
    """Speed-up against processes: a line for each mode from one process on, and the ideal."""
    most = max(2, *(cell["processes"] for cell in cells))
    axes.plot([1, most], [1, most], "--", color="#777777", linewidth=1, label="ideal")
    for mode in MODES:
        own = [cell for cell in cells if cell["mode"] == mode]
        if not own:
            continue
        ups = [cell["figures"]["speed_up"] for cell in own]
        axes.errorbar(
            [cell["processes"] for cell in own],
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
