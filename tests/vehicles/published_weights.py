"""Fixtures that publish a test's own weights in torchvision's name: the real ones cannot be fetched here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from dualeval.vision_library import torchvision

# Called with model's name, entry's name, a model with the weights, and the folder: returns the file.
Publish = Callable[[str, str, nn.Module, Path], Path]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """An empty cache of downloaded weights, in place of the user's own."""
    before = torch.hub.get_dir()
    torch.hub.set_dir(str(tmp_path / "hub"))
    folder = tmp_path / "hub/checkpoints"
    folder.mkdir(parents=True)
    yield folder
    torch.hub.set_dir(before)


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Write weights to a file with their hash in its name, and let torchvision's entry have that address."""

    def write(name: str, entry_name: str, model: nn.Module, folder: Path) -> Path:
        entry = torchvision().models.get_model_weights(name)[entry_name]
        path = folder / "weights.pth"
        torch.save(model.state_dict(), path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        path = path.rename(folder / f"{name}-{digest[:8]}.pth")
        url = f"https://download.pytorch.org/models/{path.name}"
        monkeypatch.setattr(entry, "_value_", replace(entry.value, url=url))
        return path

    return write
