"""The cards of a page: what the template makes of each sample, and of another run's beside it."""

from __future__ import annotations

import base64
import bisect
import difflib
import io
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING, Any

from markupsafe import escape

from dualeval.report.page.things import THUMBNAIL, seen, thumbnail

if TYPE_CHECKING:
    from PIL import Image

    from dualeval.report.page.content import SampleShown
    from dualeval.report.page.things import Box, Shown

LEVELS = 9  # of the colours of the matrix and of losses
_TINY = 64  # pixels of a picture's longer side, up to which it is shown larger
_TEXT_LETTERS = 4000
# A longer text is folded; its summary has the beginning and the end.
_FOLDED, _ENDS = 400, 100
_WORDS = re.compile(r"\S+\s*|\s+")
# Of a text by its losses: tokens that a card has, and where stronger colours begin, of losses in nats and of
# their differences.
_TOKENS, _LOSSES, _DIFFERENCES = 600, (0.5, 1, 2, 4, 8), (0.1, 0.3, 1, 3)


def turns_of(samples: Sequence[SampleShown]) -> list[int]:
    """Each sample's position where reasons take turns: cutting the last ones cuts all reasons alike."""
    by_reason = defaultdict(list)
    for at, sample in enumerate(samples):
        by_reason[sample.reasons[:1]].append(at)
    order = [at for turn in zip_longest(*by_reason.values()) for at in turn if at is not None]
    return [order.index(at) for at in range(len(samples))]


def card_of(sample: SampleShown, run: str) -> dict[str, Any]:
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


def index_of(sample: SampleShown) -> dict[str, Any]:
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
    return f"{'d' if value < 0 else 'o'}{-(-LEVELS * level // len(steps))}"


def _shown_on(cards: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The things of all samples, and of those of other runs beside them."""
    return [each for card in cards for of in (card, *card["others"]) for each in of["shown"]]


def steps_of(cards: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """What the colours of tokens mean: in words, and a class of CSS and a number for each."""
    things = _shown_on(cards)
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


def marks_of(
    colours: Mapping[str, str], cards: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str | None, bool]]:
    """What colours mean: name, colour and whether it is a layer, these first."""
    things = _shown_on(cards)
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
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
        f'<g fill="none" stroke-width="1.5">{"".join(drawn)}</g>'
        # Behind the letters their outline, in the colour of the box.
        '<g font-family="sans-serif" font-size="10" stroke-width="4" paint-order="stroke">'
        f"{''.join(written)}</g></svg>"
    )
    return _data_uri("svg+xml", svg.encode("utf-8", "backslashreplace"))
