"""Starts of ranks in a launcher by ``bench`` and ``conformance``, which run one after the other.

A command runs to its end, or to a time limit, and none of its processes is left behind.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from time import monotonic, sleep
from types import FrameType

import click

from dualeval.errors import LaunchError, UsageError
from dualeval.launch import detect
from dualeval.launch.launchers import may_start_ranks
from dualeval.launch.site import Site, default_ranks, spread
from dualeval.launch.ways import WAYS, start_words, why_not

# Launchers start ranks in sessions of their own: they are found by this variable, however far they went.
_MARK = "DUALEVAL_STARTED_BY"
# How long a launcher that is told to end has for its ranks, on other hosts too.
_GRACE_S = 10.0
_PAUSE_S = 0.02
_LOOK_S = 0.2


class Interrupted(Exception):
    """A signal asked this process to end; ``str()`` is its name."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    # Its exit code, -N where signal N ended it; None where it ran into the time limit.
    code: int | None
    # How long it ran.
    seconds: float
    # The code in words.
    how: str


class Interrupts:
    """Notes SIGINT, SIGTERM and SIGHUP from ``with`` to its end; ``check`` then raises. In the main thread.

    The handler does not raise: raised while a command is being started, before its number is known, or while
    one is being ended, the exception would leave it running.
    """

    def __init__(self) -> None:
        self._received: signal.Signals | None = None

    def check(self) -> None:
        """Raise ``Interrupted`` once a signal has come."""
        if self._received is not None:
            raise Interrupted(self._received.name)

    def __enter__(self) -> Interrupts:
        wanted = [
            number
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN
        ]
        self._previous = {number: signal.signal(number, self._note) for number in wanted}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = signal.Signals(number)


