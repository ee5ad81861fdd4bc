"""``dualeval verify RUN`` and ``dualeval score RUN``: what they print, what they name, how they end."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pyarrow
import pyarrow.parquet
import pytest
from rich.console import Console

import dualeval
from dualeval import cli
from dualeval.engine.scoring import rescoring
from dualeval.errors import DualevalError, UsageError
from dualeval.metrics.classification import classification_metric, default_metrics
from dualeval.report.table import print_result
from dualeval.result import checksum_of, read_result, sha256_of_json
from dualeval.tasks.given_answers import GivenAnswers
from tests.conftest import Launch
from tests.engine.test_evaluator import evaluate
from tests.vehicles import questions
from tests.vehicles.tiny import CLASSES, TinyTask

DUALEVAL: list[str | Path] = [sys.executable, "-m", "dualeval"]
BROKEN = (3, 40)
IN_ALL = 200


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with two failed samples."""
    out = tmp_path_factory.mktemp("made") / "run"
    evaluate(TinyTask(IN_ALL, BROKEN), out, batch_size=8, on_error="skip")
    return out


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def differences(run: Path) -> dict[str, tuple[str, ...]]:
    """What differs, by the name of the check."""
    metrics = [classification_metric(name, CLASSES) for name in default_metrics(CLASSES)]
    return {check.name: check.differences for check in rescoring.verify(run, metrics) if check.differences}


def rewrite(run: Path, change: Callable[[dict[str, list[Any]]], Any]) -> None:
    """Write predictions.parquet anew, with changed values."""
    path = run / "predictions.parquet"
    table = pyarrow.parquet.read_table(path)
    columns = table.to_pydict()
    change(columns)
    pyarrow.parquet.write_table(pyarrow.table(columns, schema=table.schema), path)


def rewrite_result(run: Path, change: Callable[[dict[str, Any]], Any], *, digest: bool = True) -> None:
    """Write result.json anew, with changed values and a digest that fits them."""
    content = json.loads((run / "result.json").read_text())
    change(content)
    if digest:
        ids = [entry["id"] for entry in content["failed"]]
        told = {"metrics": content["metrics"], "nonfinite": content["nonfinite"], "failed": ids}
        content["metrics_digest"] = sha256_of_json(told)
    (run / "result.json").write_text(json.dumps(content))


def flip_last_bit(value: float) -> float:
    [bits] = struct.unpack("<i", struct.pack("<f", value))
    [flipped] = struct.unpack("<f", struct.pack("<i", bits ^ 1))
    return float(flipped)


def test_the_last_bit_of_one_loss_is_a_difference(run: Path) -> None:
    def change(columns: dict[str, list[Any]]) -> None:
        columns["loss"][17] = flip_last_bit(columns["loss"][17])

    rewrite(run, change)
    found = differences(run)
    assert list(found) == ["predictions.parquet", "metrics", "metrics_digest"]
    value, interval = found["metrics"][0], found["metrics"][1]
    stated = json.loads((run / "result.json").read_text())
    assert value.startswith(f"loss: {stated['metrics']['loss']} in result.json, ")
    assert value.endswith(" from the rows")
    assert interval.startswith("intervals.loss[0]: ")
    assert found["metrics_digest"][0].startswith(
        f'metrics_digest: "{stated["metrics_digest"]}" in result.json'
    )


