"""Install Horovod for the installed torch, built or from a cache: ``dualeval setup-horovod``.

Fetch, edit, build, install, check. A wheel in the cache has a folder of its own, named by what it was built
for, with ``build.json`` (all that the wheel depends on) and ``build.log`` beside it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import click

from dualeval.errors import DualevalError, UsageError
from dualeval.launch.cores import usable_cores
from dualeval.tools.horovod.build import (
    COMPILER_VARIABLES,
    HOROVOD,
    Build,
    Mpi,
    Nccl,
    edit,
    find_compiler,
    find_mpi,
    find_nccl,
    find_torch,
    is_installed,
    missing_tools,
)
from dualeval.tools.starts import run_supervised

# What Horovod's setup.py needs before it compiles, and what Horovod needs at run time.
REQUIREMENTS = ("cffi", "cloudpickle", "numpy", "packaging", "psutil", "pyyaml", "setuptools", "wheel")
# What ranks need as well where Horovod is built with MPI: they wait for each other over it, asleep.
MPI_REQUIREMENT = "mpi4py"
# The compiled part: in the wheel, and where the wheel is installed.
LIBRARY = re.compile(r"horovod/torch/mpi_lib_v2\.[^/]*\.so")
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
# In the folder of the build.
_FETCH = [*_PIP, "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
_FETCH += ["--dest", ".", f"horovod=={HOROVOD}"]
_COMPILE = [*_PIP, "wheel", "-v", "--no-deps", "--no-build-isolation", "--wheel-dir", "."]
_COMPILE += [f"./horovod-{HOROVOD}"]
_ASK = """
import horovod.torch as hvd
print(f"gloo {bool(hvd.gloo_built())}, MPI {bool(hvd.mpi_built())}, NCCL {bool(hvd.nccl_built())}")
"""
_ASK_TIMEOUT = 120.0
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False, resolve_path=True)


@click.command("setup-horovod")
@click.option("--with-mpi/--without-mpi", default=None, help="Build with MPI.  [default: if mpicxx is found]")
@click.option(
    "--with-nccl/--without-nccl",
    default=None,
    help="Build with NCCL.  [default: if torch has CUDA and nvcc is found]",
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for built wheels.  [default: ~/.cache/dualeval/horovod]",
)
@click.option("--rebuild", is_flag=True, help="Build even if the cache has the wheel.")
@click.option("--constraint", type=_FILE, help="Constraints file for pip.")
@click.option("--dry-run", is_flag=True, help="Print the plan; build nothing.")
def setup_horovod(dry_run: bool, **wishes: Any) -> None:
    """Build Horovod for the installed torch and install it; a cache keeps the wheel."""
    (_show if dry_run else _set_up)(make_plan(os.environ, **wishes))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be done."""

    # The variables of all that is started; the folder of this Python is the first on its PATH, whether its
    # environment is activated or not.
    environ: Mapping[str, str]
    build: Build
    # Of the build in the cache; `wheel`: the one in it, None where it has to be built.
    folder: Path
    wheel: Path | None
    # Whether that wheel is what is installed.
    installed: bool
    # Packages to install beside Horovod: for its build, and for its ranks.
    absent: Sequence[str]
    # What has to be there first, each with what to type: less where there is a wheel.
    missing: Sequence[str]
    # Lines that tell what is built, and why it is without MPI or NCCL.
    description: Sequence[str]
    # Pip's options for the versions.
    pins: Sequence[str]

    @property
    def install_absent(self) -> list[str]:
        return [*_PIP, "install", *self.pins, *self.absent]

    def install(self, wheel: Path) -> list[str]:
        """Install a wheel and nothing else, in place of a Horovod that is there."""
        return [*_PIP, "install", "--no-deps", "--force-reinstall", *self.pins, str(wheel)]


