"""How a comparison of two runs is shown: on a terminal, and as Markdown."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dualeval.comparison.compared import Comparison, Gate, MetricComparison
from dualeval.comparison.groups import WorstGate
from dualeval.comparison.statistics import LEVEL
from dualeval.messages import first_of, printable
from dualeval.report.table import (
    LABEL_WIDTH,
    labelled,
    make_console,
    print_line,
    shown_numbers,
    shown_options,
)

# Ids of flipped samples that are shown.
_NAMED = 3
_HEAD_OF_GROUPS = ("samples", "metric", "A", "B", "B - A, 95 % interval", "shown")
# Metrics that are shown by group where no gate names one.
_SLICED = 2
_HEAD = ("metric", "A", "B", "B - A", "95 % interval", "p", "shown")
# Their differences are in percentage points.
_OF_HUNDRED = ("fraction", "percent")
_SMALLEST_P = 1e-4
# Where the interval has no width.
_DECIMALS = 4
_MOST_DECIMALS = 8
# Of a number with a power of ten; from _LARGE on it is easier to read than zeros.
_MOST_DIGITS = 12
_LARGE = 1e9
# Of a table that a file takes.
_WIDTH = 120


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print the metrics of two runs side by side, what changed, and the gates."""
    console = console or make_console(_WIDTH)
    lines = _lines(comparison)
    print_line(console, comparison.sentence, style="bold")
    for line in (*_title(comparison), *lines[:2]):
        print_line(console, line)
    table = Table(*_HEAD)
    for row in _rows(comparison):
        table.add_row(*row)
    console.print(table)
    for by, rows in _tables_of_groups(comparison):
        table = Table(escape(by), *_HEAD_OF_GROUPS)
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table)
    for line in lines[2:]:
        print_line(console, line)
    gates: list[Gate | WorstGate] = [*comparison.gates, *comparison.worst_gates]
    for gate, line in zip(gates, _gates(comparison), strict=True):
        print_line(console, line, style="green" if gate.passed else "red")
    for note in comparison.notes:
        print_line(console, f"note: {note}", style="yellow")


def as_text(comparison: Comparison) -> str:
    """What ``print_comparison`` prints, without colours."""
    text = io.StringIO()
    print_comparison(comparison, Console(file=text, width=_WIDTH))
    return text.getvalue().rstrip()


def as_markdown(comparison: Comparison) -> str:
    """The same as Markdown, for a pull request or a page."""
    tables = [(_HEAD, _rows(comparison))]
    tables += [((by, *_HEAD_OF_GROUPS), rows) for by, rows in _tables_of_groups(comparison)]
    table: list[str] = []
    for head, rows in tables:
        lines_of = (head, ["---"] * len(head), *rows)
        table += [f"| {' | '.join(_escaped(entry) for entry in row)} |" for row in lines_of]
        table.append("")
    lines = [*_title(comparison), *_lines(comparison), *_gates(comparison)]
    listed = [
        f"- {line[:LABEL_WIDTH].rstrip()}: {_escaped(' '.join(line[LABEL_WIDTH:].split()))}" for line in lines
    ]
    notes = [f"- Note: {note}" for note in comparison.notes]
    return "\n".join([comparison.sentence, "", *table, *listed, *notes]) + "\n"


def _escaped(text: str) -> str:
    return printable(text).replace("|", "\\|")


def _title(comparison: Comparison) -> list[str]:
    lines = [labelled(name, run["folder"]) for name, run in (("A", comparison.a), ("B", comparison.b))]
    options = comparison.differs_in
    return [*lines, labelled("differs in", shown_options(options))] if options else lines


def _lines(comparison: Comparison) -> list[str]:
    return [labelled(label, text) for label, text in _facts(comparison)]


