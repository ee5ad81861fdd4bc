"""Metrics computed again from the rows: the same bits, added metrics, and what is refused."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import dualeval
from dualeval import cli
from dualeval.engine.folder import stored_rows
from dualeval.engine.scoring import rescoring
from dualeval.engine.values.measured import fields_of_result, find_clusters, with_clusters
from dualeval.errors import DualevalError, UsageError
from dualeval.metrics import Mean, Measured, Metric, RowMetric
from dualeval.metrics.classification import (
    BY_NAME,
    LARGEST_CONFUSION,
    TopK,
    classification_metric,
    default_metrics,
)
from dualeval.result import INTERVAL_FORMULAS, read_result
from dualeval.tasks.image_classification import ImageClassification
from dualeval.tasks.stored import metrics_of_run
from tests.conftest import ROOT
from tests.engine.test_evaluator import evaluate
from tests.vehicles.measuring import ledger_of
from tests.vehicles.ragged_task import EveryBit
from tests.vehicles.tiny import CLASSES, EVERY_METRIC, TinyTask


def named(*names: str, classes: int = CLASSES) -> list[Metric | RowMetric]:
    return [classification_metric(name, classes) for name in names]


class OddTask(TinyTask):
    """Some samples' logits are NaN, infinite or all equal."""

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = super().forward(model, batch)
        for place, target in enumerate(batch["targets"].tolist()):
            if target == 3:
                logits[place, target] = [torch.nan, torch.inf, -torch.inf, 0.0][place % 4]
            if target == 5:
                logits[place] = -0.0
        return logits


class Codes:
    """The sum of the bit patterns of a float32 column, as the ledger gets it."""

    name = "codes"
    columns = ("nans",)
    size = 1

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        ledger[0] += columns["nans"].view(torch.int32).sum(dtype=torch.int64)

    def compute(self, ledger: Tensor) -> Measured:
        return Measured(values={"codes": int(ledger)})


