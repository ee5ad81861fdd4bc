"""The public metrics: their names, counts of many labels a sample, and functions of all rows."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import classification_report, confusion_matrix, jaccard_score, r2_score
from torch import Tensor

import dualeval
from dualeval import Ragged, Text
from dualeval.engine.identity.job import job_identity, metric_fingerprint
from dualeval.engine.identity.model import ModelIdentity
from dualeval.engine.values.measured import plain
from dualeval.errors import UsageError
from dualeval.metrics import (
    Confusion,
    IoU,
    Mean,
    Measured,
    Metric,
    PrecisionRecall,
    RowMetric,
    Rows,
    TopK,
    from_torchmetrics,
)
from dualeval.metrics.classification import BY_NAME
from tests.conftest import ROOT
from tests.vehicles.measuring import measure
from tests.vehicles.tiny import TinyTask


def test_the_public_names_of_metrics_are_these() -> None:
    assert dualeval.metrics.__all__ == [
        *("AveragePrecision", "Confusion", "Count", "IoU", "Mean", "Measured", "Metric", "PrecisionRecall"),
        *("Ratio", "RowMetric", "Rows", "Score", "TopK", "Value", "from_torchmetrics"),
    ]
    assert dualeval.__getattr__("metrics") is dualeval.metrics  # also where nothing has imported it
    for name in dualeval.metrics.__all__:
        assert getattr(dualeval.metrics, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dualeval.metrics.nothing  # noqa: B018 - the access is what is tested


def test_top_k_is_a_fraction_of_which_more_is_better() -> None:
    found = measure(TopK(2), {"rank": torch.tensor([0, 1, 2, 3])})
    assert (found.values, found.units, found.directions) == (
        {"top2": 0.5},
        {"top2": "fraction"},
        {"top2": "higher"},
    )
    with pytest.raises(UsageError, match="k 0: expected a whole number of at least 1"):
        TopK(0)


PAGE = (ROOT / "docs/metrics.md").read_text("utf-8")


def test_the_page_shows_every_metric_as_it_is_written() -> None:
    names = {**{name: getattr(dualeval.metrics, name) for name in dualeval.metrics.__all__}, **globals()}
    table = PAGE.partition("## Metrics in a line")[2].partition("\n\nAll but")[0]
    made = [
        eval(example, names)
        for example in re.findall(r"^\|[^|]*\| `([^`]+)` \|", table, re.MULTILINE)
        if "torchmetrics" not in example  # docs/torchmetrics.md is about those
    ]
    assert len(made) == table.count("\n| ") - 2  # without the head, and TorchMetrics
    no_metrics = {"Measured", "Metric", "RowMetric", "Score", "Value", "from_torchmetrics"}
    assert {type(metric).__name__ for metric in made} == {*dualeval.metrics.__all__} - no_metrics


def test_the_page_has_every_metric_by_name() -> None:
    table = PAGE.partition("## Metrics by name")[2].partition("\n\nA value")[0]
    assert set(re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)) == {"top<k>", *BY_NAME} - {"acc"}


@pytest.mark.parametrize("number", [0, 1])
def test_the_pages_own_metrics_run(number: int) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    exec(compile(blocks[number], "docs/metrics.md", "exec"), {})


# -- labels --------------------------------------------------------------------------------------------


def pixels(count: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, 30)
    target = torch.randint(0, classes, shape, generator=generator)
    right = torch.rand(shape, generator=generator) < 0.6
    return target, torch.where(right, target, torch.randint(0, classes, shape, generator=generator))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_metrics_of_pixels_are_those_of_scikit_learn(dtype: torch.dtype) -> None:
    target, prediction = pixels(8, 5)
    columns = {"target": target.to(dtype), "prediction": prediction.to(dtype)}
    flat = target.reshape(-1).numpy(), prediction.reshape(-1).numpy()
    found: Any = measure(Confusion(5), columns).values["confusion_matrix"]
    matrix = np.zeros((5, 5), int)
    for row, column, count in found["entries"]:
        matrix[row, column] = count
    assert (matrix == confusion_matrix(*flat)).all()
    found = measure(IoU(5), columns)
    assert found.values["mean_iou"] == pytest.approx(jaccard_score(*flat, average="macro"), rel=1e-15)
    assert found.values["iou_per_class"] == pytest.approx(list(jaccard_score(*flat, average=None)), rel=1e-15)
    assert (found.units, found.directions) == ({"mean_iou": "fraction"}, {"mean_iou": "higher"})
    recall = measure(PrecisionRecall(5), columns).values["micro_recall"]
    assert recall == pytest.approx((flat[0] == flat[1]).mean(), rel=1e-15)


def test_classes_that_do_not_occur_have_no_iou() -> None:
    columns = {"target": torch.tensor([0, 0, 2]), "prediction": torch.tensor([0, -1, 2])}
    assert measure(IoU(4, name="j"), columns).values == {
        "mean_j": 0.75,
        "j_per_class": [0.5, None, 1.0, None],
    }
    nothing = {name: column[:0] for name, column in columns.items()}
    assert measure(IoU(2), nothing).values == {"mean_iou": None, "iou_per_class": [None, None]}


def test_ignored_targets_are_in_no_count() -> None:
    columns = {
        "mask": torch.tensor([[0, 1], [255, 255]], dtype=torch.uint8),
        "guess": torch.tensor([[0, 0], [1, 7]], dtype=torch.uint8),
    }
    found = measure(IoU(2, "guess", "mask", ignore=255), columns)
    assert found.values == {"mean_iou": 0.25, "iou_per_class": [0.5, 0.0]}


def test_an_ignored_class_of_the_model_is_in_no_mean() -> None:
    """It is predicted where another class is right."""
    columns = {"target": torch.tensor([0, 0, 1, 1, 2]), "prediction": torch.tensor([0, 1, 0, 1, 2])}
    found = measure(IoU(3, ignore=0), columns).values
    assert found == {"mean_iou": 0.75, "iou_per_class": [None, 0.5, 1.0]}
    found = measure(PrecisionRecall(3, ignore=0), columns).values
    assert (found["macro_recall"], found["micro_recall"]) == (0.75, 2 / 3)
    assert found["per_class"]["recall"] == [None, 0.5, 1.0]  # type: ignore[index, call-overload]
    assert found["per_class"]["predicted"] == [1, 1, 1]  # type: ignore[index, call-overload]


@pytest.mark.parametrize("make", [Confusion, IoU, PrecisionRecall])
def test_ragged_columns_count_by_element(make: Callable[[int], Metric]) -> None:
    target, prediction = pixels(4, 3)
    metric = make(3)
    ledgers = [torch.zeros(metric.size, dtype=torch.int64) for _ in range(2)]
    lengths = torch.tensor([50, 70])
    metric.update(ledgers[0], {"target": target, "prediction": prediction})
    ragged: Any = {
        "target": Ragged(target.reshape(-1), lengths),
        "prediction": Ragged(prediction.reshape(-1), lengths),
    }
    metric.update(ledgers[1], ragged)
    assert torch.equal(*ledgers)
    ragged["target"] = Ragged(target.reshape(-1), torch.tensor([70, 50]))
    with pytest.raises(UsageError, match="give both the same shape"):
        metric.update(ledgers[1], ragged)
    # As many elements in all, but not in each sample.
    with pytest.raises(UsageError, match="give both the same shape"):
        metric.update(ledgers[1], {**ragged, "prediction": prediction.reshape(2, 60)})
    ragged["target"] = Text(["cat", "dog"])
    with pytest.raises(UsageError, match="is Text: expected classes"):
        metric.update(ledgers[1], ragged)


@pytest.mark.parametrize(
    ("target", "prediction", "said"),
    [
        ([0, 3], [0, 0], "the column 'target' has classes from 0 to 3, expected 0 to 2"),
        ([0, -1], [0, 0], "the column 'target' has classes from -1 to 0.*ignore=CLASS"),
        ([0, 1], [3, 0], "the column 'prediction' has classes from 0 to 3, expected -1 to 2"),
        ([0, 1], [0, -2], "the column 'prediction' has classes from -2 to 0"),
        ([0, 1], [0.0, 1.0], r"'prediction', which is torch\.float32: expected classes as integers"),
        ([0, 1], [[0, 1], [1, 0]], "'target' has 2 elements and 'prediction' has 4 in the same samples"),
    ],
)
def test_values_that_are_no_classes_are_refused(target: list[int], prediction: list[Any], said: str) -> None:
    for metric in (Confusion(3), IoU(3), PrecisionRecall(3)):
        ledger = torch.zeros(metric.size, dtype=torch.int64)
        with pytest.raises(UsageError, match=said):
            metric.update(ledger, {"target": torch.tensor(target), "prediction": torch.tensor(prediction)})


# -- functions of all rows -----------------------------------------------------------------------------


def largest_error(target: Any, prediction: Any) -> float:
    return float(abs(target - prediction).max())


def rows_of(metric: Rows, *columns: Sequence[float]) -> Measured:
    arrays = {name: np.array(column) for name, column in zip(metric.columns, columns, strict=True)}
    return plain(metric.name, metric.compute(arrays))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=2, max_size=9))
def test_a_function_of_scikit_learn_is_a_metric(pairs: list[tuple[float, float]]) -> None:
    target, prediction = zip(*pairs, strict=True)
    metric = Rows(r2_score, ["target", "prediction"], higher_is_better=True, unit="fraction")
    assert rows_of(metric, target, prediction) == Measured(
        values={"r2_score": float(r2_score(target, prediction))},
        units={"r2_score": "fraction"},
        directions={"r2_score": "higher"},
    )


def test_arguments_come_in_the_order_of_the_columns() -> None:
    assert rows_of(Rows(lambda a, b: a[0] - b[0], ["b", "a"], name="m"), [1.0], [5.0]).values == {"m": -4.0}


def test_a_dict_that_a_function_returns_gives_several_values() -> None:
    report = functools.partial(classification_report, output_dict=True)
    metric = Rows(report, ["target", "prediction"], higher_is_better={"accuracy": True})
    found = rows_of(metric, [0, 1, 1], [0, 1, 0])
    assert metric.name == "classification_report"
    assert found.values["accuracy"] == pytest.approx(2 / 3)
    macro = found.values["macro avg"]
    assert isinstance(macro, dict)
    assert macro["f1-score"] == pytest.approx(2 / 3)
    assert found.directions == {"accuracy": "higher"}
    several = Rows(lambda x: {"low": x.min(), "high": x.max(), "all": [1]}, ["x"], name="ends", unit="m")
    assert rows_of(several, [1.0, 2.0]).units == {"low": "m", "high": "m"}


@pytest.mark.parametrize(
    ("found", "value"),
    [
        (np.float32(0.5), 0.5),
        (np.array(0.5), 0.5),
        (np.array([0.5]), 0.5),
        (torch.tensor(0.5), 0.5),
        (None, None),
    ],
)
def test_a_function_may_return_any_kind_of_number(found: Any, value: float | None) -> None:
    assert rows_of(Rows(lambda x: found, ["x"], name="m"), [1.0]).values == {"m": value}


def test_targets_that_do_not_count_are_warned_of() -> None:
    metric = Rows(lambda target, prediction: 0.5, ["target", "prediction"], name="mine")
    target = np.array([1, -100, 2, -100])
    said = metric.compute({"target": target, "prediction": target}).warnings
    assert said == ("mine gets 2 targets of -100, which torch's losses ignore: leave them out",)
    assert not metric.compute({"target": target * 0.5, "prediction": target}).warnings


def test_nan_of_a_function_is_none_and_warned_of() -> None:
    found = rows_of(Rows(lambda x: math.nan, ["x"], name="m"), [1.0])
    assert found.values == {"m": None}
    assert "gave nan for m" in found.warnings[0]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Rows("auroc", ["x"]), "function 'auroc': expected a function"),  # type: ignore[arg-type]
        (lambda: Rows(largest_error, "target"), "columns 'target': expected a list of column names"),
        (lambda: Rows(largest_error, []), r"columns \[\]: expected a list"),
        (lambda: Rows(lambda x: 0.0, ["x"]), "the function has no name: give the metric one"),
        (lambda: Rows(largest_error, ["x"], unit=1), "unit 1: expected a text"),  # type: ignore[arg-type]
        (lambda: rows_of(Rows(lambda x: "a", ["x"], name="m"), [1.0]), "returned a str, expected a number"),
        (lambda: rows_of(Rows(lambda x: x, ["x"], name="m"), [1.0, 2.0]), "returned a ndarray"),
        (
            lambda: rows_of(Rows(lambda x: {"a": 1}, ["x"], name="m", unit={"b": "m"}), [1.0]),
            "unit names 'b', and the function returned only a",
        ),
    ],
)
def test_wrong_arguments_and_returns_are_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()


# -- identity ------------------------------------------------------------------------------------------


def squared_error(options: str) -> Any:
    return from_torchmetrics(f"MeanSquaredError({options})", ["preds", "target"])


def scaled(factor: float) -> Callable[[Any], float]:
    return lambda x: float(x.sum() * factor)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Mean("x"), Mean("x", "w")),
        (Mean("x", transform="exp", name="m"), Mean("x", transform="log", name="m")),
        (IoU(3), IoU(3, ignore=2)),
        (squared_error(""), squared_error("squared=False")),
        (Rows(largest_error, ["a", "b"], name="m"), Rows(largest_error, ["b", "a"], name="m")),
        (Rows(scaled(1.0), ["x"], name="m"), Rows(scaled(2.0), ["x"], name="m")),
        (Rows(functools.partial(round, ndigits=1), ["x"]), Rows(functools.partial(round, ndigits=2), ["x"])),
        (Rows(lambda x: x.min(), ["x"], name="m"), Rows(lambda x: x.max(), ["x"], name="m")),
    ],
)
def test_other_parameters_make_another_metric(one: Metric | RowMetric, other: Metric | RowMetric) -> None:
    assert metric_fingerprint(one) == metric_fingerprint(one)
    assert metric_fingerprint(one) != metric_fingerprint(other)


def test_the_module_of_a_function_is_part_of_the_job() -> None:
    task = TinyTask(8)
    model = task.build_model(torch.device("cpu"))
    identity = {}
    for function in (r2_score, functools.partial(r2_score), largest_error):
        rows = Rows(function, ["target", "prediction"])
        identity[function] = job_identity(task, task.dataset(), ModelIdentity.of(model), [], [rows], 8)
    without = job_identity(task, task.dataset(), ModelIdentity.of(model), [], [], 8)
    assert "scikit_learn" not in without["libraries"]
    assert "scikit_learn" in identity[r2_score]["libraries"]
    assert __name__ not in without["source"]
    assert __name__ in identity[largest_error]["source"]
    partials = [found for function, found in identity.items() if isinstance(function, functools.partial)]
    assert all("scikit_learn" in found["libraries"] for found in partials)
