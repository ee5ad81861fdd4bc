"""Whether ``bits``, by which a run knows its machine, tells apart what gives the embedded job other digests.

Each row is a run of its own, under variables by which the CPU libraries choose other kernels, as on another
model of CPU. Equal bits must mean equal digests, and other bits other ones.

    python benchmarks/bits.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ONE_THREAD, machine, run_process, table, write_results

_TIMEOUT_S = 180
_VARIABLES: tuple[dict[str, str], ...] = (
    {},
    {"MKL_CBWR": "COMPATIBLE"},
    {"MKL_CBWR": "AVX2"},
    {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"ATEN_CPU_CAPABILITY": "default"},
    {"DNNL_DEFAULT_FPMATH_MODE": "BF16"},
    {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
)
_PRECISIONS = ("fp32", "amp-bf16")


def run(precision: str, variables: dict[str, str]) -> dict[str, str]:
    """Bits and digest of one run of the embedded job."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "dualeval", "run", "--no-progress", "--precision", precision]
        run_process([*command, "--out", folder], timeout_s=_TIMEOUT_S, environ={**ONE_THREAD, **variables})
        result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text("utf-8"))
    return {"bits": result["device"]["bits"], "digest": result["metrics_digest"]}


def main() -> None:
    """Measure, print, and write the page."""
    host = machine()
    rows, found = [], []
    for precision in _PRECISIONS:
        for variables in _VARIABLES:
            one = run(precision, variables)
            found.append({"precision": precision, "variables": variables, **one})
            named = " ".join(f"{name}={value}" for name, value in variables.items()) or "none"
            rows.append([precision, named, one["bits"], one["digest"][:16]])
    pairs = {(row["precision"], row["bits"], row["digest"]) for row in found}
    bits = {(precision, own) for precision, own, _ in pairs}
    digests = {(precision, digest) for precision, _, digest in pairs}
    agree = len(pairs) == len(bits) == len(digests)
    body = (
        f"{len(found)} runs of the embedded job: {len(bits)} kinds of bits, {len(digests)} digests; "
        f"{'each of one goes with one of the other' if agree else 'THEY DO NOT GO TOGETHER'}.\n\n"
        f"{table(['precision', 'variables', 'bits', 'digest'], rows)}"
    )
    write_results("bits", "Bits of a machine and digests", body, {"runs": found}, host)


if __name__ == "__main__":
    main()
