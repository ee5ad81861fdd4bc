"""Metrics of TorchMetrics through whole runs: equal to its own, and to the bit in every division."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

import dualeval
from dualeval.engine.folder import recorder, stored_rows
from dualeval.engine.scoring.rescoring import verify
from dualeval.errors import UsageError
from dualeval.metrics import Measured
from dualeval.metrics.torchmetrics.metric import read
from dualeval.result import Result, sha256_of_json
from dualeval.tasks.image_classification import ImageClassification
from dualeval.tasks.stored import metrics_of_run
from tests.conftest import Launch
from tests.engine.test_engine_ranks import run_ranks
from tests.engine.test_evaluator import evaluate
from tests.vehicles.torchmetrics_task import (
    BATCH,
    BROKEN,
    METRICS,
    SAMPLES,
    ManyMetricsTask,
    columns_of,
    made,
)

pytestmark = pytest.mark.usefixtures("one_thread", "quiet")
OPTIONS: dict[str, Any] = {"batch_size": BATCH, "on_error": "skip"}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("torchmetrics") / "out"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Metric .* will save all")
        return out, evaluate(ManyMetricsTask(), out, **OPTIONS)


def by_torchmetrics(name: str) -> Any:
    """What TorchMetrics makes of all samples in one update."""
    dataset = ManyMetricsTask(broken=()).dataset()
    places = [place for place in range(SAMPLES) if place not in BROKEN]
    columns = columns_of(
        torch.stack([features for features, _ in dataset.__getitems__(places)]), torch.tensor(places)
    )
    metric, _, _ = read(METRICS[name][0])
    single = [{key: values[place] for key, values in columns.items()} for place in range(len(places))]
    whole: Mapping[str, Any] = {
        "psnr": (columns["picture"], columns["original"]),
        "squad": (
            [{"prediction_text": one["said"], "id": one["key"]} for one in single],
            [{"answers": {"answer_start": [0], "text": [one["gold"]]}, "id": one["key"]} for one in single],
        ),
        "bleu": (columns["said"], [json.loads(one["references"]) for one in single]),
        "map": (
            [{"boxes": one["boxes"], "scores": one["box_scores"], "labels": one["labels"]} for one in single],
            [{"boxes": one["gt_boxes"], "labels": one["gt_labels"]} for one in single],
        ),
        "largest": (columns["found"],),
        "smallest": (columns["found"],),
        "mean": (columns["found"], columns["true"]),
        **dict.fromkeys(("confusion", "auroc", "calibration"), (columns["probabilities"], columns["target"])),
    }
    metric.update(*whole.get(name, (columns["found"], columns["true"])))
    return metric.compute()


@pytest.mark.parametrize("name", METRICS)
def test_values_are_those_of_torchmetrics(done: tuple[Path, Result], name: str) -> None:
    wanted = by_torchmetrics(name)
    by_key = {f"{name}_{key}": value for key, value in wanted.items()} if isinstance(wanted, dict) else {}
    for key, value in (by_key or {name: wanted}).items():
        found = torch.tensor(done[1].metrics[key], dtype=torch.float64)
        torch.testing.assert_close(found, value.to(torch.float64), rtol=1e-6, atol=1e-6)
    assert done[1].samples["evaluated"] == SAMPLES - len(BROKEN)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_ranks_have_one_digest(launch: Launch, tmp_path: Path, done: tuple[Path, Result], size: int) -> None:
    for report in run_ranks(launch, "torchmetrics", size, tmp_path):
        assert report["digest"] == done[1].metrics_digest
        assert report["failed"] == len(BROKEN)


@pytest.mark.parametrize("flush", [8, 40, 10**6])
def test_the_time_of_a_fold_changes_no_bit(
    done: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch, flush: int
) -> None:
    monkeypatch.setattr(recorder, "FLUSH_ROWS", flush)
    names = ("mean", "squared", "psnr", "confusion", "squad")
    found = evaluate(ManyMetricsTask(names), None, **OPTIONS).metrics
    assert found == {key: value for key, value in done[1].metrics.items() if key in found}
    assert len(found) == 6


def test_rescoring_the_rows_gives_the_same_bits(done: tuple[Path, Result]) -> None:
    out, result = done
    names = [name for name in METRICS if name != "psnr"]
    found = dualeval.rescore(out, metrics=[made(name) for name in names])
    assert found.metrics == {key: value for key, value in result.metrics.items() if key != "psnr"}
    with pytest.raises(UsageError, match="keeps_rows = False"):
        dualeval.rescore(out, metrics=[made("psnr")])


def test_verify_needs_the_batches_of_the_run(tmp_path: Path) -> None:
    names = ("mean", "confusion")
    evaluate(ManyMetricsTask(names), tmp_path, **OPTIONS)
    assert all(not check.differences for check in verify(tmp_path, [made(name) for name in names]))
    (tmp_path / "job.json").unlink()
    last = list(verify(tmp_path, [made(name) for name in names]))[-1]
    assert "job.json cannot be read" in last.differences[0]


AUROC = "torchmetrics:MulticlassAUROC(num_classes=10)"


def test_auroc_is_the_same_on_ranks_and_from_the_rows(launch: Launch, tmp_path: Path) -> None:
    """On one rank, on two, from the rows, and by TorchMetrics in one piece."""
    (tmp_path / "two").mkdir()
    alone = evaluate(
        ImageClassification(metrics=["auroc"]), tmp_path / "one", limit=300, metric=["auroc", AUROC]
    )
    for report in run_ranks(launch, "scores", 2, tmp_path / "two"):
        assert report == {"digest": alone.metrics_digest, "metrics": alone.metrics}
    rows = pyarrow.parquet.read_table(tmp_path / "one/predictions.parquet")
    probabilities, target = (
        torch.tensor(rows["probabilities"].to_pylist()),
        torch.tensor(rows["target"].to_pylist()),
    )
    metric, _, _ = read(AUROC)
    metric.update(probabilities, target)
    assert alone.metrics["MulticlassAUROC"] == metric.compute().item()
    assert alone.metrics["auroc"] == pytest.approx(alone.metrics["MulticlassAUROC"], abs=1e-6)
    checks = verify(tmp_path / "one", metrics_of_run(tmp_path / "one/job.json"))
    assert not [check for check in checks if check.differences]


def test_verify_names_a_run_of_other_formulas(tmp_path: Path) -> None:
    """Of an earlier version: other values, and options that tell the metrics apart; its files are whole."""
    hinge = "torchmetrics:MulticlassHingeLoss(num_classes=10)@preds=probabilities,target=target"
    done = evaluate(ImageClassification(metrics=["top1"]), tmp_path, limit=60, metric=["top1", hinge, AUROC])

    def checks() -> dict[str, Any]:
        return {check.name: check for check in verify(tmp_path, metrics_of_run(tmp_path / "job.json"))}

    assert "formulas" not in checks()
    stated = json.loads((tmp_path / "result.json").read_text())
    stated["metrics"]["MulticlassHingeLoss"] = 0.5
    told = {"metrics": stated["metrics"], "nonfinite": {}, "failed": []}
    stated["metrics_digest"] = sha256_of_json(told)
    (tmp_path / "result.json").write_text(json.dumps(stated))
    assert "MulticlassHingeLoss" in checks()["metrics"].differences[0], "of the same formula it is damaged"
    job = json.loads((tmp_path / "job.json").read_text())
    del job["job"]["metric_options"]["MulticlassHingeLoss"]["_floats"]
    (tmp_path / "job.json").write_text(json.dumps(job))
    found = checks()
    assert not [check for check in found.values() if check.differences]
    value = done.metrics["MulticlassHingeLoss"]
    assert f"MulticlassHingeLoss: 0.5 in result.json, now {value}: its" in found["formulas"].says
    # Without logits the area is the earlier one.
    asked = metrics_of_run(tmp_path / "job.json", ["auroc"])
    scored = dualeval.rescore(tmp_path, metrics=asked)
    assert scored.metrics["auroc"] == pytest.approx(done.metrics["MulticlassAUROC"], abs=1e-6)
    assert any("its formula has changed since this run" in said for said in scored.warnings)


def test_a_run_without_scores_says_how_to_get_them(tmp_path: Path) -> None:
    evaluate(ImageClassification(), tmp_path, limit=20)
    assert "probabilities" not in pyarrow.parquet.read_schema(tmp_path / "predictions.parquet").names
    for asked, typed in (("auroc", "auroc"), (AUROC, f"'{AUROC}'")):
        metrics = metrics_of_run(tmp_path / "job.json", [asked])
        with pytest.raises(UsageError, match="does not have") as raised:
            dualeval.rescore(tmp_path, metrics=metrics)
        assert f"dualeval run ... --metric {typed} --out {tmp_path} --fresh" in str(raised.value)


class BatchSizes:
    """The number of updates, and the sum of the squares of their sizes."""

    name = "sizes"
    columns = ("found",)
    size = 2
    per_batch = True

    def update(self, ledger: torch.Tensor, columns: Mapping[str, Any]) -> None:
        ledger += torch.tensor([1, len(columns["found"]) ** 2])

    def compute(self, ledger: torch.Tensor) -> Measured:
        return Measured(values={"updates": int(ledger[0]), "squares": int(ledger[1])})


@pytest.mark.parametrize("window", [1, 20, 50, 16_384])
def test_each_update_gets_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    class Sized(ManyMetricsTask):
        def metrics(self) -> list[Any]:
            return [BatchSizes()]

    found = evaluate(Sized(), tmp_path, **OPTIONS)
    assert found.metrics == {"updates": 15, "squares": 12 * 64 + 3 * 49}
    monkeypatch.setattr(stored_rows, "WINDOW_ROWS", window)
    assert dualeval.rescore(tmp_path, metrics=[BatchSizes()]).metrics == found.metrics
