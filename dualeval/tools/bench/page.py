"""The report of ``dualeval bench``: figures of cells, their page in Markdown, and the plot (with matplotlib).

Figures are medians and ranges over the rounds, speed-up and efficiency.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualeval.errors import UsageError
from dualeval.messages import counted
from dualeval.tools.bench.cell import DATAPARALLEL, MODES, SINGLE, STAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MEASURED = "measured"


def with_figures(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add to each cell its ``figures``; None to one that was never measured."""
    return [{**cell, "figures": _figures(cell, _baseline_of(cell, cells))} for cell in cells]


def _baseline_of(cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The cell that a speed-up is relative to: mode single, or else one process of the same mode.

    Of the same precision and batch size; None where none was measured.
    """
    same = [
        other
        for other in cells
        if other["measurements"]
        and other["processes"] == 1
        and (other["precision"], other["batch_size"]) == (cell["precision"], cell["batch_size"])
    ]
    for mode in (SINGLE, cell["mode"]):
        for other in same:
            if other["mode"] == mode:
                return other
    return None


def _figures(cell: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> dict[str, Any] | None:
    measured = cell["measurements"]
    if not measured:
        return None
    speeds = {one["round"]: one["samples"] / one["seconds"] for one in measured}
    figures: dict[str, Any] = {
        "rounds": len(measured),
        "images_per_s": spread(list(speeds.values())),
        # What one process takes for a batch: several are under way at the same time.
        "seconds_per_batch": spread([one["seconds"] * _at_once(cell) / one["batches"] for one in measured]),
        "speed_up": None,
        "efficiency": None,
        "startup_s": spread([one["startup_s"] for one in measured]),
        "peak_bytes": max(rank["peak_bytes"] for one in measured for rank in one["ranks"]),
        "peak_gpu_bytes": max(
            (rank["peak_gpu_bytes"] or 0 for one in measured for rank in one["ranks"]), default=0
        )
        or None,
        "measured_s": min(one["seconds"] for one in measured),
        **_shares(measured),
    }
    if baseline is not None:
        base = {one["round"]: one["samples"] / one["seconds"] for one in baseline["measurements"]}
        # Of the same round: what slows the machine for a while slows both.
        ratios = [speed / base[number] for number, speed in speeds.items() if number in base]
        if ratios:
            figures["speed_up"] = spread(ratios)
            figures["efficiency"] = figures["speed_up"]["median"] / cell["processes"]
    return figures


def _at_once(cell: Mapping[str, Any]) -> int:
    return 1 if cell["mode"] == DATAPARALLEL else int(cell["processes"])


def _shares(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The share of each stage of a training step; of an evaluation, how long it waited for data."""
    if "forward" in measured[0]["ranks"][0]:
        shares = {}
        for stage in STAGES:
            ratios = [
                sum(rank[stage] for rank in one["ranks"])
                / sum(rank[each] for rank in one["ranks"] for each in STAGES)
                for one in measured
            ]
            shares[stage] = statistics.median(ratios)
        return {"stages": shares}
    waits = [
        sum(rank["data"] for rank in one["ranks"]) / sum(rank["evaluate"] for rank in one["ranks"])
        for one in measured
    ]
    return {"waits_for_data": statistics.median(waits)}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest of some values."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


# -- the page ------------------------------------------------------------------------------------------

SCHEMA_VERSION = 1
_MIB = 2**20
_SHOWN_OF_DIGEST = 16
_CELL = ("mode", "processes", "precision", "batch_size", "outcome", "reason")


def page(report: Mapping[str, Any], pictures: Sequence[str] = ()) -> str:
    """The report as a Markdown page."""
    return "\n".join(_lines(report, pictures)) + "\n"


def _lines(report: Mapping[str, Any], pictures: Sequence[str]) -> Iterator[str]:
    settings, machine = report["settings"], report["machine"]
    what = "training steps" if settings["train"] else "evaluation"
    yield f"# dualeval bench: {what} of {report['job']['model']}\n"
    yield f"{report['when']}, `{report['command']}`\n"
    gpus = "".join(f", {gpu['model']} ({gpu['memory_gib']:.0f} GiB)" for gpu in machine["gpus"])
    yield (
        f"{machine['cpu']} ({machine['cpu_capability']}), {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB{gpus}, {machine['system']}; load average at the start "
        f"{machine['load_average']}. Device: {settings['device']}.\n"
    )
    yield ", ".join(f"{name} {value}" for name, value in report["versions"].items() if value) + "."
    yield ""
    yield from (f"- {label}: {text}" for label, text in report["job"]["description"].items())
    yield ""
    load, cores = machine["load_average"][0], machine["cores"]
    if load > cores / 2:
        yield (
            f"**The machine was busy** before the first start: load average {load:g} on "
            f"{counted(cores, 'core')}. Measure again when it is idle.\n"
        )
    if report["interrupted"]:
        yield "**Interrupted**: the figures cover what was measured until then.\n"
    yield from _tables(report)
    yield from (f"![{name}]({name})\n" for name in pictures)
    yield from _missing(report["cells"])
    yield from _how_to_read(report)


def _tables(report: Mapping[str, Any]) -> Iterator[str]:
    train = report["settings"]["train"]
    last = list(STAGES) if train else ["waits for data"]
    head = ["mode", "processes", "images/s", "ms per batch", "speed-up", "efficiency"]
    head += ["peak memory", *(["on GPUs"] if report["settings"]["device"] != "cpu" else []), "start-up"]
    for precision, batch_size in _panels(report["cells"]):
        cells = _cells_of_panel(report["cells"], precision, batch_size)
        yield f"## {precision}, batch size {batch_size}\n"
        if not cells:
            yield "No cell was measured.\n"
            continue
        yield _row([*head, *last])
        yield _row(["---"] * (len(head) + len(last)))
        for cell in cells:
            yield _row([*_cells_of(cell, head), *_last_of(cell["figures"])])
        yield ""
        yield from _too_short(cells, report["settings"]["min_seconds"])
        if not train:
            yield from _digests(cells)


def _panels(cells: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """The precisions and batch sizes of the cells, each pair once, in their order."""
    return list(dict.fromkeys((cell["precision"], cell["batch_size"]) for cell in cells))


def _cells_of_panel(
    cells: Sequence[Mapping[str, Any]], precision: str, batch_size: int
) -> list[Mapping[str, Any]]:
    """The measured cells of one precision and batch size."""
    return [
        cell
        for cell in cells
        if (cell["precision"], cell["batch_size"]) == (precision, batch_size) and cell["figures"]
    ]


def _cells_of(cell: Mapping[str, Any], head: Sequence[str]) -> Iterator[str]:
    figures = cell["figures"]
    speed_up, efficiency = figures["speed_up"], figures["efficiency"]
    yield cell["mode"]
    yield str(cell["processes"])
    yield _ranged(figures["images_per_s"], 1, 0 if figures["images_per_s"]["median"] >= 100 else 1)
    yield _ranged(figures["seconds_per_batch"], 1000, 1)
    yield "" if speed_up is None else _ranged(speed_up, 1, 2)
    yield "" if efficiency is None else f"{efficiency:.0%}"
    yield f"{figures['peak_bytes'] / _MIB:,.0f} MiB"
    if "on GPUs" in head:
        on_gpus = figures["peak_gpu_bytes"]
        yield "" if on_gpus is None else f"{on_gpus / _MIB:,.0f} MiB"
    yield f"{figures['startup_s']['median']:.1f} s"


def _last_of(figures: Mapping[str, Any]) -> list[str]:
    if "stages" in figures:
        return [f"{figures['stages'][stage]:.1%}" for stage in STAGES]
    return [f"{figures['waits_for_data']:.1%}"]


def _ranged(spread: Mapping[str, float], factor: float, digits: int) -> str:
    middle, low, high = (f"{spread[name] * factor:,.{digits}f}" for name in ("median", "low", "high"))
    return f"{middle} ({low} to {high})"


def _too_short(cells: Sequence[Mapping[str, Any]], wanted: float) -> Iterator[str]:
    """Which cells had too little data to be measured for long enough."""
    short = [cell for cell in cells if cell["figures"]["measured_s"] < wanted]
    if short:
        names = ", ".join(f"{cell['mode']} x {cell['processes']}" for cell in short)
        yield (
            f"Measured for less than {wanted:g} s in some start, as the data set is small: {names}. Give "
            "more samples.\n"
        )


def _digests(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Whether the cells have computed the same bits."""
    alike: dict[str, list[str]] = {}
    for cell in cells:
        for digest in dict.fromkeys(one["metrics_digest"] for one in cell["measurements"]):
            alike.setdefault(digest, []).append(f"{cell['mode']} x {cell['processes']}")
    if len(alike) == 1:
        yield f"All of them computed the same bits: metrics_digest {next(iter(alike))[:_SHOWN_OF_DIGEST]}."
    else:
        yield "Not all of them computed the same bits:\n"
        yield from (f"- {digest[:_SHOWN_OF_DIGEST]}: {', '.join(names)}" for digest, names in alike.items())
    yield ""


def _missing(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    missing = [cell for cell in cells if cell["outcome"] != MEASURED]
    if not missing:
        return
    yield "## Not measured\n"
    yield _row(["mode", "processes", "precision", "batch size", "outcome", "reason"])
    yield _row(["---"] * 6)
    for cell in missing:
        yield _row([str(cell[name] or "").replace("|", "\\|").replace("\n", " ") for name in _CELL])
    yield ""


def _how_to_read(report: Mapping[str, Any]) -> Iterator[str]:
    settings = report["settings"]
    yield (
        f"Figures are medians over {counted(settings['rounds'], 'round')}, in brackets the lowest and the "
        f"highest, of starts measured for at least {settings['min_seconds']:g} s after a warm-up of "
        f"{settings['warmup']} batches per process. Each process has {counted(settings['cores'], 'core')} of "
        "its own. docs/bench.md says what each figure means."
    )


def _row(words: Sequence[str]) -> str:
    return f"| {' | '.join(words)} |"


def progress_line(cell: Mapping[str, Any]) -> str:
    """The last measurement of a cell, in one line."""
    one = cell["measurements"][-1]
    return (
        f"{one['samples'] / one['seconds']:,.1f} images/s in {one['seconds']:.1f} s, start-up "
        f"{one['startup_s']:.1f} s"
    )


# -- the plot ------------------------------------------------------------------------------------------

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

    shown = _panels(known)
    figure = Figure(figsize=(_PANEL_INCHES[0] * len(shown), _PANEL_INCHES[1]), layout="constrained")
    axes = figure.subplots(1, len(shown), squeeze=False, sharey=True)
    for place, (precision, batch_size) in zip(axes.flat, shown, strict=True):
        _panel(place, _cells_of_panel(known, precision, batch_size))
        place.set_title(f"{precision}, batch size {batch_size}", fontsize=10)
    axes.flat[0].set_ylim(bottom=0)
    settings = report["settings"]
    what = "training steps" if settings["train"] else "evaluation"
    figure.suptitle(
        f"{report['job']['model']}, {what}, {settings['device']}, cores per process: {settings['cores']}",
        fontsize=11,
    )
    figure.savefig(folder / _SPEED_UP, dpi=_DPI)
    return [_SPEED_UP]


def _panel(axes: Axes, cells: Sequence[Mapping[str, Any]]) -> None:
    """Speed-up against processes: a line for each mode from one process on, and the ideal."""
    most = max(2, *(cell["processes"] for cell in cells))
    axes.plot([1, most], [1, most], "--", color="#777777", linewidth=1, label="ideal")
    for mode in MODES:
        of_mode = [cell for cell in cells if cell["mode"] == mode]
        if not of_mode:
            continue
        ups = [cell["figures"]["speed_up"] for cell in of_mode]
        axes.errorbar(
            [cell["processes"] for cell in of_mode],
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