def make_plan(
    environ: Mapping[str, str],
    *,
    with_mpi: bool | None,
    with_nccl: bool | None,
    cache: Path | None,
    rebuild: bool,
    constraint: Path | None,
) -> Plan:
    """Look what is there, and decide what to do; changes nothing."""
    path = f"{Path(sys.executable).parent}:{environ.get('PATH', '/usr/bin:/bin')}"
    environ = {**environ, "PATH": path, "LC_ALL": "C"}
    torch = find_torch()
    mpi = "--without-mpi" if with_mpi is False else find_mpi(environ)
    nccl = "--without-nccl" if with_nccl is False else find_nccl(environ, torch.cuda)
    build = Build(
        torch=torch,
        compiler=find_compiler(environ)[1],
        mpi=mpi if isinstance(mpi, Mpi) else None,
        nccl=nccl if isinstance(nccl, Nccl) else None,
        compiler_variables={name: environ[name] for name in COMPILER_VARIABLES if name in environ},
    )
    folder = (cache or cache_folder(environ)).absolute() / build.name
    wheel = None if rebuild else next(folder.glob("*.whl"), None)
    missing = [] if wheel else list(missing_tools(environ, torch))
    if with_mpi and isinstance(mpi, str):
        missing.append(f"MPI, for --with-mpi: {mpi}")
    if with_nccl and isinstance(nccl, str):
        missing.append(f"NCCL, for --with-nccl: {nccl}")
    needed = [*REQUIREMENTS, *([MPI_REQUIREMENT] if build.mpi else [])]
    return Plan(
        environ=environ,
        build=build,
        folder=folder,
        wheel=wheel,
        installed=wheel is not None and is_wheel_installed(wheel),
        absent=[name for name in needed if not is_installed(name)],
        missing=missing,
        description=[
            f"Horovod {HOROVOD} for torch {torch.version} (C++{torch.standard}), {build.python}",
            "  gloo   yes",
            f"  MPI    {f'no: {mpi}' if isinstance(mpi, str) else f'{mpi.version}, {mpi.wrapper}'}",
            f"  NCCL   {f'no: {nccl}' if isinstance(nccl, str) else f'{nccl.version}, {nccl.home}'}",
            f"  cache  {folder}",
        ],
        pins=[] if constraint is None else ["--constraint", str(constraint)],
    )


def _set_up(plan: Plan) -> None:
    """Install the Horovod that fits this machine, from the cache or built, where it is not installed yet.

    SIGTERM and SIGHUP interrupt as Ctrl-C does, which leaves nothing behind.
    """
    build, folder, wheel = plan.build, plan.folder, plan.wheel
    if plan.installed and not (plan.absent or plan.missing) and difference(build, plan.environ) is None:
        click.echo(f"Nothing to do: Horovod {HOROVOD} is installed as wanted ({build.summary}).")
        return
    _require(plan.missing)
    _make_cache(folder.parent)
    if wheel is None:
        click.echo("\n".join(plan.description))
        minutes = "3 to 20" if build.nccl else "1 to 9"
        click.echo(f"This takes {minutes} min, and more on a busy machine; from the cache it is seconds.")
    else:
        click.echo(f"Installing the wheel in {folder}.")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="dualeval-horovod-") as scratch:
        log = Path(scratch) / "build.log"
        if plan.absent:
            click.echo(f"Installing {', '.join(plan.absent)}.")
            _run("installing Horovod's requirements", plan.install_absent, plan.environ, log, folder)
        if wheel is None:
            started = monotonic()
            wheel = _build(build, folder, plan.environ, log)
            click.echo(f"Built in {monotonic() - started:.0f} s.")
        _run("installing the wheel", plan.install(wheel), plan.environ, log, folder)
    wrong = difference(build, plan.environ)
    if wrong is not None:
        shutil.rmtree(folder, ignore_errors=True)
        raise DualevalError(f"Horovod was installed, but {wrong}\nIts wheel was taken out of the cache.")
    click.echo(f"Horovod {HOROVOD} is installed ({build.summary}).")


def _show(plan: Plan) -> None:
    """Say what would be done, and do nothing."""
    click.echo("\n".join(plan.description))
    click.echo(f"key: {plan.build.key}, of")
    click.echo(json.dumps(plan.build.components, indent=2, sort_keys=True))
    click.echo(f"in the cache: {'yes' if plan.wheel else 'no'}")
    click.echo(f"installed: {'yes' if plan.installed else 'no'}")
    click.echo("commands:")
    commands = [plan.install_absent] if plan.absent else []
    commands += [] if plan.wheel else [_FETCH, _COMPILE]
    commands.append(plan.install(plan.wheel or plan.folder / f"horovod-{HOROVOD}-*.whl"))
    for command in commands:
        click.echo(f"  {' '.join(command)}")
    _require(plan.missing)


def _require(missing: Sequence[str]) -> None:
    if missing:
        items = "".join(f"\n  - {item}" for item in missing)
        raise UsageError(f"Horovod cannot be set up yet; nothing was started. Missing:{items}")


# The cache.


