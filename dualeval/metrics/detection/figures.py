"""A figure, and where in pycocotools' tables it comes from."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Figure(NamedTuple):
    """Which part of pycocotools' tables a figure is the mean of."""

    # "precision" or "recall".
    table: str
    # Places in its lists of thresholds (None for all), of sizes, and of most detections an image.
    threshold: int | None
    size: int
    limit: int

    def of(self, evaluation: Any, category: int | None = None) -> float | None:
        """The figure, of all categories or one; None where none has an annotation."""
        values = evaluation.eval[self.table]
        values = values if self.threshold is None else values[[self.threshold]]
        values = values[..., self.size, self.limit]
        values = values if category is None else values[..., category]
        # As in its `summarize`, which knows the limit 100 alone: in this order, so that bits are the same.
        there = values[values > -1]
        return float(np.mean(there)) if there.size else None
