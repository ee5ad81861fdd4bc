"""Metrics of TorchMetrics, by routes that give the same bits at every number of processes; see
docs/torchmetrics.md.

The route follows from a metric's states: sums of integers go into the ledger as they are, sums of floats
exactly, and everything else is computed from all rows, in the order of the data set.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Collection
from types import ModuleType
from typing import Any

import torch

from dualeval.errors import UsageError
from dualeval.messages import nearest
from dualeval.metrics.metric import Metric, RowMetric
from dualeval.metrics.torchmetrics.arguments import Arguments, Columns, Parsed, Shape
from dualeval.metrics.torchmetrics.routes import FromRows, InLedger
from dualeval.metrics.torchmetrics.states import is_metric, isolated, networks_in, states_of
from dualeval.vision_library import torchvision

__all__ = ["Parsed", "from_text", "from_torchmetrics"]


def from_torchmetrics(
    metric: Any, columns: Columns, *, name: str | None = None, by_rows: bool = False, keeps_rows: bool = True
) -> Metric | RowMetric:
    """Make a metric of TorchMetrics one that dualeval can compute, with the same bits at every number of
    processes.

    Args:
        metric: an object such as ``MulticlassAUROC(num_classes=10)``, or the same as text, which is parsed
            and never evaluated. It is copied; what it has seen is left out.
        columns: for each argument of the metric's ``update``, in its order or by its name, what it is made
            of: a column's name for the column of all samples; ``[...]`` of one entry for a list with one
            entry a sample; ``{"key": ...}`` for a dict; ``Parsed(column)`` for the JSON in a column of text.
        name: of the metric and its value; without one the name of its class. Where it is given the keys of a
            metric that computes a dict begin with it.
        by_rows: compute it from all rows, whatever its states are.
        keeps_rows: whether a run keeps the columns, so that the metric can be computed again without a
            forward. Say no for what is large, such as pictures. A metric from the rows keeps them in any
            case.

    Returns:
        A metric with a ledger, or one of all rows.

    Raises:
        UsageError: it is no metric of TorchMetrics, it cannot be computed in parts, or the columns do not fit
            its ``update``.
    """
    version = str(torchmetrics().__version__)
    if isinstance(metric, str):
        metric, of_text, text_name = read(metric)
        if of_text is not None:
            raise UsageError("the columns are given in the text of the metric and beside it: give them once")
        name = name or text_name
    _check(metric)
    own_name = name is not None
    name = name or type(metric).__name__.lstrip("_")
    pristine = isolated(metric)
    arguments = Arguments(columns, pristine.update, name)
    states = None if by_rows else states_of(pristine)
    common: dict[str, Any] = {"name": name, "own_name": own_name, "version": version}
    if states is None:
        return FromRows(pristine, arguments, **common)
    return InLedger(pristine, arguments, states, keeps_rows=keeps_rows, **common)


def from_text(text: str, available: Collection[str] | None = None) -> Metric | RowMetric:
    """Make the metric that a text spells, as ``--metric`` takes it: 'torchmetrics:Class(...)@preds=column as
    name'.
    """
    metric, columns, name = read(text)
    _check(metric)
    if columns is None:
        columns = _usual_columns(metric, available, text)
        if available is not None and "rank" in available:  # else 'prediction' may hold scores
            columns = _classes_or_scores(metric, columns, available, text)
    made: Any = from_torchmetrics(metric, columns, name=name)
    made.spelled = text
    return made  # type: ignore[no-any-return]


def _check(metric: Any) -> None:
    if isinstance(metric, type):
        raise UsageError(
            f"{metric.__name__} is the class of a metric: give an object of it, {metric.__name__}(...)"
        )
    why = _why_refused(metric) if isinstance(metric, torch.nn.Module) else None
    if why:
        raise UsageError(why)
    if not is_metric(metric):
        raise UsageError(
            f"{type(metric).__name__} is not a metric of TorchMetrics: expected an object such as "
            "torchmetrics.classification.MulticlassAUROC(num_classes=10), or the same as text"
        )
    if networks := networks_in(metric):
        raise UsageError(
            f"{type(metric).__name__} evaluates a network of its own ({networks[0]}) within update. Evaluate "
            "that network as a model, let 'observe' return its outputs as columns, and compute the rest from "
            "these"
        )


def _classes_or_scores(metric: Any, columns: Any, available: Collection[str], text: str) -> Any:
    """The columns with what the metric takes for ``preds``: predicted classes, else probabilities."""
    if columns.get("preds") not in ("prediction", "predictions") or not set(columns.values()) <= _OF_CLASSES:
        return columns
    classes, count = torch.tensor([0, 1]), getattr(metric, "num_classes", None) or 2
    tried = {"predicted classes": (columns["preds"], classes)}
    # Not logits: TorchMetrics takes those of a batch for probabilities where all lie between 0 and 1.
    if "probabilities" in available:
        tried["probabilities of each class"] = "probabilities", torch.full((2, count), 1 / count)
    for name, values in tried.values():
        try:
            isolated(metric).update(**{**dict.fromkeys(columns, classes), "preds": values})
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            why = str(error).strip()
        else:
            return {**columns, "preds": name}
    raise UsageError(
        f"{text}: the metric does not take {' or '.join(tried)} ({why}). Take one of several classes, whose "
        "name begins with Multiclass; or let observe of a task of your own return a column of scores, and "
        f"name it: {text.partition('@')[0]}@preds=COLUMN,target={columns.get('target', 'COLUMN')}"
    )


_OF_CLASSES = {"prediction", "predictions", "target", "targets", "label", "labels"}
# -- the library itself: its classes by name, those that cannot be evaluated in parts; and metrics in a text
# Its public rooms; where two have a class of the same name the first counts. The package itself comes last:
# it has classes of their old place, which warn of that.
_ROOMS = (
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

_SYNTAX = "'torchmetrics:Class(argument=value)@preds=column,target=column as name'"
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
            "this metric is one of TorchMetrics, which is not installed. Type: pip install "
            "'dualeval[torchmetrics]'"
        )
    torchvision()  # TorchMetrics imports it, and beside CPU torch only this way does that work
    return importlib.import_module("torchmetrics")


def classes() -> dict[str, type]:
    """TorchMetrics' public classes by name, those of its wrappers and collections too."""
    torchmetrics()
    kinds: dict[str, type] = {}
    for room in _ROOMS:
        module = importlib.import_module(f"torchmetrics.{room}" if room else "torchmetrics")
        names = getattr(module, "__all__", None) or [name for name in vars(module) if name.endswith("Metric")]
        for name in names:
            kind = getattr(module, name, None)
            if isinstance(kind, type) and not name.startswith("_") and name != "Metric":
                kinds.setdefault(name, kind)
    return kinds


