"""The page of a finished run: one HTML file that asks for nothing else."""

from __future__ import annotations

import base64
import bisect
import difflib
import hashlib
import io
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from dualeval.messages import counted, printable_lines
from dualeval.report.comparison import p_text
from dualeval.report.page import charts
from dualeval.report.page.content import VERSUS
from dualeval.report.page.things import THUMBNAIL, thumbnail
from dualeval.report.table import shown_numbers
from dualeval.result import TimedStage

if TYPE_CHECKING:
    from PIL import Image

    from dualeval.report.page.content import Headline, PageContent, SampleShown
    from dualeval.report.page.things import Box, Shown

_HERE = Path(__file__).parent
_LIMIT = 8_000_000  # bytes of a page
_TINY = 64  # pixels of a picture's longer side, up to which it is shown larger
_TEXT_LETTERS = 4000
# A longer text is folded; its summary has the beginning and the end.
_FOLDED, _ENDS = 400, 100
_WORDS = re.compile(r"\S+\s*|\s+")
# Of a text by its losses: tokens that a card has, and where stronger colours begin, of losses in nats and of
# their differences.
_TOKENS, _LOSSES, _DIFFERENCES = 600, (0.5, 1, 2, 4, 8), (0.1, 0.3, 1, 3)
# Above so many classes the pairs that are mixed up most often stand for the whole matrix.
_MOST_CLASSES, _PAIRS = 50, 50
# Most rows of a table; most charts of slices (each takes 50 ms).
_ROWS, _CHARTS = 1000, 8
_LEVELS = 9  # of the colours of the matrix and of losses


