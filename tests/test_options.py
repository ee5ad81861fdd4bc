"""RunOptions: what it refuses, and that nothing else is left to be found later."""

from __future__ import annotations

import io
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dualeval.engine.options import NEW_FOLDER, RunOptions
from dualeval.errors import UsageError
from dualeval.report.table import print_result
from tests.test_evaluator import evaluate
from tests.tiny import TinyTask


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size 0: expected a whole number of at least 1"),
        ({"batch_size": None}, "expected a whole number, found None"),
        ({"limit": 2.5}, "limit 2.5: expected"),
        ({"workers": -1}, "workers -1: expected"),
        ({"precision": "fp23"}, "precision 'fp23': expected .* Did you mean fp32"),
        ({"on_error": "ignore"}, "on_error 'ignore'"),
        ({"schedule": "dynamc"}, "Did you mean dynamic"),
        ({"out": 3}, r"out 3: expected a path, None \(nothing is written\) or dualeval\.NEW_FOLDER"),
        ({"fresh": True}, "out is None: give a folder"),
    ],
)
def test_a_wrong_option_is_refused_where_it_is_given(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunOptions(**options)


def test_a_value_that_stays(tmp_path: Path) -> None:
    options = RunOptions(out=str(tmp_path))
    assert options.path == tmp_path
    assert RunOptions(out=NEW_FOLDER).path is RunOptions().path is None
    with pytest.raises(FrozenInstanceError):
        options.limit = 3  # type: ignore[misc]


def test_a_result_without_files_names_none() -> None:
    shown = io.StringIO()
    print_result(evaluate(TinyTask(5), None), Console(file=shown))
    assert "5 of 5 evaluated" in shown.getvalue()
    assert "files" not in shown.getvalue()
