"""Language modeling from the command line: the same bits on every backend, resumed runs, exit codes."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.causal_models import TEXTS, choice_rows, prompt_rows, save_causal, write_lines, write_texts
from tests.conftest import BIN, ROOT, Finished, Launch
from tests.launchers import needs, start
from tests.workers.example_tasks_worker import KILL
from tests.workers.language_worker import BATCH, KINDS

DUALEVAL: list[str | Path] = [sys.executable, "-m", "dualeval"]
WORKERS = ROOT / "tests/workers"
Results = dict[str, dict[str, Any]]
Run = Callable[..., Finished]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and data of the three kinds."""
    folder = tmp_path_factory.mktemp("home")
    save_causal(folder / "model")
    write_texts(folder / "texts")
    write_lines(folder / "choices.jsonl", choice_rows())
    write_lines(folder / "prompts.jsonl", prompt_rows())
    return folder


@pytest.fixture(scope="module")
def run(launch: Launch, home: Path) -> Run:
    """Evaluates all three kinds, one after the other in the same ranks."""

    def evaluate(out: Path, launcher: str = "none", size: int = 1, **variables: str) -> Finished:
        words = [*(start(launcher, size) if size > 1 else []), sys.executable]
        script = shlex.join([str(WORKERS / "language_worker.py"), str(home), str(out)])
        return launch([*words, WORKERS / "example_tasks_worker.py", script], variables=variables)

    return evaluate


def results_of(done: Finished, out: Path) -> Results:
    assert done.returncode == 0, done.stderr
    return {kind: {**result_of(out / kind), "rows": rows_of(out / kind)} for kind in KINDS}


def result_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "result.json").read_text())
    return found


def rows_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = pyarrow.parquet.read_table(out / "predictions.parquet").to_pydict()
    return found


@pytest.fixture(scope="module")
def wanted(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Results:
    out = tmp_path_factory.mktemp("wanted")
    return results_of(run(out), out)


def check(found: Results, wanted: Results) -> None:
    for kind in KINDS:
        for name in ("metrics", "metrics_digest", "samples_digest", "fingerprint", "rows"):
            assert found[kind][name] == wanted[kind][name]


@pytest.mark.parametrize(
    ("launcher", "size"),
    [
        ("torchrun", 2),
        pytest.param("torchrun", 3, marks=pytest.mark.long),
        pytest.param("horovodrun", 2, marks=[*needs("horovodrun", "horovod"), pytest.mark.long]),
    ],
)
def test_the_same_bits(run: Run, wanted: Results, tmp_path: Path, launcher: str, size: int) -> None:
    found = results_of(run(tmp_path, launcher, size), tmp_path)
    check(found, wanted)
    for result in found.values():
        assert result["world"]["size"] == size
        assert result["chunks"]["total"] >= 5 and result["chunks"]["resumed"] == 0


def test_a_killed_run_goes_on_with_more_ranks(run: Run, wanted: Results, tmp_path: Path) -> None:
    assert run(tmp_path, **{KILL: "0"}).returncode != 0
    assert not (tmp_path / KINDS[0] / "result.json").exists()
    found = results_of(run(tmp_path, "torchrun", 2), tmp_path)
    check(found, wanted)
    chunks = found[KINDS[0]]["chunks"]
    assert 0 < chunks["resumed"] < chunks["total"]


# -- the command line ----------------------------------------------------------------------------------


def command(home: Path, data: str | Path, out: Path, *more: str | Path) -> list[str | Path]:
    job: list[str | Path] = ["run", "--task", "language-modeling", "--model", home / "model"]
    return [*job, "--data", home / data, "--batch-size", str(BATCH), "--no-progress", "--out", out, *more]


@pytest.mark.long
def test_a_sharded_model_has_the_same_bits(
    launch: Launch, home: Path, wanted: Results, tmp_path: Path
) -> None:
    """Its ranks need more and fewer forwards of a batch: answers end where they end."""
    for kind in KINDS:
        words = command(home, kind, tmp_path / kind, "--shard", "fsdp")
        done = launch([*start("torchrun", 2), *DUALEVAL, *words])
        assert done.returncode == 0, done.stderr
        assert result_of(tmp_path / kind)["metrics_digest"] == wanted[kind]["metrics_digest"]


def error(done: Finished) -> str:
    assert done.returncode == 2, done.stderr
    [message] = [line for line in done.stderr.splitlines() if line.startswith("dualeval: error: ")]
    assert "Traceback" not in done.stderr
    return message


def test_bad_input(launch: Launch, home: Path, tmp_path: Path) -> None:
    bad = write_lines(tmp_path / "bad.jsonl", [{"text": "a"}, {"text": ""}])
    message = error(launch([*DUALEVAL, *command(home, bad, tmp_path / "out")]))
    assert f"{bad}, line 2: the column 'text' is empty" in message
    done = launch([*DUALEVAL, *command(home, bad, tmp_path / "skipped", "--on-error", "skip")])
    assert done.returncode == 0, done.stderr
    assert [each["id"] for each in result_of(tmp_path / "skipped")["failed"]] == ["1/0"]
    other = write_lines(tmp_path / "other.jsonl", [{"title": "a"}])
    message = error(launch([*DUALEVAL, *command(home, other, tmp_path / "other")]))
    assert f"{other} has the columns title: expected text" in message and "--text NAME" in message
    assert not (tmp_path / "other").exists()
    message = error(launch([*DUALEVAL, *command(home, "texts", tmp_path / "o", "--max-length", "65")]))
    assert "--max-length 65 is more than the 64 positions" in message


def test_the_commands_of_the_page(launch: Launch, home: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/gpt2").symlink_to(home / "model")
    (tmp_path / "models/gpt2-b").symlink_to(home / "model")
    (tmp_path / "texts").symlink_to(home / "texts")
    for name in KINDS[1:]:
        (tmp_path / name).symlink_to(home / name)
    page = (ROOT / "docs/language-modeling.md").read_text("utf-8")
    lines = [line for line in page.splitlines() if line.startswith("dualeval ")]
    assert len(lines) == 6
    for line in lines:
        done = launch([BIN / "dualeval", *shlex.split(line)[1:]], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    found = result_of(tmp_path / "runs/texts")
    assert found["clusters"]["count"] == len(TEXTS)
    # The page's output has the metrics of a run.
    assert all(f"│ {name} " in page for name in found["metrics"])
