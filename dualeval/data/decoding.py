"""A faster decoder for JPEGs, which has to give Pillow's pixels to the bit.

Pillow and simplejpeg each bring a libjpeg-turbo, of versions that may differ. The decoder therefore checks
itself: the first pictures of each kind (``JpegKind``) in each process are decoded by both. Versions of
libjpeg-turbo have differed in one step of decoding at a time: in the upsampling of one sampling, in the edges
of pictures, in how incomplete or damaged scans are filled. A picture holds thousands of blocks that all go
the same way through these steps, so a decoder that differs for a kind shows it in the first picture. Damaged
files are left to Pillow: simplejpeg refuses a file at the first warning.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image, features

from dualeval.data.jpeg import JpegKind, kind_of
from dualeval.errors import with_type

# Pictures that are decoded by both: of each kind, and of all.
_CHECKED_OF_A_KIND = 2
_CHECKED = 8
_COLOURS = {"L": "GRAY", "RGB": "RGB"}

_Pixels = npt.NDArray[np.uint8]
_Decode = Callable[..., _Pixels]


class Decoder:
    """Decodes JPEGs by simplejpeg, where it is installed and as long as its pixels are Pillow's."""

    def __init__(self) -> None:
        self._checked: Counter[JpegKind] = Counter()
        self._off = False
        self._notes: list[str] = []

    def decode(self, image: Image.Image, file: IO[bytes]) -> _Pixels | None:
        """The pixels of a picture, where that is faster than by Pillow."""
        if self._off or image.format != "JPEG" or image.mode not in _COLOURS:
            return None
        decode = _installed()
        if decode is None:
            self._off = True
            return None
        file.seek(0)
        data = file.read()
        kind = kind_of(data)
        if kind is None:
            return None
        try:
            pixels = decode(data, colorspace=_COLOURS[image.mode], strict=True)
        except ValueError:
            return None
        except Exception as error:  # noqa: BLE001 - whatever it is, Pillow can do without
            self._turn_off(f"raised {with_type(error)}")
            return None
        if image.mode == "L":
            pixels = pixels[..., 0]
        return self._agreed(kind, image, pixels)

    def _agreed(self, kind: JpegKind, image: Image.Image, pixels: _Pixels) -> _Pixels | None:
        """The pixels, unless Pillow was asked and has given its own."""
        if self._checked[kind] >= _CHECKED_OF_A_KIND and self._checked.total() >= _CHECKED:
            return pixels
        self._checked[kind] += 1
        try:
            image.load()
        except Exception:
            self._turn_off("read a file that Pillow refuses")
            raise
        if not np.array_equal(pixels, np.asarray(image)):
            self._turn_off("gave other pixels than Pillow")
        return None

    def _turn_off(self, why: str) -> None:
        self._off = True
        theirs = getattr(sys.modules.get("simplejpeg"), "__version__", "of unknown version")
        versions = f"simplejpeg {theirs} and Pillow {PIL.__version__}"
        self._notes.append(
            f"simplejpeg {why} for a JPEG ({versions}): Pillow decodes the pictures, which takes longer and "
            "changes nothing else"
        )

    def notes(self) -> list[str]:
        """Sentences for people since the last call."""
        said, self._notes = self._notes, []
        return said


def _installed() -> _Decode | None:
    """simplejpeg's decoder; None where it is missing, or Pillow has another library than libjpeg-turbo."""
    try:
        import simplejpeg  # type: ignore[import-untyped]
    except ImportError:
        return None
    decode: Any = simplejpeg.decode_jpeg
    return decode if features.check_feature("libjpeg_turbo") else None
