"""Metrics of TorchMetrics: routes by states, columns to arguments, a line of text, and refusals."""

from __future__ import annotations

import importlib.util
import math
import warnings
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dualeval.columns.ragged import Text
from dualeval.errors import UsageError
from dualeval.metrics import from_torchmetrics, is_of_rows
from dualeval.metrics.exact import SUM_SLOTS, add_each, each_rounded
from dualeval.metrics.torchmetrics import routes
from dualeval.metrics.torchmetrics.metric import from_text, read
from tests.conftest import ROOT

pytestmark = pytest.mark.usefixtures("one_thread", "quiet")
PAIR = ["preds", "target"]


def of_batches(metric: Any, *batches: dict[str, Any]) -> Any:
    """The values after one update a batch."""
    ledger = torch.zeros(metric.size, dtype=torch.int64)
    for batch in batches:
        metric.update(ledger, batch)
    return metric.compute(ledger)


# -- routes ------------------------------------------------------------------------------------------


def metric_with(package: ModuleType, update: Any, **states: tuple[Any, Any]) -> Any:
    """A metric of a user's own with these states: (default, reduction)."""

    class Own(package.Metric):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            for name, (default, reduction) in states.items():
                self.add_state(name, default=default, dist_reduce_fx=reduction)

        def update(self, value: Tensor) -> None:
            update(self, value)

        def compute(self) -> Any:
            return getattr(self, next(iter(states)))

    return Own()


def add_count(self: Any, value: Tensor) -> None:
    self.total = self.total + len(value)


ZERO = torch.tensor(0)


@pytest.mark.parametrize(
    ("default", "reduction", "of_rows"),
    [
        (ZERO, "sum", False),
        (torch.tensor(0.0), "sum", False),
        (torch.tensor(False), "sum", False),
        (torch.tensor(1), "sum", True),
        (ZERO, "max", True),
        (ZERO, "min", True),
        (ZERO.float(), "mean", True),
        (ZERO, None, True),
        (ZERO, torch.sum, True),
        (torch.tensor(0j), "sum", True),
        ([], "cat", True),
        ([], "sum", True),
    ],
)
def test_the_states_decide_the_route(
    package: ModuleType, default: Any, reduction: Any, of_rows: bool
) -> None:
    metric = metric_with(package, add_count, total=(default, reduction))
    assert is_of_rows(from_torchmetrics(metric, ["value"])) == of_rows
    assert is_of_rows(from_torchmetrics(metric, ["value"], by_rows=True))


def test_totals_may_grow_beyond_a_states_own_type(package: ModuleType) -> None:
    def update(self: Any, value: Tensor) -> None:
        self.total += value.sum().to(torch.int32)

    metric = from_torchmetrics(metric_with(package, update, total=(ZERO.int(), "sum")), ["value"])
    large = {"value": torch.tensor([2**30, 2**29])}
    assert of_batches(metric, large, large, large).values == {"Own": 3 * (2**30 + 2**29)}


def test_a_float32_total_grows_beyond_its_fraction() -> None:
    metric = from_torchmetrics("SumMetric()", ["value"])
    found = of_batches(metric, {"value": torch.tensor([2.0**25])}, *[{"value": torch.tensor([1.0])}] * 8)
    assert found.values == {"SumMetric": 2.0**25 + 8}


def test_double_columns_keep_their_bits(package: ModuleType) -> None:
    def update(self: Any, value: Tensor) -> None:
        self.total = self.total + value.sum()

    metric = from_torchmetrics(metric_with(package, update, total=(ZERO.float(), "sum")), ["value"])
    values = [{"value": torch.tensor([value], dtype=torch.float64)} for value in (0.1, 0.2)]
    assert of_batches(metric, *values).values == {"Own": 0.1 + 0.2}


def test_a_value_kept_beside_the_states_is_refused() -> None:
    metric = from_torchmetrics("RootMeanSquaredErrorUsingSlidingWindow()", PAIR)
    pictures = {name: torch.rand(4, 3, 16, 16) for name in PAIR}
    with pytest.raises(UsageError, match=r"changes its attribute 'rmse_map'.*by_rows=True"):
        of_batches(metric, pictures)
    whole: Any = from_torchmetrics("RootMeanSquaredErrorUsingSlidingWindow()", PAIR, by_rows=True)
    assert whole.compute({name: values.numpy() for name, values in pictures.items()}).values


