"""The task question-answering in one process: faults, weights and tokenizers of any kind, bad input."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dualeval.engine import recorder
from dualeval.errors import UsageError
from dualeval.tasks.question_answering import QuestionAnswering
from tests import questions
from tests.engine.test_evaluator import evaluate, rows
from tests.tasks.test_question_answering import BATCH, answers_of, asked, hard_questions, run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return questions.save_tiny_bert(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return hard_questions(tmp_path_factory.mktemp("data"))


# -- faults ----------------------------------------------------------------------------------------


class Ending(QuestionAnswering):
    """Raises in the forward of one of its batches."""

    __module__ = QuestionAnswering.__module__
    left = 2

    def forward(self, model: nn.Module, batch: dict[str, Any]) -> Any:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("enough")
        return super().forward(model, batch)


def test_a_run_goes_on(
    tiny: Path, data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_look: None
) -> None:
    """The best thresholds too, which take the rows of before and of now."""
    monkeypatch.setattr(recorder, "FLUSH_ROWS", BATCH)
    whole = run(tiny, data["v2.0"], tmp_path / "whole")
    options: dict[str, Any] = {"model": tiny, "data": data["v2.0"], "batch_size": BATCH}
    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="enough"):
        evaluate(Ending(**options), out, batch_size=BATCH)
    result = evaluate(QuestionAnswering(**options), out, batch_size=BATCH)
    assert result.chunks["resumed"] == 2
    assert result.metrics_digest == whole.metrics_digest
    for name in ("predictions.json", "null_odds.json"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert rows(out) == rows(tmp_path / "whole")


def test_a_question_that_leaves_no_room_is_left_out(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "long.json"
    content = json.loads(questions.squad_file().read_text("utf-8"))
    content["data"][0]["paragraphs"][1]["qas"][1]["question"] = "why " * 300
    file.write_text(json.dumps(content))
    broken = content["data"][0]["paragraphs"][1]["qas"][1]["id"]
    with pytest.raises(UsageError, match=rf"{broken}.*room for 81 tokens.*--max-length.*--on-error skip"):
        run(tiny, file, tmp_path / "stops")
    task = QuestionAnswering(model=tiny, data=file, batch_size=BATCH)
    result = evaluate(task, tmp_path / "out", batch_size=BATCH, on_error="skip")
    assert result.samples == {"total": 5, "evaluated": 4, "failed": 1}
    assert [entry["id"] for entry in result.failed] == [broken]
    assert broken not in answers_of(tmp_path / "out")
    assert len(answers_of(tmp_path / "out")) == 4
    [answer] = [
        answer
        for name, answer in zip(*(rows(tmp_path / "out")[key] for key in ("id", "answer")), strict=True)
        if name == broken
    ]
    assert answer is None


def test_a_model_that_gives_nan_is_wrong_everywhere(
    tiny: Path, data: dict[str, Path], tmp_path: Path
) -> None:
    """Also on questions without an answer, where saying nothing would be right."""
    broken = shutil.copytree(tiny, tmp_path / "broken")
    library = questions.transformers()
    model = library.AutoModelForQuestionAnswering.from_pretrained(tiny)
    model.qa_outputs.bias.data.fill_(math.nan)
    model.save_pretrained(broken)
    result = run(broken, data["v2.0"], tmp_path / "out")
    assert (result.metrics["exact_match"], result.metrics["f1"]) == (0.0, 0.0)
    assert result.metrics["NoAns_exact"] == 0.0
    assert result.metrics["nonfinite_logits"]["nan"] == result.samples["total"]
    assert set(answers_of(tmp_path / "out").values()) == {""}
    odds = json.loads((tmp_path / "out/null_odds.json").read_text("utf-8"))
    assert set(odds.values()) == {float(np.finfo(np.float32).max)}
    assert any("NaN" in warning for warning in result.warnings)


def test_gold_answers_out_of_place_are_counted_and_listed(tiny: Path, tmp_path: Path) -> None:
    content = json.loads(questions.squad_file().read_text("utf-8"))
    qas = content["data"][0]["paragraphs"][1]["qas"]
    qas[0]["answers"][0]["answer_start"] += 1
    qas[2]["answers"][0]["answer_start"] = -5
    file = tmp_path / "moved.json"
    file.write_text(json.dumps(content))
    moved = run(tiny, file, tmp_path / "moved")
    plain = run(tiny, questions.squad_file(), tmp_path / "plain")
    assert moved.data["findings"] == {"gold_answer_not_at_its_place": [qas[0]["id"], qas[2]["id"]]}
    assert any(qas[0]["id"] in warning and "2 samples" in warning for warning in moved.warnings)
    assert plain.data["findings"] == {}
    assert moved.metrics == plain.metrics, "the script looks at the text alone"


# -- weights, precision, tokenizers ----------------------------------------------------------------


def test_weights_from_elsewhere(tiny: Path, tmp_path: Path) -> None:
    file = questions.squad_file()
    own = run(tiny, file, tmp_path / "own")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, bare)
    same = run(bare, file, tmp_path / "same", weights=str(tiny / "model.safetensors"))
    assert (same.metrics_digest, same.weights) == (own.metrics_digest, own.weights)
    seeds = [run(bare, file, tmp_path / f"seed{n}", weights=f"random:{n % 2}") for n in range(3)]
    assert seeds[0].weights == seeds[2].weights != seeds[1].weights
    with pytest.raises(UsageError, match=r"bare holds no model for question answering"):
        run(bare, file, tmp_path / "none")


def test_key_and_prefix_choose_the_weights(tiny: Path, data: dict[str, Path]) -> None:
    """Of a LightningModule that has an average of its model beside it, and a tensor of its loss."""
    own = load_file(tiny / "model.safetensors")
    average = {"loss.weight": torch.ones(2), **{f"model.{name}": tensor + 1 for name, tensor in own.items()}}
    file = tiny.parent / "several.ckpt"
    torch.save({"state_dict": own, "ema": {"state_dict": average}}, file)
    options: dict[str, Any] = {"model": tiny, "data": data["v1.1"], "weights": str(file)}
    device = torch.device("cpu")
    with pytest.raises(UsageError, match=r"2 state_dicts: state_dict \(\d+ tensors\), ema.state_dict \(\d+"):
        QuestionAnswering(**options).build_model(device)
    with pytest.raises(
        UsageError, match=r"begin with 'model\.' are those of the model: --weights-prefix model\."
    ):
        QuestionAnswering(**options, weights_key="ema").build_model(device)
    task = QuestionAnswering(**options, weights_key="ema", weights_prefix="model.")
    found = task.build_model(device).state_dict()
    assert all(torch.equal(found[name], tensor + 1) for name, tensor in own.items())
    assert torch.equal(found["qa_outputs.weight"], own["qa_outputs.weight"] + 1)
    assert task.notes() == [
        f"weights: the state_dict under 'ema.state_dict' of {file}, prefix 'model.' removed, "
        "1 left out: loss.weight"
    ]


def test_key_and_prefix_need_a_file(tiny: Path, data: dict[str, Path]) -> None:
    for option in ("weights_key", "weights_prefix"):
        for weights in (None, "random:0"):
            options: dict[str, Any] = {"weights": weights, option: "model"}
            with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} was given with"):
                QuestionAnswering(model=tiny, data=data["v1.1"], **options)


def test_half_precision(tiny: Path, tmp_path: Path) -> None:
    task = QuestionAnswering(model=tiny, data=questions.squad_file(), batch_size=BATCH)
    full = evaluate(task, tmp_path / "full", batch_size=BATCH)
    half = evaluate(task, tmp_path / "half", batch_size=BATCH, precision="amp-bf16")
    scores = [rows(tmp_path / name)["score"] for name in ("full", "half")]
    assert scores[0] != scores[1]
    assert scores[0] == pytest.approx(scores[1], rel=0.1)
    assert full.fingerprint != half.fingerprint


@pytest.mark.parametrize("kind", ["Roberta", "Longformer"])
def test_a_model_without_token_types(tmp_path: Path, kind: str) -> None:
    """Byte-level tokens, <s> and </s>, places that begin behind the padding token's.

    Longformer counts the separators between question and text: nothing but a real window will do for it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    library = questions.transformers()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [context for context, _ in asked(questions.squad_file())]
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=600, special_tokens=special))
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=False)
    fast = library.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="<s>",
        pad_token="<pad>",
        sep_token="</s>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    sizes |= {"max_position_embeddings": 130, "pad_token_id": 1, "sep_token_id": 2, "type_vocab_size": 1}
    narrow = {"attention_window": [16]} if kind == "Longformer" else {}
    config = getattr(library, f"{kind}Config")(vocab_size=len(fast), **sizes, **narrow)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = getattr(library, f"{kind}ForQuestionAnswering")(config)
    for part in (fast, model):
        part.save_pretrained(tmp_path / "model")
    result = run(tmp_path / "model", questions.squad_file(), tmp_path / "out", max_length=128, stride=32)
    assert result.work["windows"] > 5
    for (context, _), answer in zip(
        asked(questions.squad_file()), rows(tmp_path / "out")["answer"], strict=True
    ):
        # These tokens hold the space before them; no answer begins or ends with one.
        assert answer in context
        assert answer == answer.strip() != ""
    with pytest.raises(UsageError, match=r"cannot take 129 tokens at once.*takes shorter ones.*--max-len"):
        run(tmp_path / "model", questions.squad_file(), tmp_path / "wide", max_length=129, stride=32)


