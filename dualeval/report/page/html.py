"""The page of a finished run: one HTML file that asks for nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dualeval.messages import counted
from dualeval.report.comparison import p_text
from dualeval.report.page import charts
from dualeval.report.page.cards import LEVELS, card_of, index_of, marks_of, steps_of, turns_of
from dualeval.report.page.content import VERSUS
from dualeval.report.page.rows import WRONG_PIXELS
from dualeval.report.page.things import seen
from dualeval.report.table import shown_numbers
from dualeval.result import TimedStage

if TYPE_CHECKING:
    from dualeval.report.page.content import Headline, PageContent, SampleShown

_HERE = Path(__file__).parent
_LIMIT = 8_000_000  # bytes of a page
# Above so many classes the pairs that are mixed up most often stand for the whole matrix.
_MOST_CLASSES, _PAIRS = 50, 50
# Most rows of a table; most charts of slices (each takes 50 ms).
_ROWS, _CHARTS = 1000, 8


def render(content: PageContent, limit: int = _LIMIT) -> str:
    """Make the page; where it would have more bytes than ``limit``, with fewer samples, and says so."""
    turns = turns_of(content.samples)
    cards = [
        {**card_of(sample, content.name), "turn": turn}
        for sample, turn in zip(content.samples, turns, strict=True)
    ]
    sections = _sections(content)
    while True:
        page = _filled(content, cards, sections)
        if len(page.encode("utf-8", "backslashreplace")) <= limit or not cards:
            return page
        cards = [card for card in cards if card["turn"] < len(cards) * 2 // 3]


def render_card(content: PageContent, sample: SampleShown) -> str:
    """Make the card of a sample alone, as it would be on the page."""
    template = _environment().get_template("page.html.j2")
    known = template.make_module({"content": content, "breaking": _breaking, "link": _link, "is_page": False})
    return str(vars(known)["card"](**card_of(sample, content.name)))


def policy_of(content: PageContent) -> str:
    """The Content-Security-Policy: the page asks for nothing, or for its own rows if it is served."""
    style, script = _files()
    connects = "connect-src 'self'; " if content.rows.get("served") else ""
    return (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; {connects}"
        f"style-src {_hash(style)}; script-src {_hash(script)}"
    )


def _files() -> tuple[str, str]:
    return (_HERE / "page.css").read_text("utf-8"), (_HERE / "page.js").read_text("utf-8")


def _filled(content: PageContent, cards: Sequence[Any], sections: Sequence[Any]) -> str:
    style, script = _files()
    left_out = f"{len(cards)} of {len(content.samples)} samples are shown: the page has room for no more."
    template = _environment().get_template("page.html.j2")
    return template.render(
        is_page=True,
        content=content,
        cards=cards,
        cuts=[content.cut, left_out if len(cards) < len(content.samples) else None],
        sections=[each for each in sections if cards or each["id"] != "samples"],
        headlines=[
            (each, *_texts(each.value, (each.low, each.high), each.unit)) for each in content.headlines
        ],
        has_ends=any(each.low is not None for each in content.headlines),
        on_cards=(on_cards := Counter(reason for card in cards for reason in card["of"].reasons)),
        marks=marks_of(content.colours, cards),
        steps=steps_of(cards),
        cells_lead=_of_samples(content),
        matrix=_matrix(content) if len(content.confusion_names) <= _MOST_CLASSES else [],
        style=Markup(style),
        script=Markup(script),
        policy=policy_of(content),
        breaking=_breaking,
        link=_link,
        rows=_as_script({**content.rows, "columns": [*map(_column, content.rows["columns"])]}),
        rows_there=_number_of_rows(content),
        index=_as_script(
            {
                "reasons": {reason: seen(content.reasons[reason]) for reason in on_cards},
                "samples": [index_of(card["of"]) for card in cards],
            }
        ),
    )


def _column(column: Mapping[str, Any]) -> dict[str, Any]:
    texts = {"texts": [*map(seen, column["texts"])]} if "texts" in column else {}
    return {**column, "name": seen(column["name"]), **texts}


def _number_of_rows(content: PageContent) -> int:
    if content.rows.get("served"):
        return int(content.rows["of"])
    return len(next((each.get("values", each.get("texts")) for each in content.rows["columns"]), []))


def _texts(value: float | None, ends: Sequence[float | None], unit: str | None) -> tuple[str, str]:
    """A value and its interval as they are shown."""
    if value is None:
        return "none", ""
    shown, *texts = shown_numbers(value, *(end for end in ends if end is not None), unit=unit)
    return shown, " to ".join(texts)


# -- sections --------------------------------------------------------------------------------------


def _sections(content: PageContent) -> list[dict[str, Any]]:
    """What follows the first screen, in order, as far as there is something to show."""
    rows = [
        [
            _of_class(content, row[0], column, value)
            for column, value in zip(content.class_columns, row, strict=True)
        ]
        for row in content.class_rows
    ]
    of_classes = _table("Metrics by class", content.class_columns, rows)
    wanted: tuple[tuple[str, str, Any, Callable[[PageContent], list[dict[str, Any]]]], ...] = (
        ("against", "Comparison", content.against, _comparisons),
        ("samples", "Samples", content.samples, lambda _: []),
        ("rows", "All samples", _number_of_rows(content), lambda _: []),
        ("confusion", "Confusion", content.confusion, _confusions),
        ("classes", "By class", content.class_rows, lambda _: [{"tables": [of_classes]}]),
        ("curves", "Precision and recall", content.curves, _curves),
        ("calibration", "Calibration", content.calibration, _calibration),
        ("slices", "Slices", content.slices, _slices),
        ("time", "Time", content.seconds, _seconds),
    )
    return [{"id": name, "title": title, "blocks": make(content)} for name, title, has, make in wanted if has]


def _table(label: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], **more: Any) -> dict[str, Any]:
    cells = [[each if isinstance(each, dict) else _cell(each) for each in row] for row in rows[:_ROWS]]
    cut = f"The first {_ROWS:,} of {len(rows):,} rows." if len(rows) > _ROWS else None
    return {"label": label, "columns": columns, "rows": cells, "cut": cut, "folds": False, **more}


def _cell(
    value: Any, text: str | None = None, small: str | None = None, rows: str | None = None
) -> dict[str, Any]:
    """A cell's text, what it is sorted by, and the rows that it leads to, of ``_rows_with``."""
    if text is None:
        text = f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if type(value) is int else value
    shown = "–" if text is None else text
    return {"value": "" if value is None else value, "text": shown, "small": small, "rows": rows}


