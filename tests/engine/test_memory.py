"""A rank's memory does not grow with the number of samples: rows are on disk, not held."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Launch
from tests.vehicles import large_model
from tests.vehicles.launchers import start

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
            *(sys.executable, "-m", "tests.vehicles.workers.mapped_worker", str(count), tmp_path / str(count))
        ]
        done = launch(command, cwd=ROOT, timeout=240).ok()
        found[count] = json.loads(done.stdout)
    for name, held in found[400_000].items():
        assert found[4_000_000][name] - held < ALLOWED_GROWTH, (name, found)


# -- the peak memory of a rank with a sharded model beside that of one with the whole model: real command


pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells the memory")

# Half of the model, and what a rank needs beside its half: docs/large-models.md.
MOST = 0.65


def run(launch: Launch, folder: Path, weights: Path, *options: str) -> tuple[dict[str, int], str]:
    """The largest peaks of one of two ranks, by kind of memory, and the digest."""
    folder.mkdir()
    job = large_model.job(1000, weights, folder / "out", samples=16, batch=4)
    words = [*start("torchrun", 2), "dualeval", *job, *options]
    variables = {"OMP_NUM_THREADS": "1", large_model.PEAKS: str(folder)}
    launch(words, variables=variables, cwd=ROOT, timeout=240).ok()
    found = large_model.read_peaks(folder)
    assert len(found) == 2
    peaks = {kind: max(rank[kind] for rank in found) for kind in found[0]}
    return peaks, json.loads((folder / "out/result.json").read_text())["metrics_digest"]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", [large_model.TORCH, large_model.PARTS, large_model.DCP])
def test_a_sharded_rank_holds_a_part_of_a_model_of_1_gb(launch: Launch, tmp_path: Path, form: str) -> None:
    [weights] = large_model.write(tmp_path, 1000, [form]).values()
    whole, digest = run(launch, tmp_path / "whole", weights)
    sharded, found = run(launch, tmp_path / "sharded", weights, "--shard", "fsdp")
    assert found == digest
    for kind in ("anonymous", "whole"):
        assert sharded[kind] <= MOST * whole[kind], (kind, sharded, whole)