# -- bad input -------------------------------------------------------------------------------------


def test_options_that_make_no_job(tiny: Path, data: dict[str, Path], tmp_path: Path) -> None:
    file = questions.squad_file()
    cases: list[tuple[Mapping[str, Any], str]] = [
        ({"model": tmp_path / "none"}, r"none does not exist.*save_pretrained"),
        ({"model": tmp_path}, r"holds no config\.json"),
        ({"data": tmp_path / "none.json"}, r"none\.json cannot be read.*--data"),
        ({"stride": 380, "max_length": 384, "weights": "random:x"}, r"random:SEED"),
        ({"stride": 381}, r"--stride 381 is not less than the 381 tokens that --max-length 384"),
        ({"null_threshold": 1.0}, r"--null-threshold 1: every question of .*squad\.json has an answer"),
        (
            {"data": data["v2.0"], "null_threshold": math.inf},
            r"--null-threshold inf: expected a finite number",
        ),
        (
            {"data": data["v2.0"], "null_threshold": math.nan},
            r"--null-threshold nan: expected a finite number",
        ),
        ({"metrics": ["exact"]}, r"no metric 'exact' here. Nearest: exact_match. Metrics: exact_match, f1"),
        ({"metrics": ["best_thresholds"]}, r"no metric 'best_thresholds'"),
        ({"weights": "random:x"}, r"random:SEED"),
        ({"weights": str(tmp_path / "none.pt")}, r"none\.pt does not exist"),
        ({"max_length": 513}, r"cannot take 513 tokens at once"),
    ]
    for changes, message in cases:
        with pytest.raises(UsageError, match=message):
            task = QuestionAnswering(**{"model": tiny, "data": file, **changes})
            task.build_model(torch.device("cpu"))
    assert "best_thresholds" in [
        metric.name for metric in QuestionAnswering(model=tiny, data=data["v2.0"]).metrics()
    ]


