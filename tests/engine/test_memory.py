"""A rank's memory does not grow with the number of samples: rows are on disk, not held."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Launch

ALLOWED_GROWTH = 20_000_000  # bytes


@pytest.mark.long
def test_peak_memory_is_that_of_a_tenth_of_the_samples(launch: Launch) -> None:
    done = launch([sys.executable, ROOT / "benchmarks/memory.py", "--json"], timeout=240).ok()
    peaks = json.loads(done.stdout)
    assert sorted(peaks) == ["1", "2"]
    for processes, by_samples in peaks.items():
        growth = by_samples["100000"] - by_samples["10000"]
        assert growth < ALLOWED_GROWTH, f"{processes} processes: {growth:,} bytes more for 100,000 samples"


@pytest.mark.long
def test_metrics_of_all_rows_hold_none_of_them(launch: Launch, tmp_path: Path) -> None:
    """In a run and in computing them again: 36 bytes of 3,600,000 samples more would be 130 MB."""
    found = {}
    for count in (400_000, 4_000_000):
        command: list[str | Path] = [
            *(sys.executable, "-m", "tests.workers.mapped_worker", str(count), tmp_path / str(count)),
        ]
        done = launch(command, cwd=ROOT, timeout=240).ok()
        found[count] = json.loads(done.stdout)
    for name, held in found[400_000].items():
        assert found[4_000_000][name] - held < ALLOWED_GROWTH, (name, found)
