"""The built-in tasks without memory for their model's parameters, on real forms of files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dualeval.models.checkpoints.late import LateTensor
from dualeval.tasks.image_classification import ImageClassification
from dualeval.tasks.question_answering import QuestionAnswering
from tests import questions
from tests.models.test_late_building import check_same, is_late

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return questions.save_tiny_bert(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return questions.write_questions(tmp_path_factory.mktemp("data") / "squad.json", unanswerable=False)


def answers(model: Path, data: Path, **options: Any) -> QuestionAnswering:
    return QuestionAnswering(model=model, data=data, batch_size=4, max_length=64, stride=16, **options)


@pytest.mark.parametrize("form", ["one", "several", "pickled", "half", "weights"])
def test_questions(form: str, tiny: Path, data: Path, tmp_path: Path) -> None:
    library = questions.transformers()
    folder, options = tmp_path / "model", {}
    shutil.copytree(tiny, folder)
    model = library.AutoModelForQuestionAnswering.from_pretrained(tiny)
    if form == "several":
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="1MB")
        assert (folder / "model.safetensors.index.json").is_file()
    elif form == "pickled":
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    elif form == "half":
        model.half().save_pretrained(folder)
    elif form == "weights":
        torch.save({"model": model.state_dict()}, tmp_path / "w.pt")
        options["weights"] = str(tmp_path / "w.pt")
    task = answers(folder, data, **options)
    late = task.build_late(CPU)
    assert is_late(late)
    again = answers(folder, data, **options)
    whole = again.build_model(CPU)
    check_same(late, whole)
    assert list(task.notes()) == list(again.notes())
    assert task.options() == again.options()
    batch = task.collate(task.dataset().__getitems__([0, 1]))
    with torch.no_grad():
        for one, other in zip(task.forward(late, batch), again.forward(whole, batch), strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])


def test_a_folder_whose_values_the_library_rounds_is_loaded_by_it(
    tiny: Path, data: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"dtype": "float16"}))
    task = answers(tmp_path / "model", data)
    late = task.build_late(CPU)
    assert not any(isinstance(parameter, LateTensor) for parameter in late.parameters())
    check_same(late, answers(tmp_path / "model", data).build_model(CPU))
    assert "each rank builds all of it" in task.notes()[-1]
    assert "several dtypes (torch.float16, torch.float32)" in task.notes()[-1]


def test_images() -> None:
    task, again = ImageClassification(), ImageClassification()
    late, whole = task.build_late(CPU), again.build_model(CPU)
    assert is_late(late)
    check_same(late, whole)
    assert task.fingerprint() == again.fingerprint()
    assert task.notes() == again.notes()
    batch = task.collate(task.dataset().__getitems__([0, 1, 2]))
    assert torch.equal(task.forward(late, batch), again.forward(whole, batch))