def test_an_update_that_reads_the_state_is_refused(package: ModuleType) -> None:
    def update(self: Any, value: Tensor) -> None:
        self.total = self.total * 2 + value.sum()

    metric = from_torchmetrics(metric_with(package, update, total=(ZERO, "sum")), ["value"])
    with pytest.raises(UsageError, match=r"does not add to its state 'total'.*by_rows=True"):
        of_batches(metric, {"value": torch.tensor([1, 2, 3])})


def mean_of_means(self: Any, value: Tensor) -> None:
    self.total += value.mean()
    self.count += 1


def mean_of_spreads(self: Any, value: Tensor) -> None:
    self.total += value.std() * len(value)
    self.count += len(value)


@pytest.mark.parametrize("update", [mean_of_means, mean_of_spreads])
def test_a_value_that_depends_on_the_batches_is_refused(package: ModuleType, update: Any) -> None:
    """From all rows it gets these in one update, however many they are."""
    values = torch.arange(10_000.0) ** 2
    own = metric_with(package, update, total=(ZERO.float(), "sum"), count=(ZERO, "sum"))
    type(own).compute = lambda self: self.total / self.count
    with pytest.raises(UsageError, match=r"the value of Own depends on the batches.*by_rows=True"):
        of_batches(from_torchmetrics(type(own)(), ["value"]), {"value": values[:40]})
    found: Any = from_torchmetrics(type(own)(), ["value"], by_rows=True)
    wanted = values.mean() if update is mean_of_means else values.std()
    assert found.compute({"value": values.numpy()}).values["Own"] == pytest.approx(float(wanted))


def test_a_count_of_batches_that_no_value_reads_is_allowed(package: ModuleType) -> None:
    def update(self: Any, value: Tensor) -> None:
        self.total += value.sum()
        self.batches += 1

    own = metric_with(package, update, total=(ZERO.float(), "sum"), batches=(ZERO, "sum"))
    assert of_batches(from_torchmetrics(own, ["value"]), {"value": torch.ones(7)}).values == {"Own": 7}


def test_an_attribute_that_a_later_batch_changes_is_refused(package: ModuleType) -> None:
    def update(self: Any, value: Tensor) -> None:
        self.total += len(value)
        if value.max() > 2:
            self.bad = 1

    metric = from_torchmetrics(metric_with(package, update, total=(ZERO, "sum")), ["value"])
    with pytest.raises(UsageError, match=r"changes its attribute 'bad'.*by_rows=True"):
        of_batches(metric, {"value": torch.tensor([1, 2])}, {"value": torch.tensor([1, 3])})


@pytest.mark.parametrize(
    ("default", "reduction", "becomes", "message"),
    [
        (ZERO, "sum", torch.tensor(0.5), r"is of torch.float32 after an update, expected integers"),
        (ZERO, "sum", torch.tensor([1, 2]), r"is of shape \(2,\) after an update"),
        (ZERO, "sum", 3, r"is a int after an update"),
        (torch.tensor(1.0), "mean", torch.tensor(2.0), r"is 2.0 after an update, expected 1.0"),
    ],
)
def test_a_state_that_becomes_another_is_refused(
    package: ModuleType, default: Any, reduction: Any, becomes: Any, message: str
) -> None:
    def update(self: Any, value: Tensor) -> None:
        self.total = becomes
        self.count = self.count + len(value)

    metric = metric_with(package, update, total=(default, reduction), count=(ZERO, "sum"))
    with pytest.raises(UsageError, match=message):
        of_batches(from_torchmetrics(metric, ["value"]), {"value": torch.tensor([1])})


def test_an_error_leaves_the_ledger_as_it_was() -> None:
    metric: Any = from_torchmetrics("MulticlassConfusionMatrix(3)", PAIR)
    ledger = torch.zeros(metric.size, dtype=torch.int64)
    with pytest.raises(UsageError, match=r"refuses its columns .*preds has the class 7, not 0 to 2"):
        metric.update(ledger, {"preds": torch.tensor([0, 7]), "target": torch.tensor([0, 1])})
    assert not ledger.any()


def test_the_metric_that_was_given_is_left_alone(package: ModuleType) -> None:
    given = package.classification.BinaryAccuracy()
    given.update(torch.tensor([1, 1]), torch.tensor([1, 0]))
    metric = from_torchmetrics(given, PAIR)
    one = {"preds": torch.tensor([1, 0, 1]), "target": torch.tensor([1, 0, 1])}
    assert of_batches(metric, one).values == {"BinaryAccuracy": 1.0}
    assert float(given.compute()) == 0.5