CHANGES: dict[str, tuple[Callable[[dict[str, list[Any]]], Any], str, str]] = {
    "an id twice": (lambda of: of["id"].__setitem__(7, "tiny/8"), "samples_digest", "samples_digest: "),
    "rows in another order": (
        lambda of: of.update({name: values[::-1] for name, values in of.items()}),
        *("samples_digest", "samples_digest: "),
    ),
    "a row too few": (
        lambda of: [column.pop() for column in of.values()],
        *("samples", "samples.total: 200 in result.json, 199 from the rows"),
    ),
    "another failed sample": (
        lambda of: [
            column.__setitem__(9, None) for name, column in of.items() if name not in ("id", "index")
        ],
        *("failed samples", "failed: 2 values in result.json, 3 values from the rows"),
    ),
    "a prediction": (
        lambda of: of["prediction"].__setitem__(9, (of["prediction"][9] + 1) % CLASSES),
        *("metrics", "confusion_matrix"),
    ),
    "a class that does not exist": (
        lambda of: of["target"].__setitem__(9, 12),
        *("metrics", "cannot be computed from these rows"),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_in_the_rows_is_named(run: Path, name: str) -> None:
    change, check, said = CHANGES[name]
    rewrite(run, change)
    found = differences(run)
    assert said in " ".join(found[check])


def test_many_differences_are_not_all_printed(run: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["metrics"]["per_class"] = {
            name: [9] * len(values) for name, values in content["metrics"]["per_class"].items()
        }

    rewrite_result(run, change)
    named = [said for said in differences(run)["metrics"] if said.startswith(("per_class", "and"))]
    assert len(named) == 21
    assert named[0].startswith("per_class.") and named[-1].endswith(" more of these")


GONE = object()
# What is changed in result.json, by its keys, into what, and what is said.
RESULTS: list[tuple[str, object, str]] = [
    ("metrics top1", 0.5, "top1: 0.5 in result.json, "),
    ("metrics top1", GONE, "top1: null in result.json, "),
    ("metrics nonfinite_logits nan", 0.0, "nonfinite_logits.nan: 0.0 in result.json, 0 from the rows"),
    ("metrics per_class precision 2", 0.25, "per_class.precision[2]: 0.25 in result.json, "),
    ("intervals top1", GONE, "intervals.top1: null in result.json, "),
    ("nonfinite loss", {"nan": 1}, 'nonfinite.loss: {"nan": 1} in result.json, null from the rows'),
    ("units top1", "percent", 'units.top1: "percent" in result.json'),
]


@pytest.mark.parametrize(("keys", "value", "said"), RESULTS, ids=[said for *_, said in RESULTS])
def test_what_was_changed_in_the_result_is_named_with_both_values(
    run: Path, keys: str, value: object, said: str
) -> None:
    def change(content: Any) -> None:
        *above, last = [int(key) if key.isdigit() else key for key in keys.split()]
        for key in above:
            content = content[key]
        content[last] = value
        if value is GONE:
            del content[last]

    rewrite_result(run, change)
    found = differences(run)
    assert said in " ".join(found["metrics"])
    assert "result.json" not in found, "its digest fits"


def test_a_result_without_directions_is_read_shown_and_verified(run: Path) -> None:
    """Those of earlier versions had units of percent alone."""

    def change(content: dict[str, Any]) -> None:
        assert content["directions"]["top1"] == "higher"
        del content["directions"]
        content["units"] = {}

    rewrite_result(run, change)
    assert differences(run) == {}
    stream = io.StringIO()
    print_result(read_result(run / "result.json"), Console(file=stream))
    assert "top1" in stream.getvalue()


def test_a_digest_that_does_not_fit_its_metrics_is_named(run: Path) -> None:
    rewrite_result(run, lambda content: content["metrics"].update(top1=0.5), digest=False)
    found = differences(run)
    assert "from its metrics" in found["result.json"][0]
    assert list(found) == ["result.json", "metrics"], "the digest itself is that of the rows"


def test_changed_counts_and_failed_samples_are_named(run: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["samples"]["evaluated"] = 199
        content["failed"] = content["failed"][1:]

    rewrite_result(run, change)
    found = differences(run)
    assert found["samples"] == ("samples.evaluated: 199 in result.json, 198 from the rows",)
    assert found["failed samples"] == ("failed: 1 values in result.json, 2 values from the rows",)
    assert "metrics_digest" in found


@pytest.mark.parametrize("left", [0, 3, 1000, -1])
def test_a_truncated_file_of_rows_is_named(run: Path, left: int) -> None:
    path = run / "predictions.parquet"
    path.write_bytes(path.read_bytes()[:left])
    assert "predictions.parquet cannot be read" in differences(run)["rows"][0]


@pytest.mark.parametrize("name", ["status.json", "result.json", "job.json", "predictions.parquet"])
def test_a_pipe_in_the_place_of_a_file_is_refused(run: Path, name: str) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    assert f"{run / name} is not a regular file" in refusal("verify", run)


def test_a_status_that_is_gone_is_written_anew(tmp_path: Path) -> None:
    evaluate(TinyTask(8), tmp_path / "run")
    (tmp_path / "run/status.json").unlink()
    found = refusal("verify", tmp_path / "run")
    assert f"{tmp_path / 'run'} has no readable status.json" in found
    assert f"--out {tmp_path / 'run'}: it rewrites status.json" in found
    evaluate(TinyTask(8), tmp_path / "run")
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "done"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        *((text, "is damaged") for text in ("", "{", "[]", '{"schema_version": 1}')),
        ({"schema_version": 99}, r"version is 99, expected one of \(2, 3\): a later"),
        ({"metrics": []}, r"is damaged: its field metrics is \[\], expected dict\[str, Value\]"),
        ({"intervals": {"top1": 3}}, r"is damaged: its field intervals is \{'top1': 3\}, expected dict"),
        ({"samples": {}}, "is damaged: its field samples has no evaluated"),
        ({"samples_digest": 7}, r"is damaged: its field samples_digest is 7, expected str \| None"),
    ],
)
def test_a_file_that_is_no_result_is_refused(run: Path, content: str | dict[str, Any], says: str) -> None:
    if isinstance(content, str):
        (run / "result.json").write_text(content)
    else:
        rewrite_result(run, lambda result: result.update(content), digest=False)
    for reads in (lambda: differences(run), lambda: dualeval.compare(run, run)):
        with pytest.raises(DualevalError, match=rf"result\.json.*{says}"):
            reads()


def test_a_file_of_another_checksum_is_named(run: Path) -> None:
    """Whatever the rows say, verify names it."""
    path = run / "predictions.parquet"
    recorded = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}
    rewrite_result(run, lambda content: content["files"].update({path.name: recorded}))
    assert differences(run) == {}
    rewrite(run, lambda columns: None)
    assert list(differences(run)) == [path.name]
    assert differences(run)[path.name][0].startswith(f'sha256: "{recorded["sha256"]}" in result.json, ')
    path.write_bytes(path.read_bytes()[:-1])
    assert any(f"bytes: {recorded['bytes']} in" in said for said in differences(run)[path.name])
    path.unlink()
    assert "is missing" in differences(run)[path.name][0]


# -- the commands ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded job, whole, on two processes."""
    out = tmp_path_factory.mktemp("embedded") / "run"
    launch([*DUALEVAL, "run", "--nproc", "2", "--no-progress", "--out", out]).ok()
    return out


def result_of(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "result.json").read_text())
    return content


