"""What a task shows of a sample, as plain values of which a page has room for many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dualeval.errors import with_type
from dualeval.messages import printable_lines

if TYPE_CHECKING:
    from PIL import Image

THUMBNAIL = 240  # pixels of the longer side
_WRONG = "wrong"  # the layer of all pixels that are

# Left, top, right and bottom in shares of the picture's sides, colour as "#rrggbb", and text.
Box: TypeAlias = tuple[float, float, float, float, str, str]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One thing of a sample to look at."""

    kind: str  # "picture", "text", "tokens", "table" or "error"
    picture: Image.Image | None = None
    # By name what lies over the picture: a picture that is transparent in places, or boxes.
    layers: Mapping[str, Image.Image | tuple[Box, ...]] = field(default_factory=dict)
    text: str = ""
    # Pieces of the text with the loss of each; and with another run's, beside which this one's is shown.
    tokens: tuple[tuple[str, float], ...] = ()
    beside: tuple[float, ...] = ()
    table: Mapping[str, str] = field(default_factory=dict)


def things_of(task: Any, row: Mapping[str, Any]) -> tuple[Shown, ...]:
    """What a task shows of a sample, or the error that it raises: the user's code may do anything."""
    if task is None:
        return ()
    try:
        shown = task.show(row)
        made: list[Shown] = []
        under: Any = None
        for each in shown if isinstance(shown, list | tuple) else [shown]:
            if under is not None and _are_layers(each):
                made[-1] = replace(made[-1], layers=_layers(each, under, made[-1].picture))
            else:
                made.append(_thing(each))
                under = each if made[-1].kind == "picture" else None
        return tuple(made)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - see above
        return (Shown(kind="error", text=with_type(error)),)


def _thing(value: Any) -> Shown:
    if isinstance(value, str):
        return Shown(kind="text", text=value)
    if isinstance(value, Mapping):
        return Shown(kind="table", table={str(name): str(each) for name, each in value.items()})
    if isinstance(value, list):
        tokens = tuple((str(text), float(loss)) for text, loss in value)
        return Shown(kind="tokens", text="".join(text for text, _ in tokens), tokens=tokens)
    from PIL import Image

    if isinstance(value, Image.Image):
        # Now: a file that is damaged or closed fails here, and large pictures are not kept.
        return Shown(kind="picture", picture=thumbnail(value))
    expected = "expected a PIL picture, a text, a mapping, or a list of pairs of a text and its loss"
    raise TypeError(f"show returned a {type(value).__name__}: {expected}")


def _are_layers(value: Any) -> bool:
    """Whether a mapping has pictures, or lists of boxes, and not what a table says."""
    from PIL import Image

    return isinstance(value, Mapping) and all(
        isinstance(each, Image.Image)
        or (isinstance(each, list) and each and all(type(box) is tuple and len(box) == 6 for box in each))
        for each in value.values()
    )


def _layers(layers: Mapping[str, Any], under: Any, small: Any) -> dict[str, Any]:
    from PIL import ImageColor

    width, height = under.size

    def hexadecimal(colour: str) -> str:
        return "#" + bytes(ImageColor.getrgb(colour)[:3]).hex()

    return {
        str(name): tuple(
            (left / width, top / height, right / width, bottom / height, hexadecimal(colour), str(text))
            for left, top, right, bottom, colour, text in each
        )
        if isinstance(each, list)
        else _reduced(each.convert("RGBA"), small.size, str(name))
        for name, each in layers.items()
    }


def _reduced(layer: Image.Image, size: tuple[int, int], name: str) -> Image.Image:
    """A layer in the size of its picture: of "wrong" also what is thinner than a pixel."""
    from PIL import Image

    if name != _WRONG:
        # Classes are not mixed.
        return layer.resize(size, Image.Resampling.NEAREST)
    pixels = np.asarray(layer)
    for axis, new in ((0, size[1]), (1, size[0])):
        pixels = np.maximum.reduceat(pixels, np.arange(new) * pixels.shape[axis] // new, axis=axis)
    return Image.fromarray(pixels)


def others_than(own: Sequence[Shown], things: Sequence[Shown]) -> tuple[Shown, ...]:
    """What another run shows and this one does not; of a table the entries that differ, of tokens losses."""
    known = {pair for each in own for pair in each.table.items()}
    of_texts = {each.text: each for each in own if each.tokens}
    # A text of which this run has the losses is there already.
    things = [each for each in things if each.kind != "text" or each.text not in of_texts]
    things = [_beside(of_texts.get(each.text), each) if each.tokens else each for each in things]
    reduced = [
        replace(each, table={name: text for name, text in each.table.items() if (name, text) not in known})
        for each in things
        if each.kind != "table" or not {*each.table.items()} <= known
    ]
    return tuple(each for each in reduced if not any(is_same(each, mine) for mine in own))


def _beside(own: Shown | None, other: Shown) -> Shown:
    """Another run's tokens, with this run's losses of them where they are the same."""
    if own is None or [text for text, _ in own.tokens] != [text for text, _ in other.tokens]:
        return other
    return replace(other, beside=tuple(loss for _, loss in own.tokens))


def is_same(one: Shown, other: Shown) -> bool:
    """Whether two things look alike."""
    return _plain(one) == _plain(other)


def _plain(shown: Shown) -> tuple[Any, ...]:
    layers = {name: _pixels(each) for name, each in shown.layers.items()}
    return shown.kind, _pixels(shown.picture), layers, shown.text, shown.tokens, shown.table


def _pixels(value: Any) -> Any:
    """What says whether pictures are the same; anything else as it is."""
    return (value.size, value.tobytes()) if hasattr(value, "tobytes") else value


def thumbnail(picture: Image.Image) -> Image.Image:
    """A copy that a card has room for."""
    if not min(picture.size):
        raise ValueError(f"a picture has {picture.size[0]} x {picture.size[1]} pixels")
    small = picture.convert("L" if picture.mode in ("1", "L") else "RGB")
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    return small


def seen(text: str) -> str:
    """A text of strangers, with what cannot be seen spelled out."""
    return printable_lines(text.replace("\r\n", "\n"))
