"""``dualeval compare`` in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from click.testing import CliRunner

from dualeval import cli
from dualeval.errors import DualevalError


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