def find_class(name: str) -> type:
    """A class by its name, such as ``MulticlassAUROC`` or ``classification.MulticlassAUROC``."""
    room, _, short = name.rpartition(".")
    room = room.removeprefix("torchmetrics").removeprefix(".")
    if why := _REFUSED.get(short):
        raise UsageError(f"TorchMetrics' {short} {why}.")
    known = classes()
    if short in known and room in ("", *_ROOMS):
        return known[short]
    raise UsageError(
        f"TorchMetrics {torchmetrics().__version__} has no class {name!r}, or a package that the class needs "
        f"is not installed.{nearest(short, known)} See docs/torchmetrics.md"
    )


def _why_refused(metric: Any) -> str | None:
    """Why a metric cannot be evaluated; None where nothing speaks against it."""
    for part in metric.modules():
        for kind in type(part).__mro__:
            if kind.__module__.startswith("torchmetrics.") and kind.__name__ in _REFUSED:
                return f"TorchMetrics' {kind.__name__} {_REFUSED[kind.__name__]}."
        if is_metric(part) and getattr(part, "data_range", "") is None:
            return (
                f"{type(part).__name__}: give it data_range, as data_range=1.0; else each batch has its own"
            )
    return None


# -- a metric in a line of text --------------------------------------------------------------------------


def read(text: str) -> tuple[Any, dict[str, Shape] | None, str | None]:
    """The metric that a text spells, its columns where it has any, and its name likewise."""
    match = _FORM.fullmatch(text.removeprefix("torchmetrics:"))
    if match is None:
        raise UsageError(f"{text!r} cannot be read, expected {_SYNTAX}")
    call, columns, name = match.groups()
    metric = _built(_parsed(call, text), text)
    return metric, None if columns is None else _columns(columns, text), name and name.strip()


def _usual_columns(metric: Any, available: Collection[str] | None, text: str) -> dict[str, Shape]:
    """The columns that the arguments of an update have where nobody names any."""
    parameters = inspect.signature(metric.update).parameters.values()
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    columns: dict[str, Shape] = {}
    for argument in needed:
        candidates = (argument, *_USUAL.get(argument, ()))
        column = next((name for name in candidates if available is None or name in available), None)
        if column is None:
            raise UsageError(
                f"{text}: no column for {argument!r} of update({', '.join(needed)}). The task makes "
                f"{', '.join(sorted(available or ())) or 'none'}. Name one: {text.partition('@')[0]}@"
                + ",".join(f"{name}=COLUMN" for name in needed)
            )
        columns[argument] = column
    if not columns:
        raise UsageError(f"{text}: name its columns, as in {_SYNTAX}")
    return columns


def _parsed(source: str, text: str) -> ast.expr:
    try:
        return ast.parse(source.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise UsageError(f"{text!r} cannot be read ({error}), expected {_SYNTAX}") from error


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
            f"{text!r}: {ast.unparse(node)!r} is not a literal; expected a number, a text in quotes, True, "
            "False, None, or lists, tuples, sets and dicts of these. A metric with another one inside is "
            "made in Python: dualeval.metrics.from_torchmetrics"
        ) from error


def _columns(source: str, text: str) -> dict[str, Shape]:
    pairs = re.findall(_COLUMN, source)
    columns: dict[str, Shape] = {argument: column.strip("'\"") for argument, column in pairs}
    if not re.fullmatch(f"{_COLUMN}(,{_COLUMN})*", source) or len(columns) < len(pairs):
        raise UsageError(
            f"{text!r}: after @ expected argument=column, separated by commas, as in {_SYNTAX}. Lists and "
            "dicts of columns are for dualeval.metrics.from_torchmetrics"
        )
    return columns
