"""Classification metrics and their columns, against scikit-learn, TorchMetrics and plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from torch import Tensor
from torch.nn import functional

import dualeval
from dualeval.errors import UsageError
from dualeval.metrics import Measured, Value, classification
from dualeval.metrics.classification import (
    LogitColumns,
    TieWarning,
    classification_metric,
    default_metrics,
    log_odds,
    observe_logits,
    observed_logits,
)
from tests.vehicles import measuring
from tests.vehicles.kernels import CountedKernels
from tests.vehicles.tiny import EVERY_METRIC

metric_of: Any = classification_metric


def sample_logits(samples: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits that are right more often than by chance, and int64 targets."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, classes, (samples,), generator=generator)
    logits = torch.randn(samples, classes, generator=generator)
    return logits + 1.5 * functional.one_hot(target, classes), target


def measure(name: str, classes: int, columns: dict[str, Tensor]) -> Measured:
    """However the samples are split and ordered."""
    return measuring.measure(metric_of(name, classes), columns)


def columns_of(
    target: Sequence[int], prediction: Sequence[int], confidence: Sequence[float] | None = None
) -> dict[str, Tensor]:
    return {
        "target": torch.tensor(target, dtype=torch.int32),
        "prediction": torch.tensor(prediction, dtype=torch.int32),
        "confidence": torch.tensor(confidence or [0.5] * len(target), dtype=torch.float32),
    }


def number(value: Value) -> float:
    assert isinstance(value, float)
    return value


def order_by_hand(row: Tensor) -> list[int]:
    values = row.float().tolist()
    return sorted(range(len(values)), key=lambda index: (-values[index], index))


# The columns


def test_float64_logits_far_from_zero_keep_their_order() -> None:
    near, target = sample_logits(50, 4)
    far = near.double() - 5e6
    far[0, 0], far[1, 1], far[2] = math.nan, math.inf, -math.inf
    found, wanted = (observe_logits(each, target, 2, ["probabilities"]) for each in (far, near))
    assert all(torch.equal(found[name][3:], wanted[name][3:]) for name in ("rank", "top", "prediction"))
    for name in ("loss", "probabilities"):
        torch.testing.assert_close(found[name][3:], wanted[name][3:], rtol=1e-5, atol=1e-6)
    assert found["nan_logits"].nonzero().flatten().tolist() == [0]
    assert found["inf_logits"].nonzero().flatten().tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("samples", "classes"), [(64, 10), (16, 1000), (5, 1), (7, 2)])
def test_columns_follow_a_stable_sort(dtype: torch.dtype, samples: int, classes: int) -> None:
    logits, target = sample_logits(samples, classes)
    logits = logits.to(dtype)
    columns = observe_logits(logits, target, 5)
    orders = [order_by_hand(row) for row in logits]
    assert columns["top"].tolist() == [order[:5] for order in orders]
    assert columns["prediction"].tolist() == [order[0] for order in orders]
    assert columns["rank"].tolist() == [
        order.index(wanted) for order, wanted in zip(orders, target.tolist(), strict=True)
    ]
    assert torch.equal(columns["loss"], functional.cross_entropy(logits.float(), target, reduction="none"))
    softmax = torch.softmax(logits.double(), dim=1).amax(dim=1)
    torch.testing.assert_close(columns["confidence"].double(), softmax, rtol=2e-6, atol=0)
    assert torch.equal(columns["target"], target.int())
    assert not columns["nan_logits"].any()
    assert not columns["inf_logits"].any()
    dtypes = {name: column.dtype for name, column in columns.items()}
    assert dtypes == {
        "loss": torch.float32,
        "confidence": torch.float32,
        "prediction": torch.int32,
        "target": torch.int32,
        "rank": torch.int32,
        "nan_logits": torch.bool,
        "inf_logits": torch.bool,
        "top": torch.int32,
    }
    assert {len(column) for column in columns.values()} == {samples}


def test_minus_zero_equals_zero_and_subnormals_do_not() -> None:
    tiny = 2.0**-149
    logits = torch.tensor([[-0.0, 0.0, -0.0], [-tiny, -0.0, tiny]])
    columns = observe_logits(logits, torch.tensor([1, 0]), 3)
    assert columns["top"].tolist() == [[0, 1, 2], [2, 1, 0]]
    assert columns["rank"].tolist() == [1, 2]


def test_nan_rows_are_wrong_at_every_k_and_leave_the_others_alone() -> None:
    logits, target = sample_logits(6, 10)
    clean = observe_logits(logits, target, 5)
    bits = torch.tensor([-(2**22)], dtype=torch.int32)
    negative_nan = bits.view(torch.float32)
    assert bool(negative_nan.isnan()) and int(bits) < 0
    logits[1, target[1]] = math.nan
    logits[3] = math.nan
    logits[4, 0] = negative_nan.item()
    logits[4, 1] = math.inf
    columns = observe_logits(logits, target, 5)
    rows = [1, 3, 4]
    assert columns["nan_logits"].nonzero().flatten().tolist() == rows
    assert columns["inf_logits"].nonzero().flatten().tolist() == [4]
    assert columns["prediction"][rows].tolist() == [-1] * 3
    assert columns["top"][rows].tolist() == [[-1] * 5] * 3
    assert bool((columns["rank"][rows] >= 10).all())
    assert bool(columns["loss"][rows].isnan().all() and columns["confidence"][rows].isnan().all())
    for name, column in columns.items():
        assert torch.equal(column[[0, 2, 5]], clean[name][[0, 2, 5]])
    assert measure("top10", 10, columns).values == {"top10": 0.5}
    assert measure("nonfinite_logits", 10, columns).values == {"nonfinite_logits": {"nan": 3, "inf": 1}}


def test_logits_of_one_sample_without_their_dimension_are_refused() -> None:
    with pytest.raises(UsageError, match=r"shape \(4,\) for a batch of 1, expected \(1, classes\).*squeeze"):
        observed_logits(torch.zeros(4), torch.tensor([1]), 5)


def test_infinite_logits_are_ranked_and_counted() -> None:
    inf = math.inf
    logits = torch.tensor([[0.0, inf, 1.0], [-inf, 0.0, 1.0], [inf, -inf, 0.0], [3e38, 3e38, 3e38]])
    columns = observe_logits(logits, torch.tensor([0, 0, 1, 2]), 3)
    assert columns["inf_logits"].tolist() == [True, True, True, False]
    assert not columns["nan_logits"].any()
    assert columns["top"].tolist() == [[1, 2, 0], [2, 1, 0], [0, 2, 1], [0, 1, 2]]
    assert columns["rank"].tolist() == [2, 2, 2, 2]
    assert columns["loss"].isnan().tolist() == [True, False, True, False]
    assert columns["loss"][1] == inf
    assert measure("loss", 3, columns).nonfinite == {"loss": {"nan": 2, "pos_inf": 1, "neg_inf": 0}}


@pytest.mark.parametrize("classes", [3, 10, 37, 1000])
def test_a_row_depends_on_itself_alone(classes: int) -> None:
    """Bit for bit: at any place in the batch, for any batch size, beside any neighbours."""
    logits, target = sample_logits(67, classes)
    together = observe_logits(logits, target, 5)
    others = observe_logits(logits.flip(0), target.flip(0), 5)
    for name, column in together.items():
        assert torch.equal(column, others[name].flip(0)), name
    for size in (1, 2, 13):
        parts = [
            observe_logits(*pair, 5)
            for pair in zip(torch.split(logits, size), torch.split(target, size), strict=True)
        ]
        for name, column in together.items():
            assert torch.equal(column, torch.cat([part[name] for part in parts])), (name, size)
    beside_nan = logits.clone()
    beside_nan[1:] = math.nan
    for name, column in observe_logits(beside_nan, target, 5).items():
        assert torch.equal(column[0], together[name][0]), name


@pytest.mark.parametrize("classes", [2, 10, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_wait_give_the_columns_of_their_batches(
    monkeypatch: pytest.MonkeyPatch, classes: int, dtype: torch.dtype
) -> None:
    if classes == 64:
        monkeypatch.setattr(classification, "_AT_ONCE", 700)  # made of ten rows at once
    logits, target = sample_logits(301, classes)
    logits = logits.to(dtype)
    logits[7, 1], logits[9, 0] = math.nan, math.inf
    read = ("probabilities",)
    batches = [*zip(torch.split(logits, 64), torch.split(target, 64), strict=True)]
    expected = [observe_logits(*batch, 5, read) for batch in batches]
    late = [observed_logits(*batch, 5, read) for batch in batches]
    logits.zero_()  # as a model that writes each batch into the same memory
    waiting = [each for each in late if isinstance(each, LogitColumns)]
    assert len(waiting) == len(batches)
    first, together = waiting[0], waiting[0].joined(waiting[1:])
    for each in [*late, together]:
        assert [*each] == [*observe_logits(logits, target, 5, read)]
    for name, column in together.items():
        parts = torch.cat([of_batch[name] for of_batch in expected])
        assert column.dtype == parts.dtype
        assert column.contiguous().numpy().tobytes() == parts.contiguous().numpy().tobytes(), name
    for name, column in expected[0].items():
        assert [*first.made([name])] == [name], "no other is made"
        assert torch.equal(torch.nan_to_num(first.made([name])[name]), torch.nan_to_num(column)), name


def test_many_classes_do_not_wait() -> None:
    assert type(observed_logits(*sample_logits(3, 65), 5)) is dict


@pytest.mark.parametrize(("classes", "wait"), [(2, True), (1000, True), (1025, False)])
def test_the_logits_of_a_gpu_wait_for_more_classes(classes: int, wait: bool) -> None:
    """On "meta" no kernel runs: it plays a device whose logits are not the host's."""
    logits, target = (tensor.to("meta") for tensor in sample_logits(3, classes))
    columns = observed_logits(logits, target, 5, others={"n": target})
    if not wait:
        assert type(columns) is dict
        return
    assert isinstance(columns, LogitColumns) and [*columns][-1] == "n"
    assert columns.given["logits"] is logits and columns.given["n"] is target, "no kernel, not even a copy"


