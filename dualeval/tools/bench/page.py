"""The report of ``dualeval bench`` as Markdown; pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dualeval.tools.bench.figures import MEASURED
from dualeval.tools.bench.plan import STAGES
from dualeval.wording import counted

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
        yield "**Interrupted**: the figures are of what was measured until then.\n"
    yield from _tables(report)
    yield from (f"![{name}]({name})\n" for name in pictures)
    yield from _missing(report["cells"])
    yield from _how_to_read(report)


def _tables(report: Mapping[str, Any]) -> Iterator[str]:
    train = report["settings"]["train"]
    last = list(STAGES) if train else ["waits for data"]
    head = ["mode", "processes", "images/s", "ms a batch", "speed-up", "efficiency"]
    head += ["peak memory", *(["on GPUs"] if report["settings"]["device"] != "cpu" else []), "start-up"]
    for precision, batch_size in panels(report["cells"]):
        cells = cells_of_panel(report["cells"], precision, batch_size)
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


def panels(cells: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """The precisions and batch sizes of the cells, each pair once, in their order."""
    return list(dict.fromkeys((cell["precision"], cell["batch_size"]) for cell in cells))


def cells_of_panel(
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
    found: dict[str, list[str]] = {}
    for cell in cells:
        for digest in dict.fromkeys(one["metrics_digest"] for one in cell["measurements"]):
            found.setdefault(digest, []).append(f"{cell['mode']} x {cell['processes']}")
    if len(found) == 1:
        yield f"All of them computed the same bits: metrics_digest {next(iter(found))[:_SHOWN_OF_DIGEST]}."
    else:
        yield "Not all of them computed the same bits:\n"
        yield from (f"- {digest[:_SHOWN_OF_DIGEST]}: {', '.join(names)}" for digest, names in found.items())
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
        f"highest, of starts that are measured for at least {settings['min_seconds']:g} s after a warm-up of "
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
