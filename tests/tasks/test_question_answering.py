"""The task question-answering in one process: answers, scores, files, faults and bad input."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dualeval.errors import UsageError
from dualeval.metrics.squad import score_answer
from dualeval.tasks.question_answering import QuestionAnswering
from tests.engine.test_evaluator import evaluate, rows
from tests.tasks.conftest import check_doors
from tests.vehicles import questions
from tests.vehicles.made_tokenizers import byte_level
from tests.vehicles.questions import asked

BATCH = 4


def test_a_module_needs_its_tokenizer_and_makes_the_commands_job(tiny: Path, data: dict[str, Path]) -> None:
    def make() -> nn.Module:
        library: Any = questions.transformers()
        model: nn.Module = library.BertForQuestionAnswering.from_pretrained(tiny)
        return model

    typed = {"model": tiny, "data": data["v1.1"], "batch_size": BATCH}
    check_doors("question-answering", "QuestionAnswering", typed, [make(), make], tokenizer=tiny)
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"model": make}, "the model make was given without a tokenizer. Give tokenizer=DIR"),
        ({"model": tiny, "tokenizer": tiny}, "has the model's own. Leave it out"),
        ({"model": make, "tokenizer": tiny, "weights": "x.pt"}, "make has its weights. Load them in make"),
    ]
    for given, said in refusals:
        with pytest.raises(UsageError, match=re.escape(said)):
            QuestionAnswering(data=data["v1.1"], **given)


def run(model: Path, data: Path, out: Path, **options: Any) -> Any:
    task = QuestionAnswering(model=model, data=data, batch_size=BATCH, **options)
    return evaluate(task, out, batch_size=BATCH)


def answers_of(out: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((out / "predictions.json").read_text("utf-8"))
    return found


# -- the whole path --------------------------------------------------------------------------------


def test_the_result_says_what_was_evaluated(tiny: Path, data: dict[str, Path], tmp_path: Path) -> None:
    result = run(tiny, data["v2.0"], tmp_path / "out", stride=16, max_length=64, null_threshold=1.5)
    fingerprints = result.weights["fingerprint"][:8], result.data["fingerprint"][:8]
    assert result.description == {
        "model": str(tiny),
        "weights": f"in the folder of the model (fingerprint {fingerprints[0]})",
        "data": f"{data['v2.0']} ({result.samples['total']} samples, fingerprint {fingerprints[1]})",
        "windows": "at most 64 tokens, stride 16",
        "answers": "at most 30 tokens, of the 20 best starts and ends, null threshold 1.5",
        "job": f"batch size {BATCH}, fp32 (fingerprint {result.fingerprint[:8]})",
    }
    names = ("max_length", "stride", "n_best", "max_answer_length", "null_threshold")
    assert [result.job[name] for name in names] == [64, 16, 20, 30, 1.5]
    assert {"exact_match", "f1", "best_thresholds"} < set(result.job["metric"])
    untrained = QuestionAnswering(model=tiny, data=data["v1.1"], weights="random:1")
    assert untrained.description()["weights"] == "random:1, untrained"
    assert (untrained.options()["weights"], untrained.options()["null_threshold"]) == ("random:1", None)


@pytest.mark.parametrize("version", ["v1.1", "v2.0"])
def test_answers_are_those_of_a_plain_loop(
    tiny: Path, data: dict[str, Path], tmp_path: Path, version: str
) -> None:
    """Which computes one window after the other, without padding, and looks for its best span in Python."""
    run(tiny, data[version], tmp_path / "out")
    table = rows(tmp_path / "out")
    library = questions.transformers()
    tokenizer = library.AutoTokenizer.from_pretrained(tiny)
    model = library.AutoModelForQuestionAnswering.from_pretrained(tiny).eval()
    for place, (context, qa) in enumerate(asked(data[version])):
        text, score, null_score = plain_answer(tokenizer, model, qa["question"].lstrip(), context)
        start, end = table["start"][place], table["end"][place]
        assert context[start:end] == text, qa["id"]
        if text:
            assert table["score"][place] == pytest.approx(score, abs=1e-3)
        if text and version == "v2.0":
            assert table["null_odds"][place] == pytest.approx(null_score - score, abs=1e-3)
            assert table["answer"][place] == ("" if table["null_odds"][place] > 0 else text)


def plain_answer(tokenizer: Any, model: nn.Module, question: str, context: str) -> tuple[str, float, float]:
    """The text of the best span, its score, and the least score of no answer."""
    encoded = tokenizer(
        question,
        context,
        truncation="only_second",
        max_length=384,
        stride=128,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    best, text, null_score = -math.inf, "", math.inf
    for window, ids in enumerate(encoded["input_ids"]):
        inputs = {
            name: torch.tensor([encoded[name][window]])
            for name in ("input_ids", "token_type_ids", "attention_mask")
        }
        with torch.inference_mode():
            outputs = model(**inputs)
        start, end = outputs.start_logits[0].numpy(), outputs.end_logits[0].numpy()
        null_score = min(null_score, float(start[0] + end[0]))
        inside = [place for place in range(len(ids)) if encoded.sequence_ids(window)[place] == 1]
        firsts = sorted(inside, key=lambda place: -start[place])[:20]
        lasts = sorted(inside, key=lambda place: -end[place])[:20]
        for first in firsts:
            for last in lasts:
                if 0 <= last - first < 30 and start[first] + end[last] > best:
                    best = float(start[first] + end[last])
                    offsets = encoded["offset_mapping"][window]
                    text = context[offsets[first][0] : offsets[last][1]]
    return text, best, null_score


# -- scores and files ------------------------------------------------------------------------------


def test_scores_are_those_of_the_official_script(tiny: Path, data: dict[str, Path], tmp_path: Path) -> None:
    result = run(tiny, data["v1.1"], tmp_path / "out")
    content = json.loads(data["v1.1"].read_text("utf-8"))["data"]
    official = questions.official_script().evaluate(content, answers_of(tmp_path / "out"))
    assert result.metrics["exact_match"] == official["exact_match"]
    assert result.metrics["f1"] == pytest.approx(official["f1"], abs=1e-9)
    table = rows(tmp_path / "out")
    assert result.metrics["f1"] == 100 * math.fsum(table["f1"]) / len(table["f1"])
    assert 0 < result.metrics["f1"] < 100
    assert table["answer"] == list(answers_of(tmp_path / "out").values())
    assert table["id"] == list(answers_of(tmp_path / "out"))
    assert not (tmp_path / "out/null_odds.json").exists()
    assert "HasAns_exact" not in result.metrics


def test_positive_null_odds_give_an_empty_answer(tiny: Path, data: dict[str, Path], tmp_path: Path) -> None:
    result = run(tiny, data["v2.0"], tmp_path / "out")
    found = answers_of(tmp_path / "out")
    answerable = [bool(qa["answers"]) for _, qa in asked(data["v2.0"])]
    assert rows(tmp_path / "out")["f1"] == [
        score_answer(found[qa["id"]], [answer["text"] for answer in qa["answers"]], unanswerable=True)[1]
        for _, qa in asked(data["v2.0"])
    ]
    assert result.metrics["HasAns_total"] == sum(answerable)
    assert result.metrics["NoAns_total"] == len(answerable) - sum(answerable)
    odds = json.loads((tmp_path / "out/null_odds.json").read_text("utf-8"))
    assert list(odds) == list(found)
    assert {name for name, answer in found.items() if answer == ""} == {
        name for name, value in odds.items() if value > 0
    }


def test_chosen_metrics_alone_are_in_the_result(tiny: Path, data: dict[str, Path], tmp_path: Path) -> None:
    result = run(tiny, data["v2.0"], tmp_path / "out", metrics=["best_thresholds"])
    assert list(result.metrics) == ["best_exact", "best_exact_thresh", "best_f1", "best_f1_thresh"]
    assert result.work["windows"] == sum(rows(tmp_path / "out")["windows"])
    assert 0 < result.work["tokens"] < result.work["padded_tokens"]


# -- faults ----------------------------------------------------------------------------------------


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


def test_weights_from_another_file_replace_those_of_the_folder(tiny: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("kind", ["Roberta", "Longformer"])
def test_a_model_without_token_types_answers_questions(tmp_path: Path, kind: str) -> None:
    """Byte-level tokens, <s> and </s>, places that begin behind the padding token's.

    Longformer counts the separators between question and text: nothing but a real window will do for it.
    """
    from tokenizers import processors

    library = questions.transformers()
    tokenizer, options = byte_level()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=False)
    fast = library.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
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


def test_options_that_make_no_job_are_refused(tiny: Path, data: dict[str, Path], tmp_path: Path) -> None:
    file = questions.squad_file()
    cases: list[tuple[Mapping[str, Any], str]] = [
        ({"model": tmp_path / "none"}, r"none does not exist.*save_pretrained.*hf download"),
        ({"model": tmp_path}, r"holds no config\.json"),
        ({"data": tmp_path / "none.json"}, r"none\.json cannot be read.*--data"),
        ({"stride": 380, "max_length": 384, "weights": "random:x"}, r"random:SEED"),
        ({"stride": 381}, r"--stride 381 is not less than the 381 tokens that --max-length 384"),
        ({"null_threshold": 1.0}, r"--null-threshold 1: every question of .*squad\.json has an answer"),
        ({"data": data["v2.0"], "null_threshold": math.inf}, "-threshold inf: expected a finite number"),
        ({"data": data["v2.0"], "null_threshold": math.nan}, "-threshold nan: expected a finite number"),
        ({"metrics": ["exact"]}, r"no metric 'exact' here. Nearest: exact_match. Metrics: exact_match, f1"),
        ({"metrics": ["best_thresholds"]}, r"no metric 'best_thresholds'"),
        ({"weights_key": "model"}, r"--weights-key was given with"),
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


def test_an_option_that_changes_bits_is_another_job(tiny: Path, tmp_path: Path) -> None:
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


WEIGHTS, POINTER = "model.safetensors", b"version https://git-lfs"
TOKENIZER = "tokenizer.json"


def _without_tokenizer(folder: Path) -> None:
    """Of a folder without its files the library makes one that knows five tokens."""
    for path in folder.glob("tokenizer*"):
        path.unlink()


def _not_fast(folder: Path) -> None:
    _without_tokenizer(folder)
    questions.transformers().ByT5Tokenizer().save_pretrained(folder)


def _of_another_vocabulary(folder: Path) -> None:
    """Met in the midst of a run, a token that the model does not know would end a GPU's context."""
    questions.save_tiny_bert(folder, vocab_size=1000)