def test_other_columns_wait_as_they_are() -> None:
    logits, target = sample_logits(9, 4)
    other = torch.arange(9)
    late = observed_logits(logits, target, 5, others={"n": other})
    other.zero_()
    assert isinstance(late, LogitColumns) and len(late) == len([*late]) == 9
    joined = late.joined([late])
    assert joined.made(["n", "loss"])["n"].tolist() == [*range(9)] * 2 == joined["n"].tolist()
    assert [*joined.made(["n"])] == ["n"] and joined.kind == late.kind
    assert late.kind != observed_logits(logits, target, 5).kind  # type: ignore[attr-defined]
    theirs = observed_logits(
        logits, target, 5, observe=test_other_columns_wait_as_they_are, others={"n": other}
    )
    assert type(theirs) is dict and [*theirs] == [*late]


def test_a_label_that_no_class_has_is_refused_unless_any_may_be() -> None:
    logits, _ = sample_logits(3, 4)
    target = torch.tensor([0, 4, -(2**40)])
    with pytest.raises(RuntimeError, match="out of bounds"):
        observed_logits(logits, target, 5)["loss"]
    columns = observed_logits(logits, target, 5, any_label=True)
    assert columns["target"].tolist() == [0, 4, -(2**31)]


def test_arguments_are_untouched_and_layout_does_not_matter() -> None:
    logits, target = sample_logits(32, 10)
    transposed = logits.t().contiguous().t()
    before = transposed.clone()
    with torch.inference_mode():
        columns = observe_logits(transposed, target.to(torch.uint8), 5)
    assert torch.equal(transposed, before)
    for name, column in observe_logits(logits, target, 5).items():
        assert torch.equal(columns[name], column), name


