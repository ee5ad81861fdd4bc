"""The command line: which command is where, and the one place that turns errors into exit codes.

It may import all but tools, which a table names. Begin with ``run.py`` and ``options.py``.
Callers: the program ``dualeval``, and tools, whose commands are made alike. Keep: flags, exit codes, what is
printed.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from time import sleep
from typing import Any, NoReturn

import click

from dualeval import __version__, errors
from dualeval.launch import detect
from dualeval.messages import printable_lines
from dualeval.process import start as process_start
from dualeval.process.start import unwritten
from dualeval.process.status_line import LINE
from dualeval.user_code.origin import wants_debug
from dualeval.world import World

_HEAD_START_S = 1.0
_EXIT_FUNCTIONS_WITHIN_S = 10.0
# Each command, and where it is: the module is imported when the command is typed, or its help.
COMMANDS = {
    "run": "dualeval.cli.run:run",
    "watch": "dualeval.tools.watch.command:watch",
    "finish": "dualeval.cli.finish:finish",
    "score": "dualeval.cli.score:score",
    "requests": "dualeval.cli.requests:requests",
    "verify": "dualeval.cli.finished:verify",
    "compare": "dualeval.cli.finished:compare",
    "report": "dualeval.cli.finished:report",
    "show": "dualeval.cli.finished:show",
    "slice": "dualeval.cli.finished:slice_run",
    "export": "dualeval.cli.finished:export",
    "list": "dualeval.cli.listing:list_names",
    "init": "dualeval.cli.init:init",
    "bench": "dualeval.tools.bench.command:bench",
    "conformance": "dualeval.tools.conformance.command:conformance",
    "doctor": "dualeval.tools.doctor.command:doctor",
    "node-facts": "dualeval.tools.node_facts:show_facts",
    "setup-horovod": "dualeval.tools.horovod.setup:setup_horovod",
    "pack": "dualeval.tools.pack.command:pack",
    "submit": "dualeval.tools.submit.command:submit",
}


class _Commands(click.Group):
    """The commands of ``COMMANDS``."""

    def __init__(self, **options: Any) -> None:
        # Their names alone: what click lists, and compares a wrong name with.
        super().__init__(commands=dict.fromkeys(COMMANDS), **options)  # type: ignore[arg-type]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), name)
        process_start.allow_interrupts()
        return command


# Without a command the list of commands is shown, which is not an error.
@click.group(
    cls=_Commands,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="dualeval")
# python -m torch.distributed.launch puts it there, beside the variable LOCAL_RANK that says the same.
@click.option("--local-rank", hidden=True, expose_value=False)
@click.pass_context
def dualeval(context: click.Context) -> None:
    """Evaluate any PyTorch model on any number of processes, with the same bits on each."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and end the process with its exit code (``dualeval.errors`` lists them)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = (
            dualeval.main(words, prog_name="dualeval", standalone_mode=False, obj=words) or errors.EXIT_DONE
        )
    except click.exceptions.Exit as end:
        code = end.exit_code
    except click.ClickException as error:
        _say(error.format_message(), words)
        code = errors.EXIT_USAGE
    except click.Abort:
        _say("interrupted", words)
        code = process_start.INTERRUPTED
    except errors.DualevalError as error:
        _show_code(error, words)
        _say(errors.text_of(error), words, of_node=isinstance(error, errors.LibraryError))
        code = error.exit_code
    except Exception as error:  # noqa: BLE001 - of a user's own code, or of ours: it is shown where
        _show_code(error, words)
        _say(errors.with_type(error), words)
        code = errors.EXIT_FAILED
    problem = unwritten()
    # Whoever read it may have seen enough, as head.
    if code == errors.EXIT_DONE and problem is not None and not isinstance(problem, BrokenPipeError):
        _say(f"standard output cannot be written: {problem.strerror}", words)
        code = errors.EXIT_FAILED
    _end_process(code)


def _end_process(code: int) -> NoReturn:
    """End, without taking the interpreter apart: with torch in it that takes a third of a second.

    Everything of this program's is closed by now, and what others registered for the end is run. It is also
    safer: a library's threads may wait for ranks that are gone, or abort while their objects are freed.
    """
    process_start.end_with(code)
    # What others registered may hang, and the work is done: the process ends with its own code all the same.
    late = threading.Timer(_EXIT_FUNCTIONS_WITHIN_S, os._exit, (code,))
    late.daemon = True
    late.start()
    faulthandler.dump_traceback_later(_EXIT_FUNCTIONS_WITHIN_S + _HEAD_START_S, exit=True)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _show_code(error: Exception, words: Sequence[str]) -> None:
    from dualeval.process.speech import say_traceback

    say_traceback(
        error,
        whole="--debug" in words or wants_debug(os.environ),
        is_first=process_start.may_print(os.environ),
    )


def _say(message: str, words: Sequence[str], *, of_node: bool = False) -> None:
    """Print an error that every rank meets alike, once: on rank 0, or where ranks are not known.

    One ``of_node`` is met alike by the ranks of a node, and perhaps of no other: the first one there prints
    it.

    A launcher ends all ranks as soon as one has failed. Rank 0 must have spoken by then, and each rank must
    still end with its own exit code: srun takes the highest, and that of a signal is above all of ours.
    """
    LINE.speak(speaks=False)
    try:
        # No other command runs as a rank.
        may_be_a_rank = {"run", "watch", "finish", "doctor", "score", "conformance", "bench"} & set(words)
        world = detect(os.environ, _launcher(words)) if may_be_a_rank else World.alone()
    except errors.UsageError:
        world = None
    if world is None or world.is_main or (of_node and world.local_rank == 0):
        where = "" if world is None or world.is_main else f" (on {socket.gethostname()})"
        click.echo(f"dualeval: error: {printable_lines(message)}{where}", err=True)
    if world is None or world.size > 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # The others may be on their way to this place.
        sleep(_HEAD_START_S)


def _launcher(words: Sequence[str]) -> str | None:
    """The value of --launcher, also where the command line could not be read as a whole."""
    for word, following in pairwise([*words, ""]):
        name, has_value, value = word.partition("=")
        if name == "--launcher":
            return value if has_value else following or None
    return None
