"""The evaluator in one process: right numbers, rows in order, failed samples, the output folder."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
import torch._dynamo  # here, not with the first export: the import sets an environment variable
from torch import nn

from dualeval.engine.folder import journal, predictions, recorder, row_windows
from dualeval.engine.model.preparation import set_evaluation_mode
from dualeval.engine.values import plan
from dualeval.engine.values.options import NEW_FOLDER
from dualeval.errors import ExactlyOnceError, UsageError
from dualeval.tasks import Task
from tests.vehicles.sessions import FILES, noted
from tests.vehicles.sessions import evaluate as evaluate
from tests.vehicles.tiny import CLASSES, FEATURES, TinyTask


def rows(out: Path) -> dict[str, list[Any]]:
    table: dict[str, list[Any]] = pyarrow.parquet.read_table(out / "predictions.parquet").to_pydict()
    return table


def test_metrics_are_those_of_the_rows(tmp_path: Path) -> None:
    result = evaluate(TinyTask(1000), tmp_path / "out", batch_size=32)
    table = rows(tmp_path / "out")
    assert table["id"] == [f"tiny/{index}" for index in range(1000)]
    assert table["index"] == list(range(1000))
    assert table["target"] == [index * 31 % 7 for index in range(1000)]
    assert result.metrics["loss"] == math.fsum(table["loss"]) / 1000
    right = [a == b for a, b in zip(table["target"], table["prediction"], strict=True)]
    assert result.metrics["top1"] == sum(right) / 1000
    assert result.samples == {"total": 1000, "evaluated": 1000, "failed": 0}
    assert result.chunks == {"total": 32, "evaluated_now": 32, "resumed": 0}
    written = json.loads((tmp_path / "out/result.json").read_text())
    assert written["metrics"] == result.metrics
    assert written["metrics_digest"] == result.metrics_digest
    job = json.loads((tmp_path / "out/job.json").read_text())
    assert " ".join(job) == "fingerprint job machine files task_class metrics options"
    assert json.loads((tmp_path / "out/status.json").read_text())["state"] == "done"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES


def test_limit_is_the_first_samples(tmp_path: Path) -> None:
    result = evaluate(TinyTask(50), tmp_path / "out", batch_size=8, limit=21)
    assert result.samples["total"] == 21
    assert rows(tmp_path / "out")["index"] == list(range(21))
    assert evaluate(TinyTask(5), tmp_path / "more", limit=100).samples["total"] == 5


@pytest.mark.parametrize(("count", "broken", "rows_a_file"), [(500, [17, 18], 20), (12, range(8), 1)])
def test_grouping_of_integer_work_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, broken: Sequence[int], rows_a_file: int
) -> None:
    """Also where no sample of the first batches can be read."""
    wanted = evaluate(TinyTask(count, broken), tmp_path / "a", batch_size=4, on_error="skip")
    assert wanted.samples["failed"] == len(broken)
    monkeypatch.setattr(recorder, "FLUSH_ROWS", rows_a_file)
    monkeypatch.setattr(row_windows, "WINDOW_ROWS", 50)
    found = evaluate(TinyTask(count, broken), tmp_path / "b", batch_size=4, on_error="skip")
    assert found.metrics_digest == wanted.metrics_digest
    assert repr(rows(tmp_path / "b")) == repr(rows(tmp_path / "a"))


def test_more_batches_than_chunks_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = evaluate(TinyTask(200), tmp_path / "a", batch_size=4)
    monkeypatch.setattr(plan, "MAX_CHUNKS", 7)
    found = evaluate(TinyTask(200), tmp_path / "b", batch_size=4)
    assert found.chunks["total"] == 7
    assert found.metrics_digest == wanted.metrics_digest


@pytest.mark.parametrize("workers", [0, 2])
def test_failed_samples_are_left_out_and_listed(out: Path, workers: int) -> None:
    broken = [3, 8, 9, 10, 11, 29]  # 8 to 11: a whole batch, met before any other was read by its rank
    result = evaluate(TinyTask(30, broken), out, batch_size=4, on_error="skip", workers=workers)
    assert result.samples == {"total": 30, "evaluated": 24, "failed": 6}
    assert [entry["id"] for entry in result.failed] == [f"tiny/{index}" for index in broken]
    assert result.failed[0]["error"] == "OSError: sample 3 is broken"
    table = rows(out)
    losses = [loss for index, loss in enumerate(table["loss"]) if index not in broken]
    assert all(table[name][index] is None for name in ("loss", "target", "top") for index in broken)
    assert result.metrics["loss"] == math.fsum(losses) / 24
    assert "6 samples could not be read and are left out of all metrics" in result.warnings[0]


@pytest.mark.parametrize(
    ("broken", "on_error", "message"),
    [
        (
            [4],
            "stop",
            r"sample tiny/4 \(index 4\) cannot be read: OSError: sample 4 is broken.*--on-error skip",
        ),
        (range(10), "skip", "none of the 10 samples could be read; the first, tiny/0: OSError"),
    ],
)
def test_what_cannot_go_on_says_why(
    tmp_path: Path, broken: Sequence[int], on_error: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        evaluate(TinyTask(10, broken), tmp_path, batch_size=4, on_error=on_error)
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["reason"]) == ("failed", 2, str(caught.value))
    assert not (tmp_path / "result.json").exists()


def test_a_new_folder_is_named_after_time_and_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = evaluate(TinyTask(5), NEW_FOLDER)
    assert result.folder is not None
    folder = Path(result.folder)
    assert folder.parent == tmp_path / "runs"
    assert folder.name.endswith(result.fingerprint[:8])
    assert (folder / "result.json").is_file()


def test_rows_of_a_chunk_twice_are_refused(tmp_path: Path) -> None:
    the_plan = plan.EvalPlan(num_samples=2, batch_size=1)
    writer = journal.JournalWriter(tmp_path, fingerprint="", machine={}, prefix="x")
    row = {"evaluated": torch.ones(1, dtype=torch.uint8)}
    for chunk in (0, 0):
        writer.write([chunk], [1], torch.zeros(1, dtype=torch.int64), row)
    files = [journal.read_journal_file(path) for path in writer.written]
    with pytest.raises(Exception, match=r"chunk 0 is in .* and again in"):
        predictions.write_predictions(tmp_path / "p", files, the_plan, TinyTask(2), TinyTask(2).dataset(), ())
    with pytest.raises(Exception, match=r"no journal file holds the rows of chunks \[1\]"):
        predictions.write_predictions(
            tmp_path / "p", files[:1], the_plan, TinyTask(2), TinyTask(2).dataset(), ()
        )


class Before:
    """Has what a task needed once."""

    name = "before"


class Losing(TinyTask):
    def observe(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: column[1:] for name, column in super().observe(outputs, batch).items()}


class Without(TinyTask):
    def build_model(self) -> torch.nn.Module:  # type: ignore[override]
        return torch.nn.Identity()


def writing(name: str) -> TinyTask:
    made: type[TinyTask] = type("Writing", (TinyTask,), {"exports": {name: "loss"}})
    return made(5)


@pytest.mark.parametrize(
    ("task", "error", "said"),
    [
        (TinyTask(0), UsageError, "the data set is empty"),
        (Before(), UsageError, "Before is not a task: expected an object whose class is derived"),
        (TinyTask, UsageError, r"TinyTask is the class of a task: give an object of it, TinyTask\("),
        (Losing(8), ExactlyOnceError, r"of batch 0 \(samples 0 to 7\) has 7 values, expected 8"),
        (
            *(Without(5), UsageError),
            r"^Without.build_model\(\) does not accept its arguments: .*_model\(self, device\).$",
        ),
        *(
            (writing(name), UsageError, f"exports has '{name}'")
            for name in ("../values.json", "result.json", "values.txt")
        ),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    tmp_path: Path, task: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        evaluate(task, tmp_path / "out", batch_size=8)
    assert not (tmp_path / "out/result.json").exists()
    assert error is ExactlyOnceError or not (tmp_path / "out").exists(), "nothing was begun"


def test_a_task_has_all_methods() -> None:
    class Unfinished(Task):
        name = "unfinished"

    with pytest.raises(TypeError, match=r"abstract.*build_model.*dataset.*forward.*metrics.*observe"):
        Unfinished()  # type: ignore[abstract]


def test_a_file_of_a_tasks_own_has_the_values_by_id(out: Path) -> None:
    class Writing(TinyTask):
        exports = {"my-losses.json": "loss"}  # noqa: RUF012

    for _ in range(2):
        evaluate(Writing(20, broken=[3]), out, batch_size=8, on_error="skip", fresh=True)
    found = json.loads((out / "my-losses.json").read_text())
    table = rows(out)
    losses = dict(zip(table["id"], table["loss"], strict=True))
    assert losses.pop("tiny/3") is None
    assert found == losses
    assert list(found) == list(losses)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    for name in ("journal/notes.txt", "other.partial"):
        (tmp_path / name).write_text("kept")
    first = evaluate(TinyTask(5), tmp_path)
    assert evaluate(TinyTask(5), tmp_path, fresh=True).metrics_digest == first.metrics_digest
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "done"
    assert (tmp_path / "journal/notes.txt").read_text() == (tmp_path / "other.partial").read_text() == "kept"


# -- a model left in training mode: set to evaluation, and said; what cannot be set is said too ---------


class Dropping(TinyTask):
    """Its model drops half of what it sees, unless it is in evaluation mode."""

    def __init__(self, *, training: bool, last: nn.Module | None = None) -> None:
        super().__init__(200)
        self._training = training
        self._last = nn.Dropout(0.5) if last is None else last

    def build_model(self, device: torch.device) -> nn.Module:
        model = nn.Sequential(super().build_model(device), self._last)
        return model.train(self._training)

    def notes(self) -> list[str]:
        return [f"a model of {CLASSES} classes"]


class Stubborn(nn.Dropout):
    """Stays in training mode, as for Monte Carlo dropout."""

    def train(self, mode: bool = True) -> Stubborn:
        return super().train(True)


class Part(Dropping):
    def build_model(self, device: torch.device) -> nn.Module:
        model = super().build_model(device)
        model.get_submodule("1").train()
        return model


@pytest.mark.parametrize(
    ("task", "modules"),
    [(Dropping(training=True), "3 modules: the model itself, 0, 1"), (Part(training=False), "1 module: 1")],
)
def test_a_model_in_training_mode_is_set_to_evaluation(tmp_path: Path, task: TinyTask, modules: str) -> None:
    wanted, [own] = noted(Dropping(training=False), tmp_path / "a", batch_size=16)
    assert own == "a model of 7 classes"
    found, [own, note] = noted(task, tmp_path / "b", batch_size=16)
    assert note == f"the model was in training mode, and was set to evaluation mode ({modules})"
    assert found.metrics_digest == wanted.metrics_digest


def test_what_stays_in_training_mode_is_said(tmp_path: Path) -> None:
    _, [_, first, second, *_] = noted(
        Dropping(training=True, last=Stubborn(0.5)), tmp_path / "out", batch_size=16
    )
    assert "was set to evaluation mode (2 modules: the model itself, 0)" in first
    assert "stays in training mode after model.eval() in 1 module: 1: its own train() method" in second


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_exported_graph_has_no_modes() -> None:
    example: tuple[Any, ...] = (torch.zeros(2, FEATURES),)
    model = torch.export.export(nn.Sequential(nn.Linear(FEATURES, 3), nn.Dropout()), example).module()
    [note] = set_evaluation_mode(model)
    assert "cannot be set to evaluation mode" in note
    assert "export it after model.eval()" in note
