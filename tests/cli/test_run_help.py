"""What ``dualeval run --help`` shows, what the shell completes, and what is cheap to ask for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dualeval.cli import dualeval
from dualeval.cli.run import run
from dualeval.options.job import COMMON
from dualeval.options.plugins import scored_kind, task_kind
from dualeval.tasks.options import SCORED, TASKS
from tests.conftest import Launch

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
    done = CliRunner().invoke(dualeval, ["run", *words, "--help"], terminal_width=width)
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
    assert groups[:2] == GROUPS[:2]
    assert [line for line in text.splitlines() if line in (*groups, *GROUPS)] == groups
    assert "Options of every task: 'dualeval run --help'" in text


def test_the_help_of_a_job_file_s_task(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('task = "question-answering"\n')
    assert "--null-threshold" in shown("--config", str(tmp_path / "job.toml"))


def test_the_help_of_a_task_of_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "dualeval_test_shown.py").write_text(MINE)
    text = shown("--task", f"{tmp_path}/dualeval_test_shown.py:Mine", width=200)
    assert re.search(r"--model TEXT +A file of a model\.\n", text)
    assert re.search(r"--level low\|high +How deep\.  \[default: low\]\n", text)
    assert "--wide / --no-wide" in text
    assert "\n  --out " not in text, "an option of the run's has its flag"
    del sys.modules["dualeval_test_shown"]


def test_the_help_of_score_has_all_options() -> None:
    done = CliRunner().invoke(dualeval, ["score", "--help"])
    for name in SCORED:
        for field in scored_kind(name).fields:
            assert field.flag in done.output


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["run", "--prec"], ["--precision"]),
        (["run", "--precision", "amp"], ["amp-bf16", "amp-fp16"]),
        (["run", "--task", "qu"], ["question-answering"]),
        (["run", "--task", "question-answering", "--n-"], ["--n-best"]),
        (["run", "--data-fingerprint", "c"], ["content"]),
        (["run", "--on-error", "s"], ["stop", "skip"]),
        (["run", "--nosuch", "3", "--task", "nosuch", "--sch"], ["--schedule"]),
        (["list", "m"], ["metrics", "models"]),
        (["submit", "--backend", "h"], ["horovod"]),
    ],
)
def test_the_shell_completes(words: list[str], completed: list[str]) -> None:
    variables = {"_DUALEVAL_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(["dualeval", *words])}
    done = CliRunner().invoke(
        dualeval, prog_name="dualeval", env={**variables, "COMP_CWORD": str(len(words))}
    )
    found = [line.partition(",")[2] for line in done.output.splitlines()]
    assert sorted(found) == sorted(completed)


def test_the_shell_completes_paths() -> None:
    variables = {
        "_DUALEVAL_COMPLETE": "bash_complete",
        "COMP_WORDS": "dualeval run --data va",
        "COMP_CWORD": "3",
    }
    for words in ("--data va", "--weights va", "--task va"):
        variables["COMP_WORDS"] = f"dualeval run {words}"
        done = CliRunner().invoke(dualeval, prog_name="dualeval", env=variables)
        assert done.output == "file,va\n"


def test_the_script_itself_gives_what_a_shell_sources(launch: Launch) -> None:
    variables = {"_DUALEVAL_COMPLETE": "zsh_source"}
    done = launch([sys.executable, "-m", "dualeval"], variables=variables, timeout=60)
    assert (done.returncode, "#compdef dualeval" in done.stdout) == (0, True), done.stderr


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from dualeval.cli import COMMANDS, dualeval\n"
        "for words in (['run', '--help'], ['run', '--task', 'question-answering', '--help'], "
        "['score', '--help'], ['list', 'tasks']):\n"
        "    dualeval.main(words, standalone_mode=False)\n"
        "for word in COMMANDS:\n"
        "    dualeval.get_command(None, word)\n"
        "heavy = {'torch', 'numpy', 'torchvision', 'transformers', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_unknown_flags_are_said_with_the_nearest() -> None:
    with pytest.raises(click.NoSuchOption, match="--bacth-size"):
        dualeval.main(["run", "--bacth-size", "3"], standalone_mode=False)
    with pytest.raises(click.NoSuchOption, match="--crpo"):
        dualeval.main(["run", "--crpo=3"], standalone_mode=False)
