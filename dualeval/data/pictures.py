"""A picture file as pixels: which formats are read, what each kind of picture becomes, and how it is resized.

It is brought to a size and cut out as torchvision, timm and transformers do it, by Pillow. What the crop
leaves out is not resized, bit for bit with what Pillow's resize of the whole gives. Pillow resizes in two
passes, mostly first across and then down, with 8 bits between them. A pixel of the second pass needs a few
rows of the first, and no other column. So rows that no pixel of the part needs are cut off before the first
pass, and columns before the second. Pillow 13 goes down first where a picture is much taller than wide, or
is shrunk in height more than in width: these pictures are resized as a whole.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch

# Pillow would import all of its plugins for these two.
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError, WebPImagePlugin
from PIL import TiffImagePlugin as tiff
from PIL.Image import Resampling
from torch import Tensor, from_numpy

from dualeval.data.contents import HEAD, what_it_holds
from dualeval.data.preprocessing import CHANNELS, Normalisation, OwnPreprocessing, Preprocessing, Uncropped
from dualeval.errors import UsageError, text_of, with_type

# How far each filter reaches, in pixels of the larger of both pictures.
_REACH = {Resampling.BILINEAR: 1, Resampling.BICUBIC: 2, Resampling.LANCZOS: 3}
# Rows more than needed, whatever way centres are rounded.
_SPARE = 2
# Height over width, and scale down over scale across, up to which all versions of Pillow go across first.
_TALL = 1.75
_SQUEEZED = 1.02
# Sizes before and after a resize that are tried for that, as a later version may have another rule.
_TRIED = (
    ((500, 375), (341, 256)),
    ((375, 500), (256, 341)),
    ((300, 500), (232, 386)),
    ((180, 120), (384, 256)),
    ((120, 180), (256, 384)),
)


def _cut_out(image: Image.Image, wanted: Preprocessing) -> Tensor:
    """Bring a picture to its size, and cut out its centre."""
    resized = _resized_size(image.size, wanted)
    resample = Resampling[wanted.interpolation.upper()]
    height, width = wanted.crop_size
    if wanted.padding is not None and (resized[0] < width or resized[1] < height):
        padded = _padded(image.resize(resized, resample), height, width, wanted.padding)
        cut = padded.crop(_centre_of(padded.size, wanted))
    else:
        cut = resized_part(image, resized, resample, _centre_of(resized, wanted))
    bands = cut.getbands()
    if wanted.channel_order == "bgr":
        bands = bands[::-1]
    # A channel at a time: batches are made of contiguous tensors in a fifth of the time.
    channels = b"".join([cut.tobytes("raw", band) for band in bands])
    return torch.frombuffer(bytearray(channels), dtype=torch.uint8).view(-1, height, width)


def whole(size: tuple[int, int], wanted: Uncropped) -> Preprocessing:
    """What is done to a picture of this width and height, of which nothing is cut off."""
    width, height = size
    if wanted.resize is not None and wanted.resize_mode == "squash":
        width, height = wanted.resize_width or wanted.resize, wanted.resize
    elif wanted.resize is not None:
        width, height = _resized_size(size, Preprocessing(resize=wanted.resize))
    return wanted.of_size(height, width)


def _resized_size(size: tuple[int, int], wanted: Preprocessing) -> tuple[int, int]:
    """Width and height of the resized picture."""
    width, height = size
    if wanted.resize_mode == "shorter":
        # As torchvision rounds them.
        shorter = wanted.resize
        if width <= height:
            return shorter, int(shorter * height / width)
        return int(shorter * width / height), shorter
    target = wanted.resize_size
    if wanted.resize_mode == "squash":
        return target[1], target[0]
    # As timm's ResizeKeepRatio, to the last bit of the ratio.
    ratios = [side / wish for side, wish in zip((height, width), target, strict=True)]
    ratio = max(ratios) if wanted.resize_mode == "inside" else min(ratios)
    return round(width / ratio), round(height / ratio)


def _centre_of(size: tuple[int, int], wanted: Preprocessing) -> tuple[int, int, int, int]:
    """Left, upper, right and lower edge of the crop: beyond the picture where that is small."""
    height, width = wanted.crop_size
    crop = width, height
    if wanted.crop_rounding == "down" and size[0] >= width and size[1] >= height:
        left, upper = ((side - wish) // 2 for side, wish in zip(size, crop, strict=True))
    else:
        # As torchvision's center_crop.
        left, upper = (
            -((wish - side) // 2) if wish > side else round((side - wish) / 2)
            for side, wish in zip(size, crop, strict=True)
        )
    return left, upper, left + width, upper + height


def _padded(image: Image.Image, height: int, width: int, colour: tuple[int, ...]) -> Image.Image:
    """The picture with borders where it is smaller than its crop; an odd pixel goes right and below."""
    across, down = max(0, width - image.width), max(0, height - image.height)
    fill = colour if len(colour) > 1 else colour[0]
    framed = Image.new(image.mode, (image.width + across, image.height + down), fill)
    framed.paste(image, (across // 2, down // 2))
    return framed


def resized_part(
    image: Image.Image, resized: tuple[int, int], resample: Resampling, part: tuple[int, int, int, int]
) -> Image.Image:
    """``image.resize(resized, resample).crop(part)`` in less time."""
    left, upper, right, lower = part
    inside = 0 <= left < right <= resized[0] and 0 <= upper < lower <= resized[1]
    across, down = image.width / resized[0], image.height / resized[1]
    is_usual = image.height <= _TALL * image.width and down <= _SQUEEZED * across
    if inside and part != (0, 0, *resized) and is_usual and _across_first(resample):
        return _two_passes(image, resized, resample, part)
    return image.resize(resized, resample).crop(part)


@functools.cache
def _across_first(resample: Resampling) -> bool:
    """Whether this Pillow gives the same by both ways: each process finds out once."""
    if resample not in _REACH:
        return False
    noise = np.random.default_rng(0).integers(0, 256, (500, 500, 3), np.uint8)
    for size, resized in _TRIED:
        image = Image.fromarray(np.ascontiguousarray(noise[: size[1], : size[0]]))
        part = (resized[0] // 8, resized[1] // 8, resized[0] * 7 // 8, resized[1] * 7 // 8)
        wanted = image.resize(resized, resample).crop(part)
        if _two_passes(image, resized, resample, part).tobytes() != wanted.tobytes():
            return False
    return True


def _two_passes(
    image: Image.Image, resized: tuple[int, int], resample: Resampling, part: tuple[int, int, int, int]
) -> Image.Image:
    left, upper, right, lower = part
    scale = image.height / resized[1]
    reach = _REACH[resample] * max(1.0, scale) + _SPARE
    first = max(0, math.floor(upper * scale - reach))
    last = min(image.height, math.ceil(lower * scale + reach))
    rows = image.crop((0, first, image.width, last)).resize((resized[0], last - first), resample)
    # The rows that were cut off are put back as black ones: a pass goes by its picture's height.
    columns = rows.crop((left, -first, right, image.height - first))
    return columns.resize((right - left, resized[1]), resample).crop((0, upper, right - left, lower))


# Pillow goes by a file's content, whatever its name is, and some of its other formats start programs (EPS)
# or hold no picture of their own (PDF, WMF). A GIF under the name of a JPEG is common in collected pictures.
FORMATS = ("JPEG", "PNG", "BMP", "PPM", "GIF", tiff.TiffImageFile.format, "WEBP")
assert WebPImagePlugin.WebPImageFile.format in FORMATS
# What may be left out of a file.
_PAGES = "several pages or frames, of which the first is read. Write the others as pictures if they count"
_GETS = "but the function of --preprocessing gets RGB of 8 bits. If it uses them, write its output as files"
_CLEAR, _WIDE = f"transparent pixels, {_GETS}", f"more than 8 bits, {_GETS}"
# TIFF's tag NewSubfileType.
_SUBFILE = 254
# By a picture's number of channels.
_MODES = {1: "L", 3: "RGB"}


def read_pixels(file: IO[bytes], wanted: Normalisation) -> Tensor:
    """Decode a picture, and ``prepare`` it.

    The first frame of an animation or the first page of a TIFF is taken. The rotation in EXIF is left alone.
    """
    return prepare(read_picture(file).eight_bits(), wanted)


def prepare(image: Image.Image, wanted: Normalisation) -> Tensor:
    """Bring a picture of 8 bits to the wanted channels and size, uint8; or give it to the user's function.

    Without a wanted size it keeps its own. Normalisation is done elsewhere.
    """
    if isinstance(wanted, Uncropped):
        wanted = whole(image.size, wanted)
    if isinstance(wanted, Preprocessing):
        return _cut_out(_with_channels(image, wanted.channels), wanted)
    colours = _with_channels(image, 3)
    if not isinstance(wanted, OwnPreprocessing):
        return from_numpy(np.array(colours)).permute(2, 0, 1).contiguous()
    value = wanted.function(colours)
    if isinstance(value, Tensor) and value.dtype == torch.uint8:
        # In a data set of the user's nobody divides: the same transform would give another number.
        raise UsageError(
            f"--preprocessing: {wanted} returned uint8: return floats as the model takes them, e.g. "
            ".float() / 255"
        )
    if isinstance(value, Tensor) and value.ndim == 3 and (value.shape[2] != 3 or value.shape[0] in CHANNELS):
        return value
    shape = f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise UsageError(
        f"--preprocessing: {wanted} returned a {shape}, expected a torch.Tensor of shape (channels, height, "
        "width)"
    )


def picture_in(file: IO[bytes]) -> Image.Image:
    """A picture as it stands in its file, in grey or RGB of 8 bits."""
    picture = read_picture(file).eight_bits()
    return picture if picture.mode == "L" else _with_channels(picture, 3)


def picture_of(pixels: Tensor) -> Image.Image:
    """A picture of pixels, uint8 of shape (1 or 3, height, width)."""
    values = pixels.permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(values[:, :, 0] if len(pixels) == 1 else values)


def size_of(file: IO[bytes]) -> tuple[int, int]:
    """Width and height of a picture, of which no more than its head is read."""
    with _opened(file) as image:
        return image.size


def left_out_of(file: IO[bytes], wanted: Normalisation) -> list[str]:
    """What a file has and ``read_pixels`` leaves out: further pages; what a user's function could ask for."""
    with _opened(file) as image:
        kinds = []
        if isinstance(wanted, OwnPreprocessing):
            is_clear = image.has_transparency_data and np.asarray(image.convert("RGBA"))[..., 3].min() < 255
            kinds = [_CLEAR] * bool(is_clear) + [_WIDE] * image.mode.startswith("I")
        # Phones put previews into JPEGs as further frames.
        pages = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
        for page in range(1, pages):
            image.seek(page)
            # Bit 0 of a TIFF's page says that it is smaller, bit 2 that it is a mask.
            if not getattr(image, "tag_v2", {}).get(_SUBFILE, 0) & 5:
                return [*kinds, _PAGES]
        return kinds


