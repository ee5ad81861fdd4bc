"""What a process of the command line does before it imports anything else: its streams and its first signals.

torch and its like take seconds to import. A signal in that time must end the process as a later one does, and
not with a traceback out of one of them.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys

from dualeval.errors import EXIT_STOPPED
from dualeval.process.status_line import LINE

TYPE_CHECKING = False  # typing's own would cost as much time as all the rest of this
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import FrameType
    from typing import Any

DEFAULT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR2")
INTERRUPTED = 128 + signal.SIGINT
NOTHING_STARTED = "Nothing was started."
# In the environment of ranks that `--nproc` has started: its process id.
LAUNCHER_PID = "DUALEVAL_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1
# Commands that a signal stops; Ctrl-C interrupts the others.
_EVALUATING = ("run", "watch", "finish")
_STOPPABLE = (*_EVALUATING, "score")
# By file of launch/launchers, how the names of its variables begin; the first is the rank's. They are asked
# in this order, the innermost launcher first: torchrun may run inside a task of any other, and horovodrun
# inside an allocation that sets MPI's variables. Flux may itself run in a step of Slurm's, and may set a part
# of Open MPI's. In a job of Slurm's, mpirun starts its own ranks through a step of one process a node. "env"
# is whoever sets such names, so launchers that have names of their own are asked before. "none" stays last:
# it always answers.
VARIABLES = {
    "torchrun": ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_RANK", "MASTER_", "TORCHELASTIC_"),
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_"),
    "flux": ("FLUX_TASK_RANK", "FLUX_"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_"),
    "mpich": ("PMI_RANK", "PMI_", "MPI_"),
    "srun": ("SLURM_PROCID", "SLURM_"),
    "env": ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_"),
    "none": (),
}


def prepare(words: Sequence[str]) -> None:
    """Open the standard streams and take the first signals, for a command line of these words."""
    take_signals(words)
    end_with_launcher()
    open_standard_streams()
    if _command(words) in _EVALUATING and not {"--no-progress", "--help", "-h"} & set(words):
        LINE.begin(speaks=may_print(os.environ))


# -- signals -------------------------------------------------------------------------------------------


def take_signals(words: Sequence[str]) -> None:
    """End the process by ``--stop-signals`` with exit code 75, until ``engine.end.process`` takes them.

    ``dualeval run --nproc`` starts its ranks with them blocked: what came before this is heard now. One that
    is ignored stays ignored.
    """
    global _process, _begun
    _process, _begun = os.getpid(), NOTHING_STARTED if _command(words) in _EVALUATING else ""
    stopping = _stop_signals(words) if _command(words) in _STOPPABLE else set()
    for number in {*stopping, signal.SIGINT}:
        if signal.getsignal(number) is signal.SIG_IGN:
            continue
        try:
            signal.signal(number, _stop if number in stopping else _interrupt)
        except OSError:
            continue  # SIGKILL, say: refused with a message where the options are read
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*stopping, signal.SIGINT})


def allow_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt where it does not stop a run: the command has begun."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_with_parent(number: signal.Signals) -> None:
    """Have this process get a signal when the one that has started it ends, however that ends; on Linux."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def end_with_launcher() -> None:
    """Stop this rank if the `--nproc` that has started it is killed: nobody else would end the ranks."""
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None:
        return
    is_child = launcher == str(os.getppid())
    if is_child:
        end_with_parent(signal.SIGTERM)
    try:
        os.kill(int(launcher), 0)
        has_ended = is_child and launcher != str(os.getppid())
    except ProcessLookupError:
        has_ended = True
    if has_ended:  # before it could be said
        signal.raise_signal(signal.SIGTERM)


def end_with(code: int) -> None:
    """Have signals that are taken here end the process with this code: its work is done."""
    global _exit_code
    _exit_code = code
    LINE.speak(speaks=False)


def say_if_ended(sentence: str) -> None:
    """Set what is said where a signal ends the process after its work is done; empty for nothing."""
    global _left_out
    _left_out = sentence