def _of_class(content: PageContent, name: str, column: str, value: Any) -> Any:
    """A cell by class: its name leads to its samples, a difference of recall to those that flipped.

    Of masks it leads to those with the most wrong pixels of it.
    """
    metric, versus, run = column.partition(VERSUS)
    if column == "class":
        by_pixels = _rows_with(content, **{f"{WRONG_PIXELS}{name}": None})
        return _cell(name, rows=_rows_with(content, target=name) or by_pixels)
    if not versus or not isinstance(value, float):
        return value
    rows = _rows_with(content, (run, value < 0), target=name) if metric == "recall" and value else None
    return _cell(value, _points(value), rows=rows)


def _points(value: float) -> str:
    return f"{100 * value:+.2f} pp"


def _rows_with(content: PageContent, flip: tuple[str, bool] | None = None, **texts: str | None) -> str | None:
    """The choices in the table of all samples, as its script reads them; None where it has no such column.

    ``flip`` is another run's name, and whether it is the one that is right. By a column of None it is sorted.
    """
    names = {each["name"] for each in content.rows["columns"]} if _number_of_rows(content) else {*()}
    if not names >= {*texts} | ({"right", f"right in {flip[0]}"} if flip else {*()}):
        return None
    flips = {f"flips, {seen(flip[0])}": "right" if flip[1] else "wrong"} if flip else {}
    shown = {seen(name): None if text is None else seen(text) for name, text in texts.items()}
    return json.dumps({**shown, **flips})


