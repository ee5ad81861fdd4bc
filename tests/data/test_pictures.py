"""What odd pictures become; and a part of a resized picture has the bits that it has in the whole."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image, ImageFile, TiffImagePlugin
from PIL.Image import Resampling
from torch import Tensor

from dualeval.data import pictures
from dualeval.data.image_sets.class_folders import ImageFolder
from dualeval.data.pictures import FORMATS, read_picture, read_pixels, resized_part
from dualeval.data.preprocessing import INTERPOLATIONS, Normalisation, OwnPreprocessing, Preprocessing
from tests.data.test_image_folder import SMALL, noise, only, reference, save

GREY = Preprocessing(resize=20, crop=16, channels=1, mean=(0.5,), std=(0.5,))


def pixels(path: Path, wanted: Preprocessing = SMALL) -> Tensor:
    with path.open("rb") as file:
        return read_pixels(file, wanted)


def frames(path: Path, **options: Any) -> Path:
    """Three frames: noise, black and white."""
    first = Image.fromarray(noise(40, 30))
    others = [Image.new("RGB", (40, 30), colour) for colour in ("black", "white")]
    path.parent.mkdir(parents=True)
    first.save(path, save_all=True, append_images=others, **options)
    return path


@pytest.mark.parametrize("extension", ["jpg", "png", "bmp", "tif", "ppm", "webp"])
def test_truncated_pictures_are_not_read(
    tmp_path: Path, extension: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a model's module has told Pillow to take them, as many training scripts do."""
    whole = save(tmp_path / f"a/whole.{extension}", size=(200, 150)).read_bytes()
    path = tmp_path / f"a/part.{extension}"
    path.write_bytes(whole[: 2 * len(whole) // 3])
    for take in (False, True):
        monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", take)
        with pytest.raises(OSError):
            pixels(path)
        assert ImageFile.LOAD_TRUNCATED_IMAGES is take
    pixels(tmp_path / f"a/whole.{extension}")


@pytest.mark.parametrize("extension", ["png", "webp", "tif", "gif"])
def test_of_several_frames_the_first_counts(tmp_path: Path, extension: str) -> None:
    options = {"lossless": True} if extension == "webp" else {}
    path = frames(tmp_path / f"a/i.{extension}", **options)
    with Image.open(path) as image:
        assert getattr(image, "n_frames", 1) == 3
        first = image.convert("RGB")
        first.load()
    first.save(tmp_path / "first.png")
    assert torch.equal(pixels(path), pixels(tmp_path / "first.png"))
    assert torch.equal(pixels(path), reference(path, SMALL))
    # The content decides the format.
    assert torch.equal(pixels(path.rename(path.with_name("i.jpg"))), pixels(tmp_path / "first.png"))


def of_another_format(kind: str) -> bytes:
    return saved(Image.fromarray(noise(40, 30)), kind)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def pages(*kinds: int) -> bytes:
    """A TIFF; of each page its NewSubfileType."""
    file = io.BytesIO()
    with TiffImagePlugin.AppendingTiffWriter(file, True) as writer:
        for kind in kinds:
            Image.new("L", (4, 4)).save(writer, "TIFF", tiffinfo={254: kind})
            writer.newFrame()
        return file.getvalue()


@pytest.mark.parametrize(
    ("content", "left_out", "of_function"),
    [
        (pages(0), "", ""),
        (pages(0, 2), "several pages", ""),
        (pages(0, 1, 4, 5), "", ""),
        (saved(Image.new("L", (4, 4)), "PNG"), "", ""),
        (saved(Image.new("RGBA", (4, 4), (1, 2, 3, 255)), "PNG"), "", ""),
        (saved(Image.new("RGBA", (4, 4), (1, 2, 3, 254)), "PNG"), "", "transparent"),
        (saved(Image.new("I;16", (4, 4)), "PNG"), "", "more than 8 bits"),
        (saved(Image.new("L", (4, 4)), "MPO", save_all=True, append_images=[Image.new("L", (4, 4))]), "", ""),
        (
            saved(Image.new("L", (4, 4)), "GIF", save_all=True, append_images=[Image.new("L", (4, 4), 9)]),
            "several",
            "",
        ),
        (b"no picture", "", ""),
    ],
)
def test_what_is_left_out_is_warned_of(
    tmp_path: Path, content: bytes, left_out: str, of_function: str
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/0.png").write_bytes(content)
    own: Any = OwnPreprocessing(function=lambda image: image)
    for wanted, expected in ((Preprocessing(), left_out), (own, left_out + of_function)):
        said = ImageFolder(tmp_path, wanted).left_out()
        assert len(said) == bool(expected) and expected in "".join(said)


@pytest.mark.parametrize("kind", ["EPS", "PDF", "TGA", "ICO"])
def test_other_formats_are_not_read_under_a_pictures_name(tmp_path: Path, kind: str) -> None:
    """Of EPS Pillow would start Ghostscript."""
    path = tmp_path / "i.jpg"
    path.write_bytes(of_another_format(kind))
    with pytest.raises(OSError, match=r"the file is not a picture: expected one of JPEG, PNG, BMP, PPM, GIF"):
        pixels(path)
    assert kind not in FORMATS


def test_transparency_of_a_palette_changes_no_pixel(tmp_path: Path) -> None:
    """A transparent colour, or the transparency of each, changes nothing, and prints nothing."""
    image = Image.fromarray(noise(40, 30)).convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
    found: list[Tensor] = []
    options: list[dict[str, Any]] = [{}, {"transparency": 3}, {"transparency": bytes(range(16))}]
    for option in options:
        path = tmp_path / f"{len(found)}.png"
        image.save(path, **option)
        with Image.open(path) as saved:
            assert saved.mode == "P"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found.append(pixels(path))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[0], reference(tmp_path / "0.png", SMALL))


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA", "LA", "CMYK"])
def test_a_model_of_one_channel_gets_the_grey_values_of_pillow(tmp_path: Path, mode: str) -> None:
    name = "i.tiff" if mode == "CMYK" else "i.png"
    path = save(tmp_path / "a" / name, mode)
    found = only(path, GREY)
    with Image.open(path) as image:
        as_pillow = image.convert("RGB").convert("L")
    as_pillow.save(tmp_path / "grey.png")
    assert found.shape == (1, 16, 16)
    assert torch.equal(found, reference(tmp_path / "grey.png", SMALL)[:1])
    assert found.float().std() > 10


def write_png(path: Path, size: tuple[int, int], bits: int, row: bytes, *, colours: bool = False) -> None:
    """A picture of equal rows, with bits a value that Pillow does not write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, bits, 2 * colours, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress((b"\0" + row) * size[1]))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + data + chunk(b"IEND", b""))


def sixteen_bits(path: Path, value: int, channels: int) -> Path:
    """30 x 30 pixels of one value, as PNG or PNM, which Pillow does not write with 16 bits a colour."""
    row = np.full(30 * channels, value, ">u2").tobytes()
    if path.suffix == ".png":
        write_png(path, (30, 30), 16, row, colours=channels == 3)
    else:
        path.write_bytes(b"P%d 30 30 65535\n" % {1: 5, 3: 6}[channels] + row * 30)
    return path


def test_of_sixteen_grey_bits_the_higher_eight_count(tmp_path: Path) -> None:
    """Pillow's own conversion clips: 0x8040 and all else above 255 would be white."""
    for name, wanted in (("i.png", SMALL), ("i.tif", SMALL), ("i.png", GREY)):
        Image.fromarray(np.full((30, 30), 0x8040, np.uint16)).save(tmp_path / name)
        assert set(pixels(tmp_path / name, wanted).flatten().tolist()) == {0x80}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["i.png", "i.ppm"])
def test_of_sixteen_bits_the_higher_eight_count(tmp_path: Path, name: str, channels: int) -> None:
    for value in (0x8040, 0x80C0, 0x00FE, 0xFFFF):
        path = sixteen_bits(tmp_path / name, value, channels)
        [found] = set(pixels(path).flatten().tolist())
        # Of a colour PPM Pillow rounds.
        rounded = round(value / 257) if (name, channels) == ("i.ppm", 3) else value >> 8
        assert found == rounded


# -- what the tags of a file say -------------------------------------------------------------------------


def tiff(
    values: npt.NDArray[Any],
    photometric: int | None = 1,
    *,
    bits: int | None = None,
    big: bool = False,
    kind: int = 1,
    planes: int = 1,
    packed: bool = False,
) -> bytes:
    """A TIFF of one strip a plane, with tags that Pillow does not write."""
    order: Literal["<", ">"] = ">" if big else "<"
    channels = 1 if values.ndim == 2 else values.shape[2]
    parts = [values] if planes == 1 else [*np.moveaxis(values, 2, 0)]
    data = [each.astype(each.dtype.newbyteorder(order)).tobytes() for each in parts]
    if bits == 12:
        data = [b"".join(_of_twelve_bits(row) for row in values)]
    data = [zlib.compress(each) if packed else each for each in data]
    height, width = values.shape[:2]
    tags = {
        256: [width],
        257: [height],
        258: [bits or values.itemsize * 8] * channels,
        259: [8 if packed else 1],
    }
    tags |= {} if photometric is None else {262: [photometric]}
    starts = [8 + sum(map(len, data[:place])) for place in range(len(data))]
    tags |= {273: starts, 277: [channels], 278: [height], 279: [*map(len, data)], 284: [planes]}
    tags |= {339: [kind] * channels}
    body, entries = b"".join(data), b""
    for tag, numbers in tags.items():
        value = struct.pack(f"{order}{len(numbers)}I", *numbers)
        if len(value) > 4:
            body, value = body + value, struct.pack(f"{order}I", 8 + len(body))
        entries += struct.pack(f"{order}HHI", tag, 4, len(numbers)) + value
    head = struct.pack(f"{order}2sHI", b"MM" if big else b"II", 42, 8 + len(body))
    return head + body + struct.pack(f"{order}H", len(tags)) + entries + bytes(4)


def _of_twelve_bits(row: npt.NDArray[Any]) -> bytes:
    bits = "".join(f"{value:012b}" for value in row.tolist())
    bits += "0" * (-len(bits) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8, "big")


def stored(form: str) -> Callable[[npt.NDArray[Any]], bytes]:
    """A writer of Pillow's."""

    def write(values: npt.NDArray[Any]) -> bytes:
        Image.fromarray(values).save(buffer := io.BytesIO(), form)
        return buffer.getvalue()

    return write


GREY_PICTURE = noise(13, 9, 1)[:, :, 0]
SIXTEEN = GREY_PICTURE.astype(np.uint16) * 257
TWELVE = SIXTEEN >> 4
SAME_GREY: dict[str, bytes] = {
    "8 bits": tiff(GREY_PICTURE),
    "8 bits, white is zero": tiff(255 - GREY_PICTURE, 0),
    "12 bits": tiff(TWELVE, bits=12),
    "12 bits, compressed": tiff(TWELVE, bits=12, packed=True),
    "16 bits": tiff(SIXTEEN),
    "16 bits, big-endian": tiff(SIXTEEN, big=True),
    "16 bits, big-endian, compressed": tiff(SIXTEEN, big=True, packed=True),
    "16 bits, white is zero": tiff(65535 - SIXTEEN, 0),
    "16 bits, white is zero, compressed": tiff(65535 - SIXTEEN, 0, packed=True),
    "PNG of 16 bits": stored("PNG")(SIXTEEN),
    "PGM of 16 bits": b"P5 13 9 65535\n" + SIXTEEN.astype(">u2").tobytes(),
    "PGM of 12 bits": b"P5 13 9 4095\n" + TWELVE.astype(">u2").tobytes(),
    "three planes of 8 bits": tiff(GREY_PICTURE[..., None].repeat(3, 2), 2, planes=2),
    "three planes of 16 bits, compressed": tiff(SIXTEEN[..., None].repeat(3, 2), 2, planes=2, packed=True),
}


@pytest.mark.parametrize("content", SAME_GREY.values(), ids=SAME_GREY)
def test_one_grey_picture_is_the_same_in_all_forms(content: bytes) -> None:
    wanted = read_pixels(io.BytesIO(stored("PNG")(GREY_PICTURE)), Normalisation())
    assert torch.equal(read_pixels(io.BytesIO(content), Normalisation()), wanted)


SIGNED = SIXTEEN.astype(np.int16)
REFUSED: dict[str, tuple[bytes, str]] = {
    "signed 8 bits": (tiff(GREY_PICTURE, kind=2), "signed pixels of 8 bits"),
    "signed 16 bits": (tiff(SIGNED, kind=2), "signed pixels of 16 bits"),
    "32 bits": (tiff(SIXTEEN.astype(np.uint32)), "pixels of 32 bits have no known range"),
    "floats": (tiff(SIXTEEN.astype(np.float32), kind=3), "floating-point pixels of 32 bits"),
    "a PFM": (b"Pf 13 9 -1.0\n" + SIXTEEN.astype("<f4").tobytes(), "floating-point pixels of 32 bits"),
    "no photometric": (tiff(GREY_PICTURE, None), r"whether 0 is black \(PhotometricInterpretation\)"),
    "planes of 16 bits": (tiff(SIXTEEN[..., None].repeat(3, 2), 2, planes=2), "a TIFF of 16 bits, planar"),
    "big-endian, signed": (tiff(SIGNED, kind=2, big=True, packed=True), "signed and big-endian, is not read"),
    "not read by Pillow": (tiff(SIXTEEN, 0, big=True), "a TIFF of a kind that Pillow does not read"),
}


@pytest.mark.parametrize(("content", "said"), REFUSED.values(), ids=REFUSED)
def test_pixels_of_which_nobody_knows_are_refused_by_name(content: bytes, said: str) -> None:
    with pytest.raises((OSError, ValueError), match=said):
        read_pixels(io.BytesIO(content), Normalisation())


LABELS = np.array([[0, 1, 2], [2, 3, 0]], np.uint8)
COLOURED = np.stack([LABELS] * 3, 2)


MASKS: dict[str, bytes] = {
    "PNG": stored("PNG")(LABELS),
    "BMP": stored("BMP")(LABELS),
    "GIF": stored("GIF")(LABELS),
    "16 bits": stored("PNG")(LABELS.astype(np.uint16)),
    "16 bits, big-endian": tiff(LABELS.astype(np.uint16), big=True, packed=True),
    "12 bits": tiff(LABELS.astype(np.uint16), bits=12),
    "signed 8 bits": tiff(LABELS, kind=2),
    "signed 32 bits, big-endian": tiff(LABELS.astype(np.int32), kind=2, big=True),
    "equal colours": stored("PNG")(COLOURED),
    "equal colours, opaque": stored("PNG")(np.dstack([COLOURED, np.full_like(LABELS, 255)])),
    "grey, opaque": stored("PNG")(np.dstack([LABELS, np.full_like(LABELS, 255)])),
}
NO_MASKS: dict[str, tuple[bytes, str]] = {
    "a JPEG": (stored("JPEG")(LABELS), "a JPEG, whose pixels are approximate"),
    "white is zero": (tiff(LABELS, 0), "say that 0 is white"),
    "16 bits, white is zero": (tiff(LABELS.astype(np.uint16), 0), "say that 0 is white"),
    "floats": (tiff(LABELS.astype(np.float32), kind=3), "its pixels are floating-point"),
    "colours": (stored("PNG")(noise(3, 2)), r"its pixels are colours \(mode RGB\)"),
    "transparent": (stored("PNG")(np.dstack([LABELS, LABELS])), r"its pixels are colours \(mode LA\)"),
    # Of these Pillow keeps the higher 8 bits: all would be 0.
    "colours of 16 bits": (tiff(COLOURED.astype(np.uint16), 2), r"its pixels are colours \(mode RGB\)"),
}


@pytest.mark.parametrize("content", MASKS.values(), ids=MASKS)
def test_one_mask_has_the_same_numbers_in_all_forms(content: bytes) -> None:
    found = read_picture(io.BytesIO(content)).numbers()
    assert found.tolist() == LABELS.tolist()


def test_numbers_of_few_bits_and_below_zero_are_kept(tmp_path: Path) -> None:
    """Pillow spreads grey of 2 and 4 bits over 0 to 255; of a signed -1 it makes 255."""
    for bits, row in ((2, b""), (4, b"#")):
        write_png(tmp_path / "a.png", (4, 2), bits, row)
        with (tmp_path / "a.png").open("rb") as file:
            assert read_picture(file).numbers().tolist() == [[0, 1, 2, 3]] * 2
    found = read_picture(io.BytesIO(stored("PNG")(LABELS > 1))).numbers()
    assert f"{found.dtype} {found.tolist()}" == "uint8 [[0, 0, 1], [1, 1, 0]]"
    below = np.full((2, 2), 255, np.uint8)
    assert read_picture(io.BytesIO(tiff(below, kind=2))).numbers().tolist() == [[-1, -1]] * 2


@pytest.mark.parametrize(("content", "said"), NO_MASKS.values(), ids=NO_MASKS)
def test_masks_that_are_none_are_refused(content: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=f"{said}.*Write it anew: PIL.Image"):
        read_picture(io.BytesIO(content)).numbers()


def test_too_large_a_picture_says_how_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's warning from a limit on, and its error from twice that on."""
    for most in (GREY_PICTURE.size // 2 - 1, GREY_PICTURE.size - 1):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
        with warnings.catch_warnings(), pytest.raises(OSError, match=r"PIL.Image.MAX_IMAGE_PIXELS = None"):
            warnings.simplefilter("error")
            read_pixels(io.BytesIO(SAME_GREY["8 bits"]), Normalisation())
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    read_pixels(io.BytesIO(SAME_GREY["8 bits"]), Normalisation())


@pytest.mark.parametrize("form", ["PNG", "TIFF", "BMP", "GIF", "JPEG", "WEBP", "PPM"])
def test_damaged_pictures_are_errors_of_two_kinds(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Pillow raises: an OSError or a ValueError, which say why."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    whole, draw = stored(form)(GREY_PICTURE), np.random.default_rng(0)
    read = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(150):
            bytes_ = np.frombuffer(whole, np.uint8).copy()
            bytes_[draw.integers(0, len(whole), 4)] = draw.integers(0, 256, 4)
            try:
                read_pixels(io.BytesIO(bytes_.tobytes()), Normalisation())
                read += 1
            except (OSError, ValueError) as error:
                assert str(error)
    assert read < 150


def test_what_else_pillow_raises_is_a_damaged_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    content = stored("BMP")(GREY_PICTURE)
    for kind in (SyntaxError, EOFError, struct.error, zlib.error, KeyError):
        monkeypatch.setattr(ImageFile.ImageFile, "load", Mock(side_effect=kind("here")))
        with pytest.raises(OSError, match=rf"it is damaged \({kind.__name__}"):
            read_pixels(io.BytesIO(content), Normalisation())


# -- parts of resized pictures ---------------------------------------------------------------------------


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


def test_resized_parts_have_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, real = 0, pictures._two_passes

    def counted(*arguments: Any) -> Image.Image:
        nonlocal taken
        taken += 1
        return real(*arguments)

    # Elsewhere pictures are resized as a whole: right, and slower than it has to be.
    assert [pictures._across_first(resample) for resample in FILTERS] == [False, True, True, True]
    monkeypatch.setattr(pictures, "_two_passes", counted)
    check_parts(1000, 0)
    assert taken > 60


@pytest.mark.long
def test_resized_parts_of_many_sizes_have_the_bits_of_the_whole() -> None:
    check_parts(20_000, 1)


def test_a_pillow_that_goes_down_first_resizes_wholes(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Image.Image.resize

    def down_first(self: Image.Image, size: tuple[int, int], resample: Resampling) -> Image.Image:
        return real(real(self, (self.width, size[1]), resample), size, resample)

    monkeypatch.setattr(Image.Image, "resize", down_first)
    pictures._across_first.cache_clear()
    try:
        assert not pictures._across_first(Resampling.BICUBIC)
        check_parts(50, 2)
    finally:
        pictures._across_first.cache_clear()


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
