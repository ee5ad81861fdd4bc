"""What is found for a build of Horovod, what is planned from it, and what its key depends on."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dualeval.errors import DualevalError
from dualeval.launch import horovod_build, horovod_machine, horovod_plan
from dualeval.launch.horovod_machine import Machine, Nccl, Tool, Toolkit, Torch
from dualeval.launch.horovod_plan import EDITS, UNITY, WITHOUT_CUDA, Edit, edited
from tests.horovod_bench import (
    CUDA_MACHINE,
    CUDA_TORCH,
    MACHINE,
    NCCL,
    OPEN_MPI,
    TOOLKIT,
    TORCH,
    plan_for,
    programs,
    source_tree,
)

# What torch and the tools say.


@pytest.mark.parametrize(
    ("cmake", "extension", "expected"),
    [
        (["set_property(TARGET x PROPERTY CXX_STANDARD 20)"], "['-std=c++17']", 20),
        (["", "CXX_STANDARD 17\n CXX_STANDARD 20"], "", 20),
        (["set(CMAKE_CUDA_STANDARD 11)", ""], "e.g. '-std=c++17' ... flags = ['-std=c++20']", 20),
        (["", ""], "['-std=c++17']", 17),
        (["", ""], "nothing", None),
    ],
)
def test_standard_of(cmake: list[str], extension: str, expected: int | None) -> None:
    assert horovod_machine.standard_of(cmake, extension) == expected


def test_the_installed_torch_is_read_right() -> None:
    """What its files tell is what it says itself."""
    found = horovod_machine.read_torch(Path(torch.__file__).parent)
    assert found is not None
    assert found.version == torch.__version__
    assert found.cuda == torch.version.cuda
    assert found.git == torch.version.git_version
    assert found.abi == str(int(torch.compiled_with_cxx11_abi()))
    assert found.standard is not None
    assert found.standard >= 17


@pytest.mark.parametrize(
    ("version_file", "expected"),
    [
        (
            "__version__ = '2.14.1+cu130'\ncuda: Optional[str] = '13.0'\ngit_version = 'abc'\nhip = None\n",
            Torch(version="2.14.1+cu130", git="abc", cuda="13.0", abi=None, standard=None),
        ),
        (
            '__version__ = "2.9.0"\ncuda: str | None = None\n',
            Torch(version="2.9.0", git=None, cuda=None, abi=None, standard=None),
        ),
        ("debug = False\n", None),
    ],
)
def test_read_torch(version_file: str, expected: Torch | None, tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(version_file)
    assert horovod_machine.read_torch(tmp_path) == expected


@pytest.mark.parametrize(("content", "abi"), [(b"_ZN3c10NSt7__cxx1112basic_stringE", "1"), (b"Ss", "0")])
def test_abi_is_read_from_the_library(content: bytes, abi: str, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libc10.so").write_bytes(content)
    (tmp_path / "version.py").write_text("__version__ = '2.9.0'\n")
    found = horovod_machine.read_torch(tmp_path)
    assert found is not None
    assert found.abi == abi


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mpicxx: Open MPI 4.1.4 (Language: C++)\n", ("Open MPI", "4.1.4")),
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://x\n", ("Open MPI", "5.0.11")),
        ("mpicxx: Open MPI v4.0.3rc4 (Language: C++)", ("Open MPI", "4.0.3rc4")),
        ("mpicxx for MPICH version 5.0.2\nUsing built-in specs.\n", ("MPICH", "5.0.2")),
        ("HYDRA build details:\n    Version:                    4.1.2\n", ("MPICH", "4.1.2")),
        ("mpicxx for MVAPICH2 version 2.3.7\n", ("MVAPICH", "2.3.7")),
        ("mpigxx for the Intel(R) MPI Library 2021.10 for Linux*\n", ("Intel MPI", "2021.10")),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 2023", ("Intel MPI", "2021.10")),
        ("g++ (Debian 12.2.0-14) 12.2.0", None),
    ],
)
def test_mpi_version_of(text: str, expected: tuple[str, str] | None) -> None:
    assert horovod_machine.mpi_version_of(text) == expected


def test_versions_of_other_tools() -> None:
    assert horovod_machine.cmake_version_of("cmake version 3.25.1\n\nCMake suite") == "3.25.1"
    assert horovod_machine.cmake_version_of("cmake version 4.0.0-rc2") == "4.0.0"
    assert horovod_machine.cmake_version_of("not it") is None
    said = "Cuda compilation tools, release 13.0, V13.0.88"
    assert horovod_machine.toolkit_version_of(said) == "13.0"
    header = '#define NCCL_MAJOR 2\n#define NCCL_MINOR 30\n#define NCCL_PATCH 7\n#define NCCL_SUFFIX ""\n'
    assert horovod_machine.nccl_version_of(header) == "2.30.7"
    assert horovod_machine.nccl_version_of("#define NCCL_MAJOR 2\n") is None
    assert horovod_machine.numbers_of("2.13.0+cpu") == (2, 13, 0)
    assert horovod_machine.numbers_of("nightly") == ()


OPEN = "case $1 in --showme:version) echo 'x: Open MPI 4.1.4 (C++)';; *) echo link;; esac"
MPICH = "case $1 in -v) echo 'mpicxx for MPICH version 4.1';; -show) echo link;; *) exit 1;; esac"
MUTE = "[ $1 = -show ] && echo link"
MPIRUN = "echo 'mpirun (Open MPI) 5.0.1'"


@pytest.mark.parametrize(
    ("scripts", "expected"),
    [
        ({"mpicxx": OPEN}, ("Open MPI", "4.1.4")),
        ({"mpicxx": MPICH}, ("MPICH", "4.1")),
        ({"mpicxx": MUTE, "mpirun": MPIRUN}, ("Open MPI", "5.0.1")),
        ({"mpicxx": MUTE}, ("MPI", "of unknown version")),
        ({"mpirun": MPIRUN}, None),
    ],
)
def test_mpi_is_found(scripts: dict[str, str], expected: tuple[str, str] | None, tmp_path: Path) -> None:
    found = horovod_machine.inspect({"PATH": str(programs(tmp_path, **scripts))}).mpi
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (found.name, found.version) == expected
        assert (found.wrapper, found.link) == (str(tmp_path / "mpicxx"), "link")


def test_compilers_that_the_user_names(tmp_path: Path) -> None:
    """With their flags; one that is not there is not silently another."""
    path = programs(tmp_path, **{"my-c++": "echo mine $1 $2", "c++": "echo other", "cc": "echo c"})
    found = horovod_machine.inspect({"PATH": str(path), "CXX": "my-c++ -pipe", "CC": "gone"})
    assert found.compiler == Tool(command=(f"{tmp_path}/my-c++", "-pipe"), version="mine -pipe --version")
    assert found.c_compiler is None


# Says its version; of a dry run where it is, and what it has read in its settings beside it.
NVCC = """
here=${0%/*}
case $1 in --version) echo 'Cuda compilation tools, release 12.8, V12.8.93'; exit;; esac
echo "#\\$ _HERE_=$here"
if [ -f "$here/nvcc.profile" ]; then echo "#\\$ TOP=$here/.."; fi
"""


def cuda(folder: Path) -> Path:
    """A false toolkit in a folder."""
    programs(folder / "bin", nvcc=NVCC)
    (folder / "bin/nvcc.profile").touch()
    return folder


@pytest.fixture
def no_usual_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing in /usr/local/cuda, whatever this machine has there."""
    monkeypatch.setattr(horovod_machine, "USUAL_CUDA", str(tmp_path / "nothing"))


@pytest.mark.usefixtures("no_usual_toolkit")
def test_cuda_toolkit_and_nccl_are_found(tmp_path: Path) -> None:
    cuda(tmp_path / "cuda")
    header = tmp_path / "nccl/include/nccl.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 27\n#define NCCL_PATCH 3\n")
    expected = Toolkit(home=str(tmp_path / "cuda"), version="12.8")
    by_variable = {"PATH": "", "CUDA_HOME": str(tmp_path / "cuda"), "NCCL_HOME": str(tmp_path / "nccl")}
    found = horovod_machine.inspect(by_variable)
    assert found.toolkit == expected
    assert found.nccl == Nccl(home=str(tmp_path / "nccl"), version="2.27.3")
    assert horovod_machine.inspect({"PATH": str(tmp_path / "cuda/bin")}).toolkit == expected


@pytest.mark.usefixtures("no_usual_toolkit")
@pytest.mark.parametrize(
    "kind", ["a script", "a link", "a link to a script", "a compiler cache", "its own folder"]
)
def test_nvcc_itself_tells_where_its_toolkit_is(kind: str, tmp_path: Path) -> None:
    """As conda, Debian and administrators put it on the PATH; nothing else of CUDA is beside it."""
    nvcc = cuda(tmp_path / "opt/cuda") / "bin/nvcc"
    path = tmp_path / "prefix/bin"
    call = f'exec {nvcc} "$@"'
    if kind == "a script":
        programs(path, nvcc=call)
    elif kind == "its own folder":
        path = nvcc.parent
    else:
        path.mkdir(parents=True)
        target = nvcc
        if kind == "a link to a script":
            target = programs(tmp_path / "scripts", **{"nvcc-12": call}) / "nvcc-12"
        elif kind == "a compiler cache":
            # It calls the program whose name it was called by, the next on the PATH.
            cache = f'case $0 in */nvcc) exec {nvcc} "$@";; *) exit 1;; esac'
            target = programs(tmp_path / "ccache", ccache=cache) / "ccache"
        (path / "nvcc").symlink_to(target)
    expected = Toolkit(home=str(tmp_path / "opt/cuda"), version="12.8")
    assert horovod_machine.inspect({"PATH": f"{path}:/usr/bin:/bin"}).toolkit == expected
    in_home = {"PATH": "/usr/bin:/bin", "CUDA_HOME": str(path.parent)}
    assert horovod_machine.inspect(in_home).toolkit == expected


