"""The table that a run prints at its end."""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dualeval.messages import printable, printable_lines
from dualeval.process.status_line import on_screen
from dualeval.result import ALL_SAMPLES, DRAWN_SAMPLES, Result, described_part

# Of the lines around the table.
LABEL_WIDTH = 16
# Of a table that a launcher or a file takes, however wide the terminals of this process are.
_WIDTH = 80
_DIGITS = 6
# Letters of an option's value beside that of another run; of a longer one the last, of a hash the first.
_LONGEST_VALUE = 40
_HASH, _OF_HASH = re.compile("[0-9a-f]+"), 8
# Metrics that are shown by group.
_SLICED = 2
# From here on, and below this, a power of ten is easier to read than zeros.
_LARGE, _SMALL = 1e9, 1e-4
# Letters of one width, without which the lines of the table are broken.
_HTML = "<pre style=\"font-family: Menlo, 'DejaVu Sans Mono', monospace; line-height: 1.2\">{code}</pre>"


def print_result(result: Result, console: Console | None = None) -> None:
    """Print what was evaluated, the scalar metrics with their intervals, and where the files are."""
    console = console or make_console()
    if result.earlier:
        print_line(console, _of_earlier_run(result))
    for label, text in result.description.items():
        print_line(console, labelled(label, text))
    console.print(_metrics(result))
    print_slices(result, console)
    for label, text in (*_facts(result), *_reference(result)):
        print_line(console, labelled(label, text))
    for warning in result.warnings:
        print_line(console, f"warning: {warning}", style="yellow")


def as_text(result: Result) -> str:
    """What ``print_result`` prints, as plain text."""
    return _recorded(result).export_text().rstrip("\n")


def as_html(result: Result) -> str:
    """What ``print_result`` prints, for a notebook."""
    return _recorded(result).export_html(inline_styles=True, code_format=_HTML)


def _recorded(result: Result) -> Console:
    console = Console(record=True, file=io.StringIO(), width=_WIDTH)
    print_result(result, console)
    return console


def _facts(result: Result) -> Iterator[tuple[str, str]]:
    """The lines below the metrics: label and text."""
    world, timing, device = result.world, result.timing, result.device
    yield "samples", _samples(result)
    if clusters := result.clusters:
        yield "clusters", f"{clusters['count']:,} ({clusters['column']}); the intervals allow for them"
    ranks = f"launcher {world['launcher']}, backend {world['backend']}, device {device['device']}"
    shard = result.job.get("shard")
    divided = "" if shard is None else f", model divided over them: {shard}"
    yield "ranks", f"{world['size']} ({ranks}{divided})"
    if device.get("bits"):
        yield "machine", f"{device['model']}, {device['cpu_capability']}, bits {device['bits']}"
    if result.chunks["resumed"]:
        yield "resumed", _resumed(result)
    seconds = f"{timing['evaluate_s']:.2f} s for all batches, {timing['total_s']:.2f} s for the whole run"
    if result.chunks["evaluated_now"]:
        yield "speed", f"{result.samples_per_s:,.0f} samples/s; {seconds}"
        if limit := timing.get("limited_by"):
            yield "limited by", limit["text"]
    if result.work:
        yield "work", ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in result.work.items())
    yield "metrics_digest", f"{result.metrics_digest}{_comparable(result)}"
    if result.samples_digest is not None:
        yield "samples_digest", result.samples_digest
    if result.folder is not None:
        yield "files", result.folder


def _metrics(result: Result) -> Table:
    """The table of the scalar metrics; of drawn samples with an interval for each of two questions."""
    drawn = result.part.get("kind") == DRAWN_SAMPLES
    columns = ["95 % interval"]
    if drawn:
        columns = [f"95 %: all {result.part['of']:,}", "95 %: beyond them"]
    table = Table("metric", "value", *columns)
    for name, value in result.metrics.items():
        if isinstance(value, (int, float)):
            pairs = [result.whole_set_intervals.get(name, ())] if drawn else []
            pairs.append(result.intervals.get(name, ()))
            numbers = [number for pair in pairs for number in pair]
            first, *ends = shown_numbers(value, *numbers, unit=result.units.get(name))
            shown = [" to ".join(ends[at : at + 2]) for at in range(0, len(ends), 2)]
            if name in result.rough:
                shown = [f"{pair} (rough)" for pair in shown]
            table.add_row(name, first, *shown)
        elif value is None:
            counts = ", ".join(f"{n} {kind}" for kind, n in result.nonfinite.get(name, {}).items() if n)
            table.add_row(name, f"not finite ({counts})" if counts else "none")
    return table


