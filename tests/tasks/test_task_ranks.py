"""The built-in tasks from the command line: the same bits on any ranks, killed runs, pages, bad input."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

from dualeval.tasks.options import TASKS
from tests.conftest import BIN, ROOT, Launch
from tests.vehicles import (
    adapters,
    causal_models,
    coco_data,
    harness_tasks,
    made_detectors,
    masked_pictures,
    questions,
    texts,
)
from tests.vehicles.launchers import needs, start
from tests.vehicles.workers.example_tasks_worker import KILL

DUALEVAL: list[str | Path] = [sys.executable, "-m", "dualeval"]
WORKER = ROOT / "tests/vehicles/workers/example_tasks_worker.py"
Run = Callable[..., dict[str, Any]]
# Two texts that cannot be read, in the third of seven batches; no sample of the last batch is whole.
EMPTY = (20, 22)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A small job of a task: what is typed in the folder ``home``, with a few batches."""

    task: str
    words: str

    def command(self, out: Path, *more: str | Path) -> list[str | Path]:
        words = ["run", "--task", self.task, *self.words.split(), "--no-progress"]
        return [*words, "--out", out, *more]


_LANGUAGE = "--model gpt2 --batch-size 3 --data"
JOBS = {
    "questions": Job(task="question-answering", words="--model bert --data v2.json --batch-size 4"),
    "labels": Job(
        task="text-classification",
        words="--model classifier --max-length 32 --data dev.csv --batch-size 8 --workers 0 --on-error skip",
    ),
    "masks": Job(
        task="segmentation",
        words="--model nets:make --weights net.pt --data val/img --masks val/masks --num-classes 5 "
        "--preprocessing none --batch-size 3 --workers 0",
    ),
    # Of a network whose numbers depend on the batch, and of boxes with masks.
    "boxes": Job(
        task="detection",
        words="--model hf:detr --data val2017 --annotations annotations/instances_val2017.json "
        "--batch-size 5 --bootstrap 50 --workers 0",
    ),
    "objects": Job(
        task="detection",
        words="--model tests.vehicles.coco_data:finder --weights random:0 --data val2017 "
        "--iou-type bbox,segm --batch-size 5 --bootstrap 0 --order shape --workers 0",
    ),
    "documents": Job(task="language-modeling", words=f"{_LANGUAGE} texts"),
    "losses": Job(task="language-modeling", words=f"{_LANGUAGE} texts --keep-losses"),
    "choices": Job(task="language-modeling", words=f"{_LANGUAGE} choices.jsonl"),
    # Of an adapter, and drawn: what makes answers differ most.
    "prompts": Job(
        task="language-modeling",
        words="--model lora --batch-size 3 --data prompts.jsonl --temperature 0.9 --top-p 0.8 --stop e "
        "--answers-per-prompt 3 --max-new-tokens 8",
    ),
    "harness": Job(
        task="lm-eval",
        words="--model chat --tasks both,words,pages,numbers --include-path tasks --batch-size 9 "
        "--bootstrap-iters 100 --apply-chat-template --temperature 0.9",
    ),
}
each_job = pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and data of all jobs."""
    folder = tmp_path_factory.mktemp("home")
    questions.save_tiny_bert(folder / "bert")
    questions.write_questions(folder / "v2.json", unanswerable=True)
    texts.save_classifier(folder / "classifier")
    table = texts.rows(52)
    texts.write(folder / "whole.csv", table)
    for place in EMPTY:
        table[place]["sentence"] = ""
    texts.write(folder / "dev.csv", table)
    (folder / "nets.py").write_text(masked_pictures.NETS)
    masked_pictures.write_pictures(folder / "val")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = torch.nn.Conv2d(3, masked_pictures.CLASSES, 3)
    torch.save({f"layer.{name}": value for name, value in layer.state_dict().items()}, folder / "net.pt")
    pictures, annotations = coco_data.write_coco(folder, 22)
    pictures.rename(folder / "val2017")
    (folder / "annotations").mkdir()
    annotations.rename(folder / "annotations" / "instances_val2017.json")
    made_detectors.write_detector(folder / "detr", "detr")
    causal_models.save_causal(folder / "gpt2")
    adapters.save_adapter(folder / "lora", adapters.causal(folder / "gpt2"), target_modules=["c_attn"])
    causal_models.write_texts(folder / "texts")
    causal_models.write_lines(folder / "choices.jsonl", causal_models.choice_rows())
    causal_models.write_lines(folder / "prompts.jsonl", causal_models.prompt_rows())
    harness_tasks.save_model(folder / "chat")
    harness_tasks.write_tasks(folder / "tasks")
    keys: list[dict[str, Any]] = [
        {"task": task, "document": number, "index": 0}
        for task in ("words", "numbers")
        for number in range(13)
    ]
    answers = {"words": [-1.5, False], "numbers": "the sea"}
    causal_models.write_lines(
        folder / "answers.jsonl", [{**key, "answer": answers[key["task"]]} for key in keys]
    )
    return folder


def result_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "result.json").read_text())
    return found


def bits_of(out: Path) -> dict[str, Any]:
    """What has to be equal, to the last bit, however it was computed."""
    result = result_of(out)
    names = ("metrics", "metrics_digest", "samples_digest", "fingerprint", "intervals", "work", "failed")
    exports = {path.name: path.read_bytes() for path in sorted(out.glob("*.json"))}
    for name in ("result.json", "job.json", "status.json"):
        del exports[name]
    # As text: a NaN is not equal to itself.
    rows = repr(pyarrow.parquet.read_table(out / "predictions.parquet").to_pydict())
    return {**{name: result[name] for name in names}, **exports, "rows": rows}


@pytest.fixture(scope="module")
def wanted(launch: Launch, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The bits of a job in one process, which is evaluated once; its rows give the same ones."""
    known: dict[str, dict[str, Any]] = {}

    def once(job: Job) -> dict[str, Any]:
        if job.words not in known:
            out = tmp_path_factory.mktemp("one") / "out"
            launch([*DUALEVAL, *job.command(out, "--workers", "0")], cwd=home).ok()
            launch([*DUALEVAL, "verify", out], cwd=home).ok()
            known[job.words] = bits_of(out)
        return known[job.words]

    return once


