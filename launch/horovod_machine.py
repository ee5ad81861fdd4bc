"""What this machine has for a build of Horovod: torch, compilers, MPI, CUDA. Looks, and changes nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# What Horovod's setup.py needs before it compiles, and what Horovod needs at run time.
REQUIREMENTS = ("cffi", "cloudpickle", "numpy", "packaging", "psutil", "pyyaml", "setuptools", "wheel")
# What ranks need as well where Horovod is built with MPI: they wait for each other over it, asleep.
MPI_REQUIREMENT = "mpi4py"
PROBE_TIMEOUT = 60.0
USUAL_CUDA = "/usr/local/cuda"


@dataclass(frozen=True, kw_only=True)
class Torch:
    """The installed torch, read from its files: importing it takes a second.

    Attributes:
        git: the commit that it was built from.
        cuda: the CUDA that it was built with; None without.
        abi: "1" where its strings are C++11's, "0" where they are the older ones; None where not told.
        standard: the C++ standard that its headers need, such as 20; None where not told.
    """

    version: str
    git: str | None
    cuda: str | None
    abi: str | None
    standard: int | None


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A program: how to call it, and what it says of its version."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True, kw_only=True)
class Mpi:
    """An MPI to build against; ``link`` is what its compiler wrapper passes to the compiler."""

    name: str
    version: str
    wrapper: str
    link: str


@dataclass(frozen=True, kw_only=True)
class Toolkit:
    """A CUDA toolkit: the folder with ``bin/nvcc``, and its version such as 13.0."""

    home: str
    version: str


@dataclass(frozen=True, kw_only=True)
class Nccl:
    """NCCL: the folder with ``include/nccl.h`` and ``lib``."""

    home: str
    version: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is there to build with; None where a thing was not found.

    Attributes:
        interpreter: the Python that Horovod is for.
        soabi: the binary interface of its extensions.
        headers: the folder for Python.h; ``has_headers``: whether it is in there.
        managed: whether pip refuses to install here (PEP 668).
        absent: names in ``REQUIREMENTS``, and ``MPI_REQUIREMENT``, that are not installed.
        compiles: whether the compiler knows the standard that torch needs.
    """

    interpreter: str
    python: str
    soabi: str
    platform: str
    libc: str
    headers: str
    has_headers: bool
    has_pip: bool
    managed: bool
    absent: tuple[str, ...]
    torch: Torch | None
    compiler: Tool | None
    compiles: bool
    c_compiler: Tool | None
    cmake: Tool | None
    make: str | None
    mpi: Mpi | None
    mpirun: str | None
    toolkit: Toolkit | None
    nccl: Nccl | None


def search_path(environ: Mapping[str, str]) -> str:
    """The PATH of a build: the folder of this Python first, whether its environment is activated or not."""
    return f"{Path(sys.executable).parent}:{environ.get('PATH', '/usr/bin:/bin')}"


def inspect(environ: Mapping[str, str]) -> Machine:
    """Look at this machine, in a fraction of a second."""
    environ = {**environ, "PATH": search_path(environ), "LC_ALL": "C"}
    torch = _find_torch()
    compiler = _find_compiler(environ, "CXX", "c++", "g++", "clang++")
    headers = sysconfig.get_paths()["include"]
    mpirun = _which(environ, "mpirun", "mpiexec")
    toolkit = _find_toolkit(environ)
    return Machine(
        interpreter=sys.executable,
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        soabi=f"{sys.implementation.name} {sysconfig.get_config_var('SOABI')}",
        platform=sysconfig.get_platform(),
        libc=" ".join(platform.libc_ver()),
        headers=headers,
        has_headers=(Path(headers) / "Python.h").is_file(),
        has_pip=importlib.util.find_spec("pip") is not None,
        managed=_is_managed(environ),
        absent=tuple(name for name in (*REQUIREMENTS, MPI_REQUIREMENT) if not _is_installed(name)),
        torch=torch,
        compiler=compiler,
        compiles=compiler is not None and torch is not None and _compiles(compiler, torch, environ),
        c_compiler=_find_compiler(environ, "CC", "cc", "gcc", "clang"),
        cmake=_find_cmake(environ),
        make=_which(environ, "make"),
        mpi=_find_mpi(environ, mpirun),
        mpirun=mpirun,
        toolkit=toolkit,
        nccl=_find_nccl(environ, toolkit),
    )


