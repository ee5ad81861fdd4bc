"""A rank holds one model while it loads: no second copy of the weights, and nothing of an optimizer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model

from tests.conftest import ROOT, Launch
from tests.models.test_checkpoint_folders import save_distributed, sharded
from tests.workers.loading_worker import stack

# The promise of docs/checkpoints.md; of this small model a page or a thread more counts.
MOST = 1.2
# Half of it, one layer of 16, and the same for a page or a thread.
MOST_OF_HALF = 0.5 + 1 / 16 + 0.15


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells the peak")
def test_no_form_of_checkpoint_is_held_twice(tmp_path: Path, launch: Launch) -> None:
    model = stack()
    state = model.state_dict()
    optimizer = {name: torch.ones(2, *value.shape) for name, value in state.items()}
    torch.save({"model": state, "optimizer": optimizer}, tmp_path / "zip.pt")
    torch.save({name: value.half() for name, value in state.items()}, tmp_path / "half.pt")
    save_model(model, str(tmp_path / "one.safetensors"))
    sharded(state, tmp_path / "several", size=10_000_000)
    save_distributed({"model": state, "optimizer": optimizer}, tmp_path / "distributed")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    # No memory that the allocator keeps for later: what one form leaves would hide what the next one takes.
    variables = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    paths = [tmp_path / name for name in ("zip.pt", "half.pt", "one.safetensors", "several", "distributed")]
    paths.append(tmp_path / "old.pt")
    worker = [sys.executable, "-m", "tests.workers.loading_worker"]
    done = launch([*worker, *paths], variables=variables, cwd=ROOT).ok()
    factors = {Path(path).name: factor for path, factor in json.loads(done.stdout).items()}
    assert factors.pop("old.pt") > 1.8, "this format is held as torch loads it: the measure sees it"
    assert max(factors.values()) < MOST, factors
    assert min(factors.values()) > 0.9, factors
    # A rank of two that loads its part: that, and a layer.
    done = launch([*worker, "--part", *paths[:-1]], variables=variables, cwd=ROOT).ok()
    factors = json.loads(done.stdout)
    assert min(factors.values()) > 0.45, factors
    assert max(factors.values()) < MOST_OF_HALF, factors
