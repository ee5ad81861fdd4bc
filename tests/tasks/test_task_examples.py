"""The examples of tasks: right values, the same bits in each way to start them, killed and gone on with."""

from __future__ import annotations

import ast
import math
import runpy
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import dualeval
from dualeval.result import Result
from tests.conftest import ROOT, Launch
from tests.engine.end.test_endings import read
from tests.vehicles import causal_models, questions
from tests.vehicles.launchers import start
from tests.vehicles.made_tokenizers import RIVER

EXAMPLES = ROOT / "examples"
WORKER = ROOT / "tests/vehicles/workers/example_tasks_worker.py"


@dataclass(frozen=True)
class Example:
    """An example: its file, the name of its task there, and the most lines it may take."""

    file: str
    task: str
    most: int

    @property
    def path(self) -> Path:
        return EXAMPLES / f"{self.file}.py"

    def words(self, model: Path) -> list[str]:
        """What its script is given."""
        return [str(model), str(model / "text.txt")] if self.file == "perplexity" else []


ALL = [
    Example("regression", "diabetes", 12),
    Example("multilabel", "digits", 12),
    Example("perplexity", "perplexity", 20),
    Example("detection", "rectangles", 12),
    Example("segmentation", "shapes", 15),
]
each_example = pytest.mark.parametrize("example", ALL, ids=lambda example: example.file)


# -- lines -----------------------------------------------------------------------------------------------


def names_in(nodes: list[ast.stmt]) -> set[str]:
    return {node.id for each in nodes for node in ast.walk(each) if isinstance(node, ast.Name)}


def lines_of(nodes: list[ast.stmt], text: str) -> int:
    """Lines of statements, without comments and empty ones."""
    found = [line for node in nodes for line in text.splitlines()[node.lineno - 1 : node.end_lineno]]
    return len([line for line in found if line.strip() and not line.lstrip().startswith("#")])


@each_example
def test_an_example_has_as_many_lines_as_it_says(example: Example) -> None:
    """Those below its mark, and the imports that neither model nor data need."""
    text = example.path.read_text("utf-8")
    mark = text[: text.index("# -- for dualeval")].count("\n")
    body = ast.parse(text).body[1:]
    below = [node for node in body if node.lineno > mark]
    above = [node for node in body if node not in below]
    imports = [node for node in above if isinstance(node, ast.Import | ast.ImportFrom)]
    needed = names_in([node for node in above if node not in imports])
    bound = {
        node: {(alias.asname or alias.name).partition(".")[0] for alias in node.names} for node in imports
    }
    own = [node for node in imports if not bound[node] & needed]
    assert all(names <= needed | names_in(below) for names in bound.values())
    lines = lines_of([*own, *below], text)
    assert f"{lines} lines are for dualeval" in text
    assert lines <= example.most


# -- values ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small causal language model with its tokenizer, and a text beside it."""
    folder = tmp_path_factory.mktemp("causal")
    causal_models.save_causal(folder, n_positions=256, initializer_range=0.3)
    (folder / "text.txt").write_text(" ".join(f"{number}: {RIVER}" for number in range(100)), "utf-8")
    return folder


def regression(defined: dict[str, Any], model: Path) -> dict[str, float]:
    from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

    truth, predicted = defined["y"][300:], defined["fitted"].predict(defined["x"][300:])
    functions = {"mae": mean_absolute_error, "rmse": root_mean_squared_error, "r2": r2_score}
    return {name: float(function(truth, predicted)) for name, function in functions.items()}


def multilabel(defined: dict[str, Any], model: Path) -> dict[str, float]:
    from sklearn.metrics import average_precision_score, roc_auc_score

    inputs, labels = defined["pictures"].tensors
    functions = {"auroc": roc_auc_score, "map": average_precision_score}
    return {name: float(function(labels, defined["lines"](inputs))) for name, function in functions.items()}


