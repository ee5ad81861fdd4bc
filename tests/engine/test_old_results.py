"""What earlier versions have written is read for ever: verify, score, compare and export of their runs."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import dualeval
from dualeval import cli
from dualeval.engine import verification
from dualeval.errors import UsageError
from dualeval.result import read_result
from tests.conftest import ROOT

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
    "questions": (
        "22cc9577dec3cabdcd7192e6de2f392b9e06ab691b798459b7bbe908152f3c45",
        {"exact_match": 75.0},
    ),
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
def test_verify_and_score(runs: Path, name: str) -> None:
    digest, values = WANTED[name]
    before = {path.name: path.read_bytes() for path in (runs / name).iterdir()}
    checks = json.loads(call("verify", runs / name, "--json"))
    assert checks["verified"], checks
    scored = json.loads(call("score", runs / name, "--json", "--out", runs / "scored"))
    stated = json.loads(before["result.json"])
    assert scored["metrics_digest"] == digest
    assert {key: scored["metrics"][key] for key in values} == values
    # By clusters they are made in another way since.
    intervals = "naive_intervals" if stated["clusters"] else "intervals"
    for key in ("metrics", intervals, "units", "directions", "scores", "clusters", "fingerprint"):
        assert scored[key] == stated[key]
    assert read_result(runs / "scored/result.json").metrics_digest == digest, "and what it writes is read too"
    assert {path.name: path.read_bytes() for path in (runs / name).iterdir()} == before


def test_a_task_of_ones_own(runs: Path) -> None:
    """Its metrics are known to its file alone; columns of every form, and a sample that failed."""
    digest, values = WANTED["own"]
    found = list(verification.verify(runs / "own", own_metrics(runs)))
    assert [check for check in found if check.differences] == []
    result = dualeval.rescore(runs / "own", metrics=own_metrics(runs))
    assert (result.metrics_digest, result.metrics) == (digest, values)
    assert result.failed[0]["id"] == "reading-04"
    with pytest.raises(UsageError, match=r"the task readings\.OwnTask"):
        call("verify", runs / "own")


def test_compare(runs: Path) -> None:
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
def test_export(runs: Path, name: str) -> None:
    digest, values = WANTED[name]
    call("export", runs / name, "--to", f"jsonl:{runs / 'log.jsonl'}")
    [line] = (runs / "log.jsonl").read_text().splitlines()
    logged = json.loads(line)
    assert logged["metrics_digest"] == digest
    assert {key: logged["metrics"][key] for key in values} == values
