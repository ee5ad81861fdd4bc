"""Results in trackers, read back with the trackers' own readers; and trackers that are not there, or fail."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from PIL import Image

import dualeval
from dualeval import cli
from dualeval.errors import DualevalError, UsageError
from dualeval.report.loggers.confusions import Confusion, confusions_of, draw_confusion, figures_of
from dualeval.report.loggers.entry import LogEntry, entry_of
from dualeval.report.loggers.log import log_result, write_all
from dualeval.report.loggers.loggers import Target, check_installed, counted_from, targets_of
from dualeval.result import Result, read_result
from tests.conftest import BIN, ROOT, Launch
from tests.engine.end.test_endings import await_that
from tests.vehicles.readers_trackers import mlflow_runs, mlflow_steps, tensorboard_run, wandb_run
from tests.vehicles.tiny import TinyTask

NAMES = ["Ant", "Bee", None, "a/b (c)", "Elk", "Fox", "Gnu"]
COUNT = 120


def write(entry: LogEntry, target: Target) -> str:
    said: str = import_module(f"dualeval.report.loggers.{target.kind}").write(entry, target)
    return said


class Named(TinyTask):
    """A task whose classes have names."""

    def labels_used(self) -> Mapping[str, Any]:
        return {"classes": NAMES}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    dualeval.evaluate(Named(COUNT), launcher="none", out=out)
    return out


@pytest.fixture
def result(run: Path) -> Result:
    return read_result(run / "result.json")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The working folder of a user whom no tracker knows."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


# -- the entry ----------------------------------------------------------------------------------------


def test_a_record_has_metrics_intervals_classes_and_job(result: Result, run: Path) -> None:
    entry = entry_of(result, run, None)
    assert entry.scalars["top1"] == result.metrics["top1"]
    assert (entry.scalars["loss_low"], entry.scalars["loss_high"]) == tuple(result.intervals["loss"])
    assert entry.units["top1_high"] == "fraction"
    per_class = result.metrics["per_class"]
    assert isinstance(per_class, dict)
    f1 = per_class["f1"]
    assert isinstance(f1, list)
    assert entry.scalars["per_class/f1/1 Bee"] == f1[1]
    assert entry.scalars["per_class/f1/2"] == f1[2]
    assert [row[1] for row in entry.tables["per_class"].rows] == NAMES
    for name in (
        *("fingerprint", "metrics_digest", "samples_digest", "versions.torch", "world.launcher"),
        "world.size",
    ):
        assert name in entry.params
    assert not any(isinstance(value, dict) for value in entry.params.values())
    keys = {entry_of(result, run, step).key for step in (None, 0, 1)}
    assert len(keys) == 3
    assert entry_of(result, None, 1).key in keys


def test_rows_give_the_matrix_that_the_metrics_have(result: Result, run: Path) -> None:
    """A run without the metric has the same picture and the same figures, from predictions.parquet."""
    of_metrics = confusions_of(result, run)["confusion_matrix"]
    kept = {name: value for name, value in result.metrics.items() if name in ("loss", "top1")}
    without_metric = replace(result, metrics=kept)
    of_rows = confusions_of(without_metric, run)
    assert of_rows["confusion_matrix"].entries == of_metrics.entries
    figures = figures_of(without_metric, {"confusion_matrix": of_metrics})
    assert figures == {"per_class": result.metrics["per_class"]}
    assert confusions_of(without_metric, None) == {}


def test_damaged_rows_are_an_error_with_their_file(result: Result, run: Path, tmp_path: Path) -> None:
    (tmp_path / "predictions.parquet").write_bytes((run / "predictions.parquet").read_bytes()[:-50])
    bare = replace(result, metrics={"top1": 0.5})
    with pytest.raises(DualevalError, match=r"predictions\.parquet cannot be read"):
        entry_of(bare, tmp_path, None)


@pytest.mark.parametrize("classes", [1, 20, 21, 101, 1000])
def test_matrices_of_any_size_are_drawn(classes: int) -> None:
    """Also with a prediction of no class, and names in other scripts."""
    entries = [[index, index, 5] for index in range(classes)]
    entries += [[0, classes - 1, 2], [classes - 1, -1, 1]] if classes > 1 else []
    confusion = Confusion(classes=classes, entries=entries, names=["naïve 名前 " * 9, None])
    with Image.open(io.BytesIO(draw_confusion(confusion, "Confusion"))) as picture:
        assert picture.format == "PNG" and picture.width >= 500
        colours = picture.convert("RGB").getcolors(1 << 24)
    assert colours is not None
    assert len(colours) > 10


def test_without_matplotlib_the_rest_is_logged(
    result: Result, run: Path, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    content = {"result": json.loads(result.to_json()), "folder": str(run), "step": 2}
    targets = targets_of(["tensorboard:tb", "jsonl:log.jsonl"], 2)
    answers = dict(write_all({**content, "targets": [*map(asdict, targets)]}))
    assert "type pip install matplotlib" in answers["tensorboard:tb"]["text"]
    assert answers["jsonl:log.jsonl"] == {"text": "a line in log.jsonl"}
    assert tensorboard_run(offline / "tb").Tags()["images"] == []
    assert tensorboard_run(offline / "tb").Scalars("top1")


# -- where it goes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "step", "words"),
    [
        ("csv:x", None, "expected one of tensorboard:DIR"),
        ("jsonl", None, "expected one of"),
        ("jsonl:", None, "expected one of"),
        ("wandb:p#a b", None, "is not a name of a run"),
        ("wandb:p", 1, "Type wandb:p#NAME"),
        ("jsonl:x", -1, "step=-1: expected a whole number"),
        ("jsonl:x", True, "step=True: expected a whole number"),
    ],
)
def test_a_wrong_target_says_what_to_type(text: str, step: int | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        targets_of([text], step)


def test_a_target_is_read_as_kind_place_and_name() -> None:
    [one, two] = targets_of(["mlflow:http://host:5000#a", "jsonl:dir/x.jsonl#1", "jsonl:dir/x.jsonl#1"], 3)
    assert (one.kind, one.where, one.name) == ("mlflow", "http://host:5000", "a")
    assert (two.kind, two.where, two.name) == ("jsonl", "dir/x.jsonl#1", None)


def test_a_folder_of_wandbs_runs_is_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Python takes the folder 'wandb' of the working folder for a package where the real one is missing."""
    (tmp_path / "wandb").mkdir()
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UsageError, match=r"pip install 'dualeval\[wandb\]'"):
        check_installed(targets_of("wandb:p", None))


