"""A part of a resized picture has the bits that it has in the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.Image import Resampling

from dualeval.data import resizing
from dualeval.data.pictures import read_pixels
from dualeval.data.preprocessing import INTERPOLATIONS, Preprocessing
from dualeval.data.resizing import resized_part
from tests.data.test_image_folder import reference, save

FILTERS = (Resampling.NEAREST, Resampling.BILINEAR, Resampling.BICUBIC, Resampling.LANCZOS)


def draw_sizes(draw: np.random.Generator, *, alike: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Sizes before and after; alike in shape, as where the shorter side is brought to a length."""
    width, height, *others = (int(side) for side in draw.integers(1, 300, 4))
    if not alike:
        return (width, height), (others[0], others[1])
    side = int(draw.integers(8, 150))
    if width <= height:
        return (width, height), (side, min(900, int(side * height / width)))
    return (width, height), (min(900, int(side * width / height)), side)


def check_parts(count: int, seed: int) -> None:
    """Compare parts of pictures of random sizes with Pillow's."""
    draw = np.random.default_rng(seed)
    for number in range(count):
        size, resized = draw_sizes(draw, alike=number % 2 == 0)
        shape = (size[1], size[0], 3) if number % 3 else (size[1], size[0])
        image = Image.fromarray(draw.integers(0, 256, shape, np.uint8))
        left, upper = (int(draw.integers(-2, side)) for side in resized)
        right, lower = (
            left + int(draw.integers(1, resized[0] + 2)),
            upper + int(draw.integers(1, resized[1] + 2)),
        )
        part = (left, upper, right, lower)
        resample = FILTERS[int(draw.integers(len(FILTERS)))]
        found = resized_part(image, resized, resample, part)
        wanted = image.resize(resized, resample).crop(part)
        assert found.size == wanted.size
        assert found.tobytes() == wanted.tobytes(), (size, resized, resample, part)


def test_parts_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, real = 0, resizing._two_passes

    def counted(*arguments: Any) -> Image.Image:
        nonlocal taken
        taken += 1
        return real(*arguments)

    # Elsewhere pictures are resized as a whole: right, and slower than it has to be.
    assert [resizing._across_first(resample) for resample in FILTERS] == [False, True, True, True]
    monkeypatch.setattr(resizing, "_two_passes", counted)
    check_parts(1000, 0)
    assert taken > 60


@pytest.mark.long
def test_parts_of_many_sizes() -> None:
    check_parts(20_000, 1)


def test_a_pillow_that_goes_down_first_resizes_wholes(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Image.Image.resize

    def down_first(self: Image.Image, size: tuple[int, int], resample: Resampling) -> Image.Image:
        return real(real(self, (self.width, size[1]), resample), size, resample)

    monkeypatch.setattr(Image.Image, "resize", down_first)
    resizing._across_first.cache_clear()
    try:
        assert not resizing._across_first(Resampling.BICUBIC)
        check_parts(50, 2)
    finally:
        resizing._across_first.cache_clear()


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("size", [(90, 60), (61, 90), (33, 33), (9, 200), (150, 20), (7, 5)])
def test_pixels_are_torchvisions(tmp_path: Path, interpolation: str, size: tuple[int, int]) -> None:
    """With a crop smaller, as large and larger than the resize."""
    path = save(tmp_path / "a/i.png", size=size)
    for crop in (13, 32, 41):
        wanted = Preprocessing(resize=32, crop=crop, interpolation=interpolation)
        with path.open("rb") as file:
            found = read_pixels(file, wanted)
        assert found.is_contiguous()
        assert torch.equal(found, reference(path, wanted))
