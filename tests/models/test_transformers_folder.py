"""Folders of the transformers library: what in them is read, what is named, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from dualeval.errors import UsageError
from dualeval.models.late_building import late_or_whole
from dualeval.models.text_models import TextModel, Use
from dualeval.models.transformers_folder import load_pretrained
from tests.vehicles import questions
from tests.vehicles.causal_models import save_causal

USE = Use(name="language modeling", kind="AutoModelForCausalLM")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_causal(tmp_path / "model", "Llama")


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def late(model: TextModel) -> nn.Module:
    return late_or_whole(model.build, pytest.fail)


def test_an_adapter_is_refused_and_what_else_is_not_read_is_named(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"")
    of_training = ("training_args.bin", "optimizer.pt", "rng_state_0.pth")
    for name in (*of_training, "notes.txt"):
        (folder / name).write_bytes(b"")
    model = TextModel(folder, USE)
    late(model)
    assert model.notes() == [f"weights: not read in {folder}: pytorch_model.bin"]
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(
        UsageError, match=r"holds an adapter of peft .*\.merge_and_unload\(\)\.save_pretrained"
    ):
        TextModel(folder, USE)


def test_files_beside_the_weights_of_a_plain_folder_are_named(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "model.safetensors", tmp_path)
    (tmp_path / "ema.pt").write_bytes(b"")
    model = TextModel(folder, USE, weights=str(tmp_path))
    model.build()
    assert model.notes() == [f"weights: not read in {tmp_path}: ema.pt"]


def test_a_folder_with_more_layers_than_its_configuration_is_refused(folder: Path) -> None:
    change(folder / "config.json", num_hidden_layers=1)
    for build in (TextModel.build, late):
        with pytest.raises(
            UsageError, match=r"of a larger model than its config\.json says: 9 tensors are not"
        ):
            build(TextModel(folder, USE))


def test_tensors_of_other_heads_are_a_note(tmp_path: Path) -> None:
    library = questions.transformers()
    config = library.BertConfig(
        vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4
    )
    library.BertForSequenceClassification(config).save_pretrained(tmp_path)
    model = library.BertForSequenceClassification.from_pretrained(tmp_path)
    model.register_buffer("teacher", torch.zeros(1))
    model.save_pretrained(tmp_path)
    _, loaded = load_pretrained(library.AutoModelForSequenceClassification, tmp_path, "classification")
    assert loaded.left_out == ("teacher",)


def test_which_tokens_end_an_answer_is_read_with_any_weights(folder: Path, tmp_path: Path) -> None:
    """from_pretrained reads this file, a model of the configuration alone does not."""
    change(folder / "generation_config.json", eos_token_id=[2, 5])
    shutil.copy(folder / "model.safetensors", tmp_path)
    weights = str(tmp_path / "model.safetensors")
    models = [TextModel(folder, USE).build(), TextModel(folder, USE, weights=weights).build()]
    for model in [*models, late(TextModel(folder, USE))]:
        assert model.generation_config.eos_token_id == [2, 5]  # type: ignore[union-attr]