def test_deterministic_kernels_take_an_empty_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The switch imports TorchInductor, which puts this variable into os.environ where it is missing.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        logits, target = sample_logits(8, 10)
        for samples in (8, 0):
            columns = observe_logits(logits[:samples], target[:samples], 5)
            for name in EVERY_METRIC:
                measure(name, 10, columns)
    finally:
        torch.use_deterministic_algorithms(before)
    assert columns["top"].shape == (0, 5)


# The metrics


@pytest.mark.parametrize("samples", [5, 40, 2_000])  # 5: most classes do not occur
def test_precision_and_recall_are_those_of_scikit_learn(samples: int) -> None:
    logits, target = sample_logits(samples, 12, seed=5)
    columns = observe_logits(logits, target, 5)
    values = measure("precision_recall", 12, columns).values
    truth, guess = target.numpy(), columns["prediction"].numpy()
    for average in ("micro", "macro"):
        expected = sklearn_metrics.precision_recall_fscore_support(
            truth, guess, average=average, zero_division=0
        )
        for key, score in zip(("precision", "recall", "f1"), expected, strict=False):
            assert number(values[f"{average}_{key}"]) == pytest.approx(float(score), rel=1e-12)
    expected = sklearn_metrics.precision_recall_fscore_support(
        truth, guess, labels=range(12), average=None, zero_division=0
    )
    per_class = values["per_class"]
    assert isinstance(per_class, dict)
    assert list(per_class) == ["precision", "recall", "f1", "support", "predicted"]
    for key, scores in zip(("precision", "recall", "f1", "support"), expected, strict=True):
        np.testing.assert_allclose(np.array(per_class[key]), scores, rtol=1e-12)
    assert per_class["predicted"] == np.bincount(guess, minlength=12).tolist()