def _needs_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    named = {"AutoConfig": "mine.Mine", "AutoModelForQuestionAnswering": "mine.M"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mine", "auto_map": named}))
    (folder / "mine.py").write_text("raise SystemExit('run')")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_without_tokenizer, r"copy holds no tokenizer.*tokenizer\.json"),
        (_not_fast, r"ByT5Tokenizer, is not fast.*tokenizer\.json"),
        (_of_another_vocabulary, r"30522 tokens apart, its model only 1000"),
        (_needs_code, r"copy holds no (tokenizer|model for question answering) that can be read"),
        (lambda folder: (folder / WEIGHTS).write_bytes(POINTER), "is a pointer of Git LFS.*git lfs pull"),
        (lambda folder: (folder / TOKENIZER).write_bytes(b"<!doctype html>"), r"\.json is a web page"),
    ],
)
def test_folders_without_a_usable_model_or_tokenizer_are_refused(
    tiny: Path, data: dict[str, Path], tmp_path: Path, spoil: Callable[[Path], object], said: str
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "copy")
    spoil(folder)
    with pytest.raises(UsageError, match=said):
        QuestionAnswering(model=folder, data=data["v1.1"]).build_model(torch.device("cpu"))


def test_a_model_without_a_trained_head_is_refused(tmp_path: Path) -> None:
    """The library would draw its weights at random, and any number might come out."""
    task = QuestionAnswering(model=questions.minilm_folder(), data=questions.squad_file())
    with pytest.raises(
        UsageError, match=r"lack 2 tensors.*qa_outputs\.bias, qa_outputs\.weight.*random:SEED"
    ):
        task.build_model(torch.device("cpu"))
