"""The data of detection's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vehicles.coco_data import write_coco


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures and annotations."""
    folder = tmp_path_factory.mktemp("coco")
    write_coco(folder, 24)
    return folder
