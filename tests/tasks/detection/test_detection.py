"""The task detection: pycocotools' figures to the last bit, families of networks, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
import transformers
from PIL import Image
from pycocotools import mask
from torch import Tensor, nn

import dualeval
from dualeval.errors import DualevalError, UsageError
from dualeval.report.page.content import build
from dualeval.result import Result, read_result
from dualeval.tasks.detection import Detection
from dualeval.tasks.detection.masks import runs_of, true_code
from dualeval.tasks.detection.matches import Matches, match
from dualeval.tasks.detection.pictures import padded
from tests.engine.test_evaluator import evaluate
from tests.tasks.conftest import check_doors
from tests.vehicles.coco_data import CATEGORIES, SIGMAS, Finder, coco_evaluation, figures, write_coco
from tests.vehicles.made_detectors import FAMILIES, write_detector

KEYS = (
    *("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large"),
    *("ar1", "ar10", "ar100", "ar_small", "ar_medium", "ar_large"),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures and annotations."""
    folder = tmp_path_factory.mktemp("coco")
    write_coco(folder, 24)
    return folder


def task(home: Path, **changes: Any) -> Detection:
    given = {"model": Finder(), "data": home / "pictures", "annotations": home / "instances.json", **changes}
    return Detection(**given)


def changed(home: Path, folder: Path, change: Callable[[Any], object]) -> dict[str, Any]:
    """The same pictures with other annotations."""
    content = json.loads((home / "instances.json").read_text())
    change(content)
    path = folder / "changed.json"
    path.write_text(json.dumps(content))
    return {"annotations": path}


def refused(home: Path, match: str, **changes: Any) -> None:
    with pytest.raises(UsageError, match=match):
        evaluate(task(home, **changes), None, batch_size=8)


def rows(out: Path) -> list[dict[str, Any]]:
    """A run's rows as Python values."""
    found: list[dict[str, Any]] = pyarrow.parquet.read_table(out / "predictions.parquet").to_pylist()
    return found


def values(result: Result) -> list[Any]:
    return [result.metrics[key] for key in KEYS]


# -- the figures ------------------------------------------------------------------------------------------


def test_the_figures_are_those_of_pycocotools_to_the_last_bit(home: Path, tmp_path: Path) -> None:
    result = evaluate(task(home), tmp_path / "out", batch_size=5)
    assert values(result) == figures(home / "instances.json", rows(tmp_path / "out"))
    assert 0.3 < result.metrics["ap"] < 0.9  # type: ignore[operator]
    by_class: Any = result.metrics["by_class"]
    assert [*by_class] == [*CATEGORIES.values()]
    assert by_class["bird"]["ap"] is None


@pytest.mark.parametrize("of_task", [{"order": "shape"}, {}])
def test_order_and_batches_change_no_figure_of_a_network_that_sees_pictures_alone(
    home: Path, tmp_path: Path, of_task: dict[str, Any]
) -> None:
    result = evaluate(task(home, **of_task), tmp_path / "out", batch_size=3, workers=2)
    assert values(result) == figures(home / "instances.json", rows(tmp_path / "out"))


def test_masks_and_keypoints_beside_boxes(home: Path, tmp_path: Path) -> None:
    kinds = ["bbox", "segm", "keypoints"]
    result = evaluate(task(home, iou_type=kinds, sigmas=SIGMAS), tmp_path / "out", batch_size=5)
    kept = rows(tmp_path / "out")
    assert values(result) == figures(home / "instances.json", kept)
    of_masks = [result.metrics[f"mask_{key}"] for key in KEYS]
    assert of_masks == figures(home / "instances.json", kept, "segm")
    keys = ("", "50", "75", "_medium", "_large")
    of_points = [result.metrics[f"keypoint_{what}{key}"] for what in ("ap", "ar") for key in keys]
    assert of_points == figures(home / "instances.json", kept, "keypoints")
    assert 0 < of_points[0] < 1  # type: ignore[operator]
    assert of_masks[0] not in (result.metrics["ap"], 0)


