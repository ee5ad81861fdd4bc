"""The hash of a machine's bits: the same in every process and thread, another where results are others."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dualeval.engine.device import machines, numerics
from dualeval.engine.device.machines import numeric_bits
from dualeval.options.precision import FP32, PRECISIONS, Precision
from tests.conftest import Launch

CPU = torch.device("cpu")

PRINT_BITS = """
import sys, torch
from dualeval.engine.device import numerics
from dualeval.engine.device.machines import numeric_bits
from dualeval.options.precision import PRECISIONS

for precision in map(PRECISIONS.get, sys.argv[1:]):
    with numerics.settings(precision, torch.device("cpu")):
        print(numeric_bits(torch.device("cpu"), precision))
"""
ON_CPUS = [each for each in PRECISIONS.values() if not each.tf32]

# Each of them makes a library take other kernels, on a CPU that has a choice.
VARIABLES = (
    {"MKL_CBWR": "COMPATIBLE"},
    {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"ATEN_CPU_CAPABILITY": "default"},
    {"DNNL_DEFAULT_FPMATH_MODE": "BF16"},
)


def own_bits(precision: Precision = FP32) -> str:
    with numerics.settings(precision, CPU):
        return numeric_bits(CPU, precision)


def test_the_bits_are_the_same_in_every_process(launch: Launch) -> None:
    done = launch(
        [sys.executable, "-c", PRINT_BITS, *(each.name for each in ON_CPUS)],
        variables={"OMP_NUM_THREADS": "4"},
    ).ok()
    assert done.stdout.split() == [own_bits(precision) for precision in ON_CPUS]


def test_the_bits_are_the_same_in_every_thread() -> None:
    wanted = own_bits()
    with ThreadPoolExecutor(3, initializer=numerics.set_thread) as pool:
        assert set(pool.map(lambda _: numeric_bits(CPU, FP32), range(12))) == {wanted}


def test_a_precision_has_bits_of_its_own() -> None:
    assert len({own_bits(precision) for precision in ON_CPUS}) == len(ON_CPUS)


def test_the_probe_reads_no_random_numbers() -> None:
    before = torch.get_rng_state()
    torch.manual_seed(1)
    first = own_bits()
    torch.manual_seed(2)
    assert own_bits() == first
    torch.set_rng_state(before)


def test_a_kernel_that_gives_other_bits_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = own_bits()
    names = [name for name, _ in machines._results(CPU, torch.float32)]
    assert len(names) == len(set(names))
    whole = machines._results

    for changed in names:

        def results(
            device: torch.device, dtype: torch.dtype, changed: str = changed
        ) -> Iterator[tuple[str, Tensor]]:
            for name, result in whole(device, dtype):
                bits = result.flatten().clone()
                bits[-1] = bits[-1].nextafter(bits.new_tensor(9))
                yield name, bits.reshape(result.shape) if name == changed else result

        monkeypatch.setattr(machines, "_results", results)
        assert own_bits() != wanted, changed


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the variables are those of x86 libraries")
@pytest.mark.long
def test_where_a_runs_digest_is_another_so_are_the_bits(launch: Launch, tmp_path: Path) -> None:
    """The embedded job under variables that choose other kernels."""
    found = []
    for number, variables in enumerate(({}, *VARIABLES)):
        out = tmp_path / str(number)
        launch(
            [sys.executable, "-m", "dualeval", "run", "--limit", "640", "--out", out], variables=variables
        ).ok()
        bits = json.loads((out / "job.json").read_text())["machine"]["bits"]
        found.append((json.loads((out / "result.json").read_text())["metrics_digest"], bits))
    assert {bits for digest, bits in found if digest == found[0][0]} == {found[0][1]}
    digests, bits = ({entry[place] for entry in found} for place in (0, 1))
    assert len(digests) > 1, "no variable changes anything on this CPU"
    assert len(set(found)) == len(bits), "one hash stands for two digests"
