"""Two runs compared: intervals and tests against known numbers, what is refused, and the command."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from scipy import stats

import dualeval
from dualeval.comparison.statistics import LEVEL, ProportionDifference, mean_difference
from dualeval.errors import DualevalError, UsageError
from dualeval.metrics import Mean, Metric, Ratio, RowMetric
from dualeval.report.comparison import as_markdown, in_unit
from dualeval.result import PREDICTIONS, RESULT, STATUS, checksum_of
from tests.comparison.conftest import two_runs
from tests.engine.test_evaluator import evaluate
from tests.vehicles.tiny import TinyTask

ROOT = Path(__file__).resolve().parents[2]
COUNT = 600


class SeededTask(TinyTask):
    """A TinyTask with columns of its own."""

    def observe(self, outputs: Any, batch: Any) -> dict[str, Any]:
        columns = super().observe(outputs, batch)
        group = (batch["features"][:, 0] * 40).long()
        return {**columns, "group": group, "tokens": group % 7 + 1, "early": group < 12}

    def metrics(self) -> list[Metric | RowMetric]:
        return [
            *super().metrics(),
            Ratio("loss", "tokens", transform="exp", name="perplexity"),
            Ratio("loss", "tokens", transform="sqrt", name="root"),
            Ratio("loss", "tokens", transform="log", name="log"),
            Ratio("loss", "tokens", name="plain"),
            Mean("group", name="same"),
            Mean("early", name="no_direction"),
        ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return two_runs(tmp_path_factory.mktemp("runs"), lambda seed: SeededTask(COUNT, seed=seed))


def table_of(run: Path) -> Any:
    return pyarrow.parquet.read_table(run / PREDICTIONS).to_pandas()


def changed(
    run: Path,
    out: Path,
    rows: Callable[[Any], Any] = lambda table: table,
    *,
    row_group_size: int | None = None,
    **fields: Any,
) -> Path:
    """A copy of a run with other rows, or another result.json."""
    out.mkdir()
    (out / STATUS).write_bytes((run / STATUS).read_bytes())
    (out / "job.json").write_bytes((run / "job.json").read_bytes())
    table = rows(pyarrow.parquet.read_table(run / PREDICTIONS))
    pyarrow.parquet.write_table(table, out / PREDICTIONS, row_group_size=row_group_size)
    content = json.loads((run / RESULT).read_text())
    content["files"][PREDICTIONS] = checksum_of(out / PREDICTIONS)
    (out / RESULT).write_text(json.dumps({**content, **fields}))
    return out


def put(rows: Any, name: str, column: Any) -> Any:
    """Rows with another column of a name."""
    return rows.set_column(rows.schema.get_field_index(name), name, pyarrow.array(column))


# -- two runs --------------------------------------------------------------------------------------


def test_values_differences_and_flips_are_those_of_the_rows(runs: tuple[Path, Path]) -> None:
    found = dualeval.compare(*runs)
    a, b = map(table_of, runs)
    results = [json.loads((run / RESULT).read_text())["metrics"] for run in runs]
    assert found.pairs == COUNT and found.failed == {"in_a": 0, "in_b": 0, "in_both": 0}
    for name, metric in found.metrics.items():
        assert (metric.a, metric.b) == pytest.approx((results[0][name], results[1][name]), rel=1e-14)
        assert metric.difference == pytest.approx(metric.b - metric.a)
        assert metric.interval[0] <= metric.difference <= metric.interval[1]
    top1, loss = found.metrics["top1"], found.metrics["loss"]
    right = a["rank"] == 0, b["rank"] == 0
    lost, gained = a["id"][right[0] & ~right[1]], a["id"][~right[0] & right[1]]
    assert top1.flips is not None
    assert list(top1.flips.lost) == list(lost) and list(top1.flips.gained) == list(gained)
    assert top1.p_exact == stats.binomtest(len(lost), len(lost) + len(gained)).pvalue
    assert found.agreement == (a["prediction"] == b["prediction"]).sum()
    d = (b["loss"].astype(float) - a["loss"]).to_numpy()
    assert (loss.test, loss.direction, loss.samples) == ("paired t and Hall's", "lower", COUNT)
    assert loss.clusters is None and loss.flips is None and loss.p_exact is None
    expected = mean_difference(d.mean(), (d - d.mean()) / COUNT).bounds(0.025)
    assert loss.interval == pytest.approx(expected, rel=1e-9)
    assert found.metrics["same"].verdict == "the same on every sample"
    assert (found.metrics["same"].p, found.metrics["same"].interval) == (1.0, (0.0, 0.0))
    assert "not an average of per-sample values" in found.not_compared["ece"]
    assert found.metrics["top1"].p_holm >= found.metrics["top1"].p


@pytest.mark.parametrize(
    ("name", "transform"),
    [("perplexity", math.exp), ("root", math.sqrt), ("log", math.log), ("plain", float)],
)
def test_a_ratio_with_a_transform_agrees_with_the_jackknife(
    runs: tuple[Path, Path], name: str, transform: Callable[[float], float]
) -> None:
    a, b = map(table_of, runs)
    tokens, sums = a["tokens"].to_numpy(float), [run["loss"].to_numpy(float) for run in (a, b)]

    def difference(chosen: Any) -> float:
        one, other = (transform(loss[chosen].sum() / tokens[chosen].sum()) for loss in sums)
        return other - one

    found = dualeval.compare(*runs, metrics=[name]).metrics[name]
    assert found.difference == pytest.approx(difference(np.ones(COUNT, bool)))
    without = [difference(np.arange(COUNT) != left) for left in range(COUNT)]
    error = math.sqrt((COUNT - 1) * np.var(without))
    t, z = stats.t.ppf(0.975, COUNT - 1), stats.t.ppf(0.8, COUNT - 1)
    assert found.detectable == pytest.approx((t + z) * error, rel=0.01)
    plain = dualeval.compare(*runs, metrics=["plain"]).metrics["plain"]
    assert (found.p, found.verdict) == (plain.p, plain.verdict), "one hypothesis"


def test_a_worse_run_is_called_worse(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """Higher is better for top1, lower for the loss."""

    def worse(rows: Any) -> Any:
        rank = np.asarray(rows["rank"]).copy()
        rank[::4] = 6
        loss = np.asarray(rows["loss"]) + np.random.default_rng(0).random(COUNT, np.float32)
        return put(put(rows, "rank", rank), "loss", loss)

    bad = changed(runs[0], tmp_path / "bad", worse)
    found = dualeval.compare(runs[0], bad, gates={"top1": 0.5, "loss": 0.01})
    assert {found.metrics[name].verdict for name in ("top1", "loss")} == {"B is worse"}
    assert found.metrics["top1"].difference < 0 < found.metrics["loss"].difference
    assert [gate.passed for gate in found.gates] == [True, False] and not found.passed
    other = changed(runs[0], tmp_path / "other", lambda rows: _flipped(rows, range(3)))
    assert dualeval.compare(runs[0], other).metrics["no_direction"].verdict == "no difference shown"
    other = changed(runs[0], tmp_path / "many", lambda rows: _flipped(rows, range(COUNT)))
    assert dualeval.compare(runs[0], other).metrics["no_direction"].verdict == "B is higher"
    back = dualeval.compare(bad, runs[0], gates={"top1": 0.0, "loss": 0.0})
    assert {back.metrics[name].verdict for name in ("top1", "loss")} == {"B is better"}
    assert back.passed and all(gate.bound < 0 for gate in back.gates)


def test_a_difference_that_few_samples_decide_is_rough(
    command: Callable[..., tuple[int, str, str]], runs: tuple[Path, Path], tmp_path: Path
) -> None:
    """In metrics, gates, those of groups, notes, on the screen and on the page; a gate passes as before."""

    def worse(rows: Any) -> Any:
        loss = np.asarray(rows["loss"]).copy()
        loss[:20] += 1
        return put(rows, "loss", loss)

    other = changed(runs[0], tmp_path / "other", worse)
    gates = {"loss": 1.0, "top1": 0.5, "worst:loss": 9.0}
    found = dualeval.compare(runs[0], other, gates=gates, by=("early",), skip_small=True)
    loss, top1 = found.metrics["loss"], found.metrics["top1"]
    effective = COUNT / (1 + stats.skew(np.arange(COUNT) < 20) ** 2)
    assert 20 < effective < 30
    why = (
        f"the value depends on about {math.floor(effective)} of {COUNT} samples, and with fewer than "
        "30 it may be too short: evaluate more samples"
    )
    assert (loss.rough, loss.verdict, loss.shown) == (why, "B is worse", "B is worse (rough)")
    assert (top1.rough, top1.shown) == (None, "the same on every sample")
    assert [(gate.metric, gate.passed, gate.rough) for gate in found.gates] == [
        ("loss", True, why),
        ("top1", True, None),
    ]
    assert found.passed and all(group.rough for group in found.worst_gates[0].groups)
    assert found.sentence.startswith("B is worse in loss (rough)")
    [note] = [note for note in found.notes if note.startswith("The interval of loss")]
    assert note.endswith(f" is rough: {why}.")
    words = ["--gate", "loss=1", "--gate", "worst:loss=9", "--by", "early", "--skip-small"]
    code, out, _ = command(runs[0], other, *words)
    assert code == 0 and "worse (rough)" in out
    del gates["top1"]
    same = dualeval.compare(runs[0], other, gates=gates, by=("early",), skip_small=True)
    assert str(same) == out.rstrip(), "print(dualeval.compare(...))"
    assert " worse; rough: few samples decide)" in " ".join(out.split())
    assert "in each group; rough, because few samples decide: " in " ".join(out.split())


def _flipped(rows: Any, places: range) -> Any:
    """Rows with the other value of the column early in some places."""
    early = np.asarray(rows["early"]).copy()
    early[list(places)] ^= True
    return put(rows, "early", early)


def test_a_gate_is_the_one_sided_bound(runs: tuple[Path, Path]) -> None:
    found = dualeval.compare(*runs)
    [bound] = [gate.bound for gate in dualeval.compare(*runs, gates={"top1": 0.99}).gates]
    flips = found.metrics["top1"].flips
    assert flips is not None
    counts = ProportionDifference(lost=len(flips.lost), gained=len(flips.gained), samples=COUNT)
    assert bound == -counts.bounds(LEVEL)[0]
    assert dualeval.compare(*runs, gates={"top1": bound}).passed
    assert not dualeval.compare(*runs, gates={"top1": math.nextafter(bound, 0)}).passed


def test_clusters_of_a_column_have_the_error_of_their_sums(runs: tuple[Path, Path]) -> None:
    found = dualeval.compare(*runs, cluster="group")
    top1 = found.metrics["top1"]
    a, b = map(table_of, runs)
    assert top1.clusters == a["group"].nunique() and top1.p_exact is None
    d = (b["rank"] == 0).astype(float) - (a["rank"] == 0)
    sums = (d - d.mean()).groupby(a["group"]).sum()
    error = math.sqrt(len(sums) / (len(sums) - 1) * (sums**2).sum()) / COUNT
    of_sums = mean_difference(d.mean(), sums.to_numpy() / COUNT)
    assert of_sums.error == pytest.approx(error)
    assert top1.interval == pytest.approx(of_sums.bounds(0.025))
    half = stats.t.ppf(0.975, len(sums) - 1) * error
    assert top1.interval[0] <= d.mean() - half and top1.interval[1] >= d.mean() + half - 1e-12
    assert top1.flips is not None and len(top1.flips.lost) == (d < 0).sum()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gates": {"top1": -0.1}}, "--gate top1=-0.1: expected a margin of 0 or more"),
        ({"gates": {"top1": math.nan}}, "expected a margin of 0 or more"),
        (
            {"gates": {"ece": 0.1}},
            "--gate ece: ece is not an average of .*, and cannot be compared; .* has loss, top1, top5",
        ),
        ({"gates": {"no_direction": 0.1}}, "does not say whether higher or lower is better"),
        ({"cluster": "nothing"}, r"--cluster nothing: the rows of .* have no such column"),
        ({"cluster": "top"}, "--cluster top: it has several values per sample"),
        ({"cluster": "loss"}, "--cluster loss: it is not the same in both runs"),
        ({"metrics": ["top3"]}, r"--metric top3: neither run has it\. .* has loss, top1, top5"),
        ({"metrics": ["ece"]}, "no metric that can be compared: ece: not an average"),
    ],
)
def test_wrong_options_are_refused(runs: tuple[Path, Path], options: Mapping[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        dualeval.compare(*runs, **options)


def test_clusters_without_a_flip_have_the_interval_of_samples(runs: tuple[Path, Path]) -> None:
    """Between clusters nothing varies, and other clusters may yet: as wide as for independent samples."""
    found = dualeval.compare(runs[0], runs[0], gates={"top1": 0, "loss": 0}, cluster="group")
    of_samples = ProportionDifference(lost=0, gained=0, samples=COUNT)
    top1 = found.metrics["top1"]
    assert top1.interval == of_samples.bounds(LEVEL / 2)
    assert (top1.p, top1.verdict, top1.detectable) == (1.0, "the same on every sample", None)
    assert [gate.passed for gate in found.gates] == [False, True]
    alone = dualeval.compare(*runs).metrics["top1"]
    clustered = dualeval.compare(*runs, cluster="group").metrics["top1"]
    assert clustered.interval[0] <= alone.interval[0] and clustered.interval[1] >= alone.interval[1]
    assert clustered.p >= alone.p
    assert (clustered.detectable or 0) >= (alone.detectable or 0) > 0


@pytest.mark.parametrize("size", ["5 samples", "600 samples", "clusters", "clusters and rounding"])
def test_equal_differences_show_no_spread(runs: tuple[Path, Path], tmp_path: Path, size: str) -> None:
    """No p-value of 0 and no interval without width: nothing says how far others may be."""

    def moved(rows: Any) -> Any:
        group = rows["group"].to_numpy()
        by: Any = np.float32(1)
        if size.startswith("clusters"):
            # Different within each cluster of two, and 1 in the mean of each.
            by = np.where(np.arange(len(rows)) % 2, 2.0, 0.0).astype(np.float32)
            group = np.arange(len(rows)) // 2
        rows = put(rows, "group", group)
        loss = rows["loss"].to_numpy() if size.endswith("rounding") else np.full(len(rows), 2, np.float32)
        both = [put(rows, "loss", each) for each in (loss, loss + by)]
        return [each.slice(0, 5) if size == "5 samples" else each for each in both]

    a = changed(runs[0], tmp_path / "moved a", lambda rows: moved(rows)[0])
    b = changed(runs[0], tmp_path / "moved b", lambda rows: moved(rows)[1])
    options: dict[str, Any] = {"cluster": "group"} if size.startswith("clusters") else {}
    of = "300 clusters" if options else size
    said = f"the differences of its {of} are all equal (1), and do not show how far others may be"
    found = dualeval.compare(a, b, **options)
    assert found.not_compared["loss"] == said and "loss" not in found.metrics
    with pytest.raises(UsageError, match="--gate loss: it cannot be compared: the differences of its"):
        dualeval.compare(b, a, gates={"loss": 2}, **options)
    assert dualeval.compare(a, a, **options).metrics["loss"].verdict == "the same on every sample"


def test_an_error_of_0_everywhere_is_no_proportion(runs: tuple[Path, Path], tmp_path: Path) -> None:
    exact = changed(runs[0], tmp_path / "exact", lambda rows: put(rows, "loss", np.zeros(COUNT, np.float32)))
    loss = dualeval.compare(exact, exact).metrics["loss"]
    assert (loss.flips, loss.interval, loss.test) == (None, (0.0, 0.0), "paired t and Hall's")
    units = {**json.loads((runs[0] / RESULT).read_text())["units"], "loss": "fraction"}
    wrong = changed(exact, tmp_path / "wrong", units=units)
    share = dualeval.compare(wrong, wrong).metrics["loss"]
    assert share.flips is not None and share.test == "McNemar mid-p" and share.interval[0] < 0


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ((1e30, -2e29, 3e29), "+1.000e+30 -2.00e+29 +3.00e+29"),
        ((1.0, 1 - 1e-12, 1 + 1e-12), "+1.000000000000e+00 +9.999999999990e-01 +1.000000000001e+00"),
        ((0.25, 0.1, 0.4), "+0.250 +0.100 +0.400"),
    ],
)
def test_numbers_have_digits_that_tell_the_ends_apart(
    numbers: tuple[float, float, float], shown: str, runs: tuple[Path, Path]
) -> None:
    value, *interval = numbers
    metric = replace(
        dualeval.compare(*runs).metrics["loss"], difference=value, interval=(interval[0], interval[1])
    )
    assert " ".join(in_unit(metric, number, signed=True) for number in numbers) == shown


def test_chosen_metrics_alone_are_compared(runs: tuple[Path, Path]) -> None:
    every = dualeval.compare(*runs)
    found = dualeval.compare(*runs, metrics=["top1"], gates={"loss": 1})
    assert list(found.metrics) == ["top1", "loss"] and not found.not_compared
    top1 = found.metrics["top1"]
    assert top1.p == every.metrics["top1"].p and top1.p_holm <= 2 * top1.p


def test_failed_samples_are_left_out_with_a_note(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """A sample that fails in one run has another fingerprint of the data here; by --trust-ids it is one."""
    skip: dict[str, Any] = {"batch_size": 32, "on_error": "skip"}
    evaluate(SeededTask(COUNT, [3, 5], seed=0), tmp_path / "a", **skip)
    evaluate(SeededTask(COUNT, [5, 17, 18], seed=1), tmp_path / "b", **skip)
    found = dualeval.compare(tmp_path / "a", tmp_path / "b", trust_ids=True)
    assert found.failed == {"in_a": 1, "in_b": 2, "in_both": 1} and found.pairs == COUNT - 4
    assert "Failed samples are left out: 1 in A only, 2 in B only, 1 in both." in found.notes
    a, b = (table_of(run).drop([3, 5, 17, 18]) for run in runs)
    loss = found.metrics["loss"]
    assert loss.difference == pytest.approx(b["loss"].astype(float).mean() - a["loss"].astype(float).mean())
    assert found.metrics["top1"].samples == COUNT - 4


def test_predictions_that_are_all_empty_agree_in_nothing(runs: tuple[Path, Path], tmp_path: Path) -> None:
    empty = pyarrow.array([""] * COUNT, pyarrow.large_string())
    a, b = (changed(run, tmp_path / run.name, lambda rows: put(rows, "prediction", empty)) for run in runs)
    assert dualeval.compare(a, b).agreement is None


def test_another_order_is_joined_by_id(runs: tuple[Path, Path], tmp_path: Path) -> None:
    order = np.random.default_rng(7).permutation(COUNT)
    other: dict[str, Any] = {"data": {"fingerprint": "else"}, "samples_digest": "5a" * 32}
    mixed = changed(runs[1], tmp_path / "mixed", lambda rows: rows.take(order), **other)
    found, expected = dualeval.compare(runs[0], mixed), dualeval.compare(*runs)
    assert found.metrics == expected.metrics and found.agreement == expected.agreement
    assert "different orders" in found.notes[0]
    assert f"samples: {COUNT} in both; another samples_digest\n" in as_markdown(found)
    assert found.b["samples_digest"] == "5a" * 32
    twice = changed(runs[1], tmp_path / "twice", lambda rows: rows.take([*order[1:], order[1]]))
    with pytest.raises(DualevalError, match="600 rows and 599 different ids"):
        dualeval.compare(runs[0], twice)


def test_runs_over_different_samples_are_refused(runs: tuple[Path, Path], tmp_path: Path) -> None:
    evaluate(SeededTask(COUNT + 5), tmp_path / "more", batch_size=32, limit=COUNT + 2)
    with pytest.raises(
        UsageError,
        match=r"different samples: 600 ids .* 0 only in A, 2 only in B \(tiny/600.* --sample and --seed\)",
    ):
        dualeval.compare(runs[0], tmp_path / "more")


def test_the_same_ids_over_different_data_are_refused(runs: tuple[Path, Path], tmp_path: Path) -> None:
    data = json.loads((runs[1] / RESULT).read_text())["data"]
    other = changed(runs[1], tmp_path / "other", data={**data, "fingerprint": "0123456789"})
    with pytest.raises(UsageError, match=r"same ids, but over different data: .*01234567.*add --trust-ids"):
        dualeval.compare(runs[0], other)
    found = dualeval.compare(runs[0], other, trust_ids=True)
    assert found.metrics == dualeval.compare(*runs).metrics
    assert "equal ids were taken for equal samples" in found.notes[0]
    for name, value in (("one", "1" * 64), ("two", "2" * 64)):
        changed(runs[1], tmp_path / name, data={**data, "contents": value})
    with pytest.raises(UsageError, match=r"contents \(11111111, 22222222\)"):
        dualeval.compare(tmp_path / "one", tmp_path / "two")


def test_other_targets_are_refused(runs: tuple[Path, Path], tmp_path: Path) -> None:
    def shifted(rows: Any) -> Any:
        target = np.asarray(rows["target"]).copy()
        target[[7, 9]] += 1
        return put(rows, "target", target)

    other = changed(runs[1], tmp_path / "other", shifted)
    with pytest.raises(UsageError, match=r"different targets for 2 samples \(tiny/7, tiny/9\)"):
        dualeval.compare(runs[0], other, trust_ids=True)


def test_a_folder_that_is_no_finished_run_is_refused(runs: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        dualeval.compare(runs[0], tmp_path / "none")
    stopped = changed(runs[1], tmp_path / "stopped")
    status = json.loads((stopped / STATUS).read_text())
    (stopped / STATUS).write_text(json.dumps({**status, "state": "stopped"}))
    with pytest.raises(UsageError, match="holds no finished run: its state is 'stopped'"):
        dualeval.compare(runs[0], stopped)
    evaluated = TinyTask(8)
    evaluate(evaluated, tmp_path / "run")
    result = dualeval.rescore(tmp_path / "run", metrics=evaluated.metrics())
    (tmp_path / "scores").mkdir()
    (tmp_path / "scores" / RESULT).write_text(result.to_json())
    with pytest.raises(UsageError, match=rf"no rows: those are in {tmp_path / 'run'}\."):
        dualeval.compare(tmp_path / "scores", runs[0])
    old = changed(runs[1], tmp_path / "old", scores={})
    with pytest.raises(UsageError, match=r"does not say how a metric follows .* Evaluate again"):
        dualeval.compare(runs[0], old)
    damaged = changed(runs[1], tmp_path / "damaged")
    with (damaged / PREDICTIONS).open("ab") as file:
        file.write(b"more")
    with pytest.raises(DualevalError, match="is not the file that the run wrote"):
        dualeval.compare(runs[0], damaged)


def test_metrics_that_cannot_be_compared_say_why(runs: tuple[Path, Path], tmp_path: Path) -> None:
    content = json.loads((runs[1] / RESULT).read_text())
    scores: dict[str, Any] = content["scores"]
    scores["top1"] = {"column": "rank", "below": 2}
    scores["only_b"] = {"column": "loss"}
    scores["same"] = {"column": "gone"}
    scores["perplexity"] |= {"transform": "exp"}

    def with_nan(rows: Any) -> Any:
        loss = np.asarray(rows["loss"]).copy()
        loss[4:6] = np.nan, np.inf
        return put(rows, "loss", loss)

    units = {**content["units"], "top5": "percent"}
    other = changed(runs[1], tmp_path / "other", with_nan, scores=scores, units=units)
    found = dualeval.compare(runs[0], other).not_compared
    assert found["top1"].startswith("the runs define it differently: below 1 in A, 2 in B")
    assert found["loss"] == found["perplexity"] == "2 samples are NaN or infinite in B"
    assert found["only_b"] == "only B has it"
    assert found["top5"] == "its unit is fraction in A and percent in B"
    with pytest.raises(UsageError, match="--gate loss: it cannot be compared: 2 samples are NaN"):
        dualeval.compare(runs[0], other, gates={"loss": 1})


# -- the command -----------------------------------------------------------------------------------


def test_the_command_prints_and_gates(
    command: Callable[..., tuple[int, str, str]], runs: tuple[Path, Path], tmp_path: Path
) -> None:
    code, out, _ = command(*runs, "--gate", "top1=0.9", "--flips", tmp_path / "flips.csv")
    found = dualeval.compare(*runs)
    assert code == 0
    assert out.startswith(f"{found.sentence}\nA ") and found.sentence.startswith(
        "No difference shown: loss, top1 ("
    )
    assert "top1: passed; with 95 % confidence B is at most" in out and "(allowed: 90.00 pp worse)" in out
    assert f"samples         {COUNT} in both; the same samples_digest\n" in out and "right -> wrong" in out
    assert "80 % power at the 5 % level" in out and "adjusted for" in out
    flips = found.metrics["top1"].flips
    assert flips is not None
    with (tmp_path / "flips.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "top1"]
    assert [row["change"] for row in rows] == ["lost"] * len(flips.lost) + ["gained"] * len(flips.gained)
    code, out, _ = command(*runs, "--gate", "top1=0", "--gate", "loss=9", "--json")
    content = json.loads(out)
    assert (code, content["passed"], [gate["passed"] for gate in content["gates"]]) == (
        3,
        False,
        [False, True],
    )
    assert content["metrics"]["top1"]["flips"]["lost"] == len(flips.lost)
    assert content["sentence"] == f"{found.sentence}; gate top1 NOT passed"
    _, out, _ = command(runs[0], runs[0], "--metric", "top1")
    assert "detectable      top1: none, because too few samples differ" in out
    code, out, _ = command(*runs, "--markdown", "--gate", "top1=0")
    assert code == 3
    assert out.startswith(
        f"{found.sentence}; gate top1 NOT passed\n\n| metric | A | B | B - A | 95 % interval |"
    )
    assert "NOT passed" in out


def test_wrong_usage_of_the_command_is_refused(
    command: Callable[..., tuple[int, str, str]], runs: tuple[Path, Path], tmp_path: Path
) -> None:
    for words, says in (
        (("--gate", "top1"), "--gate 'top1': expected METRIC=MARGIN, such as top1=0.002"),
        (("--gate", "top1=x"), "expected METRIC=MARGIN"),
        (("--gate", "top1=1", "--gate", "top1=2"), "--gate top1 was given twice"),
        (("--json", "--markdown"), "choose one"),
        (("--flips", tmp_path / "no" / "file"), "cannot be written"),
    ):
        code, out, err = command(*runs, *words)
        assert (code, out) == (2, "") and says in err
