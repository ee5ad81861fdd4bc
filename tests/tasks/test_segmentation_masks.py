"""Pictures with masks: manifests, bad samples, and what the labels of a mask stand for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from dualeval.data.masks import LabelRule
from dualeval.errors import DualevalError, UsageError
from dualeval.metrics.segmentation import COUNTS, PixelCheck
from dualeval.options.fields import fields_of
from dualeval.tasks.options.segmentation import SegmentationOptions
from dualeval.tasks.segmentation import Segmentation
from tests.engine.test_evaluator import evaluate, rows
from tests.tasks.test_segmentation import CPU, task
from tests.vehicles import masked_pictures as made
from tests.vehicles.masked_pictures import CLASSES, Exact
from tests.vehicles.measuring import measure


def test_a_manifest_has_the_digest_of_its_folders(home: Path, tmp_path: Path) -> None:
    path = home / "list.csv"
    path.write_text("image,mask\n" + "".join(f"img/{n:03}.png,masks/{n:03}.png\n" for n in range(13)))
    found = evaluate(task(home, data=path, masks=None), None, batch_size=4)
    assert found.metrics_digest == evaluate(task(home), None, batch_size=4).metrics_digest
    with pytest.raises(UsageError, match="--mask-column nothing"):
        task(home, data=path, masks=None, mask_column="nothing")
    with pytest.raises(UsageError, match="none of its masks exists"):
        task(home, data=path, masks=tmp_path)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("image\na.png\n", "expected one for their masks' paths"),
        ("image,mask\na.png,\n", "line 2 has '' in the column 'mask', expected a path"),
        ("image,mask\na.png,b.png\na.png,c.png\n", "line 3 has the picture of line 2, a.png"),
        ("image,mask\n", "has no rows"),
    ],
)
def test_a_manifest_without_its_columns_or_masks_is_refused(tmp_path: Path, lines: str, said: str) -> None:
    (tmp_path / "list.csv").write_text(lines)
    with pytest.raises(UsageError, match=said):
        task(tmp_path, data=tmp_path / "list.csv", masks=None)


def test_masks_of_8_and_16_bits_have_the_same_metrics(home: Path, tmp_path: Path) -> None:
    made.write_pictures(tmp_path, count=3)
    wanted = evaluate(task(tmp_path), None, batch_size=4).metrics
    for name, mode in (("000", "L"), ("001", "I;16")):
        path = tmp_path / f"masks/{name}.png"
        labels = np.array(Image.open(path))
        Image.fromarray(labels.astype(np.uint16 if mode == "I;16" else np.uint8)).save(path)
        with Image.open(path) as image:
            assert image.mode == mode
    assert evaluate(task(tmp_path), None, batch_size=4).metrics == wanted


def _beyond(mask: Path) -> None:
    labels = np.array(Image.open(mask))
    labels[0, :3] = 34
    made.write_mask(mask, labels)


def _picture_of(mask: Path) -> Path:
    return mask.parent.parent / "img" / mask.name


BAD: list[tuple[str, Callable[[Path], object], list[str]]] = [
    ("no mask", Path.unlink, ["its mask", "masks/002.png: there is no such file"]),
    (
        "of another size",
        lambda mask: made.write_mask(mask, np.zeros((9, 7))),
        ["masks/002.png: it has 7 x 9 pixels, and its picture 20 x 20"],
    ),
    ("beyond", _beyond, ["3 pixels with the label 34, expected 0 to 4", "--ignore-index 255,34"]),
    (
        "in colours",
        lambda mask: Image.open(mask).convert("RGB").save(mask),
        ["its pixels are colours (mode RGB)", "PIL.Image.fromarray"],
    ),
    (
        "as JPEG",
        lambda mask: Image.open(mask).convert("L").save(mask, format="JPEG"),
        ["a JPEG, whose pixels are approximate, expected PNG, TIFF, BMP"],
    ),
    (
        "too large",
        lambda mask: Image.new("1", (600, 400)).save(_picture_of(mask)),
        ["MAX_IMAGE_PIXELS = None"],
    ),
    (
        "a mask too large",
        lambda mask: Image.new("1", (600, 400)).save(mask),
        ["its mask", "MAX_IMAGE_PIXELS"],
    ),
    # Its head is whole: its size is known.
    (
        "a picture cut short",
        lambda mask: _picture_of(mask).write_bytes(_picture_of(mask).read_bytes()[:200]),
        ["image file is truncated"],
    ),
    ("an empty picture", lambda mask: _picture_of(mask).write_bytes(b""), ["is empty (0 bytes)"]),
]


@pytest.mark.parametrize(("spoil", "said"), [case[1:] for case in BAD], ids=[name for name, *_ in BAD])
def test_a_bad_sample_is_named_and_skipping_it_leaves_the_others(
    tmp_path: Path, spoil: Callable[[Path], object], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named with its file; skipped, the other pictures of its batch keep their numbers."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100_000)
    made.write_pictures(tmp_path, count=7)
    evaluate(task(tmp_path), tmp_path / "whole", batch_size=7)
    spoil(tmp_path / "masks/002.png")
    with pytest.raises((UsageError, DualevalError)) as caught:
        evaluate(task(tmp_path), None, batch_size=7)
    for part in ["002.png (index 2)", *said]:
        assert part in str(caught.value)
    result = evaluate(task(tmp_path), tmp_path / "out", batch_size=7, on_error="skip")
    assert [failed["id"] for failed in result.failed] == ["002.png"]
    whole, kept = rows(tmp_path / "whole"), rows(tmp_path / "out")
    for name in ("intersection", "predicted_pixels", "picture_iou"):
        assert kept[name][:2] + kept[name][3:] == whole[name][:2] + whole[name][3:]


def test_a_bad_row_of_a_manifest_is_named(home: Path, tmp_path: Path) -> None:
    made.write_pictures(tmp_path, count=3)
    _beyond(tmp_path / "masks/001.png")
    (tmp_path / "list.csv").write_text(
        "image,mask\n" + "".join(f"img/00{n}.png,masks/00{n}.png\n" for n in range(3))
    )
    with pytest.raises((UsageError, DualevalError), match=r"list.csv, line 3\): 3 pixels with the label 34"):
        evaluate(task(tmp_path, data=tmp_path / "list.csv", masks=None), None, batch_size=3)


def test_pictures_without_a_mask_and_masks_without_a_picture_are_named(tmp_path: Path) -> None:
    made.write_pictures(tmp_path, count=4)
    (tmp_path / "img/001.png").unlink()
    (tmp_path / "masks/002.png").unlink()
    found = task(tmp_path)
    assert "no picture for 1 file (001.png): left out." in found.notes()
    assert "no mask for 1 file (002.png)." in found.data_warnings()


def test_label_255_is_ignored_only_where_it_can_be_no_class(tmp_path: Path) -> None:
    """255 where nobody says another one; but not where it may be a class."""
    made.write_pictures(tmp_path, count=3)
    found = task(tmp_path, model=Exact(300))
    found.build_model(CPU)
    assert found.options()["ignore_index"] == []
    assert task(tmp_path, ignore_index=3).fingerprint()["ignore_index"] == [3]
    # 255 is the last one of 255 classes where 1 is the first.
    found = task(tmp_path, model=Exact(255), reduce_labels="yes")
    found.build_model(CPU)
    assert found.options()["ignore_index"] == []


def test_a_blurred_mask_is_refused() -> None:
    stored = np.arange(250, dtype=np.uint8)[None]
    with pytest.raises(
        ValueError, match=r"248 such labels, as blurred masks have: .*--mask-values FILE.json$"
    ):
        LabelRule(ignore=(255,), reduce=False, classes=2).of(stored)


def test_minus_one_counts_as_a_label_unless_it_is_ignored() -> None:
    """In masks of 32 bits: it counts unless it is named, as others do."""
    stored = np.array([[0, 2, -1]], np.int32)
    with pytest.raises(ValueError, match=r"1 pixel with the label -1, .*--ignore-index 255,-1"):
        LabelRule(ignore=(255,), reduce=False, classes=5).of(stored)
    assert LabelRule(ignore=(255, -1), reduce=False, classes=5).of(stored).tolist() == [[0, 2, -1]]
    assert LabelRule(ignore=(255, -1), reduce=True, classes=5).of(stored).tolist() == [[-1, 1, -1]]


# -- what labels stand for -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``img``, and the same masks of 0 and 1 in ``masks`` and of 0 and 255 in ``m255``."""
    folder = tmp_path_factory.mktemp("binary")
    for name in made.write_pictures(folder, count=4, classes=2):
        path = folder / f"masks/{name}.png"
        labels = np.array(Image.open(path)) % 2
        for below, most in (("masks", 1), ("m255", 255)):
            (folder / below).mkdir(exist_ok=True)
            Image.fromarray((labels * most).astype(np.uint8)).save(folder / below / f"{name}.png")
    return folder


