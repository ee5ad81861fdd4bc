"""Try every class of the installed TorchMetrics, and print a page with the route of each.

Each class that can be made gets 24 samples in batches of 8. Its value by this package is compared with
TorchMetrics' own, updated with the same batches, or with all samples at once where it is computed from the
rows.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import pkgutil
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dualeval.errors import UsageError
from dualeval.metrics import is_of_rows
from dualeval.metrics.torchmetrics.metric import find_class, from_torchmetrics, torchmetrics
from dualeval.metrics.torchmetrics.routes import measured_of
from dualeval.metrics.torchmetrics.states import State, StateKind, isolated, states_of

SAMPLES, BATCH = 24, 8
CLASSES = 3

INTRODUCTION = """# Every class of TorchMetrics, and its route

Made by `benchmarks/torchmetrics_routes.py`, which tries all classes of TorchMetrics {version} and compares
each value with TorchMetrics' own. docs/torchmetrics.md describes each route. The route depends on
a metric's states, and so on its arguments: the table has the arguments that were tried. With other
arguments a class may have another route: with `thresholds=100` the states of `MulticlassAUROC` are sums of
integers.

*By batch* means that another batch size gives another value, by TorchMetrics' own definition, because the
metric averages over a batch. At one batch size the value is the same at every number of processes.

