"""Pictures and their masks side by side in tar shards: a.jpg beside a.png, a.mask.png or a.seg.png."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dualeval.data.image_paths import EXTENSIONS
from dualeval.data.packed import Labelled
from dualeval.data.tar import Member, TarReader, tars_at
from dualeval.data.tar_index import Chosen, read_index

# Formats of masks, and what stands before these where a mask is named; the last is beside a picture alone.
_FORMATS = (".png", ".tif", ".tiff", ".bmp")
_NAMED = (".mask", ".seg", "")


def find_masked(data: Path) -> Labelled:
    """Where pictures lie, and where their masks; without labels."""
    return read_index(data, tars_at(data), "mask", _choose, files=2)


def _choose(reader: TarReader, sample: str, parts: Mapping[str, Member]) -> Chosen | None:
    of_masks = [f"{named}{form}" for named in _NAMED for form in _FORMATS if f"{named}{form}" in parts]
    # Masks that are named as such have a further dot rightly.
    others = {suffix: each for suffix, each in parts.items() if suffix not in of_masks or suffix in _FORMATS}
    pictures = reader.pictures(sample, others, EXTENSIONS)
    if not pictures and not of_masks:
        return None
    # A picture may be a .png, too, where its mask has a name of its own.
    mask = next((suffix for suffix in of_masks if suffix not in pictures or len(pictures) > 1), "")
    pictures = [suffix for suffix in pictures if suffix != mask]
    missing = "" if mask else "mask (.png, .mask.png)"
    picture = reader.one_picture(sample, parts, pictures, missing)
    return [picture, parts[mask]], None, ()