@pytest.mark.usefixtures("no_usual_toolkit")
def test_a_folder_without_nvcc_is_no_toolkit(tmp_path: Path) -> None:
    """CUDA_HOME in an image made for running alone; and an nvcc that finds nothing of what it needs."""
    (tmp_path / "runtime/lib64").mkdir(parents=True)
    variables = {"PATH": "/usr/bin:/bin", "CUDA_HOME": str(tmp_path / "runtime")}
    assert horovod_machine.inspect(variables).toolkit is None
    path = programs(tmp_path / "bin", nvcc=NVCC)
    assert horovod_machine.inspect({**variables, "PATH": f"{path}:/usr/bin:/bin"}).toolkit is None
    found = horovod_machine.inspect({**variables, "PATH": f"{cuda(tmp_path / 'cuda')}/bin:/usr/bin:/bin"})
    assert found.toolkit == Toolkit(home=str(tmp_path / "cuda"), version="12.8")


# The edits.


@pytest.mark.parametrize("machine", [MACHINE, CUDA_MACHINE], ids=["cpu", "cuda"])
def test_edits_raise_the_standard(machine: Machine, tmp_path: Path) -> None:
    horovod_build.edit(source_tree(tmp_path), plan_for(machine))
    top = (tmp_path / "CMakeLists.txt").read_text()
    inner = (tmp_path / "horovod/torch/CMakeLists.txt").read_text()
    for text in (top, inner):
        assert "  set(CMAKE_CXX_STANDARD 20)\n" in text
        assert "STANDARD 14" not in text
    assert "-mavx" not in top
    assert ("UNITY_BUILD ON" in inner) == (machine is MACHINE), "with NCCL, sources are compiled one by one"


