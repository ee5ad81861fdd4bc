"""Jobs of detection on made data, which tests change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from torch import Tensor

from dualeval.errors import UsageError
from dualeval.result import Result
from dualeval.tasks.detection import Detection
from tests.engine.test_evaluator import evaluate
from tests.vehicles.coco_data import Finder

KEYS = (
    *("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large"),
    *("ar1", "ar10", "ar100", "ar_small", "ar_medium", "ar_large"),
)


def task(home: Path, **changes: Any) -> Detection:
    given = {"model": Finder(), "data": home / "pictures", "annotations": home / "instances.json", **changes}
    return Detection(**given)


def changed(home: Path, folder: Path, change: Callable[[Any], object]) -> dict[str, Any]:
    """The same pictures with other annotations."""
    content = json.loads((home / "instances.json").read_text())
    change(content)
    path = folder / "changed.json"
    path.write_text(json.dumps(content))
    return {"annotations": path}


def refused(home: Path, match: str, **changes: Any) -> None:
    with pytest.raises(UsageError, match=match):
        evaluate(task(home, **changes), None, batch_size=8)


def rows(out: Path) -> list[dict[str, Any]]:
    """A run's rows as Python values."""
    found: list[dict[str, Any]] = pyarrow.parquet.read_table(out / "predictions.parquet").to_pylist()
    return found


def values(result: Result) -> list[Any]:
    return [result.metrics[key] for key in KEYS]


class Wrong(Finder):
    """Gives what others take boxes for."""

    def __init__(self, change: Callable[[dict[str, Tensor]], Any]) -> None:
        super().__init__()
        self.change = change

    def _of(self, picture: Tensor) -> Any:
        found = super()._of(picture)
        # Not of the blank pictures that a model is tried on.
        return self.change(found) if picture.max() > 0 else found
