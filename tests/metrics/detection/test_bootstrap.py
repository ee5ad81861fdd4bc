"""Figures of weighted images, and their intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dualeval.metrics import AveragePrecision
from dualeval.metrics.detection.bootstrap import WeightedFigures, interval, resamples
from dualeval.metrics.detection.figures import Figure
from tests.metrics.detection.test_average_precision import KINDS, metric_of
from tests.vehicles.made_coco import made_coco


def mean(figures: dict[str, Any], key: str) -> float:
    return float(np.nanmean(figures[key][:, 0]))


@KINDS
@pytest.mark.parametrize("seed", range(2))
def test_equal_weights_give_the_figures_of_pycocotools(kind: str, seed: int) -> None:
    made = made_coco(kind, seed=seed, images=40)
    metric = metric_of(made)
    evaluation = metric.evaluated(made.columns())
    found = WeightedFigures(evaluation, metric.figures).of(np.ones((40, 1)))
    for key, figure in metric.figures.items():
        assert mean(found, key) == pytest.approx(figure.of(evaluation), abs=1e-12)


def test_recalls_that_end_at_a_hundredth_count_as_in_pycocotools() -> None:
    """57 of 100 is 0.57, and pycocotools' list has 0.5700000000000001 there."""
    boxes = np.tile([[0.0, 0.0, 10.0, 10.0]], (100, 1, 1))
    labels = np.ones((100, 1), np.int64)
    for right in (7, 14, 28, 29, 55, 56, 57, 58):
        found = boxes + np.where(np.arange(100) < right, 0.0, 500.0)[:, None, None]
        columns = {"boxes": found, "scores": np.linspace(1, 0.5, 100)[:, None], "labels": labels}
        columns |= {"true_boxes": boxes, "true_labels": labels}
        metric = AveragePrecision({1: "a"}, bootstrap=0)
        weighted = WeightedFigures(metric.evaluated(columns), metric.figures).of(np.ones((100, 1)))
        assert mean(weighted, "ap") == pytest.approx(metric.compute(columns).values["ap"], abs=1e-12)


@KINDS
def test_weights_are_copies_of_images(kind: str) -> None:
    """Scores without ties: the order of equal ones is that of the images, and copies lie elsewhere."""
    made = made_coco(kind, images=12)
    draw = np.random.default_rng(1)
    for each in made.detections:
        each["score"] = float(draw.random())
    metric = metric_of(made)
    weights = draw.integers(0, 4, 12)
    found = WeightedFigures(metric.evaluated(made.columns()), metric.figures).of(
        weights[:, None].astype(float)
    )
    copies = [image for image, weight in zip(made.images, weights, strict=True) for _ in range(weight)]
    again = metric.evaluated(made.columns(copies))
    for key, figure in metric.figures.items():
        assert mean(found, key) == pytest.approx(figure.of(again), abs=1e-12), key


def test_the_same_seed_draws_the_same_and_clusters_stay_together() -> None:
    units = np.array([0, 0, 1, 2, 2, 2])
    pieces = [np.concatenate([*resamples(250, 3, units)], axis=1) for _ in range(2)]
    assert pieces[0].shape == (6, 250) and (pieces[0] == pieces[1]).all()
    assert (pieces[0][0] == pieces[0][1]).all() and (pieces[0][3] == pieces[0][5]).all()
    assert (pieces[0][[0, 2, 3]].sum(axis=0) == 3).all()


def test_intervals_hold_the_figure_and_say_where_few_images_decide() -> None:
    made = made_coco(images=80)
    metric = metric_of(made, bootstrap=200)
    measured = metric.compute(made.columns())
    assert measured.values == metric_of(made, bootstrap=0).compute(made.columns()).values
    assert {*measured.intervals} == {*metric.figures}
    for key, (low, high) in measured.intervals.items():
        assert 0 < low < measured.values[key] < high < 1  # type: ignore[operator]
    assert metric.compute(made.columns()) == measured
    few = metric.compute(made.columns(made.images[:12])).rough
    assert "fewer than 100 it may be too short: evaluate more images" in few["ap"]


def test_a_figure_that_no_resample_changes_has_no_interval() -> None:
    boxes, labels = np.tile([[0.0, 0.0, 10.0, 10.0]], (20, 1, 1)), np.ones((20, 1), np.int64)
    columns: dict[str, Any] = {"boxes": boxes, "scores": np.full((20, 1), 0.5), "labels": labels}
    columns |= {"true_boxes": boxes, "true_labels": labels}
    perfect = AveragePrecision({1: "a"}, bootstrap=50).compute(columns)
    assert perfect.values["ap"] == 1 and not perfect.intervals
    made = made_coco(images=20)
    empty = [each for each in made.images if not any(a["image_id"] == each for a in made.annotations)]
    assert not metric_of(made, bootstrap=50).compute(made.columns(empty)).intervals


def test_a_large_spread_has_no_end_beyond_0_and_1() -> None:
    made = made_coco(images=3)
    for each in metric_of(made, bootstrap=100).resampled(made.columns()).values():
        if (found := interval(each)) is not None:
            assert 0 <= found[0][0] <= each.value <= found[0][1] <= 1  # type: ignore[operator]


def test_the_metric_is_made_again_of_its_fingerprint() -> None:
    metric = AveragePrecision(
        {3: "a"}, iou_type="keypoints", truth=["boxes", "labels", "keypoints"], sigmas=[0.1]
    )
    again = AveragePrecision.of_fingerprint(metric.fingerprint())
    assert vars(again) == vars(metric)
    assert metric.figures["keypoint_ap50"] == Figure("precision", 0, 0, 0)
