"""Intervals by clusters: against their definition, and in the results of runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dualeval
from dualeval.columns.ragged import Text, to_rows
from dualeval.engine.scoring.rescoring import verify
from dualeval.errors import UsageError
from dualeval.metrics import Mean, Measured, Metric, Ratio, RowMetric, Score, TopK
from dualeval.metrics.clusters import ClusterIntervals, Clusters, cluster_intervals, degrees_of_freedom
from dualeval.metrics.intervals import few_decide, student_95, wilson_interval
from tests.vehicles.measuring import ledger_of
from tests.vehicles.squad_files import question

GENERATOR = np.random.default_rng(5)
CLUSTER = GENERATOR.integers(0, 40, 500)
ROWS = {
    "cluster": CLUSTER,
    "right": GENERATOR.random(500) < GENERATOR.random(40)[CLUSTER],
    "loss": GENERATOR.lognormal(size=500) * GENERATOR.lognormal(size=40)[CLUSTER],
    "tokens": GENERATOR.integers(1, 30, 500),
}


def robust(rows: dict[str, Any], value: float, score: Score, unit: str | None = None) -> ClusterIntervals:
    units = {} if unit is None else {"x": unit}
    return cluster_intervals("cluster", rows, {"x": value}, {"x": score}, units)


def by_definition(score: Score) -> tuple[float, float, float, float]:
    """Ratio, variance, skewness and degrees of freedom, with whole matrices."""
    y, x, _ = score.terms(ROWS)
    ratio = y.sum() / x.sum()
    residuals = np.array([(y - ratio * x)[g == CLUSTER].sum() for g in range(40)]) / x.sum()
    shares = np.array([x[g == CLUSTER].sum() for g in range(40)]) / x.sum()
    centring = np.eye(40) - np.outer(np.ones(40), shares)
    form = centring.T @ np.diag(shares**2 / (1 - shares)) @ centring
    degrees = np.trace(form) ** 2 / np.trace(form @ form)
    skewness = math.sqrt(40) * (residuals**3).sum() / (residuals**2).sum() ** 1.5
    return ratio, float((residuals**2 / (1 - shares)).sum()), skewness, float(degrees)


@pytest.mark.parametrize("score", [Score(column="loss"), Score(column="loss", weight="tokens", factor=100.0)])
def test_unbounded_values_have_halls_interval_by_definition(score: Score) -> None:
    ratio, variance, skewness, degrees = by_definition(score)
    found = robust(ROWS, 1.0, score)
    assert found.count == 40
    skew, error = skewness / math.sqrt(40), math.sqrt(variance)
    ends = []
    for quantile in (student_95(degrees), -student_95(degrees)):
        ends.append(ratio - error * (np.cbrt(1 + skew * (quantile - skew / 6)) - 1) * 3 / skew)
    assert found.intervals["x"] == pytest.approx([score.factor * end for end in ends])
    # Few clusters are far larger than the others.
    assert (found.rough, found.warnings) == ({"x": few_decide(40, skewness, "clusters")}, ())
    assert found.rough["x"] is not None


def test_values_of_0_to_1_have_a_wilson_interval_of_effective_numbers() -> None:
    score = Score(column="right")
    ratio, variance, _, degrees = by_definition(score)
    alike = ratio * (1 - ratio) / variance
    assert alike < 500
    # Kish's effective numbers: of clusters, and of those with a wrong answer; as the ratio is above 1/2.
    sizes = np.bincount(CLUSTER)
    wrong = sizes - np.bincount(CLUSTER, ROWS["right"])
    assert ratio > 0.5
    clusters, known = 500**2 / (sizes**2).sum(), (wrong.sum() ** 2 / (wrong**2).sum()) ** 2
    alike = (known + 3) / (known / alike + 3 / clusters)
    found = robust(ROWS, ratio, score, "fraction")
    assert found.intervals["x"] == pytest.approx(wilson(ratio, alike, degrees))
    assert found.rough == {}
    # It is wider than that of as many independent samples.
    low, high = wilson_interval(int(ROWS["right"].sum()), 500)
    assert found.intervals["x"][0] < low < high < found.intervals["x"][1]


def wilson(ratio: float, alike: float, degrees: float) -> tuple[float, float]:
    square = student_95(degrees) ** 2
    centre = (alike * ratio + square / 2) / (alike + square)
    half_width = math.sqrt(square * (alike * ratio * (1 - ratio) + square / 4)) / (alike + square)
    return centre - half_width, centre + half_width


@pytest.mark.parametrize("right", [0, 20, 50], ids=["all wrong", "20 of 50 right", "all right"])
def test_clusters_that_do_not_differ_are_as_many_as_they_are(right: int) -> None:
    """10 clusters of 50 say as much as 10 samples, not as 500."""
    rows = {"cluster": np.repeat(np.arange(10), 50), "right": np.tile(np.arange(50) < right, 10)}
    found = robust(rows, right / 50, Score(column="right"), "fraction")
    assert found.intervals["x"] == pytest.approx(wilson(right / 50, 10, 9))
    # As many clusters have a wrong answer as there are, or none.
    assert bool(found.rough) == (right != 20)


@pytest.mark.parametrize("mirrored", [False, True], ids=["wrong", "right"])
def test_few_clusters_with_a_wrong_answer_are_rough(mirrored: bool) -> None:
    """Their effective number counts, though each of 100 clusters has 20 samples."""
    wrong = np.zeros((100, 20), np.bool_)
    wrong[:4, :10] = True
    for few in (5, 4):
        wrong[4] = np.arange(20) < (10 if few == 5 else 1)
        rows = {"cluster": np.repeat(np.arange(100), 20), "right": wrong.ravel() == mirrored}
        found = robust(rows, rows["right"].mean(), Score(column="right"), "fraction")
        low, high = found.intervals["x"]
        assert low < 0.96 < high or low < 0.04 < high
        which = "above 0 %" if mirrored else "below 100 %"
        said = f"about 4.1 of 100 clusters have values {which}, and with fewer than 5 it may be"
        assert found.rough == ({} if few == 5 else {"x": said + " too short: evaluate more clusters"})


def test_a_transform_is_that_of_the_ends() -> None:
    plain = robust(ROWS, 1.0, Score(column="loss")).intervals["x"]
    found = robust(ROWS, 1.0, Score(column="loss", transform="log")).intervals["x"]
    assert found == pytest.approx([math.log(end) for end in plain])


def test_clusters_of_one_sample_have_the_interval_of_independent_samples() -> None:
    rows = {**ROWS, "cluster": np.arange(500)}
    columns = {"loss": torch.from_numpy(ROWS["loss"]), "tokens": torch.from_numpy(ROWS["tokens"])}
    metric = Mean("loss")
    measured = metric.compute(ledger_of(metric, columns))
    found = robust(rows, 1.0, Score(column="loss")).intervals["x"]
    assert found == pytest.approx(measured.intervals["loss"], rel=1e-12)
    assert degrees_of_freedom(np.full(7, 1 / 7)) == pytest.approx(6)


def test_the_same_clusters_by_any_name() -> None:
    wanted = robust(ROWS, 1.0, Score(column="loss"))
    texts = to_rows(Text(f"patient {number}" for number in CLUSTER))
    for column in (CLUSTER.astype(np.int16) - 20, CLUSTER * (2**62 // 20) - 2**62, texts):
        assert robust({**ROWS, "cluster": column}, 1.0, Score(column="loss")).count == 40
        found = robust({**ROWS, "cluster": column}, 1.0, Score(column="loss")).intervals["x"]
        assert found == pytest.approx(wanted.intervals["x"], rel=1e-12)
    assert Clusters(np.array([True, False, True])).count == 2
    assert Clusters(np.array([], np.int64)).count == 0


def test_only_samples_that_count_make_clusters() -> None:
    rows = {**ROWS, "chosen": CLUSTER < 7}
    found = robust(rows, 0.5, Score(column="right", where="chosen", factor=100.0), "percent")
    said = (
        "about 4.6 of 7 clusters have values above 0 %, and with fewer than 5 it may be too short: evaluate "
        "more clusters"
    )
    assert found.rough == {"x": said}
    within = {name: column[CLUSTER < 7] for name, column in ROWS.items()}
    alone = robust(within, 0.5, Score(column="right"), "fraction").intervals["x"]
    assert found.intervals["x"] == pytest.approx([100 * end for end in alone])
    assert robust(within, 0.5, Score(column="loss")).rough == {
        "x": "it comes from 7 clusters, and with fewer than 30 it may be too short: evaluate more clusters"
    }


def test_columns_that_show_nothing_have_no_interval_and_a_warning() -> None:
    def said(value: float, **columns: Any) -> tuple[str, ...]:
        rows = {**ROWS, **columns}
        found = robust(rows, value, Score(column="loss"))
        assert found.intervals == {}
        return found.warnings

    one = np.zeros(500, np.int64)
    assert said(1.0, cluster=one) == ("no interval of x by cluster: all samples are in one cluster",)
    [sentence] = said(0.1, loss=np.full(500, 0.1))
    assert sentence.startswith("no interval of x by cluster: its 40 clusters are all equal")
    # A metric without a value has none.
    assert cluster_intervals("cluster", ROWS, {"x": None}, {"x": Score(column="loss")}, {}).intervals == {}


# -- in the results of runs ------------------------------------------------------------------------------

SAMPLES = [
    (torch.tensor([float(value)]), int(number)) for value, number in zip(ROWS["loss"], CLUSTER, strict=True)
]


def observe(outputs: Tensor, batch: Any) -> dict[str, Any]:
    numbers = batch[1]
    return {
        "loss": outputs[:, 0],
        "rows": outputs[:, :1],
        "zero": torch.zeros(len(numbers)),
        "rank": (outputs[:, 0] > 1).int(),
        "patient": numbers,
        "site": [f"site {number % 12}" for number in numbers.tolist()],
    }


class Scored:
    """The mean loss, with a score that a user has written."""

    name, columns, size = "scored", ("loss",), 2

    def __init__(self, score: Score) -> None:
        self._score = score

    def update(self, ledger: Tensor, columns: dict[str, Tensor]) -> None:
        ledger[0] += len(columns["loss"])
        ledger[1] += int((columns["loss"] * 1024).sum())

    def compute(self, ledger: Tensor) -> Measured:
        samples, total = ledger.tolist()
        mean = total / 1024 / samples
        return Measured(values={"scored": mean}, intervals={"scored": (0, 2)}, scores={"scored": self._score})


class Bare:
    """A metric that gives an interval and no score."""

    name, columns, size = "bare", ("loss",), 1

    def update(self, ledger: Tensor, columns: dict[str, Tensor]) -> None:
        ledger += len(columns["loss"])

    def compute(self, ledger: Tensor) -> Measured:
        return Measured(values={"bare": 1.0}, intervals={"bare": (0.0, 2.0)})


METRICS: list[Metric | RowMetric] = [Mean("loss"), TopK(1)]


def evaluate(**options: Any) -> dualeval.Result:
    options = {"metrics": METRICS, "launcher": "none", "device": "cpu", **options}
    model = nn.Identity().eval()
    return dualeval.evaluate(
        model=model, data=SAMPLES, forward=lambda model, batch: model(batch[0]), observe=observe, **options
    )


def test_a_run_by_clusters_has_the_same_metrics_and_other_intervals(tmp_path: Path) -> None:
    independent = evaluate()
    assert (independent.naive_intervals, independent.clusters) == ({}, {})
    in_memory = evaluate(cluster="patient")
    written = evaluate(cluster="patient", out=tmp_path)
    again = evaluate(cluster="patient", out=tmp_path)
    assert again.earlier
    for result in (in_memory, written):
        assert result.metrics_digest == independent.metrics_digest
        assert result.clusters == {"column": "patient", "count": 40}
        assert result.naive_intervals == independent.intervals
        assert result.intervals == in_memory.intervals != independent.intervals
    assert json.loads(again.to_json())["intervals"] == json.loads(written.to_json())["intervals"]
    # From the rows: the same, or by another column.
    assert all(not check.differences for check in verify(tmp_path, METRICS))
    assert dualeval.rescore(tmp_path, metrics=METRICS).intervals == written.intervals
    by_site = dualeval.rescore(tmp_path, metrics=METRICS, cluster="site")
    assert by_site.clusters == {"column": "site", "count": 12}
    assert by_site.intervals != written.intervals
    assert (
        "the interval of loss is rough: it comes from 12 clusters, and with fewer than 30 it may be too "
        "short: "
        "evaluate more clusters" in by_site.warnings
    )
    with pytest.raises(
        UsageError, match=r"no such column\. The columns are loss, rows, zero, rank, patient, site"
    ):
        dualeval.rescore(tmp_path, metrics=METRICS, cluster="patients")
    with pytest.raises(UsageError, match=r"job\.cluster: patient there, site now"):
        evaluate(cluster="site", out=tmp_path)


def test_other_clusters_leave_no_warning_of_the_runs_own(tmp_path: Path) -> None:
    result = evaluate(metrics=[Mean("loss"), Bare()], cluster="site", out=tmp_path)
    assert len(result.warnings) == 2
    found = dualeval.rescore(tmp_path, metrics=[Mean("loss")], cluster="patient")
    # 40 patients, of which few decide; nothing of the 12 sites, nor of the other metric.
    [warning] = found.warnings
    assert "loss is rough: the value depends on about 3 of 40 clusters" in warning


def test_an_interval_that_knows_no_clusters_is_a_naive_one() -> None:
    result = evaluate(metrics=[Bare(), Ratio("loss", "patient")], cluster="patient")
    assert result.naive_intervals["bare"] == (0.0, 2.0)
    assert result.intervals.keys() == {"loss_per_patient"}
    assert any("no interval of bare by patient" in sentence for sentence in result.warnings)


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ("patients", "--cluster 'patients': there is no such column. The columns are loss, rows, zero, rank"),
        ("loss", r"--cluster 'loss': the column is torch.float32 with rows of shape \(\). Expected integers"),
        ("", "cluster '': expected the name of a column, or None"),
    ],
)
def test_a_column_that_makes_no_clusters_is_refused(cluster: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        evaluate(cluster=cluster)


def questions_on(articles: int, title: Callable[[int], Any]) -> dict[str, Any]:
    data = []
    for number in range(articles):
        qas = [question(f"{number}-{at}", ("one", 0)) for at in range(3)]
        data.append({**title(number), "paragraphs": [{"context": "one two", "qas": qas}]})
    return {"version": "1.1", "data": data}


@pytest.mark.parametrize(
    ("title", "count"),
    [
        (lambda number: {"title": f"T{number}"}, 12),
        (lambda number: {"title": f"T{number % 4}"}, 4),
        (lambda number: {}, 12),
        (lambda number: {"title": None}, 12),
    ],
    ids=["titles", "titles twice", "no titles", "null"],
)
def test_questions_on_one_article_go_together(
    tmp_path: Path, title: Callable[[int], Any], count: int
) -> None:
    from dualeval.tasks.given_answers import GivenAnswers

    data, answers = tmp_path / "data.json", tmp_path / "answers.json"
    data.write_text(json.dumps(questions_on(12, title)))
    answers.write_text(
        json.dumps({f"{n}-{at}": "one" if n % 3 else "two" for n in range(12) for at in range(3)})
    )
    task = GivenAnswers(data=data, predictions=answers)
    result = dualeval.evaluate(task, launcher="none", device="cpu")
    assert result.clusters == {"column": "article", "count": count}
    assert result.intervals["exact_match"] == result.intervals["f1"]
    low, high = result.naive_intervals["exact_match"]
    assert result.intervals["exact_match"][0] < low < high < result.intervals["exact_match"][1]
    # Those of every third are wrong, and of four articles of the same name some.
    assert result.rough["f1"].startswith("about 4 of 12 clusters have values below 100 %") == (count != 4)


@pytest.mark.parametrize("power", [-600, 600])
def test_values_whose_squares_no_float64_holds_have_scaled_intervals(power: int) -> None:
    own = robust(ROWS, 1.0, Score(column="loss"))
    scaled = robust({**ROWS, "loss": np.ldexp(ROWS["loss"], power)}, 1.0, Score(column="loss"))
    assert scaled.intervals == {"x": tuple(math.ldexp(end, power) for end in own.intervals["x"])}


def test_products_that_no_float64_holds_have_no_interval() -> None:
    rows = {**ROWS, "loss": np.full(500, 1e200), "tokens": np.full(500, 1e200)}
    found = robust(rows, 1.0, Score(column="loss", weight="tokens"))
    assert not found.intervals
    assert found.warnings == (
        "no interval of x by cluster: a sum of a cluster is beyond what a float64 holds",
    )


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (Score(column="loss", factor=7.0), "its score gives another value than its metric"),
        (Score(column="loss", over="zero"), "a sum of a cluster is beyond what a float64 holds"),
        (Score(column="losses"), "the run has not kept the column 'losses'"),
    ],
)
def test_a_score_that_does_not_fit_its_metric_makes_no_interval(score: Score, said: str) -> None:
    result = evaluate(metrics=[Scored(score)], cluster="patient")
    assert result.intervals == {}
    assert f"no interval of scored by patient: {said}" in result.warnings


def test_a_score_of_text_is_refused_on_the_first_batch() -> None:
    with pytest.raises(UsageError, match=r"score of 'scored' reads the column 'site', which is text"):
        evaluate(metrics=[Scored(Score(column="site"))], limit=64)
    with pytest.raises(UsageError, match="transform 'sin': expected one of exp, sqrt, log"):
        Score(column="loss", transform="sin")
