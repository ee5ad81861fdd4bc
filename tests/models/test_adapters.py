"""Adapters of peft: the bits of its own merge, their part in the identity, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dualeval.errors import UsageError
from dualeval.models.text_models import TextModel, Use
from dualeval.tasks.text_classification import TextClassification
from tests.engine.test_evaluator import evaluate
from tests.vehicles import questions
from tests.vehicles.adapters import causal, peft, save_adapter
from tests.vehicles.causal_models import save_causal

CAUSAL = Use(name="language modeling", kind="AutoModelForCausalLM")
CLASSES = Use(name="text classification", kind="AutoModelForSequenceClassification")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_causal(tmp_path_factory.mktemp("made") / "base", "Llama")


def adapter_of(base: Path, folder: Path, kind: str = "Lora", **options: Any) -> Path:
    return save_adapter(folder, causal(base), kind, **options)


def merged_by_peft(kind: str, base: Path, folder: Path, **options: Any) -> nn.Module:
    model = getattr(questions.transformers(), kind).from_pretrained(base, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged: nn.Module = peft().PeftModel.from_pretrained(model, folder).merge_and_unload()
    return merged


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    states = one.state_dict(), other.state_dict()
    assert [*states[0]] == [*states[1]]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("Lora", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
    ("Lora", {"target_modules": "all-linear", "use_dora": True, "modules_to_save": ["lm_head"]}),
    ("Lora", {"target_modules": ["embed_tokens", "v_proj"]}),
    ("IA3", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    ("LoHa", {"target_modules": ["q_proj"]}),
    ("OFT", {"target_modules": ["q_proj"], "oft_block_size": 4, "r": 0}),
]


@pytest.mark.parametrize(
    ("kind", "options"), KINDS, ids=[f"{kind}{place}" for place, (kind, _) in enumerate(KINDS)]
)
def test_a_merged_model_has_the_bits_of_peft(base: Path, tmp_path: Path, kind: str, options: Any) -> None:
    folder = adapter_of(base, tmp_path / "adapter", kind, **options)
    merged = TextModel(base, CAUSAL, adapter=folder).build()
    assert_equal(merged, merged_by_peft("AutoModelForCausalLM", base, folder))
    plain = TextModel(base, CAUSAL).build().state_dict()
    assert any(not torch.equal(value, plain[name]) for name, value in merged.state_dict().items())
    assert not merged.training


def test_a_classifier_of_the_adapter_needs_none_in_its_base(tmp_path: Path) -> None:
    """As usual: its base is an encoder without a head, and says nothing of classes."""
    library = questions.transformers()
    base = tmp_path / "base"
    questions.tiny_bert("BertModel", vocab_size=30522).save_pretrained(base)
    library.AutoTokenizer.from_pretrained(questions.minilm_folder()).save_pretrained(base)
    model = library.AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    folder = save_adapter(tmp_path / "adapter", model, task_type="SEQ_CLS", target_modules=["query", "value"])
    built = TextModel(folder, CLASSES)
    merged = merged_by_peft("AutoModelForSequenceClassification", base, folder, num_labels=3)
    assert_equal(built.build(), merged)

    rows = [{"text": f"{number} mills", "label": number % 3} for number in range(9)]
    task = TextClassification(model=base, adapter=folder, data=rows)
    result = evaluate(task, tmp_path / "out", batch_size=4)
    assert result.job["adapter"] == str(folder)
    assert "peft" in task.libraries


def fingerprint(base: Path, **options: Any) -> Any:
    return TextModel(base, CAUSAL, **options).fingerprint()


def test_the_files_of_an_adapter_are_in_the_identity(base: Path, tmp_path: Path) -> None:
    one = adapter_of(base, tmp_path / "one", target_modules=["q_proj"])
    same = shutil.copytree(one, tmp_path / "same")
    other = adapter_of(base, tmp_path / "other", target_modules=["v_proj"])
    prints = [fingerprint(base), fingerprint(base, adapter=one), fingerprint(base, adapter=other)]
    assert len({*prints}) == 3
    assert fingerprint(same) == fingerprint(base, adapter=same) == prints[1]


def test_a_folder_that_is_an_adapter_finds_its_base_on_this_disk(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its path, or by a hub's name in the local cache; a tokenizer beside the adapter is taken."""
    folder = adapter_of(base, tmp_path / "adapter", target_modules=["q_proj"])
    model = TextModel(folder, CAUSAL)
    assert (model.base, model.folder) == (base, base)
    assert model.description()["model"] == f"{base}, with the adapter {folder}"
    shutil.copy(base / "tokenizer.json", folder)
    shutil.copy(base / "tokenizer_config.json", folder)
    assert TextModel(folder, CAUSAL).folder == folder
    name(folder, "river/mill")
    with pytest.raises(UsageError, match=r"names its base 'river/mill', .* Type: --model BASE"):
        TextModel(folder, CAUSAL)
    cached = tmp_path / "cache/models--river--mill"
    shutil.copytree(base, cached / "snapshots/abc")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert TextModel(folder, CAUSAL).base == cached / "snapshots/abc"