@pytest.mark.parametrize(
    ("machine", "with_nccl", "without_cuda"),
    [
        (CUDA_MACHINE, None, False),
        (CUDA_MACHINE, False, True),
        (replace(CUDA_MACHINE, toolkit=None), None, True),
        (replace(CUDA_MACHINE, toolkit=replace(TOOLKIT, version="12.8")), None, True),
        (replace(CUDA_MACHINE, nccl=None), None, True),
        # A torch without CUDA has nothing of it compiled anyway.
        (MACHINE, None, False),
    ],
    ids=["with NCCL", "--without-nccl", "no nvcc", "another CUDA", "no NCCL", "no CUDA in torch"],
)
def test_without_nccl_nothing_of_cuda_is_compiled(
    machine: Machine, with_nccl: bool | None, without_cuda: bool, tmp_path: Path
) -> None:
    plan = plan_for(machine, with_nccl=with_nccl)
    horovod_build.edit(source_tree(tmp_path), plan)
    top = (tmp_path / "CMakeLists.txt").read_text()
    search = (tmp_path / "cmake/Modules/FindPytorch.cmake").read_text()
    assert ("check_language(CUDA)" in top) is not without_cuda
    assert ("torch.version.cuda" in search) is not without_cuda
    switches = plan.components["switches"]
    if plan.nccl is not None:
        assert switches["HOROVOD_GPU_OPERATIONS"] == "NCCL"
        assert switches["HOROVOD_CUDA_HOME"] == switches["CUDA_HOME"] == "/opt/cuda"
        assert plan.components["toolkit"] == {"home": "/opt/cuda", "version": "13.0"}
    else:
        assert not any("CUDA" in name or "GPU" in name for name in switches)
        assert plan.components["toolkit"] is None


