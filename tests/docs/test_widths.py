"""benchmarks/widths.py: what a batch passes on its way does not grow unseen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

# Of dualeval's own, as benchmarks/results/ has them. More only for what every batch needs.
CALLS, FILES, CHANGES = 47, 17, 28


def test_a_batch_passes_few_calls_and_files(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/widths.py"), "--out", str(tmp_path / "out")]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=environ)
    calls, files, changes = json.loads(done.stdout.splitlines()[-1])
    assert calls <= CALLS and files <= FILES and changes <= CHANGES, (calls, files, changes)