def may_print(environ: Mapping[str, str]) -> bool:
    """Whether this process is one to print what all ranks would: no launcher says that it is a later one."""
    return all(environ.get(name, "0") == "0" for names in VARIABLES.values() for name in names[:1])


_process = 0
_exit_code: int | None = None
_begun = ""  # what is said where a signal ends the process before
_left_out = ""


def _command(words: Iterable[str]) -> str:
    """The command among the words, which may come after the value of --local-rank."""
    return next((word for word in words if not word.startswith("-") and not word.isdecimal()), "")


def _stop_signals(words: Sequence[str]) -> set[signal.Signals]:
    names: Sequence[str] = DEFAULT_SIGNALS
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, has_value, value = word.partition("=")
        if option == "--stop-signals":
            names = (value if has_value else following).split(",")
    numbers = (getattr(signal, name, None) for name in names)
    return {number for number in numbers if isinstance(number, signal.Signals)}


def _stop(number: int, frame: FrameType | None) -> None:
    _end(number, f"stopped by {signal.Signals(number).name}. {_begun}".rstrip(". "), EXIT_STOPPED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _end(number, "interrupted", INTERRUPTED)


def _end(number: int, sentence: str, code: int) -> None:
    if os.getpid() != _process:
        # A process that was forked from ours: it ends as any other.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    if _exit_code is not None:
        sentence = _left_out
    LINE.speak(speaks=False)
    if sentence and may_print(os.environ):
        try:
            os.write(2, f"dualeval: {sentence}.\n".encode())
        except OSError:
            os._exit(code)  # nobody reads it
    os._exit(code if _exit_code is None else _exit_code)


# -- the standard streams, and what could not be written to them ---------------------------------------


class _Output(io.FileIO):
    """Standard output or error, where a failed write ends nothing: what it was to hold is dropped.

    The work of a run is in its folder. A full disk under its log, or a reader that has gone, must not lose
    it: ``unwritten`` says at the end that something is missing.
    """

    was_closed = False
    problem: OSError | None = None

    def write(self, data: Any, /) -> int:
        problem = OSError(errno.EBADF, os.strerror(errno.EBADF)) if self.was_closed else None
        LINE.before_output(data)
        try:
            # None: it would block, which is no failure.
            return super().write(data)
        except OSError as error:
            problem = error
            return memoryview(data).nbytes
        finally:
            self.problem = self.problem or problem


_output: _Output | None = None


def open_standard_streams() -> None:
    """Open descriptors 0, 1 and 2 on /dev/null where they are closed, and make streams of them.

    Else a file that is opened later, a result's, gets such a number, and whoever prints writes into it.
    """
    global _output
    closed = set()
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # The kernel gives the lowest number that is free.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            closed.add(number)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the life of the process
    if sys.stdout is sys.__stdout__:
        _output = _Output(1, "wb", closefd=False)
        _output.was_closed = 1 in closed
        sys.stdout = _text(_output, sys.__stdout__)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Output(2, "wb", closefd=False), sys.__stderr__)


def _text(raw: _Output, previous: io.TextIOWrapper | None) -> io.TextIOWrapper:
    """A text stream like the one that Python has made at its start, if it has, on another raw one."""
    raw.name = "<stdout>" if raw.fileno() == 1 else "<stderr>"
    if previous is None:
        return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace")
    unbuffered = previous.write_through and not isinstance(previous.buffer, io.BufferedWriter)
    text = io.TextIOWrapper(
        # As Python does with -u: text goes to the raw stream at once.
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=previous.encoding,
        errors=previous.errors,
        line_buffering=previous.line_buffering,
        write_through=previous.write_through,
    )
    text.mode = "w"  # type: ignore[misc]  # as Python sets it
    return text


def unwritten() -> OSError | None:
    """Why some of standard output could not be written since the last call; None where all of it was."""
    sys.stdout.flush()
    if _output is None:
        return None
    problem, _output.problem = _output.problem, None
    return problem
