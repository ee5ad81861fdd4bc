"""The peak memory of a rank with a sharded model beside that of one with the whole model: real commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import large_model
from tests.conftest import ROOT, Launch
from tests.launchers import start

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells the memory")

RANKS = 2
# Half of the model, and what a rank needs beside its half: docs/large-models.md.
MOST = 0.65


def run(
    launch: Launch, folder: Path, megabytes: int, weights: Path, *options: str, ranks: int = RANKS
) -> tuple[dict[str, int], str]:
    """The largest peaks of a rank, by kind of memory, and the digest."""
    folder.mkdir()
    job = large_model.job(megabytes, weights, folder / "out", samples=16, batch=4)
    words = [*(start("torchrun", ranks) if ranks > 1 else []), "dualeval", *job, *options]
    variables = {"OMP_NUM_THREADS": "1", large_model.PEAKS: str(folder)}
    launch(words, variables=variables, cwd=ROOT, timeout=240).ok()
    found = large_model.read_peaks(folder)
    assert len(found) == ranks
    peaks = {kind: max(rank[kind] for rank in found) for kind in found[0]}
    return peaks, json.loads((folder / "out/result.json").read_text())["metrics_digest"]


@pytest.mark.long
def test_a_model_of_100_mb(launch: Launch, tmp_path: Path) -> None:
    [weights] = large_model.write(tmp_path, 100, [large_model.TORCH]).values()
    whole, digest = run(launch, tmp_path / "whole", 100, weights, ranks=1)
    sharded, found = run(launch, tmp_path / "sharded", 100, weights, "--shard", "fsdp")
    assert found == digest
    assert whole["anonymous"] > 100e6, whole
    assert sharded["anonymous"] <= MOST * whole["anonymous"], (sharded, whole)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", [large_model.TORCH, large_model.PARTS, large_model.DCP])
def test_a_model_of_1_gb(launch: Launch, tmp_path: Path, form: str) -> None:
    [weights] = large_model.write(tmp_path, 1000, [form]).values()
    whole, digest = run(launch, tmp_path / "whole", 1000, weights)
    sharded, found = run(launch, tmp_path / "sharded", 1000, weights, "--shard", "fsdp")
    assert found == digest
    for kind in ("anonymous", "whole"):
        assert sharded[kind] <= MOST * whole[kind], (kind, sharded, whole)
