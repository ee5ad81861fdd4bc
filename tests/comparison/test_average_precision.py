"""Average precision of two runs, compared by drawing the same images again for both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dualeval
from dualeval.errors import UsageError
from dualeval.metrics import AveragePrecision
from tests.comparison.test_comparison import changed
from tests.vehicles.made_coco import MadeCoco, made_coco

COUNT = 60
TRUTH = ("boxes", "labels", "areas", "crowds")
MADE = made_coco(seed=3, images=COUNT)


def metric_of(made: MadeCoco, bootstrap: int = 200) -> AveragePrecision:
    return AveragePrecision(made.categories, truth=TRUTH, true_format="xywh", bootstrap=bootstrap)


def task_of(made: MadeCoco) -> Any:
    """A model that has found what was made; each patient has two images."""
    columns = made.columns()

    def observe(outputs: Any, batch: Any) -> dict[str, Any]:
        places = batch.tolist()
        rows = {name: [torch.as_tensor(np.array(of[at])) for at in places] for name, of in columns.items()}
        return {**rows, "patient": batch // 2, "scanner": [f"S{at % 2}" for at in places]}

    return dualeval.ModelTask(
        model=torch.nn.Identity(),
        data=[torch.tensor(at) for at in range(len(made.images))],
        observe=observe,
        metrics=[metric_of(made)],
    )


def worse(made: MadeCoco, dropped: float) -> MadeCoco:
    draw = np.random.default_rng(0)
    kept = [each for each in made.detections if draw.random() >= dropped]
    return replace(made, detections=kept)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    made = {"a": MADE, "same": MADE, "worse": worse(MADE, 0.85), "little": worse(MADE, 0.02)}
    for name, each in made.items():
        dualeval.evaluate(task_of(each), out=folder / name, launcher="none", workers=0)
    return {name: folder / name for name in made}


def test_a_run_has_intervals_and_its_rows_give_them_again(runs: dict[str, Path]) -> None:
    result = json.loads((runs["a"] / "result.json").read_text())
    assert {*result["intervals"]} == {*AveragePrecision({1: "a"}).figures}
    again = dualeval.rescore(runs["a"], metrics=[metric_of(MADE)])
    assert again.metrics == result["metrics"] and again.intervals["ap"] == tuple(result["intervals"]["ap"])


def test_a_model_that_finds_less_is_worse_and_the_gate_says_so(runs: dict[str, Path]) -> None:
    found = dualeval.compare(runs["a"], runs["worse"], metrics=["ap", "ar100"], gates={"ap50": 0.02})
    assert [*found.metrics] == ["ap", "ar100", "ap50"]
    ap = found.metrics["ap"]
    assert (ap.verdict.split(" (")[0], ap.test, ap.samples) == ("B is worse", "paired bootstrap", COUNT)
    for run, value in ((runs["a"], ap.a), (runs["worse"], ap.b)):
        assert json.loads((run / "result.json").read_text())["metrics"]["ap"] == value
    assert ap.interval[0] < ap.difference == ap.b - ap.a < ap.interval[1] < 0
    assert not found.gates[0].passed and found.gates[0].bound > 0.02
    assert "paired bootstrap" in str(found)
    little = dualeval.compare(runs["a"], runs["little"], gates={"ap": 0.05})
    assert little.passed and len(little.metrics) == 12
    # As the same images are drawn for both, the difference is known far better than either value.
    of_run = json.loads((runs["a"] / "result.json").read_text())["intervals"]["ap"]
    ends = little.metrics["ap"].interval
    assert ends[1] - ends[0] < 0.5 * (of_run[1] - of_run[0])


def test_equal_runs_are_the_same_on_every_sample(runs: dict[str, Path]) -> None:
    found = dualeval.compare(runs["a"], runs["same"], gates={"ap": 0.0})
    assert {each.verdict for each in found.metrics.values()} == {"the same on every sample"}
    assert found.passed


def test_clusters_and_groups(runs: dict[str, Path]) -> None:
    found = dualeval.compare(
        runs["a"], runs["worse"], metrics=["ap"], cluster="patient", by=["scanner"], gates={"worst:ap": 0.01}
    )
    ap = found.metrics["ap"]
    assert (ap.test, ap.clusters) == ("paired bootstrap by cluster", COUNT // 2)
    plain = dualeval.compare(runs["a"], runs["worse"], metrics=["ap"]).metrics["ap"]
    assert ap.difference == plain.difference and ap.interval != plain.interval
    groups = found.slices["scanner"]
    assert [group.label for group in groups] == ["S0", "S1"] and not found.worst_gates[0].passed
    for number, group in enumerate(groups):
        expected = metric_of(MADE, 0).compute(MADE.columns(MADE.images[number::2])).values["ap"]
        assert group.metrics["ap"].a == expected


def test_other_definitions_are_not_compared(runs: dict[str, Path], tmp_path: Path) -> None:
    other = changed(runs["a"], tmp_path / "other")
    content = json.loads((other / "job.json").read_text())
    content["job"]["metric_options"]["ap"]["max_detections"] = 10
    (other / "job.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="ap: the runs define it differently"):
        dualeval.compare(runs["a"], other, metrics=["ap"])


def test_figures_without_an_annotation_say_what_has_none(tmp_path: Path) -> None:
    small = replace(MADE, annotations=[{**each, "area": 100.0} for each in MADE.annotations])
    for name, made in (("a", small), ("b", worse(small, 0.5))):
        dualeval.evaluate(task_of(made), out=tmp_path / name, launcher="none", workers=0)
    not_compared = dualeval.compare(tmp_path / "a", tmp_path / "b").not_compared
    assert {*not_compared} == {"ap_medium", "ap_large", "ar_medium", "ar_large"}
    assert {*not_compared.values()} == {"no picture has an annotation of its size or class"}


def test_other_annotations_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    def moved(rows: Any) -> Any:
        import pyarrow

        at = rows.schema.get_field_index("true_areas")
        areas = [[area + 1 for area in image] for image in rows["true_areas"].to_pylist()]
        return rows.set_column(at, rows.schema.field(at), pyarrow.array(areas, rows.schema.field(at).type))

    other = changed(runs["a"], tmp_path / "other", moved)
    with pytest.raises(UsageError, match=r"have different true_areas.*the same annotations"):
        dualeval.compare(runs["a"], other, trust_ids=True)