def test_what_changes_bits_is_another_job(tiny: Path, tmp_path: Path) -> None:
    """The grouping by its padding; of a model's configuration the weights say nothing."""
    heads = shutil.copytree(tiny, tmp_path / "heads")
    config = json.loads((heads / "config.json").read_text())
    (heads / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4}))
    same = shutil.copytree(tiny, tmp_path / "same")
    changes: list[dict[str, Any]] = [
        *({}, {"batch_size": 8}, {"max_length": 200}, {"stride": 64}, {"n_best": 3}),
        *({"max_answer_length": 9}, {"model": heads}),
    ]
    base: dict[str, Any] = {"model": tiny, "data": questions.squad_file()}
    found = [QuestionAnswering(**{**base, **change}).fingerprint() for change in changes]
    assert all(one != other for one, other in itertools.combinations(found, 2))
    assert QuestionAnswering(**{**base, "model": same}).fingerprint() == found[0]


def test_a_file_of_somebody_else_is_not_overwritten(tiny: Path, tmp_path: Path) -> None:
    """Training scripts leave predictions.json beside the model, where a person may want the results too."""
    out = tmp_path / "model"
    shutil.copytree(tiny, out)
    (out / "predictions.json").write_text("mine")
    task = QuestionAnswering(model=tiny, data=questions.squad_file(), batch_size=BATCH)
    for fresh in (False, True):
        with pytest.raises(UsageError, match=r"holds predictions\.json, which this run would overwrite"):
            evaluate(task, out, batch_size=BATCH, fresh=fresh)
    assert (out / "predictions.json").read_text() == "mine"


