"""Which samples of a run are the worst: beside numpy over all rows, in windows and groups of any size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

import dualeval
from dualeval.comparison.compared import Comparison, Gate
from dualeval.comparison.worst import JudgedRows, Listed
from dualeval.engine.folder import stored_rows
from dualeval.errors import UsageError
from dualeval.result import read_result
from tests.comparison.test_comparison import SeededTask, changed, table_of
from tests.engine.test_evaluator import evaluate

COUNT = 500
MISTAKES, LOSSES = Listed("mistake", "", "mistake"), Listed("loss", "", "loss")
# Samples that cannot be read: the rows behind them are not at their number.
BROKEN = (0, 17, 499)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs whose files have row groups of 90, which are read in windows of 40."""
    folder = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("a", "b")):
        task = SeededTask(COUNT, BROKEN, seed=seed)
        evaluate(task, folder / f"{name}-whole", batch_size=32, on_error="skip")
        changed(folder / f"{name}-whole", folder / name, row_group_size=90)
    return folder / "a", folder / "b"


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_rows, "WINDOW_ROWS", 40)


def rows_of(run: Path) -> JudgedRows:
    return JudgedRows(run, read_result(run / "result.json"))


def test_mistakes_and_losses_are_numpy_s(runs: tuple[Path, Path]) -> None:
    rows, table = rows_of(runs[0]), table_of(runs[0])
    wrong = table[(table.target != table.prediction) & table.loss.notna()]
    mistakes = rows.worst(MISTAKES, 20)
    by_hand = wrong.sort_values(["confidence", "index"], ascending=[False, True])
    assert mistakes.of == len(wrong) > 20
    assert mistakes.places == by_hand.index[:20].tolist()
    losses = rows.worst(LOSSES, 20)
    assert losses.of == COUNT - len(BROKEN)
    assert losses.places == table.sort_values(["loss", "index"], ascending=[False, True]).index[:20].tolist()
    of_class = rows.worst(MISTAKES, COUNT, [2, 5])
    assert {*of_class.places} == {*wrong.index[wrong.target.isin([2, 5])]}
    first, *_ = rows.samples(mistakes.places)
    row = table.iloc[mistakes.places[0]]
    assert first.row["id"] == row.id and first.row["top"] == row.top.tolist()
    assert (first.confidence, first.loss, first.correct) == (row.confidence, row.loss, False)
    assert (first.target, first.prediction) == (str(int(row.target)), str(int(row.prediction)))


def test_samples_come_in_the_order_asked_for(runs: tuple[Path, Path]) -> None:
    asked = [401, 3, 89, 90, 91, 250]
    assert [sample.row["index"] for sample in rows_of(runs[0]).samples(asked)] == asked


def test_a_loss_that_is_nan_is_the_worst(runs: tuple[Path, Path], tmp_path: Path) -> None:
    def spoil(table: Any) -> Any:
        losses = table.column("loss").to_numpy().copy()
        there = np.isnan(losses)
        losses[[5, 333]] = np.nan
        column = pyarrow.array(losses, pyarrow.float32(), mask=there)
        return table.set_column(table.schema.get_field_index("loss"), "loss", column)

    rows = rows_of(changed(runs[0], tmp_path / "nan", spoil))
    assert rows.worst(LOSSES, 3).places[:2] == [5, 333]


def test_calibration_is_that_of_ece(runs: tuple[Path, Path]) -> None:
    rows = rows_of(runs[0])
    bins = rows.calibration()
    count = sum(each["count"] for each in bins)
    error = sum(each["count"] * abs(each["accuracy"] - each["confidence"]) for each in bins) / count
    assert count == COUNT - len(BROKEN)
    assert error == pytest.approx(rows.result.metrics["ece"])
    table = table_of(runs[0]).dropna()
    inside = table[(table.confidence > bins[2]["low"]) & (table.confidence <= bins[2]["high"])]
    assert bins[2]["count"] == len(inside)
    assert bins[2]["accuracy"] == pytest.approx((inside.target == inside.prediction).mean())


WEIGHTED = {"column": "v", "weight": "w"}
PERPLEXITY = {"column": "nll", "over": "tokens", "transform": "exp"}