def _comparisons(content: PageContent) -> list[dict[str, Any]]:
    blocks = []
    for number, each in enumerate(content.against):
        columns = ("metric", each.name, content.name, "difference", "95 % interval", "p", "verdict")
        flips = [
            (
                reason,
                counted(count, "sample"),
                content.reasons[reason],
                _rows_with(content, (each.name, lost)),
            )
            for reason, count, lost in (
                (f"lost:{number}", each.lost, True),
                (f"gained:{number}", each.gained, False),
            )
            if count is not None
        ]
        rows = [_compared(row, content.name) for row in each.rows]
        blocks.append(
            {
                "title": each.name,
                "tables": [_table(f"Comparison with {each.name}", columns, rows)],
                "flips": flips,
                "fall": _largest_fall(content, each.name),
                "notes": each.notes,
            }
        )
    return blocks


def _largest_fall(content: PageContent, run: str) -> tuple[str, str | None] | None:
    """The class whose first figure has fallen the most from another run's, in a sentence, and its rows."""
    metric = next((each for each in content.class_columns if each.endswith(f"{VERSUS}{run}")), None)
    if metric is None:
        return None
    at = content.class_columns.index(metric)
    value, name = min(
        ((row[at], row[0]) for row in content.class_rows if (row[at] or 0) < 0), default=(0, "")
    )
    metric = metric.removesuffix(f"{VERSUS}{run}")
    text = f"Largest fall by class: {name}, {metric} {_points(value)} (no interval)"
    return (text, _rows_with(content, (run, True), target=name)) if value < 0 else None


def _compared(row: Mapping[str, Any], run: str) -> list[Any]:
    texts = [*shown_numbers(row["a"], row["b"], unit=row["unit"]), *row["texts"]]
    keys = ("a", "b", "difference", "difference")
    cells = [_cell(row[key], text) for key, text in zip(keys, texts, strict=True)]
    verdict = row["verdict"].replace("B is ", f"{run} is ")
    return [row["name"], *cells, _cell(row["p"], p_text(row["p"])), verdict]


def _of_samples(content: PageContent) -> bool:
    """Whether the matrix counts samples, which the table of all has: that of boxes or pixels does not."""
    return _rows_with(content, target="", prediction="") is not None


def _confusions(content: PageContent) -> list[dict[str, Any]]:
    """What is mixed up most often; the matrix is the template's."""
    support: Counter[int] = Counter()
    for target, _, count in content.confusion:
        support[target] += count
    names = [*content.confusion_names, "NaN"]  # -1: no prediction
    wrong = sorted((each for each in content.confusion if each[0] != each[1]), key=lambda each: -each[2])
    rows = [
        (
            *(names[target], names[guess]),
            _cell(count, rows=_rows_with(content, target=names[target], prediction=names[guess])),
            _cell(count / support[target], f"{100 * count / support[target]:.1f} %"),
        )
        for target, guess, count in wrong[:_PAIRS]
    ]
    columns = ("target", "predicted", "samples" if _of_samples(content) else "count", "share of row")
    folds = len(content.confusion_names) <= _MOST_CLASSES
    return [{"tables": [_table("The most frequent confusions", columns, rows, folds=folds)]}]


def _matrix(content: PageContent) -> list[list[tuple[int, int]]]:
    """For each target its count and level of colour, for each prediction; no prediction, -1, comes last."""
    size = len(content.confusion_names)
    has_none = any(prediction < 0 for _, prediction, _ in content.confusion)
    counts = [[0] * (size + has_none) for _ in range(size)]
    for target, prediction, count in content.confusion:
        counts[target][prediction] += count
    # A square root: a confusion of 1 % is to be seen.
    return [[(n, n and max(1, round(LEVELS * (n / sum(row)) ** 0.5))) for n in row] for row in counts]


def _calibration(content: PageContent) -> list[dict[str, Any]]:
    keys = ("low", "high", "count", "accuracy", "confidence")
    rows = [[int(each[key]) if key == "count" else each[key] for key in keys] for each in content.calibration]
    columns = ("from", "to", "samples", "accuracy", "mean confidence")
    caption = "Accuracy of the samples with a confidence. On the dashed line the two are equal."
    drawn = [charts.draw_calibration(content.calibration)]
    tables = [_table("Numbers of the chart", columns, rows, folds=True)]
    return [{"charts": drawn, "caption": caption, "tables": tables}]


