"""``dualeval init`` and what ``dualeval list tasks`` says of each task."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import dualeval.tasks
from dualeval.cli import dualeval as command
from dualeval.cli.init import text_for
from dualeval.errors import UsageError
from dualeval.options.job import Job
from dualeval.options.plugins import task_kind
from dualeval.tasks.options import TASKS
from tests import causal_models, texts
from tests.engine.test_evaluator import evaluate


@pytest.mark.parametrize("task", TASKS)
def test_the_file_of_a_task(task: str, tmp_path: Path) -> None:
    text = text_for(task, tmp_path / "mine.py")
    assert 15 <= len(text.splitlines()) <= 32
    assert max(map(len, text.splitlines())) <= 110
    ast.parse(text)
    # Each argument is one of the class's.
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    [call] = [node for node in calls if {word.arg for word in node.keywords} >= {"model", "data"}]
    own = inspect.signature(getattr(dualeval.tasks, ast.unparse(call.func))).parameters
    options = {field.name for field in task_kind(task).fields}
    assert {word.arg for word in call.keywords} <= {*own} | options
    assert getattr(task_kind(task).source, "start", None), "a task says what its file has"


def test_a_written_file_is_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts.save_classifier(tmp_path / "models/mine")
    texts.write(tmp_path / "dev.csv", texts.rows(4))
    done = CliRunner().invoke(command, ["init", "text-classification", "reviews.py"])
    assert done.output == "wrote reviews.py. Change it, then type: python reviews.py\n"
    task = Job.of("reviews.py:task", data="dev.csv").make_task()
    assert isinstance(task, dualeval.tasks.TextClassification)
    assert len(task.dataset()) == 4


def test_the_file_of_a_language_model_has_the_models_own_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    causal_models.save_causal(tmp_path / "models/mine")
    causal_models.write_texts(tmp_path / "texts")
    CliRunner().invoke(command, ["init", "language-modeling", "lm.py"])
    result = evaluate(Job.of("lm.py:task").make_task(), None, batch_size=8)
    assert result.job["max_length"] == causal_models.POSITIONS


def test_what_is_there_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("question_answering.py").write_text("mine")
    refusals: list[tuple[list[str], str]] = [
        (["question-answering"], "question_answering.py is there, and is not overwritten: give another FILE"),
        (["question-answering", "a-b.py"], "a-b.py: expected the name of a Python file, such as mine.py"),
        (["question-answering", "none/mine.py"], "none/mine.py cannot be written: No such file"),
    ]
    for words, said in refusals:
        with pytest.raises(UsageError, match=said):
            command.main(["init", *words], standalone_mode=False)
    with pytest.raises(click.BadParameter, match="nosuch"):
        command.main(["init", "nosuch"], standalone_mode=False)
    assert Path("question_answering.py").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["question_answering.py"]


def test_a_line_says_what_a_task_wants() -> None:
    done = CliRunner().invoke(command, ["list", "tasks"])
    lines = {line.split()[0]: line for line in done.output.splitlines()}
    for name in TASKS:
        for field in task_kind(name).fields:
            if field.is_required:
                assert f"{field.flag} {field.metavar}" in lines[name]
        assert "..." not in lines[name]


@pytest.mark.parametrize("words", [["init"], ["list"], ["list", "tasks"]])
def test_the_help_fits_a_screen(words: list[str]) -> None:
    done = CliRunner().invoke(command, [*words, "--help"], terminal_width=80)
    assert done.exit_code == 0
    assert len(done.output.splitlines()) <= 24
