"""The command line: one command a file, and the one place that turns errors into exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from dualeval import __version__
from dualeval.cli.run import run
from dualeval.errors import EXIT_FAILED, EXIT_USAGE, DualevalError, LaunchError
from dualeval.launch import detect


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dualeval")
def dualeval() -> None:
    """Evaluate any PyTorch model on any number of processes, with the same bits on each."""


dualeval.add_command(run)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and end the process with its exit code (``dualeval.errors`` lists them)."""
    try:
        code = dualeval.main(arguments, prog_name="dualeval", standalone_mode=False) or 0
    except click.exceptions.Exit as end:
        code = end.exit_code
    except click.ClickException as error:
        _say(error.format_message())
        code = EXIT_USAGE
    except click.Abort:
        _say("interrupted")
        code = EXIT_FAILED
    except DualevalError as error:
        _say(str(error))
        code = error.exit_code
    sys.exit(code)


def _say(message: str) -> None:
    """Print an error that every rank meets alike, once: on rank 0, or where ranks are not known."""
    try:
        speaks = detect(os.environ).is_main
    except LaunchError:
        speaks = True
    if speaks:
        click.echo(f"dualeval: error: {message}", err=True)
