"""A model, data and metrics of the caller's own: what is found out from samples and outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

import dualeval
from dualeval.errors import UsageError
from dualeval.metrics import Mean
from dualeval.metrics.torchmetrics.metric import torchmetrics
from dualeval.result import Result

SAMPLES = 70
# Here: the import sets a variable.
TORCHMETRICS = torchmetrics()


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def linear(inputs: int, outputs: int) -> nn.Linear:
    generator = torch.Generator().manual_seed(1)
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(outputs, inputs, generator=generator))
        layer.bias.zero_()
    return layer.eval()


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def evaluate(**options: Any) -> Result:
    return dualeval.evaluate(**{"batch_size": 16, "launcher": "none", "workers": 0, **options})


def test_pairs_of_input_and_class_get_the_metrics_of_a_classifier() -> None:
    model, inputs = linear(5, 7), numbers(SAMPLES, 5)
    labels = torch.arange(SAMPLES) % 7
    result = evaluate(model=model, data=TensorDataset(inputs, labels))
    logits = model(inputs)
    assert result.metrics["top1"] == (logits.argmax(1) == labels).double().mean().item()
    losses = nn.functional.cross_entropy(logits, labels, reduction="none").tolist()
    assert result.metrics["loss"] == pytest.approx(math.fsum(losses) / SAMPLES, rel=1e-6)
    assert "confusion_matrix" in result.metrics
    two = evaluate(
        model=model, data=list(zip(inputs, labels.tolist(), strict=True)), metrics=["top2", "loss"]
    )
    assert list(two.metrics) == ["top2", "loss"]
    assert two.metrics["loss"] == result.metrics["loss"]


def test_accuracy_f1_and_auroc_are_metrics_by_name(tmp_path: Path) -> None:
    model, inputs, labels = linear(5, 7), numbers(SAMPLES, 5), torch.arange(SAMPLES) % 7
    spelled = "torchmetrics:MulticlassAUROC(num_classes=7)"
    names = ["accuracy", "f1", "auroc"]
    data = TensorDataset(inputs, labels)
    result = evaluate(model=model, data=data, metrics=[*names, "top1", spelled], out=tmp_path)
    assert [*result.metrics] == [*names[:2], "top1", "auroc", "MulticlassAUROC"]
    assert result.metrics["accuracy"] == result.metrics["top1"]
    assert result.metrics["auroc"] == pytest.approx(result.metrics["MulticlassAUROC"], abs=1e-6)
    columns = pyarrow.parquet.read_schema(tmp_path / "predictions.parquet").names
    assert {"probabilities", "logits"} <= {*columns}
    task = dualeval.ModelTask(model=model, data=data, rows=["prediction"])
    again = dualeval.evaluate(task, metric=[*names, spelled], launcher="none", workers=0)
    assert again.metrics == {name: result.metrics[name] for name in (*names, "MulticlassAUROC")}


def test_a_run_asks_a_task_for_other_metrics(tmp_path: Path) -> None:
    model, inputs, labels = linear(5, 7), numbers(SAMPLES, 5), torch.arange(SAMPLES) % 7
    task = dualeval.ModelTask(model=model, data=TensorDataset(inputs, labels), metrics=["loss"])
    auroc = "torchmetrics:MulticlassAUROC(num_classes=7)@preds=logits,target=target"
    result = dualeval.evaluate(task, metric=["top3", auroc], launcher="none", workers=0)
    wanted = TORCHMETRICS.classification.MulticlassAUROC(num_classes=7)(model(inputs), labels)
    assert list(result.metrics) == ["top3", "MulticlassAUROC"]
    assert result.metrics["MulticlassAUROC"] == pytest.approx(wanted.item(), abs=1e-6)
    # Another evaluation of the same task asks for others.
    again = dualeval.evaluate(task, metric=["loss"], launcher="none", workers=0, out=tmp_path)
    assert list(again.metrics) == ["loss"]
    assert "logits" not in pyarrow.parquet.read_schema(tmp_path / "predictions.parquet").names
    again = dualeval.evaluate(task, metric=[auroc], launcher="none", workers=0)
    assert again.metrics["MulticlassAUROC"] == result.metrics["MulticlassAUROC"]
    with pytest.raises(UsageError, match="there is no metric 'topp'"):
        dualeval.evaluate(task, metric=["topp"], launcher="none", workers=0)


def worst(prediction: Any, target: Any, *, power: int = 2) -> float:
    return float((abs(prediction - target) ** power).max())


def test_metrics_of_a_regression_are_those_of_scikit_learn() -> None:
    """Every name that a run prints can be asked for, and scikit-learn gives the same numbers."""
    from sklearn import metrics as sklearn

    inputs, target = numbers(SAMPLES, 5), numbers(SAMPLES)
    data = TensorDataset(inputs, target)
    found = evaluate(model=linear(5, 1), data=data, metrics=["default", "mse", "r2", "rmse", worst]).metrics
    assert [*found] == ["mae", "rmse", "mse", "r2", "worst"]
    prediction = linear(5, 1)(inputs)[:, 0].detach().double().numpy()
    wanted = target.double().numpy()
    assert found["r2"] == pytest.approx(sklearn.r2_score(wanted, prediction), abs=1e-6)
    assert found["mse"] == pytest.approx(sklearn.mean_squared_error(wanted, prediction), rel=1e-6)
    assert found["worst"] == pytest.approx(max((wanted - prediction) ** 2), rel=1e-6)
    ranks = evaluate(model=linear(5, 1), data=data, metrics=["pearson", "spearman"]).metrics
    assert ranks["pearson"] == pytest.approx(np.corrcoef(wanted, prediction)[0, 1], abs=1e-6)
    assert [*ranks] == ["pearson", "spearman"]
    constant = TensorDataset(inputs, torch.full((SAMPLES,), 0.1))
    assert evaluate(model=linear(5, 1), data=constant, metrics=["r2"]).metrics == {"r2": None}


def by_keyword(prediction: Any, *, k: int) -> float:
    return float(prediction[k])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"metrics": ["mae"], "metric": ["mse"]}, "metric and metrics were given"),
        ({"preprocessing": "imagenet"}, "preprocessing is for data given as a path"),
        ({"metrics": [by_keyword]}, "the function by_keyword: .* parameters without a default"),
    ],
)
def test_options_that_do_not_go_with_a_data_set_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        evaluate(model=linear(5, 1), data=TensorDataset(numbers(SAMPLES, 5), numbers(SAMPLES)), **given)


def test_tiny_numbers_have_no_correlation() -> None:
    data = TensorDataset(numbers(SAMPLES, 5), numbers(SAMPLES).double() * 1e-170)
    found = evaluate(model=linear(5, 1), data=data, metrics=["r2", "pearson"]).metrics
    assert found == {"r2": None, "pearson": None}


def test_a_value_of_a_default_metric_is_a_name() -> None:
    data = TensorDataset(numbers(SAMPLES, 5), torch.arange(SAMPLES) % 7)
    every = evaluate(model=linear(5, 7), data=data)
    for name in every.metrics:
        assert evaluate(model=linear(5, 7), data=data, metrics=[name]).metrics[name] == every.metrics[name]
    found = evaluate(model=linear(5, 7), data=data, metrics=["acc", "default", "top1"]).metrics
    assert {*found} == {"acc", *every.metrics}
    assert found["acc"] == found["top1"]


def test_pairs_of_input_and_number_are_a_regression(tmp_path: Path) -> None:
    model, inputs, targets = linear(5, 1), numbers(SAMPLES, 5), numbers(SAMPLES)
    result = evaluate(model=model, data=TensorDataset(inputs, targets), out=tmp_path)
    errors = (model(inputs).squeeze(1) - targets).abs()
    assert result.metrics["mae"] == pytest.approx(errors.mean().item(), rel=1e-6)
    rows = pyarrow.parquet.read_table(tmp_path / "predictions.parquet")
    assert rows.column_names == [
        *("id", "index", "prediction", "target", "error", "absolute_error", "squared_error")
    ]
    # A target of shape (n, 1) is no (n, n) of differences.
    again = evaluate(model=model, data=TensorDataset(inputs, targets.unsqueeze(1)))
    assert again.metrics == result.metrics


class Named(nn.Module):
    """Takes its inputs by name, as models of transformers do, and returns an object."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(3, 4)

    def forward(self, input_ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        assert mask is not None and labels is None
        return {"hidden": input_ids, "logits": self.layer(input_ids * mask)}


def test_dicts_are_passed_by_the_names_of_the_models_arguments() -> None:
    inputs, mask = numbers(SAMPLES, 3), torch.ones(SAMPLES, 3)
    data = [
        {"input_ids": inputs[i].tolist(), "mask": mask[i], "text": f"{i}", "labels": i % 4}
        for i in range(SAMPLES)
    ]
    result = evaluate(model=Named, data=data, metrics=["top1"])
    labels = torch.arange(SAMPLES) % 4
    assert result.metrics["top1"] == (linear(3, 4)(inputs).argmax(1) == labels).double().mean().item()
    assert result.description["model"] == "Named"


@pytest.mark.parametrize("last", [False, True])
def test_logits_of_each_place_give_a_class_of_each_place(last: bool, tmp_path: Path) -> None:
    class Places(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs.movedim(1, -1) if last else inputs

    logits, labels = numbers(20, 3, 4, 5), torch.randint(3, (20, 4, 5))
    evaluate(model=Places(), data=TensorDataset(logits, labels), metrics=[], out=tmp_path)
    rows = pyarrow.parquet.read_table(tmp_path / "predictions.parquet")
    assert rows["prediction"].to_pylist() == logits.argmax(1).flatten(1).tolist()
    assert rows["target"].to_pylist() == labels.flatten(1).tolist()


def test_an_ambiguous_dimension_of_classes_is_refused() -> None:
    labels = torch.arange(4).repeat(SAMPLES, 1)
    with pytest.raises(UsageError, match=r"whether the classes are dimension 1 or 2 .* cannot be seen"):
        evaluate(model=nn.Identity(), data=TensorDataset(torch.rand(SAMPLES, 4, 4), labels))


@pytest.mark.parametrize("whole", [torch.int64, torch.uint8, torch.uint16])
@pytest.mark.parametrize("flat", [True, False])
def test_whole_numbers_may_be_the_targets_of_a_regression(flat: bool, whole: torch.dtype) -> None:
    model: nn.Module = nn.Sequential(linear(5, 1), nn.Flatten(0)) if flat else linear(5, 1)
    inputs, targets = numbers(SAMPLES, 5), (torch.arange(SAMPLES) % 2).to(whole)
    result = evaluate(model=model.eval(), data=TensorDataset(inputs, targets))
    errors = (model(inputs).flatten() - targets.float()).abs()
    assert result.metrics["mae"] == pytest.approx(errors.mean().item(), rel=1e-6)


def test_one_output_with_bool_targets_is_refused_with_advice() -> None:
    """The advice of the refusal is a binary classification."""
    logits, targets = numbers(SAMPLES, 1), torch.arange(SAMPLES) % 2 == 0
    data = TensorDataset(logits, targets)
    with pytest.raises(UsageError, match="targets are bool") as raised:
        evaluate(model=nn.Identity(), data=data)
    assert "pad(model(batch[0]).reshape(-1, 1), (1, 0))" in str(raised.value)

    def two(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.pad(model(batch[0]).reshape(-1, 1), (1, 0))

    found = evaluate(model=nn.Identity(), data=data, forward=two).metrics
    loss = nn.functional.binary_cross_entropy_with_logits(logits[:, 0], targets.float())
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert found["top1"] == ((logits[:, 0] > 0) == targets).double().mean().item()


@pytest.mark.parametrize("scale", [1e-25, 1.0, 3e20])
def test_squares_neither_vanish_nor_overflow(scale: float) -> None:
    found, targets = torch.rand(2, SAMPLES) * scale
    result = evaluate(model=nn.Identity(), data=TensorDataset(found, targets))
    wanted = (found.double() - targets.double()).square().mean().sqrt()
    assert result.metrics["rmse"] == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize("kind", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_labels_of_unsigned_types_are_labels(kind: torch.dtype) -> None:
    logits, labels = numbers(SAMPLES, 4), torch.arange(SAMPLES) % 4
    found = evaluate(model=nn.Identity(), data=TensorDataset(logits, labels.to(kind)), metrics=["top1"])
    assert found.metrics["top1"] == (logits.argmax(1) == labels).double().mean().item()


@pytest.mark.parametrize(
    ("outputs", "targets", "said"),
    [
        (numbers(8, 3), numbers(8, 3), r"one for each number, as \{'a': \(outputs - batch\[1\]\)"),
        (numbers(8, 3), torch.eye(3)[torch.arange(8) % 3], r"take target\.argmax\(1\)"),
        (numbers(8, 7, 4), torch.zeros(8, 7, dtype=torch.int64), r"metrics=\[dualeval\.metrics\.IoU\("),
    ],
)
def test_outputs_and_targets_that_do_not_fit_are_refused(outputs: Tensor, targets: Tensor, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        evaluate(model=nn.Identity(), data=TensorDataset(outputs, targets))


@pytest.mark.parametrize(
    ("whole", "largest"), [(torch.int64, 2**24), (torch.int32, 2**24), (torch.int16, 99)]
)
def test_whole_numbers_beyond_float32_are_not_rounded(whole: torch.dtype, largest: int) -> None:
    data = TensorDataset(
        torch.full((SAMPLES,), float(largest)), torch.full((SAMPLES,), largest + 1, dtype=whole)
    )
    result = evaluate(model=nn.Identity(), data=data)
    assert result.metrics == {"mae": 1.0, "rmse": 1.0}


class Labelled(NamedTuple):
    """A sample whose target stands first."""

    label: int
    picture: Tensor


class Masked(NamedTuple):
    input_ids: Tensor
    labels: int
    mask: Tensor


class Unnamed(NamedTuple):
    first: Tensor
    second: int


class Several(nn.Linear):
    def forward(self, inputs: Tensor) -> Any:
        return {"a": super().forward(inputs)}


def test_a_named_tuple_is_read_by_its_names() -> None:
    inputs, model = numbers(SAMPLES, 3), linear(3, 4)
    wanted = evaluate(model=model, data=[(row, i % 4) for i, row in enumerate(inputs)]).metrics
    for data in (
        [Labelled(i % 4, row) for i, row in enumerate(inputs)],
        [Unnamed(row, i % 4) for i, row in enumerate(inputs)],
    ):
        assert evaluate(model=model, data=data).metrics == wanted
    several = [Masked(row, i % 4, torch.ones(3)) for i, row in enumerate(inputs)]
    assert evaluate(model=Named, data=several).metrics == wanted
    with pytest.raises(UsageError, match=r"forward=lambda model, batch: model\(batch\.picture\)\['a'\]"):
        evaluate(model=Several(3, 4), data=[Labelled(1, row) for row in inputs])


def test_tensors_that_the_model_does_not_get_are_named() -> None:
    class Picture(nn.Linear):
        def forward(self, picture: Tensor) -> Tensor:
            return super().forward(picture)

    rows = [
        {"picture": row, "mask": torch.ones(3), "number": i, "file": str(i), "y": i % 4}
        for i, row in enumerate(numbers(SAMPLES, 3))
    ]
    result = evaluate(model=Picture(3, 4), data=rows)
    [warning] = [each for each in result.warnings if "does not get" in each]
    assert warning.startswith(
        "the model does not get 'mask', 'number' of the samples: its forward takes picture."
    )
    whole = evaluate(
        model=Named, data=[{"input_ids": row["picture"], **row} for row in rows], metrics=["top1"]
    )
    assert any("does not get 'picture', 'number'" in each for each in whole.warnings)
    given = [{key: row[key] for key in ("picture", "file", "y")} for row in rows]
    assert not any("does not get" in each for each in evaluate(model=Picture(3, 4), data=given).warnings)
    read = evaluate(model=Picture(3, 4), data=rows, observe=lambda outputs, batch: {"n": batch["number"]})
    assert not any("does not get" in each for each in read.warnings), "its observe gets them"


def test_another_job_by_its_metrics_names_the_metrics_alone(tmp_path: Path) -> None:
    data = TensorDataset(numbers(SAMPLES, 3), torch.arange(SAMPLES) % 4)
    evaluate(model=linear(3, 4), data=data, metrics=["top1"], out=tmp_path / "run")
    said = (
        r"another job \(job\.metrics: \['top1'\] there, \['top1', 'auroc'\] now%s\)\. Give .* start over\.$"
    )
    with pytest.raises(UsageError, match=said % ""):
        evaluate(model=linear(3, 4), data=data, metrics=["top1", "auroc"], out=tmp_path / "run")
    with pytest.raises(UsageError, match=said % "; job.samples: .*"):
        evaluate(model=linear(3, 4), data=Subset(data, [2]), metrics=["top1", "auroc"], out=tmp_path / "run")


def test_no_metrics_are_a_warning() -> None:
    data = TensorDataset(numbers(SAMPLES, 3), torch.arange(SAMPLES) % 4)
    result = evaluate(model=linear(3, 4), data=data, metrics=[])
    assert result.metrics == {}
    assert any(
        sentence.startswith("there are no metrics, so the result has no numbers")
        for sentence in result.warnings
    )
    assert not any(
        "no metrics" in each for each in evaluate(model=linear(3, 4), data=data, metrics=["loss"]).warnings
    )


def test_a_label_beyond_32_bits_is_no_other_label() -> None:
    labels = torch.arange(SAMPLES) % 3
    labels[5] += 2**32
    with pytest.raises(UsageError, match="sample 5 has the label"):
        evaluate(model=linear(5, 3), data=TensorDataset(numbers(SAMPLES, 5), labels), metrics=["top1"])


def test_a_regression_in_half_precision_is_written(tmp_path: Path) -> None:
    model = linear(5, 1)
    data = TensorDataset(numbers(SAMPLES, 5), torch.full((SAMPLES,), 1000.0))
    result = evaluate(model=model, data=data, precision="amp-bf16", out=tmp_path)
    assert result.metrics["rmse"] == pytest.approx(1000, rel=0.01)
    half = TensorDataset(*(tensor.half() for tensor in data.tensors))
    assert evaluate(model=linear(5, 1).half(), data=half).metrics["rmse"] == pytest.approx(1000, rel=0.01)


def test_functions_of_ones_own_make_the_columns(tmp_path: Path) -> None:
    data = numbers(SAMPLES, 3)
    result = evaluate(
        model=lambda: linear(3, 2),
        data=data,
        collate=torch.stack,
        forward=lambda model, batch: model(2 * batch),
        observe=lambda outputs, batch: {"sum": outputs.sum(1), "wide": outputs},
        rows=["wide"],
        metrics=["sum"],
        name="doubled",
        out=tmp_path,
    )
    assert result.metrics["sum"] == pytest.approx(linear(3, 2)(2 * data).sum(1).mean().item(), rel=1e-5)
    assert pyarrow.parquet.read_table(tmp_path / "predictions.parquet").column_names == [
        *("id", "index", "wide", "sum")
    ]
    assert result.description["model"] == "doubled"


class Mapped(Dataset[tuple[Tensor, int]]):
    """Any map-style data set, without ids, fingerprint or ``__getitems__``."""

    def __init__(self, broken: int | None = None) -> None:
        self.inputs = numbers(SAMPLES, 5)
        self.broken = broken

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.broken:
            raise ValueError("torn")
        return self.inputs[index], index % 7


@pytest.mark.parametrize("broken", [0, 40])
def test_a_sample_that_cannot_be_read_stops_the_run_or_is_skipped(broken: int) -> None:
    options: dict[str, Any] = {"model": linear(5, 7), "data": Mapped(broken), "metrics": ["top1"]}
    result = evaluate(**options, on_error="skip")
    assert result.samples == {"total": SAMPLES, "evaluated": SAMPLES - 1, "failed": 1}
    with pytest.raises(UsageError, match=rf"sample {broken} .*torn"):
        evaluate(**options)


def test_workers_are_taken_where_samples_have_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from dualeval.engine.samples.feed import Feed

    seen: list[int] = []

    def watched(*arguments: Any, workers: int, **options: Any) -> Any:
        seen.append(workers)
        return Feed(*arguments, workers=0, **options)

    monkeypatch.setattr("dualeval.engine.loop.loop.Feed", watched)
    data = Mapped()
    evaluate(model=linear(5, 7), data=data, metrics=["top1"], workers=None)
    assert seen and min(seen) >= 1
    seen.clear()
    evaluate(model=linear(5, 7), data=[data[i] for i in range(len(data))], metrics=["top1"], workers=None)
    assert set(seen) == {0}


class Pair(NamedTuple):
    """As some models return."""

    hidden: Tensor
    logits: Tensor


@pytest.mark.parametrize(
    "wrapped", [lambda out: (out,), lambda out: Pair(out, out), lambda out: {"out": out}]
)
def test_a_tensor_is_taken_out_of_the_outputs_that_hold_it(wrapped: Callable[[Tensor], Any]) -> None:
    model = linear(5, 7)
    result = evaluate(
        model=model, data=Mapped(), metrics=["top1"], forward=lambda model, batch: wrapped(model(batch[0]))
    )
    assert result.metrics == evaluate(model=model, data=Mapped(), metrics=["top1"]).metrics


def test_a_derived_class_may_write_into_its_columns() -> None:
    class Doubled(dualeval.ModelTask):
        def observe(self, outputs: Any, batch: Any) -> Mapping[str, Any]:
            return self.with_double(super().observe(outputs, batch), "twice", "loss")

        def postprocess(self, columns: Mapping[str, Any], samples: range) -> Mapping[str, Any]:
            return self.with_double(super().postprocess(columns, samples), "four times", "twice")

        def with_double(self, found: Mapping[str, Any], name: str, of: str) -> Mapping[str, Any]:
            assert isinstance(found, dict)
            found[name] = 2 * found[of]
            return found

    model = linear(5, 7)
    metrics: list[Any] = ["loss", Mean("twice"), Mean("four times")]
    task = Doubled(model=model, data=Mapped(), metrics=metrics)
    values = dualeval.evaluate(task, batch_size=4, workers=0).metrics
    loss = evaluate(model=model, data=Mapped(), metrics=["loss"], batch_size=4).metrics["loss"]
    assert values["loss"] == loss
    assert values["twice"] == pytest.approx(2 * float(str(loss)))
    assert values["four times"] == pytest.approx(4 * float(str(loss)))
