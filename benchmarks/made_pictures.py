"""Write class folders of made JPEG files, for timings: smooth noise, the same bytes each time.

python benchmarks/made_pictures.py build/pictures [--count 200] [--size 256] [--classes 10]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

_COARSE = 16
_QUALITY = 90


def write_pictures(folder: Path, count: int, size: int, classes: int) -> None:
    """Write so many square pictures, evenly over the classes."""
    generator = np.random.default_rng(0)
    for number in range(count):
        own = folder / f"class{number % classes:02}"
        own.mkdir(parents=True, exist_ok=True)
        # Made larger, as photographs are: pure noise takes a decoder much longer.
        coarse = generator.integers(0, 256, (_COARSE, _COARSE, 3), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC)
        picture.save(own / f"{number:05}.jpg", quality=_QUALITY)


def main() -> None:
    """Read the command line, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--classes", type=int, default=10)
    asked = parser.parse_args()
    write_pictures(asked.folder, asked.count, asked.size, asked.classes)


if __name__ == "__main__":
    main()
