"""A small task whose columns every kind of TorchMetrics metric reads: scores, pictures, texts, boxes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.columns.ragged import Ragged
from dualeval.metrics import Metric, RowMetric, from_torchmetrics
from dualeval.metrics.torchmetrics.metric import Parsed
from tests.vehicles.ragged_task import IndexedTask
from tests.vehicles.tiny import CLASSES

WORDS = ("the", "cat", "sat", "on", "mat")
SAMPLES = 120
BATCH = 8
BROKEN = (5, 44, 119)
SCORES = {"preds": "probabilities", "target": "target"}
NUMBERS = {"preds": "found", "target": "true"}
# Name in TorchMetrics: arguments, columns, and whether the columns are kept.
METRICS: dict[str, tuple[str, Any, bool]] = {
    "confusion": (f"MulticlassConfusionMatrix({CLASSES})", SCORES, True),
    "auroc": (f"MulticlassAUROC({CLASSES})", SCORES, True),
    "calibration": (f"MulticlassCalibrationError({CLASSES})", SCORES, True),
    "spearman": ("SpearmanCorrCoef()", NUMBERS, True),
    "pearson": ("PearsonCorrCoef()", ["found", "true"], True),
    "kendall": ("KendallRankCorrCoef()", NUMBERS, True),
    "psnr": ("PeakSignalNoiseRatio(data_range=1.0)", ["picture", "original"], False),
    "squad": (
        "SQuAD()",
        {
            "preds": [{"prediction_text": "said", "id": "key"}],
            "target": [{"answers": {"answer_start": ["place"], "text": ["gold"]}, "id": "key"}],
        },
        True,
    ),
    "bleu": ("BLEUScore(n_gram=2)", {"preds": "said", "target": Parsed("references")}, True),
    "map": (
        "MeanAveragePrecision()",
        {
            "preds": [{"boxes": "boxes", "scores": "box_scores", "labels": "labels"}],
            "target": [{"boxes": "gt_boxes", "labels": "gt_labels"}],
        },
        True,
    ),
    "largest": ("MaxMetric()", "found", True),
    "smallest": ("MinMetric()", "found", True),
    "mean": ("MeanMetric()", {"value": "found", "weight": "true"}, True),
    "squared": ("MeanSquaredError(squared=False)", NUMBERS, True),
}


def columns_of(features: Tensor, indices: Tensor) -> dict[str, Any]:
    """The columns of some samples: of each sample alone, so that their division changes no bit."""
    places = indices.tolist()
    said = [" ".join(WORDS[place * step % 5] for step in range(1, 6)) for place in places]
    gold = [" ".join(WORDS[place * step % 5] for step in range(2, 7)) for place in places]
    counts = [place % 4 for place in places]
    gt_counts = [1 + place % 3 for place in places]
    return {
        "probabilities": torch.stack([row[:CLASSES].softmax(0) for row in features]),
        "target": indices * 31 % CLASSES,
        "found": features[:, 0],
        "true": features[:, 0] * 0.5 + features[:, 1],
        "picture": features[:, :9].view(-1, 1, 3, 3),
        "original": features[:, 2:11].view(-1, 1, 3, 3),
        "said": said,
        "gold": gold,
        "references": [
            json.dumps([text, other][: 1 + place % 2])
            for text, other, place in zip(gold, said, places, strict=True)
        ],
        "key": [f"question {place}" for place in places],
        "place": indices,
        "boxes": _boxes(features, counts, 0.7),
        "box_scores": [row[:count] for row, count in zip(features, counts, strict=True)],
        "labels": [torch.arange(count) % 2 for count in counts],
        "gt_boxes": _boxes(features, gt_counts, 0.9),
        "gt_labels": [torch.arange(count) % 2 for count in gt_counts],
    }


def _boxes(features: Tensor, counts: Sequence[int], size: float) -> Ragged:
    rows = []
    for row, count in zip(features, counts, strict=True):
        corner = torch.arange(count, dtype=torch.float32)[:, None] * 20 + row[:2] * 4
        rows.append(torch.cat([corner, corner + 10 * size], dim=1))
    return Ragged(torch.cat(rows), torch.tensor(counts))


class ManyMetricsTask(IndexedTask):
    """Columns of the data alone, and the metrics of these names."""

    name = "many metrics"
    rows = ()  # type: ignore[assignment]

    def __init__(self, names: Sequence[str] = tuple(METRICS), broken: Sequence[int] = BROKEN) -> None:
        super().__init__(SAMPLES, broken)
        self._names = tuple(names)

    def build_model(self, device: torch.device) -> nn.Module:
        return nn.Identity().eval()

    def observe(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
        return columns_of(outputs, batch["index"])

    def metrics(self) -> list[Metric | RowMetric]:
        return [made(name) for name in self._names]


def made(name: str) -> Metric | RowMetric:
    """The metric of that name."""
    spelled, columns, keeps_rows = METRICS[name]
    return from_torchmetrics(spelled, columns, name=name, keeps_rows=keeps_rows)