def _with_channels(image: Image.Image, channels: int) -> Image.Image:
    if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        # The same pixels; without this step Pillow prints a warning for each picture.
        image = image.convert("RGBA")
    # Grey is made of RGB, too: Pillow has no direct way from CMYK. A grey pixel stays what it is.
    if image.mode != "RGB":
        image = image.convert("RGB")
    return image if channels == 3 else image.convert(_MODES[channels])


# -- what is in a file -----------------------------------------------------------------------------------

# What TIFF's tag SampleFormat says of pixels.
_UNSIGNED, _SIGNED, _FLOATING = 1, 2, 3
# Of other formats, and of TIFFs compressed like them, pixels are not the numbers that somebody wrote.
_EXACT = ("PNG", "TIFF", "BMP", "GIF")
_LOSSY = ("jpeg", "tiff_jpeg", "webp")
_ANEW = "Write it anew: PIL.Image.fromarray(numbers.astype('uint8')).save('mask.png')"


@dataclass(frozen=True, kw_only=True)
class StoredPicture:
    """A decoded picture, and what its file's tags say of the numbers in it."""

    image: Image.Image
    # Of a channel, in the file.
    bits: int
    kind: int
    # 0 stands for white; of 1 and 8 bits Pillow has turned the numbers round.
    white_is_zero: bool
    is_exact: bool

    @property
    def orientation(self) -> int:
        """EXIF's, 2 to 8, where it turns the picture, or 1; of a TIFF 1, as Pillow turns that."""
        try:
            value = self.image.getexif().get(ExifTags.Base.Orientation)
        except Exception:  # noqa: BLE001 - Pillow raises all kinds; a damaged EXIF turns nothing
            return 1
        return value if isinstance(value, int) and value in range(2, 9) else 1

    def upright(self) -> StoredPicture:
        """The same, turned as programs show it."""
        return self if self.orientation == 1 else replace(self, image=ImageOps.exif_transpose(self.image))

    def eight_bits(self) -> Image.Image:
        """The picture with 8 bits a channel: of more grey bits the higher ones; Pillow would clip at 255."""
        mode = self.image.mode
        # In older Pillow, and of PGM, the mode says 32 bits where there are 16.
        is_wide = mode.startswith("I;16") or (mode == "I" and self.bits == 16)
        if self.kind != _UNSIGNED or (mode in ("I", "F") and not is_wide):
            kind = {_SIGNED: "signed ", _FLOATING: "floating-point "}.get(self.kind, "")
            raise ValueError(f"{kind}pixels of {self.bits} bits have no known range, expected 8 or 16 bits")
        if not is_wide:
            return self.image
        values = np.asarray(self.image).astype(np.int32)
        if self.white_is_zero:
            values = (1 << self.bits) - 1 - values
        return Image.fromarray((values >> (self.bits - 8)).astype(np.uint8))

    def numbers(self) -> npt.NDArray[Any]:
        """What is stored of each pixel of a mask, (height, width): the number of a class, no brightness."""
        mode, values = self.image.mode, np.asarray(self.image)
        if not self.is_exact:
            fault = f"a {self.image.format}, whose pixels are approximate"
        elif self.white_is_zero and self.bits > 1:
            fault = "a TIFF whose tags say that 0 is white: its numbers may be inverted"
        elif mode in ("LA", "RGB", "RGBA") and self.bits <= 8 and _is_grey(values, mode):
            return values[..., 0]
        elif mode in ("1", "L", "I", "I;16", "I;16B", "P"):
            is_signed = mode == "L" and self.kind == _SIGNED
            if mode == "L" and self.bits < 8:  # Pillow has spread them over 0 to 255
                return values // (255 // ((1 << self.bits) - 1))
            return values.astype({"1": np.uint8, "L": np.int8}[mode]) if mode == "1" or is_signed else values
        else:
            fault = (
                f"its pixels are colours (mode {mode})" if mode != "F" else "its pixels are floating-point"
            )
        raise ValueError(f"{fault}, expected {', '.join(_EXACT)} with one class number per pixel. {_ANEW}")