# -- read back -----------------------------------------------------------------------------------------


def test_every_tracker_has_the_result_once(
    result: Result, run: Path, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logged twice, and by a second name: read back with the trackers' own readers."""
    to = [f"tensorboard:{offline / 'tb'}", "wandb:team/cifar", "mlflow:file:mlruns", "jsonl:log/all.jsonl"]
    dualeval.export(run, to)
    entry = entry_of(result, run, None)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    dualeval.export(str(run), "wandb:team/cifar")
    for target in targets_of(["tensorboard:tb", "mlflow:file:mlruns", "jsonl:log/all.jsonl"], None):
        # The same once more, in this process: it takes seconds less.
        said = write(entry, target)
        assert "has this result already" in said or target.kind == "tensorboard"

    [line] = lines_of(offline / "log/all.jsonl")
    assert line["metrics"] == json.loads(json.dumps(result.metrics))
    assert line["scalars"] == entry.scalars
    assert (line["metrics_digest"], line["step"]) == (result.metrics_digest, None)

    events = tensorboard_run(offline / "tb")
    assert sorted(events.Tags()["scalars"]) == sorted(entry.scalars)
    for name in ("top1", "loss_high", "per_class/recall/3 a/b (c)"):
        [event] = events.Scalars(name)
        assert event.value == pytest.approx(entry.scalars[name], rel=1e-6)
        assert (event.step, event.wall_time) == (0, entry.time)
    [image] = events.Images("confusion_matrix")
    assert image.encoded_image_string == entry.pictures["confusion_matrix"]
    text = events.Tensors("job")[0].tensor_proto.string_val[0].decode()
    assert result.fingerprint in text

    [folder] = (offline / "wandb").glob("offline-run-*")
    logged, config, [row] = wandb_run(folder)
    assert (logged.entity, logged.project, logged.display_name) == ("team", "cifar", "tiny")
    assert config["fingerprint"] == result.fingerprint
    assert config["world"] == result.world
    assert config["samples_digest"] == line["samples_digest"] == result.samples_digest
    assert row["top1"] == entry.scalars["top1"]
    assert row["per_class/f1/1 Bee"] == entry.scalars["per_class/f1/1 Bee"]
    picture = folder / "files" / row["confusion_matrix/path"]
    with Image.open(picture) as there, Image.open(io.BytesIO(entry.pictures["confusion_matrix"])) as made:
        assert there.tobytes() == made.tobytes()

    [tracked] = mlflow_runs("file:mlruns")
    assert tracked.info.status == "FINISHED"
    assert tracked.data.metrics["top1_low"] == entry.scalars["top1_low"]
    assert tracked.data.metrics["per_class/f1/3 a/b _c_"] == entry.scalars["per_class/f1/3 a/b (c)"]
    assert tracked.data.params["metrics_digest"] == result.metrics_digest
    assert tracked.data.tags["unit.top1"] == "fraction"
    files = {path.name for path in Path(tracked.info.artifact_uri.removeprefix("file://")).iterdir()}
    assert files == {"confusion_matrix.png", "per_class.json", "result.json"}


def test_a_session_and_evaluate_log_their_steps(offline: Path) -> None:
    notes: list[str] = []
    with dualeval.Session(launcher="none", note=notes.append) as session:
        session.evaluate(TinyTask(64), loggers=["jsonl:log.jsonl"], step=0)
    options: dict[str, Any] = {"launcher": "none", "note": notes.append}
    dualeval.evaluate(TinyTask(100), loggers=["jsonl:log.jsonl"], step=1, **options)
    lines = lines_of(offline / "log.jsonl")
    assert [(line["step"], line["samples"]["evaluated"]) for line in lines] == [(0, 64), (1, 100)]
    assert not [note for note in notes if "logged" in note]


def test_steps_of_a_training_are_one_run(
    result: Result, run: Path, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for step, each in enumerate((result, replace(result, fingerprint="f" * 64))):
        for target in targets_of(["mlflow:mlruns#train", "tensorboard:tb"], step):
            write(entry_of(each, run, step), target)
    [tracked] = mlflow_runs("mlruns")
    assert tracked.info.run_name == "train"
    assert tracked.data.params["fingerprint"] == result.fingerprint
    assert mlflow_steps("mlruns", tracked.info.run_id, "top1") == [0, 1]
    assert [event.step for event in tensorboard_run(offline / "tb").Scalars("top1")] == [0, 1]


def test_a_line_that_was_cut_off_costs_no_other(run: Path, offline: Path) -> None:
    (offline / "log.jsonl").write_text('{"key": "hal')
    dualeval.export(run, "jsonl:log.jsonl")
    half, whole = (offline / "log.jsonl").read_text("utf-8").splitlines()
    assert half == '{"key": "hal'
    assert json.loads(whole)["name"] == "tiny"


# -- what goes wrong -----------------------------------------------------------------------------------


def test_a_tracker_that_fails_costs_no_result(offline: Path) -> None:
    """A file where a folder is wanted: a note, and what is well is logged."""
    (offline / "file").touch()
    notes: list[str] = []
    to = ["tensorboard:file/tb", "jsonl:log.jsonl"]
    result = dualeval.evaluate(TinyTask(20), launcher="none", out="out", note=notes.append, loggers=to)
    assert result.samples["evaluated"] == 20
    [failed] = [note for note in notes if "not logged" in note]
    assert "NotADirectoryError" in failed
    assert "--to tensorboard:file/tb' tries it again" in failed
    assert len(lines_of(offline / "log.jsonl")) == 1
    with pytest.raises(DualevalError, match=r"not logged to tensorboard:file/tb: NotADir.*\nlogged to jsonl"):
        dualeval.export(result, to)


def test_a_metric_that_only_looks_like_a_matrix_is_none(result: Result) -> None:
    matrices: list[Any] = [{"classes": ["a"], "entries": []}, {"classes": 10**8, "entries": [[0, 0, 1]]}]
    for matrix in matrices:
        entry = entry_of(replace(result, metrics={"matrix": matrix, "x": None}), None, None)
        assert (entry.confusions, entry.tables) == ({}, {})


def test_a_record_that_cannot_be_made_costs_no_result(result: Result, offline: Path) -> None:
    odd = replace(result, metrics={"x_per_class": {"a": [1.0, 2.0], "b": [1.0]}}, folder=None)
    notes: list[str] = []
    log_result(odd, targets_of("jsonl:log.jsonl", None), None, notes.append)
    assert re.search(r"IndexError: .*The result is complete", notes[0])
    log_result(
        replace(odd, metrics={"x": float("nan")}), targets_of("jsonl:log.jsonl", None), 1, notes.append
    )
    assert re.search(r"not logged to jsonl:log.jsonl: ValueError: .*The result is complete", notes[1])


def test_nothing_stays_where_the_waiting_process_is_killed(offline: Path, result: Result) -> None:
    (offline / "wandb.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path('written').write_text(str(os.getpid()))\n"
        "pathlib.Path('written').rename('pid')\n"
        "time.sleep(600)\n"
    )
    (offline / "result.json").write_text(result.to_json())
    code = "import dualeval; dualeval.export('.', 'wandb:x')"
    environ = {**os.environ, "PYTHONPATH": f"{offline}:{ROOT}"}
    waiting = subprocess.Popen([sys.executable, "-c", code], env=environ, text=True)
    await_that((offline / "pid").exists, waiting)
    waiting.kill()
    waiting.wait()
    stat = Path("/proc", (offline / "pid").read_text(), "stat")
    end = monotonic() + 20
    while stat.exists() and ") Z" not in stat.read_text():
        assert monotonic() < end, "the tracker's process is still there"
        sleep(0.1)


def test_a_server_that_does_not_answer_is_given_up(
    run: Path, offline: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing of W&B stays behind either: the process that waits, and the service that it has started."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr("dualeval.report.loggers.log._QUIET_S", 0.5)
        monkeypatch.setattr("dualeval.report.loggers.log._BY_ITSELF_S", 3.0)
        with pytest.raises(DualevalError, match="not logged to wandb:cifar: no answer within 3 s"):
            dualeval.export(run, "wandb:cifar")
    said = "dualeval: still logging to wandb:cifar: it has not answered yet, and gets 3 s"
    assert said in capfd.readouterr().err


def test_a_signal_while_a_tracker_is_waited_for_says_what_is_not_logged(
    launch: Launch, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        target = f"mlflow:http://127.0.0.1:{silent.getsockname()[1]}"
        words = ["dualeval", "run", "--limit", "20", "--out", f"{tmp_path}/out", "--logger", target]
        with launch.started(words, cwd=tmp_path) as process, silent.accept()[0]:
            process.terminate()
            _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert said.endswith(
        f"dualeval: note: the result may not be logged to {target}. It is complete. "
        f"'dualeval export {tmp_path}/out --to {target}' tries it again.\n"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("jsonl:log.jsonl", "jsonl:/jobs/log.jsonl"),
        ("tensorboard:/tb", "tensorboard:/tb"),
        ("mlflow:file:mlruns", "mlflow:file:/jobs/mlruns"),
        ("mlflow:file:/mlruns", "mlflow:file:/mlruns"),
        ("wandb:project", "wandb:project"),
    ],
)
def test_paths_of_loggers_in_a_job_file_are_relative_to_it(text: str, expected: str) -> None:
    assert counted_from(text, Path("/jobs")) == expected


def test_a_run_with_a_logger_prints_the_result_alone(launch: Launch, tmp_path: Path) -> None:
    """Two ranks and a job file: nothing but the result on standard output, and one line logged."""
    (tmp_path / "job.toml").write_text('limit = 128\nlogger = ["jsonl:log.jsonl"]\nout = "run"\n')
    command: list[str | Path]
    command = [BIN / "dualeval", "run", "--config", tmp_path / "job.toml", "--json", "--nproc", "2"]
    done = launch(command, cwd=Path("/")).ok()
    printed = json.loads(done.stdout)
    assert printed == json.loads((tmp_path / "run/result.json").read_text())
    digest = printed["metrics_digest"]
    assert f"logged to jsonl: a line in {tmp_path}/log.jsonl" in done.stderr
    assert [line["metrics_digest"] for line in lines_of(tmp_path / "log.jsonl")] == [digest]


def test_export_logs_a_finished_run(run: Path, offline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def export(*words: str | Path) -> str:
        cli.dualeval.main(["export", *map(str, words)], standalone_mode=False)
        return capsys.readouterr().out

    assert export(run, "--to", "jsonl:log.jsonl", "--step", "3") == "logged to jsonl: a line in log.jsonl\n"
    assert [line["step"] for line in lines_of(offline / "log.jsonl")] == [3]
    with pytest.raises(UsageError, match=r"there is no nothing/result\.json: give the output"):
        export("nothing", "--to", "jsonl:log.jsonl")
    with pytest.raises(UsageError, match=r"result\.json: give .* resumes when its own command is typed"):
        export(offline, "--to", "jsonl:log.jsonl")


def test_a_missing_package_is_named_before_anything_is_evaluated(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UsageError, match=r"needs the package mlflow.*pip install 'dualeval\[mlflow\]'"):
        dualeval.evaluate(TinyTask(5), launcher="none", out="out", loggers=["mlflow:x"])
    assert not (offline / "out").exists()