@pytest.mark.parametrize("by_rows", [False, True])
def test_a_process_group_is_never_asked(package: ModuleType, by_rows: bool) -> None:
    """In a script's own process group the other ranks would be waited for, and they do not compute."""

    def gather(*arguments: Any) -> Any:
        raise AssertionError("this metric has spoken with other processes")

    given = package.MeanMetric(distributed_available_fn=lambda: True, dist_sync_fn=gather)
    metric: Any = from_torchmetrics(given, ["value"], by_rows=by_rows)
    value = {"value": torch.tensor([1.0, 3.0])}
    found = metric.compute(value) if by_rows else of_batches(metric, value)
    assert found.values == {"MeanMetric": 2.0}


def test_an_update_is_the_same_whatever_the_process_is_set_to(package: ModuleType) -> None:
    """One thread, and no deterministic algorithms, with which TorchMetrics counts in a table of all pairs."""
    seen: list[tuple[int, int]] = []

    def update(self: Any, value: Tensor) -> None:
        seen.append((torch.get_deterministic_debug_mode(), torch.get_num_threads()))
        self.total = self.total + len(value)

    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    torch.set_num_threads(2)
    try:
        metric = from_torchmetrics(metric_with(package, update, total=(ZERO, "sum")), ["value"])
        of_batches(metric, {"value": torch.arange(64)})
        assert (torch.get_deterministic_debug_mode(), torch.get_num_threads()) == (1, 2)
    finally:
        torch.set_deterministic_debug_mode(mode)
    assert set(seen) == {(0, 1)}


def test_rows_are_updated_in_pieces_of_one_size(package: ModuleType) -> None:
    sizes: list[int] = []

    def update(self: Any, value: Tensor) -> None:
        sizes.append(len(value))
        self.total = torch.maximum(self.total, value.max())

    metric: Any = from_torchmetrics(metric_with(package, update, total=(ZERO, "max")), ["value"])
    rows = torch.arange(9000).numpy()
    rows.flags.writeable = False
    assert metric.compute({"value": rows}).values == {"Own": 8999}
    assert sizes == [4096, 4096, 808]


def test_a_bootstrap_draws_the_same_each_time(package: ModuleType) -> None:
    own = package.wrappers.BootStrapper(package.MeanMetric(), num_bootstraps=4)
    metric: Any = from_torchmetrics(own, ["value"])
    value = {"value": torch.arange(50.0)}
    before = torch.get_rng_state()
    found = metric.compute(value).values
    assert found == metric.compute(value).values
    assert torch.equal(before, torch.get_rng_state())
    assert found["std"] > 0


# -- what TorchMetrics decides by what is in an update


def near_one(*shape: int) -> Tensor:
    """Scores of which a few lie outside 0 to 1."""
    return torch.rand(400, *shape, generator=torch.Generator().manual_seed(1)) * 1.2 - 0.1


def labels_of(*shape: int, below: int = 2) -> Tensor:
    return torch.randint(below, (400, *shape), generator=torch.Generator().manual_seed(2))


# By call the scores, of which a few lie outside 0 to 1, and the labels.
DECIDED: dict[str, tuple[Tensor, Tensor]] = {
    **dict.fromkeys(
        ("BinaryF1Score()", "BinaryConfusionMatrix()", "BinaryAUROC()", "BinaryAUROC(thresholds=50)"),
        (near_one(), labels_of()),
    ),
    **dict.fromkeys(("BinaryHingeLoss()", "BinaryCalibrationError()"), (near_one(), labels_of())),
    **dict.fromkeys(
        ("MulticlassHingeLoss(3)", "MulticlassROC(3, thresholds=5)"), (near_one(3), labels_of(below=3))
    ),
    **dict.fromkeys(
        ("MultilabelF1Score(3)", "MultilabelCoverageError(3)", "MultilabelRankingLoss(3)"),
        (near_one(3), labels_of(3)),
    ),
    "BinaryF1Score(multidim_average='samplewise')": (near_one(5), labels_of(5)),
    "MultilabelF1Score(3, multidim_average='samplewise')": (near_one(3, 5), labels_of(3, 5)),
}