def _curves(content: PageContent) -> list[dict[str, Any]]:
    drawn = [charts.draw_curves(name, curves) for name, curves in content.curves.items()]
    caption = "The mean over categories, by the overlap (IoU) from which on a detection is right."
    return [{"charts": drawn, "caption": caption, "tables": []}]


def _slices(content: PageContent) -> list[dict[str, Any]]:
    """By slicing its groups, and charts of as many metrics as there is time for."""
    blocks = []
    left = _CHARTS
    for number, (name, groups) in enumerate(content.slices.items()):
        shown = [each for each in content.headlines if any(each.name in g["metrics"] for g in groups)]
        most = -(-left // (len(content.slices) - number))
        drawn = [
            charts.draw_groups(name, groups, each, f"slice-{number}-{at}")
            for at, each in enumerate(_drawn(shown, groups)[:most])
        ]
        left -= len(drawn)
        beside = [
            (each.name, other.name, other.slices[name])
            for other in content.against
            if name in other.slices
            for each in shown
            if any(each.name in of_group for of_group in other.slices[name].values())
        ]
        rows = [
            [
                _cell(each["label"], small=each.get("small")),
                each["samples"],
                *_values(each, shown),
                *(_cell(*of.get(each["label"], {}).get(metric, (None,))) for metric, _, of in beside),
            ]
            for each in groups
        ]
        columns = (
            *("group", "samples", *(each.name for each in shown)),
            *(f"{metric}{VERSUS}{other}" for metric, other, _ in beside),
        )
        caption = (
            "Values with 95 % intervals; dashed: all samples. Grey: small, too few samples for a statement."
        )
        if any(group.get("rough") for group in groups):
            caption += " Rough: an interval that may cover less than 95 %."
        if len(groups) > charts.MOST_GROUPS or len(shown) > most:
            caption += " More groups and metrics are in the table."
        tables = [_table(f"Numbers of {counted(len(groups), 'group')}", columns, rows, folds=True)]
        blocks.append({"title": name, "charts": [*filter(None, drawn)], "caption": caption, "tables": tables})
    return blocks


def _drawn(shown: Sequence[Headline], groups: Sequence[Mapping[str, Any]]) -> Sequence[Headline]:
    """The metrics that have intervals; all where none has."""
    return [each for each in shown if any(group["intervals"].get(each.name) for group in groups)] or shown


def _values(group: Mapping[str, Any], shown: Sequence[Headline]) -> Iterator[dict[str, Any]]:
    for each in shown:
        value = group["metrics"].get(each.name)
        text, ends = _texts(value, group["intervals"].get(each.name) or (), each.unit)
        rough = " (rough)" if ends and each.name in group.get("rough", {}) else ""
        yield _cell(value, text, ends + rough)


def _seconds(content: PageContent) -> list[dict[str, Any]]:
    stages = [stage for stage in TimedStage if any(stage in each for each in content.seconds)]
    names = ("rank", "evaluate", *stages)
    rows = [[each["rank"], *(float(each.get(name) or 0) for name in names[1:])] for each in content.seconds]
    drawn = [charts.draw_seconds(content.seconds, stages)]
    tables = [_table("Numbers of the chart", names, rows, folds=True)]
    more = len(rows) > charts.MOST_RANKS
    caption = f"The first {charts.MOST_RANKS} ranks; the others are in the table." if more else None
    return [{"text": content.limited_by, "charts": drawn, "caption": caption, "tables": tables}]


# -- the template ----------------------------------------------------------------------------------


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Of each value that the template writes, before it is escaped.
        finalize=lambda value: seen(value) if type(value) is str else value,
    )


def _breaking(text: str) -> Markup:
    """An id or a path that a line may end within, behind a slash."""
    return Markup("/<wbr>").join(seen(text).split("/"))


def _link(sample: str) -> str:
    """What opens a sample large, by an id."""
    return f"#sample={quote(seen(sample), safe='')}"


def _as_script(value: object) -> Markup:
    """JSON that ends no script element, and begins no comment in one."""
    text = json.dumps(value, separators=(",", ":"))  # ASCII: U+2028 and U+2029 are escapes
    return Markup("".join(f"\\u{ord(each):04x}" if each in "<>&" else each for each in text))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