{counts}
"""


class Route(enum.Enum):
    """How a metric is computed; see docs/torchmetrics.md."""

    INTEGERS = "integer sums in the ledger"
    SUMS = "exact sums of floats in the ledger"
    ROWS = "from the rows"


def route_of(states: list[State] | None) -> Route:
    """The route of a metric with such states in the ledger."""
    if states is None:
        return Route.ROWS
    return Route.SUMS if any(state.kind is StateKind.FLOAT for state in states) else Route.INTEGERS


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def floats(*shape: int) -> Tensor:
    return torch.rand(SAMPLES, *shape, generator=generator()) * 0.9 + 0.05


def near(values: Tensor) -> Tensor:
    noise = torch.rand(values.shape, generator=torch.Generator().manual_seed(1))
    return (values * 0.8 + noise * 0.2).clamp(0.01, 0.99)


def classes(*shape: int, below: int = CLASSES, seed: int = 2) -> Tensor:
    return torch.randint(below, (SAMPLES, *shape), generator=torch.Generator().manual_seed(seed))


def pair(*shape: int) -> dict[str, Any]:
    values = floats(*shape)
    return {"preds": near(values), "target": values}


def words(seed: int) -> list[str]:
    chosen = torch.randint(6, (SAMPLES, 7), generator=torch.Generator().manual_seed(seed))
    known = ("the", "cat", "sat", "on", "a", "mat")
    return [" ".join(known[place] for place in row) for row in chosen.tolist()]


def boxes(seed: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(SAMPLES):
        corner = torch.randint(20, (2, 2), generator=torch.Generator().manual_seed(0)).float()
        corner = corner + torch.rand(2, 2, generator=draw)
        found.append(
            {
                "boxes": torch.cat([corner, corner + 10], dim=1),
                "scores": torch.rand(2, generator=draw),
                "labels": torch.tensor([0, 1]),
            }
        )
    return found


def answers() -> dict[str, Any]:
    said, gold = words(3), words(4)
    return {
        "preds": [{"prediction_text": text, "id": str(place)} for place, text in enumerate(said)],
        "target": [
            {"answers": {"answer_start": [0], "text": [text]}, "id": str(place)}
            for place, text in enumerate(gold)
        ],
    }


def one_hot(seed: int) -> Tensor:
    maps = classes(8, 8, seed=seed)
    return torch.nn.functional.one_hot(maps, CLASSES).movedim(-1, 1)


def panoptic(seed: int) -> Tensor:
    return torch.stack([classes(8, 8, below=2, seed=seed), torch.zeros(SAMPLES, 8, 8).long()], dim=-1)


def sharpened() -> dict[str, Any]:
    low, high = floats(3, 16, 16), floats(3, 32, 32)
    return {"preds": near(high), "target": {"ms": low, "pan": high, "pan_lr": low}}


def shares(name: str, seed: int) -> tuple[str, Tensor]:
    draw = torch.rand(SAMPLES, CLASSES, generator=torch.Generator().manual_seed(seed))
    return name, draw.softmax(dim=1)


def scores(*shape: int) -> Tensor:
    return floats(*shape).softmax(dim=1)


BY_GROUPS = {"preds": floats(), "target": classes(below=2), "groups": classes(below=2, seed=5)}
SEGMENTS = {"preds": one_hot(2), "target": one_hot(6)}
OF_TEXT = {"preds": words(3), "target": words(4)}
WITH_REFERENCES = {"preds": words(3), "target": [[text] for text in words(4)]}
DETECTIONS = {"preds": boxes(3), "target": boxes(4)}
SEARCHES = {"preds": floats(), "target": classes(below=2), "indexes": classes(below=4, seed=5).sort()[0]}
VERTICES = {"vertices_pred": near(floats(20, 3)), "vertices_gt": floats(20, 3)}

# Samples by class where those of its room do not fit.
OF_CLASS: dict[str, Callable[[], Mapping[str, Any]]] = {
    "MulticlassExactMatch": lambda: {"preds": classes(4), "target": classes(4, seed=5)},
    "ExactMatch": lambda: {"preds": classes(4), "target": classes(4, seed=5)},
    "BinaryFairness": lambda: BY_GROUPS,
    "BinaryGroupStatRates": lambda: BY_GROUPS,
    "KLDivergence": lambda: dict([shares("p", 1), shares("q", 2)]),
    "JensenShannonDivergence": lambda: dict([shares("p", 1), shares("q", 2)]),
    "ContinuousRankedProbabilityScore": lambda: {"preds": floats(5), "target": near(floats())},
    "CosineSimilarity": lambda: pair(4),
    "MinkowskiDistance": lambda: {"preds": near(floats()), "targets": floats()},
    "TweedieDevianceScore": lambda: {"preds": near(floats()), "targets": floats()},
    "BLEUScore": lambda: WITH_REFERENCES,
    "SacreBLEUScore": lambda: WITH_REFERENCES,
    "CHRFScore": lambda: WITH_REFERENCES,
    "TranslationEditRate": lambda: WITH_REFERENCES,
    "SQuAD": answers,
    "Perplexity": lambda: {"preds": floats(5, CLASSES), "target": classes(5)},
    "MultiScaleStructuralSimilarityIndexMeasure": lambda: pair(1, 180, 180),
    "PeakSignalNoiseRatioWithBlockedEffect": lambda: pair(1, 32, 32),
    "SpatialDistortionIndex": sharpened,
    "QualityWithNoReference": sharpened,
    "TotalVariation": lambda: {"img": floats(3, 16, 16)},
    "VisualInformationFidelity": lambda: pair(3, 48, 48),
    "SourceAggregatedSignalDistortionRatio": lambda: pair(2, 600),
    "PermutationInvariantTraining": lambda: pair(2, 600),
    "ComplexScaleInvariantSignalNoiseRatio": lambda: pair(10, 20, 2),
    "CalinskiHarabaszScore": lambda: {"data": floats(2), "labels": classes()},
    "DaviesBouldinScore": lambda: {"data": floats(2), "labels": classes()},
    "DunnIndex": lambda: {"data": floats(2), "labels": classes()},
    "FleissKappa": lambda: {"ratings": torch.tensor([[3, 1, 1], [0, 4, 1], [2, 2, 1]]).repeat(8, 1)},
    "PanopticQuality": lambda: {"preds": panoptic(2), "target": panoptic(6)},
    "ModifiedPanopticQuality": lambda: {"preds": panoptic(2), "target": panoptic(6)},
    "ProcrustesDisparity": lambda: {"point_cloud1": near(floats(10, 2)), "point_cloud2": floats(10, 2)},
    "LipVertexError": lambda: VERTICES,
    "MultitaskWrapper": lambda: {"task_preds": {"a": near(floats())}, "task_targets": {"a": floats()}},
    "MultioutputWrapper": lambda: pair(2),
    "ClasswiseWrapper": lambda: {"preds": scores(CLASSES), "target": classes()},
    "BinaryTargetTransformer": lambda: {"preds": near(floats()), "target": floats()},
}
OF_ROOM: dict[str, Callable[[], Mapping[str, Any]]] = {
    "aggregation": lambda: {"value": floats()},
    "regression": pair,
    "text": lambda: OF_TEXT,
    "detection": lambda: DETECTIONS,
    "segmentation": lambda: SEGMENTS,
    "image": lambda: pair(3, 32, 32),
    "audio": lambda: pair(600),
    "clustering": lambda: {"preds": classes(), "target": classes(seed=5)},
    "nominal": lambda: {"preds": classes(), "target": classes(seed=5)},
    "retrieval": lambda: SEARCHES,
    "wrappers": pair,
}
# Arguments that a class must have; by its own name, or by that of the argument.
OF_ARGUMENT: dict[str, Any] = {
    "num_classes": CLASSES,
    "num_labels": CLASSES,
    "num_groups": 2,
    "beta": 1.0,
    "p": 2.0,
    "min_precision": 0.5,
    "min_recall": 0.5,
    "min_sensitivity": 0.5,
    "min_specificity": 0.5,
    "task": "multiclass",
    "threshold": 0.5,
    "data_range": 1.0,
    "fs": 16000,
    "mode": "nb",
    "things": {0},
    "stuffs": {1},
    "mouth_map": [0, 1, 2],
}
GIVEN: dict[str, dict[str, Any]] = {
    "ROUGEScore": {"rouge_keys": ("rouge1", "rougeL")},
    "MeanIoU": {"num_classes": CLASSES},
    "StructuralSimilarityIndexMeasure": {"data_range": 1.0},
    "MultiScaleStructuralSimilarityIndexMeasure": {"data_range": 1.0},
    "RetrievalRecallAtFixedPrecision": {},
}


def room_of(kind: type) -> str:
    return kind.__module__.split(".")[1]


def all_classes() -> list[type]:
    """Every metric of the package, those too that it hides where another package is missing."""
    package = torchmetrics()
    base = package.Metric
    found: dict[str, type] = {}
    for module in pkgutil.walk_packages(package.__path__, "torchmetrics."):
        if ".functional" in module.name or ".utilities" in module.name or "_deprecated" in module.name:
            continue
        for name, kind in vars(importlib.import_module(module.name)).items():
            own = isinstance(kind, type) and kind.__module__ == module.name and not name.startswith("_")
            if own and (issubclass(kind, base) or name in ("MetricCollection", "MetricTracker")):
                found.setdefault(name, kind)
    abstract = {"Metric", "BaseAggregator", "RetrievalMetric", "WrapperMetric", "CompositionalMetric"}
    return sorted(
        (kind for name, kind in found.items() if name not in abstract and "Abstract" not in name),
        key=lambda kind: (room_of(kind), kind.__name__),
    )


def arguments_of(kind: type) -> dict[str, Any]:
    if kind.__name__ in GIVEN:
        return {**GIVEN[kind.__name__]}
    package = torchmetrics()
    made_by: Any = kind
    parameters = dict(inspect.signature(made_by.__init__).parameters)
    by_task = inspect.signature(kind.__new__).parameters
    if "task" in by_task and "task" not in parameters:
        parameters = dict(by_task)
    needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    found = {name: value for name, value in OF_ARGUMENT.items() if name in needed}
    if "task" in found or kind.__name__.startswith("Multiclass"):
        found["num_classes"] = CLASSES
    inner = package.classification.MulticlassAccuracy(CLASSES, average=None)
    regression = package.regression.MeanSquaredError()
    for name in ("base_metric", "metric", "wrapped_metric"):
        if name in needed:
            found[name] = inner if kind.__name__ == "ClasswiseWrapper" else regression
    if kind.__name__ == "BinaryTargetTransformer":
        found["wrapped_metric"] = package.classification.BinaryAccuracy()
    if "num_outputs" in needed:
        found["num_outputs"] = 2
    if "task_metrics" in needed:
        found["task_metrics"] = {"a": regression}
    if "metric_func" in needed:
        found["metric_func"] = package.functional.audio.scale_invariant_signal_noise_ratio
    return found


def samples_of(kind: type) -> Mapping[str, Any]:
    name, room = kind.__name__, room_of(kind)
    if name in OF_CLASS:
        return OF_CLASS[name]()
    if room == "classification":
        if name.startswith("Binary"):
            return {"preds": floats(), "target": classes(below=2)}
        if name.startswith("Multilabel"):
            return {"preds": floats(CLASSES), "target": classes(CLASSES, below=2)}
        return {"preds": scores(CLASSES), "target": classes()}
    return OF_ROOM[room]()


def part_of(samples: Any, part: slice) -> Any:
    if isinstance(samples, dict):
        return {name: part_of(values, part) for name, values in samples.items()}
    return samples[part]


def columns_of(samples: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns by name, and what each argument is made of."""
    columns: dict[str, Any] = {}
    shapes: dict[str, Any] = {}
    for argument, values in samples.items():
        shapes[argument] = column_of(argument, values, columns)
    return columns, shapes