def read_torch(folder: Path) -> Torch | None:
    """Read a torch from its folder; None where that has no version."""
    named = dict(
        re.findall(r"^(\w+)\b[^=\n]*= *['\"]([^'\"\n]*)", _text(folder / "version.py"), re.MULTILINE)
    )
    if "__version__" not in named:
        return None
    cmake = [
        folder / "share/cmake" / name for name in ("Caffe2/public/utils.cmake", "Torch/TorchConfig.cmake")
    ]
    library = folder / "lib/libc10.so"
    return Torch(
        version=named["__version__"],
        git=named.get("git_version"),
        cuda=named.get("cuda"),
        # Each function that takes one of the newer strings has this in its name.
        abi=str(int(b"NSt7__cxx1112basic_string" in library.read_bytes())) if library.is_file() else None,
        standard=standard_of(map(_text, cmake), _text(folder / "utils/cpp_extension.py")),
    )


def standard_of(cmake: Iterable[str], extension: str) -> int | None:
    """The C++ standard that torch asks for: in its CMake files, else in its flags for extensions."""
    stated = [int(number) for text in cmake for number in re.findall(r"\bCXX_STANDARD\s+(\d+)", text)]
    flags = [int(number) for number in re.findall(r"-std=c\+\+(\d+)", extension)]
    return max(stated or flags, default=None)