@pytest.mark.parametrize(
    "edit", [*EDITS, UNITY, *WITHOUT_CUDA], ids=lambda edit: f"{edit.file} {edit.old[:24]}"
)
@pytest.mark.parametrize("times", [0, 2])
def test_a_changed_source_is_refused(edit: Edit, times: int) -> None:
    with pytest.raises(
        DualevalError, match=rf"not the source of Horovod 0\.28\.1.*{times} times, expected once"
    ):
        edited(f"line\n{edit.old}\n" * times, edit, 20)


# The key.


CHANGES: dict[str, Machine] = {
    "torch": replace(MACHINE, torch=replace(TORCH, version="2.13.1+cpu")),
    "torch's commit": replace(MACHINE, torch=replace(TORCH, git="0123")),
    "abi": replace(MACHINE, torch=replace(TORCH, abi="0")),
    "standard": replace(MACHINE, torch=replace(TORCH, standard=23)),
    "cuda": replace(MACHINE, torch=CUDA_TORCH),
    "python": replace(MACHINE, python="3.12"),
    "soabi": replace(MACHINE, soabi="cpython cpython-311d-x86_64-linux-gnu"),
    "platform": replace(MACHINE, platform="linux-aarch64"),
    "libc": replace(MACHINE, libc="glibc 2.41"),
    "compiler": replace(MACHINE, compiler=Tool(command=("/usr/bin/c++",), version="c++ 14.2.0")),
    "MPI": replace(MACHINE, mpi=replace(OPEN_MPI, name="MPICH")),
    "MPI's version": replace(MACHINE, mpi=replace(OPEN_MPI, version="5.0.1")),
    "MPI's place": replace(MACHINE, mpi=replace(OPEN_MPI, wrapper="/usr/bin/mpicxx")),
    "MPI's libraries": replace(MACHINE, mpi=replace(OPEN_MPI, link="c++ -L/usr/lib/mpi -lmpi")),
    "no MPI": replace(MACHINE, mpi=None),
    "NCCL": CUDA_MACHINE,
    "NCCL's version": replace(CUDA_MACHINE, nccl=replace(NCCL, version="2.31.0")),
    "toolkit": replace(CUDA_MACHINE, toolkit=replace(TOOLKIT, version="13.1")),
}


def test_each_component_changes_the_key() -> None:
    keys = {name: plan_for(machine).key for name, machine in CHANGES.items()}
    keys |= {f"variable {name}": plan_for(MACHINE, {name: "1"}).key for name in horovod_plan.BUILD_VARIABLES}
    keys["as it is"] = plan_for(MACHINE).key
    assert len(set(keys.values())) == len(keys), "two of these would share a wheel"
    assert plan_for(MACHINE, with_mpi=False).key == keys["no MPI"]
    assert plan_for(CUDA_MACHINE, with_nccl=False).key == keys["cuda"], "without NCCL the toolkit is not used"


