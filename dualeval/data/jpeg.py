"""The header of a JPEG file: what decides how it is decoded."""

from __future__ import annotations

from dataclasses import dataclass

_START, _SCAN, _TABLES = 0xD8, 0xDA, 0xC4
_FRAMES = {0xC0: "baseline", 0xC1: "extended", 0xC2: "progressive"}
# Arithmetic coding, lossless and hierarchical files: frames of their own, or marked so.
_OTHER_FRAMES = {*range(0xC3, 0xD0)} - {_TABLES}
_QUANTISATION, _RESTART, _JFIF, _ADOBE = 0xDB, 0xDD, 0xE0, 0xEE
_PASSED_OVER = {*range(0xE1, 0xF0), 0xFE} - {_ADOBE}
# Of the first component, by the number of components; the others have 1 x 1.
_SAMPLING = {1: {(1, 1), (2, 2)}, 3: {(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)}}
_SMALL = 16


@dataclass(frozen=True, kw_only=True)
class JpegKind:
    """What a decoder goes by: pictures of one kind take the same way through it."""

    # "baseline", "extended" (both with Huffman codes) or "progressive".
    process: str
    # The components' numbers, which tell RGB from YCbCr where no marker does.
    ids: tuple[int, ...]
    # Horizontal and vertical factor of the first component; those of the others are 1.
    sampling: tuple[int, int]
    # Components in the first scan: all of them, or one.
    scanned: int
    # Whether there are restart markers.
    restarts: bool
    # Whether the file says that it is JFIF, and so YCbCr.
    jfif: bool
    # The colour transform of Adobe's marker; None without one.
    adobe: int | None
    # Whether width and height end within a block.
    ragged: tuple[bool, bool]
    # Whether a side is so short that few blocks have neighbours.
    small: bool


def kind_of(data: bytes) -> JpegKind | None:
    """The kind of a JPEG of one or three components of 8 bits."""
    if data[:2] != bytes((0xFF, _START)):
        return None
    header = _Header()
    place = 2
    while place + 4 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        end = place + 2 + int.from_bytes(data[place + 2 : place + 4], "big")
        segment = data[place + 4 : end]
        if end > len(data) or end < place + 4:
            return None
        if marker == _SCAN:
            return header.kind(segment)
        if not header.take(marker, segment):
            return None
        place = end
    return None


class _Header:
    """The segments so far."""

    def __init__(self) -> None:
        self._frame: tuple[str, bytes] | None = None
        self._has_tables = self._has_quantisation = self._restarts = self._jfif = False
        self._adobe: int | None = None

    def take(self, marker: int, segment: bytes) -> bool:
        """Note what a segment says; False where the file is not plain."""
        if marker in _FRAMES and self._frame is None:
            self._frame = _FRAMES[marker], segment
        elif marker == _TABLES:
            self._has_tables = True
        elif marker == _QUANTISATION:
            # Each table is a byte (precision and number) and 64 more, if its entries have 8 bits.
            self._has_quantisation = True
            return len(segment) % 65 == 0 and not any(first & 0xF0 for first in segment[::65])
        elif marker == _RESTART:
            self._restarts = any(segment)
        elif marker == _JFIF:
            self._jfif = self._jfif or segment.startswith(b"JFIF\0")
        elif marker == _ADOBE:
            if segment.startswith(b"Adobe"):
                if len(segment) < 12 or self._adobe is not None:
                    return False
                self._adobe = segment[11]
        else:
            return marker in _PASSED_OVER
        return True

    def kind(self, scan: bytes) -> JpegKind | None:
        """The kind of a file whose first scan begins with this segment."""
        if self._frame is None or not self._has_tables or not self._has_quantisation or not scan:
            return None
        process, frame = self._frame
        count = frame[5] if len(frame) > 5 else 0
        if count not in _SAMPLING or len(frame) != 6 + 3 * count or frame[0] != 8:
            return None
        height, width = int.from_bytes(frame[1:3], "big"), int.from_bytes(frame[3:5], "big")
        factors = [divmod(factor, 16) for factor in frame[7::3]]
        across, down = factors[0]
        if not height or not width or factors[0] not in _SAMPLING[count] or {*factors[1:]} - {(1, 1)}:
            return None
        return JpegKind(
            process=process,
            ids=tuple(frame[6::3]),
            sampling=factors[0],
            scanned=scan[0],
            restarts=self._restarts,
            jfif=self._jfif,
            adobe=self._adobe,
            ragged=(width % (8 * across) != 0, height % (8 * down) != 0),
            small=min(width, height) < _SMALL,
        )