def of_two(binary: Path, **changes: Any) -> Segmentation:
    return task(binary, **{"model": Exact(2), "masks": binary / "m255", **changes})


def test_a_foreground_of_255_is_asked_for(binary: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        evaluate(of_two(binary), None)
    assert "has 2 classes: 255 may be class 1, or no class" in str(caught.value)
    wanted = evaluate(of_two(binary, masks=binary / "masks"), None)
    assert "--mask-values 0=0,255=1;" in str(caught.value)
    (tmp_path / "map.json").write_text('{"0": 0, "255": 1, "7": null}')
    for values in ("0=0,255=1,7=none", tmp_path / "map.json", {0: 0, 255: 1, 7: None}):
        own = of_two(binary, mask_values=values)
        found = evaluate(own, None) if values == tmp_path / "map.json" else own.build_model(CPU)
        assert isinstance(found, nn.Module) or found.metrics_digest == wanted.metrics_digest
        assert own.fingerprint()["mask_values"] == own.options()["mask_values"] == "0=0,7=none,255=1"
        assert "2 classes, mask values 0=0,7=none,255=1" in own.description()["compared"]
    assert "--ignore-index 255." in str(caught.value)
    ignored = evaluate(of_two(binary, ignore_index=255), None)
    assert "no mask has a pixel of 1 of 2 classes, and " in " ".join(ignored.warnings)
    assert "no mask has" not in " ".join(wanted.warnings)


def test_255_is_ignored_where_a_mask_has_another_class_too(home: Path, tmp_path: Path) -> None:
    """So it is of the embedded pictures; and nothing is, where nobody wants it."""
    made.write_pictures(tmp_path, count=2, classes=2)
    result = evaluate(of_two(tmp_path, masks=tmp_path / "masks"), None)
    assert "no mask has" not in " ".join(result.warnings)
    assert result.job["ignore_index"] == [255]
    for nothing in ("none", (), -1):
        found = task(home, ignore_index=nothing)
        found.build_model(CPU)
        with pytest.raises(ValueError, match=r"with the label 255, expected 0 to 4"):
            found.dataset().__getitems__([0])
    [field] = [each for each in fields_of(SegmentationOptions) if each.name == "ignore_index"]
    assert [field.parse(text, "") for text in ("none", "255,3", "-1")] == ["none", (255, 3), (-1,)]
    with pytest.raises(UsageError, match="or none"):
        field.parse("nothing", "--ignore-index")


def test_advice_on_labels_holds_for_all_masks(binary: Path, tmp_path: Path) -> None:
    """The first has 7 and 8 alone: what is advised there names the 11 of others, too."""
    (tmp_path / "masks").mkdir()
    for number, path in enumerate(sorted((binary / "masks").iterdir())):
        labels = np.array([7, 11 if number else 8], np.uint8)[np.array(Image.open(path))]
        Image.fromarray(labels).save(tmp_path / "masks" / path.name)

    def read(**changes: Any) -> None:
        found = of_two(binary, **{"masks": tmp_path / "masks", "model": Exact(3), **changes})
        found.build_model(CPU)
        found.dataset().__getitems__(range(4))

    with pytest.raises(ValueError, match=r"--mask-values 7=0,8=1,11=2$"):
        read()
    with pytest.raises(ValueError, match=r"7=0,8=1,11=2, or, .*--ignore-index 8,11$"):
        read(ignore_index=(), model=Exact(8))
    read(mask_values="7=0,8=1,11=2")
    read(ignore_index=(255, 7, 8, 11))
    with pytest.raises(ValueError, match=r"none for what does not count: 7=0,8=none,11=none$"):
        read(mask_values="7=0")
    read(mask_values="7=0,8=none,11=none")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mask_values": "0=0,0=1"}, "a label is there twice"),
        ({"mask_values": "0=0,255=-1"}, "a class is below 0"),
        ({"mask_values": "0=0,255"}, "Expected the class of each label, as 0=0,255=1,7=none"),
        ({"mask_values": {0: 1.5}}, "Expected the class of each label"),
        ({"mask_values": {0: True}}, "Expected the class of each label"),
        ({"mask_values": "missing.json"}, "No such file.*or a JSON file"),
        ({"mask_values": "0=0,1=5"}, "has 5 classes, and --mask-values has the class 5, expected at most 4"),
        ({"mask_values": "0=0", "ignore_index": 255}, "Leave --ignore-index out"),
        ({"mask_values": "0=0", "reduce_labels": "yes"}, "Leave --reduce-labels yes out"),
        ({"ignore_index": "nothing"}, "--ignore-index 'nothing': expected whole numbers"),
    ],
)
def test_wrong_mask_values_are_refused(home: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        task(home, **changes).build_model(CPU)


# Width and height as stored, EXIF's turn of the picture, of the mask, and how the mask is stored.
TURNED = [
    ((20, 20), 6, 1, "shown", True),
    ((20, 20), 3, 1, "shown", True),
    ((24, 16), 6, 1, "shown", True),
    # Only as they are stored they have one size, or nothing is turned alone.
    ((24, 16), 6, 1, "stored", False),
    ((20, 20), 6, 6, "stored", False),
    ((20, 20), 1, 1, "stored", False),
    ((20, 20), 0, 1, "stored", False),
]


@pytest.mark.parametrize(("size", "turn", "of_mask", "stored", "warns"), TURNED)
def test_pictures_that_exif_turns_are_compared_upright(
    tmp_path: Path, size: tuple[int, int], turn: int, of_mask: int, stored: str, warns: bool
) -> None:
    """Compared as programs show them, with a warning; the numbers are those of upright files."""
    draw = np.random.default_rng(0)
    picture = Image.fromarray(draw.integers(0, 256, (size[1], size[0], 3), np.uint8))
    mask = Image.fromarray(draw.integers(0, CLASSES, (size[1], size[0]), np.uint8))
    exifs = {number: Image.Exif() for number in (turn, of_mask)}
    for number, exif in exifs.items():
        exif[0x0112] = number
    method = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_270}.get(turn)
    shown = [
        each if method is None or stored == "stored" else each.transpose(method) for each in (picture, mask)
    ]
    samples = []
    for name, pair, kept in (("own", (picture, shown[1]), exifs), ("upright", shown, None)):
        for folder, image, number in (("img", pair[0], turn), ("masks", pair[1], of_mask)):
            (tmp_path / name / folder).mkdir(parents=True)
            image.save(tmp_path / name / folder / "a.png", exif=kept[number] if kept else b"")
        samples += task(tmp_path / name).dataset().__getitems__([0])
    assert [turned for *_, turned in samples] == [warns, False]
    assert torch.equal(samples[0][0], samples[1][0])
    assert torch.equal(samples[0][1], samples[1][1])
    found, classes = task(tmp_path / "own").dataset().picture(0)
    assert found.size == classes.shape[::-1] == shown[0].size
    measured = measure(PixelCheck(2), check_columns([1, 2], [1, 2], [1, 2], ignored=2, turned=warns))
    assert [text[:26] for text in measured.warnings] == ["EXIF turns 1 picture and n"] * warns