def cache_folder(environ: Mapping[str, str]) -> Path:
    """The user's cache, where no other was named."""
    home = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or Path.home()) / ".cache")
    return Path(home) / "dualeval/horovod"


def _make_cache(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(
            f"The cache {folder} cannot be made or written to ({error}). Name another with --cache."
        ) from error


def place(files: Sequence[Path], folder: Path) -> None:
    """Copy some files into a folder of the cache, each at once, in place of what is there."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as staging:
        for file in files:
            Path(shutil.copy(file, staging)).replace(folder / file.name)


# The build.


def _build(build: Build, folder: Path, environ: Mapping[str, str], log: Path) -> Path:
    """Fetch, edit and compile Horovod beside ``log``; returns the wheel, in its folder of the cache."""
    scratch, source = log.parent, log.with_name(f"horovod-{HOROVOD}")
    variables = build.variables(environ, usable_cores())
    _run("fetching the source of Horovod", _FETCH, variables, log, folder)
    with tarfile.open(f"{source}.tar.gz") as packed:
        if hasattr(tarfile, "data_filter"):
            packed.extractall(scratch, filter="data")
        else:  # Python 3.11.2, as in Debian 12
            packed.extractall(scratch)
    edit(source, build)
    _run("compiling Horovod", _COMPILE, variables, log, folder)
    [wheel] = scratch.glob("*.whl")
    components = scratch / "build.json"
    components.write_text(json.dumps(build.components, indent=2, sort_keys=True) + "\n", "utf-8")
    place([components, log, wheel], folder)
    return folder / wheel.name


def _run(step: str, command: Sequence[str], variables: Mapping[str, str], log: Path, folder: Path) -> None:
    """Run a command into the log; where it is interrupted, end all that it started."""
    with log.open("ab") as sink:
        sink.write(f"\n--- {step}: {' '.join(command)}\n".encode())
        begin = sink.tell()
    # Interrupted, pip puts back what it was replacing.
    code = run_supervised(
        command, stdout=log, stderr=log, environ=variables, folder=log.parent, end_by=signal.SIGINT
    ).code
    if code != 0:
        output = log.read_bytes()[begin:].decode(errors="replace")
        kept = shutil.copy(log, folder.with_name(f"{folder.name}.failed.log"))
        raise DualevalError(
            f"{step} ended with exit code {code}:\n{excerpt(output)}\nFull log: {kept}\n{hint(output)}"
        )


# Whether it is there, and is what was wanted.


def is_wheel_installed(wheel: Path) -> bool:
    """Tell whether the compiled part of the installed Horovod is the one in a wheel."""
    if not is_installed("horovod"):
        return False
    files = importlib.metadata.files("horovod") or []
    paths = {str(file): Path(str(file.locate())) for file in files if LIBRARY.fullmatch(str(file))}
    installed = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    with zipfile.ZipFile(wheel) as packed:
        return installed == {name: packed.read(name) for name in packed.namelist() if LIBRARY.fullmatch(name)}


def difference(build: Build, environ: Mapping[str, str]) -> str | None:
    """What is wrong with the installed Horovod, asked in a process of its own; None where nothing is."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK],
            env=dict(environ),
            # Not where the user is: a clone of Horovod there would be imported instead.
            cwd=Path(sys.executable).parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return f"importing it took more than {_ASK_TIMEOUT:.0f} s."
    if done.returncode != 0:
        return f"it cannot be imported:\n{excerpt(done.stderr)}"
    features = done.stdout.splitlines()[-1]
    wanted = f"gloo True, MPI {build.mpi is not None}, NCCL {build.nccl is not None}"
    return None if features == wanted else f"it is built with {features}; expected {wanted}."


# What a log tells.


def excerpt(output: str) -> str:
    """The lines of a log that tell why: its first error with what follows, and its end."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    is_error = re.compile(r"(?i)\berror: |CMake Error").search
    first = next((n for n, line in enumerate(lines) if is_error(line)), max(0, len(lines) - 8))
    begin, end = lines[first : first + 8], lines[max(first + 8, len(lines) - 8) :]
    return "\n".join(f"  | {line}" for line in [*begin, *(["..."] if end else []), *end])


_HINTS = (
    (r"Python\.h: No such file", "Python's headers are missing: type 'apt install python3-dev'."),
    (
        r"find a build program|CMAKE_C_COMPILER",
        "CMake lacks a C compiler or make: type 'apt install gcc make', or set CC.",
    ),
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
    return "The previous installation is unchanged. Look at the first error in the log."