def test_masks_alone_have_no_boxes(home: Path, tmp_path: Path) -> None:
    result = evaluate(task(home, iou_type=["segm"]), tmp_path / "out", batch_size=8, workers=2)
    assert result.metrics["mask_ap"] == figures(home / "instances.json", rows(tmp_path / "out"), "segm")[0]
    assert "boxes" not in rows(tmp_path / "out")[0]
    assert "ap" not in result.metrics


@pytest.mark.parametrize(
    ("segmentation", "match"),
    [
        ([[1, 2, 3, 4]], "expected polygons of 3 or more points"),
        ({"size": [3, 4], "counts": [12]}, r"its size is \[3, 4\], expected"),
        (None, "has no segmentation, which --iou-type compares"),
    ],
)
def test_segmentations_that_are_none_are_refused(
    home: Path, tmp_path: Path, segmentation: Any, match: str
) -> None:
    other = changed(
        home, tmp_path, lambda content: content["annotations"][0].update(segmentation=segmentation)
    )
    refused(home, match, **other, iou_type=["segm"])


def test_scores_below_0_count(home: Path, tmp_path: Path) -> None:
    model = Wrong(lambda found: {**found, "scores": found["scores"].clamp(0.001, 0.999).logit()})
    result = evaluate(task(home, model=model), tmp_path / "out", batch_size=8)
    assert min(score for row in rows(tmp_path / "out") for score in row["scores"]) < 0
    assert values(result) == figures(home / "instances.json", rows(tmp_path / "out"))


def test_masks_of_another_shape_are_refused(home: Path) -> None:
    model = Wrong(lambda found: {**found, "masks": found["masks"].mT})
    refused(home, "gave masks of .* expected masks of the picture's own size", model=model, iou_type=["segm"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"keypoints": [1, 2, 2] * 17}, "has 17 keypoints, expected 3, each as x, y, visibility.*--sigmas"),
        ({"num_keypoints": 0}, "num_keypoints 0, and . with a visibility above 0"),
        ({"area": -1}, "has area -1, expected a number of pixels"),
    ],
)
def test_objects_that_are_not_whole_are_refused(
    home: Path, tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    other = changed(home, tmp_path, lambda content: content["annotations"][0].update(change))
    refused(home, match, **other, iou_type=["keypoints"], sigmas=SIGMAS)


def test_options_that_do_nothing_are_refused(home: Path, tmp_path: Path) -> None:
    refused(home, "--sigmas is of keypoints", sigmas=SIGMAS)
    folder = write_detector(tmp_path / "rt", "rt_detr")
    refused(home, "--boxes-in input: the image processor", model=f"hf:{folder}", boxes_in="input")


def test_compressed_run_lengths_are_checked() -> None:
    code = mask.encode(np.asfortranarray(np.eye(9, 7, dtype=np.uint8)))["counts"].decode()
    assert true_code({"size": [9, 7], "counts": code}, 9, 7) == code
    for wrong in ("", "garbage", code[:-1], code + "1"):
        with pytest.raises(ValueError, match="its compressed run lengths are of"):
            true_code({"size": [9, 7], "counts": wrong}, 9, 7)


def test_a_threshold_leaves_out_lower_scores(home: Path, tmp_path: Path) -> None:
    result = evaluate(task(home, score_threshold=0.5), tmp_path / "out", batch_size=8)
    kept = rows(tmp_path / "out")
    assert min(score for row in kept for score in row["scores"]) >= 0.5
    assert values(result) == figures(home / "instances.json", kept)
    assert "all scores from 0.5" in result.description["compared"]


def test_more_detections_count_where_they_are_asked_for(home: Path, tmp_path: Path) -> None:
    result = evaluate(task(home, max_detections=2), tmp_path / "out", batch_size=8)
    assert result.metrics["ar2"] == result.metrics["ar2"] != None  # noqa: E711
    assert "ar100" not in result.metrics


def test_boxes_in_pixels_of_the_input_become_those_of_the_picture(home: Path, tmp_path: Path) -> None:
    def half(picture: Image.Image) -> Tensor:
        small = picture.resize((picture.width * 2, picture.height * 2), Image.Resampling.NEAREST)
        return torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1) / 255

    evaluate(task(home, preprocessing=half, boxes_in="input"), tmp_path / "out", batch_size=8)
    for row in rows(tmp_path / "out"):
        # Those that were drawn are found where they are; every second one is a copy.
        assert all(
            any(abs(box[0] - true[0]) < 0.1 * true[2] + 1 for box in row["boxes"])
            for true, crowd in zip(row["true_boxes"], row["true_crowds"], strict=True)
            if not crowd
        )


