"""What is found for a build of Horovod, its edits and variables, and what its key depends on."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dualeval.errors import DualevalError
from dualeval.tools.horovod import build as horovod_build
from dualeval.tools.horovod.build import (
    COMPILER_VARIABLES,
    EDITS,
    UNITY,
    WITHOUT_CUDA,
    Build,
    Edit,
    Mpi,
    Nccl,
    Torch,
)
from tests.vehicles.environments import read_variables
from tests.vehicles.horovod_bench import (
    BUILD,
    CUDA_BUILD,
    CUDA_TORCH,
    NCCL,
    OPEN_MPI,
    TORCH,
    programs,
    source_tree,
)

TORCH_FOLDER = Path(torch.__file__).parent / "share/cmake"

# What torch and the tools say.


def test_the_installed_torch_is_read_right() -> None:
    """What its files tell is what it says itself."""
    found = horovod_build.find_torch()
    assert found.version == torch.__version__
    assert found.cuda == torch.version.cuda
    assert found.abi == str(int(torch.compiled_with_cxx11_abi()))
    [stated] = set(re.findall(r" CXX_STANDARD (\d+)", (TORCH_FOLDER / "Torch/TorchConfig.cmake").read_text()))
    assert found.standard == int(stated)


@pytest.mark.parametrize(
    ("version_file", "extension", "library", "expected"),
    [
        (
            "from typing import Optional\n__version__ = '2.14.1+cu130'\ncuda: Optional[str] = '13.0'\n",
            "e.g. '-std=c++17' ... flags = ['-std=c++20']",
            b"_ZN3c10NSt7__cxx1112basic_stringE",
            Torch(version="2.14.1+cu130", cuda="13.0", abi="1", standard=20),
        ),
        (
            "__version__ = '2.9.0'\ncuda: str | None = None\n",
            "['-std=c++17']",
            b"Ss",
            Torch(version="2.9.0", cuda=None, abi="0", standard=17),
        ),
    ],
)
def test_torchs_abi_and_standard_are_read_from_its_files(
    version_file: str, extension: str, library: bytes, expected: Torch, tmp_path: Path
) -> None:
    for folder in ("utils", "lib"):
        (tmp_path / folder).mkdir()
    (tmp_path / "utils/cpp_extension.py").write_text(extension)
    (tmp_path / "lib/libc10.so").write_bytes(library)
    (tmp_path / "version.py").write_text(version_file)
    assert horovod_build.read_torch(tmp_path) == expected


# What mpicxx says of its version, and to which question: Open MPI's, MPICH's, Intel's, and one that is mute.
ANSWERS = {
    "Open MPI 4.1.4": "[ $1 = --showme:version ] && echo 'mpicxx: Open MPI 4.1.4 (Language: C++)'",
    "Open MPI v4.0.3rc4": "[ $1 = --showme:version ] && echo 'mpicxx: Open MPI v4.0.3rc4 (Language: C++)'",
    "MPICH version 5.0.2": "[ $1 = -v ] && echo 'mpicxx for MPICH version 5.0.2' && echo specs",
    "MVAPICH2 version 2.3.7": "[ $1 = -v ] && echo 'mpicxx for MVAPICH2 version 2.3.7'",
    "Intel(R) MPI Library 2021.10 for Linux*": (
        "[ $1 = -v ] && echo 'mpigxx for the Intel(R) MPI Library 2021.10 for Linux*'"
    ),
    "MPI": "false",
}


@pytest.mark.parametrize("version", ANSWERS)
def test_mpi_is_found(version: str, tmp_path: Path) -> None:
    programs(tmp_path, mpicxx=f"if [ $1 = -show ]; then echo link; else {ANSWERS[version]}; fi")
    found = horovod_build.find_mpi({"PATH": str(tmp_path)})
    assert found == Mpi(wrapper=str(tmp_path / "mpicxx"), version=version, link="link")


def test_a_missing_mpi_says_what_to_type(tmp_path: Path) -> None:
    programs(tmp_path, mpirun="echo 'mpirun (Open MPI) 5.0.1'")
    found = horovod_build.find_mpi({"PATH": str(tmp_path)})
    assert found == (
        "found no mpicxx on the PATH; type 'apt install openmpi-bin libopenmpi-dev', or load your cluster's "
        "MPI module"
    )


def test_a_compiler_named_by_CXX_is_taken_with_its_flags_or_none(tmp_path: Path) -> None:
    """With their flags; one that is not there is not silently another."""
    path = programs(tmp_path, **{"my-c++": "echo mine $1 $2", "c++": "echo other"})
    found = horovod_build.find_compiler({"PATH": str(path), "CXX": "my-c++ -pipe"})
    assert found == ([f"{tmp_path}/my-c++", "-pipe"], "mine -pipe --version")
    assert horovod_build.find_compiler({"PATH": str(path), "CXX": "gone"}) == ([], "")
    assert horovod_build.find_compiler({"PATH": str(path)}) == ([f"{tmp_path}/c++"], "other")


def cuda(folder: Path) -> Path:
    """A false toolkit in a folder."""
    programs(folder / "bin", nvcc="echo 'Cuda compilation tools, release 12.8, V12.8.93'")
    return folder


@pytest.fixture
def no_usual_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing in /usr/local/cuda, whatever this machine has there."""
    monkeypatch.setattr(horovod_build, "USUAL_CUDA", str(tmp_path / "nothing"))


