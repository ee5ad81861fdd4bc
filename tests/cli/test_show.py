"""``dualeval show``: lists, classes, flips, and what strangers' names may not do to a terminal or a sheet."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from click.testing import CliRunner
from PIL import Image

import dualeval
from dualeval.cli.finished import show
from dualeval.engine.folder.predictions import COLUMN_OF_DATA
from dualeval.errors import UsageError
from dualeval.messages import csv_cell, printable, printable_lines
from dualeval.metrics import Mean, Metric, RowMetric
from tests.comparison.test_comparison import SeededTask, changed, table_of
from tests.engine.test_evaluator import evaluate
from tests.report.test_page_content import COUNT, EVIL, NamedTask, runs
from tests.vehicles.tiny import TinyDataset

__all__ = ["runs"]  # a fixture


def typed(*words: object) -> list[str]:
    done = CliRunner().invoke(show, [str(word) for word in words])
    if done.exception is not None:
        raise done.exception
    return done.output.splitlines()


def test_show_lists_the_worst_mistakes_and_losses(runs: tuple[Path, Path]) -> None:
    table = table_of(runs[0])
    wrong = table[table.target != table.prediction].sort_values("confidence", ascending=False)
    lines = typed(runs[0], "--worst", 4)
    assert lines[0] == f"most confident mistakes: 4 of {len(wrong)}"
    assert lines[1].split() == ["id", "target", "prediction", "confidence", "loss"]
    assert [line.split()[0] for line in lines[2:6]] == [*wrong.id[:4]]
    assert lines[7] == f"highest loss: 4 of {COUNT}"
    assert f"{wrong.iloc[0].confidence:.4f}" in lines[2] and f"{wrong.iloc[0].loss:.4f}" in lines[2]


def test_a_class_is_chosen_by_its_name_or_its_number(runs: tuple[Path, Path]) -> None:
    of_name, of_number = typed(runs[0], "--class", EVIL[1]), typed(runs[0], "--class", "1")
    assert of_name == of_number
    table = table_of(runs[0])
    assert of_name[0].endswith(f" of {((table.target == 1) & (table.prediction != 1)).sum()}")
    for name in ("cat", "700"):
        with pytest.raises(UsageError, match=r"has no such class\. It has .*=cmd"):
            typed(runs[0], "--class", name)


def test_a_sample_is_shown_with_all_that_runs_know(runs: tuple[Path, Path]) -> None:
    a, b = map(table_of, runs)
    name, row, other = b.id[7], b.loc[7], a.loc[7]
    lines = {line.split("  ")[0].strip(): line.split() for line in typed(runs[1], name)}
    assert lines["id"][-1] == name and lines["tokens"][-1] == str(row.tokens)
    lines = {line.split("  ")[0].strip(): line.split() for line in typed(runs[1], name, "--against", runs[0])}
    assert lines["loss"][1:] == [f"{row.loss:.4f}", f"{other.loss:.4f}"]
    assert lines["right"][1:] == [str(each.target == each.prediction) for each in (row, other)]
    with pytest.raises(UsageError, match=f"has no sample '{name}x'.*{name}"):
        typed(runs[1], f"{name}x")
    with pytest.raises(UsageError, match="leave out the options of lists"):
        typed(runs[1], name, "--worst", 3)
    with pytest.raises(UsageError, match="name it, as in dualeval show RUN ID"):
        typed(runs[1], "--against", runs[0])


def test_a_kept_column_called_right_is_shown_beside_the_run_s(tmp_path: Path) -> None:
    evaluate(SeededTask(40), tmp_path / "run")

    def kept(table: Any) -> Any:
        column = pyarrow.array(["eye"] * 40)
        return table.append_column(pyarrow.field("right", column.type, metadata=COLUMN_OF_DATA), column)

    run = changed(tmp_path / "run", tmp_path / "kept", kept)
    row = table_of(run).loc[7]
    lines = {line.split("  ")[0].strip(): line.split() for line in typed(run, row.id)}
    assert lines["right"][-1] == "eye"
    assert lines["right (of the run)"][-1] == str(row.target == row.prediction)


def test_a_number_beyond_the_classes_is_refused(tmp_path: Path) -> None:
    evaluate(SeededTask(1), tmp_path / "a")
    table = table_of(tmp_path / "a")
    largest = max(table.target.max(), table.prediction.max())
    assert typed(tmp_path / "a", "--class", largest)
    with pytest.raises(UsageError, match="has no such class"):
        typed(tmp_path / "a", "--class", largest + 1)


def test_per_class_prints_the_figures_of_each_class(runs: tuple[Path, Path]) -> None:
    lines = typed(runs[0], "--per-class")
    assert lines[0].split()[:5] == ["class", "support", "recall", "precision", "f1"]
    assert len(lines) == 1 + 7 + 1
    per_class: Any = dualeval.rescore(runs[0], metrics=NamedTask(1).metrics()).metrics["per_class"]
    assert f"{per_class['recall'][6]:.4f}" in lines[7]
    assert len(typed(runs[0], "--per-class", "--class", "3")) == 3
    assert "most confident mistakes" in "\n".join(typed(runs[0], "--per-class", "--worst", 1))


def test_flips_against_lists_samples_lost_and_gained(runs: tuple[Path, Path]) -> None:
    a, b = map(table_of, runs)
    lost = (a.target == a.prediction) & (b.target != b.prediction)
    lines = typed(runs[1], "--flips-against", runs[0], "--worst", 3)
    assert lines[0] == dualeval.compare(*runs).said_of(str(runs[1]))
    assert lines[1] == f"right in {runs[0]}, wrong in {runs[1]}: 3 of {lost.sum()}"
    assert {line.split()[0] for line in lines[3:6]} <= {*a.id[lost]}
    assert lines[7].startswith(f"wrong in {runs[0]}, right in {runs[1]}: 3 of ")


def test_names_cannot_move_the_cursor(runs: tuple[Path, Path]) -> None:
    lines = typed(runs[0], "--per-class", "--worst", 50)
    assert not any("\x1b" in line or "\x07" in line for line in lines)
    assert any(r"\x1b[2J\x1b[31mred\x07" in line for line in lines)
    assert printable("a\u202eb\r\n\u2028é 漢字\u200d") == r"a\u202eb\r\n\u2028é 漢字" + "\u200d"
    assert printable_lines("a\x1b\nb\tc") == "a\\x1b\nb\tc"


class NamedIds(TinyDataset):
    """Ids that a spreadsheet would compute."""

    def id(self, index: int) -> str:
        return f"{'=+-@'[index % 4]}{index}" if index % 5 else f"plain/{index}"


def test_cells_of_csv_are_no_formulas(tmp_path: Path) -> None:
    for seed in range(2):
        task = SeededTask(60, seed=seed)
        task._dataset = NamedIds(60)
        evaluate(task, tmp_path / str(seed), batch_size=32)
    found = dualeval.compare(tmp_path / "0", tmp_path / "1", metrics=["top1"])
    found.write_flips(tmp_path / "flips.csv")
    with (tmp_path / "flips.csv").open() as file:
        cells = [row["id"] for row in csv.DictReader(file)]
    flips = found.metrics["top1"].flips
    assert flips is not None and len(cells) > 5
    assert all(cell[0] in "'p" for cell in cells)
    # They are joined again by what docs/show.md says.
    assert [cell.removeprefix("'") for cell in cells] == [*flips.lost, *flips.gained]
    assert [csv_cell(text) for text in ("\tx", "\rx", "a=b", "")] == ["'\tx", "'\rx", "a=b", ""]


def test_paths_are_named_where_ids_are_files(tmp_path: Path) -> None:
    task = SeededTask(30)
    for index in range(30):
        (tmp_path / "data" / "tiny").mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2)).save(tmp_path / "data" / "tiny" / str(index), "PNG")
    evaluate(task, tmp_path / "run", batch_size=32, job={"data": str(tmp_path / "data")})
    assert typed(tmp_path / "run")[-1] == f"files are below {tmp_path / 'data'}"


class OnlySizes(SeededTask):
    """Rows by which no sample is worse than another."""

    rows: Any = ("group",)

    def metrics(self) -> list[Metric | RowMetric]:
        return [Mean("group")]


def test_a_run_with_nothing_to_rank_is_refused(tmp_path: Path) -> None:
    evaluate(OnlySizes(40), tmp_path / "run", batch_size=32)
    with pytest.raises(UsageError, match="nothing to list"):
        typed(tmp_path / "run")
    with pytest.raises(UsageError, match="no metric by class"):
        typed(tmp_path / "run", "--per-class")
