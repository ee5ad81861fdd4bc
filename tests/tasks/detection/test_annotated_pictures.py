"""Annotations that are not right, and pictures: turned, grey, of another size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dualeval.errors import DualevalError
from tests.engine.test_evaluator import evaluate
from tests.tasks.detection.jobs import changed, refused, rows, task, values
from tests.vehicles.coco_data import figures


def _doubled(key: str) -> Callable[[Any], object]:
    return lambda content: content[key].append(content[key][0])


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "image twice": (_doubled("images"), "the id 1000 twice in 'images'"),
    "file twice": (
        lambda c: c["images"].append({**c["images"][0], "id": 5}),
        "the file_name 000.png in two of its images",
    ),
    "annotation twice": (_doubled("annotations"), "twice in 'annotations'"),
    "category twice": (
        lambda c: c["categories"].append({"id": 99, "name": "cat"}),
        "several categories of the name 'cat'",
    ),
    "unknown image": (
        lambda c: c["annotations"][0].update(image_id=1),
        "image_id 1, which none of the 24 images has",
    ),
    "unknown category": (
        lambda c: c["annotations"][0].update(category_id=0),
        "category_id 0, which none of the 4 categories",
    ),
    "no box": (
        lambda c: c["annotations"][0].pop("bbox"),
        "has bbox None, expected left, top, width and height",
    ),
    "negative": (lambda c: c["annotations"][0].update(bbox=[1, 2, -3, 4]), "the last two not negative"),
    "corners": (
        lambda c: [each.update(bbox=[60, 60, 149, 149]) for each in c["annotations"]],
        "boxes end beyond their pictures.*subtract",
    ),
    "no width": (
        lambda c: c["images"][0].pop("width"),
        "entry 0 of 'images' has width None, expected a whole number",
    ),
    "an id of 65 bits": (
        lambda c: c["images"][0].update(id=2**63),
        "entry 0 of 'images' has id 9223372036854775808, expected a whole number of 64 bits",
    ),
    "crowds in words": (
        lambda c: c["annotations"][0].update(iscrowd="0"),
        "has iscrowd '0', expected 0 or 1",
    ),
    "boxes of 0 to 1": (
        lambda c: [each.update(bbox=[0.1, 0.2, 0.3, 0.4]) for each in c["annotations"]],
        "its boxes lie between 0 and 0.4, expected left, top, width and height in pixels",
    ),
    "no pictures": (lambda c: c["images"].clear(), "its list 'images' is empty"),
    "no lists": (lambda c: c.pop("annotations"), "has no list 'annotations': found images, categories"),
    "lvis": (lambda c: c["images"][0].update(neg_category_ids=[1]), "are of LVIS"),
}


@pytest.mark.parametrize("name", [*CHANGES])
def test_annotations_that_are_not_right_are_refused(home: Path, tmp_path: Path, name: str) -> None:
    change, match = CHANGES[name]
    refused(home, match, **changed(home, tmp_path, change))


def test_other_files_are_refused(home: Path, tmp_path: Path) -> None:
    results, xml = tmp_path / "results.json", tmp_path / "a.xml"
    results.write_text("[]")
    xml.write_text("<annotation/>")
    refused(home, "is a list, as COCO writes detections", annotations=results)
    refused(home, "as Pascal VOC has them, is not read", annotations=xml)
    refused(home, "does not exist: expected a JSON file", annotations=tmp_path / "none.json")
    refused(home, "expected the folder of the pictures", data=tmp_path / "none")
    refused(home, "none of the pictures that .* names is there", data=tmp_path)
    refused(home, "--annotations is not given, and looked for", annotations=None)


def test_annotations_are_found_where_data_sets_have_them(home: Path, tmp_path: Path) -> None:
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "instances_val2017.json").write_bytes((home / "instances.json").read_bytes())
    (tmp_path / "val2017").symlink_to(home / "pictures")
    one = task(home, data=tmp_path / "val2017", annotations=None)
    other = task(home, data=tmp_path, annotations=None)
    assert one.dataset().path_of(0) == other.dataset().path_of(0) == str(tmp_path / "val2017" / "000.png")


def _turned(folder: Path, home: Path, orientation: int, *, swaps: bool) -> None:
    """Write the same data with a picture that EXIF turns."""
    folder.mkdir()
    for path in (home / "pictures").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    image: Image.Image = Image.open(folder / "000.png")
    exif = Image.Exif()
    exif[0x0112] = orientation
    if swaps:
        image = image.transpose(Image.Transpose.ROTATE_90)
    image.save(folder / "000.png", exif=exif)


def test_a_picture_is_turned_if_its_annotations_are(home: Path, tmp_path: Path) -> None:
    _turned(tmp_path / "turned", home, 6, swaps=True)
    result = evaluate(task(home, data=tmp_path / "turned"), None, batch_size=8)
    assert values(result) == values(evaluate(task(home), None, batch_size=8))


def test_a_picture_that_fits_both_ways_is_asked_for(home: Path, tmp_path: Path) -> None:
    _turned(tmp_path / "turned", home, 3, swaps=False)
    with pytest.raises(DualevalError, match="fit both ways: type --orientation stored"):
        evaluate(task(home, data=tmp_path / "turned"), None, batch_size=8)
    stored = evaluate(task(home, data=tmp_path / "turned", orientation="stored"), None, batch_size=8)
    assert values(stored) == values(evaluate(task(home), None, batch_size=8))
    shown = evaluate(task(home, data=tmp_path / "turned", orientation="shown"), None, batch_size=8)
    assert values(shown) != values(stored)


def test_a_picture_of_another_size_is_named(home: Path, tmp_path: Path) -> None:
    _turned(tmp_path / "other", home, 1, swaps=True)
    with pytest.raises(DualevalError, match="pixels, and its annotations are for"):
        evaluate(task(home, data=tmp_path / "other"), None, batch_size=8)
    result = evaluate(task(home, data=tmp_path / "other"), tmp_path / "out", batch_size=8, on_error="skip")
    assert result.samples["failed"] == 1


def test_grey_and_cmyk_pictures_are_read(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kinds"
    folder.mkdir()
    for path in (home / "pictures").iterdir():
        image = Image.open(path)
        kind = {"000.png": "L", "001.png": "CMYK"}.get(path.name, "RGB")
        image.convert(kind).save(folder / path.name, format="TIFF" if kind == "CMYK" else "PNG")
    assert evaluate(task(home, data=folder), None, batch_size=8).samples["failed"] == 0


def test_areas_and_segmentations_that_are_not_the_boxes_are_warnings(home: Path, tmp_path: Path) -> None:
    def no_areas(content: Any) -> None:
        for each in content["annotations"]:
            each["area"] = 1

    [warning] = task(home, **changed(home, tmp_path, no_areas)).dataset().annotations.warnings
    assert "have an area below 2% of their box: figures by their size go by the area" in warning

    def along_rows(content: Any) -> None:
        sizes = {each["id"]: (each["height"], each["width"]) for each in content["images"]}
        for each in content["annotations"]:
            height, width = sizes[each["image_id"]]
            left, top, wide, high = (int(side) for side in each["bbox"])
            mask = np.zeros((height, width), np.uint8)
            mask[top : top + high, left : left + wide] = 1
            ends = [0, *(np.flatnonzero(np.diff(mask.flatten())) + 1).tolist(), mask.size]
            runs = np.diff(ends).tolist()
            each["segmentation"] = {"size": [height, width], "counts": [0, *runs] if mask[0, 0] else runs}

    [warning] = task(home, **changed(home, tmp_path, along_rows), iou_type=["segm"]).data_warnings()
    assert "lie elsewhere than their boxes" in warning and "run lengths go down the columns" in warning
    assert task(home, iou_type=["segm"]).data_warnings() == []


def test_nothing_to_find_and_nothing_found_are_said(home: Path, tmp_path: Path) -> None:
    other = changed(home, tmp_path, lambda content: content["annotations"].clear())
    assert any("has no object" in each for each in evaluate(task(home, **other), None, batch_size=8).warnings)
    result = evaluate(task(home, score_threshold=40.0), None, batch_size=8)
    assert "there is no detection in any image" in result.warnings


def test_notes_name_objects_without_size(home: Path, tmp_path: Path) -> None:
    def change(content: Any) -> None:
        content["annotations"][0]["bbox"][2] = 0
        content["annotations"][1].pop("area")

    notes = task(home, **changed(home, tmp_path, change)).notes()
    assert "1 object without width or height: no detection can find them." in notes
    assert "1 object without area: that of the box was taken." in notes


def test_what_the_file_says_of_pictures_makes_groups(home: Path, tmp_path: Path) -> None:
    result = evaluate(task(home), tmp_path / "out", batch_size=8, by=["site"])
    assert [group["label"] for group in result.slices["site"]] == ["north", "south"]
    north = [row for row in rows(tmp_path / "out") if row["site"] == "north"]
    content = json.loads((home / "instances.json").read_text())
    ids = {row["image_id"] for row in north}
    content["images"] = [each for each in content["images"] if each["id"] in ids]
    content["annotations"] = [each for each in content["annotations"] if each["image_id"] in ids]
    (tmp_path / "north.json").write_text(json.dumps(content))
    assert result.slices["site"][0]["metrics"]["ap"] == figures(tmp_path / "north.json", north)[0]


def test_other_annotations_are_other_data(home: Path, tmp_path: Path) -> None:
    one = task(home).dataset().fingerprint(24)
    for change in (
        lambda content: content["annotations"][0].update(iscrowd=1 - content["annotations"][0]["iscrowd"]),
        lambda content: content["annotations"][0]["bbox"].__setitem__(0, 1.0),
        lambda content: content["categories"][2].update(name="birds"),
    ):
        assert task(home, **changed(home, tmp_path, change)).dataset().fingerprint(24) != one
