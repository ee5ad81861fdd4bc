"""The task question-answering in one process: answers, scores and files; answers from a file."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualeval.tasks
from dualeval.errors import UsageError
from dualeval.metrics.squad import score_answer
from dualeval.options.job import Job
from dualeval.tasks.question_answering import QuestionAnswering
from tests import questions
from tests.engine.test_evaluator import evaluate, rows

BATCH = 4


def hard_questions(folder: Path) -> dict[str, Path]:
    """Write hard questions in both formats."""
    return {
        version: questions.write_questions(folder / f"{version}.json", unanswerable=version == "v2.0")
        for version in ("v1.1", "v2.0")
    }


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return questions.save_tiny_bert(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return questions.save_fine_tuned(tmp_path_factory.mktemp("fine_tuned"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return hard_questions(tmp_path_factory.mktemp("data"))


def test_a_module_and_its_tokenizer(tiny: Path, data: dict[str, Path]) -> None:
    typed = {"model": tiny, "data": data["v1.1"], "batch_size": BATCH}
    whole = evaluate(Job.of("question-answering", **typed).make_task(), None, batch_size=BATCH)
    same = evaluate(dualeval.tasks.QuestionAnswering(**typed), None, batch_size=BATCH)
    assert (same.fingerprint, same.metrics_digest) == (whole.fingerprint, whole.metrics_digest)

    def make() -> nn.Module:
        library: Any = questions.transformers()
        model: nn.Module = library.BertForQuestionAnswering.from_pretrained(tiny)
        return model

    for model in (make(), make):
        task = QuestionAnswering(model=model, tokenizer=tiny, data=data["v1.1"], batch_size=BATCH)
        found = evaluate(task, None, batch_size=BATCH)
        assert found.metrics_digest == whole.metrics_digest
        assert found.fingerprint != whole.fingerprint
        assert found.description["weights"].startswith("as the module has them")
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"model": make}, "the model make was given without a tokenizer. Give tokenizer=DIR"),
        ({"model": tiny, "tokenizer": tiny}, "has the model's own. Leave it out"),
        ({"model": make, "tokenizer": tiny, "weights": "x.pt"}, "make has its weights. Leave weights out"),
    ]
    for given, said in refusals:
        with pytest.raises(UsageError, match=re.escape(said)):
            QuestionAnswering(data=data["v1.1"], **given)


def run(model: Path, data: Path, out: Path, **options: Any) -> Any:
    task = QuestionAnswering(model=model, data=data, batch_size=BATCH, **options)
    return evaluate(task, out, batch_size=BATCH)


def asked(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(context, question) of a file, in its order."""
    return [
        (paragraph["context"], qa)
        for article in json.loads(path.read_text("utf-8"))["data"]
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
    ]


