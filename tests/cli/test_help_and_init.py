"""What ``--help`` shows, what the shell completes, what is cheap to ask for, and ``dualeval init``."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import dualeval.tasks
from dualeval.cli import dualeval as command
from dualeval.cli.init import text_for
from dualeval.cli.run import run
from dualeval.errors import UsageError
from dualeval.options.job import COMMON, Job
from dualeval.options.plugins import scored_kind, task_kind
from dualeval.tasks.options import TASKS, scored
from tests.conftest import Launch
from tests.engine.test_evaluator import evaluate
from tests.vehicles import causal_models, texts

GROUPS = ["Model:", "Data:", "Run:", "Launch:"]
MINE = '''
import dualeval
from pathlib import Path
from typing import Literal

class Mine(dualeval.ModelTask):
    """Mine.

    Args:
        model: a file of a model.
        level: how deep.
    """

    def __init__(self, model: str, level: Literal["low", "high"] = "low", out=None, wide: bool = True):
        pass
'''


def shown(*words: str, width: int = 80) -> str:
    done = CliRunner().invoke(command, ["run", *words, "--help"], terminal_width=width)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_page_names_every_option() -> None:
    page = (Path(__file__).parents[2] / "docs/command-line.md").read_text()
    options = [flag for parameter in run.params for flag in parameter.opts]
    assert [flag for flag in options if f"`{flag}`" not in page] == []


@pytest.mark.parametrize("width", [80, 110])
def test_the_plain_help_fits_a_screen(width: int) -> None:
    text = shown(width=width)
    lines = text.splitlines()
    assert len(lines) <= 63
    assert max(map(len, lines)) <= width
    assert [line for line in lines if line in GROUPS] == GROUPS
    for name in (
        "--task",
        "-T",
        "--model",
        "--weights",
        "--data",
        *(field.flag for field in COMMON.values()),
    ):
        assert f"\n  {name} " in text
    assert "--mean" not in text
    assert "dualeval run --task NAME --help" in " ".join(text.split())
    assert "image-classification" in text


@pytest.mark.parametrize("task", TASKS)
def test_the_help_of_a_task_has_all_its_options_on_a_screen(task: str) -> None:
    text = shown("--task", task)
    assert len(text.splitlines()) <= 59
    for field in task_kind(task).fields:
        if field.name not in COMMON:
            assert f"\n  {field.flag}" in text
            assert field.help.split()[0] in text
    groups = list(dict.fromkeys(f"{field.group}:" for field in task_kind(task).fields if field.group))
    # Those of a class that several tasks share come before the task's own.
    assert {*GROUPS[:2]} <= {*groups}
    groups = [*GROUPS[:2], *(each for each in groups if each not in GROUPS[:2])]
    assert [line for line in text.splitlines() if line in (*groups, *GROUPS)] == groups
    assert "Options of every task: 'dualeval run --help'" in text


def test_the_help_of_a_job_file_has_the_options_of_its_task(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('task = "question-answering"\n')
    assert "--null-threshold" in shown("--config", str(tmp_path / "job.toml"))


def test_the_help_of_ones_own_task_has_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "dualeval_test_shown.py").write_text(MINE)
    text = shown("--task", f"{tmp_path}/dualeval_test_shown.py:Mine", width=200)
    assert re.search(r"--model TEXT +A file of a model\.\n", text)
    assert re.search(r"--level low\|high +How deep\.  \[default: low\]\n", text)
    assert "--wide / --no-wide" in text
    assert "\n  --out " not in text, "an option of the run's has its flag"
    del sys.modules["dualeval_test_shown"]


def test_the_help_of_score_has_all_options() -> None:
    done = CliRunner().invoke(command, ["score", "--help"])
    for name in scored():
        for field in scored_kind(name).fields:
            assert field.flag in done.output


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("run --prec", ["--precision"]),
        ("run --precision amp", ["amp-bf16", "amp-fp16"]),
        ("run --task qu", ["question-answering"]),
        ("run --task question-answering --n-", ["--n-best"]),
        ("run --data-fingerprint c", ["content"]),
        ("run --on-error s", ["stop", "skip"]),
        ("run --nosuch 3 --task nosuch --sch", ["--schedule"]),
        ("list m", ["metrics", "models"]),
        ("submit --backend h", ["horovod"]),
        *((f"run {flag} va", ["file,va"]) for flag in ("--data", "--weights", "--task")),
    ],
)
def test_the_shell_completes(words: str, completed: list[str]) -> None:
    variables = {"_DUALEVAL_COMPLETE": "bash_complete", "COMP_WORDS": f"dualeval {words}"}
    variables["COMP_CWORD"] = str(len(words.split()))
    done = CliRunner().invoke(command, prog_name="dualeval", env=variables)
    found = [line.removeprefix("plain,") for line in done.output.splitlines()]
    assert sorted(found) == sorted(completed)


def test_the_script_itself_gives_what_a_shell_sources(launch: Launch) -> None:
    variables = {"_DUALEVAL_COMPLETE": "zsh_source"}
    done = launch([sys.executable, "-m", "dualeval"], variables=variables, timeout=60)
    assert (done.returncode, "#compdef dualeval" in done.stdout) == (0, True), done.stderr


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import logging, sys\n"
        "import dualeval as door\n"
        "from dualeval.cli import COMMANDS, dualeval\n"
        "assert 'rich' not in sys.modules\n"
        "for words in (['run', '--help'], ['run', '--task', 'question-answering', '--help'], "
        "['score', '--help'], ['list', 'tasks']):\n"
        "    dualeval.main(words, standalone_mode=False)\n"
        "for word in COMMANDS:\n"
        "    dualeval.get_command(None, word)\n"
        "heavy = {'torch', 'numpy', 'torchvision', 'transformers', 'pyarrow', 'PIL'} | "
        "{'horovod', 'mpi4py'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert not logging.getLogger().handlers\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# -- ``dualeval init`` and ``dualeval list tasks`` ----------------------------------------------------------


# The harness's tasks are no data of one's own: there is no file to start them from.
WITH_START = [name for name in TASKS if name != "lm-eval"]


@pytest.mark.parametrize("task", WITH_START)
def test_init_writes_a_short_file_for_a_task(task: str, tmp_path: Path) -> None:
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
    Path("dev.csv").unlink()
    script = subprocess.run([sys.executable, "reviews.py"], capture_output=True, text=True, timeout=120)
    assert script.returncode == 2 and script.stderr.count("\n") == 1, script
    assert script.stderr.startswith("dualeval: error: ") and "dev.csv" in script.stderr


def test_the_file_of_a_language_model_has_the_models_own_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    causal_models.save_causal(tmp_path / "models/mine")
    causal_models.write_texts(tmp_path / "texts")
    CliRunner().invoke(command, ["init", "language-modeling", "lm.py"])
    result = evaluate(Job.of("lm.py:task").make_task(), None, batch_size=8)
    assert result.job["max_length"] == causal_models.POSITIONS


def test_init_overwrites_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("question_answering.py").write_text("mine")
    refusals: list[tuple[list[str], str]] = [
        (["question-answering"], "question_answering.py exists, and is not overwritten: give another FILE"),
        (
            ["question-answering", "a-b.py"],
            "a-b.py: expected the name of a Python file, of letters, digits and _",
        ),
        (["question-answering", "none/mine.py"], "none/mine.py cannot be written: No such file"),
    ]
    for words, said in refusals:
        with pytest.raises(UsageError, match=said):
            command.main(["init", *words], standalone_mode=False)
    with pytest.raises(click.BadParameter, match="nosuch"):
        command.main(["init", "nosuch"], standalone_mode=False)
    assert Path("question_answering.py").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["question_answering.py"]


def test_list_tasks_names_the_required_options() -> None:
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