@pytest.mark.parametrize("call", DECIDED)
def test_no_value_depends_on_the_batch_size(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    preds, target = DECIDED[call]
    whole, _, _ = read(call)
    whole.update(preds.double() if "Hinge" in call else preds, target)
    wanted = whole.compute()
    made: Any = from_torchmetrics(call, PAIR)
    for size in (1, 16, 399, 400):
        if is_of_rows(made):
            monkeypatch.setattr(routes, "_PIECE_ROWS", max(size, 2))
            found = made.compute({"preds": preds.numpy(), "target": target.numpy()})
        else:
            starts = range(0, 400, size)
            found = of_batches(
                made, *({"preds": preds[at : at + size], "target": target[at : at + size]} for at in starts)
            )
        [value] = found.values.values()
        by_part: Any = value if isinstance(wanted, tuple) else [value]
        for one, other in zip(wanted if isinstance(wanted, tuple) else [wanted], by_part, strict=True):
            torch.testing.assert_close(torch.tensor(other), one, rtol=1e-6, atol=1e-6, check_dtype=False)


def test_scores_within_0_to_1_stay_probabilities() -> None:
    preds, target = torch.tensor([0.3, 0.6, 0.9]), torch.tensor([0, 1, 1])
    made = from_torchmetrics("BinaryAccuracy()", PAIR)
    batches = [{"preds": preds[at : at + 1], "target": target[at : at + 1]} for at in range(3)]
    assert of_batches(made, *batches).values == {"BinaryAccuracy": 1.0}
    with pytest.raises(UsageError, match=r"preds holds a NaN\."):
        of_batches(made, {"preds": torch.tensor([torch.nan]), "target": torch.tensor([1])})


def test_r2_of_floats_far_from_zero_is_exact() -> None:
    """R2 of float32 values near -311,030, whose squares a float32 cannot tell apart."""
    draw = torch.Generator().manual_seed(0)
    target = torch.randn(2000, generator=draw) * 7 - 311030
    preds = target + torch.randn(2000, generator=draw) * 3
    error, spread = (
        (preds.double() - target).square().sum(),
        (target.double() - target.double().mean()).square().sum(),
    )
    for call, wanted in (("R2Score()", 1 - error / spread), ("RelativeSquaredError()", error / spread)):
        for size in (16, 2000):
            batches = [
                {"preds": preds[at : at + size], "target": target[at : at + size]}
                for at in range(0, 2000, size)
            ]
            [value] = of_batches(from_torchmetrics(call, PAIR), *batches).values.values()
            assert value == pytest.approx(wanted.item(), abs=1e-6)
    # A number that scores are compared with is of their precision.
    tenths = {"preds": torch.tensor([0.3, 0.4]), "target": torch.tensor([1, 1])}
    found = of_batches(from_torchmetrics("BinaryAccuracy(threshold=0.3)", PAIR), tenths)
    assert found.values == {"BinaryAccuracy": 0.5}


@pytest.mark.parametrize(("preds", "target"), [(-1, 0), (4, 0), (1, -1), (1, 4)])
def test_a_class_that_is_none_is_never_another_one(preds: int, target: int) -> None:
    """Of few samples TorchMetrics looks at their number alone."""
    made = from_torchmetrics("MulticlassAccuracy(4)", PAIR)
    with pytest.raises(UsageError, match=r"has the class (4|-1), not 0 to 3( \(-1 means a NaN logit.*\))?\."):
        of_batches(made, {"preds": torch.tensor([preds]), "target": torch.tensor([target])})
    ignoring = from_torchmetrics("MulticlassAccuracy(4, ignore_index=-1)", PAIR)
    assert of_batches(ignoring, {"preds": torch.tensor([1, 1]), "target": torch.tensor([1, -1])}).values


def test_arguments_taken_from_the_values_of_an_update_are_asked_for() -> None:
    with pytest.raises(UsageError, match=r"StructuralSimilarityIndexMeasure: give it data_range"):
        from_torchmetrics("StructuralSimilarityIndexMeasure()", PAIR)
    dice: Any = from_torchmetrics("DiceScore(3)", PAIR)
    maps = torch.zeros(2, 16, dtype=torch.int64).numpy()
    with pytest.raises(UsageError, match=r"Of classes, give it input_format='index'"):
        dice.compute({"preds": maps, "target": maps})


def test_probabilities_that_cannot_be_ranked_are_warned_of() -> None:
    made: Any = from_torchmetrics("MulticlassAUROC(2)", ["probabilities", "target"])
    for margin, count in ((30.0, 0), (40.0, 3)):
        logits = torch.tensor([[0, margin], [0, margin + 1], [margin + 2, 0]], dtype=torch.float64)
        rows = {"probabilities": logits.softmax(1).numpy(), "target": torch.tensor([1, 1, 0]).numpy()}
        said = " ".join(made.compute(rows).warnings)
        assert (f"{count} samples have a probability that is rounded to 1" in said) == bool(count)


# -- exact sums side by side -------------------------------------------------------------------------


def test_each_sum_is_exact_and_rounded_once() -> None:
    """Over all exponents, subnormal numbers among them, of both signs; in any order and division."""
    draw = torch.Generator().manual_seed(3)
    exponents = torch.randint(-1075, 1022, (40, 4), generator=draw)
    fractions = torch.rand(40, 4, generator=draw, dtype=torch.float64) - 0.5
    limits = torch.finfo(torch.float64)
    extreme = torch.tensor([[limits.max, limits.smallest_normal, 5e-324, -0.0]] * 3, dtype=torch.float64)
    for rows in (torch.ldexp(fractions, exponents), extreme):
        slots = summed(rows)
        for place, found in enumerate(each_rounded(slots).tolist()):
            total = sum((Fraction(value) for value in rows[:, place].tolist()), Fraction())
            assert found == (math.inf if total > Fraction(limits.max) else float(total))
        assert torch.equal(slots, summed(rows.flip(0)))
        assert torch.equal(each_rounded(summed(rows[:2]) + summed(rows[2:])), each_rounded(slots))
        assert not summed(torch.cat([rows, -rows])).any()


def test_sums_of_nan_and_infinities_are_nan_or_infinite() -> None:
    slots = summed(torch.tensor([[math.nan, math.inf, -math.inf, math.inf], [1.0, 1.0, 1.0, -math.inf]]))
    nan, positive, negative, both = each_rounded(slots).tolist()
    assert (math.isnan(nan), positive, negative, math.isnan(both)) == (True, math.inf, -math.inf, True)
    assert slots[:, :3].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 1]]