def run_supervised(
    command: Sequence[str],
    *,
    stdout: Path,
    stderr: Path,
    environ: Mapping[str, str],
    timeout_s: float = math.inf,
    check: Callable[[], None] = lambda: None,
    folder: Path | None = None,
    end_by: signal.Signals = signal.SIGTERM,
) -> Ended:
    """Run a command in a session of its own, with its output behind what is in the files.

    Whatever happens, an exception in this process too, none of its processes on this host is left when this
    returns. Those on other hosts are the launcher's to end, which is given the time.
    """
    mark = uuid.uuid4().hex
    start = monotonic()
    with stdout.open("ab") as out, stderr.open("ab") as err:
        process = subprocess.Popen(
            command,
            env={**environ, _MARK: mark},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            code = process.poll()
            while code is None and monotonic() - start < timeout_s:
                check()
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(_LOOK_S)
        finally:
            _end(process, mark, end_by)
    if code is None:
        how = f"it did not end within {timeout_s:g} s"
    else:
        how = f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
    return Ended(code=code, seconds=monotonic() - start, how=how)


def ask(
    command: Sequence[str],
    environ: Mapping[str, str],
    limit_s: float,
    check: Callable[[], None] = lambda: None,
) -> tuple[int | None, str, str]:
    """Run a short command as ``run_supervised`` does."""
    with tempfile.TemporaryDirectory(prefix="dualeval-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        ended = run_supervised(
            command, stdout=out, stderr=err, environ=environ, timeout_s=limit_s, check=check
        )
        return ended.code, out.read_text("utf-8", "replace"), err.read_text("utf-8", "replace")


def _end(process: subprocess.Popen[bytes], mark: str, end_by: signal.Signals) -> None:
    """End a command, and what it has started: first by asking, then by force."""
    if process.poll() is None:
        _signal_group(process.pid, end_by)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    # What ends by itself is left to, if it does so now.
    deadline = monotonic() + (1.0 if process.returncode == 0 else 0.0)
    while (left := _marked(mark)) and monotonic() < deadline:
        sleep(_PAUSE_S)
    while left:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        sleep(_PAUSE_S)
        left = _marked(mark)
    if process.poll() is None:
        _signal_group(process.pid, signal.SIGKILL)
    process.wait()


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def _marked(mark: str) -> list[int]:
    """List this user's living processes that carry the mark."""
    wanted = f"{_MARK}={mark}".encode()
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        # Gone meanwhile, or another user's.
        with suppress(OSError):
            # A process that is only waited for has no variables any more.
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                pids.append(int(folder.name))
    return pids


# Outcomes of a start that has no result.
FAILED, NOT_HERE, NOT_RUN = "failed", "not here", "not run"


def words_of(_context: click.Context, _parameter: click.Parameter, value: str | None) -> list[str] | None:
    """Callback of an option: words with commas between, each once."""
    return None if value is None else list(dict.fromkeys(word.strip() for word in value.split(",")))


def counts_of(context: click.Context, parameter: click.Parameter, value: str | None) -> list[int] | None:
    """Callback of an option: whole numbers with commas between, in order."""
    words = words_of(context, parameter, value)
    if words is None:
        return None
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise click.BadParameter(
            f"{value!r}: expected whole numbers of at least 1 with commas between, as 1,2"
        )
    return sorted(set(map(int, words)))


def check_no_rank(launcher: str | None, why: str) -> None:
    """Refuse to be one of several ranks, each of which would make all starts."""
    world = detect(os.environ, launcher)
    if not may_start_ranks(world):
        raise LaunchError(
            f"{world.launcher} started this process as rank {world.rank} of {world.size}, and {why}"
        )


def new_folder(out: Path | None, tool: str) -> tuple[Path, str]:
    """The folder for a report, which is not made yet, and the time; refuses one that has something in it."""
    now = datetime.now(timezone.utc)
    folder = (out or Path("runs", f"{tool}-{now:%Y%m%dT%H%M%S}")).absolute()
    nearest = next(parent for parent in (folder / "x").parents if os.path.lexists(parent))
    if nearest == folder and not folder.is_dir():
        raise UsageError(f"--out {folder}: this is not a folder. Give a new or an empty one.")
    if nearest == folder and any(folder.iterdir()):
        raise UsageError(f"--out {folder}: this folder is not empty. Give a new or an empty one.")
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        why = "cannot be written" if nearest.is_dir() else "is not a folder"
        raise UsageError(f"--out {folder}: {nearest} {why}. Give a folder of your own.")
    return folder, f"{now:%Y-%m-%d %H:%M} UTC"


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of ranks in a launcher."""

    # A name of `launch.ways.WAYS`.
    launcher: str
    # Which backend is asked for.
    backend: str
    # How many ranks, on how many `nodes`.
    ranks: int
    nodes: int
    # "cpu" or "cuda".
    device: str
    # One process, with which the others of its device are compared.
    is_reference: bool = False
    # Every operation of the backend is tried in place of a run.
    is_self_test: bool = False
    # Why it cannot be started here; None where it can.
    reason: str | None = None

    @classmethod
    def on(cls, site: Site, launcher: str, backend: str, ranks: int, device: str) -> Start:
        """Ranks on the nodes of a site."""
        return cls(
            launcher=launcher,
            backend=backend,
            ranks=ranks,
            nodes=len(spread(ranks, len(site.nodes))),
            device=device,
            reason=why_not(launcher, backend, ranks, device, site),
        )

    def command(self, site: Site, number: int, dualeval: Sequence[str], *arguments: str) -> list[str]:
        """Its whole command."""
        return [
            *start_words(self.launcher, self.ranks, site, number),
            *dualeval,
            *(["doctor", "--json"] if self.is_self_test else ["run"]),
            *WAYS[self.launcher].after(self.ranks),
            *([] if self.backend == "single" else ["--backend", self.backend]),
            *("--device", self.device),
            *arguments,
        ]


def plan_starts(
    site: Site, devices: Sequence[str], launchers: Sequence[str], ranks: Sequence[int] | None
) -> list[Start]:
    """List what to start, in this order; for each device its reference comes first.

    Each launcher and backend gets one self-test, with the most ranks that it can be started with.
    """
    starts = []
    for device in devices:
        starts.append(replace(Start.on(site, "none", "single", 1, device), is_reference=True))
        for launcher in (name for name in launchers if name != "none"):
            for backend in WAYS[launcher].backends:
                sizes = default_ranks(site, device) if ranks is None else ranks
                runs = [Start.on(site, launcher, backend, size, device) for size in sizes]
                startable = [start for start in runs if start.reason is None]
                starts += runs
                if startable and WAYS[launcher].has_doctor:
                    largest = max(startable, key=lambda start: start.ranks)
                    starts.append(replace(largest, is_self_test=True))
    return starts


@dataclass(frozen=True, kw_only=True)
class Starts:
    """Where starts run one after the other, and within which limit."""

    folder: Path
    environ: Mapping[str, str]
    interrupts: Interrupts
    timeout_s: float

    def log(self, name: str, kind: str) -> Path:
        """The file for a start's output of this kind."""
        return self.folder / "logs" / f"{name}.{kind}"

    def start(self, command: Sequence[str], name: str) -> Ended:
        """Run the command of a start, with its output in its logs."""
        return run_supervised(
            command,
            stdout=self.log(name, "out"),
            stderr=self.log(name, "err"),
            environ=self.environ,
            timeout_s=self.timeout_s,
            check=self.interrupts.check,
        )

    def in_order(self, starts: Iterable[object], done: str, *folders: str) -> bool:
        """Make the folders, and take one start after the other; returns whether a signal has ended that."""
        try:
            for name in ("logs", *folders):
                (self.folder / name).mkdir(parents=True)
        except OSError as error:
            raise UsageError(
                f"--out {self.folder}: it cannot be made ({error.strerror}). Give a folder of your own."
            ) from error
        try:
            for _ in starts:
                # A signal that came as it ended, which is the last one maybe.
                self.interrupts.check()
        except Interrupted as error:
            click.echo(f"dualeval: interrupted by {error}; what was {done} until then is reported", err=True)
            return True
        return False
