"""What the page of a run says, beside its rows: numpy's and scikit-learn's numbers, and strangers' texts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

import dualeval
from dualeval.comparison.worst import JudgedRows
from dualeval.engine.folder.predictions import COLUMN_OF_DATA
from dualeval.errors import UsageError
from dualeval.metrics.segmentation import COUNTS
from dualeval.report.comparison import shown_difference
from dualeval.report.page.all_rows import AllRows
from dualeval.report.page.content import VERSUS, PageContent, _are_curves, build, limited_by
from dualeval.report.page.folders import short_of, without_folders
from dualeval.report.page.html import render
from dualeval.report.page.rows import columns_of, rows_of
from dualeval.report.page.runs import Runs
from dualeval.report.page.things import Shown, is_same, others_than, things_of
from dualeval.result import read_result
from tests.comparison.conftest import two_runs
from tests.comparison.test_comparison import SeededTask, changed, table_of
from tests.engine.test_evaluator import evaluate
from tests.report import pages
from tests.vehicles.tiny import CLASSES

COUNT = 600
EVIL = ("</script><img src=x onerror=alert(1)>", "\x1b[2J\x1b[31mred\x07", "=cmd|' /C calc'!A0")


class NamedTask(SeededTask):
    """Classes that strangers have named, and samples shown in several ways, by their index modulo 8."""

    def labels_used(self) -> dict[str, Any]:
        return {"classes": [*EVIL, *map(str, range(3, CLASSES))]}

    def show(self, row: Mapping[str, Any]) -> Any:
        large, closed = Image.new("RGB", (4000, 20), (1, 2, 3)), Image.new("RGB", (4, 4))
        closed.close()
        things = [large, [Image.new("RGB", (4, 4)), "a text"], {"id": row["id"], "number": 1}, 7]
        things += [Image.new("RGB", (0, 5)), closed, RuntimeError(f"no picture of {EVIL[0]}"), SystemExit(5)]
        thing = things[row["index"] % 8]
        if isinstance(thing, BaseException):
            raise thing
        return thing


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return two_runs(tmp_path_factory.mktemp("runs"), lambda seed: NamedTask(COUNT, seed=seed))


@pytest.fixture(scope="module")
def page(runs: tuple[Path, Path]) -> PageContent:
    return page_of(runs[1], NamedTask(COUNT), against=[runs[0]])


def page_of(run: Path, task: Any = None, **more: Any) -> PageContent:
    content = build(Runs.open(run, more.pop("against", ())), task, **more)
    return content if more.get("paths") else without_folders(content)


def test_headlines_are_the_result_s(runs: tuple[Path, Path], page: PageContent) -> None:
    result = read_result(runs[1] / "result.json")
    found = {each.name: each for each in page.headlines}
    assert found.keys() == {n for n, value in result.metrics.items() if isinstance(value, float)}
    top1 = found["top1"]
    assert (top1.value, [top1.low, top1.high]) == (result.metrics["top1"], [*result.intervals["top1"]])
    assert (top1.unit, top1.direction) == ("fraction", "higher")
    assert (found["ece"].low, found["ece"].high) == (None, None)


def test_classes_and_confusion_are_scikit_learn_s(runs: tuple[Path, Path], page: PageContent) -> None:
    table = table_of(runs[1])
    precision, recall, f1, support = precision_recall_fscore_support(
        table.target, table.prediction, zero_division=0
    )
    assert page.class_columns[:5] == ["class", "support", "recall", "precision", "f1"]
    for index, row in enumerate(page.class_rows):
        assert row[1:5] == pytest.approx([support[index], recall[index], precision[index], f1[index]])
    assert [row[0] for row in page.class_rows][:3] == [*EVIL] == [*page.confusion_names][:3]
    matrix = np.zeros((CLASSES, CLASSES), int)
    for target, prediction, count in page.confusion:
        matrix[target, prediction] = count
    assert (matrix == confusion_matrix(table.target, table.prediction)).all()


def test_cards_are_the_worst_samples_and_the_flips(runs: tuple[Path, Path], page: PageContent) -> None:
    a, b = map(table_of, runs)
    wrong = b[b.target != b.prediction].sort_values(["confidence", "index"], ascending=[False, True])
    of = {reason: [card.id for card in page.samples if reason in card.reasons] for reason in reasons(page)}
    assert {*of} == {"mistake", "loss", "lost:0", "gained:0"}
    assert {*of["mistake"]} >= {*wrong.id[:60]}
    assert {*of["loss"]} == {*b.sort_values("loss", ascending=False).id[:30]}
    lost = (a.target == a.prediction) & (b.target != b.prediction)
    assert {*of["lost:0"]} <= {*a.id[lost]} and len(of["lost:0"]) == min(60, lost.sum())
    # Flips come first, five of a pair of target and prediction at a time, the most frequent pair first.
    pairs = Counter(zip(b.target[lost], b.prediction[lost], strict=True))
    of_id = {row.id: (row.target, row.prediction) for row in b[lost].itertuples()}
    found = [of_id[each] for each in of["lost:0"]]
    assert [card.id for card in page.samples[: len(found)]] == of["lost:0"]
    assert Counter(found[:5]).most_common(1)[0][1] == min(5, max(pairs.values()))
    assert max(pairs.values()) == pairs[found[0]] and all(
        Counter(found[:60])[pair] for pair, _ in pairs.most_common(12)
    )
    confidence = [*b.set_index("id").confidence[of["lost:0"][: Counter(found[:5])[found[0]]]]]
    assert confidence == sorted(confidence, reverse=True)
    assert (page.against[0].lost, page.samples_total) == (lost.sum(), COUNT)
    assert page.cut is not None and f"most confident mistakes (60 of {len(wrong)})" in page.cut
    assert page.cut.startswith(f"The page shows {len(page.samples)} of {COUNT} samples: ")
    assert page.reasons["lost:0"] == f"right in {page.against[0].name}, wrong in {page.name}"
    assert "here" not in page.cut
    row = wrong.iloc[0]
    [card] = [each for each in page.samples if each.id == row.id]
    assert (card.confidence, card.loss, card.correct) == (row.confidence, row.loss, False)
    names = [*EVIL, *map(str, range(3, CLASSES))]
    assert (card.target, card.prediction) == (names[int(row.target)], names[int(row.prediction)])
    assert card.columns["tokens"] == str(row.tokens)


def values_of(page: PageContent, name: str) -> list[Any]:
    [column] = [each for each in page.rows["columns"] if each["name"] == name]
    places = column.get("values", range(len(column.get("texts", []))))
    return [None if each is None else column["texts"][each] if "texts" in column else each for each in places]


def test_all_rows_of_both_runs_are_in_the_table(runs: tuple[Path, Path], page: PageContent) -> None:
    a, b = map(table_of, runs)
    names = [*EVIL, *map(str, range(3, CLASSES))]
    assert page.rows["of"] == COUNT and values_of(page, "id") == [*b.id] and "gaps" not in page.rows
    assert [card.id for card in page.samples] == [b.id[card.row] for card in page.samples]
    assert values_of(page, "prediction") == [names[each] for each in b.prediction]
    assert values_of(page, "loss") == pytest.approx([*b.loss], rel=1e-3)
    assert values_of(page, "tokens") == [*b.tokens]
    right = ["right" if each else "wrong" for each in a.target == a.prediction]
    assert values_of(page, f"right in {page.against[0].name}") == right
    # Of ids there is one a row: they are searched for.
    chosen = [each["name"] for each in page.rows["columns"] if each.get("choice")]
    assert chosen == ["target", "prediction", "right", "prediction in a", "right in a"]


def test_of_more_rows_than_there_is_room_for_the_worst_are_in_the_table(
    runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualeval.report.page.rows.MOST", 100)
    b, page = table_of(runs[1]), page_of(runs[1], against=[runs[0]])
    kept = {*values_of(page, "id")}
    # A quarter each for mistakes, losses and both kinds of flips.
    assert 50 <= len(kept) <= 100 and page.rows["of"] == COUNT
    assert {*b.sort_values("loss", ascending=False).id[:25]} <= kept
    assert values_of(page, "id") == [each for each in b.id if each in kept]
    assert [*np.cumsum(page.rows["gaps"])] == [at for at, each in enumerate(b.id) if each in kept]
    monkeypatch.setattr("dualeval.report.page.rows._BYTES", 4000)
    assert len(values_of(page_of(runs[1]), "id")) < 100


@pytest.mark.parametrize("classes", [2, 26])
def test_of_masks_the_table_has_the_wrong_pixels_of_each_class(
    runs: tuple[Path, Path], tmp_path: Path, classes: int
) -> None:
    counts = np.random.default_rng(0).integers(0, 1000, (3, 4, classes))
    counts[0] = counts.min(0)
    lists = [pyarrow.array([*of.tolist(), None], pyarrow.list_(pyarrow.int64(), classes)) for of in counts]
    only = pyarrow.table({"id": [*"vwxyz"], "index": range(5), **dict(zip(COUNTS, lists, strict=True))})
    fields: Any = {"scores": {}, "labels": {"classes": ["disc"]}}
    run = changed(runs[0], tmp_path / "run", lambda _: only, **fields)
    page, served = page_of(run), AllRows(columns_of(Runs.open(run))).head()
    names = [each["name"] for each in page.rows["columns"]]
    if classes > 25:
        assert names == ["id"]
        return
    assert names == ["id", "wrong pixels of disc", "wrong pixels of 1"]
    assert all(column["plain"] for table in (page.rows, served) for column in table["columns"][1:])
    right, target, predicted = counts
    wrong = (target - right) + (predicted - right)
    for number, name in enumerate(names[1:]):
        assert values_of(page, name) == [*wrong[:, number], None]


def reasons(page: PageContent) -> set[str]:
    return {reason for card in page.samples for reason in card.reasons}


def test_cards_name_the_groups_of_their_samples(tmp_path: Path) -> None:
    """Numbers that are cut, bools, and crosses of them: each group has as many rows as the result says."""
    by = ["group", "early", "tokens*early"]
    result = evaluate(NamedTask(COUNT), tmp_path / "run", batch_size=32, by=by)
    rows = JudgedRows(tmp_path / "run", result)
    found = Counter(of for sample in rows.samples(range(COUNT)) for of in rows.slices_of(sample.row))
    wanted = {(name, group["label"]): group["samples"] for name in by for group in result.slices[name]}
    assert found == wanted and any("<" in label for _, label in found)
    facets = [card.facets for card in page_of(tmp_path / "run").samples]
    assert {(by, label) for each in facets for by, labels in each.items() for label in labels} <= {*found}
    assert all(each.keys() == {*by} for each in facets)


def test_the_verdict_is_that_of_compare(runs: tuple[Path, Path], page: PageContent) -> None:
    found = dualeval.compare(*runs)
    [against] = page.against
    assert against.verdict == found.said_of(page.name)
    assert (page.name, against.name) == (runs[1].name, runs[0].name)
    rows = {row["name"]: row for row in against.rows}
    assert rows.keys() == found.metrics.keys()
    top1 = found.metrics["top1"]
    assert rows["top1"]["texts"] == shown_difference(top1) and rows["top1"]["p"] == top1.p_holm
    [of_top1] = [each for each in page.headlines if each.name == "top1"]
    assert of_top1.differences == {against.name: shown_difference(top1)}
    assert any(note.startswith("Not compared: ") and "ece" in note for note in against.notes)
    assert page.calibration and sum(each["count"] for each in page.calibration) == COUNT


def test_an_error_in_show_costs_its_samples_card_alone(page: PageContent) -> None:
    kinds = [["picture"], ["picture", "text"], ["table"], *[["error"]] * 5]
    shown = {card.index % 8: card.shown for card in page.samples}
    assert len(shown) == 8
    for card in page.samples:
        assert [thing.kind for thing in card.shown] == kinds[card.index % 8]
    picture, table = shown[0][0].picture, shown[2][0].table
    assert picture is not None and picture.size == (240, 1) and picture.getpixel((0, 0)) == (1, 2, 3)
    assert table["number"] == "1"
    assert shown[3][0].text.startswith("TypeError: show returned a int: expected a PIL picture, a text, a ")
    assert shown[4][0].text == "ValueError: a picture has 0 x 5 pixels"
    assert shown[6][0].text == f"RuntimeError: no picture of {EVIL[0]}"
    assert str(shown[7][0].text).startswith("SystemExit")
    # The default of a task shows nothing.
    assert Shown(kind="text").picture is None
    assert dualeval.Task.show(NamedTask(1), {}) == ()


class LayeredTask(NamedTask):
    """A picture with a mask and boxes, or what only looks like layers."""

    def show(self, row: Mapping[str, Any]) -> Any:
        layers: dict[str, Any] = {
            "mask": Image.new("P", (480, 60)),
            "boxes": [(48, 6, 240, 60, "orange", "cat 0.9")],
        }
        table = {"choices": ["a", "b"], "none": []}
        under = Image.new("RGB", (480, 60))
        things = [
            [under, layers],
            [under, table],
            [under, {}],
            [layers],
            [under, {"boxes": [(1, 2, 3, 4, "no", "")]}],
        ]
        return things[row["index"]]


def test_layers_lie_over_the_picture_before_them() -> None:
    found = [things_of(LayeredTask(1), {"index": index}) for index in range(5)]
    [shown] = found[0]
    assert shown.picture is not None and shown.picture.size == (240, 30)
    mask = shown.layers["mask"]
    assert isinstance(mask, Image.Image) and (mask.mode, mask.size) == ("RGBA", (240, 30))
    assert shown.layers["boxes"] == ((0.1, 0.1, 0.5, 1.0, "#ffa500", "cat 0.9"),)
    assert [each.kind for each in found[1]] == ["picture", "table"]
    assert found[1][1].table == {"choices": "['a', 'b']", "none": "[]"}
    assert [each.kind for each in found[2]] == ["picture"] and not found[2][0].layers
    assert [each.kind for each in found[3]] == ["table"]
    assert found[4][0].text.startswith("ValueError: unknown color")
    assert is_same(shown, things_of(LayeredTask(1), {"index": 0})[0]) and not is_same(shown, found[2][0])


def test_of_an_answer_the_other_run_shows_what_differs() -> None:
    own = (Shown(kind="table", table={"prompt": "2 + 2", "answer": "5"}), Shown(kind="text", text="x"))
    other = (Shown(kind="table", table={"prompt": "2 + 2", "answer": "4"}), own[1])
    assert others_than(own, other) == (Shown(kind="table", table={"answer": "4"}),)
    assert others_than(own, own) == ()


def test_of_the_same_tokens_the_other_run_shows_the_difference() -> None:
    def show(*losses: float, texts: tuple[str, ...] = ("a", " b")) -> list[Shown]:
        return [Shown(kind="tokens", text="".join(texts), tokens=(*zip(texts, losses, strict=True),))]

    [one], [other], plain = show(1.0, 2.0), show(1.5, 2.0), [Shown(kind="text", text="a b")]
    assert others_than([one], [other]) == (replace(other, beside=(1.0, 2.0)),)
    assert others_than([one], [one]) == others_than([one], plain) == ()
    # Of other tokens, and beside a text without losses, those of the other run.
    divided = show(1.0, 1.0, 1.0, texts=("a", " ", "b"))
    assert others_than([one], divided) == (*divided,) and others_than(plain, [other]) == (other,)

    class Task:
        def show(self, row: Any) -> Any:
            return [[("a", 1), (" b", 2.0)]] if row["index"] else [[("a",)]]

    assert things_of(Task(), {"index": 1}) == (one,)
    assert things_of(Task(), {"index": 0})[0].kind == "error"


def test_a_run_without_classes_has_a_page(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """What is not there is empty: also of a result of an earlier version, without scores."""
    import pyarrow

    only = pyarrow.table({"id": ["x", "y"], "index": [0, 1], "length": [1.5, 2.5]})
    without: Any = {key: {} for key in ("nonfinite", "scores", "directions", "units", "labels")}
    fields: Any = {**without, "metrics": {"length": 2.0, "confusion_matrix": None}}
    run = changed(runs[0], tmp_path / "run", lambda _: only, **fields)
    result = dualeval.Result(**{**vars(read_result(runs[0] / "result.json")), **fields})
    found = build(Runs(name="run", rows=JudgedRows(run, result), others={}))
    assert (found.samples, found.class_rows, found.confusion, found.calibration) == ([], [], [], [])
    assert found.cut is None and found.against == []
    with pytest.raises(UsageError):
        page_of(runs[0], against=[tmp_path / "nothing"])


@pytest.mark.parametrize(
    ("ranks", "setup", "says"),
    [
        ([{"evaluate": 4.0, "data": 3.0, "compute": 1.0}], 1.0, "waiting for samples to be read (75 %)."),
        (
            [{"evaluate": 2.0, "compute": 2.0, "meet": 2.0}, {"evaluate": 4.0, "compute": 4.0}],
            1.0,
            "the forward pass (75 %).",
        ),
        ([{"evaluate": 4.0, "look": 3.0}], 6.0, "; preparation took longer, 6.00 of 10.00 s in all."),
        ([{"evaluate": 1.0, "meet": 9.0}], 1.0, "waiting for other ranks (90 %)."),
    ],
)
def test_a_sentence_says_what_limited_the_run(ranks: list[dict[str, float]], setup: float, says: str) -> None:
    timing = {"ranks": ranks, "evaluate_s": 4.0, "setup_s": setup, "total_s": 4.0 + setup}
    found = limited_by(timing)
    assert found.startswith("The largest part of the 4.00 s of evaluation went into ")
    assert found.endswith(says)
    limit = {"text": "waited 75 % of the time for data: ..."}
    assert limited_by({**timing, "limited_by": limit}).endswith(
        ". The run waited 75 % of the time for data: ...."
    )
    assert limited_by({"total_s": 1.0, "setup_s": 1.0, "evaluate_s": 0.0}) == ""


def test_a_sample_that_the_other_run_could_not_read_has_a_card_without_it(tmp_path: Path) -> None:
    evaluate(NamedTask(40), tmp_path / "whole", batch_size=8)
    evaluate(NamedTask(40, [3]), tmp_path / "part", batch_size=8, on_error="skip")
    data: dict[str, Any] = {"data": read_result(tmp_path / "whole/result.json").data}
    changed(tmp_path / "part", tmp_path / "same", lambda rows: rows, **data)
    page = page_of(tmp_path / "whole", against=[tmp_path / "same"])
    others = {card.index: card.others for card in page.samples}
    assert others[3] == () and all(len(each) == 1 for index, each in others.items() if index != 3)
    [right] = [each for each in page.rows["columns"] if each["name"].startswith("right in ")]
    assert right["values"].index(None) == 3


def test_values_that_are_no_curves_are_not_drawn() -> None:
    curve = {"0.50": [1.0, 0.5]}
    assert _are_curves("mask_precision_by_recall", curve) and not _are_curves("other", curve)
    for value in (0.5, [1.0, 0.5], {}, {"a": [1.0]}, {"a": {"b": [1.0, 0.5]}}, {"a": ["x", "y"]}):
        assert not _are_curves("my_precision_by_recall", value)


def test_a_page_names_no_folder_of_the_machine(runs: tuple[Path, Path]) -> None:
    task = NamedTask(COUNT)
    task.show = lambda row: (_ for _ in ()).throw(OSError("/data/raw/a b.png: no such file"))  # type: ignore[method-assign]
    notes = ["read from '/home/me/val/x.csv' and https://host/a/b", "top/bottom 3/4"]
    notes += ["weights …ome/me/a.pt -> …me/b.pt"]  # as of options that are cut
    command = f"dualeval run --data {runs[1]}/data.csv --out ~/runs/b"
    found = page_of(runs[1], task, against=[runs[0]], command=command, notes=notes)
    assert found.warnings[-3:] == [
        "read from '…/x.csv' and https://host/a/b",
        "top/bottom 3/4",
        "weights …/a.pt -> …/b.pt",
    ]
    assert dict(found.provenance)["command to reproduce"] == "dualeval run --data …/data.csv --out ~/runs/b"
    assert not {"folder", "job file"} & {*dict(found.provenance)}
    assert {card.shown[0].text for card in found.samples} == {"OSError: …/a b.png: no such file"}
    assert "/data/raw" not in str(found) and str(runs[1]) not in str(replace(found, against=()))
    # A group's name is one in the comparison, too.
    plain = pages.content()
    of_file = {"file": {"/data/raw/a.png": {"top1": (1.0, "", "")}}}
    named = replace(
        plain,
        slices={"file": [pages.group("/data/raw/a.png", 1)]},
        against=[replace(plain.against[0], slices=of_file)],
    )
    short = without_folders(named)
    assert (
        [group["label"] for group in short.slices["file"]]
        == [*short.against[0].slices["file"]]
        == ["…/a.png"]
    )
    whole = page_of(runs[1], task, command=command, paths=True)
    assert dict(whole.provenance)["folder"] == str(runs[1]) and str(runs[1]) in str(whole)


def test_paths_without_their_folders_do_not_stand_for_each_other() -> None:
    paths = [
        "/x/siteA/1.png",
        "/x/siteB/1.png",
        "/x/siteB/2.png",
        "val (copy)/cat/0.png",
        "/1.png",
        "…/2.png",
    ]
    assert [*short_of(paths).values()] == [
        *("…/siteA/1.png", "…/siteB/1.png", "…/siteB/2.png", "val (copy)/cat/0.png", "…/1.png", "…/2.png")
    ]
    plain = pages.content(2)
    sites, by = ["/a/x/one", "/b/x/one"], ("site", "site*sex")
    labels = {"site": sites, "site*sex": [f"{each} * f" for each in sites]}
    differences = {
        of: {label: {"top1": (at, "", "")} for at, label in enumerate(labels[of], start=1)} for of in by
    }
    short = without_folders(
        replace(
            plain,
            rows={"of": 2, "columns": [{"name": "id", "texts": paths[:2]}]},
            samples=[replace(each, id=name) for each, name in zip(plain.samples, paths, strict=False)],
            slices={of: [pages.group(label, 1) for label in labels[of]] for of in by},
            against=[replace(plain.against[0], slices=differences)],
            warnings=["of val (copy)/cat/0.png and (/home/me/x.png)"],
        )
    )
    ids = ["…/siteA/1.png", "…/siteB/1.png"]
    assert [each.id for each in short.samples] == short.rows["columns"][0]["texts"] == ids
    for of, behind in (("site", ""), ("site*sex", " * f")):
        wanted = {f"…/a/x/one{behind}": 1, f"…/b/x/one{behind}": 2}
        found = short.against[0].slices[of]
        assert {label: each["top1"][0] for label, each in found.items()} == wanted
        assert [group["label"] for group in short.slices[of]] == [*wanted]
    assert short.warnings == ["of val (copy)/cat/0.png and (…/x.png)"]


def test_numbers_and_texts_of_the_table_are_those_that_are_found(tmp_path: Path) -> None:
    evaluate(SeededTask(40), tmp_path / "run", batch_size=8)
    long = [f"{'x' * 70} {'cat' if at % 2 else 'dog'}" for at in range(40)]
    kept: dict[str, list[Any]] = {
        "key": [2**60 + at for at in range(40)],
        "lat": [52.52 + at * 1e-6 for at in range(40)],
    }

    def kept_too(table: Any) -> Any:
        for name, values in {**kept, "text": long}.items():
            array = pyarrow.array(values)
            table = table.append_column(pyarrow.field(name, array.type, metadata=COLUMN_OF_DATA), array)
        losses = table.column("loss").to_pylist()
        losses[3:6] = [float("nan"), float("inf"), 1.23456]
        place = table.schema.get_field_index("loss")
        return table.set_column(
            place, table.schema.field("loss"), pyarrow.array(losses, table.column("loss").type)
        )

    changed(tmp_path / "run", tmp_path / "kept", kept_too)
    page = page_of(tmp_path / "kept")
    assert values_of(page, "loss")[3:6] == ["nan", "inf", pytest.approx(1.23456, abs=1e-7)]
    assert values_of(page, "key") == [str(each) for each in kept["key"]]
    assert values_of(page, "lat") == pytest.approx(kept["lat"], abs=1e-7)
    assert values_of(page, "text") == long and "cut" not in page.rows
    table = AllRows(columns := columns_of(runs := Runs.open(tmp_path / "kept")))
    at = [each.name for each in columns].index("loss")
    for way in (1, -1):
        query = json.dumps({"search": "", "tests": [[at, 1, None]], "sorted": [at, way]})
        found = [row[0] for row in table.rows(query, 0, 500)["rows"]]
        assert {*found[::-way][:2]} == {3, 4}
    # Texts for which a page has no room are cut before rows are left out, and it says so.
    wide = [
        replace(each, texts=pyarrow.array(["y" * 200_000] * 40)) if each.name == "text" else each
        for each in columns
    ]
    cut = rows_of(wide, runs.rows)
    assert cut["cut"] == 60 and len(cut["columns"][0]["texts"]) == 40
    assert "first 60 letters of a text" in render(pages.content(rows=cut))


def test_classes_that_share_a_name_have_their_own_differences(tmp_path: Path) -> None:
    class Twins(SeededTask):
        def labels_used(self) -> dict[str, Any]:
            return {"classes": ["crane"] * 2 + [*map(str, range(2, CLASSES))]}

    a, b = two_runs(tmp_path, lambda seed: Twins(200, seed=seed))
    columns, one, other = page_of(b, against=[a]).class_columns, page_of(b, against=[a]), page_of(a)
    recall, difference = columns.index("recall"), columns.index(f"recall{VERSUS}a")
    for row, theirs in zip(one.class_rows, other.class_rows, strict=True):
        assert row[difference] == pytest.approx(row[recall] - theirs[recall])


def test_a_wrong_pixel_of_a_large_picture_is_seen() -> None:
    wrong = Image.new("RGBA", (2000, 1000))
    wrong.putpixel((1001, 501), (255, 255, 255, 255))

    class OfMask:
        def show(self, row: Mapping[str, Any]) -> Any:
            return [Image.new("RGB", wrong.size), {"wrong": wrong}]

    [shown] = things_of(OfMask(), {})
    small = shown.layers["wrong"]
    assert isinstance(small, Image.Image) and small.size == (240, 120)
    assert np.count_nonzero(np.asarray(small)[..., 3]) == 1


def test_provenance_can_be_typed_and_compared(runs: tuple[Path, Path], page: PageContent) -> None:
    result = read_result(runs[1] / "result.json")
    found = dict(page.provenance)
    assert found["metrics_digest"] == result.metrics_digest
    assert found["samples_digest"] == result.samples_digest
    assert Path(dict(page_of(runs[1], paths=True).provenance)["job file"]).is_file()
    assert f"torch {result.versions['torch']}" in found["versions"]
    assert not any("command" in name for name in found)
    assert ("command to reproduce", "dualeval run") in page_of(runs[1], command="dualeval run").provenance
