"""The faster decoder of JPEGs: Pillow's pixels and errors, or Pillow itself."""

from __future__ import annotations

import io
import itertools
import json
import random
import re
import struct
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg  # type: ignore[import-untyped]
from PIL import Image, features

import dualeval
from dualeval.data import decoding
from dualeval.data.decoding import Decoder
from dualeval.data.jpeg import kind_of
from dualeval.data.pictures import read_pixels
from dualeval.data.preprocessing import Preprocessing
from dualeval.tasks.image_classification import ImageClassification
from tests.assets import package_folder
from tests.conftest import ROOT, Launch, working_module
from tests.data.test_image_folder import SMALL
from tests.made_jpegs import by_pillow, made_jpegs, picture

OTHER = "simplejpeg gave other pixels than Pillow for a JPEG"
MODEL = """
import torch
from torch import nn


class Means(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images):
        return images.mean((2, 3)) * self.scale


def means(): return Means()
"""


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pixel is simplejpeg's: nothing is compared with Pillow."""
    monkeypatch.setattr(decoding, "_CHECKED", 0)
    monkeypatch.setattr(decoding, "_CHECKED_OF_A_KIND", 0)


def decoded(decoder: Decoder, data: bytes) -> np.ndarray | None:
    file = io.BytesIO(data)
    return decoder.decode(Image.open(file), file)


def by_pillow_alone(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)))


def check_equal(jpegs: Iterator[tuple[str, bytes]]) -> int:
    """Decode all of them by simplejpeg; returns how many they were."""
    decoder, count = Decoder(), 0
    for name, data in jpegs:
        found = decoded(decoder, data)
        assert found is not None, name
        assert np.array_equal(found, by_pillow_alone(data)), name
        count += 1
    return count


def test_made_jpegs_have_pillows_pixels(unchecked: None) -> None:
    made = [*made_jpegs([1, 75], [(1, 1), (17, 33), (64, 48)])]
    assert check_equal(iter(made)) == len(made) == 96
    assert len({kind_of(data) for _, data in made}) > 25


@pytest.mark.long
def test_made_jpegs_of_all_qualities_have_pillows_pixels(unchecked: None) -> None:
    sizes = [(width, height) for width in range(1, 34, 4) for height in (1, 2, 15, 16, 17, 33)]
    assert check_equal(made_jpegs([*range(1, 101, 3), 100], [(33, 31), (200, 150)])) > 1000
    assert check_equal(made_jpegs([30, 95], sizes)) > 1000


def real_pictures() -> Iterator[tuple[str, bytes]]:
    for path in sorted((package_folder("foolbox") / "data").glob("imagenet_*.jpg")):
        yield path.name, path.read_bytes()
    for path in sorted((package_folder("foolbox") / "data").glob("cifar*.png")):
        yield path.name, by_pillow(np.asarray(Image.open(path).convert("RGB")), quality=90)


def test_real_pictures_have_pillows_pixels(unchecked: None) -> None:
    assert check_equal(real_pictures()) >= 40


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def adobe(transform: int) -> bytes:
    return segment(0xEE, b"Adobe\0\x64\0\0\0\0" + bytes([transform]))


def changed(data: bytes, place: int, *values: int) -> bytes:
    return data[:place] + bytes(values) + data[place + len(values) :]


def odd_jpegs(data: bytes) -> Iterator[tuple[str, bytes]]:
    """A JPEG with other markers, headers and ends."""
    begin, rest = data[:2], data[2:]
    frame = next(
        data.find(bytes([0xFF, 0xC0 + kind])) for kind in range(3) if bytes([0xFF, 0xC0 + kind]) in data
    )
    without = begin + rest[2 + int.from_bytes(rest[2:4], "big") :] if rest[1] == 0xE0 else data
    yield "trailing", data + b"more" * 99
    yield "two", data + data
    yield "two starts", begin + data
    yield "padded marker", begin + b"\xff" + rest
    yield "no JFIF", without
    for transform in range(4):
        yield f"Adobe {transform}", begin + adobe(transform) + rest
        yield f"Adobe alone {transform}", begin + adobe(transform) + without[2:]
    for kind in (0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC9, 0xCA, 0xCB):
        yield f"frame {kind:x}", changed(data, frame + 1, kind)
    for bits in (12, 16):
        yield f"{bits} bits", changed(data, frame + 4, bits)
    for height in (0, 1, 5000):
        yield f"height {height}", changed(data, frame + 5, *divmod(height, 256))
    for factors, component in itertools.product((0x11, 0x12, 0x21, 0x22, 0x31, 0x41, 0x44), (11, 14)):
        yield f"sampling {factors:x} of {component}", changed(data, frame + component, factors)