# -- networks of transformers -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES])
def test_a_network_gives_what_its_own_processor_makes_of_it(home: Path, tmp_path: Path, family: str) -> None:
    folder = write_detector(tmp_path / family, family)
    result = evaluate(task(home, model=f"hf:{folder}"), tmp_path / "out", batch_size=1, limit=6)
    model = transformers.AutoModelForObjectDetection.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    # cat, Red_Dog, fox, tree
    categories = [3, 7, 12, None]
    kept = rows(tmp_path / "out")
    for row in kept:
        picture = Image.open(home / "pictures" / row["id"]).convert("RGB")
        prepared = processor(images=picture, return_tensors="pt")
        if family == "yolos":
            del prepared["pixel_mask"]
        with torch.inference_mode():
            outputs = model(**prepared)
        [found] = processor.post_process_object_detection(
            outputs, threshold=0.0, target_sizes=[picture.size[::-1]]
        )
        counted = [place for place, label in enumerate(found["labels"]) if categories[label] is not None]
        assert row["labels"] == [categories[label] for label in found["labels"][counted]]
        torch.testing.assert_close(torch.tensor(row["boxes"]).view(-1, 4), found["boxes"][counted])
        torch.testing.assert_close(torch.tensor(row["scores"]), found["scores"][counted])
    assert any(row["labels"] for row in kept)
    assert result.labels["rule"] == "names of categories"


def test_masks_of_a_batch_are_those_of_each_picture_without_its_padding(home: Path, tmp_path: Path) -> None:
    folder = write_detector(tmp_path / "mask2former", "mask2former")
    given = {"model": f"hf:{folder}", "iou_type": ["segm"]}
    alone = evaluate(task(home, **given), tmp_path / "out", batch_size=1, limit=6)
    kept = rows(tmp_path / "out")
    model = transformers.AutoModelForUniversalSegmentation.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    categories = [3, 7, 12, None]
    for row in kept:
        picture = Image.open(home / "pictures" / row["id"]).convert("RGB")
        with torch.inference_mode():
            outputs = model(**processor(images=picture, return_tensors="pt"))
        [found] = processor.post_process_instance_segmentation(
            outputs, threshold=0.0, target_sizes=[picture.size[::-1]], return_binary_maps=True
        )
        segments = [each for each in found["segments_info"] if categories[each["label_id"]] is not None]
        assert row["labels"] == [categories[each["label_id"]] for each in segments]
        torch.testing.assert_close(row["scores"], [each["score"] for each in segments])
        areas = [mask.area(each) for each in runs_of(row["masks"])]
        assert areas == [int(found["segmentation"][each["id"]].sum()) for each in segments]
    assert alone.metrics["mask_ap"] == figures(home / "instances.json", kept, "segm")[0]
    # Padding moves a few pixels through the network's own layers; masks that were stretched would not fit.
    evaluate(task(home, **given), tmp_path / "batch", batch_size=6, limit=6)
    for row, other in zip(kept, rows(tmp_path / "batch"), strict=True):
        assert len(row["labels"]) == len(other["labels"])
        both = (runs_of(each["masks"]) for each in (row, other))
        overlaps = [float(mask.iou([a], [b], [0])[0, 0]) for a, b in zip(*both, strict=True)]
        assert np.mean(overlaps) > 0.9


def test_a_batch_is_padded_as_the_processor_pads_it(home: Path, tmp_path: Path) -> None:
    folder = write_detector(tmp_path / "detr", "detr")
    detection = task(home, model=f"hf:{folder}")
    batch = detection.collate(detection.dataset().__getitems__(range(6)))
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    pictures = [detection.dataset().picture(index) for index in range(6)]
    expected = processor(images=pictures, return_tensors="pt")
    assert len({picture.size for picture in pictures}) > 1
    assert torch.equal(batch["pixel_values"], expected["pixel_values"])
    assert torch.equal(batch["pixel_mask"], expected["pixel_mask"])


