"""TorchMetrics itself: its import, its classes by name, and what of it cannot be evaluated in parts."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

from dualeval.errors import UsageError
from dualeval.vision_library import torchvision
from dualeval.wording import nearest

# Its public rooms; where two have a class of the same name the first counts. The package itself comes last:
# it has classes of their old place, which warn of that.
ROOMS = (
    *("aggregation", "classification", "regression", "text", "detection", "segmentation", "image", "audio"),
    *("clustering", "nominal", "retrieval", "shape", "multimodal", "video", "wrappers", ""),
)
_INSTALL = "Type: pip install torchmetrics"

_NETWORK = (
    "evaluates a network of its own within update, and downloads its weights. Evaluate that network as a "
    "model, let 'observe' return its outputs as columns, and compute the rest from these"
)
_LAST = "is about the last few updates of a training loop, and an evaluation has no such order"
_SHIFTED = (
    "mistakes groups in each batch that lacks one, so that the value depends on the batch size. Compute it "
    "from all rows: dualeval.metrics.Rows(function, ['prediction', 'target', 'group'])"
)
_NO_METRIC = (
    "is not a metric by itself. Give each of its metrics: "
    "from_torchmetrics(metric, columns) for metric in ..."
)
# Classes by the reason why they cannot be made here. What cannot be told from a metric's states, or must be
# known before its constructor starts a download.
_REFUSED = {
    **dict.fromkeys(
        (
            *("FrechetInceptionDistance", "KernelInceptionDistance", "InceptionScore"),
            *("MemorizationInformedFrechetInceptionDistance", "LearnedPerceptualImagePatchSimilarity"),
            *("PerceptualPathLength", "DeepImageStructureAndTextureSimilarity", "ARNIQA", "CLIPScore"),
            *("CLIPImageQualityAssessment", "BERTScore", "InfoLM"),
            *("DeepNoiseSuppressionMeanOpinionScore", "NonIntrusiveSpeechQualityAssessment"),
        ),
        _NETWORK,
    ),
    **dict.fromkeys(("Running", "RunningMean", "RunningSum"), _LAST),
    **dict.fromkeys(("BinaryFairness", "BinaryGroupStatRates"), _SHIFTED),
    **dict.fromkeys(("MetricCollection", "MetricTracker", "FeatureShare"), _NO_METRIC),
}


def torchmetrics() -> ModuleType:
    """The library, imported at the first call (seconds)."""
    if importlib.util.find_spec("torchmetrics") is None:
        raise UsageError(f"this metric is one of TorchMetrics, which is not installed. {_INSTALL}")
    torchvision()  # TorchMetrics imports it, and beside CPU torch only this way does that work
    return importlib.import_module("torchmetrics")


def classes() -> dict[str, type]:
    """TorchMetrics' public classes by name, those of its wrappers and collections too."""
    torchmetrics()
    found: dict[str, type] = {}
    for room in ROOMS:
        module = importlib.import_module(f"torchmetrics.{room}" if room else "torchmetrics")
        names = getattr(module, "__all__", None) or [name for name in vars(module) if name.endswith("Metric")]
        for name in names:
            kind = getattr(module, name, None)
            if isinstance(kind, type) and not name.startswith("_") and name != "Metric":
                found.setdefault(name, kind)
    return found


def find_class(name: str) -> type:
    """A class by its name, such as ``MulticlassAUROC`` or ``classification.MulticlassAUROC``."""
    room, _, own = name.rpartition(".")
    room = room.removeprefix("torchmetrics").removeprefix(".")
    if why := _REFUSED.get(own):
        raise UsageError(f"TorchMetrics' {own} {why}.")
    known = classes()
    if own in known and room in ("", *ROOMS):
        return known[own]
    raise UsageError(
        f"TorchMetrics {torchmetrics().__version__} has no class {name!r}, or a package that the class needs "
        f"is not installed.{nearest(own, known)} See docs/torchmetrics.md"
    )


def why_refused(metric: Any) -> str | None:
    """Why a metric cannot be evaluated; None where nothing speaks against it."""
    for part in metric.modules():
        for kind in type(part).__mro__:
            if kind.__module__.startswith("torchmetrics.") and kind.__name__ in _REFUSED:
                return f"TorchMetrics' {kind.__name__} {_REFUSED[kind.__name__]}."
    return None