def _facts(comparison: Comparison) -> Iterator[tuple[str, str]]:
    clusters = f", in clusters by {comparison.cluster}" if comparison.cluster is not None else ""
    digests = comparison.a["samples_digest"], comparison.b["samples_digest"]
    same = "the same" if digests[0] == digests[1] else "another"
    digest = "" if None in digests else f"; {same} samples_digest"
    yield "samples", f"{comparison.pairs:,} in both{clusters}{digest}"
    if comparison.agreement is None:
        yield "agreement", "the runs keep no prediction"
    else:
        share = 100 * comparison.agreement / comparison.pairs
        yield "agreement", f"{comparison.agreement:,} predictions are equal ({share:.2f} %)"
    for name, metric in comparison.metrics.items():
        if metric.flips is not None and (metric.flips.lost or metric.flips.gained):
            yield "flips", f"{name}: {_flips(metric)}"
    detectable = [
        f"{name} {_amount(metric, metric.detectable)}"
        for name, metric in comparison.metrics.items()
        if metric.detectable is not None
    ]
    if detectable:
        yield "detectable", f"{', '.join(detectable)} (80 % power at the 5 % level)"
    if unknown := [
        name
        for name, metric in comparison.metrics.items()
        if metric.flips is not None and metric.detectable is None
    ]:
        yield "detectable", f"{', '.join(unknown)}: none, because too few samples differ"
    yield "tests", _tests(comparison.metrics)
    reason_of = comparison.not_compared.__getitem__
    for reason, names in groupby(sorted(comparison.not_compared, key=reason_of), reason_of):
        yield "not compared", f"{', '.join(names)}: {reason}"


def _flips(metric: MetricComparison) -> str:
    assert metric.flips is not None
    changes = ("right -> wrong", "wrong -> right")
    if metric.direction != "higher":
        changes = ("1 -> 0", "0 -> 1") if metric.direction is None else ("wrong -> right", "right -> wrong")
    texts = []
    for change, ids in zip(changes, (metric.flips.lost, metric.flips.gained), strict=True):
        texts.append(f"{len(ids):,} {change}" + (f" ({first_of(ids, _NAMED)})" if ids else ""))
    return ", ".join(texts)


def _tests(metrics: Mapping[str, MetricComparison]) -> str:
    """Which tests gave the p-values."""
    texts = []
    for test in dict.fromkeys(metric.test for metric in metrics.values()):
        names = [name for name, metric in metrics.items() if metric.test == test]
        exact = [
            f"{name} {p_text(metric.p_exact)}"
            for name, metric in metrics.items()
            if metric.test == test and metric.p_exact is not None
        ]
        suffix = f" (McNemar's exact test: {', '.join(exact)})" if exact else ""
        texts.append(f"{', '.join(names)}: {test}{suffix}")
    if len(metrics) > 1:
        texts.append(f"p is adjusted for {len(metrics)} metrics (Holm)")
    return "; ".join(texts)


def _rows(comparison: Comparison) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for name, metric in comparison.metrics.items():
        a, b = shown_numbers(metric.a, metric.b, unit=metric.unit)
        difference, interval = shown_difference(metric)
        rows.append((name, a, b, difference, interval, p_text(metric.p_holm), metric.shown))
    return rows


def shown_difference(metric: MetricComparison) -> tuple[str, str]:
    """The difference with its sign, such as "-0.12 pp", and its interval."""
    difference, low, high = (
        in_unit(metric, value, signed=True) for value in (metric.difference, *metric.interval)
    )
    behind = _behind(metric)
    return difference + behind, f"{low} to {high}{behind}"


def _tables_of_groups(comparison: Comparison) -> Iterator[tuple[str, list[Sequence[str]]]]:
    """For each way to group its name, and a row for each group and metric."""
    names = [gate.metric for gate in comparison.worst_gates] or [*comparison.metrics][:_SLICED]
    for by, groups in comparison.slices.items():
        rows: list[Sequence[str]] = []
        for group in groups:
            label = printable(group.label)
            small = " (small)" if group.small else ""
            for name in dict.fromkeys(names):
                if name not in group.metrics:
                    rows.append(
                        (label, f"{group.samples:,}{small}", name, group.not_compared[name], *[""] * 3)
                    )
                    continue
                metric = group.metrics[name]
                a, b = shown_numbers(metric.a, metric.b, unit=metric.unit)
                shown = "" if group.small else metric.shown
                _, interval = shown_difference(metric)
                rows.append((label, f"{group.samples:,}{small}", name, a, b, interval, shown))
        yield printable(by), rows


