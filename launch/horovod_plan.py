"""What is built of Horovod on a machine, and how: edits, key, variables and commands. Pure functions.

Horovod 0.28.1, its last version, comes as source alone and asks for C++14. The headers of every torch since
2.1 need more, so that a plain ``pip install horovod`` does not compile. What makes it compile are edits of
its build files; ``horovod_build`` makes them in a copy of its own.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dualeval.errors import DualevalError
from dualeval.launch.horovod_machine import (
    MPI_REQUIREMENT,
    Machine,
    Mpi,
    Nccl,
    Torch,
    numbers_of,
    search_path,
)

HOROVOD = "0.28.1"
# Raise it where equal components would give another wheel than before.
RECIPE = 1
OLDEST_CMAKE = (3, 13)
OLDEST_TORCH = (2, 8)

# Variables of the user's that change what is compiled: they are passed on, and are part of the key.
BUILD_VARIABLES = (
    *("CPPFLAGS", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH"),
    *("HOROVOD_BUILD_ARCH_FLAGS", "HOROVOD_BUILD_CUDA_CC_LIST"),
)
# All others of Horovod's and CMake's are left out: they would make another wheel under the same key. What a
# make that calls us says to its own children is not for ours.
_DROPPED_PREFIXES = ("HOROVOD_", "CMAKE_")
_DROPPED = ("MAKELEVEL", "MFLAGS", "MAKEFLAGS", "MAKEOVERRIDES", "CCL_ROOT")


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One change of a file of the source: ``old``, which is in it once, becomes ``new``."""

    file: str
    old: str
    new: str