def render(content: PageContent, limit: int = _LIMIT) -> str:
    """Make the page; where it would have more bytes than ``limit``, with fewer samples, and says so."""
    turns = _turns(content.samples)
    cards = [
        {**_card(sample, content.name), "turn": turn}
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
    return str(vars(known)["card"](**_card(sample, content.name)))


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
        reasons={reason: content.reasons[reason] for reason in on_cards},
        marks=_marks(content.colours, cards),
        steps=_steps(cards),
        facets=[*dict.fromkeys(facet for card in cards for facet in card["of"].facets)],
        matrix=_matrix(content) if len(content.confusion_names) <= _MOST_CLASSES else [],
        style=Markup(style),
        script=Markup(script),
        policy=policy_of(content),
        breaking=_breaking,
        link=_link,
        rows=_as_script({**content.rows, "columns": [*map(_column, content.rows["columns"])]}),
        rows_there=_number_of_rows(content),
        index=_as_script([_index(card["of"]) for card in cards]),
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
    """A cell by class: its name leads to its samples, a difference of recall to those that flipped."""
    metric, versus, run = column.partition(VERSUS)
    if column == "class":
        return _cell(name, rows=_rows_with(content, target=name))
    if not versus or not isinstance(value, float):
        return value
    rows = _rows_with(content, (run, value < 0), target=name) if metric == "recall" and value else None
    return _cell(value, _points(value), rows=rows)


def _points(value: float) -> str:
    return f"{100 * value:+.2f} pp"


def _rows_with(content: PageContent, flip: tuple[str, bool] | None = None, **texts: str) -> str | None:
    """The choices in the table of all samples, as its script reads them; None where it has no such column.

    ``flip`` is another run's name, and whether it is the one that is right.
    """
    names = {each["name"] for each in content.rows["columns"]} if _number_of_rows(content) else {*()}
    if not names >= {*texts} | ({"right", f"right in {flip[0]}"} if flip else {*()}):
        return None
    flips = {f"flips, {seen(flip[0])}": "right" if flip[1] else "wrong"} if flip else {}
    return json.dumps({**{name: seen(text) for name, text in texts.items()}, **flips})


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
    columns = ("target", "predicted", "samples", "share of target")
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
    return [[(n, n and max(1, round(_LEVELS * (n / sum(row)) ** 0.5))) for n in row] for row in counts]


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


# -- samples ---------------------------------------------------------------------------------------


def _turns(samples: Sequence[SampleShown]) -> list[int]:
    """Each sample's position where reasons take turns: cutting the last ones cuts all reasons alike."""
    by_reason = defaultdict(list)
    for at, sample in enumerate(samples):
        by_reason[sample.reasons[:1]].append(at)
    order = [at for turn in zip_longest(*by_reason.values()) for at in turn if at is not None]
    return [order.index(at) for at in range(len(samples))]


def _card(sample: SampleShown, run: str) -> dict[str, Any]:
    """What the template makes a card of."""
    # Where runs say other things by one name, each has what the others say.
    own = _said(sample.shown)
    said = [_said(other.shown) for other in sample.others]
    others = [
        {"of": other, "shown": [_template_values(each, run, other.run, [own]) for each in other.shown]}
        for other in sample.others
    ]
    shown = [_template_values(each, run, beside=said) for each in sample.shown]
    return {"of": sample, "shown": shown, "others": others}


def _said(things: Sequence[Shown]) -> dict[str, str]:
    return {name: text for each in things for name, text in each.table.items()}


def _index(sample: SampleShown) -> dict[str, Any]:
    """What the page's filters know of a sample."""
    values = {"reason": sample.reasons, "target": [sample.target], "prediction": [sample.prediction]}
    # Facets are strangers' names, and none of them is one of these.
    values |= {f"facet {seen(facet)}": each for facet, each in sample.facets.items()}
    return {key: [seen(each) for each in value if each is not None] for key, value in values.items()}


def _template_values(
    shown: Shown, run: str, other: str | None = None, beside: Sequence[Mapping[str, str]] = ()
) -> dict[str, Any]:
    """A thing of the page's run, or of the other one's sample; ``beside`` has what is said there by name."""
    if shown.kind == "picture" and shown.picture is not None:
        picture = {"kind": "picture", "text": shown.text, **_thumbnail(shown.picture)}
        if not shown.layers:
            return picture
        size = _large(picture["size"])
        layers = {
            name: _boxes(layer, size) if isinstance(layer, tuple) else _encoded(layer, "webp", lossless=True)
            for name, layer in shown.layers.items()
        }
        return {**picture, "size": size, "tiny": False, "layers": layers}
    if shown.kind == "tokens":
        differs, more = bool(shown.beside), len(shown.tokens[_TOKENS:])
        words = f"loss: {run} − {other}" if differs else f"losses of {other or run}"
        return {"kind": "tokens", "tokens": _coloured(shown), "more": more, "differs": differs, "of": words}
    table = {
        name: _folded(text, [each[name] for each in beside if name in each])
        for name, text in shown.table.items()
    }
    return {"kind": shown.kind, "text": _folded(shown.text), "table": table}


def _coloured(shown: Shown) -> list[tuple[str, str, str, str]]:
    """Of each token the space before it, its text, a class of CSS, and its loss.

    Where there is another run's, it is by how much the page's run is above it.
    """
    tokens = shown.tokens[:_TOKENS]
    of_tokens = [(_word(text), loss) for text, loss in tokens]
    if not shown.beside:
        return [(*words, _level(loss, _LOSSES), f"{loss:.2f}") for words, loss in of_tokens]
    apart = [(words, own - loss) for (words, loss), own in zip(of_tokens, shown.beside, strict=False)]
    return [(*words, _level(value, _DIFFERENCES), f"{value:+.2f}") for words, value in apart]


def _word(text: str) -> tuple[str, str]:
    """A token's leading space, which has no colour, and the rest; of space alone it is all the rest."""
    word = text.lstrip() or text
    return text.removesuffix(word), word


def _level(value: float, steps: Sequence[float]) -> str:
    """The class of CSS of a number, as it is shown; NaN has the strongest colour."""
    level = bisect.bisect_right(steps, round(abs(value), 2))
    # Rounded up: the first step is to be seen, too.
    return f"{'d' if value < 0 else 'o'}{-(-_LEVELS * level // len(steps))}"


def _steps(cards: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """What the colours of tokens mean: in words, and a class of CSS and a number for each."""
    things = [each for card in cards for of in (card, *card["others"]) for each in of["shown"]]
    higher = [(_level(at, _DIFFERENCES), f"≥ +{at}") for at in _DIFFERENCES]
    lower = [(_level(-at, _DIFFERENCES), f"≤ −{at}") for at in reversed(_DIFFERENCES)]
    losses = [("o0", f"< {_LOSSES[0]}"), *((_level(at, _LOSSES), f"≥ {at}") for at in _LOSSES)]
    meant = []
    for differs, levels in ((False, losses), (True, [*lower, ("o0", "between"), *higher])):
        if words := dict.fromkeys(each["of"] for each in things if each.get("differs") is differs):
            meant.append((", ".join(words), levels))
    return meant


def _apart(text: str, others: Sequence[str]) -> list[tuple[str, bool]]:
    """A text in pieces, and of each whether one of the others has other words there."""
    words = _WORDS.findall(text)
    differs = [False] * len(words)
    for other in others:
        matcher = difflib.SequenceMatcher(None, words, _WORDS.findall(_start_of(other)), autojunk=False)
        for kind, first, last, *_ in matcher.get_opcodes():
            if kind in ("replace", "delete"):
                differs[first:last] = [True] * (last - first)
    pairs = groupby(zip(words, differs, strict=True), key=lambda pair: pair[1])
    return [("".join(word for word, _ in of), is_other) for is_other, of in pairs]


def _folded(text: str, others: Sequence[str] = ()) -> dict[str, Any]:
    """A text as a page has room for it, and of a long one what is there while it is folded."""
    summary = f"{text[:_ENDS]} … {text[-_ENDS:]}" if len(text) > _FOLDED else ""
    return {"summary": summary, "pieces": _apart(_start_of(text), others)}


def _marks(
    colours: Mapping[str, str], cards: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str | None, bool]]:
    """What colours mean: name, colour and whether it is a layer, these first."""
    things = [each for card in cards for of in (card, *card["others"]) for each in of["shown"]]
    layers = dict.fromkeys(name for each in things for name in each.get("layers", ()))
    places = {name: place for place, name in enumerate(colours)}
    others = [(name, colour, False) for name, colour in colours.items() if name not in layers]
    ordered = sorted(layers, key=lambda name: places.get(name, -1))
    return [*((name, colours.get(name), True) for name in ordered), *(others if layers else [])]


def _start_of(text: str) -> str:
    return text if len(text) <= _TEXT_LETTERS else f"{text[:_TEXT_LETTERS]} … ({len(text):,} letters)"


def _thumbnail(picture: Image.Image) -> dict[str, Any]:
    """The picture as a data URI, in the size that a card has room for."""
    is_tiny = max(picture.size) <= _TINY
    picture = thumbnail(picture)
    source = _encoded(picture, "png", optimize=True) if is_tiny else _encoded(picture, "webp", quality=80)
    return {"source": source, "size": picture.size, "tiny": is_tiny, "layers": {}}


def _encoded(picture: Image.Image, kind: str, **options: Any) -> str:
    """A picture as a data URI."""
    with io.BytesIO() as file:
        picture.save(file, kind, **options)
        return _data_uri(kind, file.getvalue())


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"


def _large(size: Sequence[int]) -> tuple[int, int]:
    """The size in which a picture with layers is shown: what is written there can be read."""
    width, height = (max(1, round(side * THUMBNAIL / max(size))) for side in size)
    return width, height


def _boxes(boxes: Sequence[Box], size: tuple[int, int]) -> str:
    """Boxes with their texts, as a data URI that lies over a picture of this size."""
    width, height = size
    drawn, written = [], []
    for left, top, right, bottom, colour, text in boxes:
        x, y, wide, high = left * width, top * height, (right - left) * width, (bottom - top) * height
        drawn.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" stroke="{colour}"/>'
        )
        # Within the picture, whatever the box; a letter is about 6 wide.
        x, y = max(2, min(x + 2, width - 6 * len(text))), max(9, min(y + 9, height - 3))
        red, green, blue = bytes.fromhex(colour[1:])
        ink = "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 140 else "white"
        at = f'x="{x:.1f}" y="{y:.1f}" fill="{ink}" stroke="{colour}"'
        written.append(f"<text {at}>{escape(seen(text))}</text>" if text else "")
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" preserveAspectRatio="none">'
        f'<g fill="none" stroke-width="1.5">{"".join(drawn)}</g>'
        # Behind the letters their outline, in the colour of the box.
        '<g font-family="sans-serif" font-size="10" stroke-width="4" paint-order="stroke">'
        f"{''.join(written)}</g></svg>"
    )
    return _data_uri("svg+xml", svg.encode("utf-8", "backslashreplace"))


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
    return f"#sample={quote(seen(sample))}"


def seen(text: str) -> str:
    """A text of strangers, with what cannot be seen spelled out."""
    return printable_lines(text.replace("\r\n", "\n"))


def _as_script(value: object) -> Markup:
    """JSON that ends no script element, and begins no comment in one."""
    text = json.dumps(value, separators=(",", ":"))  # ASCII: U+2028 and U+2029 are escapes
    return Markup("".join(f"\\u{ord(each):04x}" if each in "<>&" else each for each in text))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