@pytest.mark.usefixtures("no_usual_toolkit")
def test_cuda_toolkit_and_nccl_are_found(tmp_path: Path) -> None:
    cuda(tmp_path / "cuda")
    header = tmp_path / "nccl/include/nccl.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 27\n#define NCCL_PATCH 3\n")
    home = str(tmp_path / "cuda")
    expected = Nccl(home=str(tmp_path / "nccl"), version="2.27.3", cuda_home=home, cuda_version="12.8")
    for place in ({"PATH": "", "CUDA_HOME": home}, {"PATH": f"{home}/bin"}):
        environ = {**place, "NCCL_HOME": str(tmp_path / "nccl")}
        assert horovod_build.find_nccl(environ, "12.6") == expected


@pytest.mark.usefixtures("no_usual_toolkit")
def test_a_missing_nccl_says_what_to_install(tmp_path: Path) -> None:
    with_toolkit = {"PATH": str(cuda(tmp_path / "cuda") / "bin")}
    for environ, of_torch, words in (
        (with_toolkit, None, "torch is not built with CUDA"),
        ({"PATH": ""}, "13.0", "install NVIDIA's CUDA toolkit 13"),
        (with_toolkit, "13.0", "set CUDA_HOME to a toolkit 13"),
        ({**with_toolkit, "NCCL_HOME": str(tmp_path)}, "12.6", "pip install nvidia-nccl-cu12"),
    ):
        found = horovod_build.find_nccl(environ, of_torch)
        assert isinstance(found, str)
        assert words in found