def test_the_embedded_job_is_verified(launch: Launch, embedded: Path) -> None:
    before = {path.name: path.read_bytes() for path in embedded.iterdir()}
    done = launch([*DUALEVAL, "verify", embedded])
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[-1] == "verified"
    assert {line.split()[0] for line in lines[:-1]} == {"ok"}
    assert f"metrics_digest: {result_of(embedded)['metrics_digest']}, from the rows too" in done.stdout
    assert {path.name: path.read_bytes() for path in embedded.iterdir()} == before


def test_score_gives_the_metrics_of_a_run_to_the_bit(launch: Launch, embedded: Path, tmp_path: Path) -> None:
    wanted = result_of(embedded)
    done = launch([*DUALEVAL, "score", embedded, "--json", "--out", tmp_path / "new/out"])
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    for key in ("metrics", "intervals", "nonfinite", "units", "metrics_digest", "fingerprint", "timing"):
        assert found[key] == wanted[key]
    assert found == result_of(tmp_path / "new/out")
    assert found["folder"] == str(tmp_path / "new/out")
    assert found["job"]["rows_of"] == str(embedded)
    assert "holds a result.json already" in refusal("score", embedded, "--out", tmp_path / "new/out")


def test_score_computes_a_metric_that_the_run_did_not(launch: Launch, embedded: Path) -> None:
    done = launch([*DUALEVAL, "score", embedded, "--metric", "top3"])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == f"recomputed from the rows of {embedded}; no forward"
    ranks = pyarrow.parquet.read_table(embedded / "predictions.parquet").column("rank").to_pylist()
    assert f"{100 * sum(rank < 3 for rank in ranks) / len(ranks):.2f} %" in done.stdout
    assert "top1" not in done.stdout


