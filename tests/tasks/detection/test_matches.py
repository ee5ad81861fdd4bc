"""What cards, F1 and confusions go by, and the page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import dualeval
from dualeval.cli.finished import show
from dualeval.report.page.content import build
from dualeval.report.page.runs import Runs
from dualeval.tasks.detection.matches import Matches, match
from tests.engine.test_evaluator import evaluate
from tests.tasks.detection.jobs import rows, task
from tests.vehicles.coco_data import CATEGORIES, coco_evaluation


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
    _, layers = detection.show(row)
    assert layers == {
        "found": [(0.0, 0.0, 40.0, 40.0, "lime", ""), (0.0, 0.0, 40.0, 38.0, "green", "cat 0.95")],
        "missed": [(90.0, 90.0, 120.0, 120.0, "orange", "fox")],
        "wrong": [
            (5.0, 99.0, 999.0, 120.0, "red", "red dog 0.60"),
            (50.0, 50.0, 80.0, 80.0, "lime", ""),
            (50.0, 50.0, 80.0, 75.0, "red", "fox 0.80"),
        ],
    }
    assert {*layers} < {*detection.colours([])}
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
    runs = Runs.open(tmp_path / "b", [tmp_path / "a"])
    page, result = build(runs, task(home)), runs.rows.result
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
    # The command line lists them, too.
    typed = [str(tmp_path / "b"), "--flips-against", str(tmp_path / "a"), "--worst", "3"]
    lines = CliRunner().invoke(show, typed, catch_exceptions=False).output.splitlines()
    worse = lines.index(f"worse in {typed[0]} than in {typed[2]}: 3 of {len(of['worse:0'])}")
    order = sorted(change, key=lambda name: (change[name], name))
    assert [line.split()[0] for line in lines[worse + 2 : worse + 5]] == order[:3]
    # Of one picture both kinds of boxes are corners there.
    row = next(row for row in rows(tmp_path / "b") if row["true_boxes"] and row["boxes"])
    lines = CliRunner().invoke(show, [typed[0], row["id"]], catch_exceptions=False).output.splitlines()
    (left, top, width, height), corners = row["true_boxes"][0], [round(each, 2) for each in row["boxes"][0]]
    begins = [f"[[{left}, {top}, {left + width}, {top + height}]", f"[{corners}"]
    for name, begin in zip(("true_boxes", "boxes"), begins, strict=True):
        [line] = [each for each in lines if each.startswith(f"{name} (left, top, right, bottom) ")]
        assert line.partition(")")[2].strip().startswith(begin)
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
