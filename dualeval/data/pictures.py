"""A picture file as pixels: which formats are read, and what each kind of picture becomes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import numpy as np

# Pillow would import all of its plugins for these two.
from PIL import Image, ImageFile, TiffImagePlugin, UnidentifiedImageError, WebPImagePlugin
from torch import Tensor, from_numpy

from dualeval.data.contents import HEAD, what_it_holds
from dualeval.data.preprocessing import Normalisation, OwnPreprocessing, Preprocessing, Uncropped
from dualeval.data.resizing import cut_out, whole
from dualeval.errors import UsageError

# Pillow goes by a file's content, whatever its name is, and some of its other formats start programs (EPS)
# or hold no picture of their own (PDF, WMF). A GIF under the name of a JPEG is common in collected pictures.
FORMATS = ("JPEG", "PNG", "BMP", "PPM", "GIF", TiffImagePlugin.TiffImageFile.format, "WEBP")
assert WebPImagePlugin.WebPImageFile.format in FORMATS
# By a picture's number of channels.
_MODES = {1: "L", 3: "RGB"}


def read_pixels(file: IO[bytes], wanted: Normalisation) -> Tensor:
    """Decode a picture, and ``prepare`` it.

    The first frame of an animation or the first page of a TIFF is taken. The rotation in EXIF is left alone.
    """
    with _opened(file) as image, _whole_pictures_only():
        return prepare(image, wanted)


def prepare(image: Image.Image, wanted: Normalisation) -> Tensor:
    """Bring a picture to the wanted channels and size, uint8; or give it in RGB to the user's function.

    Without a wanted size it keeps its own. Normalisation is done elsewhere.
    """
    if isinstance(wanted, Uncropped):
        wanted = whole(image.size, wanted)
    if isinstance(wanted, Preprocessing):
        return cut_out(_with_channels(_eight_bits(image), wanted.channels), wanted)
    colours = _with_channels(_eight_bits(image), 3)
    if not isinstance(wanted, OwnPreprocessing):
        return from_numpy(np.array(colours)).permute(2, 0, 1).contiguous()
    found = wanted.function(colours)
    if isinstance(found, Tensor) and found.ndim == 3:
        return found
    shape = f"tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
    raise UsageError(
        f"--preprocessing: {wanted} returned a {shape}, expected a torch.Tensor of shape (channels, height, "
        "width)"
    )


def picture_in(file: IO[bytes]) -> Image.Image:
    """A picture as it stands in its file, in grey or RGB of 8 bits."""
    with _opened(file) as image, _whole_pictures_only():
        found = _eight_bits(image)
        found.load()
        return found.copy() if found.mode == "L" else _with_channels(found, 3)


def picture_of(pixels: Tensor) -> Image.Image:
    """A picture of pixels, uint8 of shape (1 or 3, height, width)."""
    values = pixels.permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(values[:, :, 0] if len(pixels) == 1 else values)


def size_of(file: IO[bytes]) -> tuple[int, int]:
    """Width and height of a picture, of which no more than its head is read."""
    with _opened(file) as image:
        size = image.size
    file.seek(0)
    return size


def _opened(file: IO[bytes]) -> Image.Image:
    try:
        return Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:
        file.seek(0)
        if (other := what_it_holds(file.read(HEAD))) is not None:
            raise OSError(f"the file {other}") from error
        raise OSError(f"the file is no picture: expected one of {', '.join(FORMATS)}") from error


@contextmanager
def _whole_pictures_only() -> Iterator[None]:
    """Refuse truncated pictures, also where a model's module has told Pillow to fill them up with grey."""
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def _with_channels(image: Image.Image, channels: int) -> Image.Image:
    if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        # The same pixels; without this step Pillow prints a warning for each picture.
        image = image.convert("RGBA")
    # Grey is made of RGB, too: Pillow has no direct way from CMYK. A grey pixel stays what it is.
    if image.mode != "RGB":
        image = image.convert("RGB")
    return image if channels == 3 else image.convert(_MODES[channels])


def _eight_bits(image: Image.Image) -> Image.Image:
    """The image with 8 bits a channel: of 16 grey bits the higher ones, where Pillow would clip at 255."""
    # Of PGM, and of PNG in older Pillow, the mode says 32 bits; the values are those of 16.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of 32 bits (mode {image.mode}) have no known range, expected 8 or 16 bits")
    return image
