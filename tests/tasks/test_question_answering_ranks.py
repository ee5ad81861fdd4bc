"""Question answering from the command line: the same bits on every backend, resumed runs, exit codes."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests import questions
from tests.conftest import BIN, ROOT, Finished, Launch
from tests.engine.test_digests import write_table
from tests.environments import read_variables
from tests.launchers import needs, start

DUALEVAL: list[str | Path] = [sys.executable, "-m", "dualeval"]
# Four batches, the last of them with the shortest windows: three ranks have one or two each.
BATCH_SIZE = "4"


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a run has left: result.json, and the bytes or rows of its other files."""

    result: dict[str, Any]
    files: dict[str, Any]


Run = Callable[..., Ran]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and questions."""
    folder = tmp_path_factory.mktemp("home")
    questions.save_tiny_bert(folder / "model")
    questions.write_questions(folder / "v2.json", unanswerable=True)
    return folder


def command(home: Path, out: Path, *more: str) -> list[str | Path]:
    job: list[str | Path] = [
        *("--task", "question-answering", "--model", home / "model", "--data", home / "v2.json"),
    ]
    return ["run", *job, "--batch-size", BATCH_SIZE, "--no-progress", "--out", out, *more]


@pytest.fixture(scope="module")
def run(launch: Launch, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    def evaluate(*more: str, before: list[str] | None = None) -> Ran:
        out = tmp_path_factory.mktemp("run") / "out"
        words = [*before, BIN / "dualeval"] if before else DUALEVAL
        launch([*words, *command(home, out, *more)]).ok()
        return ran(out)

    return evaluate


def ran(out: Path) -> Ran:
    return Ran(
        result=json.loads((out / "result.json").read_text()),
        files={
            **{name: (out / name).read_bytes() for name in ("predictions.json", "null_odds.json")},
            "rows": pyarrow.parquet.read_table(out / "predictions.parquet").to_pydict(),
        },
    )


@pytest.fixture(scope="module")
def wanted(run: Run) -> Ran:
    """One process, which computes two batches at a time where it has two cores."""
    one = run("--workers", "0")
    assert one.result["chunks"]["total"] == 4
    return one


def check(found: Ran, wanted: Ran, size: int, backend: str) -> None:
    world = found.result["world"]
    assert (world["size"], world["backend"]) == (size, backend)
    assert found.result["chunks"]["resumed"] == 0
    assert found.result["metrics"] == wanted.result["metrics"]
    assert found.result["metrics_digest"] == wanted.result["metrics_digest"]
    assert found.result["fingerprint"] == wanted.result["fingerprint"]
    assert found.result["work"] == wanted.result["work"]
    assert found.files == wanted.files


@pytest.mark.parametrize(
    ("size", "backend"),
    [
        (2, "torch"),
        *(pytest.param(size, "torch", marks=pytest.mark.long) for size in (1, 3)),
        *(
            pytest.param(size, "horovod", marks=[pytest.mark.needs("horovod"), pytest.mark.long])
            for size in (1, 2, 3)
        ),
    ],
)
def test_the_same_bits(run: Run, wanted: Ran, size: int, backend: str) -> None:
    """With reading processes, of which each has a tokenizer of its own."""
    check(run("--nproc", str(size), "--backend", backend), wanted, size, backend)


@pytest.mark.parametrize(
    ("launcher", "backend", "more"),
    [
        pytest.param(launcher, backend, more, marks=[*needs(launcher, backend), *marks])
        for launcher, backend, more, marks in [
            ("mpirun", "mpi", ["--backend", "mpi", "--schedule", "dynamic"], [pytest.mark.long]),
            ("torchrun", "torch", ["--schedule", "dynamic"], [pytest.mark.long]),
        ]
    ],
)
def test_other_launchers(run: Run, wanted: Ran, launcher: str, backend: str, more: list[str]) -> None:
    check(run(*more, before=start(launcher, 2)), wanted, 2, backend)


@pytest.fixture(scope="module")
def minilm(home: Path) -> list[str]:
    """The flags of a job on real questions: a real encoder that has learnt them; three batches."""
    folder = questions.save_fine_tuned(home / "minilm")
    return ["--model", str(folder), "--data", str(questions.squad_file()), "--batch-size", "2"]


@pytest.fixture(scope="module")
def written_table() -> Iterator[list[tuple[object, ...]]]:
    """Rows (model, launcher, backend, processes, digest), written to benchmarks/results/ at the end."""
    rows: list[tuple[object, ...]] = []
    yield rows
    write_table(
        "digests-question-answering",
        "Digests of question answering",
        ["model", "launcher", "backend", "processes", "metrics_digest"],
        rows,
    )


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("launcher", "backend"),
    [
        pytest.param(launcher, backend, marks=needs(launcher, backend))
        for launcher, backend in [("mpirun", "horovod"), ("horovodrun", "horovod"), ("torchrun", "torch")]
    ],
)
def test_every_launcher(
    launch: Launch,
    run: Run,
    wanted: Ran,
    minilm: list[str],
    home: Path,
    tmp_path: Path,
    written_table: list[tuple[object, ...]],
    launcher: str,
    backend: str,
) -> None:
    learnt: list[str] = []
    for size in (1, 2, 3, 4):
        words: list[str | Path] = [*start(launcher, size), BIN / "dualeval"]
        found = run("--backend", backend, before=start(launcher, size))
        check(found, wanted, size, backend)
        launch([*words, *command(home, tmp_path / str(size), *minilm, "--backend", backend)]).ok()
        result = json.loads((tmp_path / str(size) / "result.json").read_text())
        assert (result["metrics"]["exact_match"], result["metrics"]["f1"]) == (100.0, 100.0)
        learnt.append(result["metrics_digest"])
        for model, digest in [("tiny BERT", found.result["metrics_digest"]), ("MiniLM", learnt[-1])]:
            written_table.append((model, launcher, backend, size, f"`{digest[:16]}`"))
    assert len(set(learnt)) == 1


@pytest.mark.long
def test_a_question_without_room_stops_all_ranks(launch: Launch, home: Path, tmp_path: Path) -> None:
    """Unless it is to be left out."""
    out = tmp_path / "out"
    bad = home / "bad.json"
    content = json.loads((home / "v2.json").read_text("utf-8"))
    qas = content["data"][0]["paragraphs"][-1]["qas"]
    qas[0]["question"] = "why " * 400
    bad.write_text(json.dumps(content), "utf-8")
    words = [*command(home, out), "--data", str(bad)]
    stopped = launch([*DUALEVAL, *words, "--nproc", "2"])
    assert stopped.returncode == 2
    assert f"sample {qas[0]['id']} (index" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    launch([*DUALEVAL, *words, "--on-error", "skip", "--fresh"]).ok()
    [failed] = ran(out).result["failed"]
    assert failed["id"] == qas[0]["id"]
    assert qas[0]["id"] not in json.loads(ran(out).files["predictions.json"])


@pytest.mark.long
@pytest.mark.needs("horovod")
def test_a_stopped_run_goes_on_over_another_backend(launch: Launch, home: Path, tmp_path: Path) -> None:
    questions.write_questions(tmp_path / "many.json", unanswerable=True, copies=150)
    whole, out = tmp_path / "whole", tmp_path / "out"
    data = ["--data", str(tmp_path / "many.json")]
    assert launch([*DUALEVAL, *command(home, whole, *data)], timeout=280).returncode == 0
    with launch.started([*DUALEVAL, *command(home, out, *data, "--progress")]) as process:
        assert process.stdout is not None
        # Every few seconds, from a thread that sees how far the run is.
        assert "samples/s" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 75
    launch([*DUALEVAL, *command(home, out, *data, "--nproc", "2", "--backend", "horovod")], timeout=280).ok()
    assert 0 < ran(out).result["chunks"]["resumed"] < ran(out).result["chunks"]["total"]
    assert ran(out).result["metrics_digest"] == ran(whole).result["metrics_digest"]
    assert ran(out).files == ran(whole).files


def error(done: Finished) -> str:
    assert done.returncode == 2, done.stderr
    [message] = [line for line in done.stderr.splitlines() if line.startswith("dualeval: error: ")]
    assert "Traceback" not in done.stderr
    return message


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data", "none.json"], ["none.json", "cannot be read", "--data"]),
        (["--data", "cut.json"], ["cut.json is no JSON", "line 3 column"]),
        (["--data", "twice.json"], ["question ids must be unique", "a (2 times)"]),
        (["--model", "bert-base-uncased"], ["bert-base-uncased does not exist", "hf download"]),
    ],
)
def test_bad_input(launch: Launch, home: Path, tmp_path: Path, words: list[str], said: list[str]) -> None:
    qa = {"id": "a", "question": "?", "answers": []}
    text = json.dumps({"data": [{"paragraphs": [{"context": "c", "qas": [qa, qa]}]}]}, indent=1)
    (tmp_path / "twice.json").write_text(text)
    (tmp_path / "cut.json").write_text('{\n"data":\n[{"question": [}')
    arguments = [str(tmp_path / word) if word.endswith(".json") else word for word in words]
    message = error(launch([*DUALEVAL, *command(home, tmp_path / "out", *arguments)]))
    for part in said:
        assert part in message
    assert not (tmp_path / "out").exists()


def test_options_of_another_task(launch: Launch) -> None:
    message = error(launch([*DUALEVAL, "run", "--stride", "3"]))
    assert "--stride belongs to --task question-answering" in message
    message = error(launch([*DUALEVAL, "run", "--task", "question-answering"]))
    assert "needs --model DIR" in message


@pytest.mark.long
def test_a_job_file(launch: Launch, home: Path, wanted: Ran, tmp_path: Path) -> None:
    """Its paths count from its folder, the model's among them."""
    lines = ['task = "question-answering"', 'model = "model"', 'data = "v2.json"', "batch-size = 4"]
    (home / "job.toml").write_text("\n".join([*lines, "null-threshold = 0.5", "n-best = 20"]))
    words: list[str | Path] = [
        *("run", "--config", home / "job.toml", "--null-threshold", "0", "--out", tmp_path / "out"),
        "--json",
    ]
    done = launch([*DUALEVAL, *words], cwd=tmp_path).ok()
    assert json.loads(done.stdout)["metrics_digest"] == wanted.result["metrics_digest"]