@each_job
@pytest.mark.parametrize(
    ("launcher", "size"),
    [
        ("torchrun", 2),
        pytest.param("torchrun", 3, marks=pytest.mark.long),
        pytest.param("horovodrun", 2, marks=[*needs("horovodrun", "horovod"), pytest.mark.long]),
    ],
)
def test_launchers_and_ranks_change_no_bit(
    launch: Launch, home: Path, wanted: Run, tmp_path: Path, job: Job, launcher: str, size: int
) -> None:
    """Of questions with reading processes, of which each has a tokenizer of its own."""
    launch([*start(launcher, size), *DUALEVAL, *job.command(tmp_path)], cwd=home).ok()
    assert bits_of(tmp_path) == wanted(job)
    result = result_of(tmp_path)
    assert result["world"]["size"] == size
    assert result["chunks"]["total"] >= 4 and result["chunks"]["resumed"] == 0
    assert len(result["failed"]) == (len(EMPTY) if job is JOBS["labels"] else 0)


@pytest.mark.parametrize(
    "name",
    [
        *("questions", "prompts"),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("documents", "losses", "harness", "boxes", "objects")
        ),
    ],
)
def test_a_killed_run_goes_on_with_more_ranks(
    launch: Launch, home: Path, wanted: Run, tmp_path: Path, name: str
) -> None:
    job = JOBS[name]
    command = shlex.join(["dualeval", *map(str, job.command(tmp_path))])
    killed = launch([sys.executable, WORKER, command], variables={KILL: "0"}, cwd=home)
    assert killed.returncode != 0 and not (tmp_path / "result.json").exists()
    launch([*start("torchrun", 2), sys.executable, WORKER, command], cwd=home).ok()
    chunks = result_of(tmp_path)["chunks"]
    assert 0 < chunks["resumed"] < chunks["total"]
    assert bits_of(tmp_path) == wanted(job)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["documents", "choices", "prompts"])
def test_a_sharded_model_has_the_same_bits(
    launch: Launch, home: Path, wanted: Run, tmp_path: Path, kind: str
) -> None:
    """Its ranks need more and fewer forwards of a batch: answers end where they end."""
    words = JOBS[kind].command(tmp_path, "--shard", "fsdp")
    launch([*start("torchrun", 2), *DUALEVAL, *words], cwd=home).ok()
    assert result_of(tmp_path)["metrics_digest"] == wanted(JOBS[kind])["metrics_digest"]


# What the commands of the pages name, and what stands there in this test.
PAGES = {
    "question-answering": {"models/bert-squad": "bert", "dev-v2.0.json": "v2.json"},
    "text-classification": {"models/reviews": "classifier", "reviews.csv": "whole.csv"},
    "segmentation": {name: name for name in ("nets.py", "net.pt", "val")},
    "detection": {"models/rtdetr": "detr", "val2017": "val2017", "annotations": "annotations"},
    "language-modeling": {
        "models/gpt2": "gpt2",
        "models/gpt2-b": "gpt2",
        **{name: name for name in ("texts", "choices.jsonl", "prompts.jsonl")},
    },
    "lm-eval": {"models/gpt2": "chat", "tasks": "tasks", "answers.jsonl": "answers.jsonl"},
}


@pytest.mark.parametrize("task", PAGES)
def test_the_commands_of_a_tasks_page_run(launch: Launch, home: Path, tmp_path: Path, task: str) -> None:
    (tmp_path / "models").mkdir()
    for name, there in PAGES[task].items():
        (tmp_path / name).symlink_to(home / there)
    page = (ROOT / f"docs/{task}.md").read_text("utf-8")
    commands = [line for line in page.splitlines() if line.startswith("dualeval ")]
    assert f"dualeval run --task {task} " in commands[0]
    for line in commands:
        done = launch([BIN / "dualeval", *shlex.split(line)[1:]], cwd=tmp_path).ok()
        if line == commands[0]:
            # The output that the page shows has the lines of a run.
            shown = next((block for block in page.split("```") if block.startswith("\nmodel ")), "")
            first = {line.split()[0] for line in shown.splitlines() if line and line[0].isalpha()}
            printed = {line.split()[0] for line in (done.stdout + done.stderr).splitlines() if line.strip()}
            assert first - {"warning:"} <= printed  # these texts are not cut


def test_every_task_with_a_model_has_its_page_tried() -> None:
    assert {*PAGES, "image-classification"} == {*TASKS}