VOC = [(0, 0, 0), (128, 0, 0), (0, 128, 0), (128, 128, 0)]
OWN = [(9, 0, 0), (0, 9, 0), (0, 0, 9), (9, 9, 9)]
PALETTES: list[tuple[list[list[tuple[int, int, int]]], str]] = [
    # Of two masks that have the numbers 0 to 2 and 255; what is not there is black.
    ([VOC, VOC[:3]], ""),
    ([OWN, OWN], ""),
    ([OWN, VOC], ""),
    ([[VOC[0], *OWN], [VOC[0], *OWN]], ""),
    ([VOC, [VOC[1], VOC[0], VOC[2]]], "has the colour (128, 0, 0) at the number 1, and .* at 0: "),
    ([OWN, [*OWN[1:3], OWN[0]]], "has the colour (0, 9, 0) at the number 1, and .* at 0: "),
    (
        [[VOC[0], VOC[2], VOC[1]]] * 2,
        "classes, type --mask-values 0=0,1=2,2=1,255=none; if the numbers are, --",
    ),
]


@pytest.mark.parametrize(("palettes", "said"), PALETTES)
def test_palettes_whose_colours_may_be_the_classes_are_refused(
    tmp_path: Path, palettes: list[list[tuple[int, int, int]]], said: str
) -> None:
    for number, palette in enumerate(palettes):
        image = Image.fromarray(np.array([[0, 1, 2, 255]], np.uint8)).convert("P")
        image.frombytes(bytes((0, 1, 2, 255)))
        image.putpalette([value for colour in palette for value in colour] + [0] * (768 - 3 * len(palette)))
        for folder, picture in (("masks", image), ("img", Image.new("RGB", (4, 1)))):
            (tmp_path / folder).mkdir(exist_ok=True)
            picture.save(tmp_path / folder / f"{number}.png")
    task(tmp_path, mask_values="0=0,1=1,2=2,255=none").build_model(CPU)
    if not said:
        task(tmp_path).build_model(CPU)
        return
    with pytest.raises(UsageError, match=re.escape(said).replace(r"\.\*", ".*")) as raised:
        task(tmp_path).build_model(CPU)
    typed = str(raised.value).rpartition("--mask-values ")[2]
    assert typed == "0=0,1=1,2=2,255=none"


