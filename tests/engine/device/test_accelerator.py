"""The accelerator: the one place that knows devices, their names, and what they say when memory is short."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
import torch

from dualeval.engine.device import accelerator
from dualeval.engine.device.accelerator import Accelerator, Cuda, Host, accelerator_of, is_out_of_memory
from dualeval.engine.device.machines import machine_facts

CPU = torch.device("cpu")


ENGINE = Path(accelerator.__file__).parents[1]


def test_each_kind_of_device_is_one_entry() -> None:
    assert type(accelerator_of(torch.device("cpu"))) is Host
    assert type(accelerator_of(torch.device("cuda", 3))) is Cuda
    # What PyTorch's common interface describes well enough needs none.
    assert type(accelerator_of(torch.device("xpu", 1))) is Accelerator
    assert accelerator_of(torch.device("cuda", 3)).device == torch.device("cuda", 3)


def test_no_other_module_of_the_engine_knows_streams() -> None:
    """Settings of numerics are CUDA's own, and stay where they are."""
    for path in sorted(ENGINE.rglob("*.py")):
        if path.name == "accelerator.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.keyword):
                assert node.arg not in ("pin_memory", "non_blocking"), path
            elif isinstance(node, ast.Attribute) and path.name != "numerics.py":
                name = ast.unparse(node)
                assert name not in ("torch.cuda", "torch.accelerator", "torch.Stream", "torch.Event"), path


class Named(Accelerator):
    def model(self) -> str:
        return "Played 1000"

    def versions(self) -> dict[str, str]:
        return {"driver": "7"}


def test_a_machine_says_what_its_device_says(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = machine_facts(torch.device("cpu"), ())
    assert plain["model"] == Host(torch.device("cpu")).model() != ""
    assert "cuda" not in plain["versions"]
    monkeypatch.setitem(accelerator.ACCELERATORS, "cpu", Named)
    facts = machine_facts(torch.device("cpu"), ())
    assert facts["model"] == "Played 1000"
    assert facts["versions"] == {**plain["versions"], "driver": "7"}


def test_a_gpus_machine_names_cublas_the_driver_and_their_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Played: a library with cuBLAS's one function, and what /proc says of them."""
    assert "runtime" not in machine_facts(torch.device("cpu"), ()), "records of CPUs are as they were"
    source, library = tmp_path / "cublas.c", tmp_path / "libcublas.so.13"
    source.write_text("int cublasGetProperty(int kind, int *value) { *value = 13 - kind; return 0; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
    maps, driver = tmp_path / "maps", tmp_path / "version"
    maps.write_text(f"7f00-7f01 r-xp 00000000 08:01 7 /lib/libc.so.6\n7f02-7f03 r--p 0 08:01 8 {library}\n")
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\n")
    monkeypatch.setattr(accelerator, "_MAPS", maps)
    monkeypatch.setattr(accelerator, "_DRIVER", driver)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    others = [name for name in accelerator._VARIABLES if name != "CUBLAS_WORKSPACE_CONFIG"]
    for name in others:
        monkeypatch.delenv(name, raising=False)
    found = accelerator.Cuda(torch.device("cuda", 0)).runtime()
    assert found == {
        "cublas": "13.12.11",
        "driver": "580.65.06",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "blas": "_BlasBackend.Cublas",
        **dict.fromkeys(others),
    }
    maps.write_text("")
    driver.unlink()
    found = accelerator.Cuda(torch.device("cuda", 0)).runtime()
    assert (found["cublas"], found["driver"]) == (None, None)


def test_memory_is_given_back_by_what_torch_2_8_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, whose module of torch plays the device's."""
    done: list[object] = []
    monkeypatch.delattr(torch.accelerator, "empty_cache", raising=False)
    monkeypatch.setattr(torch.accelerator, "synchronize", done.append)
    monkeypatch.setattr(torch.cpu, "empty_cache", lambda: done.append("emptied"), raising=False)
    Accelerator(torch.device("cpu")).release()
    assert done == [torch.device("cpu"), "emptied"]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
            "tried to allocate 36028797018963968 bytes. Error code 12 (Cannot allocate memory)"
        ),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 17.17 GB)"),
        torch.AcceleratorError(
            "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/"
        ),
    ],
    ids=lambda error: str(error)[:60],
)
def test_a_lack_of_memory_is_known_by_its_words(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x12 and 13x7)"),
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. Out of shared memory."),
        OSError("out of memory"),
        ValueError("CUBLAS_STATUS_ALLOC_FAILED"),
    ],
    ids=lambda error: str(error)[:60],
)
def test_other_failures_are_no_lack_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_the_current_device_is_the_one_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(torch.cuda, "device", made.append)
    accelerator_of(torch.device("cuda", 1)).as_current()
    assert made == [torch.device("cuda", 1)]
    with accelerator_of(CPU).as_current():
        pass