def numbers_of(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


_MPI_VERSIONS = (
    ("Open MPI", r"\(?Open MPI\)? v?(\d[\w.]*)"),
    ("Intel MPI", r"Intel\(R\) MPI Library\D*(\d{4}[\w.]*)"),
    ("MVAPICH", r"MVAPICH\d? version:?\s*(\d[\w.]*)"),
    ("MPICH", r"MPICH version:?\s*(\d[\w.]*)"),
    ("MPICH", r"HYDRA build details:\s*Version:\s*(\d[\w.]*)"),
)


def mpi_version_of(text: str) -> tuple[str, str] | None:
    """(implementation, version) from what a compiler wrapper or mpirun says of itself; None if unknown."""
    for name, pattern in _MPI_VERSIONS:
        match = re.search(pattern, text)
        if match:
            return name, match[1].rstrip(".")
    return None


def cmake_version_of(text: str) -> str | None:
    """3.25.1 from what cmake says of itself."""
    match = re.search(r"cmake version (\d[\w.]*)", text)
    return match[1] if match else None


def toolkit_version_of(text: str) -> str | None:
    """13.0 from what nvcc says of itself."""
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else None


def toolkit_home_of(text: str) -> str | None:
    """/usr/local/cuda from what nvcc says of a dry run; None where it has not found its own settings."""
    folder = re.search(r"^#\$ _HERE_=(/.*)/bin/?$", text, re.MULTILINE)
    return folder[1] if folder and re.search(r"^#\$ TOP=", text, re.MULTILINE) else None


def nccl_version_of(header: str) -> str | None:
    """2.27.3 from nccl.h."""
    parts = [re.search(rf"#define\s+NCCL_{part}\s+(\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part[1] for part in parts if part) if all(parts) else None


def _find_torch() -> Torch | None:
    spec = importlib.util.find_spec("torch")
    return read_torch(Path(spec.origin).parent) if spec and spec.origin else None


def _find_compiler(environ: Mapping[str, str], variable: str, *names: str) -> Tool | None:
    """Find a compiler: the one that the variable names, with its flags, else the first of some names."""
    words = shlex.split(environ.get(variable, ""))
    path = _which(environ, words[0]) if words else _which(environ, *names)
    if path is None:
        return None
    said = _said([path, *words[1:], "--version"], environ)
    return Tool(command=(path, *words[1:]), version=said.splitlines()[0]) if said else None


def _compiles(compiler: Tool, torch: Torch, environ: Mapping[str, str]) -> bool:
    if torch.standard is None:
        return False
    flags = [f"-std=c++{torch.standard}", "-x", "c++", "-fsyntax-only", "/dev/null"]
    return _said([*compiler.command, *flags], environ) is not None


def _find_cmake(environ: Mapping[str, str]) -> Tool | None:
    path = _which(environ, "cmake")
    version = cmake_version_of(_said([path, "--version"], environ) or "") if path else None
    return Tool(command=(path,), version=version) if path and version else None


def _find_mpi(environ: Mapping[str, str], mpirun: str | None) -> Mpi | None:
    wrapper = _which(environ, "mpicxx", "mpic++")
    if wrapper is None:
        return None
    # Open MPI answers the first, MPICH and its family the second, some wrappers neither.
    questions = [[wrapper, "--showme:version"], [wrapper, "-v"], *([[mpirun, "--version"]] if mpirun else [])]
    answers = (mpi_version_of(_said(question, environ) or "") for question in questions)
    name, version = next((answer for answer in answers if answer), ("MPI", "of unknown version"))
    return Mpi(
        name=name, version=version, wrapper=wrapper, link=(_said([wrapper, "-show"], environ) or "").strip()
    )


def _find_toolkit(environ: Mapping[str, str]) -> Toolkit | None:
    """Find the toolkit of the first nvcc that works: by variables, on the PATH, in its usual place."""
    homes = [environ.get("CUDA_HOME"), environ.get("CUDA_PATH")]
    named = [f"{home}/bin/nvcc" for home in homes if home]
    for nvcc in [*named, _which(environ, "nvcc"), f"{USUAL_CUDA}/bin/nvcc"]:
        if nvcc and Path(nvcc).is_file():
            version = toolkit_version_of(_said([nvcc, "--version"], environ) or "")
            home = _home_of(nvcc, environ)
            if version and home:
                return Toolkit(home=home, version=version)
    return None


def _home_of(nvcc: str, environ: Mapping[str, str]) -> str | None:
    """The folder of the toolkit to which an nvcc belongs; None where it does not find that itself.

    It may be a script or a link in a folder of programs: what it would do says where the true one lies.
    Called through a link it looks beside the link and finds nothing, so what the link leads to is asked next;
    but not first, for that may be a ccache, which goes by the name under which it is called.
    """
    for path in dict.fromkeys([nvcc, str(Path(nvcc).resolve())]):
        home = toolkit_home_of(_said([path, "--dryrun", "-x", "cu", "-c", "/dev/null"], environ) or "")
        if home and (Path(home) / "bin/nvcc").is_file():
            return home
    return None


def _find_nccl(environ: Mapping[str, str], toolkit: Toolkit | None) -> Nccl | None:
    """Find NCCL where the user says it is, else the one that pip installed for the toolkit's CUDA."""
    home = environ.get("NCCL_HOME")
    if home is None and toolkit is not None:
        package = f"nvidia-nccl-cu{numbers_of(toolkit.version)[0]}"
        if _is_installed(package):
            home = str(importlib.metadata.distribution(package).locate_file("nvidia/nccl"))
    version = nccl_version_of(_text(Path(home) / "include/nccl.h")) if home else None
    return Nccl(home=home, version=version) if home and version else None


def _is_managed(environ: Mapping[str, str]) -> bool:
    in_environment = sys.prefix != sys.base_prefix
    marker = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    return marker.is_file() and not in_environment and "PIP_BREAK_SYSTEM_PACKAGES" not in environ


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _which(environ: Mapping[str, str], *names: str) -> str | None:
    """The path of the first of some programs that is there."""
    found = (shutil.which(name, path=environ["PATH"]) for name in names)
    return next((path for path in found if path), None)


def _said(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """What a program prints; None where it cannot be started or fails."""
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROBE_TIMEOUT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def _text(path: Path) -> str:
    return path.read_text("utf-8", errors="replace") if path.is_file() else ""