def _is_grey(values: npt.NDArray[Any], mode: str) -> bool:
    """Whether all colours are equal, and nothing is transparent."""
    colours, opaque = (values[..., :-1], values[..., -1] == 255) if mode.endswith("A") else (values, np.True_)
    return bool(opaque.all() and (colours == colours[..., :1]).all())


def read_picture(file: IO[bytes]) -> StoredPicture:
    """Decode a picture; its first page or frame, where it has several."""
    with _opened(file) as image:
        tags = getattr(image, "tag_v2", {})
        # Of the first strip, tile or layer how it is compressed, and what its bytes are.
        tiles = getattr(image, "tile", ())
        codec, args = map(str, tiles[0][::3] if tiles else ("", ""))
        told = re.search(r"[LIFBA];(\d+)", args)
        bits = int(told[1]) if told else {"I": 16, "1": 1}.get(image.mode, 8)
        if tags:
            bits = max(tags.get(tiff.BITSPERSAMPLE, (1,)))
            if tiff.PHOTOMETRIC_INTERPRETATION not in tags:
                raise ValueError("its tags do not say whether 0 is black (PhotometricInterpretation)")
            # Pillow 13 takes half of the bytes of the ones, and those of the others in the wrong order.
            is_planar = codec == "raw" and tags.get(tiff.PLANAR_CONFIGURATION) == 2 and bits > 8
            if is_planar or (codec == "libtiff" and "BS'" in args):
                raise ValueError(f"a TIFF of {bits} bits, planar or signed and big-endian, is not read")
        image.load()
        return StoredPicture(
            image=image,
            bits=bits,
            kind=max(tags.get(tiff.SAMPLEFORMAT, (_FLOATING if image.mode == "F" else _UNSIGNED,))),
            white_is_zero=tags.get(tiff.PHOTOMETRIC_INTERPRETATION) == 0,
            is_exact=image.format in _EXACT and not (tags and image.info.get("compression") in _LOSSY),
        )