def column_of(name: str, values: Any, columns: dict[str, Any]) -> Any:
    if isinstance(values, dict):
        return {key: column_of(f"{name}_{key}", part, columns) for key, part in values.items()}
    if isinstance(values, Tensor) or isinstance(values[0], str):
        columns[name] = values
        return name
    return [entry_of(name, values, columns)]


def entry_of(name: str, values: list[Any], columns: dict[str, Any]) -> Any:
    """What one entry of a list is made of."""
    if isinstance(values[0], dict):
        return {key: entry_of(f"{name}_{key}", [one[key] for one in values], columns) for key in values[0]}
    if isinstance(values[0], list):
        return [entry_of(name, [one[0] for one in values], columns)]
    columns[name] = torch.tensor(values) if isinstance(values[0], int) else values
    return name


def by_torchmetrics(metric: Any, samples: Mapping[str, Any], batch: int) -> Any:
    own = isolated(metric)
    torch.manual_seed(0)
    for start in range(0, SAMPLES, batch):
        part = part_of(dict(samples), slice(start, start + batch))
        any_names = "args" in inspect.signature(own.update).parameters
        own.update(*part.values()) if any_names else own.update(**part)
    return numbers(measured_of("value", own.compute()).values)


def by_dualeval(metric: Any, samples: Mapping[str, Any], *, by_rows: bool = False) -> Any:
    columns, shapes = columns_of(samples)
    any_names = "args" in inspect.signature(metric.update).parameters
    made: Any = from_torchmetrics(
        metric, [*shapes.values()] if any_names else shapes, name="value", by_rows=by_rows
    )
    if is_of_rows(made):
        return numbers(made.compute(columns).values)
    ledger = torch.zeros(made.size, dtype=torch.int64)
    for start in range(0, SAMPLES, BATCH):
        made.update(ledger, {name: values[start : start + BATCH] for name, values in columns.items()})
    return numbers(made.compute(ledger).values)


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for part in value.values() for number in numbers(part)]
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [float("nan") if value is None else float(value)]