def answers_of(out: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((out / "predictions.json").read_text("utf-8"))
    return found


# -- the whole path --------------------------------------------------------------------------------


def test_a_model_that_knows_the_answers_gets_them_all(fine_tuned: Path, tmp_path: Path) -> None:
    """Any slip between characters, tokens and windows would cost points."""
    file = questions.squad_file()
    result = run(fine_tuned, file, tmp_path / "out")
    assert (result.metrics["exact_match"], result.metrics["f1"]) == (100.0, 100.0)
    found = answers_of(tmp_path / "out")
    gold = {qa["id"]: [answer["text"] for answer in qa["answers"]] for _, qa in asked(file)}
    assert list(found) == list(gold)
    assert all(found[name] in texts for name, texts in gold.items())
    official = questions.official_script().evaluate(json.loads(file.read_text("utf-8"))["data"], found)
    assert official == {"exact_match": 100.0, "f1": 100.0}


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


@pytest.mark.long
@pytest.mark.parametrize(("max_length", "stride"), [(64, 16), (48, 24)])
def test_it_still_does_in_windows_much_shorter_than_the_text(
    fine_tuned: Path, tmp_path: Path, max_length: int, stride: int
) -> None:
    """Trained on whole texts, it need not know all of them; but each answer stands where its text is."""
    result = run(fine_tuned, questions.squad_file(), tmp_path / "out", max_length=max_length, stride=stride)
    assert result.work["windows"] > 15
    assert result.metrics["f1"] > 25
    table = rows(tmp_path / "out")
    for (context, _), answer, start, end in zip(
        asked(questions.squad_file()), table["answer"], table["start"], table["end"], strict=True
    ):
        assert context[start:end] == answer


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


def test_questions_without_an_answer(tiny: Path, data: dict[str, Path], tmp_path: Path) -> None:
    result = run(tiny, data["v2.0"], tmp_path / "out")
    found = answers_of(tmp_path / "out")
    scores = [
        score_answer(found[qa["id"]], [answer["text"] for answer in qa["answers"]], unanswerable=True)
        for _, qa in asked(data["v2.0"])
    ]
    answerable = [bool(qa["answers"]) for _, qa in asked(data["v2.0"])]
    for key, chosen in (
        ("", [True] * len(scores)),
        ("HasAns_", answerable),
        ("NoAns_", [not has for has in answerable]),
    ):
        part = [score for score, wanted in zip(scores, chosen, strict=True) if wanted]
        exact = 100 * sum(right for right, _ in part) / len(part)
        assert result.metrics[f"{key}exact" if key else "exact_match"] == exact
        assert result.metrics[f"{key}f1"] == 100 * math.fsum(f1 for _, f1 in part) / len(part)
    assert result.metrics["HasAns_total"] == sum(answerable)
    assert result.metrics["NoAns_total"] == len(answerable) - sum(answerable)
    odds = json.loads((tmp_path / "out/null_odds.json").read_text("utf-8"))
    assert list(odds) == list(found)
    assert {name for name, answer in found.items() if answer == ""} == {
        name for name, value in odds.items() if value > 0
    }


@pytest.mark.long
def test_the_best_threshold_gives_the_best_score(
    fine_tuned: Path, data: dict[str, Path], tmp_path: Path
) -> None:
    first = run(fine_tuned, data["v2.0"], tmp_path / "first")
    for score, best in (("exact_match", "best_exact"), ("f1", "best_f1")):
        # More than for no answer to any question.
        assert first.metrics[best] > 100 * first.metrics["NoAns_total"] / first.samples["total"]
        threshold = first.metrics[f"{best}_thresh"]
        again = run(fine_tuned, data["v2.0"], tmp_path / score, null_threshold=threshold)
        assert again.metrics[score] == pytest.approx(first.metrics[best], abs=1e-12)
        assert again.metrics[best] == first.metrics[best]
        assert again.fingerprint != first.fingerprint


def test_padding_is_counted(tiny: Path, data: dict[str, Path], tmp_path: Path) -> None:
    result = run(tiny, data["v1.1"], tmp_path / "out")
    task = QuestionAnswering(model=tiny, data=data["v1.1"], batch_size=BATCH)
    computed = tokens = windows = 0
    for start in range(0, len(task.dataset()), BATCH):
        indices = range(start, min(start + BATCH, len(task.dataset())))
        for group in task.collate(task.dataset().__getitems__(indices))["groups"]:
            windows += len(group["null"])
            computed += group["inputs"]["input_ids"].numel()
            tokens += int(group["inputs"]["attention_mask"].sum())
    assert result.work == {"windows": windows, "tokens": tokens, "padded_tokens": computed}
    assert windows == sum(rows(tmp_path / "out")["windows"])
    assert tokens < computed < 384 * windows


def test_chosen_metrics(tiny: Path, data: dict[str, Path], tmp_path: Path) -> None:
    result = run(tiny, data["v2.0"], tmp_path / "out", metrics=["best_thresholds"])
    assert list(result.metrics) == ["best_exact", "best_exact_thresh", "best_f1", "best_f1_thresh"]
    assert result.work["windows"] > 0
