"""Build Horovod for the installed torch and install it, or take it from a cache: ``dualeval setup-horovod``.

A wheel in the cache has a folder of its own, named by what it was built for, with ``build.json`` (all that
the wheel depends on, and its sha256) and ``build.log`` beside it. The folder gets its name when it is whole.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from time import monotonic
from types import FrameType

from dualeval.errors import DualevalError, UsageError
from dualeval.launch.cores import usable_cores
from dualeval.launch.horovod_machine import inspect
from dualeval.launch.horovod_plan import (
    HOROVOD,
    Plan,
    build_variables,
    commands,
    compile_command,
    description,
    edited,
    edits_for,
    fetch_command,
    install_command,
    make_plan,
    minutes,
    requirements_command,
    summary,
)

# The compiled part: in the wheel, and where the wheel is installed.
LIBRARY = re.compile(r"horovod/torch/mpi_lib_v2\.[^/]*\.so")
# Seconds that what was started gets to end, once it has been told to.
GRACE = 5.0
_ASK = """
import json
import horovod.torch as hvd
built = {"gloo": hvd.gloo_built(), "MPI": hvd.mpi_built(), "NCCL": hvd.nccl_built()}
print(json.dumps({name: bool(value) for name, value in built.items()}))
"""
_ASK_TIMEOUT = 120.0

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the caller of ``set_up`` chose.

    Attributes:
        with_mpi: whether to build with MPI; None: where there is one. ``with_nccl`` likewise.
        cache: the folder of the cache; None: the user's own.
        rebuild: build even where the cache has the wheel.
        constraint: a file of versions for pip.
    """

    with_mpi: bool | None = None
    with_nccl: bool | None = None
    cache: Path | None = None
    rebuild: bool = False
    constraint: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A wheel in the cache, and the sha256 of the library in it."""

    wheel: Path
    library_sha256: str


class _StepError(DualevalError):
    """A command failed; ``str()`` is its step, its exit code and the lines of its log that tell why."""


def set_up(wishes: Wishes, environ: Mapping[str, str], say: Say) -> None:
    """Install the Horovod that fits this machine, from the cache or built, where it is not installed yet.

    Args:
        wishes: what to build, and where to keep it.
        environ: the user's variables.
        say: takes each line for the user.

    Raises:
        UsageError: something is missing; nothing was begun.
        DualevalError: a step failed, or the Horovod that was installed is not what was wanted.
    """
    plan = _plan(wishes, environ)
    folder = _folder(plan, wishes, environ)
    entry = None if wishes.rebuild else find(folder, plan, say)
    lacks = plan.lacks(cached=entry is not None)
    installed = entry is not None and _is_installed(entry) and not plan.absent
    if installed and not lacks and difference(plan, environ) is None:
        say(f"Nothing to do: Horovod {HOROVOD} is installed as wanted ({summary(plan)}).")
        return
    _require(lacks)
    _make_cache(folder.parent)
    if entry is None:
        for line in description(plan):
            say(line)
        say(f"  cache  {folder}")
        say(_time_needed(usable_cores(), plan))
    else:
        say(f"Installing the wheel in {folder}.")
    _install(plan, entry, folder, wishes, environ, say)
    wrong = difference(plan, environ)
    if wrong is not None:
        shutil.rmtree(folder, ignore_errors=True)
        raise DualevalError(f"Horovod was installed, but {wrong}\nIts wheel was taken out of the cache.")
    say(f"Horovod {HOROVOD} is installed ({summary(plan)}).")


def _time_needed(cores: int, plan: Plan) -> str:
    least, most = minutes(cores, nccl=plan.nccl is not None)
    return (
        f"This takes {least} to {most} min on {cores} core{'s' if cores > 1 else ''}, the more the busier "
        f"the machine is; from the cache it is seconds."
    )


def dry_run(wishes: Wishes, environ: Mapping[str, str], say: Say) -> None:
    """Say what ``set_up`` would do, and do nothing.

    Raises:
        UsageError: something is missing, as in ``set_up``.
    """
    plan = _plan(wishes, environ)
    folder = _folder(plan, wishes, environ)
    for line in description(plan):
        say(line)
    say(f"  cache  {folder}")
    say(f"key: {plan.key}, of")
    say(json.dumps(plan.components, indent=2, sort_keys=True))
    entry = None if wishes.rebuild else find(folder, plan, say)
    say(f"in the cache: {'yes' if entry else 'no'}")
    say(f"installed: {'yes' if entry and _is_installed(entry) else 'no'}")
    say("commands:")
    wheel = str(entry.wheel if entry else folder / f"horovod-{HOROVOD}-*.whl")
    for command in commands(plan, cached=entry is not None, wheel=wheel, constraint=wishes.constraint):
        say(f"  {' '.join(command)}")
    _require(plan.lacks(cached=entry is not None))


def _plan(wishes: Wishes, environ: Mapping[str, str]) -> Plan:
    return make_plan(inspect(environ), environ, with_mpi=wishes.with_mpi, with_nccl=wishes.with_nccl)


def _install(
    plan: Plan, entry: Entry | None, folder: Path, wishes: Wishes, environ: Mapping[str, str], say: Say
) -> None:
    """Install a wheel of the cache; where ``entry`` is None, build it first."""
    interpreter, absent = plan.machine.interpreter, plan.absent
    with _ended_by_signals(), _work_beside(folder) as log:
        if absent:
            say(f"Installing {', '.join(absent)}.")
            command = requirements_command(interpreter, absent, wishes.constraint)
            _run("installing Horovod's requirements", command, environ, log)
        if entry is None:
            started = monotonic()
            entry = build(plan, folder, environ, log, replace=wishes.rebuild)
            say(f"Built in {monotonic() - started:.0f} s.")
        command = install_command(interpreter, str(entry.wheel), wishes.constraint)
        _run("installing the wheel", command, environ, log)


@contextmanager
def _work_beside(folder: Path) -> Iterator[Path]:
    """Give a log in a new folder to work in. Where a step fails, the log is kept beside ``folder``."""
    with tempfile.TemporaryDirectory(prefix="dualeval-horovod-") as work:
        log = Path(work) / "build.log"
        try:
            yield log
        except _StepError as error:
            kept = folder.with_name(f"{folder.name}.failed.log")
            shutil.copy(log, kept)
            raise DualevalError(f"{error}\nThe whole log: {kept}\n{hint(_read(log))}") from error


def _require(missing: Sequence[str]) -> None:
    if missing:
        items = "".join(f"\n  - {item}" for item in missing)
        raise UsageError(f"Horovod cannot be set up yet; nothing was begun. What is missing:{items}")


def _folder(plan: Plan, wishes: Wishes, environ: Mapping[str, str]) -> Path:
    """The plan's folder in the cache."""
    return (wishes.cache or cache_folder(environ)).absolute() / plan.name