def test_the_recipe_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = plan_for(MACHINE).key
    with monkeypatch.context() as changed:
        changed.setattr(horovod_plan, "RECIPE", horovod_plan.RECIPE + 1)
        assert plan_for(MACHINE).key != before
    with monkeypatch.context() as changed:
        changed.setattr(horovod_plan, "_switches", lambda *_: {"HOROVOD_WITH_GLOO": "1"})
        assert plan_for(MACHINE).key != before
    monkeypatch.setattr(horovod_plan, "UNITY", replace(UNITY, new="set(ANYTHING ON)"))
    assert plan_for(MACHINE).key != before


@pytest.mark.parametrize(
    "machine",
    [
        replace(MACHINE, interpreter="/other/bin/python"),
        replace(MACHINE, cmake=Tool(command=("/opt/cmake",), version="4.4.4")),
        replace(MACHINE, mpirun=None),
        replace(MACHINE, absent=("cffi",)),
    ],
)
def test_what_does_not_change_the_wheel_does_not_change_the_key(machine: Machine) -> None:
    environ = {
        "PATH": "/elsewhere",
        "HOROVOD_LOG_LEVEL": "debug",
        "CMAKE_GENERATOR": "Ninja",
        "MAKEFLAGS": "-j7",
    }
    assert plan_for(machine, environ) == replace(plan_for(MACHINE), machine=machine)


def test_the_folder_tells_what_it_is_for() -> None:
    plan = plan_for(MACHINE)
    assert plan.name == f"0.28.1-torch-2.13.0+cpu-python-3.11-open-mpi-4.1.4-{plan.key[:16]}"
    assert "no-mpi" in plan_for(MACHINE, with_mpi=False).name


# The plan.


def test_with_what_there_is() -> None:
    assert plan_for(MACHINE).mpi == OPEN_MPI
    assert plan_for(MACHINE).notes == {"NCCL": "torch is not built with CUDA"}
    assert plan_for(CUDA_MACHINE).nccl == NCCL
    without = plan_for(CUDA_MACHINE, with_mpi=False, with_nccl=False)
    assert (without.mpi, without.nccl) == (None, None)
    assert without.notes == {"MPI": "--without-mpi", "NCCL": "--without-nccl"}
    assert plan_for(replace(MACHINE, mpi=None)).lacks(cached=False) == ()


@pytest.mark.parametrize("cached", [False, True])
def test_what_ranks_need_is_set_up_too(cached: bool) -> None:
    """Ranks that meet over MPI need mpi4py; those of a Horovod without MPI do not."""
    machine = replace(MACHINE, absent=("psutil", "mpi4py"))
    for with_mpi, names in ((None, ["psutil", "mpi4py"]), (False, ["psutil"])):
        plan = plan_for(machine, with_mpi=with_mpi)
        first = next(horovod_plan.commands(plan, cached=cached, wheel="x.whl", constraint=Path("pins.txt")))
        assert first[first.index("install") :] == ["install", "--constraint", "pins.txt", *names]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (MACHINE, "torch is not built with CUDA"),
        (replace(CUDA_MACHINE, toolkit=None), "install NVIDIA's CUDA toolkit 13"),
        (replace(CUDA_MACHINE, toolkit=replace(TOOLKIT, version="12.8")), "set CUDA_HOME to a toolkit 13"),
        (replace(CUDA_MACHINE, nccl=None), "pip install nvidia-nccl-cu13"),
    ],
)
def test_nccl_that_cannot_be_had(machine: Machine, words: str, cached: bool) -> None:
    assert words in plan_for(machine).notes["NCCL"]
    assert plan_for(machine).lacks(cached=cached) == ()
    [lack] = plan_for(machine, with_nccl=True).lacks(cached=cached)
    assert lack.startswith("NCCL, for --with-nccl: ")
    assert words in lack