_STANDARD = "set(CMAKE_CXX_STANDARD 14)"
_PROCESS_SET = "assert(global_context.IsEnabled());"
_FLAGS = "CMAKE_CXX_FLAGS_RELWITHDEBINFO"
EDITS = (
    Edit(file="CMakeLists.txt", old=_STANDARD, new="set(CMAKE_CXX_STANDARD {standard})"),
    Edit(file="horovod/torch/CMakeLists.txt", old=_STANDARD, new="set(CMAKE_CXX_STANDARD {standard})"),
    # Without debug symbols: they are nine tenths of the wheel and a third of the time.
    Edit(
        file="CMakeLists.txt",
        old=f'string(REPLACE "-O2" "-O3" {_FLAGS} "${{{_FLAGS}}}")',
        new=f'set({_FLAGS} "-O2 -g0 -DNDEBUG")',
    ),
    # For any CPU of this kind, not for this one: machines of several generations may share a cache.
    Edit(file="CMakeLists.txt", old='set(ARCH_FLAGS "-mf16c" "-mavx" "-mfma")', new="set(ARCH_FLAGS)"),
    # What all ranks talk over forgets HOROVOD_GLOO_IFACE and takes the address of the host's own name, which
    # on many hosts is 127.0.1.1: no other host can connect to that.
    Edit(
        file="horovod/common/gloo/gloo_context.cc",
        old=_PROCESS_SET,
        new=f"{_PROCESS_SET} gloo_iface_ = global_context.gloo_iface_;",
    ),
    # pip's NCCL has the library under this name alone.
    Edit(
        file="cmake/Modules/FindNCCL.cmake",
        old='set(NCCL_LIBNAME "nccl")',
        new='set(NCCL_LIBNAME "nccl" "libnccl.so.2")',
    ),
)
# Six sources a compiler call: torch's headers are most of each.
_NAME = 'OUTPUT_NAME "mpi_lib_v2"'
UNITY = Edit(
    file="horovod/torch/CMakeLists.txt", old=_NAME, new=f"{_NAME} UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 6"
)
# Beside a CUDA torch, without NCCL. Horovod would compile its CUDA parts wherever torch finds a folder of
# CUDA's, and fail where that has no compiler (images for running alone). Without NCCL they only copy to the
# host, which the backend does itself.
WITHOUT_CUDA = (
    Edit(
        file="CMakeLists.txt",
        old="include(CheckLanguage)\ncheck_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)",
        new="if(FALSE)",
    ),
    Edit(
        file="cmake/Modules/FindPytorch.cmake",
        old="print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)",
        new="print(False)",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be built on a machine.

    Attributes:
        mpi: what it is built with; None for without. ``nccl`` likewise.
        notes: by "MPI" and "NCCL", where it is built without: the reason.
        unmet: what the caller asked for and this machine cannot give, each with what to type.
        components: all that the wheel depends on.
    """

    machine: Machine
    mpi: Mpi | None
    nccl: Nccl | None
    notes: Mapping[str, str]
    unmet: tuple[str, ...]
    components: Mapping[str, Any]

    @property
    def key(self) -> str:
        return key_of(self.components)

    @property
    def name(self) -> str:
        """The name of the wheel's folder in the cache."""
        torch = self.machine.torch.version if self.machine.torch else "none"
        mpi = f"{self.mpi.name} {self.mpi.version}" if self.mpi else "no mpi"
        words = f"{HOROVOD} torch {torch} python {self.machine.python} {mpi} {self.key[:16]}"
        return re.sub(r"[^a-z0-9.+]+", "-", words.lower())

    @property
    def absent(self) -> tuple[str, ...]:
        """What pip has to install beside Horovod: for its build, and for its ranks."""
        return tuple(name for name in self.machine.absent if self.mpi or name != MPI_REQUIREMENT)

    def lacks(self, *, cached: bool) -> tuple[str, ...]:
        """What has to be there first, each with what to type: less where the wheel is in the cache."""
        tools = () if cached else _lack_of_tools(self.machine)
        return (*tools, *_lack_of_pip(self.machine), *self.unmet)


def make_plan(
    machine: Machine, environ: Mapping[str, str], *, with_mpi: bool | None, with_nccl: bool | None
) -> Plan:
    """Decide what to build.

    Args:
        machine: what ``inspect`` found.
        environ: the user's variables.
        with_mpi: whether to build with MPI; None: where there is one. ``with_nccl`` likewise.
    """
    notes, unmet = {}, []
    for name, wanted, lack in (
        ("MPI", with_mpi, _lack_of_mpi(machine)),
        ("NCCL", with_nccl, _lack_of_nccl(machine)),
    ):
        if wanted is False:
            notes[name] = f"--without-{name.lower()}"
        elif lack is not None:
            notes[name] = lack
            if wanted:
                unmet.append(f"{name}, for --with-{name.lower()}: {lack}")
    mpi = None if "MPI" in notes else machine.mpi
    nccl = None if "NCCL" in notes else machine.nccl
    return Plan(
        machine=machine,
        mpi=mpi,
        nccl=nccl,
        notes=notes,
        unmet=tuple(unmet),
        components=_components(machine, environ, mpi, nccl),
    )


def _lack_of_tools(machine: Machine) -> Iterator[str]:
    yield from _lack_of_torch(machine)
    if machine.compiler is None:
        yield "a C++ compiler: type 'apt install g++' (conda: 'conda install cxx-compiler'), or set CXX"
    elif machine.torch is not None and machine.torch.standard is not None and not machine.compiles:
        yield (
            f"a compiler for C++{machine.torch.standard}, which torch {machine.torch.version} needs (found "
            f"{machine.compiler.version}): install a later one, and set CC and CXX to it"
        )
    if machine.c_compiler is None:
        yield "a C compiler: type 'apt install gcc' (conda: 'conda install c-compiler'), or set CC"
    least = ".".join(map(str, OLDEST_CMAKE))
    if machine.cmake is None:
        yield f"cmake {least} or later: type 'pip install cmake'"
    elif numbers_of(machine.cmake.version) < OLDEST_CMAKE:
        found = f"{machine.cmake.version} in {machine.cmake.command[0]}"
        yield f"cmake {least} or later (found {found}): type 'pip install cmake'"
    if machine.make is None:
        yield "make: type 'apt install make' (conda: 'conda install make')"
    if not machine.has_headers:
        yield f"Python's headers (no Python.h in {machine.headers}): type 'apt install python3-dev'"


def _lack_of_pip(machine: Machine) -> Iterator[str]:
    if not machine.has_pip:
        yield f"pip: type '{machine.interpreter} -m ensurepip'"
    if machine.managed:
        yield (
            "a virtual environment (pip may not install into the system's Python): type "
            "'python3 -m venv .venv', and install dualeval in there"
        )


def _lack_of_torch(machine: Machine) -> Iterator[str]:
    torch, least = machine.torch, ".".join(map(str, OLDEST_TORCH))
    if torch is None:
        yield f"torch {least} or later: type 'pip install torch'"
    elif numbers_of(torch.version) < OLDEST_TORCH:
        yield f"torch {least} or later (found {torch.version}): type 'pip install --upgrade torch'"
    elif torch.standard is None:
        yield (
            f"the C++ standard that torch {torch.version} needs (neither its share/cmake nor its "
            f"utils/cpp_extension.py tells): type 'pip install --force-reinstall torch'"
        )


def _lack_of_mpi(machine: Machine) -> str | None:
    if machine.mpi is not None:
        return None
    found = f"{machine.mpirun}, but no mpicxx" if machine.mpirun else "neither mpicxx nor mpirun on the PATH"
    return f"found {found}; type 'apt install openmpi-bin libopenmpi-dev', or load your cluster's MPI module"


def _lack_of_nccl(machine: Machine) -> str | None:
    torch, toolkit = machine.torch, machine.toolkit
    if torch is None or torch.cuda is None:
        return "torch is not built with CUDA"
    major = numbers_of(torch.cuda)[0]
    if toolkit is None:
        return (
            f"found no nvcc on the PATH or in CUDA_HOME; install NVIDIA's CUDA toolkit {major}, set CUDA_HOME"
        )
    if numbers_of(toolkit.version)[0] != major:
        return (
            f"the CUDA toolkit in {toolkit.home} is {toolkit.version}, and torch is built with CUDA "
            f"{torch.cuda}; set CUDA_HOME to a toolkit {major}"
        )
    if machine.nccl is None:
        return f"found no nccl.h; type 'pip install nvidia-nccl-cu{major}', or set NCCL_HOME"
    return None


def key_of(components: Mapping[str, Any]) -> str:
    """The sha256 of components as canonical JSON."""
    return hashlib.sha256(json.dumps(components, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _components(
    machine: Machine, environ: Mapping[str, str], mpi: Mpi | None, nccl: Nccl | None
) -> dict[str, Any]:
    return {
        "horovod": HOROVOD,
        "recipe": RECIPE,
        "edits": key_of({"edits": [asdict(edit) for edit in edits_for(machine.torch, nccl)]}),
        "torch": asdict(machine.torch) if machine.torch else None,
        "python": machine.python,
        "soabi": machine.soabi,
        "platform": machine.platform,
        "libc": machine.libc,
        "compiler": machine.compiler.version if machine.compiler else None,
        "mpi": asdict(mpi) if mpi else None,
        "nccl": asdict(nccl) if nccl else None,
        "toolkit": asdict(machine.toolkit) if machine.toolkit and nccl else None,
        "switches": _switches(machine, mpi, nccl),
        "variables": {name: environ[name] for name in BUILD_VARIABLES if name in environ},
    }


def edits_for(torch: Torch | None, nccl: Nccl | None) -> tuple[Edit, ...]:
    """The edits of a build; with NCCL each source stays a compiler call of its own."""
    if nccl is not None:
        return EDITS
    has_cuda = torch is not None and torch.cuda is not None
    return (*EDITS, UNITY, *(WITHOUT_CUDA if has_cuda else ()))


def edited(text: str, edit: Edit, standard: int) -> str:
    """The text of a source file after an edit.

    Raises:
        DualevalError: what is to be replaced is not there exactly once.
    """
    found = text.count(edit.old)
    if found != 1:
        raise DualevalError(
            f"What pip fetched is not the source of Horovod {HOROVOD}: its {edit.file} has "
            f"'{edit.old.splitlines()[0]}' "
            f"{found} times, expected once. 'pip config list' shows where pip looks; point it to a true copy."
        )
    return text.replace(edit.old, edit.new.replace("{standard}", str(standard)))


def _switches(machine: Machine, mpi: Mpi | None, nccl: Nccl | None) -> dict[str, str]:
    """The variables by which Horovod's build is told what to build."""
    chosen = {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_NVTX": "1",
    }
    if mpi is None:
        chosen["HOROVOD_WITHOUT_MPI"] = "1"
    else:
        chosen |= {"HOROVOD_WITH_MPI": "1", "MPI_HOME": str(Path(mpi.wrapper).parent.parent)}
    if nccl is not None and machine.toolkit is not None:
        chosen |= {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_NCCL_LINK": "SHARED",
            "HOROVOD_NCCL_HOME": nccl.home,
            "HOROVOD_CUDA_HOME": machine.toolkit.home,
            "CUDA_HOME": machine.toolkit.home,
        }
    return chosen


def build_variables(plan: Plan, environ: Mapping[str, str], cores: int) -> dict[str, str]:
    """All variables of the process that compiles; nothing that it needs may be missing."""
    machine = plan.machine
    assert machine.compiler and machine.c_compiler and machine.cmake
    kept = {
        name: value
        for name, value in environ.items()
        if name in BUILD_VARIABLES or not (name in _DROPPED or name.startswith(_DROPPED_PREFIXES))
    }
    return {
        **kept,
        **_switches(machine, plan.mpi, plan.nccl),
        "PATH": search_path(environ),
        "LC_ALL": "C",
        "CC": shlex.join(machine.c_compiler.command),
        "CXX": shlex.join(machine.compiler.command),
        "HOROVOD_CMAKE": machine.cmake.command[0],
        # Horovod's copy of gloo asks for CMake 2.8, which CMake 4 refuses without this.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "MAKEFLAGS": makeflags(environ, cores),
    }


def makeflags(environ: Mapping[str, str], cores: int) -> str:
    """The user's own MAKEFLAGS, else a job a core; called by a make, the number of jobs that it was given."""
    flags = environ.get("MAKEFLAGS", "")
    if flags and "MAKELEVEL" not in environ:
        return flags
    jobs = re.search(r"(?:^|\s)-j\s*(\d+)", flags)
    return f"-j{jobs[1] if jobs else cores}"


def minutes(cores: int, *, nccl: bool) -> tuple[int, int]:
    """From how many minutes to how many a build takes.

    Measured on 1 and 2 cores, idle ones and ones that others used as well: 74 to 309 s on two, and with
    NCCL, whose kernels are compiled for all GPUs, 171 s.
    """
    idle_s = 30 + (300 if nccl else 150) / cores
    return max(1, int(0.7 * idle_s / 60)), -int(-3 * idle_s // 60)


def description(plan: Plan) -> Iterator[str]:
    """Say what is built, and for what."""
    machine, mpi, nccl = plan.machine, plan.mpi, plan.nccl
    torch = f"torch {machine.torch.version} (C++{machine.torch.standard})" if machine.torch else "no torch"
    yield f"Horovod {HOROVOD} for {torch}, Python {machine.python}, {machine.libc}"
    yield "  gloo   yes"
    yield f"  MPI    {f'{mpi.name} {mpi.version}, {mpi.wrapper}' if mpi else 'no: ' + plan.notes['MPI']}"
    yield f"  NCCL   {f'{nccl.version}, {nccl.home}' if nccl else 'no: ' + plan.notes['NCCL']}"


def summary(plan: Plan) -> str:
    """What it is built with, in a few words."""
    mpi = f"{plan.mpi.name} {plan.mpi.version}" if plan.mpi else "no MPI"
    return f"gloo, {mpi}, {f'NCCL {plan.nccl.version}' if plan.nccl else 'no NCCL'}"


def commands(plan: Plan, *, cached: bool, wheel: str, constraint: Path | None) -> Iterator[list[str]]:
    """The commands of a set-up, with WORK for the folder of a build."""
    interpreter = plan.machine.interpreter
    if plan.absent:
        yield requirements_command(interpreter, plan.absent, constraint)
    if not cached:
        yield fetch_command(interpreter, "WORK")
        yield compile_command(interpreter, f"WORK/horovod-{HOROVOD}", "WORK")
    yield install_command(interpreter, wheel, constraint)


def fetch_command(interpreter: str, folder: str) -> list[str]:
    """Fetch Horovod's source archive into a folder."""
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", folder]
    return _pip(interpreter, "download", *options, f"horovod=={HOROVOD}")


def compile_command(interpreter: str, source: str, folder: str) -> list[str]:
    """Make a wheel of an unpacked source, in a folder."""
    options = ["-v", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    return _pip(interpreter, "wheel", *options, source)


def requirements_command(interpreter: str, names: Sequence[str], constraint: Path | None) -> list[str]:
    """Install requirements that are not there yet."""
    return _pip(interpreter, "install", *_constrained(constraint), *names)


def install_command(interpreter: str, wheel: str, constraint: Path | None) -> list[str]:
    """Install a wheel and nothing else, in place of a Horovod that is there."""
    return _pip(interpreter, "install", "--no-deps", "--force-reinstall", *_constrained(constraint), wheel)


def _pip(interpreter: str, *arguments: str) -> list[str]:
    return [interpreter, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def _constrained(constraint: Path | None) -> list[str]:
    return [] if constraint is None else ["--constraint", str(constraint)]