def test_samples_predicted_as_no_class_count_for_recall_alone() -> None:
    values = measure("precision_recall", 3, columns_of([0, 0, 1, 1], [0, -1, 1, 0])).values
    assert values["micro_precision"] == 2 / 3  # of three predictions
    assert values["micro_recall"] == 2 / 4
    assert values["micro_f1"] == 4 / 7
    assert values["macro_precision"] == (1 / 2 + 1) / 2  # class 2 does not occur
    assert values["per_class"] == {
        "precision": [0.5, 1.0, 0.0],
        "recall": [0.5, 0.5, 0.0],
        "f1": [0.5, 2 / 3, 0.0],
        "support": [2, 2, 0],
        "predicted": [2, 1, 0],
    }


def test_confusion_keeps_predictions_of_no_class_apart() -> None:
    value = measure("confusion", 3, columns_of([2, 0, 2, 2, 1], [-1, 2, 2, -1, 0])).values
    assert value == {
        "confusion_matrix": {"classes": 3, "entries": [[0, 2, 1], [1, 0, 1], [2, -1, 2], [2, 2, 1]]}
    }


def ece_by_hand(confidence: Tensor, right: Tensor) -> float:
    gaps = [Fraction()] * 15
    for value, hit in zip(confidence.tolist(), right.tolist(), strict=True):
        place = max(math.ceil(Fraction(value) * 15) - 1, 0)
        gaps[place] += int(hit) - Fraction(value)
    total = sum((abs(gap) for gap in gaps), Fraction()) / len(confidence)
    return float(total)


def test_ece_is_the_exact_rational() -> None:
    generator = torch.Generator().manual_seed(8)
    confidence = torch.rand(700, generator=generator)
    borders = torch.arange(16, dtype=torch.float32) / 15
    neighbours = [torch.nextafter(borders, torch.tensor(float(way))).clamp(0, 1) for way in (-1, 2)]
    confidence = torch.cat([confidence, borders, *neighbours])
    right = torch.rand(len(confidence), generator=generator) < confidence
    columns = columns_of([1] * len(confidence), right.int().tolist(), confidence.tolist())
    assert measure("ece", 2, columns).values == {"ece": ece_by_hand(confidence, right)}


def test_ece_borders_belong_to_the_lower_bin() -> None:
    # The float32 nearest to 9 / 15 is above it, and so in bin 9 (from 0); the one below it is in bin 8.
    for border, place in ((1.0, 14), (0.0, 0), (0.6, 9), (0.6 - 4e-8, 8)):
        ledger = measuring.ledger_of(metric_of("ece", 2), columns_of([0], [0], [border]))
        assert ledger[3::12].nonzero().flatten().tolist() == [place], border


def test_ece_with_nan_confidence_is_none_and_counted() -> None:
    columns = columns_of([0, 1, 1], [0, -1, 1], [0.75, math.nan, 0.5])
    assert measure("ece", 2, columns) == Measured(
        values={"ece": None},
        nonfinite={"ece": {"nan": 1, "pos_inf": 0, "neg_inf": 0}},
        units={"ece": "fraction"},
        directions={"ece": "lower"},
    )
    assert int(measuring.ledger_of(metric_of("ece", 2), columns)[3::12].sum()) == 2