def perplexity(defined: dict[str, Any], model: Path) -> dict[str, float]:
    """The loop of transformers' own page on perplexity, a window at a time."""
    library = questions.transformers()
    causal = library.AutoModelForCausalLM.from_pretrained(model).eval()
    tokenizer = library.AutoTokenizer.from_pretrained(model)
    tokens = tokenizer((model / "text.txt").read_text("utf-8"), return_tensors="pt").input_ids
    total, count, ended = 0.0, 0, 0
    for begin in range(0, tokens.shape[1], 128):
        end = min(begin + 256, tokens.shape[1])
        inputs = tokens[:, begin:end]
        labels = inputs.clone()
        labels[:, : ended - begin] = -100
        predicted = int((labels[:, 1:] != -100).sum())
        total += float(causal(inputs, labels=labels).loss) * predicted
        count += predicted
        ended = end
        if end == tokens.shape[1]:
            break
    assert count == tokens.shape[1] - 1
    return {"perplexity": math.exp(total / count)}


def detection(defined: dict[str, Any], model: Path) -> dict[str, float]:
    """A picture at a time, by TorchMetrics."""
    from torchmetrics.detection import MeanAveragePrecision

    metric = MeanAveragePrecision(box_format="xywh")
    for image, target in defined["pictures"]:
        outputs = defined["detr"](image[None])
        scores, labels = outputs["logits"][0].softmax(1)[:, :3].max(1)
        metric.update([{"boxes": outputs["boxes"][0], "scores": scores, "labels": labels}], [target])
    found = metric.compute()
    return {"ap": float(found["map"]), "ap50": float(found["map_50"])}


def segmentation(defined: dict[str, Any], model: Path) -> dict[str, float]:
    from sklearn.metrics import jaccard_score

    images, labels = (torch.stack(part) for part in zip(*defined["pictures"], strict=True))
    found = defined["model"](images).argmax(1)
    return {"mean_iou": float(jaccard_score(labels.flatten(), found.flatten(), average="macro"))}


REFERENCES: dict[str, Callable[[dict[str, Any], Path], dict[str, float]]] = {
    each.__name__: each for each in (regression, multilabel, perplexity, detection, segmentation)
}


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, tuple[Result, dict[str, Any]]]:
    """Of each example the result of one process, and what its file defines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 1)
        found = {}
        for example in ALL:
            defined = runpy.run_path(str(example.path), run_name=example.file)
            task = defined[example.task]
            task = task(*example.words(model)) if callable(task) else task
            found[example.file] = (dualeval.evaluate(task, launcher="none", workers=0), defined)
    return found


@each_example
def test_an_example_measures_what_others_do(
    alone: dict[str, tuple[Result, dict[str, Any]]], model: Path, example: Example
) -> None:
    result, defined = alone[example.file]
    with torch.no_grad():
        expected = REFERENCES[example.file](defined, model)
    for name, value in expected.items():
        # Ranks and classes of near ties may differ where pictures are computed one by one.
        exact = example.file in ("regression", "perplexity")
        assert result.metrics[name] == pytest.approx(value, rel=2e-6 if exact else 1e-4), name
        assert value > 0.05 and not math.isclose(value, 1)
    assert result.samples["failed"] == 0 and result.samples["total"] > 128


# -- the same bits ---------------------------------------------------------------------------------------


def test_two_ranks_give_the_same_bits(
    launch: Launch, tmp_path: Path, model: Path, alone: dict[str, tuple[Result, dict[str, Any]]]
) -> None:
    """All scripts in turn, by the same two ranks."""
    commands = [shlex.join([str(example.path), *example.words(model)]) for example in ALL]
    launch([*start("torchrun", 2), sys.executable, WORKER, *commands], cwd=tmp_path).ok()
    for example in ALL:
        result = read(tmp_path / f"runs/{example.file}/result.json")
        assert result["metrics_digest"] == alone[example.file][0].metrics_digest, example
        assert result["world"]["size"] == 2