@contextmanager
def _opened(file: IO[bytes]) -> Iterator[Image.Image]:
    """A picture whose head is read; whatever Pillow raises becomes an OSError or ValueError that says why."""
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    # Also where a model's module has told Pillow to fill up with grey what is missing.
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with Image.open(file, formats=FORMATS) as image:
            yield image
    except UnidentifiedImageError as error:
        file.seek(0)
        head = file.read(HEAD)
        if (other := what_it_holds(head)) is not None:
            raise OSError(f"the file {other}") from error
        if kind := next((name for name in FORMATS if (Image.OPEN[name][1] or bool)(head[:16])), None):
            raise OSError(f"a {kind} of a kind that Pillow does not read: write it anew as PNG") from error
        raise OSError(f"the file is not a picture: expected one of {', '.join(FORMATS)}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise OSError(
            f"{text_of(error)} If it is as it should be, let Pillow read larger ones: "
            "PIL.Image.MAX_IMAGE_PIXELS = None in your script, or in the file of --model or --preprocessing"
        ) from error
    except (OSError, ValueError):
        raise
    except Exception as error:
        # SyntaxError, EOFError, struct.error, zlib.error, KeyError, ...: whatever its decoders come to.
        raise OSError(f"it is damaged ({with_type(error)})") from error
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before