def test_a_padding_network_says_that_the_batch_size_counts(home: Path, tmp_path: Path) -> None:
    folder = write_detector(tmp_path / "detr", "detr")
    assert any("the batch size counts" in note for note in task(home, model=f"hf:{folder}").notes())
    other = write_detector(tmp_path / "rt", "rt_detr")
    assert not any("batch size" in note for note in task(home, model=f"hf:{other}").notes())


def test_pictures_in_order_of_their_shapes(home: Path) -> None:
    sizes = task(home, order="shape").dataset().annotations.sizes.tolist()
    assert sizes == sorted(sizes)
    ids = task(home).dataset().annotations.ids.tolist()
    assert ids == sorted(ids)


def test_class_and_command_line_have_the_same_job(home: Path, tmp_path: Path) -> None:
    folder = write_detector(tmp_path / "rt", "rt_detr")
    model = transformers.AutoModelForObjectDetection.from_pretrained(folder)
    typed = {"model": f"hf:{folder}", "data": home / "pictures", "annotations": home / "instances.json"}
    result = check_doors("detection", "Detection", typed)
    assert result.job["annotations"] == str(home / "instances.json")
    refused(home, "save both into a folder .*give model='hf:DIR'", model=model)


# -- categories -------------------------------------------------------------------------------------------


def test_labels_that_count_from_0_need_names(home: Path) -> None:
    refused(
        home,
        r"the labels 0, .* no ids of categories .*: these are 3, 7, 8, 12.*--category-names",
        model=Finder((0, 1, 2)),
    )


def test_names_make_categories_of_labels(home: Path, tmp_path: Path) -> None:
    names = ["CAT", "red_dog", "fox"]
    result = evaluate(task(home, model=Finder((0, 1, 2)), category_names=names), None, batch_size=8)
    assert values(result) == values(evaluate(task(home), None, batch_size=8))
    path = tmp_path / "names.txt"
    path.write_text("\n".join(names))
    again = evaluate(task(home, model=Finder((0, 1, 2)), category_names=path), None, batch_size=8)
    assert again.metrics_digest == result.metrics_digest
    assert again.fingerprint == result.fingerprint


def test_another_order_of_names_is_another_job(home: Path) -> None:
    one = task(home, category_names={3: "cat", 7: "red dog", 12: "fox"}).fingerprint()
    assert one["labels"] == {"3": 3, "7": 7, "12": 12}
    assert task(home, category_names={3: "fox", 7: "red dog", 12: "cat"}).fingerprint() != one


def test_names_of_which_none_is_known_are_refused_with_both_lists(home: Path) -> None:
    match = r"none of the names .* the model has katze, hund; the annotations have cat, .*--category-map"
    refused(home, match, category_names=["katze", "hund", "N/A"])


def test_a_map_renames(home: Path) -> None:
    names = ["katze", "red dog", "fuchs"]
    renamed = {"katze": "cat", "fuchs": "fox"}
    detection = task(home, model=Finder((0, 1, 2)), category_names=names, category_map=renamed)
    assert values(evaluate(detection, None, batch_size=8)) == values(evaluate(task(home), None, batch_size=8))
    typed = task(
        home,
        model=Finder((0, 1, 2)),
        category_names="katze,red dog,fuchs",
        category_map="katze=cat,fuchs=fox",
    )
    assert typed.fingerprint()["labels"] == {"0": 3, "1": 7, "2": 12}


def test_a_map_comes_before_the_same_name(home: Path) -> None:
    detection = task(home, category_names=["cat", "fox"], category_map={"cat": "fox", "fox": "cat"})
    assert detection.fingerprint()["labels"] == {"0": 12, "1": 3}