@pytest.mark.usefixtures("no_usual_toolkit")
def test_the_toolkit_is_found_from_its_nvcc(tmp_path: Path) -> None:
    """Also of a link on the PATH; a folder without nvcc, as of an image for running alone, is none."""
    home = str(cuda(tmp_path / "opt/cuda"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").symlink_to(f"{home}/bin/nvcc")
    variables = {"PATH": "/usr/bin:/bin", "CUDA_HOME": str(tmp_path / "runtime")}
    assert horovod_build.find_toolkit(variables) is None
    for path in (f"{tmp_path}/bin", f"{home}/bin"):
        assert horovod_build.find_toolkit({**variables, "PATH": f"{path}:/usr/bin:/bin"}) == (home, "12.8")
    assert horovod_build.find_toolkit({**variables, "CUDA_HOME": home}) == (home, "12.8")


# The edits.


@pytest.mark.parametrize("build", [BUILD, CUDA_BUILD], ids=["cpu", "cuda"])
def test_edits_raise_the_standard(build: Build, tmp_path: Path) -> None:
    horovod_build.edit(source_tree(tmp_path), build)
    top = (tmp_path / "CMakeLists.txt").read_text()
    inner = (tmp_path / "horovod/torch/CMakeLists.txt").read_text()
    for text in (top, inner):
        assert "  set(CMAKE_CXX_STANDARD 20)\n" in text
        assert "STANDARD 14" not in text
    assert "-mavx" not in top
    assert ("UNITY_BUILD ON" in inner) == (build is BUILD), "with NCCL, sources are compiled one by one"


@pytest.mark.parametrize(
    ("build", "without_cuda"),
    [
        (CUDA_BUILD, False),
        (replace(CUDA_BUILD, nccl=None), True),
        # A torch without CUDA has nothing of it compiled anyway.
        (BUILD, False),
    ],
    ids=["with NCCL", "without NCCL", "no CUDA in torch"],
)
def test_without_nccl_nothing_of_cuda_is_compiled(build: Build, without_cuda: bool, tmp_path: Path) -> None:
    horovod_build.edit(source_tree(tmp_path), build)
    top = (tmp_path / "CMakeLists.txt").read_text()
    search = (tmp_path / "cmake/Modules/FindPytorch.cmake").read_text()
    assert ("check_language(CUDA)" in top) is not without_cuda
    assert ("torch.version.cuda" in search) is not without_cuda
    if build.nccl is not None:
        assert build.switches["HOROVOD_GPU_OPERATIONS"] == "NCCL"
        assert build.switches["HOROVOD_CUDA_HOME"] == build.switches["CUDA_HOME"] == "/opt/cuda"
    else:
        assert not any("CUDA" in name or "GPU" in name for name in build.switches)


@pytest.mark.parametrize(
    "edit", [*EDITS, UNITY, *WITHOUT_CUDA], ids=lambda edit: f"{edit.file} {edit.old[:24]}"
)
@pytest.mark.parametrize("times", [0, 2])
def test_a_changed_source_is_refused(edit: Edit, times: int, tmp_path: Path) -> None:
    build = BUILD if edit in BUILD.edits else replace(CUDA_BUILD, nccl=None)
    file = source_tree(tmp_path) / edit.file
    file.write_text(file.read_text().replace(edit.old, f"{edit.old}\n{edit.old}" if times else "nothing"))
    with pytest.raises(
        DualevalError, match=rf"not the source of Horovod 0\.28\.1.*{times} times, expected once"
    ):
        horovod_build.edit(tmp_path, build)


# The key.


CHANGES: dict[str, Build] = {
    "as it is": BUILD,
    "torch": replace(BUILD, torch=replace(TORCH, version="2.13.1+cpu")),
    "abi": replace(BUILD, torch=replace(TORCH, abi="0")),
    "standard": replace(BUILD, torch=replace(TORCH, standard=23)),
    "cuda": replace(BUILD, torch=CUDA_TORCH),
    "python": replace(BUILD, python="cpython-312-x86_64-linux-gnu"),
    "platform": replace(BUILD, python="cpython-311-aarch64-linux-gnu"),
    "libc": replace(BUILD, libc="glibc 2.41"),
    "compiler": replace(BUILD, compiler="c++ 14.2.0"),
    "MPI": replace(BUILD, mpi=replace(OPEN_MPI, version="MPICH version 4.1.4")),
    "MPI's version": replace(BUILD, mpi=replace(OPEN_MPI, version="Open MPI 5.0.1")),
    "MPI's place": replace(BUILD, mpi=replace(OPEN_MPI, wrapper="/usr/bin/mpicxx")),
    "MPI's libraries": replace(BUILD, mpi=replace(OPEN_MPI, link="c++ -L/usr/lib/mpi -lmpi")),
    "no MPI": replace(BUILD, mpi=None),
    "NCCL": CUDA_BUILD,
    "NCCL's version": replace(CUDA_BUILD, nccl=replace(NCCL, version="2.31.0")),
    "toolkit": replace(CUDA_BUILD, nccl=replace(NCCL, cuda_version="13.1")),
    **{name: replace(BUILD, compiler_variables={name: "1"}) for name in COMPILER_VARIABLES},
}


def test_each_component_changes_the_key() -> None:
    keys = {name: build.key for name, build in CHANGES.items()}
    assert len(set(keys.values())) == len(keys), "two of these would share a wheel"


def test_edits_and_version_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = BUILD.key
    for name, value in (("HOROVOD", "0.28.2"), ("UNITY", replace(UNITY, new="set(ANYTHING ON)"))):
        with monkeypatch.context() as changed:
            changed.setattr(horovod_build, name, value)
            assert BUILD.key != before
    assert BUILD.key == before


def test_the_folder_tells_what_it_is_for() -> None:
    words = "0.28.1-torch-2.13.0+cpu-cpython-311-x86_64-linux-gnu-gloo-open-mpi-4.1.4-no-nccl"
    assert BUILD.name == f"{words}-{BUILD.key[:16]}"
    assert "no-mpi" in replace(BUILD, mpi=None).name


# The variables.


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "-j2"),
        ({"MAKEFLAGS": "-j1"}, "-j1"),
        ({"MAKEFLAGS": " -j8 --jobserver-auth=3,4", "MAKELEVEL": "1"}, "-j2"),
    ],
)
def test_makeflags_of_the_user_are_kept_outside_of_make(environ: dict[str, str], expected: str) -> None:
    assert horovod_build.makeflags(environ, 2) == expected


def test_the_build_gets_its_own_variables_and_some_of_the_users() -> None:
    environ = read_variables(
        "PATH=/bin HOME=/me HOROVOD_BUILD_CUDA_CC_LIST=90 CXXFLAGS=-pipe HOROVOD_WITH_MXNET=1 "
        "CMAKE_GENERATOR=Ninja MFLAGS=x"
    )
    variables = CUDA_BUILD.variables(environ, 2)
    kept = ("PATH", "HOME", "HOROVOD_BUILD_CUDA_CC_LIST", "CXXFLAGS")
    assert {name: variables[name] for name in kept} == {name: environ[name] for name in kept}
    assert not {"HOROVOD_WITH_MXNET", "CMAKE_GENERATOR", "MFLAGS"} & set(variables)
    assert variables["HOROVOD_WITH_MPI"] == variables["HOROVOD_WITH_GLOO"] == "1"
    assert variables["MPI_HOME"] == "/opt/mpi"
    assert variables["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert (variables["HOROVOD_NCCL_HOME"], variables["HOROVOD_CUDA_HOME"]) == ("/opt/nccl", "/opt/cuda")
    without = replace(BUILD, mpi=None).variables({}, 2)
    assert without["HOROVOD_WITHOUT_MPI"] == "1"
    assert not {"HOROVOD_WITH_MPI", "MPI_HOME", "HOROVOD_GPU_OPERATIONS"} & set(without)