def print_slices(result: Result, console: Console) -> None:
    """Print the first metrics of each group, a table for each way to group."""
    for by, groups in result.slices.items():
        known = [*dict.fromkeys(name for group in groups for name in group["metrics"])]
        names = [name for name in known if any(name in group["intervals"] for group in groups)][:_SLICED]
        names = names or known[:_SLICED]
        table = Table(escape(printable(by)), "samples", *names)
        for group in groups:
            shown = [_of_group(result, group, name) for name in names]
            samples = f"{group['samples']:,}{' (small)' * bool(group['small'])}"
            table.add_row(escape(printable(group["label"])), samples, *shown)
        console.print(table)
        notes = []
        if any(group["small"] for group in groups):
            notes.append("(small): too few samples, or clusters of them, for a statement")
        if any(name in group["rough"] and group["intervals"].get(name) for group in groups for name in names):
            notes.append("rough: the interval may cover less than 95 %; the JSON says why")
        if notes:
            print_line(console, "; ".join(notes))


def _of_group(result: Result, group: Mapping[str, Any], name: str) -> str:
    value, ends = group["metrics"].get(name), group["intervals"].get(name, ())
    if value is None:
        return "none"
    first, *shown = shown_numbers(value, *ends, unit=result.units.get(name))
    behind = f" ({' to '.join(end.partition(' ')[0] for end in shown)})" if shown else ""
    return f"{first}{behind}{', rough' * (name in group['rough'])}"


def make_console(width: int = _WIDTH) -> Console:
    """Make the console of standard output: without colours and width of a terminal that is a launcher's."""
    if on_screen(sys.stdout):
        return Console()
    return Console(force_terminal=False if sys.stdout.isatty() else None, width=width)


def _of_earlier_run(result: Result) -> str:
    """The first line where nothing was evaluated but two batches."""
    when = "" if result.finished_at is None else f" at {result.finished_at}"
    proof = {
        None: "",
        "same bits": "; batches of it were evaluated again and have the same bits",
        "within tolerance": "; batches of it were evaluated again and agree to the tolerance",
        "nothing to compare": "; no rows to evaluate again and compare",
        "skipped": "; not compared with what the job gives now (--no-replay)",
    }[result.replay]
    return f"Finished before{when} and shown again{proof}."


def print_line(console: Console, line: str, style: str | None = None) -> None:
    """Print a line whole, however narrow the terminal, to be copied; control characters are spelled."""
    console.print(printable_lines(line), soft_wrap=True, highlight=False, markup=False, style=style)


def labelled(label: str, text: str) -> str:
    """A line around a table: a label, and the text in a column of its own."""
    return f"{label:<{LABEL_WIDTH - 1}} {text}"


def _samples(result: Result) -> str:
    """How many were evaluated, and which part of the data set they are."""
    samples, part = result.samples, result.part
    failed = f"{samples['failed']} failed"
    if part.get("kind", ALL_SAMPLES) == ALL_SAMPLES:
        return f"{samples['evaluated']:,} of {samples['total']:,} evaluated, {failed}"
    return f"{described_part(part)}, {failed}"


def _resumed(result: Result) -> str:
    chunks = result.chunks
    proof = {None: "", "skipped": "; not compared (--no-replay)"}
    compared = proof.get(result.replay, f"; finished batches evaluated again: {result.replay}")
    return f"{chunks['resumed']} of {chunks['total']} chunks were finished before{compared}"


