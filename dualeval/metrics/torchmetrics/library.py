"""TorchMetrics itself: its import, its classes by name, what of it cannot be evaluated in parts, and a metric
in a line of text, which is parsed and never evaluated: docs/torchmetrics.md."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Collection
from types import ModuleType
from typing import Any

from dualeval.errors import UsageError
from dualeval.metrics.torchmetrics.arguments import Shape
from dualeval.vision_library import torchvision
from dualeval.wording import nearest

# Its public rooms; where two have a class of the same name the first counts. The package itself comes last:
# it has classes of their old place, which warn of that.
ROOMS = (
    *("aggregation", "classification", "regression", "text", "detection", "segmentation", "image", "audio"),
    *("clustering", "nominal", "retrieval", "shape", "multimodal", "video", "wrappers", ""),
)

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

SYNTAX = "'torchmetrics:Class(argument=value)@preds=column,target=column as name'"
# A class, with what is in its brackets; what stands behind @; and a name behind "as".
_FORM = re.compile(r"([\w.\s]+(?:\(.*?\))?\s*)(?:@(.*?))?(?: as ([^'\"()\[\]{}@]+))?", re.DOTALL)

_COLUMN = r"\s*([^\W\d]\w*)\s*=\s*('[^']*'|\"[^\"]*\"|[^\W\d]\w*)\s*"
# By argument of update: the columns that a task may have for it, the best first.
_USUAL = {
    "preds": ("preds", "prediction", "predictions", "probabilities", "logits"),
    "target": ("target", "targets", "label", "labels"),
    "targets": ("targets", "target", "label", "labels"),
    "labels": ("labels", "label", "target"),
    "value": ("value", "loss"),
    "indexes": ("indexes", "index"),
    "groups": ("groups", "group"),
}


def torchmetrics() -> ModuleType:
    """The library, imported at the first call (seconds)."""
    if importlib.util.find_spec("torchmetrics") is None:
        raise UsageError(
            "this metric is one of TorchMetrics, which is not installed. Type: pip install torchmetrics"
        )
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


# -- a metric in a line of text --------------------------------------------------------------------------


def read(text: str) -> tuple[Any, dict[str, Shape] | None, str | None]:
    """The metric that a text spells, its columns where it has any, and its name likewise."""
    found = _FORM.fullmatch(text.removeprefix("torchmetrics:"))
    if found is None:
        raise UsageError(f"{text!r} cannot be read, expected {SYNTAX}")
    call, columns, name = found.groups()
    metric = _built(_parsed(call, text), text)
    return metric, None if columns is None else _columns(columns, text), name and name.strip()


def usual_columns(metric: Any, available: Collection[str] | None, text: str) -> dict[str, Shape]:
    """The columns that the arguments of an update have where nobody names any."""
    parameters = inspect.signature(metric.update).parameters.values()
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    found: dict[str, Shape] = {}
    for argument in needed:
        candidates = (argument, *_USUAL.get(argument, ()))
        column = next((name for name in candidates if available is None or name in available), None)
        if column is None:
            raise UsageError(
                f"{text}: no column for {argument!r} of update({', '.join(needed)}). The task makes "
                f"{', '.join(sorted(available or ())) or 'none'}. Name one: {text.partition('@')[0]}@"
                + ",".join(f"{name}=COLUMN" for name in needed)
            )
        found[argument] = column
    if not found:
        raise UsageError(f"{text}: name its columns, as in {SYNTAX}")
    return found


def _parsed(source: str, text: str) -> ast.expr:
    try:
        return ast.parse(source.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise UsageError(f"{text!r} cannot be read ({error}), expected {SYNTAX}") from error


def _built(node: ast.expr, text: str) -> Any:
    """A metric of ``Class`` or ``Class(...)``."""
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    kind = find_class(ast.unparse(call.func))
    positional = [_value(argument, text) for argument in call.args]
    named = {keyword.arg or "**": _value(keyword.value, text) for keyword in call.keywords}
    try:
        return kind(*positional, **named)
    except (TypeError, ValueError, ImportError, RuntimeError, LookupError) as error:
        raise UsageError(f"{text!r}: TorchMetrics cannot make this metric: {str(error).strip()}") from error


def _value(node: ast.expr, text: str) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise UsageError(
            f"{text!r}: {ast.unparse(node)!r} is no literal; expected a number, a text in quotes, True, "
            "False, None, or lists, tuples, sets and dicts of these. A metric with another one inside is "
            "made in Python: dualeval.metrics.from_torchmetrics"
        ) from error


def _columns(source: str, text: str) -> dict[str, Shape]:
    pairs = re.findall(_COLUMN, source)
    found: dict[str, Shape] = {argument: column.strip("'\"") for argument, column in pairs}
    if not re.fullmatch(f"{_COLUMN}(,{_COLUMN})*", source) or len(found) < len(pairs):
        raise UsageError(
            f"{text!r}: behind @ expected argument=column, separated by commas, as in {SYNTAX}. Lists and "
            "dicts of columns are for dualeval.metrics.from_torchmetrics"
        )
    return found
