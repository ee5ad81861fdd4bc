"""Average precision: the figures of pycocotools in one process, to the bit, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualeval.columns.ragged import Ragged, Text, to_rows
from dualeval.errors import UsageError
from dualeval.metrics import AveragePrecision
from tests.vehicles.made_coco import CATEGORIES, MadeCoco, made_coco

TRUTH = {
    "bbox": ("boxes", "labels", "areas", "crowds"),
    "segm": ("masks", "labels", "areas", "crowds"),
    "keypoints": ("boxes", "labels", "keypoints", "areas", "crowds"),
}
KINDS = pytest.mark.parametrize("kind", TRUTH)


def metric_of(made: MadeCoco, **options: Any) -> AveragePrecision:
    return AveragePrecision(
        made.categories, iou_type=made.kind, truth=TRUTH[made.kind], true_format="xywh", **options
    )


def official(evaluation: Any) -> list[float | None]:
    return [None if each == -1 else each for each in evaluation.stats.tolist()]


@KINDS
@pytest.mark.parametrize("seed", range(3))
def test_figures_are_those_of_pycocotools_to_the_bit(kind: str, seed: int, tmp_path: Path) -> None:
    made = made_coco(kind, seed=seed)
    metric = metric_of(made)
    measured = metric.compute(made.columns())
    assert tuple(measured.values) == metric.keys
    figures = [measured.values[key] for key in metric.figures]
    assert figures == official(made.reference(tmp_path))
    assert len(figures) == (10 if kind == "keypoints" else 12)
    assert 0.02 < figures[0] < 0.98  # type: ignore[operator]
    assert metric.keys[0] == metric.name


def test_keys_are_those_of_coco() -> None:
    keys = AveragePrecision({1: "a"}).keys
    sizes = ("small", "medium", "large")
    assert keys == (
        *("ap", "ap50", "ap75", *(f"ap_{size}" for size in sizes)),
        *("ar1", "ar10", "ar100", *(f"ar_{size}" for size in sizes)),
        *("by_class", "precision_by_recall"),
    )
    assert AveragePrecision({1: "a"}, iou_type="segm", truth=("masks", "labels")).name == "mask_ap"


def test_classes_have_their_own_figures(tmp_path: Path) -> None:
    made = made_coco(seed=4)
    found: Any = metric_of(made).compute(made.columns()).values["by_class"]
    precision = made.reference(tmp_path).eval["precision"]
    assert [*found] == [*CATEGORIES.values()]
    assert found["car"]["ap"] == precision[:, :, 1, 0, -1].mean()
    assert found["car"]["ap50"] == precision[0, :, 1, 0, -1].mean()
    assert (found["unseen"]["ap"], found["unseen"]["annotations"]) == (None, 0)
    cars = [each for each in made.annotations if each["category_id"] == 3 and not each["iscrowd"]]
    assert found["car"]["annotations"] == len(cars)
    assert found["car"]["detections"] == sum(each["category_id"] == 3 for each in made.detections)


@pytest.mark.parametrize("most", [1, 5, 300])
def test_other_limits_have_a_precision_too(most: int, tmp_path: Path) -> None:
    made = made_coco(seed=1, false=30)
    metric = metric_of(made, max_detections=most)
    values = metric.compute(made.columns()).values
    evaluation = made.reference(tmp_path, metric.limits).eval
    assert metric.limits == {1: [1], 5: [1, 5], 300: [1, 10, 300]}[most]
    for key, table in (("ap", "precision"), (f"ar{most}", "recall")):
        counted = evaluation[table][..., 0, -1]
        assert values[key] == counted[counted > -1].mean()


def test_one_class_and_images_of_which_none_has_an_annotation(tmp_path: Path) -> None:
    made = made_coco(seed=2, categories={4: "thing"})
    metric = metric_of(made)
    assert [metric.compute(made.columns()).values[key] for key in metric.figures] == official(
        made.reference(tmp_path)
    )
    empty = [
        image for image in made.images if not any(each["image_id"] == image for each in made.annotations)
    ]
    values = metric.compute(made.columns(empty)).values
    assert {values[key] for key in metric.figures} == {None}


def test_a_model_that_finds_nothing_has_0() -> None:
    made = made_coco(seed=2)
    columns = made.columns()
    none = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.int64)}
    lengths = torch.zeros(len(made.images), dtype=torch.int64)
    columns |= {name: to_rows(Ragged(values, lengths)) for name, values in none.items()}
    values = metric_of(made).compute(columns).values
    assert (values["ap"], values["ar100"]) == (0.0, 0.0)


def test_as_many_detections_of_each_image_need_no_ragged_column() -> None:
    draw = np.random.default_rng(0)
    corners = draw.uniform(0, 50, (6, 4, 2))
    columns: dict[str, Any] = {
        "boxes": np.concatenate([corners, corners + draw.uniform(5, 60, (6, 4, 2))], axis=2),
        "scores": draw.random((6, 4)),
        "labels": draw.integers(1, 3, (6, 4)),
    }
    columns |= {"true_boxes": columns["boxes"], "true_labels": columns["labels"]}
    assert AveragePrecision({1: "a", 2: "b"}).compute(columns).values["ap"] == pytest.approx(1)


def ragged(values: Any, dtype: torch.dtype = torch.float64) -> Any:
    return to_rows(Ragged(torch.tensor(values, dtype=dtype), torch.tensor([0, len(values)])))


def two_images(**changed: Any) -> dict[str, Any]:
    """The first one is empty, and the second has two boxes."""
    boxes, labels = ragged([[0, 0, 5, 5], [1, 1, 9, 9]]), ragged([1, 2], torch.int64)
    columns = {"boxes": boxes, "scores": ragged([0.5, 0.25]), "labels": labels}
    return {**columns, "true_boxes": boxes, "true_labels": labels, **changed}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"scores": ragged([0.5, float("nan")])}, r"column 'scores' has nan in image 1 .*1 such of 2"),
        ({"labels": ragged([1, 0], torch.int64)}, r"'labels' has 0 in image 1 .*the id of a category: 1, 2"),
        ({"true_labels": ragged([1, 9], torch.int64)}, r"column 'true_labels' has 9"),
        ({"boxes": ragged([[0, 0, 5, 5], [10, 10, 5, 50]])}, r"has \[10.0, 10.0, 5.0, 50.0\].*left, top"),
        ({"boxes": ragged([[0, 0, 5, 5]])}, "column 'boxes' has 1 entries in image 1, and 'labels' 2"),
        ({"boxes": ragged([[0, 0, 5], [1, 1, 9]])}, r"entries of shape \(3,\), expected 4 numbers"),
        ({"boxes": ragged([[0, 0, 5, 5], [0, 0, 5, float("inf")]])}, "'boxes' has .*expected finite numbers"),
    ],
)  # fmt: skip
def test_what_would_count_as_0_is_refused(changed: dict[str, Any], said: str) -> None:
    metric = AveragePrecision({1: "a", 2: "b"})
    assert metric.compute(two_images()).values["ap"] == pytest.approx(1)
    with pytest.raises(UsageError, match=said):
        metric.compute(two_images(**changed))


def test_masks_of_another_size_or_number_are_refused() -> None:
    made = made_coco("segm", images=4)
    metric, columns = metric_of(made), made.columns()
    smaller = [text.replace("240 320", "120 320") for text in columns["masks"]]
    with pytest.raises(UsageError, match=r"masks of image \d are 120x320 .*true masks 240x320"):
        metric.compute({**columns, "masks": to_rows(Text(smaller))})
    with pytest.raises(UsageError, match=r"column 'masks' has 0 masks in image 0, and 'labels' \d+"):
        metric.compute({**columns, "masks": to_rows(Text(["240 320", *[*columns["masks"]][1:]]))})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"categories": {}}, "names by id"),
        ({"categories": {1: "a", 2: "a"}}, "each name once"),
        ({"iou_type": "box"}, "expected one of bbox, segm, keypoints"),
        ({"iou_type": "segm"}, "expected masks, too, for segm"),
        ({"truth": ("boxes",)}, "expected labels, too, for bbox"),
        ({"max_detections": 0}, "at least 1"),
        ({"true_format": "cxcywh"}, "expected one of xyxy, xywh"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        AveragePrecision(**{"categories": {1: "a"}, **options})
