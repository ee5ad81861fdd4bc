"""``dualeval compare`` in this process, and two runs to compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dualeval import cli
from dualeval.errors import DualevalError
from tests.engine.test_evaluator import evaluate


def calling(name: str) -> Callable[..., tuple[int, str, str]]:
    """What calls a command with words; it gives exit code, standard output and what is said of errors."""

    def run(*words: object) -> tuple[int, str, str]:
        done = CliRunner().invoke(cli.dualeval, [name, *map(str, words)])
        if isinstance(done.exception, DualevalError):
            return done.exception.exit_code, done.stdout, str(done.exception)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.stdout, done.stderr

    return run


@pytest.fixture
def command() -> Callable[..., tuple[int, str, str]]:
    return calling("compare")


def two_runs(folder: Path, task_of: Callable[[int], Any]) -> tuple[Path, Path]:
    """Runs of two seeds over the same samples."""
    for seed, name in enumerate(("a", "b")):
        evaluate(task_of(seed), folder / name, batch_size=32)
    return folder / "a", folder / "b"