def _make_cache(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"The cache {folder} cannot be made ({error}). Name another with --cache."
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"The cache {folder} cannot be written to. Name another with --cache.")


def cache_folder(environ: Mapping[str, str]) -> Path:
    """The user's cache, where no other was named."""
    home = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or Path.home()) / ".cache")
    return Path(home) / "dualeval/horovod"


# The cache.


def find(folder: Path, plan: Plan, say: Say) -> Entry | None:
    """Find the plan's wheel in its folder of the cache; None where there is none, or a damaged one."""
    if not folder.exists():
        return None
    try:
        record = json.loads(_read(folder / "build.json"))
        wheel = folder / record["wheel"]
        if record["key"] == plan.key and sha256(wheel.read_bytes()) == record["wheel_sha256"]:
            return Entry(wheel=wheel, library_sha256=record["library_sha256"])
        fault = "the files are not those that build.json lists"
    except (OSError, ValueError, KeyError, TypeError) as error:
        fault = f"{type(error).__name__}: {error}"
    say(f"The wheel in {folder} is damaged ({fault}); it is not used.")
    return None


def place(files: Sequence[Path], folder: Path) -> None:
    """Make ``folder`` hold copies of some files: all at once, in place of what is there."""
    staging = folder.with_name(f".{uuid.uuid4().hex}")
    staging.mkdir()
    try:
        for file in files:
            shutil.copy(file, staging)
        while True:
            try:
                staging.rename(folder)
                return
            except OSError as error:
                # A folder with files in it cannot be replaced, only moved away.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                _remove(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _remove(folder: Path) -> None:
    away = folder.with_name(f".{uuid.uuid4().hex}")
    with suppress(FileNotFoundError):  # another build was faster
        folder.rename(away)
    shutil.rmtree(away, ignore_errors=True)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# The build.


def build(plan: Plan, folder: Path, environ: Mapping[str, str], log: Path, *, replace: bool) -> Entry:
    """Fetch, edit and compile Horovod beside ``log``, and put the wheel into its folder of the cache.

    Where another build has put one there meanwhile, that one stays (it may be being installed), unless
    ``replace``.
    """
    work, interpreter, started = log.parent, plan.machine.interpreter, monotonic()
    variables = build_variables(plan, environ, usable_cores())
    _run("fetching the source of Horovod", fetch_command(interpreter, str(work)), variables, log)
    archive = work / f"horovod-{HOROVOD}.tar.gz"
    source = unpack(archive, work)
    edit(source, plan)
    _run("compiling Horovod", compile_command(interpreter, str(source), str(work)), variables, log)
    (wheel,) = work.glob("*.whl")
    library = library_in(wheel)
    record = {
        "key": plan.key,
        "components": plan.components,
        "source_sha256": sha256(archive.read_bytes()),
        "wheel": wheel.name,
        "wheel_sha256": sha256(wheel.read_bytes()),
        "library_sha256": sha256(library),
        "built": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(monotonic() - started, 1),
    }
    described = work / "build.json"
    described.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", "utf-8")
    other = None if replace else find(folder, plan, lambda _: None)
    if other is not None:
        return other
    place([wheel, described, log], folder)
    return Entry(wheel=folder / wheel.name, library_sha256=sha256(library))


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a source archive; returns the folder of the source."""
    with tarfile.open(archive) as packed:
        if hasattr(tarfile, "data_filter"):
            packed.extractall(folder, filter="data")
        else:  # Python 3.11.2, as in Debian 12
            packed.extractall(folder)
    return folder / archive.name.removesuffix(".tar.gz")


def edit(source: Path, plan: Plan) -> None:
    """Apply the plan's edits to an unpacked source."""
    assert plan.machine.torch is not None
    assert plan.machine.torch.standard is not None
    for change in edits_for(plan.machine.torch, plan.nccl):
        file = source / change.file
        file.write_text(edited(_read(file), change, plan.machine.torch.standard), "utf-8")