def damaged_jpegs(data: bytes, draw: random.Random) -> Iterator[tuple[str, bytes]]:
    scan = data.find(b"\xff\xda")
    yield "cut", data[: draw.randrange(1, len(data))]
    yield "cut at its end", data[: -draw.randrange(1, 9)]
    yield "byte", changed(data, draw.randrange(len(data)), draw.randrange(256))
    yield "byte of a scan", changed(data, draw.randrange(scan, len(data)), draw.randrange(256))
    yield "byte of the header", changed(data, draw.randrange(2, scan), draw.randrange(256))
    first, last = sorted(draw.choices(range(scan, len(data)), k=2))
    yield "removed", data[:first] + data[last:]
    yield "inserted", data[:first] + bytes([draw.randrange(256)]) * 3 + data[first:]


def outcome(data: bytes, decoder: Decoder | None) -> tuple[Any, list[str]]:
    """The pixels, or the error; and what was warned of."""
    wanted = Preprocessing(resize=20, crop=20)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            result: Any = read_pixels(io.BytesIO(data), wanted, decoder).numpy().tobytes()
        except Exception as error:  # noqa: BLE001 - whichever it is, both ways have to raise it
            result = type(error), re.sub("0x[0-9a-f]+", "", str(error))
    return result, [str(warning.message) for warning in found]


class Counting(Decoder):
    """Counts the pictures that were not left to Pillow."""

    fast = 0

    def decode(self, image: Image.Image, file: Any) -> Any:
        found = super().decode(image, file)
        self.fast += found is not None
        return found


def check_same_outcome(jpegs: list[tuple[str, bytes]], rounds: int) -> Counting:
    draw, decoder = random.Random(0), Counting()
    for name, data in jpegs:
        others = [*odd_jpegs(data), *(one for _ in range(rounds) for one in damaged_jpegs(data, draw))]
        for what, other in others:
            assert outcome(other, decoder) == outcome(other, None), f"{name}: {what}"
    return decoder


def test_odd_and_damaged_files_fail_or_decode_as_by_pillow(unchecked: None) -> None:
    decoder = check_same_outcome([*made_jpegs([75], [(33, 31)])][::3], 3)
    assert decoder.fast > 50
    assert not decoder.notes()


@pytest.mark.long
def test_many_odd_and_damaged_files_fail_or_decode_as_by_pillow(unchecked: None) -> None:
    decoder = check_same_outcome([*made_jpegs([60, 95], [(33, 31), (64, 48), (17, 33)])], 20)
    assert decoder.fast > 2000
    assert not decoder.notes()


def test_what_is_left_to_pillow(unchecked: None, tmp_path: Path) -> None:
    pixels = picture(40, 30)
    data = by_pillow(pixels)
    assert kind_of(data) is not None
    left = {
        "CMYK": by_pillow(pixels, mode="CMYK"),
        "12 bits": changed(data, data.find(b"\xff\xc0") + 4, 12),
        "arithmetic": changed(data, data.find(b"\xff\xc0") + 1, 0xC9),
        "tables of 16 bits": changed(data, data.find(b"\xff\xdb") + 4, 0x10),
        "no tables": data.replace(b"\xff\xc4", b"\xff\xfe"),
        "another format": b"\x89PNG" + data,
        "header alone": data[: data.find(b"\xff\xda")],
    }
    assert {name: kind_of(other) for name, other in left.items()} == dict.fromkeys(left)
    Image.fromarray(pixels).save(
        tmp_path / "several.jpg", "MPO", save_all=True, append_images=[Image.new("RGB", (40, 30))]
    )
    several = (tmp_path / "several.jpg").read_bytes()
    assert Image.open(io.BytesIO(several)).format == "MPO"
    assert decoded(Decoder(), several) is None
    assert decoded(Decoder(), data) is not None


def test_bombs_are_what_they_were(unchecked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    data = by_pillow(picture(40, 30))
    for most in (1000, 100):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
        assert outcome(data, Decoder()) == outcome(data, None)
    assert "DecompressionBomb" in str(outcome(data, None))


def test_the_first_pictures_of_each_kind_are_checked() -> None:
    """Those have Pillow's pixels in any case, and are decoded twice."""
    decoder = Decoder()
    one, other = by_pillow(picture(40, 30)), by_pillow(picture(40, 30), progressive=True)
    assert [decoded(decoder, one) is None for _ in range(10)] == [True] * 8 + [False] * 2
    assert [decoded(decoder, other) is None for _ in range(4)] == [True] * 2 + [False] * 2
    assert not decoder.notes()


def one_pixel_off(data: bytes, **options: Any) -> np.ndarray:
    pixels: np.ndarray = DECODE(data, **options)
    pixels[-1, -1, -1] ^= 1
    return pixels


DECODE = simplejpeg.decode_jpeg


def test_one_pixel_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simplejpeg, "decode_jpeg", one_pixel_off)
    decoder, data = Decoder(), by_pillow(picture(40, 30))
    assert outcome(data, decoder) == outcome(data, None)
    [said] = decoder.notes()
    assert said.startswith(OTHER)
    monkeypatch.setattr(simplejpeg, "decode_jpeg", DECODE)
    assert [decoded(decoder, data) for _ in range(20)] == [None] * 20
    assert not decoder.notes()