def test_masks_of_pictures_without_objects(home: Path, tmp_path: Path) -> None:
    other = changed(home, tmp_path, lambda content: content["annotations"].clear())
    result = evaluate(task(home, **other, iou_type=["segm"]), None, batch_size=8)
    assert result.metrics["mask_ap"] is None


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"category_names": ["cat"], "category_map": {"dog": "fox"}}, "'dog' is no name of the model"),
        (
            {"category_names": ["cat"], "category_map": {"cat": "foxx"}},
            "'foxx' is no name of the annotations. Did you mean fox",
        ),
        ({"category_map": {"dog": "fox"}}, "give --category-names too"),
        ({"category_map": "dog"}, "expected NAME=CATEGORY"),
        ({"category_names": {0: "LABEL_0", 1: "LABEL_1"}}, "which says nothing. Give --category-names"),
        ({"category_names": "missing.txt"}, "--category-names missing.txt cannot be read"),
    ],
)
def test_maps_that_fit_nothing_are_refused(home: Path, changes: dict[str, Any], match: str) -> None:
    refused(home, match, **changes)


def test_labels_beyond_the_names_are_refused(home: Path) -> None:
    match = "gives the labels 3, and --category-names, or the model's own names, end before"
    refused(home, match, model=Finder((1, 2, 3)), category_names=["cat", "red dog", "fox"])


def test_a_blank_line_is_a_name_of_none(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("\ncat\nred dog\n\nfox\n")
    result = evaluate(task(home, model=Finder((1, 2, 4)), category_names=path), None, batch_size=8)
    assert values(result) == values(evaluate(task(home), None, batch_size=8))


def test_names_that_differ_by_case_alone_are_told_apart(home: Path, tmp_path: Path) -> None:
    other = changed(home, tmp_path, lambda content: content["categories"][2].update(name="Cat"))
    detection = task(home, **other, category_names={3: "cat", 7: "Red_dog", 12: "fox", 8: "Cat"})
    assert detection.fingerprint()["labels"] == {"3": 3, "7": 7, "12": 12, "8": 8}


def test_labels_that_are_ids_but_for_1_are_a_warning(home: Path, tmp_path: Path) -> None:
    def renumber(content: Any) -> None:
        ids = {3: 0, 7: 1, 12: 2, 8: 3}
        for each in content["categories"]:
            each["id"] = ids[each["id"]]
        for each in content["annotations"]:
            each["category_id"] = ids[each["category_id"]]

    result = evaluate(
        task(home, **changed(home, tmp_path, renumber), model=Finder((1, 2, 3))), None, batch_size=8
    )
    assert any("the labels may be above the ids by 1" in each for each in result.warnings)
    right = evaluate(
        task(home, **changed(home, tmp_path, renumber), model=Finder((0, 1, 2))), None, batch_size=8
    )
    assert not any("the labels may be" in each for each in right.warnings)


def test_categories_that_only_one_side_has_are_named(home: Path) -> None:
    detection = task(home, model=Finder((0, 1, 2)), category_names=["cat", "red dog", "tree"])
    result = evaluate(detection, None, batch_size=8)
    [warning] = [each for each in result.warnings if "annotated categories" in each]
    assert "1 annotated categories are none of the model's: fox" in warning
    assert any("detections of tree" in note for note in detection.notes())


# -- what is refused --------------------------------------------------------------------------------------


class Wrong(Finder):
    """Gives what others take boxes for."""

    def __init__(self, change: Callable[[dict[str, Tensor]], Any]) -> None:
        super().__init__()
        self.change = change

    def _of(self, picture: Tensor) -> Any:
        found = super()._of(picture)
        # Not of the blank pictures that a model is tried on.
        return self.change(found) if picture.max() > 0 else found


def with_boxes(change: Callable[[Tensor], Tensor]) -> nn.Module:
    return Wrong(lambda found: {**found, "boxes": change(found["boxes"])})


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (
            with_boxes(lambda b: torch.cat([b[:, :2], b[:, 2:] - b[:, :2]], 1)),
            "end before they begin.*expected x1, y1, x2, y2",
        ),
        (with_boxes(lambda b: b / 300), "boxes between 0 and 1, expected pixels"),
        (with_boxes(lambda b: b * 4), "boxes whose centre lies outside of their picture"),
        (Wrong(lambda found: {**found, "scores": found["scores"].tolist()}), "expected a list with a dict"),
        (
            Wrong(lambda found: {**found, "scores": found["scores"] / 0}),
            "gave scores that are NaN or infinite, .* first in 0",
        ),
        (Wrong(lambda found: found["boxes"]), "returned .* for a picture, expected a list with a dict"),
        (
            Wrong(lambda found: {**found, "scores": found["scores"][1:]}),
            "returned labels of shape .* for a picture with",
        ),
        (
            Wrong(lambda found: {**found, "labels": found["labels"].float()}),
            "returned labels of shape .* and torch.float32",
        ),
    ],
    ids=["xywh", "unit", "of the input", "lists", "nan", "tensor", "shapes", "float labels"],
)
def test_outputs_that_are_no_boxes_are_refused(home: Path, model: nn.Module, match: str) -> None:
    refused(home, match, model=model)


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