def library_in(wheel: Path) -> bytes:
    """The compiled part in a wheel."""
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if LIBRARY.fullmatch(name)]
        if len(names) != 1:
            raise DualevalError(f"The wheel {wheel.name} has {len(names)} libraries for torch, expected one.")
        return packed.read(names[0])


def _run(step: str, command: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
    """Run a command into the log; where it is interrupted, end all that it started.

    Raises:
        _StepError: it failed.
    """
    with log.open("ab") as sink:
        sink.write(f"\n--- {step}: {' '.join(command)}\n".encode())
        sink.flush()
        begin = sink.tell()
        process = subprocess.Popen(
            command,
            env=dict(variables),
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait()
        except BaseException:
            _end(process)
            raise
    if code != 0:
        output = log.read_bytes()[begin:].decode(errors="replace")
        raise _StepError(f"{step} ended with exit code {code}:\n{excerpt(output)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group: first by asking, then by force."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    # Compilers may outlive the pip that is their parent; a group is there as long as one member is.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this as Ctrl-C does: with nothing left behind. For the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [
        number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


# Whether it is there, and is what was wanted.


def _is_installed(entry: Entry) -> bool:
    """Tell whether the Horovod that is installed is the one in the cache."""
    try:
        files = importlib.metadata.distribution("horovod").files or []
    except importlib.metadata.PackageNotFoundError:
        return False
    paths = [Path(str(file.locate())) for file in files if LIBRARY.fullmatch(str(file))]
    return any(path.is_file() and sha256(path.read_bytes()) == entry.library_sha256 for path in paths)


def difference(plan: Plan, environ: Mapping[str, str]) -> str | None:
    """What is wrong with the installed Horovod, asked in a process of its own; None where nothing is."""
    try:
        done = subprocess.run(
            [plan.machine.interpreter, "-c", _ASK],
            env=dict(environ),
            # Not where the user is: a clone of Horovod there would be imported instead.
            cwd=Path(plan.machine.interpreter).parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return f"importing it did not end in {_ASK_TIMEOUT:.0f} s."
    if done.returncode != 0:
        return f"it cannot be imported:\n{excerpt(done.stderr)}"
    found = json.loads(done.stdout.splitlines()[-1])
    wanted = {"gloo": True, "MPI": plan.mpi is not None, "NCCL": plan.nccl is not None}
    wrong = [
        f"{name}: {found[name]}, expected {wanted[name]}" for name in wanted if found[name] != wanted[name]
    ]
    return f"it is built with other parts than wanted ({'; '.join(wrong)})." if wrong else None


# What a log tells.


def excerpt(output: str) -> str:
    """The lines of a log that tell why: its first error with what follows, and its end."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    first = next(
        (n for n, line in enumerate(lines) if re.search(r"(?i)\berror: |CMake Error", line)), len(lines)
    )
    begin, end = lines[first : first + 8], lines[max(first + 8, len(lines) - 8) :]
    if first == len(lines):
        end = lines[-8:]
    return "\n".join(f"  | {line}" for line in [*begin, *(["..."] if begin and end else []), *end])


_HINTS = (
    (r"No space left on device", "The disk is full: set TMPDIR to a folder with 1 GB free."),
    (
        r"Killed signal|cc1plus.*killed|out of memory|virtual memory exhausted",
        "The compiler ran out of memory: type 'MAKEFLAGS=-j1 dualeval setup-horovod'.",
    ),
    (
        r"No matching distribution found|Could not find a version|Connection|Temporary failure in name",
        f"pip cannot reach its package index: 'pip download --no-deps horovod=={HOROVOD}' must work first.",
    ),
    (
        r"Could NOT find MPI",
        "CMake does not find the MPI: type 'dualeval setup-horovod --without-mpi' to do without.",
    ),
    (
        r"Could NOT find NCCL",
        "CMake does not find NCCL: type 'dualeval setup-horovod --without-nccl' to do without.",
    ),
)


def hint(log: str) -> str:
    """What to try after a failure."""
    for pattern, advice in _HINTS:
        if re.search(pattern, log):
            return advice
    return "Nothing was installed over what was there. The first error in the log is the one to look at."


def _read(path: Path) -> str:
    return path.read_text("utf-8", errors="replace")