def summed(rows: Tensor) -> Tensor:
    slots = torch.zeros(rows.shape[1], SUM_SLOTS, dtype=torch.int64)
    for row in rows:
        add_each(slots, row)
    return slots


# -- values ------------------------------------------------------------------------------------------


def test_values_by_key_are_metrics_and_nonfinite_ones_are_counted() -> None:
    said = {"preds": Text(["a b"]), "target": Text(["a b"]), "id": Text(["1"])}
    columns = {
        "preds": [{"prediction_text": "preds", "id": "id"}],
        "target": [{"answers": {"answer_start": ["start"], "text": ["target"]}, "id": "id"}],
    }
    squad = {**said, "start": torch.tensor([0])}
    assert of_batches(from_torchmetrics("SQuAD()", columns), squad).values == {
        "exact_match": 100.0,
        "f1": 100.0,
    }
    named = of_batches(from_torchmetrics("SQuAD()", columns, name="qa"), squad)
    assert named.values == {"qa_exact_match": 100.0, "qa_f1": 100.0}
    assert named.directions == {"qa_exact_match": "higher", "qa_f1": "higher"}

    psnr = from_torchmetrics("PeakSignalNoiseRatio(data_range=1.0)", PAIR)
    same = of_batches(psnr, {name: torch.zeros(2) for name in PAIR})
    assert same.values == {"PeakSignalNoiseRatio": None}
    assert same.nonfinite == {"PeakSignalNoiseRatio": {"pos_inf": 1}}
    assert "is not finite (1 pos_inf)" in same.warnings[0]
    per_class = from_torchmetrics("MulticlassRecall(2, average=None)", PAIR)
    classes = {name: torch.tensor([0, 1, 1]) for name in PAIR}
    assert of_batches(per_class, classes).values == {"MulticlassRecall": [1.0, 1.0]}


def test_without_samples_there_is_no_value() -> None:
    metric: Any = from_torchmetrics("MeanMetric()", ["value"])
    assert metric.compute(torch.zeros(metric.size, dtype=torch.int64)).values == {"MeanMetric": None}


def test_a_warning_of_torchmetrics_is_in_the_result() -> None:
    """A class without a sample counts as 0 in its mean."""
    metric: Any = from_torchmetrics("MulticlassAUROC(3)", PAIR)
    preds = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1]])
    [said] = metric.compute({"preds": preds.numpy(), "target": torch.tensor([0, 1]).numpy()}).warnings
    assert said.startswith("MulticlassAUROC: TorchMetrics warns: No positive samples in targets")


def test_without_torchmetrics_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"not installed\. Type: pip install 'dualeval.torchmetrics.'"):
        from_text("torchmetrics:MeanMetric()")


@pytest.mark.long
def test_all_classes_have_torchmetrics_own_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Torch sets it where one of the classes imports its compiler.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import torchmetrics_routes

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = torchmetrics_routes.page()
    assert "| `MulticlassAccuracy` | `num_classes=3` | integer sums in the ledger |  |" in text
    assert "| `MeanMetric` |  | exact sums of floats in the ledger |  |" in text
