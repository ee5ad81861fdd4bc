"""docs/recipes.md: each script runs, and each figure is that of its library's own call on all samples."""

from __future__ import annotations

import json
import math
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pyarrow.parquet as pq
import pytest
import pytrec_eval
import torch
from sklearn.metrics import accuracy_score, f1_score

from tests.conftest import ROOT, Launch
from tests.docs.test_start import file_of
from tests.engine.end.test_endings import read
from tests.vehicles import questions
from tests.vehicles.launchers import start

PAGE = (ROOT / "docs/recipes.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SCRIPTS = {str(file_of(text)): text for language, text in BLOCKS if language == "python"}

Run = Callable[[str], dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a script of the page; returns what it has defined."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.chdir(tmp_path)

    def run(name: str) -> dict[str, Any]:
        (tmp_path / name).write_text(SCRIPTS[name], "utf-8")
        return runpy.run_path(str(tmp_path / name), run_name="__main__")

    return run


def test_all_scripts_are_known_and_short() -> None:
    assert [*SCRIPTS] == ["retrieval.py", "zero_shot.py", "keypoints.py", "speech.py"]
    assert len(BLOCKS) == len(SCRIPTS)
    for text in SCRIPTS.values():
        assert len(text.partition("# -- for dualeval")[2].splitlines()) <= 50


def test_what_the_page_installs_is_what_was_tested() -> None:
    pinned = (ROOT / "constraints.txt").read_text("utf-8").lower()
    dev = (ROOT / "setup.py").read_text("utf-8")
    named = re.findall(r"`pip install ([\w-]+)`", PAGE)
    assert named == ["pytrec-eval-terrier", "jiwer"]
    for name in named:
        assert f"\n{name}==" in pinned and f'"{name}"' in dev


@pytest.mark.parametrize(
    "name",
    [name if name == "retrieval.py" else pytest.param(name, marks=pytest.mark.long) for name in SCRIPTS],
)
def test_two_ranks_get_the_same_digest(run: Run, launch: Launch, tmp_path: Path, name: str) -> None:
    run(name)
    folder = tmp_path / "ranks"
    folder.mkdir()
    (folder / name).write_text(SCRIPTS[name], "utf-8")
    launch([*start("torchrun", 2), sys.executable, name], cwd=folder).ok()
    for path in tmp_path.glob("runs/*/result.json"):
        alone, together = read(path), read(folder / path.relative_to(tmp_path))
        assert (alone["world"]["size"], together["world"]["size"]) == (1, 2)
        assert alone["metrics_digest"] == together["metrics_digest"]


# -- retrieval -------------------------------------------------------------------------------------------


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def test_retrieval_is_that_of_trec_eval(run: Run) -> None:
    defined = run("retrieval.py")
    result, encoder, documents, queries = (
        defined[name] for name in ("result", "encoder", "documents", "queries")
    )
    with torch.inference_mode():
        vectors = torch.nn.functional.normalize(encoder(documents))
        scores = encoder(torch.stack([each["query"] for each in queries])) @ vectors.T
    everything = {str(n): {f"d{at}": x for at, x in enumerate(row)} for n, row in enumerate(scores.tolist())}
    relevant = {str(n): json.loads(each["relevant"]) for n, each in enumerate(queries)}
    values = pytrec_eval.RelevanceEvaluator(relevant, defined["NAMES"]).evaluate(everything)
    names = ("recall_10", "ndcg_cut_10")
    expected = {name: mean([each[name] for each in values.values()]) for name in names}
    reciprocal = [each["recip_rank"] for each in values.values()]
    expected["recip_rank"] = mean([each if each > 0.0099 else 0.0 for each in reciprocal])
    assert {name: result.metrics[name] for name in expected} == expected
    assert result.intervals.keys() == {*expected, "best"}
    # Without the relevant documents that were not retrieved the number is another one.
    of_found = {
        n: {
            name: grade
            for name, grade in each.items()
            if everything[n][name] >= sorted(everything[n].values())[-10]
        }
        for n, each in relevant.items()
    }
    higher = pytrec_eval.RelevanceEvaluator(of_found, names).evaluate(everything)
    assert mean([each["recall_10"] for each in higher.values()]) > 1.5 * expected["recall_10"]


def test_of_equal_scores_neither_order_nor_rank_decides(run: Run) -> None:
    defined = run("retrieval.py")
    values = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        columns = {
            "documents": torch.tensor([order]),
            "scores": torch.ones(1, 4),
            "relevant": [json.dumps({"d1": 1})],
        }
        made = defined["task"].postprocess(columns, range(1))
        values.append([float(made[name]) for name in defined["NAMES"]])
    assert values[0] == values[1] == values[2]
    assert values[0][2] == 1 / 3  # behind d3 and d2


# -- zero-shot classification ----------------------------------------------------------------------------


def test_zero_shot_is_that_of_clip_on_all_pictures(run: Run) -> None:
    questions.transformers()
    defined = run("zero_shot.py")
    clip, classes, tokenizer = defined["clip"]().eval(), defined["CLASSES"], defined["tokenizer"]
    pixels = torch.stack([each["pixel_values"] for each in defined["pictures"]])
    labels = [each["label"] for each in defined["pictures"]]
    texts = []
    for template in defined["TEMPLATES"]:
        prompts = tokenizer([template.format(name) for name in classes], padding=True, return_tensors="pt")
        with torch.inference_mode():
            outputs = clip(input_ids=prompts["input_ids"], pixel_values=pixels)
        texts.append(outputs.text_embeds)
    likeness = outputs.image_embeds @ torch.nn.functional.normalize(torch.stack(texts).mean(0)).T
    predicted = likeness.argmax(1).tolist()
    confidence = (clip.logit_scale.exp() * likeness).softmax(1).amax(1)
    rows = pq.read_table("runs/zero-shot/predictions.parquet")
    assert rows["confidence"].to_pylist() == pytest.approx(confidence.tolist(), abs=1e-6)
    metrics = defined["result"].metrics
    assert metrics["top1"] == accuracy_score(labels, predicted)
    assert metrics["f1"] == pytest.approx(f1_score(labels, predicted, average="macro"), abs=1e-12)
    assert len({*predicted}) == 3
    # One template is another classifier.
    assert outputs.logits_per_image.argmax(1).tolist() != predicted


# -- keypoints -------------------------------------------------------------------------------------------


def test_keypoints_are_those_of_loops_over_all_objects(run: Run) -> None:
    defined = run("keypoints.py")
    objects, metrics = defined["objects"], defined["result"].metrics
    with torch.inference_mode():
        predicted = defined["model"](torch.stack([each["input"] for each in objects])).view(-1, 3, 2)
    errors: list[list[float]] = [[], [], []]
    for points, each in zip(predicted, objects, strict=True):
        for at in each["seen"].nonzero().ravel().tolist():
            distance = (points[at] - each["points"][at]).norm() / each["size"]
            errors[at].append(float(distance))
    counted = [sum(error < np.float32(0.2) for error in of_one) for of_one in errors]
    seen = [len(of_one) for of_one in errors]
    expected = {
        f"pck_{name}": n / of for name, n, of in zip(defined["KEYPOINTS"], counted, seen, strict=True)
    }
    expected["pck"] = sum(counted) / sum(seen)
    assert {name: metrics[name] for name in expected} == expected
    everything = [error for of_one in errors for error in of_one]
    assert metrics["nme"] == pytest.approx(mean(everything), rel=1e-6)
    assert defined["result"].intervals.keys() == metrics.keys()
    # What the page calls other numbers.
    assert expected["pck"] != mean([expected[f"pck_{name}"] for name in defined["KEYPOINTS"]])
    assert sum(seen) < 0.9 * 3 * len(objects)


# -- speech ----------------------------------------------------------------------------------------------


def test_the_word_error_rate_is_that_of_jiwer(run: Run) -> None:
    defined = run("speech.py")
    normal, letters = defined["normal"], defined["LETTERS"]
    references = [normal(each["text"]) for each in defined["recordings"]]
    heard = []
    for each in defined["recordings"]:  # alone, without any padding
        with torch.inference_mode():
            best = defined["model"](each["sound"]).argmax(-1).unique_consecutive().tolist()
        heard.append(normal("".join(letters[n] for n in best if n)))
    assert defined["result"].metrics["wer"] == jiwer.wer(references, heard)
    assert defined["result"].intervals.keys() == {"wer"}
    # Without words, and yet with an error.
    assert any(not text and other for text, other in zip(references, heard, strict=True))
    rates = [jiwer.wer(*pair) for pair in zip(references, heard, strict=True) if pair[0]]
    assert abs(mean(rates) - jiwer.wer(references, heard)) > 0.02
