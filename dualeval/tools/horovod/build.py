"""What ``dualeval setup-horovod`` builds on this machine: edits of Horovod's source, variables, and the key.

Horovod 0.28.1, its last version, comes as source alone and asks for C++14. The headers of every torch since
2.1 need more, so that a plain ``pip install horovod`` does not compile. The edits make it compile, find
NCCL and the network between hosts, and run on any CPU of this kind; each says why beside it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dualeval.errors import DualevalError, UsageError

HOROVOD = "0.28.1"
OLDEST_CMAKE = (3, 13)
USUAL_CUDA = "/usr/local/cuda"

# Variables of the user's that change what is compiled: they are passed on, and are part of the key.
COMPILER_VARIABLES = (
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
class Torch:
    """The installed torch, read from its files: importing it takes a second."""

    version: str
    # The CUDA that it was built with; None without.
    cuda: str | None
    # "1" where its strings are C++11's, "0" where they are the older ones; None where not told.
    abi: str | None
    # The C++ standard that its headers need, such as 20.
    standard: int


@dataclass(frozen=True, kw_only=True)
class Mpi:
    """An MPI: its compiler wrapper, what that passes to the compiler, and its name with its version."""

    wrapper: str
    version: str
    link: str


@dataclass(frozen=True, kw_only=True)
class Nccl:
    """NCCL, in the folder with ``include/nccl.h`` and ``lib``, and the CUDA toolkit to compile for it."""

    home: str
    version: str
    cuda_home: str
    cuda_version: str


@dataclass(frozen=True, kw_only=True)
class Build:
    """All that a wheel of Horovod depends on."""

    torch: Torch
    # Its version; empty where there is none.
    compiler: str
    # What it is built with; None for without. `nccl` likewise.
    mpi: Mpi | None
    nccl: Nccl | None
    # The user's, of `COMPILER_VARIABLES`.
    compiler_variables: Mapping[str, str] = field(default_factory=dict)
    # The binary interface of Python's extensions, with the platform.
    python: str = str(sysconfig.get_config_var("SOABI"))
    libc: str = " ".join(platform.libc_ver())

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The edits of the source; with NCCL each source stays a compiler call of its own."""
        if self.nccl is not None:
            return EDITS
        return (*EDITS, UNITY, *(WITHOUT_CUDA if self.torch.cuda else ()))

    @property
    def switches(self) -> dict[str, str]:
        """The variables by which Horovod's build is told what to build."""
        chosen = ["WITH_PYTORCH", "WITHOUT_TENSORFLOW", "WITHOUT_MXNET", "WITHOUT_NVTX", "WITH_GLOO"]
        chosen.append("WITH_MPI" if self.mpi else "WITHOUT_MPI")
        switches = {f"HOROVOD_{name}": "1" for name in chosen}
        if self.mpi is not None:
            switches["MPI_HOME"] = str(Path(self.mpi.wrapper).parent.parent)
        if self.nccl is not None:
            switches |= {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_LINK": "SHARED"}
            switches |= {"HOROVOD_NCCL_HOME": self.nccl.home}
            switches |= {"HOROVOD_CUDA_HOME": self.nccl.cuda_home, "CUDA_HOME": self.nccl.cuda_home}
        return switches

    @property
    def components(self) -> dict[str, Any]:
        edits = [asdict(edit) for edit in self.edits]
        return {"horovod": HOROVOD, "edits": edits, "switches": self.switches, **asdict(self)}

    @property
    def key(self) -> str:
        """The sha256 of the components as canonical JSON."""
        text = json.dumps(self.components, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def name(self) -> str:
        """The name of the wheel's folder in the cache."""
        words = f"{HOROVOD} torch {self.torch.version} {self.python} {self.summary} {self.key[:16]}"
        return re.sub(r"[^a-z0-9.+_]+", "-", words.lower())

    @property
    def summary(self) -> str:
        """What it is built with, in a few words."""
        mpi = self.mpi.version if self.mpi else "no MPI"
        return f"gloo, {mpi}, {f'NCCL {self.nccl.version}' if self.nccl else 'no NCCL'}"

    def variables(self, environ: Mapping[str, str], cores: int) -> dict[str, str]:
        """All variables of the process that compiles."""
        kept = {
            name: value
            for name, value in environ.items()
            if name in COMPILER_VARIABLES or not (name in _DROPPED or name.startswith(_DROPPED_PREFIXES))
        }
        # Horovod's copy of gloo asks for CMake 2.8, which CMake 4 refuses without the policy.
        added = {"CMAKE_POLICY_VERSION_MINIMUM": "3.5", "MAKEFLAGS": makeflags(environ, cores)}
        return {**kept, **self.switches, **added}


def find_torch() -> Torch:
    """Read the installed torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise UsageError("Horovod is built for the installed torch, and there is none: 'pip install torch'.")
    return read_torch(Path(spec.origin).parent)


def read_torch(folder: Path) -> Torch:
    """Read a torch from its folder."""
    named = runpy.run_path(str(folder / "version.py"))
    # The flags that torch gives to extensions; what is said of older standards is in examples.
    flags = re.findall(r"-std=c\+\+(\d+)", _text(folder / "utils/cpp_extension.py"))
    library = folder / "lib/libc10.so"
    return Torch(
        version=named["__version__"],
        cuda=named.get("cuda"),
        # Each function that takes one of the newer strings has this in its name.
        abi=str(int(b"NSt7__cxx1112basic_string" in library.read_bytes())) if library.is_file() else None,
        # 20: torch 2.13's.
        standard=max(map(int, flags), default=20),
    )


def find_compiler(environ: Mapping[str, str]) -> tuple[list[str], str]:
    """The C++ compiler that CXX names, with its flags, else the first on the PATH; and its version."""
    words = shlex.split(environ.get("CXX", ""))
    path = _which(environ, words[0]) if words else _which(environ, "c++", "g++", "clang++")
    command = [path, *words[1:]] if path else []
    return command, _run([*command, "--version"], environ).partition("\n")[0]


def missing_tools(environ: Mapping[str, str], torch: Torch) -> Iterator[str]:
    """What a build lacks, each with what to type. CMake itself reports what else it needs."""
    command, version = find_compiler(environ)
    # Its macros are never none.
    macros = ["-x", "c++", "-dM", "-E", "/dev/null"]
    if not version:
        yield "a C++ compiler: type 'apt install g++' (conda: 'conda install cxx-compiler'), or set CXX"
    elif not _run([*command, f"-std=c++{torch.standard}", *macros], environ):
        yield (
            f"a compiler for C++{torch.standard}, which torch {torch.version} needs (found {version}): "
            f"install a later one, and set CC and CXX to it"
        )
    cmake = re.search(r"cmake version ((\d+)\.(\d+)[\w.]*)", _run(["cmake", "--version"], environ))
    least = ".".join(map(str, OLDEST_CMAKE))
    if cmake is None:
        yield f"cmake {least} or later: type 'pip install cmake'"
    elif (int(cmake[2]), int(cmake[3])) < OLDEST_CMAKE:
        older = f"{cmake[1]} in {_which(environ, 'cmake')}"
        yield f"cmake {least} or later (found {older}): type 'pip install cmake'"


def find_mpi(environ: Mapping[str, str]) -> Mpi | str:
    """Find the MPI whose compiler wrapper is first on the PATH; else the reason why there is none."""
    wrapper = _which(environ, "mpicxx", "mpic++")
    if wrapper is None:
        return (
            "found no mpicxx on the PATH; type 'apt install openmpi-bin libopenmpi-dev', or load your "
            "cluster's MPI module"
        )
    # Open MPI answers the first, MPICH and its family the second, some wrappers neither.
    output = _run([wrapper, "--showme:version"], environ) or _run([wrapper, "-v"], environ)
    # "mpicxx: Open MPI 4.1.4 (Language: C++)", "mpicxx for MPICH version 5.0.2"
    version = re.sub(r"^\S+:? (for (the )?)?| \(.*", "", output.partition("\n")[0])
    return Mpi(wrapper=wrapper, version=version or "MPI", link=_run([wrapper, "-show"], environ).strip())


def find_nccl(environ: Mapping[str, str], cuda: str | None) -> Nccl | str:
    """Find NCCL and a toolkit for torch's CUDA; else the reason why it cannot be built with.

    NCCL is where the user says it is, else the one that pip installed for that CUDA.
    """
    if cuda is None:
        return "torch is not built with CUDA"
    major = cuda.partition(".")[0]
    toolkit = find_toolkit(environ)
    if toolkit is None:
        return (
            f"found no nvcc on the PATH or in CUDA_HOME; install NVIDIA's CUDA toolkit {major}, set CUDA_HOME"
        )
    cuda_home, cuda_version = toolkit
    if cuda_version.partition(".")[0] != major:
        return (
            f"the CUDA toolkit in {cuda_home} is {cuda_version}, and torch is built with CUDA {cuda}; "
            f"set CUDA_HOME to a toolkit {major}"
        )
    home, package = environ.get("NCCL_HOME"), f"nvidia-nccl-cu{major}"
    if home is None and is_installed(package):
        home = str(importlib.metadata.distribution(package).locate_file("nvidia/nccl"))
    header = _text(Path(home, "include/nccl.h")) if home else ""
    numbers = re.findall(r"#define\s+NCCL_(?:MAJOR|MINOR|PATCH)\s+(\d+)", header)
    if home is None or len(numbers) != 3:
        return f"found no nccl.h; type 'pip install {package}', or set NCCL_HOME"
    return Nccl(home=home, version=".".join(numbers), cuda_home=cuda_home, cuda_version=cuda_version)


def find_toolkit(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """(folder, version) of the first nvcc that works: by variables, on the PATH, in its usual place."""
    nvcc = _which(environ, "nvcc")
    of_path = str(Path(nvcc).resolve().parent.parent) if nvcc else None
    for home in filter(None, [environ.get("CUDA_HOME"), environ.get("CUDA_PATH"), of_path, USUAL_CUDA]):
        version = re.search(r"release (\d+\.\d+)", _run([f"{home}/bin/nvcc", "--version"], environ))
        if version:
            return home, version[1]
    return None


def edit(source: Path, build: Build) -> None:
    """Apply a build's edits to an unpacked source."""
    for change in build.edits:
        text = (source / change.file).read_text("utf-8")
        count = text.count(change.old)
        if count != 1:
            raise DualevalError(
                f"What pip fetched is not the source of Horovod {HOROVOD}: its {change.file} has "
                f"'{change.old.splitlines()[0]}' {count} times, expected once. "
                f"'pip config list' shows where pip looks; point it to a true copy."
            )
        new = change.new.replace("{standard}", str(build.torch.standard))
        (source / change.file).write_text(text.replace(change.old, new), "utf-8")


def makeflags(environ: Mapping[str, str], cores: int) -> str:
    """The user's own MAKEFLAGS, else a job a core; what a make that calls us has set is not for ours."""
    flags = "" if "MAKELEVEL" in environ else environ.get("MAKEFLAGS", "")
    return flags or f"-j{cores}"


def is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _which(environ: Mapping[str, str], *names: str) -> str | None:
    """The path of the first of some programs that is there."""
    return next(filter(None, (shutil.which(name, path=environ["PATH"]) for name in names)), None)


def _run(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """What a program prints; empty where it cannot be started or fails."""
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")


def _text(path: Path) -> str:
    return path.read_text("utf-8", errors="replace") if path.is_file() else ""