def close(one: list[float], other: list[float], tolerance: float) -> bool:
    return len(one) == len(other) and torch.allclose(
        torch.tensor(one), torch.tensor(other), rtol=tolerance, atol=tolerance, equal_nan=True
    )


def try_class(kind: type) -> tuple[str, str, str]:
    """Of one class: the arguments that were tried, its route, and what is to be said of it."""
    remark = ""
    try:
        find_class(kind.__name__)
    except UsageError as error:
        if "has no class" not in str(error):
            return "", "refused", str(error).partition(f"{kind.__name__} ")[2].partition(". ")[0].rstrip(".")
    try:
        given = arguments_of(kind)
        metric = kind(**given)
        route = route_of(states_of(isolated(metric)))
        samples = samples_of(kind)
        try:
            found = by_dualeval(metric, samples)
        except UsageError as error:
            if "by_rows=True" not in str(error):
                raise
            route, remark = Route.ROWS, "with `by_rows=True`: it keeps more than its states"
            found = by_dualeval(metric, samples, by_rows=True)
    except (ImportError, RuntimeError) as error:
        package = re.search(r"pip install ([\w\[\]-]+)`?", str(error))
        if package is None:
            raise
        return "", "not tried", f"needs a package that is not installed: `pip install {package[1]}`"
    whole = by_torchmetrics(metric, samples, SAMPLES)
    batches = by_torchmetrics(metric, samples, BATCH)
    wanted = whole if route is Route.ROWS else batches
    if not close(found, wanted, 1e-5):  # TorchMetrics' own is of float32
        raise AssertionError(f"{kind.__name__}: {found} by {route}, and {wanted} by TorchMetrics")
    if route is not Route.ROWS and not close(batches, whole, 1e-4):
        remark = "by batch"
    return shown(given), route.value, remark


def shown(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={shown_value(value)}" for name, value in given.items())


def shown_value(value: Any) -> str:
    if isinstance(value, torch.nn.Module):
        return f"{type(value).__name__}(...)"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {shown_value(part)}" for key, part in value.items()) + "}"
    return value.__name__ if callable(value) else repr(value)


def page() -> str:
    """The text of the page."""
    rows: list[str] = []
    counts: Counter[str] = Counter()
    room = ""
    for kind in all_classes():
        given, route, remark = try_class(kind)
        counts[route] += 1
        if room_of(kind) != room:
            room = room_of(kind)
            rows += [f"\n## {room}\n", "| class | tried with | route | |", "| --- | --- | --- | --- |"]
        tried = f"`{given}`" if given else ""
        rows.append(f"| `{kind.__name__}` | {tried} | {route} | {remark} |")
    said = "; ".join(f"{count} {route}" for route, count in sorted(counts.items()))
    head = INTRODUCTION.format(
        version=torchmetrics().__version__, counts=f"{sum(counts.values())} classes: {said}."
    )
    return head + "\n".join(rows) + "\n"


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(page(), end="")


if __name__ == "__main__":
    main()