def _worst(comparison: Comparison, gate: WorstGate) -> str:
    """What a gate over groups has come to; groups that do not pass are named."""
    metric = comparison.metrics[gate.metric]
    bounds = [group.bound for group in gate.groups if group.bound is not None]
    failed = [group for group in gate.groups if not group.passed]
    if gate.passed:
        worst = max(bounds)
        text = (
            f"at most {_amount(metric, worst)} worse" if worst > 0 else "better" if worst < 0 else "no worse"
        )
        rough = [printable(group.label) for group in gate.groups if group.rough]
        few = f"; rough, because few samples decide: {first_of(rough, _NAMED)}" if rough else ""
        text = f"passed; with 95 % confidence B is {text} in each group{few}"
    elif not gate.groups:
        text = "NOT passed; no group is left"
    else:
        up_to = [f"up to {_amount(metric, group.bound or 0.0)} worse" for group in failed]
        named = [
            f"{printable(group.label)}: {group.problem or bound}"
            for group, bound in zip(failed[:_NAMED], up_to, strict=False)
        ]
        text = f"NOT passed; not shown for {', '.join(named)}{', ...' if len(failed) > _NAMED else ''}"
        small = {group.label for group in comparison.slices[gate.by] if group.is_small}
        if any(group.label in small for group in failed):
            text += "; leave small groups out with --skip-small, or make larger ones (--bins, fewer columns)"
    left_out = f"; left out: {', '.join(map(printable, gate.skipped))}" if gate.skipped else ""
    allowed = f"allowed: {_amount(metric, gate.margin)} worse; Holm over {len(bounds)} groups{left_out}"
    return f"{gate.metric} by {printable(gate.by)}: {text} ({allowed})"


def _amount(metric: MetricComparison, value: float) -> str:
    """An amount of difference, without a sign."""
    return in_unit(metric, value) + _behind(metric)


def _behind(metric: MetricComparison) -> str:
    """What stands behind a difference; those of percentages are in percentage points."""
    if metric.unit in _OF_HUNDRED:
        return " pp"
    return "" if metric.unit is None else f" {metric.unit}"


def in_unit(metric: MetricComparison, value: float, *, signed: bool = False) -> str:
    """A number with as many decimals as the width of the metric's interval is worth."""
    factor = 100 if metric.unit == "fraction" else 1
    width = factor * (metric.interval[1] - metric.interval[0])
    decimals = max(0, 2 - math.floor(math.log10(width))) if width else _DECIMALS
    sign = "+" if signed and value > 0 else ""
    if decimals > _MOST_DECIMALS or abs(factor * value) >= _LARGE:
        # As many digits as tell the ends apart.
        ratio = abs(factor * value) / width if width else 0.0
        digits = min(_MOST_DIGITS, 2 + max(0, math.ceil(math.log10(ratio)) if ratio else 0))
        return f"{sign}{factor * value:.{digits}e}"
    return f"{sign}{factor * value:,.{decimals}f}"


def p_text(value: float) -> str:
    if value < _SMALLEST_P:
        return f"<{_SMALLEST_P:g}"
    # Not as 0.05 what is below it.
    return f"{value:.4f}" if abs(value - LEVEL) < 0.005 else f"{value:.2g}" if value < 0.1 else f"{value:.2f}"


def _gates(comparison: Comparison) -> list[str]:
    """A line for each gate, those over groups last."""
    texts = [_gate(gate, comparison.metrics[gate.metric]) for gate in comparison.gates]
    texts += [_worst(comparison, gate) for gate in comparison.worst_gates]
    return [labelled("gate", text) for text in texts]


def _gate(gate: Gate, metric: MetricComparison) -> str:
    bound, margin = (_amount(metric, abs(value)) for value in (gate.bound, gate.margin))
    amount = (
        f"at most {bound} worse"
        if gate.bound > 0
        else f"at least {bound} better"
        if gate.bound
        else "no worse"
    )
    verdict = "passed" if gate.passed else "NOT passed"
    rough = "; rough: few samples decide" if gate.rough else ""
    return f"{gate.metric}: {verdict}; with 95 % confidence B is {amount} (allowed: {margin} worse{rough})"