# -- pictures ---------------------------------------------------------------------------------------------


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


def test_the_page_shows_what_was_found_missed_and_not_there(home: Path) -> None:
    """Of each kind its colour, also where an object is taken for another, and boxes end beyond a picture."""
    detection = task(home)
    cat, dog = (0.0, 0.0, 40.0, 40.0), (50.0, 50.0, 30.0, 30.0)
    row = {
        "id": detection.dataset().id(0),
        "index": 0,
        "true_boxes": [cat, dog, (90.0, 90.0, 30.0, 30.0)],
        "true_labels": [3, 7, 12],
        "true_crowds": [False] * 3,
        "boxes": [(0.0, 0.0, 40.0, 38.0), (50.0, 50.0, 80.0, 75.0), (5.0, 99.0, 999.0, 120.0), cat],
        "labels": [3, 12, 7, 3],
        "scores": [0.95, 0.8, 0.6, 0.4],
    }
    colours = {colour for _, colour in detection.show(row).getcolors(1 << 24)}
    assert {(0, 255, 0), (0, 128, 0), (255, 165, 0), (255, 0, 0)} <= colours
    assert detection.facets(row) == {
        "found": ["cat"],
        "missed": ["fox", "red dog"],
        "not there": ["red dog", "fox"],
        "overlap (IoU)": ["0.90 to 1.00", "0.75 to 0.90"],
        "score, not there": ["0.50 to 0.75", "0.75 to 0.90"],
    }
    nothing: dict[str, list[Any]] = {"labels": [], "scores": [], "boxes": []}
    assert detection.facets({**row, **nothing})["missed"] == ["cat", "red dog", "fox"]


def test_a_page_has_both_runs_boxes_and_curves(home: Path, tmp_path: Path) -> None:
    """Pictures that one run has better and worse than the other, with the boxes of both."""
    evaluate(task(home), tmp_path / "a", batch_size=8, by=["site"])
    evaluate(task(home, score_threshold=0.6), tmp_path / "b", batch_size=8, by=["site"])
    result = read_result(tmp_path / "b/result.json")
    page = build(result, tmp_path / "b", task(home), against=[tmp_path / "a"])
    f1 = [
        {row["id"]: row["twice_right"] / row["boxes_of_both"] for row in rows(run) if row["boxes_of_both"]}
        for run in (tmp_path / "a", tmp_path / "b")
    ]
    change = {name: f1[1][name] - f1[0][name] for name in f1[0].keys() & f1[1].keys()}
    of = {
        reason: {card.id for card in page.samples if reason in card.reasons}
        for reason in ("worse:0", "better:0")
    }
    assert of["worse:0"] == {name for name, each in change.items() if each < 0} != set()
    assert of["better:0"] == {name for name, each in change.items() if each > 0}
    for card in page.samples:
        [other] = card.others
        assert (card.loss, other.loss) == (f1[1].get(card.id), f1[0].get(card.id))
        assert card.facets["site"] and len(card.shown) == 1 and len(other.shown) <= 1
    # Equal pictures are shown once.
    assert {len(card.others[0].shown) for card in page.samples} == {0, 1}
    evaluation = coco_evaluation(home / "instances.json", rows(tmp_path / "b"))
    there = [at for at in range(4) if (evaluation.eval["precision"][:, :, at, 0, -1] > -1).all()]
    precision = evaluation.eval["precision"][:, :, there, 0, -1]
    curves = page.curves["precision_by_recall"]
    assert curves["0.75"] == pytest.approx(precision[5].mean(-1))
    assert curves["0.50 to 0.95"] == pytest.approx(precision.mean((0, 2)))
    assert sum(curves["0.50"]) / 101 == pytest.approx(result.metrics["ap50"])