def test_a_difference_ends_in_exit_code_1(launch: Launch, run: Path, embedded: Path) -> None:
    copy = Path(shutil.copytree(embedded, run.parent / "embedded"))

    def change(columns: dict[str, list[Any]]) -> None:
        columns["loss"][9999] = flip_last_bit(columns["loss"][9999])

    rewrite(copy, change)
    done = launch([*DUALEVAL, "verify", copy])
    assert (done.returncode, done.stderr) == (1, "")
    assert "differs  metrics: loss: " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("not verified: ")
    assert "metrics_digest" in done.stdout.splitlines()[-1]
    told = launch([*DUALEVAL, "verify", copy, "--json"])
    assert (told.returncode, told.stderr) == (1, "")
    content = json.loads(told.stdout)
    assert content["verified"] is False
    assert [check["name"] for check in content["checks"] if check["differences"]][-1] == "metrics_digest"


def test_answers_that_were_scored_are_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = questions.write_questions(tmp_path / "data.json", unanswerable=True)
    (tmp_path / "answers.json").write_text(json.dumps({"empty": "", "long": "1719"}))
    given = GivenAnswers(data=data, predictions=tmp_path / "answers.json")
    wanted = evaluate(given, tmp_path / "out")
    cli.dualeval.main(["verify", str(tmp_path / "out")], "dualeval", standalone_mode=False)
    assert capsys.readouterr().out.splitlines()[-1] == "verified"
    cli.dualeval.main(["score", str(tmp_path / "out"), "--json"], "dualeval", standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["metrics_digest"] == wanted.metrics_digest


REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "data beside a run": (["score", "{run}", "--data", "d.json"], ["--data belongs to a file of answers"]),
    "0 beside a run": (
        ["score", "{run}", "--num-fewshot", "0"],
        ["--num-fewshot belongs to a file of answers"],
    ),
    "fresh beside a run": (["score", "{run}", "--fresh"], ["--fresh belongs to a file of answers"]),
    "neither": (["score"], ["Missing option '--data'"]),
    "its own folder": (["score", "{run}", "--out", "{run}"], ["--out", "holds a result.json already"]),
    "no run": (["score", "{tmp}"], ["holds no run", "status.json"]),
    "no folder": (["verify", "{tmp}/nowhere"], ["there is no folder"]),
    "a task of one's own": (["verify", "{run}"], ["task tests.vehicles.tiny.TinyTask", "dualeval.rescore("]),
    "no run named": (["verify"], ["Missing argument 'RUN'"]),
}


def refusal(*words: str | Path) -> str:
    """What a command, in this process, says of wrong usage."""
    with pytest.raises((UsageError, click.UsageError)) as error:
        cli.dualeval.main(list(map(str, words)), "dualeval", standalone_mode=False)
    told = error.value
    return told.format_message() if isinstance(told, click.UsageError) else str(told)


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_usage_of_verify_and_score_is_refused(run: Path, tmp_path: Path, name: str) -> None:
    words, said = REFUSED[name]
    found = refusal(*(word.format(run=run, tmp=tmp_path) for word in words))
    assert all(part in found for part in said), found


@pytest.mark.parametrize("command", ["score", "verify"])
def test_a_run_that_has_not_kept_a_column_is_refused(embedded: Path, tmp_path: Path, command: str) -> None:
    copy = Path(shutil.copytree(embedded, tmp_path / "copy"))
    path = copy / "predictions.parquet"
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).drop_columns(["rank"]), path)
    # As a run that kept no such column would have recorded it.
    rewrite_result(copy, lambda content: content["files"].update({path.name: checksum_of(path)}))
    found = refusal(command, copy)
    assert "metric 'top1' reads column 'rank'" in found and "--metric top1 " in found and "--fresh" in found