def _reference(result: Result) -> Iterator[tuple[str, str]]:
    """How the predictions differ from those of another run; nothing where none was named."""
    reference = result.reference
    if not reference:
        return
    yield "reference", reference["folder"]
    if "problem" in reference:
        return
    if reference["differs_in"]:
        yield "  differs in", shown_options(reference["differs_in"])
    failed = ", ".join(f"{count:,} {_FAILED[name]}" for name, count in reference["failed"].items() if count)
    yield "  samples", f"{reference['samples']:,} in both" + (f"; failed: {failed}" if failed else "")
    yield "  agreement", _agreement(reference)
    if reference["loss"] is not None:
        yield "  loss", _difference(reference["loss"])
    if reference["same_bits"]:
        yield "  columns", f"all {len(reference['columns'])} others have the same bits"
    for name, column in reference["columns"].items():
        if column["rows_differ"]:
            yield f"  {name}", _difference(column)
    for name, reason in reference["not_compared"].items():
        yield f"  {name}", f"not compared: {reason}"


_FAILED = {"here": "in this run only", "there": "in the reference only", "both": "in both"}


def shown_options(options: Mapping[str, Sequence[Any]]) -> str:
    """Options that two runs do not share, with both values."""
    return ", ".join(f"{name} {_beside(*values)}" for name, values in options.items())


def _beside(there: object, here: object) -> str:
    texts = ["none" if value is None else str(value) for value in (there, here)]
    return " -> ".join(text if len(text) <= _LONGEST_VALUE else _shortened(text) for text in texts)


def _shortened(text: str) -> str:
    """The beginning of a hash, as it is shown everywhere; of paths the ends differ."""
    return text[:_OF_HASH] if _HASH.fullmatch(text) else f"…{text[1 - _LONGEST_VALUE :]}"


def _agreement(reference: Mapping[str, Any]) -> str:
    if reference["agreement"] is None:
        return "the runs keep no prediction"
    equal = reference["samples"] - reference["changed"]
    text = f"{equal:,} predictions are equal ({100 * reference['agreement']:.2f} %)"
    if reference["changed"] and reference["became_right"] is not None:
        text += f"; {reference['became_right']:,} became right, {reference['became_wrong']:,} wrong"
    return text


def _difference(column: Mapping[str, Any]) -> str:
    """How much the rows of one column differ."""
    if not column["rows_differ"]:
        return "the same bits in every row"
    text = f"{column['rows_differ']:,} rows differ"
    if column.get("largest") is None:
        return f"{text}, the first is {column.get('first') or column.get('first_not_finite')}"
    text += f", mean {column['mean']:+.3g}, largest {column['largest']:.3g}"
    if column["largest_at"] is not None:
        text += f" ({column['largest_at']})"
    if column["not_finite"]:
        text += f"; {column['not_finite']:,} not finite ({column['first_not_finite']}, ...)"
    return text


def _comparable(result: Result) -> str:
    if result.deterministic is False:
        return " (may differ in another run: see the warning)"
    if result.homogeneous:
        return ""
    return f" (not comparable: {len(result.machines)} kinds of machine)"


def shown_numbers(*values: float, unit: str | None) -> list[str]:
    """A value and the ends of its interval as texts, with equally many decimals."""
    if unit == "fraction":
        values, unit = tuple(100 * value for value in values), "percent"
    behind = {None: "", "percent": " %"}.get(unit, f" {unit}")
    if all(isinstance(value, int) for value in values):
        return [f"{value:,}{behind}" for value in values]
    largest = max(map(abs, values))
    power = math.floor(math.log10(largest)) if largest else 0
    if unit == "percent" and power >= -1:
        return [f"{value:.2f}{behind}" for value in values]
    digits = _DIGITS if unit != "percent" else _DIGITS // 2
    if largest and not _SMALL <= largest < _LARGE:
        return [f"{value:.{_decimals(value, power - digits + 1)}e}{behind}" for value in values]
    return [f"{value:.{max(0, digits - 1 - power)}f}{behind}" for value in values]


def _decimals(value: float, last: int) -> int:
    """Decimals of a number with a power of ten, down to the digit that stands for 10**last."""
    return max(0, math.floor(math.log10(abs(value))) - last) if value else 0