def test_no_samples_give_none() -> None:
    logits, target = sample_logits(1, 10)
    empty = {name: column[:0] for name, column in observe_logits(logits, target, 5).items()}
    for name in ("loss", "top1", "ece"):
        assert measure(name, 10, empty).values == {name: None}
    values = measure("precision_recall", 10, empty).values
    assert {values[f"{average}_{key}"] for average in ("micro", "macro") for key in ("precision", "f1")} == {
        None
    }
    assert measure("confusion", 10, empty).values == {"confusion_matrix": {"classes": 10, "entries": []}}


@pytest.mark.parametrize("name", EVERY_METRIC)
def test_any_partition_and_order_give_the_same_result(name: str) -> None:
    logits, target = sample_logits(211, 10, seed=11)
    if name != "ece" and name != "loss":
        logits[17, 3] = math.nan
    columns = observe_logits(logits, target, 5)
    for seed in range(4):
        measuring.measure(metric_of(name, 10), columns, seed)


# The names


@pytest.mark.parametrize("rounded", [False, True])
def test_auroc_accuracy_and_f1_are_those_of_scikit_learn(rounded: bool) -> None:
    """Rounded logits give ties, which a softmax breaks by its rounding."""
    logits, target = sample_logits(400, 8)
    columns = observe_logits(logits.round() if rounded else logits, target, 5, ("logits", "probabilities"))
    probabilities = columns["probabilities"].numpy()
    rows = {"logits": columns["logits"].numpy(), "target": target.numpy()}
    found = metric_of("auroc", 8).compute(rows)
    wanted = sklearn_metrics.roc_auc_score(target, probabilities.round(9), multi_class="ovr")
    assert found.values["auroc"] == pytest.approx(wanted, abs=1e-12)
    # A class that does not occur is not in the mean.
    assert metric_of("auroc", 8).compute({**rows, "target": target.numpy() // 2 * 2}).values["auroc"] > 0.5
    f1 = sklearn_metrics.f1_score(target, columns["prediction"], average="macro")
    assert measure("f1", 8, columns).values == {"f1": pytest.approx(f1, abs=1e-12)}
    assert measure("accuracy", 8, columns).values["accuracy"] == measure("top1", 8, columns).values["top1"]
    assert torch.equal(columns["logits"], logits.round() if rounded else logits)
    assert "logits" not in observe_logits(logits, target, 5)


def test_auroc_of_one_class_nan_or_no_sample_is_none() -> None:
    one_class = {"logits": np.full((3, 2), 0.5, np.float32), "target": np.zeros(3, np.int32)}
    assert metric_of("auroc", 2).compute(one_class).values == {"auroc": None}
    with_nan = {**one_class, "logits": np.array([[np.nan, 0], [1, 0], [0, 1]], np.float32)}
    found = metric_of("auroc", 2).compute(with_nan)
    assert (found.values, found.nonfinite) == ({"auroc": None}, {"auroc": {"nan": 1}})
    empty = {"logits": np.zeros((0, 2), np.float32), "target": np.zeros(0, np.int32)}
    assert metric_of("auroc", 2).compute(empty).values == {"auroc": None}


@pytest.mark.parametrize("shift", [0, 20, 40, 1e4])
def test_auroc_ranks_what_no_probability_tells_apart(shift: float) -> None:
    """Of two classes in the order of the margin; a third one that is out of the question changes nothing."""
    draw = np.random.default_rng(0)
    target = np.arange(2000) % 2
    margin = (draw.normal(size=2000) * 5 + shift + 4 * target - 2).astype(np.float32)
    wanted = sklearn_metrics.roc_auc_score(target, margin)
    for others in (1, 2):
        logits = np.column_stack([np.zeros(2000), margin, *[np.full(2000, -np.inf)] * (others - 1)])
        rows = {"logits": logits.astype(np.float32), "target": target}
        found = metric_of("auroc", 1 + others).compute(rows)
        assert found.values["auroc"] == pytest.approx(wanted, abs=1e-9)


def test_log_odds_are_those_of_the_probabilities_in_any_order() -> None:
    logits = np.random.default_rng(1).normal(size=(50, 6)).astype(np.float32) * 4
    probabilities = torch.tensor(logits).double().softmax(1)
    np.testing.assert_allclose(log_odds(logits), probabilities.logit().numpy(), rtol=1e-9)
    order = [3, 0, 5, 4, 1, 2]
    assert (log_odds(logits[:, order]) == log_odds(logits)[:, order]).all(), "whatever the others' order"


def test_default_metrics_follow_from_the_number_of_classes() -> None:
    assert default_metrics(10) == (
        *("loss", "top1", "top5", "precision_recall", "confusion", "ece", "nonfinite_logits"),
    )
    assert "top5" not in default_metrics(5)
    assert "top5" in default_metrics(6)
    assert "confusion" in default_metrics(2048)
    assert "confusion" not in default_metrics(2049)
    for classes in (1, 5, 6, 2048, 2049):
        for name in default_metrics(classes):
            assert metric_of(name, classes).name == name


@pytest.mark.parametrize(
    ("name", "classes", "message"),
    [
        ("los", 10, r"no metric 'los'\. Nearest: loss\. Metrics: loss, .*top<k> for k from 1 to 10"),
        ("precision", 10, "Nearest: .*precision_recall"),
        ("confusion_matrix", 10, "Nearest: confusion"),
        ("top0", 10, "k from 1 to 10"),
        ("top01", 10, "Nearest: top1"),
        ("zzz", 10, r"no metric 'zzz'\. Metrics:"),
        ("top11", 10, "'top11' needs at least 11 classes, found 10"),
        ("confusion", 2049, "at most 2048 classes, found 2049"),
    ],
)
def test_metric_names_that_do_not_fit_are_explained(name: str, classes: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        metric_of(name, classes)


def test_a_batch_of_any_size_takes_as_many_kernels() -> None:
    """As many for any batch: a small model's forward on a GPU is as short as twenty kernels."""
    observe_logits(*sample_logits(4, 10), top=5)  # makes what later batches use again
    for samples in (1, 64):
        with CountedKernels() as kernels, torch.inference_mode():
            observe_logits(*sample_logits(samples, 10), top=5)
        with CountedKernels() as of_samples, torch.inference_mode():
            sample_logits(samples, 10)
        counts = kernels.counts - of_samples.counts
        assert counts.total() <= 21, counts
        assert not [name for name in counts if "arange" in name], "the batch before has made it"


@pytest.mark.parametrize(
    ("levels", "targets", "warned"),
    [
        (3, lambda best: torch.zeros_like(best), True),  # the right choice is always the first
        (3, lambda best: torch.randint(10, best.shape), False),  # such ties even out
        (2**20, lambda best: torch.zeros_like(best), False),  # no ties
        (3, lambda best: best, True),
    ],
)
def test_ties_decided_by_the_order_of_classes_are_warned_of(levels: int, targets: Any, warned: bool) -> None:
    torch.manual_seed(0)
    logits = (torch.rand(2000, 10) * levels).floor()
    columns = observe_logits(logits, targets(logits.argmax(1)), 10, {"ties"})
    is_best = logits.gather(1, columns["target"].long()[:, None]) == logits.amax(1, keepdim=True)
    wanted = (logits == logits.amax(1, keepdim=True)).sum(1) * is_best[:, 0]
    assert torch.equal(columns["ties"].long(), wanted)
    metric, ledger = TieWarning(), torch.zeros(4, dtype=torch.int64)
    for part in (slice(0, 700), slice(700, 2000)):
        metric.update(ledger, {name: columns[name][part] for name in metric.columns})
    measured = metric.compute(ledger)
    assert measured.values == {}
    assert ["shares the largest logit" in each for each in measured.warnings] == ([True] if warned else [])


def test_ties_are_counted_in_a_run_and_not_kept(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(200, 4), torch.zeros(200, dtype=torch.int64))
    model = torch.nn.Linear(4, 3)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    result = dualeval.evaluate(model=model, data=data, batch_size=32, out=tmp_path)
    assert result.metrics["top1"] == 1.0
    assert any("in 200 of 200 samples" in each and "67 would be" in each for each in result.warnings)
    assert "ties" not in result.predictions().column_names