def test_a_base_of_another_name_is_a_warning(base: Path, tmp_path: Path) -> None:
    folder = adapter_of(base, tmp_path / "adapter", target_modules=["q_proj"])
    link = tmp_path / "current"
    link.symlink_to(base)
    for known in (str(base), "/moved/base", "river/base", None):
        name(folder, known)
        assert not TextModel(base, CAUSAL, adapter=folder).notes()
        assert not TextModel(link, CAUSAL, adapter=folder).notes()
    name(folder, str(link))
    assert not TextModel(base, CAUSAL, adapter=folder).notes()
    name(folder, "river/mill")
    other = TextModel(base, CAUSAL, adapter=folder)
    other.build()
    assert other.notes() == [f"the adapter in {folder} names river/mill as its base, and --model is {base}"]
    cached = shutil.copytree(base, tmp_path / "models--river--mill/snapshots/abc")
    assert not TextModel(cached, CAUSAL, adapter=folder).notes()


def name(folder: Path, base: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": base}))


def test_an_adapter_in_a_pickle_is_read_as_other_checkpoints_are(base: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = adapter_of(base, tmp_path / "adapter", target_modules=["q_proj"])
    wanted = TextModel(folder, CAUSAL).build()
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    torch.save(tensors, folder / "adapter_model.bin")
    assert_equal(TextModel(folder, CAUSAL).build(), wanted)
    torch.save({"model": {"code": nn.Linear(1, 1)}}, folder / "adapter_model.bin")
    with pytest.raises(UsageError, match="--trust-checkpoint"):
        TextModel(folder, CAUSAL).build()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "PromptTuning",
        {"num_virtual_tokens": 3},
        "is of the kind PROMPT_TUNING, which adds to a model's inputs",
    ),
    ("PrefixTuning", {"num_virtual_tokens": 3}, "is of the kind PREFIX_TUNING"),
]


@pytest.mark.parametrize(("kind", "options", "said"), REFUSED)
def test_what_cannot_be_merged_is_refused(
    base: Path, tmp_path: Path, kind: str, options: Any, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        TextModel(adapter_of(base, tmp_path / "adapter", kind, **options), CAUSAL).build()


def test_an_adapter_of_another_model_is_refused(base: Path, tmp_path: Path) -> None:
    """Of more layers or fewer, which peft passes over, and of another shape."""
    folder = adapter_of(base, tmp_path / "adapter", target_modules=["q_proj"])
    others: dict[str, tuple[dict[str, Any], str]] = {
        "deeper": ({"num_hidden_layers": 3}, "2 tensors missing in the file, 0 not in the model"),
        "flat": ({"num_hidden_layers": 1}, "0 tensors missing in the file, 2 not in the model"),
        "wide": ({"hidden_size": 32}, "cannot be merged into the model .*wide: "),
    }
    for kind, (changes, said) in others.items():
        other = save_causal(tmp_path / kind, "Llama", **changes)
        with pytest.raises(UsageError, match=said):
            TextModel(other, CAUSAL, adapter=folder).build()


def test_folders_that_hold_no_whole_adapter_are_refused(base: Path, tmp_path: Path) -> None:
    folder = adapter_of(base, tmp_path / "adapter", target_modules=["q_proj"])
    for model, adapter, said in (
        (base, tmp_path / "none", "none does not exist. Expected a folder as peft"),
        (base, base, "base holds no adapter_model.safetensors. Expected"),
        (folder, folder, "holds an adapter of peft"),
        (nn.Identity(), folder, "goes with a folder, and the model Identity is none"),
    ):
        with pytest.raises(UsageError, match=re.escape(said)):
            TextModel(model, CAUSAL, adapter=adapter, tokenizer=None)
    name(folder, None)
    with pytest.raises(UsageError, match=r"names no base .* Type: --model BASE --adapter"):
        TextModel(folder, CAUSAL)
    both = shutil.copytree(base, tmp_path / "both")
    shutil.copy(folder / "adapter_config.json", both)
    with pytest.raises(UsageError, match="holds an adapter of peft"):
        TextModel(both, CAUSAL)


def test_a_sharded_model_is_built_whole_before_its_adapter_is_merged(base: Path, tmp_path: Path) -> None:
    folder = adapter_of(base, tmp_path / "adapter", target_modules=["q_proj"])
    model = TextModel(folder, CAUSAL)
    assert_equal(model.build_late(), model.build())
    assert "because an adapter is merged into its weights" in model.notes()[0]


def test_without_peft_it_is_said_what_to_type(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    with pytest.raises(UsageError, match=r"needs the peft library, .* Type: pip install 'dualeval\[peft\]'"):
        TextModel(base, CAUSAL, adapter=base)