class ManyColumns(TinyTask):
    """Columns of every kind that Parquet must give back, NaN with payloads among them."""

    KINDS = (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64),
    )

    def observe(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        columns = super().observe(outputs, batch)
        wide = (outputs.abs() * 90).to(torch.int64)
        for kind in self.KINDS:
            columns[f"flat_{kind}"] = (wide[:, 0] % 2 if kind == torch.bool else wide[:, 0]).to(kind)
            columns[f"wide_{kind}"] = (wide % 2 if kind == torch.bool else wide).to(kind)
        # Quiet and signalling NaN with payloads and signs, infinities, -0.0.
        codes = torch.tensor([0x7FC00001, 0x7F800123, -0x3FFFFE, 0x7F800000, -0x80000000, 0x3F800000])
        columns["nans"] = codes[batch["targets"] % 6].to(torch.int32).view(torch.float32)
        columns["wide_nans"] = torch.stack([columns["nans"], columns["nans"].flip(0)], dim=1)
        columns["double_nans"] = (wide[:, 0] + 0x7FF0000000000001).view(torch.float64)
        return columns

    @property
    def made(self) -> tuple[str, ...]:
        kinds = [f"{shape}_{kind}" for shape in ("flat", "wide") for kind in self.KINDS]
        return (*kinds, "nans", "wide_nans", "double_nans")

    def metrics(self) -> list[Metric | RowMetric]:
        return [*super().metrics(), Codes(), EveryBit(*self.made)]


@pytest.mark.parametrize("window", [1, 64])
def test_every_built_in_metric_comes_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """With samples that could not be read, and windows of rows that do not end where batches do."""
    monkeypatch.setattr(stored_rows, "WINDOW_ROWS", window)
    broken = [3, 8, 9, 10, 11, 500]
    task = OddTask(1000, broken, EVERY_METRIC)
    wanted = evaluate(task, tmp_path, batch_size=7, on_error="skip")
    assert wanted.metrics["loss"] is None
    assert wanted.metrics["nonfinite_logits"] != {"nan": 0, "inf": 0}
    found = dualeval.rescore(tmp_path, metrics=task.metrics())
    assert found.metrics == wanted.metrics
    assert found.intervals == wanted.intervals
    assert found.nonfinite == wanted.nonfinite
    assert found.warnings == wanted.warnings
    assert found.metrics_digest == wanted.metrics_digest
    assert (found.samples, found.failed, found.timing) == (wanted.samples, wanted.failed, wanted.timing)


@pytest.mark.parametrize("broken", [(), (0, 1, 2, 3, 40, 63)])
def test_columns_of_every_kind_come_back_to_the_bit(tmp_path: Path, broken: Sequence[int]) -> None:
    """A NaN is a value, with its payload; only a sample that could not be read is null."""
    task = ManyColumns(64, broken)
    wanted = evaluate(task, tmp_path, batch_size=4, on_error="skip")
    table = pyarrow.parquet.read_table(tmp_path / "predictions.parquet")
    kept = ["rank", "nan_logits", "inf_logits", "nans", *(name for name in task.made if name != "nans")]
    assert table.column_names == ["id", "index", *task.rows, *kept], (
        "what Codes reads, then what EveryBit does"
    )
    assert {table.column(name).null_count for name in task.made} == {len(broken)}
    found = dualeval.rescore(tmp_path, metrics=task.metrics())
    assert found.metrics == wanted.metrics
    assert found.metrics_digest == wanted.metrics_digest


def test_added_metrics_are_those_of_a_run_that_had_them(tmp_path: Path) -> None:
    evaluate(TinyTask(500, [9], ["top1"]), tmp_path / "few", on_error="skip")
    wanted = evaluate(TinyTask(500, [9], ["top3", "ece", "loss"]), tmp_path / "all", on_error="skip")
    found = dualeval.rescore(tmp_path / "few", metrics=named("top3", "ece", "loss"))
    assert found.metrics == wanted.metrics
    assert found.metrics_digest == wanted.metrics_digest
    assert found.job["metric"] == ["top3", "ece", "loss"]
    assert found.job["rows_of"] == str(tmp_path / "few")


class Undeclared(TopK):
    """Reads one more column than it says."""

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        ledger[1] += int(columns["target"].sum())


class Unmade(TopK):
    """Reads a column that no task makes."""

    columns = ("rank", "depth")  # type: ignore[assignment]


class Silent(TopK):
    """Says nothing, or nothing that can be read as names."""

    columns = "rank"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (Undeclared(1), r"metric 'top1' reads column 'target', which is not among its columns \(rank\)"),
        (Unmade(1), r"metric 'top1' reads column 'depth', which the task does not make. Its columns: loss, "),
        (Silent(1), r"metric 'top1' \(Silent\) has columns = 'rank', expected a tuple"),
    ],
)
def test_a_wrong_declaration_is_refused_with_metric_and_column(
    tmp_path: Path, metric: Metric, said: str
) -> None:
    class Task(TinyTask):
        def metrics(self) -> list[Metric | RowMetric]:
            return [metric]

    with pytest.raises(UsageError, match=said):
        evaluate(Task(5000), tmp_path / "run")


@pytest.mark.parametrize("classes", [3, CLASSES, LARGEST_CONFUSION, LARGEST_CONFUSION + 1])
def test_a_classifier_keeps_what_any_of_its_metrics_reads(classes: int) -> None:
    known = [*default_metrics(classes), "top2", *(set(BY_NAME) - {"confusion", "auroc"})]
    columns = {name for metric in named(*known, classes=classes) for name in metric.columns}
    assert columns <= set(ImageClassification.rows)


def test_a_task_of_ones_own_is_scored_from_python(tmp_path: Path) -> None:
    class Mine(ImageClassification):
        """Of the same name as the built-in one, and with metrics of its own."""

    evaluate(Mine(), tmp_path, limit=20)
    with pytest.raises(UsageError, match=r"task tests\.engine\.scoring\..*Mine.*dualeval\.rescore\("):
        metrics_of_run(tmp_path / "job.json")