@pytest.mark.parametrize("cached", [False, True])
def test_mpi_that_cannot_be_had(cached: bool) -> None:
    """--with-mpi never gets a wheel without, not even from the cache."""
    [lack] = plan_for(replace(MACHINE, mpi=None), with_mpi=True).lacks(cached=cached)
    assert "found /opt/mpi/bin/mpirun, but no mpicxx; type 'apt install openmpi-bin libopenmpi-dev'" in lack


@pytest.mark.parametrize(
    ("machine", "words", "for_cached_too"),
    [
        (replace(MACHINE, torch=None), "torch 2.8 or later: type 'pip install torch'", False),
        (replace(MACHINE, torch=replace(TORCH, version="2.1.0")), "(found 2.1.0)", False),
        (replace(MACHINE, torch=replace(TORCH, standard=None), compiles=False), "the C++ standard", False),
        (replace(MACHINE, compiler=None, compiles=False), "apt install g++", False),
        (replace(MACHINE, compiles=False), "a compiler for C++20, which torch 2.13.0+cpu needs", False),
        (replace(MACHINE, c_compiler=None), "apt install gcc", False),
        (replace(MACHINE, cmake=None), "pip install cmake", False),
        (replace(MACHINE, cmake=Tool(command=("/x/cmake",), version="3.12.4")), "3.12.4 in /x/cmake", False),
        (replace(MACHINE, make=None), "apt install make", False),
        (
            replace(MACHINE, has_headers=False),
            "/usr/include/python3.11): type 'apt install python3-dev'",
            False,
        ),
        (replace(MACHINE, has_pip=False), "/env/bin/python -m ensurepip", True),
        (replace(MACHINE, managed=True), "python3 -m venv .venv", True),
    ],
)
def test_what_is_missing_is_named(machine: Machine, words: str, for_cached_too: bool) -> None:
    [lack] = plan_for(machine).lacks(cached=False)
    assert words in lack
    assert bool(plan_for(machine).lacks(cached=True)) == for_cached_too


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "-j2"),
        ({"MAKEFLAGS": "-j1"}, "-j1"),
        ({"MAKEFLAGS": "-j 4 -l 8"}, "-j 4 -l 8"),
        ({"MAKEFLAGS": "", "MAKELEVEL": "1"}, "-j2"),
        ({"MAKEFLAGS": "s", "MAKELEVEL": "1"}, "-j2"),
        ({"MAKEFLAGS": " -j8 --jobserver-auth=3,4", "MAKELEVEL": "1"}, "-j8"),
    ],
)
def test_makeflags(environ: dict[str, str], expected: str) -> None:
    assert horovod_plan.makeflags(environ, 2) == expected


def test_variables_of_the_build() -> None:
    environ = {
        "PATH": "/bin",
        "HOME": "/me",
        "HOROVOD_BUILD_CUDA_CC_LIST": "90",
        "CXXFLAGS": "-pipe",
        "HOROVOD_WITH_MXNET": "1",
        "CMAKE_GENERATOR": "Ninja",
        "MFLAGS": "x",
    }
    variables = horovod_plan.build_variables(plan_for(CUDA_MACHINE, environ), environ, 2)
    kept = ("HOME", "HOROVOD_BUILD_CUDA_CC_LIST", "CXXFLAGS")
    assert {name: variables[name] for name in kept} == {name: environ[name] for name in kept}
    assert not {"HOROVOD_WITH_MXNET", "CMAKE_GENERATOR", "MFLAGS"} & set(variables)
    assert variables["PATH"] == f"{Path(sys.executable).parent}:/bin"
    assert variables["HOROVOD_WITH_MPI"] == variables["HOROVOD_WITH_GLOO"] == "1"
    assert variables["MPI_HOME"] == "/opt/mpi"
    assert variables["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert (variables["HOROVOD_NCCL_HOME"], variables["HOROVOD_CUDA_HOME"]) == ("/opt/nccl", "/opt/cuda")
    without = horovod_plan.build_variables(plan_for(MACHINE, with_mpi=False), {}, 2)
    assert without["HOROVOD_WITHOUT_MPI"] == "1"
    assert not {"HOROVOD_WITH_MPI", "MPI_HOME", "HOROVOD_GPU_OPERATIONS"} & set(without)
