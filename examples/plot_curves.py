"""Draw the curves of trainings side by side, and print how long their epochs took.

    python examples/plot_curves.py runs/p1 runs/p2 runs/p4 --out plots
    python examples/plot_curves.py runs/* --out plots --metric loss >> notes.md

Each RUN is the ``--out`` folder of examples/train_with_eval.py, finished or not. Writes curves.png and
curves.svg: the metric against epochs, and against time. Standard output gets Markdown: seconds an epoch,
images/s, and the speed-up by number of processes. The legend names what differs between the runs, and the
first lines what they share. Needs matplotlib: pip install "dualeval[plots]".
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

# Okabe and Ito's colours, without the yellow, which is too light on white: people who are colour-blind can
# tell them apart. Markers and dashes tell the runs apart in grey as well.
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]
DASHES = ["-", "--", "-.", ":"]
# What a run is, in the order in which it is told: the key in run.json, and what stands before the value.
FACTS = {
    "model": "",
    "data": "",
    "precision": "",
    "world_size": "processes",
    "batch_size": "batch",
    "global_batch_size": "global batch",
    "lr": "lr",
    "seed": "seed",
    "backend": "over",
    "device": "",
    "versions": "",
}
SAME_WORK = ("model", "data", "precision")
NEEDED = {
    "run.json": {*SAME_WORK, "world_size"},
    "log.jsonl": {"epoch", "metrics", "elapsed_s", "train_s", "eval_s", "images_per_s"},
}
NAMES = {"top1": "top-1 accuracy", "top5": "top-5 accuracy"}
# Where a lower value is the better one; of all other metrics it is a higher one.
LOWER = ("loss", "ece")
# At least so many seconds, the seconds of the unit, its name.
UNITS = [(2 * 3600.0, 3600.0, "hours"), (120.0, 60.0, "minutes"), (0.0, 1.0, "seconds")]


@dataclass(frozen=True)
class Run:
    """A training: what it is (run.json), and its epochs in their order (log.jsonl)."""

    name: str
    facts: dict[str, Any]
    epochs: list[dict[str, Any]]

    def values(self, metric: str) -> list[float]:
        """A metric by epoch; NaN where it was not finite."""
        found = [epoch["metrics"].get(metric) for epoch in self.epochs]
        return [float("nan") if value is None else float(value) for value in found]

    def intervals(self, metric: str) -> list[tuple[float, float]]:
        """The 95 % intervals by epoch; nothing where an epoch has none."""
        found = [epoch.get("intervals", {}).get(metric) for epoch in self.epochs]
        return [] if None in found else [(float(low), float(high)) for low, high in found]

    def middle(self, key: str) -> float:
        """The median of what each epoch has under this key."""
        return median(float(epoch[key]) for epoch in self.epochs)

    def fact(self, key: str) -> str:
        """A fact as text: "4 processes", "ResNet-18"."""
        value = self.facts.get(key)
        if value is None:
            return f"{FACTS[key]} not known".strip()
        if isinstance(value, dict):
            return ", ".join(f"{name} {of}" for name, of in value.items())
        if key == "world_size":
            return f"{value} process{'es' if value != 1 else ''}"
        return (
            f"{FACTS[key]} {value:g}".strip() if isinstance(value, float) else f"{FACTS[key]} {value}".strip()
        )


class InputError(Exception):
    """A folder that is no run."""


def read_run(folder: Path) -> Run:
    """Read the two files of a run; an epoch that was trained again after a resume counts once."""
    for name in ("run.json", "log.jsonl"):
        if not (folder / name).is_file():
            raise InputError(
                f"{folder} has no {name}: expected the --out folder of examples/train_with_eval.py, after "
                "its first epoch"
            )
    facts = read_json((folder / "run.json").read_text("utf-8"), folder, "run.json")
    # What follows the last line's end is being written now.
    *lines, _ = (folder / "log.jsonl").read_text("utf-8").split("\n")
    epochs: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        entry = read_json(line, folder, "log.jsonl", f", line {number},")
        epochs[entry["epoch"]] = entry
    if not epochs:
        raise InputError(f"{folder / 'log.jsonl'} has no whole epoch yet: wait for the first one")
    return Run(str(folder), facts, [epochs[number] for number in sorted(epochs)])


def read_json(text: str, folder: Path, file: str, where: str = "") -> dict[str, Any]:
    """An object with all that is needed of it."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(f"{folder / file}{where} is no JSON: {error}") from error
    missing = NEEDED[file] - set(found if isinstance(found, dict) else [])
    if missing:
        raise InputError(f"{folder / file}{where} has no {', '.join(sorted(missing))}")
    return dict(found)


def differing(runs: Sequence[Run]) -> list[str]:
    """The facts in which runs differ."""
    return [key for key in FACTS if len({run.fact(key) for run in runs}) > 1]