def test_runs_that_cannot_be_scored_are_refused(tmp_path: Path) -> None:
    metrics = [Mean("loss")]
    with pytest.raises(UsageError, match="there is no folder"):
        dualeval.rescore(tmp_path / "nowhere", metrics=metrics)
    with pytest.raises(UsageError, match=r"no status\.json"):
        dualeval.rescore(tmp_path, metrics=metrics)
    with pytest.raises(UsageError, match=r"has no job\.json"):
        metrics_of_run(tmp_path / "job.json")
    with pytest.raises(UsageError, match="cannot be read"):
        evaluate(TinyTask(40, [30]), tmp_path, batch_size=4)
    with pytest.raises(UsageError, match=r"no finished run: its state is 'failed'.*--out"):
        dualeval.rescore(tmp_path, metrics=metrics)
    evaluate(TinyTask(40), tmp_path, fresh=True)
    with pytest.raises(UsageError, match="no metric was given"):
        dualeval.rescore(tmp_path, metrics=[])
    with pytest.raises(UsageError, match=r"metrics has the text 'top1': names are for"):
        dualeval.rescore(tmp_path, metrics=["top1"])  # type: ignore[list-item]
    (tmp_path / "predictions.parquet").write_bytes(b"PAR1")
    with pytest.raises(DualevalError, match=r"predictions\.parquet is not the file that the run wrote"):
        dualeval.rescore(tmp_path, metrics=metrics)
    (tmp_path / "predictions.parquet").unlink()
    with pytest.raises(UsageError, match=r"no predictions\.parquet any more"):
        dualeval.rescore(tmp_path, metrics=metrics)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *(("{", "is damaged"), ("[]", "is damaged"), ('{"job": {}}', "an earlier version of dualeval")),
        *(
            (
                f'{{"job": {{}}, "task_class": "{task}"}}',
                f"a run of the task {task}, whose metrics only its own code knows",
            )
            for task in ("json.Gone", "dualeval.tasks.gone.Gone")
        ),
    ],
)
def test_job_files_that_say_too_little_are_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "job.json").write_text(content)
    with pytest.raises(DualevalError, match=said):
        metrics_of_run(tmp_path / "job.json")


def test_a_metric_of_torchmetrics_is_scored_from_the_rows_of_any_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One of TorchMetrics' own imports sets it for the process.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    spelled = "torchmetrics:MeanAbsoluteError()@preds=prediction,target=target"
    data = [(torch.tensor([float(value)]), float(value + 1)) for value in range(10)]
    evaluate(dualeval.ModelTask(model=torch.nn.Identity(), data=data), tmp_path / "own")
    found = metrics_of_run(tmp_path / "own/job.json", [spelled])
    assert dualeval.rescore(tmp_path / "own", metrics=found).metrics == {"MeanAbsoluteError": 1.0}
    # Runs of earlier versions have its name alone.
    evaluate(ImageClassification(metrics=["top1"]), tmp_path / "built", limit=20, metric=["top1", spelled])
    job = tmp_path / "built/job.json"
    job.write_text(job.read_text().replace(spelled, "MeanAbsoluteError"))
    with pytest.raises(dualeval.UsageError, match="'MeanAbsoluteError' of TorchMetrics"):
        metrics_of_run(job)


# -- what earlier versions have written is read for ever: verify, score, compare and export of their runs