def test_another_size_or_an_unknown_error_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    data = by_pillow(picture(40, 30))
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda data, **options: DECODE(data, **options)[:-1])
    decoder = Decoder()
    assert decoded(decoder, data) is None
    assert len(decoder.notes()) == 1
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda data: None)
    decoder = Decoder()
    assert decoded(decoder, data) is None
    assert "unexpected keyword argument" in decoder.notes()[0]


def test_a_file_that_pillow_alone_refuses_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    data = by_pillow(picture(40, 30))
    broken = data[: len(data) * 2 // 3]
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda broken, **options: DECODE(data, **options))
    decoder = Decoder()
    assert outcome(broken, decoder) == outcome(broken, None)
    assert "read a file that Pillow refuses" in decoder.notes()[0]


def test_without_simplejpeg_or_libjpeg_turbo_pillow_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    data = by_pillow(picture(40, 30))
    with monkeypatch.context() as patch:
        patch.setattr(features, "check_feature", lambda name: False)
        decoder = Decoder()
        assert [decoded(decoder, data) for _ in range(10)] == [None] * 10
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    decoder = Decoder()
    assert [decoded(decoder, data) for _ in range(10)] == [None] * 10
    assert not decoder.notes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 JPEGs of three classes."""
    root = tmp_path_factory.mktemp("jpegs")
    for number in range(24):
        (root / "val" / "abc"[number % 3]).mkdir(parents=True, exist_ok=True)
        data = by_pillow(picture(50, 40, number), progressive=number % 4 == 0)
        (root / "val" / "abc"[number % 3] / f"{number}.jpg").write_bytes(data)
    (root / "made.py").write_text(MODEL)
    return root


def evaluated(folder: Path, workers: int) -> dualeval.Result:
    task = ImageClassification(
        model="made:means",
        weights="random:0",
        data=folder / "val",
        preprocessing={"preprocessing": "imagenet", "resize": SMALL.resize, "crop": SMALL.crop},
    )
    return dualeval.evaluate(task, batch_size=4, workers=workers, device="cpu")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_says_it_once_and_has_the_same_digest(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], workers: int
) -> None:
    """Also where two reading processes decode."""
    with working_module(folder, "made", MODEL, monkeypatch):
        wanted = evaluated(folder, 0)
        assert "simplejpeg" not in capfd.readouterr().err
        assert evaluated(folder, workers).metrics_digest == wanted.metrics_digest
        assert "simplejpeg" not in capfd.readouterr().err
        monkeypatch.setattr(simplejpeg, "decode_jpeg", one_pixel_off)
        found = evaluated(folder, workers)
        assert found.metrics_digest == wanted.metrics_digest
        assert found.fingerprint == wanted.fingerprint
        assert found.warnings == wanted.warnings
        assert capfd.readouterr().err.count(OTHER) == 1


# In place of the installed one.
PLAYED = {
    "missing": "raise ImportError('played')",
    "differs": """
import io
import numpy as np
from PIL import Image


def decode_jpeg(data, **options):
    pixels = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    pixels[0, 0, 0] ^= 1
    return pixels
""",
}


@pytest.mark.long
@pytest.mark.parametrize("workers", ["0", "2"])
def test_ranks_have_the_same_digest_with_and_without_it(
    folder: Path, launch: Launch, tmp_path: Path, workers: str
) -> None:
    found = {}
    for processes, played in itertools.product((1, 2), (None, *PLAYED)):
        out, library = tmp_path / f"{processes}-{played}", tmp_path / f"library-{played}"
        library.mkdir(exist_ok=True)
        if played is not None:
            (library / "simplejpeg.py").write_text(PLAYED[played])
        command: list[str | Path] = [sys.executable, "-m", "dualeval", "run", "--model", "made:means"]
        command += [
            *("--weights", "random:0", "--data", folder / "val", "--preprocessing", "imagenet"),
            *("--resize", "20", "--crop", "16", "--batch-size", "4"),
        ]
        command += ["--workers", workers, "--out", out, "--no-progress", "--device", "cpu"]
        spread = ["--nproc", str(processes)] if processes > 1 else []
        variables = {"PYTHONPATH": f"{library}:{ROOT}", "OMP_NUM_THREADS": "1"}
        done = launch([*command, *spread], cwd=folder, variables=variables).ok()
        assert done.stderr.count(OTHER) == (played == "differs")
        result = json.loads((out / "result.json").read_text())
        found[processes, played] = result["metrics_digest"], result["fingerprint"]
    assert len(set(found.values())) == 1
