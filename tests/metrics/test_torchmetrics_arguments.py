"""Which columns a metric of TorchMetrics gets, and such metrics in a line of text."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dualeval.columns.ragged import Ragged, Text, to_rows
from dualeval.errors import UsageError
from dualeval.metrics import from_torchmetrics
from dualeval.metrics.torchmetrics.metric import Parsed, from_text
from tests.metrics.test_torchmetrics import of_batches
from tests.vehicles.tiny import CLASSES

pytestmark = pytest.mark.usefixtures("one_thread", "quiet")


@pytest.mark.parametrize("mapped", [False, True], ids=["ledger", "rows"])
def test_columns_become_the_arguments_that_a_metric_expects(package: ModuleType, mapped: bool) -> None:
    seen: list[dict[str, Any]] = []

    class Own(package.Metric):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.add_state("total", default=torch.tensor(0), dist_reduce_fx="sum")

        def update(self, **arguments: Any) -> None:
            seen.append(arguments)
            self.total += 1

        def compute(self) -> Any:
            return self.total

    columns: dict[str, Any] = {
        "number": torch.tensor([5], dtype=torch.int32),
        "boxes": Ragged(torch.arange(8.0).view(2, 4), torch.tensor([2])),
        "said": Text(["é"]),
        "json": Text(['["a", "b"]']),
    }
    shapes: Any = {
        "plain": "number",
        "text": "said",
        "stacked": "boxes",
        "each": [{"boxes": "boxes", "texts": ["said", "json"]}],
        "nested": {"a": "number"},
        "many": Parsed("json"),
    }
    metric: Any = from_torchmetrics(Own(), shapes, by_rows=mapped)
    if mapped:
        metric.compute({name: to_rows(column) for name, column in columns.items()})
    else:
        of_batches(metric, columns)
    found = seen[-1]
    assert found["plain"].tolist() == found["nested"]["a"].tolist() == [5]
    assert found["plain"].dtype == torch.int64
    assert found["text"] == ["é"]
    assert found["stacked"].shape == (1, 2, 4)
    [each] = found["each"]
    assert each["boxes"].tolist() == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    assert each["texts"] == ["é", '["a", "b"]']
    assert found["many"] == [["a", "b"]]
    assert metric.columns == ("number", "said", "boxes", "json")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["a", "b", "c"], r"do not fit update\(preds.*target.*too many positional"),
        (["a"], r"missing a required argument: 'target'"),
        ([], r"missing a required argument: 'preds'"),
        ({"preds": "a", "targets": "b"}, r"'targets'.* do not fit update\(preds.*missing .*: 'target'"),
        (3, r"columns is a int"),
        (["a", []], r"found \[\], expected a column's name"),
        (["a", {"b": 3}], r"found 3, expected a column's name"),
    ],
)
def test_columns_that_do_not_fit_a_metric_are_refused(columns: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_torchmetrics("MeanSquaredError()", columns)


def test_values_that_do_not_fit_a_metric_are_refused() -> None:
    metric: Any = from_torchmetrics("MaxMetric()", ["boxes"])
    ragged = to_rows(Ragged(torch.arange(3.0), torch.tensor([1, 2])))
    with pytest.raises(UsageError, match=r"differ in shape.*\['boxes'\]"):
        metric.compute({"boxes": ragged})
    bleu: Any = from_torchmetrics("BLEUScore()", ["said", Parsed("gold")])
    with pytest.raises(UsageError, match=r"Parsed\('gold'\): 'no' is not JSON"):
        of_batches(bleu, {"said": Text(["a"]), "gold": Text(["no"])})
    with pytest.raises(UsageError, match="expected a column of text"):
        of_batches(bleu, {"said": Text(["a"]), "gold": torch.tensor([1])})


# -- a line of text ----------------------------------------------------------------------------------


def test_a_line_gives_a_metric_its_arguments_columns_and_name() -> None:
    known = ["prediction", "target", "loss"]
    accuracy: Any = from_text(f"torchmetrics:MulticlassAccuracy({CLASSES}, average='micro')", known)
    assert (accuracy.name, accuracy.columns) == ("MulticlassAccuracy", ("prediction", "target"))
    assert accuracy.metric.average == "micro"
    named: Any = from_text("torchmetrics:classification.BinaryAUROC@preds=p,target='a b' as auroc")
    assert (named.name, named.columns) == ("auroc", ("p", "a b"))
    quoted: Any = from_text(
        "torchmetrics:ROUGEScore(rouge_keys=('rouge1',))@preds='p@q',target='t as u' as v w"
    )
    assert (quoted.name, quoted.columns) == ("v w", ("p@q", "t as u"))
    assert quoted.metric.rouge_keys == ("rouge1",)
    same: Any = from_text("torchmetrics:MeanSquaredError()")
    assert same.columns == ("preds", "target")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("MulticlasAccuracy(3)", r"no class 'MulticlasAccuracy'.*Nearest: MulticlassAccuracy"),
        ("MulticlassAccuracy(nothing=3)", r"cannot make this metric"),
        ("MulticlassAccuracy(num_classes=int('3'))", r"is not a literal"),
        ("MulticlassAccuracy(num_classes=x)", r"'x' is not a literal"),
        ("MulticlassAccuracy(**{'num_classes': 3})", r"cannot make this metric"),
        ("__import__('os').system('true')", r"has no class \"__import__\('os'\).system\""),
        ("MulticlassAccuracy(3", r"cannot be read"),
        ("MeanMetric()@value", r"after @ expected argument=column"),
        ("MeanMetric()@value=f(x)", r"after @ expected argument=column.*from_torchmetrics"),
        ("MeanMetric()@value=3", r"after @ expected argument=column"),
        ("MeanMetric()@value=a) + 1 #", r"after @ expected argument=column"),
        ("MeanMetric()@value=a,value=b", r"after @ expected argument=column"),
        ("MulticlassAUROC(7)", r"not take predicted classes \(.*of scores.*@preds=COLUMN,target=target"),
        ("BinaryAUROC()", r"does not take predicted classes \(.*floating"),
        ("BinaryFairness(2)", r"value depends on the batch size. Compute it from"),
        ("BinaryGroupStatRates(2)", r"value depends on the batch size"),
        ("BinaryCalibrationError()", r"does not take predicted classes"),
        ("MeanMetric()@value=loss,nothing=loss", r"unexpected keyword argument 'nothing'"),
        ("RetrievalMAP()", r"no column for 'indexes'.*The task makes loss, prediction, rank, target"),
        ("FrechetInceptionDistance()", r"evaluates a network of its own"),
        ("LearnedPerceptualImagePatchSimilarity()", r"evaluates a network of its own"),
        ("RunningMean()", r"the last few updates"),
        ("MetricCollection([MeanMetric()])", r"not a metric by itself"),
        ("ClasswiseWrapper(MulticlassAccuracy(3))", r"not a literal.*from_torchmetrics"),
    ],
)
def test_wrong_lines_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_text(f"torchmetrics:{text}", ["prediction", "target", "loss", "rank"])


@pytest.mark.parametrize(
    ("call", "preds"),
    [
        ("MulticlassAUROC(7)", "probabilities"),
        ("MulticlassAveragePrecision(7, thresholds=20)", "probabilities"),
        ("MulticlassCalibrationError(7)", "probabilities"),
        ("MulticlassAccuracy(7, top_k=2)", "probabilities"),
        ("MulticlassAccuracy(7)", "prediction"),
        ("BinaryAUROC()", None),
    ],
)
def test_a_metric_of_scores_gets_the_column_it_can_read(call: str, preds: str | None) -> None:
    available = ["prediction", "target", "rank", "logits", "probabilities"]
    if preds is None:
        with pytest.raises(
            UsageError, match=r"predicted classes or probabilities of each class .*begins with Multi"
        ):
            from_text(f"torchmetrics:{call}", available)
    else:
        assert from_text(f"torchmetrics:{call}", available).columns == (preds, "target")


def test_objects_that_are_no_such_metrics_are_refused(package: ModuleType) -> None:
    class Network(package.Metric):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.inside = torch.nn.Linear(2, 2)

        def update(self, value: Tensor) -> None: ...

        def compute(self) -> Tensor:
            return torch.zeros(())

    for given, message in [
        (Network(), r"Network evaluates a network of its own \(Linear\)"),
        (package.MeanMetric, r"is the class of a metric: give an object of it, MeanMetric\(...\)"),
        (package.MetricCollection([package.MeanMetric()]), "not a metric by itself"),
        (package.wrappers.Running(package.MeanMetric()), "the last few updates"),
        (3, "int is not a metric of TorchMetrics"),
        (torch.nn.Linear(2, 2), "Linear is not a metric of TorchMetrics"),
    ]:
        with pytest.raises(UsageError, match=message):
            from_torchmetrics(given, ["value"])
