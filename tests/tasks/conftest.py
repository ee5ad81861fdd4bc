"""Small models and data of several files of tests, made once; helpers for both doors and for refusals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import dualeval.tasks
from dualeval.errors import EXIT_USAGE, UsageError
from dualeval.options.job import Job
from dualeval.result import Result
from dualeval.vision_library import torchvision
from tests.engine.test_evaluator import evaluate
from tests.vehicles import masked_pictures, questions
from tests.vehicles.causal_models import choice_rows, prompt_rows, save_causal, write_lines, write_texts
from tests.vehicles.published_weights import cache, publish

__all__ = ["cache", "publish"]  # fixtures

# Imported here, not in the first test that needs it: the import sets an environment variable.
torchvision()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small BERT that answers questions, of random weights."""
    return questions.save_tiny_bert(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hard questions in both formats."""
    folder = tmp_path_factory.mktemp("data")
    return {
        version: questions.write_questions(folder / f"{version}.json", unanswerable=version == "v2.0")
        for version in ("v1.1", "v2.0")
    }


def check_doors(
    task: str, kind: str, typed: dict[str, Any], modules: Sequence[Any] = (), **more: Any
) -> Result:
    """The class and the command line have the same job; modules and factories have its numbers alone."""
    whole = evaluate(Job.of(task, **typed).make_task(), None, batch_size=4)
    same = evaluate(getattr(dualeval.tasks, kind)(**typed), None, batch_size=4)
    assert (same.fingerprint, same.metrics_digest) == (whole.fingerprint, whole.metrics_digest)
    assert same.job == whole.job
    for model in modules:
        given = {**typed, **more, "model": model}
        given.pop("weights", None)
        found = evaluate(getattr(dualeval.tasks, kind)(**given), None, batch_size=4)
        assert (found.metrics_digest, found.labels) == (whole.metrics_digest, whole.labels)
        assert found.fingerprint != whole.fingerprint
        assert found.description["weights"].startswith("as the module has them")
    return whole


def message_of(done: Any) -> str:
    """What a command says that click's CliRunner has run, and that was refused."""
    if isinstance(done.exception, UsageError):
        return str(done.exception)
    assert done.exit_code == EXIT_USAGE, done.output
    return str(done.output)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Causal language models, and data of the three kinds."""
    home = tmp_path_factory.mktemp("made")
    return {
        "gpt2": save_causal(home / "gpt2"),
        "llama": save_causal(home / "llama", "Llama", begins=True),
        "texts": write_texts(home / "texts"),
        "choices": write_lines(home / "choices.jsonl", choice_rows()),
        "prompts": write_lines(home / "prompts.jsonl", prompt_rows()),
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``img`` and ``masks``, 13 pictures of three sizes."""
    folder = tmp_path_factory.mktemp("pictures")
    masked_pictures.write_pictures(folder)
    return folder