def test_a_model_without_a_trained_head(tmp_path: Path) -> None:
    """The library would draw its weights at random, and any number might come out."""
    task = QuestionAnswering(model=questions.minilm_folder(), data=questions.squad_file())
    with pytest.raises(
        UsageError, match=r"lack 2 tensors.*qa_outputs\.bias, qa_outputs\.weight.*random:SEED"
    ):
        task.build_model(torch.device("cpu"))


def test_a_tokenizer_that_is_not_fast(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "slow", ignore=shutil.ignore_patterns("tokenizer*"))
    questions.transformers().ByT5Tokenizer().save_pretrained(folder)
    with pytest.raises(UsageError, match=r"ByT5Tokenizer, is not fast.*tokenizer\.json"):
        QuestionAnswering(model=folder, data=questions.squad_file())


def test_a_folder_without_a_tokenizer(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "none", ignore=shutil.ignore_patterns("tokenizer*"))
    # Of a folder without its files the library makes one that knows five tokens.
    with pytest.raises(UsageError, match=r"none holds no tokenizer.*tokenizer\.json"):
        QuestionAnswering(model=folder, data=questions.squad_file())


def test_a_model_of_another_vocabulary(tmp_path: Path) -> None:
    """Met in the midst of a run, a token that the model does not know would end a GPU's context."""
    folder = questions.save_tiny_bert(tmp_path / "small", vocab_size=1000)
    task = QuestionAnswering(model=folder, data=questions.squad_file())
    with pytest.raises(UsageError, match=r"30522 tokens apart, its model only 1000"):
        task.build_model(torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors", b"", r"model\.safetensors is empty \(0 bytes\)"),
        ("model.safetensors", b"version https://git-lfs", r"is a pointer of Git LFS.*git lfs pull"),
        ("tokenizer.json", b"<!doctype html>", r"tokenizer\.json is a web page"),
    ],
)
def test_a_file_of_the_folder_is_not_what_its_name_says(
    tiny: Path, data: dict[str, Path], tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "copy")
    assert (folder / name).is_file()
    (folder / name).write_bytes(content)
    with pytest.raises(UsageError, match=words):
        QuestionAnswering(model=folder, data=data["v1.1"]).build_model(torch.device("cpu"))


def test_a_model_that_needs_code_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "code")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForQuestionAnswering": "mine.M"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("raise SystemExit('run')")
    task_or_model = r"code holds no (tokenizer|model for question answering) that can be read"
    with pytest.raises(UsageError, match=task_or_model):
        QuestionAnswering(model=folder, data=questions.squad_file()).build_model(torch.device("cpu"))
