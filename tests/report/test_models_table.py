"""The table of several models, and the exit code of their run."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from dualeval.cli.several import exit_code_of
from dualeval.report.models_table import DONE, FAILED, ModelRow, ModelsTable
from dualeval.result import Result
from tests.report.test_report import result as made_result


def result(**metrics: float) -> Result:
    return made_result(
        metrics=dict(metrics),
        intervals={"top1": (metrics["top1"] - 0.01, metrics["top1"] + 0.01)},
        nonfinite={},
        samples_digest="5a" * 32,
        data={"fingerprint": "d", "contents": "c"},
        warnings=["only ten"],
        folder=None,
        units={"top1": "fraction"},
        directions={"top1": "higher", "loss": "lower"},
    )


def rows() -> list[ModelRow]:
    return [
        ModelRow(name="a_1", status=DONE, result=result(top1=0.5, loss=2.0), exit_code=0, folder="o/a_1"),
        ModelRow(name="b|2", status=DONE, result=result(top1=0.75, loss=2.0), exit_code=0),
        ModelRow(name="c", status=FAILED, reason="100 % & $x_1\nmore", exit_code=2),
        ModelRow(name="d"),
    ]


def test_the_best_is_marked_by_its_direction() -> None:
    assert ModelsTable(rows()).best == {"top1": ["b|2"], "loss": ["a_1", "b|2"]}
    assert ModelsTable(rows()[:1]).best == {}
    first, second, *_ = rows()
    assert second.result is not None
    other = replace(second, result=replace(second.result, data={"fingerprint": "e"}))
    assert ModelsTable([first, other]).best == {}
    worse = replace(second, result=replace(second.result, directions={}))
    assert ModelsTable([first, worse]).best == {}


def test_the_table_is_written_as_csv_markdown_and_json() -> None:
    table = ModelsTable(rows())
    lines = list(csv.DictReader(table.to_csv().splitlines(keepends=True)))
    assert [line["status"] for line in lines] == [DONE, DONE, FAILED, "not done"]
    assert (lines[0]["top1"], lines[0]["top1_low"], lines[0]["loss"]) == ("0.5", "0.49", "2.0")
    assert (lines[2]["top1"], lines[2]["reason"]) == ("", "100 % & $x_1\nmore")
    assert [line["samples_digest"] for line in lines] == ["5a" * 32, "5a" * 32, "", ""]
    assert "loss_low" not in lines[0]
    markdown = table.to_markdown().splitlines()
    assert markdown[2].startswith(r"| a\_1 | 50.00 % (49.00 % to 51.00 %) | **2.00000** |")
    assert markdown[3].startswith(r"| b\|2 | **75.00 %** ")
    assert markdown[4].endswith(r"failed: 100 % & $x\_1 |")
    models = table.to_json(whole=False)["models"]
    assert (models[0]["metrics"]["top1"], models[2]["reason"]) == (0.5, "100 % & $x_1\nmore")


def test_the_printed_table_marks_the_best_and_names_failures(capsys: pytest.CaptureFixture[str]) -> None:
    ModelsTable(rows()).print()
    said = capsys.readouterr().out
    assert "75.00 % *" in said
    assert "c: failed: 100 % & $x_1\n" in said
    assert "warning: a_1, b|2: only ten" in said


@pytest.mark.parametrize(("codes", "code"), [([0, 0], 0), ([0, 2, 2], 2), ([0, 2, 1], 1), ([1], 1), ([2], 2)])
def test_the_exit_code_follows_from_those_of_all_models(codes: list[int], code: int) -> None:
    assert exit_code_of([ModelRow(name="m", exit_code=each) for each in codes]) == code
