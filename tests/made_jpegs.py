"""JPEGs of every kind that can be written here: qualities, samplings, scans, markers, sizes."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import simplejpeg  # type: ignore[import-untyped]
from PIL import Image

SIZES = [(1, 1), (1, 9), (7, 2), (8, 8), (15, 17), (16, 16), (17, 33), (33, 31), (64, 48)]
# By Pillow's encoder.
OPTIONS: list[dict[str, Any]] = [
    *({"subsampling": subsampling} for subsampling in ("4:4:4", "4:2:2", "4:2:0")),
    *({"subsampling": subsampling, "progressive": True} for subsampling in ("4:4:4", "4:2:2", "4:2:0")),
    {"optimize": True},
    {"restart_marker_blocks": 2},
    {"restart_marker_rows": 1, "progressive": True},
    {"keep_rgb": True},
    {"exif": b"Exif\0\0" + b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"},
    {"icc_profile": bytes(3000), "comment": b"made"},
]


def picture(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Smooth shades, edges and noise: uint8 (height, width, 3)."""
    generator = np.random.default_rng([seed, width, height])
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [127 + 120 * np.sin((rows * a + columns * b) / 9) for a, b in generator.normal(size=(3, 2))]
    noise = generator.normal(scale=25, size=(height, width, 3)) * (rows > height / 2)[..., None]
    pixels: np.ndarray = np.clip(np.stack(waves, -1) + noise, 0, 255).astype(np.uint8)
    return pixels


def by_pillow(pixels: np.ndarray, mode: str | None = None, **options: Any) -> bytes:
    """A JPEG by Pillow's encoder, of a mode; grey where the pixels have two dimensions."""
    buffer = io.BytesIO()
    image = Image.fromarray(pixels)
    (image if mode is None else image.convert(mode)).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def made_jpegs(qualities: list[int], sizes: list[tuple[int, int]] = SIZES) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each: all options, qualities and sizes with each other."""
    for (width, height), quality in itertools.product(sizes, qualities):
        pixels = picture(width, height)
        grey = np.asarray(Image.fromarray(pixels).convert("L"))
        name = f"{width} x {height}, quality {quality}"
        for options in OPTIONS:
            yield f"{name}, {options}", by_pillow(pixels, quality=quality, **options)
        for progressive in (False, True):
            yield f"{name}, grey {progressive}", by_pillow(grey, quality=quality, progressive=progressive)
        for sampling in ("440", "411"):
            data = simplejpeg.encode_jpeg(
                np.ascontiguousarray(pixels), quality=quality, colorspace="RGB", colorsubsampling=sampling
            )
            yield f"{name}, {sampling}", data
