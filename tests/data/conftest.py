"""What tests of data have in common."""

from __future__ import annotations

import pytest

from dualeval.vision_library import torchvision
from tests.vehicles.made_tokenizers import Made, make_all

# Imported here, not in the first test that needs it: the import sets an environment variable.
torchvision()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    return make_all(tmp_path_factory.mktemp("tokenizers"))
