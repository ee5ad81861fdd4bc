"""Text classification from the command line: the same bits on every backend, resumed runs, exit codes."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from torch import nn

from dualeval.engine import recorder
from dualeval.engine.folder.layout import SUFFIX, journal_of
from dualeval.tasks.text_classification import TextClassification
from tests import texts
from tests.conftest import BIN, ROOT, Launch
from tests.engine.test_evaluator import evaluate, rows

DUALEVAL: list[str | Path] = [sys.executable, "-m", "dualeval"]
# Seven batches; two rows in the third are empty, and no sample of the last is whole.
BATCH_SIZE, COUNT = 8, 52
EMPTY = (20, 22)

Ran = tuple[dict[str, Any], dict[str, list[Any]]]
Run = Callable[..., Ran]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and texts."""
    folder = tmp_path_factory.mktemp("home")
    texts.save_classifier(folder / "model")
    table = texts.rows(COUNT)
    texts.write(folder / "whole.csv", table)
    for place in EMPTY:
        table[place]["sentence"] = ""
    texts.write(folder / "dev.csv", table)
    return folder


def command(home: Path, out: Path, *more: str | Path) -> list[str | Path]:
    job: list[str | Path] = ["--task", "text-classification", "--model", home / "model", "--max-length", "32"]
    size = ["--batch-size", str(BATCH_SIZE), "--no-progress"]
    return ["run", *job, "--data", home / "dev.csv", *size, "--on-error", "skip", "--out", out, *more]


def ran(out: Path) -> Ran:
    table = pyarrow.parquet.read_table(out / "predictions.parquet")
    return json.loads((out / "result.json").read_text()), table.to_pydict()


@pytest.fixture(scope="module")
def run(launch: Launch, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    def evaluate(*more: str) -> Ran:
        out = tmp_path_factory.mktemp("run") / "out"
        done = launch([*DUALEVAL, *command(home, out, *more)])
        assert done.returncode == 0, done.stderr
        return ran(out)

    return evaluate


@pytest.fixture(scope="module")
def wanted(run: Run) -> Ran:
    one = run("--workers", "0")
    assert [each["id"] for each in one[0]["failed"]] == [str(place) for place in EMPTY]
    assert "rows" not in one[0]["failed"][0]["error"]
    assert "dev.csv, line 22: the column 'sentence' is empty" in one[0]["failed"][0]["error"]
    return one


@pytest.mark.parametrize(
    ("size", "backend"),
    [
        (2, "torch"),
        *(pytest.param(size, "torch", marks=pytest.mark.long) for size in (1, 3)),
        pytest.param(2, "horovod", marks=[pytest.mark.needs("horovod"), pytest.mark.long]),
    ],
)
def test_the_same_bits(run: Run, wanted: Ran, size: int, backend: str) -> None:
    """With reading processes, of which each has a tokenizer of its own."""
    found, of_samples = run("--nproc", str(size), "--backend", backend)
    assert (found["world"]["size"], found["world"]["backend"]) == (size, backend)
    for name in ("metrics", "metrics_digest", "fingerprint", "work", "failed"):
        assert found[name] == wanted[0][name]
    assert of_samples == wanted[1]


class Ending(TextClassification):
    """Raises in the forward of one of its batches."""

    __module__ = TextClassification.__module__
    left = 2

    def forward(self, model: nn.Module, batch: dict[str, Any]) -> Any:
        self.left -= self._num_classes is not None
        if self.left < 0:
            raise RuntimeError("enough")
        return super().forward(model, batch)


def test_a_run_goes_on(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_look: None) -> None:
    monkeypatch.setattr(recorder, "FLUSH_ROWS", BATCH_SIZE)
    options: dict[str, Any] = {"model": home / "model", "data": home / "whole.csv", "max_length": 32}
    whole = evaluate(TextClassification(**options), tmp_path / "whole", batch_size=BATCH_SIZE)
    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="enough"):
        evaluate(Ending(**options), out, batch_size=BATCH_SIZE)
    result = evaluate(TextClassification(**options), out, batch_size=BATCH_SIZE)
    assert result.chunks["resumed"] == 2
    assert result.metrics_digest == whole.metrics_digest
    assert rows(out) == rows(tmp_path / "whole")


@pytest.mark.long
@pytest.mark.needs("horovod")
def test_a_killed_run_goes_on_over_another_backend(launch: Launch, home: Path, tmp_path: Path) -> None:
    many = texts.write(tmp_path / "many.jsonl", texts.rows(12_000))
    out = tmp_path / "out"
    words = command(home, out, "--data", many)
    with launch.started([*DUALEVAL, *words, "--progress"]) as process:
        assert process.stdout is not None
        # Every few seconds a line, until a rank has written what is finished.
        while not journal_of(out).is_dir() or not any(journal_of(out).glob(f"*{SUFFIX}")):
            assert "samples/s" in process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    done = launch([*DUALEVAL, *words, "--nproc", "2", "--backend", "horovod"], timeout=280)
    assert done.returncode == 0, done.stderr
    whole = command(home, tmp_path / "whole", "--data", many)
    assert launch([*DUALEVAL, *whole], timeout=280).returncode == 0
    (found, of_samples), wanted = ran(out), ran(tmp_path / "whole")
    assert 0 < found["chunks"]["resumed"] < found["chunks"]["total"]
    assert (found["metrics_digest"], of_samples) == (wanted[0]["metrics_digest"], wanted[1])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data", "none.csv"], "none.csv does not exist. Expected a file .csv, .tsv, .jsonl, .parquet."),
        (["--on-error", "stop"], "dev.csv, line 22: the column 'sentence' is empty, expected a text"),
        (
            ["--data", "other.csv"],
            "other.csv, line 2: the label (column 'label') is 'mixed'. The model's classes:",
        ),
    ],
)
def test_bad_input(launch: Launch, home: Path, tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "other.csv").write_text("text,label\na film,mixed\n")
    arguments = [str(tmp_path / word) if word.endswith(".csv") else word for word in words]
    done = launch([*DUALEVAL, *command(home, tmp_path / "out", *arguments)])
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_commands_of_the_page(launch: Launch, home: Path, tmp_path: Path) -> None:
    """The page shows the lines that it prints."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models/reviews").symlink_to(home / "model")
    (tmp_path / "reviews.csv").symlink_to(home / "whole.csv")
    page = (ROOT / "docs/text-classification.md").read_text("utf-8")
    _, typed, _, shown = page.split("```")[:4]
    done = launch([BIN / "dualeval", *typed.split()[2:]], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first = {line.split()[0] for line in shown.splitlines() if line and line[0].isalpha()}
    printed = {line.split()[0] for line in (done.stdout + done.stderr).splitlines() if line.strip()}
    assert first <= printed