def labels_of(runs: Sequence[Run]) -> list[str]:
    """A name for each run: what tells it from the others; its folder's where nothing does."""
    keys = [key for key in differing(runs) if key != "versions"]
    if "batch_size" in keys and "world_size" not in keys:
        keys = [key for key in keys if key != "global_batch_size"]
    labels = [", ".join(run.fact(key) for key in keys) for run in runs]
    folders = [Path(run.name).name for run in runs]
    names = [name if folders.count(name) == 1 else run.name for run, name in zip(runs, folders, strict=True)]
    return [
        label if label and labels.count(label) == 1 else ", ".join(filter(None, [name, label]))
        for name, label in zip(names, labels, strict=True)
    ]


def shared_by(runs: Sequence[Run]) -> str:
    """What all runs have in common, in one line."""
    different = {*differing(runs), "versions"}
    return ", ".join(runs[0].fact(key) for key in FACTS if key not in different and key in runs[0].facts)


def is_share(metric: str) -> bool:
    """Whether a metric is a share of the samples, which people read in percent."""
    return metric.startswith(("top", "acc"))


# -- the picture -----------------------------------------------------------------------------------------


def draw(runs: Sequence[Run], metric: str, folder: Path) -> list[Path]:
    """Draw the metric against epochs and against time; returns the files."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    longest = max(run.epochs[-1]["elapsed_s"] for run in runs)
    _, seconds, unit = next(entry for entry in UNITS if longest >= entry[0])
    labels = labels_of(runs)
    columns = 1 if max(map(len, labels)) > 60 else 2 if max(map(len, labels)) > 28 else 3
    rows = -(-len(runs) // columns)
    figure = Figure(figsize=(10, 4.6 + 0.22 * rows), layout="constrained")
    by_epoch, by_time = figure.subplots(1, 2, sharey=True)
    with_intervals = len(runs) <= 4 and all(run.intervals(metric) for run in runs)
    styles = zip(runs, labels, cycle(COLOURS), cycle(MARKERS), strict=False)
    for number, (run, label, colour, marker) in enumerate(styles):
        style: dict[str, Any] = {
            "color": colour,
            "marker": marker,
            "linestyle": DASHES[number % len(DASHES)],  # of runs that are equal both are seen
            "markersize": 4.5,
            "markevery": max(1, len(run.epochs) // 15),
            "linewidth": 1.6,
        }
        epochs = [epoch["epoch"] for epoch in run.epochs]
        times = [epoch["elapsed_s"] / seconds for epoch in run.epochs]
        for axes, positions in ((by_epoch, epochs), (by_time, times)):
            axes.plot(positions, run.values(metric), label=label, **style)
            if with_intervals:
                lows, highs = zip(*run.intervals(metric), strict=True)
                axes.fill_between(positions, lows, highs, color=colour, alpha=0.15, linewidth=0)
    by_time.set_xlim(left=0)
    for axes in (by_epoch, by_time):
        axes.grid(color="#DDDDDD", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    by_epoch.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    finite = [value for run in runs for value in run.values(metric) if value == value]
    if metric.endswith("loss") and finite and min(finite) > 0 and max(finite) > 100 * min(finite):
        by_epoch.set_yscale("log")  # a loss that starts at thousands would flatten all that follows
    by_epoch.set_xlabel("epoch")
    by_time.set_xlabel(f"{unit} since the start (training and evaluation)")
    by_time.tick_params(labelleft=True)
    if is_share(metric):
        by_epoch.yaxis.set_major_formatter(PercentFormatter(1.0))
    by_epoch.set_ylabel(f"{NAMES.get(metric, metric)}{', 95 % intervals' if with_intervals else ''}")
    figure.suptitle(shared_by(runs), fontsize=10, wrap=True)
    figure.legend(
        *by_epoch.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=min(columns, len(runs)),
        frameon=False,
        fontsize=9,
    )
    files = [folder / "curves.png", folder / "curves.svg"]
    # The same runs make the same SVG.
    with mpl.rc_context({"svg.hashsalt": "curves"}):
        figure.savefig(files[0], dpi=150)
        figure.savefig(files[1], metadata={"Date": None})
    return files


# -- the tables ------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def report(runs: Sequence[Run], metric: str) -> str:
    """What the runs have come to, and how long they took, in Markdown."""
    labels = labels_of(runs)
    rows = []
    for run, label in zip(runs, labels, strict=True):
        values = {entry["epoch"]: value for entry, value in zip(run.epochs, run.values(metric), strict=True)}
        finite = {epoch: value for epoch, value in values.items() if value == value}
        best = (min if metric.endswith(LOWER) else max)(finite, key=lambda epoch: finite[epoch], default=None)
        best_text = "not finite" if best is None else f"{shown(finite[best], metric)} (epoch {best})"
        seconds = f"{run.middle('train_s'):.3g} + {run.middle('eval_s'):.3g}"
        rate = f"{run.middle('images_per_s'):,.0f}"
        last = shown(list(values.values())[-1], metric)
        rows.append([label, str(len(run.epochs)), best_text, last, seconds, rate])
    head = ["run", "epochs", f"best {metric}", f"last {metric}", "seconds an epoch: training + evaluation"]
    parts = [
        f"Shared by all runs: {shared_by(runs) or 'nothing'}.",
        table([*head, "images/s in training"], rows),
        "Seconds and images/s are medians over a run's epochs.",
        speed_up(runs, labels),
        "\n".join(cautions(runs)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def shown(value: float, metric: str) -> str:
    """A value of a metric for people."""
    return "not finite" if value != value else f"{value:.2%}" if is_share(metric) else f"{value:.4g}"


def base_of(run: Run, runs: Sequence[Run]) -> Run:
    """The run with fewest processes of the same model, data and precision, as much alike as there is."""
    group = [other for other in runs if all(other.fact(key) == run.fact(key) for key in SAME_WORK)]
    fewest = min(other.facts["world_size"] for other in group)
    candidates = [other for other in group if other.facts["world_size"] == fewest]
    # Of two that are as near, the one with the same global batch size: it is the same training.
    different = {id(other): differing([run, other]) for other in candidates}
    nearest = {key: (len(names), "global_batch_size" in names) for key, names in different.items()}
    return min(candidates, key=lambda other: nearest[id(other)])


def speed_up(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """Images/s in training by number of processes, beside the run with fewest."""
    names = dict(zip(map(id, runs), labels, strict=True))
    rows = []
    for run in sorted(runs, key=lambda run: (*map(run.fact, SAME_WORK), run.facts["world_size"])):
        base = base_of(run, runs)
        more = run.facts["world_size"] / base.facts["world_size"]
        if more == 1:
            continue
        faster = run.middle("images_per_s") / base.middle("images_per_s")
        others = [key for key in differing([run, base]) if key != "world_size"]
        changes = "; ".join(f"{base.fact(key)} → {run.fact(key)}" for key in others)
        sizes = f"{base.facts['world_size']} → {run.facts['world_size']}"
        epoch = f"{base.middle('train_s'):.3g} → {run.middle('train_s'):.3g}"
        numbers = [f"{faster:.2f}", f"{more:g}", f"{faster / more:.0%}"]
        rows.append([names[id(run)], names[id(base)], sizes, epoch, *numbers, changes or "nothing"])
    if not rows:
        return (
            "No speed-up: it needs runs of one model, data and precision on different numbers of processes."
        )
    head = ["run", "against", "processes", "training seconds an epoch", "speed-up", "ideal", "efficiency"]
    said = "Speed-up is that of images/s in training; efficiency is speed-up over ideal."
    if any(float(row[4]) > 1.02 * float(row[5]) for row in rows):
        said += (
            " A speed-up above the ideal mostly means that the machine had other work in one of the runs: "
            "measure again, one run after the other."
        )
    return f"{table([*head, 'what else differs'], rows)}\n\n{said}"


def cautions(runs: Sequence[Run]) -> list[str]:
    """What a reader of the curves and tables has to know of the differences between the runs."""
    different = set(differing(runs))
    said = []
    if "global_batch_size" in different:
        said.append(
            "- **The global batch sizes differ**, and with them the number of steps an epoch and what a "
            "learning rate does: these are different trainings, and not one at different speeds. For the "
            "same steps on more processes, keep the global batch size. (Batch norms still see the batch of "
            "one process.)"
        )
    if "lr" in different:
        said.append("- **The learning rates differ**: the curves do not show the number of processes alone.")
    machine = [key for key in ("device", "versions", "backend") if key in different]
    if machine:
        said.append(f"- **The times are of different set-ups**: not the same {', '.join(machine)}.")
    if len({len(run.epochs) for run in runs}) > 1:
        said.append("- **The runs have different numbers of epochs**: compare the best values with care.")
    return said


def main() -> None:
    """Read the runs, draw, and print."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(__doc__ or "").partition("\n\n")[2],
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a training")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the pictures go")
    parser.add_argument("--metric", default="top1", help="which of the evaluation's metrics [top1]")
    options = parser.parse_args()
    try:
        runs = [read_run(folder) for folder in options.runs]
    except InputError as error:
        parser.error(str(error))
    for run, folder in zip(runs, options.runs, strict=True):
        known = sorted({name for epoch in run.epochs for name in epoch["metrics"]})
        if options.metric not in known:
            parser.error(f"{folder} has no metric {options.metric!r}: it has {', '.join(known) or 'none'}")
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        files = draw(runs, options.metric, options.out)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        parser.error('matplotlib is not installed; type: pip install "dualeval[plots]"')
    sys.stdout.write(report(runs, options.metric))
    sys.stderr.write(f"Drawn: {', '.join(map(str, files))}\n")


if __name__ == "__main__":
    main()