@pytest.mark.parametrize(
    ("columns", "score", "direction", "worst", "right"),
    [
        ({"f1": [0.5, 0.1, 0.9]}, {"column": "f1"}, "higher", [1, 0, 2], None),
        ({"nll": [8.0, 9.0, 1.0], "tokens": [2, 3, 1]}, PERPLEXITY, "lower", [0, 1, 2], None),
        ({"v": [0.0, 0.7, 0.2], "w": [False, True, True]}, WEIGHTED, "higher", [2, 1], None),
        ({"ok": [True, False, True]}, {"column": "ok"}, "higher", None, [1]),
        ({"failed": [True, False, True]}, {"column": "failed"}, "lower", None, None),
        ({"size": [1.0, 2.0, 3.0]}, {"column": "size"}, None, None, None),
    ],
)
def test_the_worst_samples_follow_from_the_scores(
    runs: tuple[Path, Path],
    tmp_path: Path,
    columns: dict[str, Any],
    score: dict[str, Any],
    direction: str | None,
    worst: list[int] | None,
    right: list[int] | None,
) -> None:
    """Tasks without classes: the lowest F1, the highest loss by token, and what is right or wrong alone."""
    ids = {"id": ["x", "y", "z"], "index": [0, 1, 2]}
    table = pyarrow.table({**ids, **columns})
    run = changed(runs[0], tmp_path / "run", lambda _: table, scores={"metric": score})
    directions = {} if direction is None else {"metric": direction}
    rows = JudgedRows(run, replace(rows_of(run).result, directions=directions))
    assert (rows.measure is not None) == (worst is not None)
    assert rows.judges == (right is not None)
    if worst is not None:
        assert rows.worst(LOSSES, 3).places == worst
    if right is not None:
        assert rows.worst(MISTAKES, 3).places == right
    with pytest.raises(UsageError, match="no single class"):
        rows.classes_called("cat")


def test_the_users_columns_name_no_class(runs: tuple[Path, Path], tmp_path: Path) -> None:
    def with_columns(table: pyarrow.Table) -> pyarrow.Table:
        for name in ("target_name", "prediction_name"):
            field = pyarrow.field(name, pyarrow.string(), metadata={"dualeval": "data"})
            table = table.append_column(field, [["mine"] * len(table)])
        return table

    rows = rows_of(changed(runs[0], tmp_path / "run", with_columns))
    assert rows.data_names == ("target_name", "prediction_name")
    [sample] = rows.samples([1])
    assert (sample.target, sample.prediction) == (str(sample.row["target"]), str(sample.row["prediction"]))


def test_of_equal_samples_the_first_come_first(runs: tuple[Path, Path], tmp_path: Path) -> None:
    table = pyarrow.table({"id": [*map(str, range(300))], "index": range(300), "ok": [False] * 300})
    run = changed(runs[0], tmp_path / "run", lambda _: table, scores={"ok": {"column": "ok"}})
    rows = JudgedRows(run, replace(rows_of(run).result, directions={"ok": "higher"}))
    assert rows.worst(MISTAKES, 50) == ([*range(50)], 300)


def test_a_sentence_says_what_a_comparison_has_shown(runs: tuple[Path, Path]) -> None:
    found = dualeval.compare(*runs, metrics=["loss", "top1", "same"])

    def said(verdicts: dict[str, str], *gates: Gate) -> str:
        metrics = {name: replace(found.metrics[name], verdict=verdict) for name, verdict in verdicts.items()}
        changed = replace(found, metrics=metrics, gates=[*gates])
        assert isinstance(changed, Comparison)
        return changed.said_of("runs/b")

    flips = found.metrics["top1"].flips
    assert flips is not None
    count = f"{len(flips.lost) + len(flips.gained)} flips"
    none, same = "no difference shown", "the same on every sample"
    assert (
        said({"loss": "B is better", "top1": none}) == f"runs/b is better in loss; undecided: top1 ({count})"
    )
    both = {"loss": "B is worse", "top1": "B is better", "same": same}
    assert said(both) == f"runs/b is worse in loss; better in top1; {same}: same"
    assert said({"loss": none, "top1": none}) == f"No difference shown: loss, top1 ({count})"
    gate = Gate(metric="top1", margin=0.1, bound=0.2, passed=False)
    assert said({"same": "B is higher"}, gate) == "runs/b is higher in same; gate top1 NOT passed"