def test_the_commands_of_the_page(launch: Launch, home: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/bert-squad").symlink_to(home / "model")
    (tmp_path / "dev-v2.0.json").symlink_to(home / "v2.json")
    page = (ROOT / "docs/question-answering.md").read_text("utf-8")
    commands = [line for line in page.splitlines() if line.startswith("dualeval ") and "--task" in line]
    assert len(commands) == 2
    for line in commands:
        launch([BIN / "dualeval", *line.split()[1:]], cwd=tmp_path).ok()
    found = [
        json.loads((tmp_path / f"runs/{name}/result.json").read_text())["metrics"]
        for name in ("squad", "score")
    ]
    assert found[1] == {name: found[0][name] for name in found[1]}
    assert "f1" in found[1]


# -- dualeval score --------------------------------------------------------------------------------


def test_score(launch: Launch, tmp_path: Path) -> None:
    """As it is typed, on real questions, for all to see and for scripts."""
    data = questions.squad_file()
    content = json.loads(data.read_text("utf-8"))["data"]
    given = {
        qa["id"]: qa["answers"][0]["text"].upper() + "!"
        for article in content
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
    }
    last = list(given)[-1]
    given[last] = "the wind"
    (tmp_path / "preds.json").write_text(json.dumps(given))
    words: list[str | Path] = [
        *("--task", "question-answering", "--data", data, "--predictions", "preds.json"),
        *("--out", "scores"),
    ]
    done = launch([*DUALEVAL, "score", *words], cwd=tmp_path).ok()
    assert "80.00 %" in done.stdout
    result = json.loads((tmp_path / "scores/result.json").read_text())
    assert result["metrics"] == questions.official_script().evaluate(content, given)
    assert result["samples"] == {"total": 5, "evaluated": 5, "failed": 0}
    assert json.loads((tmp_path / "scores/status.json").read_text())["state"] == "done"
    again = launch([*DUALEVAL, "score", *words, "--json"], cwd=tmp_path)
    assert json.loads(again.stdout)["metrics_digest"] == result["metrics_digest"]
    assert "finished before" in again.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--predictions", "number.json"], ["'a' is the number 3", "expected a text"]),
        ([], ["Missing option '--predictions'"]),
        (["--predictions", "stray.json"], ["none of the 1 ids"]),
        (["--predictions", "stray.json", "--task", "image-classification"], ["--task", "question-answering"]),
    ],
)
def test_bad_input_of_score(launch: Launch, tmp_path: Path, words: list[str], said: list[str]) -> None:
    for name, content in {"number": {"a": 3}, "stray": {"a": "b"}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    done = launch(
        [*DUALEVAL, "score", "--data", questions.squad_file(), *words, "--out", "out"], cwd=tmp_path
    )
    message = error(done)
    for part in said:
        assert part in message
    assert not (tmp_path / "out").exists()


def test_score_does_not_remove_what_it_reads(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "preds.json").write_text("{}")
    words: list[str | Path] = ["score", "--data", questions.squad_file(), "--predictions", "preds.json"]
    message = error(launch([*DUALEVAL, *words, "--out", ".", "--fresh"], cwd=tmp_path))
    assert "--predictions preds.json lies in the output folder" in message
    assert (tmp_path / "preds.json").exists()


def test_score_is_one_process(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "stray.json").write_text("{}")
    words: list[str | Path] = ["score", "--data", questions.squad_file(), "--predictions", "stray.json"]
    variables = read_variables("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 GROUP_RANK=0")
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    message = error(launch([*DUALEVAL, *words], cwd=tmp_path, variables=variables))
    assert "'dualeval score' is one process, but torchrun has started 2" in message