RUNS = ROOT / "tests/fixtures/runs-2"
# By run the metrics_digest and some of the values that its own version has printed.
WANTED: dict[str, tuple[str, dict[str, float]]] = {
    "images-a": (
        "c6737bd6854fa56c2da6373b3643da0c0f47f55450a7bded680065095197120d",
        {"top1": 0.925, "top5": 1.0},
    ),
    "images-b": (
        "360f781f32ed6dc3d9211f6538b4eb9c830f35a34adcc85079ee59e813848593",
        {"top1": 0.15, "top5": 0.45},
    ),
    "questions": ("22cc9577dec3cabdcd7192e6de2f392b9e06ab691b798459b7bbe908152f3c45", {"exact_match": 75.0}),
    "own": (
        "c031bd206a05fb2762abd7dd3cc2aa2425bfd31d6f1d09329956dc9f6750e2fa",
        {"error": -0.4827586206896552, "close": 18 / 29},
    ),
}
BUILT_IN = [name for name in WANTED if name != "own"]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Copies, whose files are to stay as they are."""
    return Path(shutil.copytree(RUNS, tmp_path / "runs"))


def call(*words: str | Path) -> str:
    """Standard output of a command, which is to end with 0."""
    done = CliRunner().invoke(cli.dualeval, [*map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def own_metrics(runs: Path) -> list[Any]:
    found: list[Any] = runpy.run_path(str(runs / "readings.py"))["metrics"]()
    return found


def test_each_fixture_is_of_the_version_that_its_folder_names() -> None:
    for name in WANTED:
        assert json.loads((RUNS / name / "result.json").read_text())["schema_version"] == 2


@pytest.mark.parametrize("name", BUILT_IN)
def test_earlier_runs_are_verified_and_scored_to_the_same_digest(runs: Path, name: str) -> None:
    digest, values = WANTED[name]
    before = {path.name: path.read_bytes() for path in (runs / name).iterdir()}
    checks = json.loads(call("verify", runs / name, "--json"))
    assert checks["verified"], checks
    scored = json.loads(call("score", runs / name, "--json", "--out", runs / "scored"))
    stated = json.loads(before["result.json"])
    assert scored["metrics_digest"] == digest
    assert {key: scored["metrics"][key] for key in values} == values
    for key in ("metrics", "units", "directions", "scores", "clusters", "fingerprint"):
        assert scored[key] == stated[key]
    # By clusters they are made in another way since; of fractions with 1 to 3 wrong answers they are wider.
    intervals = "naive_intervals" if stated["clusters"] else "intervals"
    for key, (low, high) in stated[intervals].items():
        now = scored[intervals][key]
        few = name == "images-a" and key == "top1"
        assert now[0] == low and (now[1] > high if few else now[1] == high), key
    said = [check["says"] for check in checks["checks"] if check["name"] == "formulas"]
    formulas = (
        "no file is damaged; intervals were computed by earlier formulas: today some are wider, those of "
        "losses begin at 0 or above, or other ones are rough"
    )
    assert said == [formulas]
    assert read_result(runs / "scored/result.json").metrics_digest == digest, "and what it writes is read too"
    assert {path.name: path.read_bytes() for path in (runs / name).iterdir()} == before


def test_an_earlier_interval_that_is_none_of_these_rows_is_found(runs: Path) -> None:
    """One that is no longer is that of earlier formulas; of a result of now each other bit is."""
    path = runs / "images-a/result.json"
    content = json.loads(path.read_text())
    content["intervals"]["top1"][1] += 0.01
    path.write_text(json.dumps(content))
    done = CliRunner().invoke(cli.dualeval, ["verify", str(runs / "images-a")])
    assert done.exit_code != 0 and "intervals.top1[1]" in done.output
    content["intervals"]["top1"][1] -= 0.02
    path.write_text(json.dumps(content))
    call("verify", runs / "images-a")
    path.write_text(json.dumps({**content, "interval_formulas": INTERVAL_FORMULAS}))
    done = CliRunner().invoke(cli.dualeval, ["verify", str(runs / "images-a")])
    assert done.exit_code != 0 and "intervals.top1[1]" in done.output


def test_an_earlier_interval_of_a_loss_may_begin_below_0(tmp_path: Path) -> None:
    """By formulas 2; another end of it, or any of another metric, is that of the rows."""
    loss = torch.tensor([0.0] * 30 + [9.0])
    task = dualeval.ModelTask(
        model=torch.nn.Identity(),
        data=[(loss[at].reshape(1), loss.new_zeros(1)) for at in range(len(loss))],
        metrics=["mae", "mse", "rmse", Mean("absolute_error", name="free")],
    )
    dualeval.evaluate(task, launcher="none", device="cpu", out=tmp_path / "run")
    path = tmp_path / "run/result.json"
    content = json.loads(path.read_text())
    low, high = content["intervals"]["free"]
    assert low < 0 and content["intervals"]["mae"] == [0, high] and content["intervals"]["rmse"][0] == 0
    metrics = task.metrics()

    def differing(formulas: int, name: str, ends: list[float]) -> list[str]:
        intervals = {**content["intervals"], name: ends}
        path.write_text(json.dumps({**content, "intervals": intervals, "interval_formulas": formulas}))
        return [each for check in rescoring.verify(tmp_path / "run", metrics) for each in check.differences]

    assert not differing(2, "mae", [low, high]) and not differing(1, "mae", [low, high - 0.1])
    assert differing(3, "mae", [low, high]) and differing(2, "mae", [low, high - 0.1])
    assert differing(2, "free", [low + 0.01, high]) and not differing(1, "free", [low + 0.01, high])


def test_the_loss_of_right_answers_alone_is_rough() -> None:
    """Losses of wrong ones may be a hundred times as large, and none was drawn."""
    losses = torch.tensor(np.random.default_rng(1).exponential(0.02, 1_000))
    columns = {
        "loss": losses,
        "rank": torch.zeros(1_000, dtype=torch.int64),
        "group": torch.arange(1_000) % 40,
    }
    for wrong in (0, 1):
        columns["rank"][:wrong] = 1
        metrics = Mean("loss"), TopK(1), Mean("loss", name="other")
        measured = [metric.compute(ledger_of(metric, columns)) for metric in metrics]
        fields, said = with_clusters(fields_of_result(measured), None, None)
        why = "all samples are right, so nothing is known of the loss of wrong ones"
        assert fields["rough"] == ({"loss": why} if not wrong else {})
        assert said == ([f"the interval of loss is rough: {why}"] if not wrong else [])
        found = find_clusters("group", measured, {name: column.numpy() for name, column in columns.items()})
        by_group, _ = with_clusters(fields_of_result(measured), "group", found)
        # Few clusters decide it in any case.
        assert "of 40 clusters" in by_group["rough"]["loss"]


def test_an_earlier_run_of_a_task_of_ones_own_is_scored_from_its_file(runs: Path) -> None:
    """Its metrics are known to its file alone; columns of every form, and a sample that failed."""
    digest, values = WANTED["own"]
    found = list(rescoring.verify(runs / "own", own_metrics(runs)))
    assert [check for check in found if check.differences] == []
    result = dualeval.rescore(runs / "own", metrics=own_metrics(runs))
    assert (result.metrics_digest, result.metrics) == (digest, values)
    assert result.failed[0]["id"] == "reading-04"
    with pytest.raises(UsageError, match=r"the task readings\.OwnTask"):
        call("verify", runs / "own")


def test_earlier_runs_are_compared(runs: Path) -> None:
    found = json.loads(call("compare", runs / "images-a", runs / "images-b", "--json"))
    assert (found["pairs"], found["agreement"]) == (40, 6)
    assert found["a"]["samples_digest"] is None, "version 2 had none"
    assert found["metrics"]["top1"]["difference"] == pytest.approx(-0.775)
    assert [found[run]["metrics_digest"] for run in "ab"] == [WANTED["images-a"][0], WANTED["images-b"][0]]
    for name, pairs in (("questions", 24), ("own", 29)):
        same = json.loads(call("compare", runs / name, runs / name, "--json"))
        assert same["pairs"] == pairs
        assert {metric["verdict"] for metric in same["metrics"].values()} == {"the same on every sample"}


@pytest.mark.parametrize("name", WANTED)
def test_earlier_runs_are_exported(runs: Path, name: str) -> None:
    digest, values = WANTED[name]
    call("export", runs / name, "--to", f"jsonl:{runs / 'log.jsonl'}")
    [line] = (runs / "log.jsonl").read_text().splitlines()
    logged = json.loads(line)
    assert logged["metrics_digest"] == digest
    assert {key: logged["metrics"][key] for key in values} == values
