"""What editors, help and type checkers see of the door; a wrong keyword is mypy's in test_session.py."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import jedi
import pytest

import dualeval
from dualeval import tasks
from dualeval.engine.values.options import RunOptions
from dualeval.errors import UsageError
from dualeval.options.fields import fields_of


def test_the_types_are_those_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("docs")
    made = importlib.import_module("option_types")
    for module, text in made.modules().items():
        assert module.read_text() == text, "type: make tables"


def test_the_door_shows_its_options_with_a_sentence_and_their_defaults() -> None:
    shown = inspect.signature(dualeval.evaluate).parameters
    assert [*shown][:5] == ["task", "nproc", "model", "data", "metrics"]
    said = inspect.getdoc(dualeval.evaluate) or ""
    for field in fields_of(RunOptions):
        if field.name in ("evaluate_missing", "start_over"):
            continue
        assert shown[field.name].default == field.default
        assert f"    {field.name}: " in said or field.name in ("metric", "keep"), field.name
    assert not [word for word in ("--", "repeatable", "repeat it", "with commas") if word in said]
    for name in (
        *inspect.signature(dualeval.Session).parameters,
        *inspect.signature(dualeval.ModelTask).parameters,
    ):
        assert f"    {name}: " in said, name
    assert "stop_signals" in shown and "preprocessing" in shown and "options" not in shown
    assert shown["report"].default is False
    assert inspect.signature(dualeval.Session.evaluate).parameters["batch_size"].default == 64
    for name in tasks.class_names():
        assert "weights" in inspect.signature(getattr(tasks, name)).parameters


TYPED = "from torch import nn\nimport dualeval\nnet, data = nn.Linear(3, 2), [1]\ndualeval."
CALLED = {
    "evaluate": dualeval.evaluate,
    "Session": dualeval.Session,
    "Session().evaluate": dualeval.Session.evaluate,
    "ModelTask": dualeval.ModelTask,
    **{f"tasks.{name}": getattr(tasks, name) for name in tasks.class_names()},
}


def test_editors_complete_the_keywords() -> None:
    """jedi completes in editors and reads no ``Unpack``; mypy and pyright read it."""
    project = jedi.Project(Path(dualeval.__file__).parent.parent)
    here = jedi.InterpreterEnvironment()  # in this process, and none of its own

    def script(typed: str) -> jedi.Script:
        return jedi.Script(TYPED + typed, project=project, environment=here)

    for typed, found in (
        ("evaluate(model=net, data=data, bat", "batch_size="),
        ("evaluate(model=net, data=data, obs", "observe="),
        ("tasks.Segm", "Segmentation"),
        ("metrics.Conf", "Confusion"),
    ):
        assert found in [each.name for each in script(typed).complete()]
    for name, called in CALLED.items():
        [shown] = script(f"{name}(").get_signatures()
        expected = {*inspect.signature(called).parameters} - {"self"}
        # A second argument by position, which no call may have, is there for its message.
        assert {each.name for each in shown.params} - {"more"} == expected, name


def test_a_wrong_keyword_names_the_right_one() -> None:
    with pytest.raises(UsageError, match=r"no data\. 'dataset' is not an option\. Did you mean data\?"):
        dualeval.evaluate(model=None, dataset=[1])  # type: ignore[arg-type, call-arg]