def test_a_comparison_names_thresholds_that_differ(home: Path, tmp_path: Path) -> None:
    for name, threshold in (("a", None), ("b", 0.3)):
        evaluate(task(home, score_threshold=threshold), tmp_path / name, batch_size=8)
    found = dualeval.compare(tmp_path / "a", tmp_path / "b")
    assert found.differs_in == {"score_threshold": [None, 0.3]}
    assert "differs in      score_threshold none -> 0.3" in str(found)


def test_f1_and_confusions_are_of_matches_at_one_overlap(home: Path, tmp_path: Path) -> None:
    result = evaluate(task(home), tmp_path / "out", batch_size=5)
    places = {number: place for place, number in enumerate(CATEGORIES)}
    hits = both = 0
    pairs: dict[tuple[int, int], int] = {}
    for row in rows(tmp_path / "out"):
        taken, objects = set(), [place for place, crowd in enumerate(row["true_crowds"]) if not crowd]
        order = sorted(range(len(row["scores"])), key=lambda place: -row["scores"][place])
        counted = [place for place in order if row["scores"][place] >= 0.5]
        by_hand = []
        for place in counted:
            label, box = row["labels"][place], row["boxes"][place]
            # Boxes of two categories overlap, too: the same category first.
            best = max(
                (
                    each
                    for each in objects
                    if each not in taken and overlap(box, row["true_boxes"][each]) >= 0.5
                ),
                key=lambda each: (row["true_labels"][each] == label, overlap(box, row["true_boxes"][each])),
                default=None,
            )
            if best is not None:
                taken.add(best)
                by_hand.append((places[row["true_labels"][best]], places[label]))
            elif not any(
                crowd and overlap(box, row["true_boxes"][each], crowd=True) >= 0.5
                for each, crowd in enumerate(row["true_crowds"])
            ):
                by_hand.append((4, places[label]))
        by_hand += [(places[row["true_labels"][each]], 4) for each in objects if each not in taken]
        hits += sum(one == other for one, other in by_hand)
        both += sum((one != 4) + (other != 4) for one, other in by_hand)
        for pair in by_hand:
            pairs[pair] = pairs.get(pair, 0) + 1
    assert result.metrics["f1"] == 2 * hits / both
    assert result.intervals["f1"][0] < result.metrics["f1"] < result.intervals["f1"][1]
    matrix: Any = result.metrics["confusion_matrix"]
    assert matrix == {"classes": 5, "entries": [[*pair, count] for pair, count in sorted(pairs.items())]}
    assert result.labels["classes"] == [*CATEGORIES.values(), "nothing"]


def overlap(box: list[float], true: list[float], *, crowd: bool = False) -> float:
    """Intersection over union of x1, y1, x2, y2 and of left, top, width, height."""
    width = min(box[2], true[0] + true[2]) - max(box[0], true[0])
    height = min(box[3], true[1] + true[3]) - max(box[1], true[1])
    both = max(width, 0) * max(height, 0)
    own = (box[2] - box[0]) * (box[3] - box[1])
    return both / (own if crowd else own + true[2] * true[3] - both)


def test_matches_prefer_the_same_category() -> None:
    box = (0.0, 0.0, 10.0, 10.0)
    found = match([box, box], [0.9, 0.8], [2, 1], [box, (0, 0, 10, 9)], [1, 2], [False, False])
    assert found == Matches([(1, 0), (0, 1)], [], [])
    assert match([box], [0.4], [1], [box], [1], [False]) == Matches([], [0], [])
    assert match([box, box], [0.9, 0.9], [1, 2], [box], [1], [True]) == Matches([], [], [])
    assert match([], [], [], [], [], []) == Matches([], [], [])


def test_a_batch_of_one_shape_is_only_stacked() -> None:
    pictures = [torch.rand(3, 4, 5), torch.rand(3, 4, 5)]
    assert torch.equal(padded(pictures), torch.stack(pictures))
    batch = padded([torch.ones(3, 4, 5), torch.ones(3, 2, 7)])
    assert batch.shape == (2, 3, 4, 7)
    assert batch.sum() == 3 * (4 * 5 + 2 * 7)