@pytest.mark.parametrize(
    ("counted", "ignored", "share"), [(4, 3, ""), (3, 3, "50.0"), (1, 7, "87.5"), (0, 0, "")]
)
def test_many_ignored_pixels_are_warned_of(counted: int, ignored: int, share: str) -> None:
    measured = measure(
        PixelCheck(2), check_columns([counted, 0], [counted, 0], [counted, 0], ignored=ignored)
    )
    said = [text.partition(",")[0] for text in measured.warnings if "of the pixels are ignored" in text]
    assert said == [
        f"{share} % of the pixels are ignored by all metrics: check first which labels the masks hold"
    ] * bool(share)


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (([0, 2, 0], [0, 6, 4], [5, 5, 0]), "class 0, predicted for 50.0 % of the pixels"),
        (([0, 0, 0], [6, 4, 0], [0, 6, 4]), "labels are other classes, type --mask-values"),
        # As good as guessing, a class that few pixels are taken for, a model that misses: no other numbers.
        (([0, 4, 0], [0, 6, 4], [5, 5, 0]), ""),
        (([0, 2, 0], [0, 6, 4], [2, 6, 2]), ""),
        (([0, 0, 0], [1, 6, 4], [11, 0, 0]), ""),
    ],
)
def test_masks_without_some_classes_are_warned_of(counts: tuple[list[int], ...], said: str) -> None:
    warnings = measure(PixelCheck(3), check_columns(*counts)).warnings
    assert len(warnings) == bool(said) and said in "".join(warnings)


def check_columns(*counts: list[int], ignored: int = 0, turned: bool = False) -> dict[str, Tensor]:
    """What PixelCheck reads, of one picture: right, labelled and predicted pixels of each class."""
    named = zip(COUNTS, (torch.tensor([each]) for each in counts), strict=True)
    return {**dict(named), "ignored_pixels": torch.tensor([ignored]), "turned": torch.tensor([turned])}


def test_each_pixel_of_a_mask_is_part_of_the_job(tmp_path: Path) -> None:
    """One in the midst of a TIFF: the file's size and its ends stay as they are."""
    for folder in ("img", "masks"):
        (tmp_path / folder).mkdir()
    Image.new("RGB", (160, 120)).save(tmp_path / "img/a.png")
    labels = np.zeros((120, 160), np.uint8)
    found = []
    for value in (0, 1):
        labels[60, 80] = value
        Image.fromarray(labels).save(tmp_path / "masks/a.tif")
        found.append(task(tmp_path).dataset().content_fingerprint(range(1)))
    assert found[0] != found[1]
