"""The task detection: pycocotools' figures to the last bit, families of networks, and categories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from pycocotools import mask
from torch import Tensor, nn

from dualeval.tasks.detection.masks import runs_of, true_code
from dualeval.tasks.detection.pictures import padded
from tests.engine.test_evaluator import evaluate
from tests.tasks.conftest import check_doors
from tests.tasks.detection.jobs import KEYS, Wrong, changed, refused, rows, task, values
from tests.vehicles.coco_data import CATEGORIES, SIGMAS, Finder, figures
from tests.vehicles.made_detectors import FAMILIES, write_detector

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


def test_masks_as_logits_are_refused(home: Path) -> None:
    model = Wrong(lambda found: {**found, "masks": found["masks"] * 8 - 4})
    refused(
        home, "returned masks from -4 to 3.2, expected bools or probabilities", model=model, iou_type=["segm"]
    )


def test_scores_that_depend_on_their_batch_are_a_warning(home: Path) -> None:
    """Ragged columns are compared with those in another batch, however detections are ordered."""

    class OfBatch(Finder):
        def forward(self, pictures: list[Tensor]) -> list[dict[str, Tensor]]:
            part = 1 / (1 + len(pictures))
            return [
                {**each, "scores": 0.6 + 0.1 * each["scores"] - part / 10}
                for each in super().forward(pictures)
            ]

    class Reordered(Finder):
        def forward(self, pictures: list[Tensor]) -> list[dict[str, Tensor]]:
            found = super().forward(pictures)
            return (
                [{name: each[name].flip(0) for name in each} for each in found]
                if len(pictures) > 2
                else found
            )

    for model, warned in ((OfBatch(), True), (Reordered(), False)):
        result = evaluate(task(home, model=model), None, batch_size=8)
        assert any("the numbers depend on the batch size" in each for each in result.warnings) == warned


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


def resized(size: tuple[int, int] | None = None) -> Any:
    """Preprocessing that makes pictures half as large, or of one size."""

    def prepare(picture: Image.Image) -> Tensor:
        wanted = size or (picture.width // 2, picture.height // 2)
        small = picture.resize(wanted, Image.Resampling.NEAREST)
        return torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1) / 255

    return prepare


def test_pixels_of_which_size_is_asked_where_it_decides(home: Path, tmp_path: Path) -> None:
    refused(
        home,
        "makes 96 x 96 pixels of 000.png, .* --boxes-in picture, or --boxes-in input",
        preprocessing=resized((96, 96)),
    )
    refused(
        home,
        "another shape: type --boxes-in stretched.*letterbox",
        preprocessing=resized((96, 96)),
        boxes_in="input",
    )
    refused(home, "the model is given whole pictures. Leave it out", boxes_in="input")
    stretched = evaluate(
        task(home, preprocessing=resized((300, 300)), boxes_in="stretched"), None, batch_size=8
    )
    half = evaluate(task(home, preprocessing=resized(), boxes_in="input"), None, batch_size=8)
    right: Any = (stretched.metrics["ap50"], half.metrics["ap50"])
    assert min(right) > 0.5
    wrong = evaluate(task(home, preprocessing=resized(), boxes_in="picture"), None, batch_size=8)
    assert wrong.metrics["ap50"] < 0.1  # type: ignore[operator]


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
    [warning] = [each for each in result.warnings if "the labels may stand for" in each]
    assert "objects of cat, 9 are called red dog" in warning and "are called bird" in warning
    right = evaluate(
        task(home, **changed(home, tmp_path, renumber), model=Finder((0, 1, 2))), None, batch_size=8
    )
    assert not any("the labels may" in each for each in right.warnings)


def test_names_in_another_order_are_a_warning(home: Path) -> None:
    for kind in ("bbox", "segm"):
        given = {"model": Finder((0, 1, 2)), "iou_type": [kind]}
        result = evaluate(task(home, **given, category_names="fox,cat,red dog"), None, batch_size=8)
        assert any("are called fox" in each for each in result.warnings)
        result = evaluate(task(home, **given, category_names="cat,red dog,fox"), None, batch_size=8)
        assert not any("are called" in each for each in result.warnings)


def test_a_model_that_calls_the_rare_what_is_frequent_is_no_warning(home: Path) -> None:
    """Cats and dogs are both called dogs: a weak model, no mistake of names."""
    result = evaluate(task(home, model=Finder((7, 7, 12))), None, batch_size=8)
    assert not any("are called" in each for each in result.warnings)


def test_categories_that_only_one_side_has_are_named(home: Path) -> None:
    detection = task(home, model=Finder((0, 1, 2)), category_names=["cat", "red dog", "tree"])
    result = evaluate(detection, None, batch_size=8)
    [warning] = [each for each in result.warnings if "annotated categories" in each]
    assert "1 annotated categories are none of the model's: fox" in warning
    assert any("detections of tree" in note for note in detection.notes())


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


def test_a_batch_of_one_shape_is_only_stacked() -> None:
    pictures = [torch.rand(3, 4, 5), torch.rand(3, 4, 5)]
    assert torch.equal(padded(pictures), torch.stack(pictures))
    batch = padded([torch.ones(3, 4, 5), torch.ones(3, 2, 7)])
    assert batch.shape == (2, 3, 4, 7)
    assert batch.sum() == 3 * (4 * 5 + 2 * 7)
