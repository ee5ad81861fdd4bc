"""RunOptions: what it refuses, and that nothing else is left to be found later."""

from __future__ import annotations

import inspect
import io
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dualeval.engine.options import NEW_FOLDER, RunOptions, check_session_options
from dualeval.engine.session import Session
from dualeval.errors import UsageError
from dualeval.report.table import print_result
from tests.engine.test_evaluator import evaluate
from tests.tiny import TinyTask


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size 0: expected a whole number of at least 1"),
        ({"batch_size": 2**63}, f"batch_size {2**63}: expected a whole number from 1 to {2**63 - 1}"),
        ({"batch_size": 2.0}, "batch_size 2.0: expected a whole number"),
        ({"batch_size": None}, "expected a whole number, found None"),
        ({"limit": 0}, "limit 0: expected"),
        ({"limit": -3}, "limit -3: expected"),
        ({"limit": 2.5}, "limit 2.5: expected"),
        ({"workers": -1}, "workers -1: expected"),
        ({"workers": True}, "workers True: expected"),
        ({"precision": "bf-16"}, "precision 'bf-16': expected one of .* Did you mean bf16?"),
        ({"precision": "fp23"}, "precision 'fp23': expected .* Did you mean fp32"),
        ({"layout": "nhwc"}, "layout 'nhwc': expected one of auto, contiguous, channels-last"),
        ({"optimize": "folding"}, "optimize 'folding': expected one of fold, compile. Did you mean fold?"),
        ({"on_error": "ignore"}, "on_error 'ignore': expected one of stop, skip"),
        (
            {"schedule": "dynamc"},
            "schedule 'dynamc': expected one of static, dynamic, lockstep. Did you mean dynamic?",
        ),
        ({"out": 3}, r"out 3: expected a path, None \(nothing is written\) or dualeval\.NEW_FOLDER"),
        ({"out": ""}, "out '': expected a path"),
        ({"replay": "x"}, "replay 'x': expected True or False"),
        ({"mix_machines": "no"}, "mix_machines 'no': expected True or False"),
        ({"fresh": "no"}, "fresh 'no': expected True or False"),
        ({"replay": None}, "replay None: expected True or False"),
        ({"fresh": True}, "out is None: give a folder"),
    ],
)
def test_a_wrong_option_is_refused_where_it_is_given(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heartbeat_timeout": "60"}, r"heartbeat_timeout '60': expected seconds, as 60\.0"),
        ({"heartbeat_timeout": None}, "heartbeat_timeout None: expected seconds"),
        ({"forward_timeout": True}, "forward_timeout True: expected seconds"),
        ({"stop_signals": None}, "stop_signals None: expected names of signals"),
        ({"stop_signals": [15]}, r"stop_signals \[15\]: expected names"),
        ({"stop_signals": "SIGTERM"}, r"stop_signals 'SIGTERM': expected names of signals, as \('SIGTERM', "),
        ({"backend": 5}, "backend 5: expected the name of a backend"),
        ({"launcher": 5}, "launcher 5: expected the name of a launcher"),
        ({"allow_shared_gpu": "no"}, "allow_shared_gpu 'no': expected True or False"),
        ({"stop": 5}, "stop 5: expected a function"),
    ],
)
def test_an_option_of_a_session_of_another_kind_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_session_options(options)


def test_the_options_that_a_session_has_are_taken() -> None:
    given = inspect.signature(Session).parameters
    check_session_options({name: parameter.default for name, parameter in given.items()})
    check_session_options({"heartbeat_timeout": 5, "stop_signals": ["SIGTERM"], "stop": lambda: False})


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
