"""Generated texts of the task lm-eval: thoughts, stops, drawn ones, and what is counted of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dualeval.errors import UsageError
from dualeval.result import Result
from dualeval.tasks import LmEval
from dualeval.tasks.options.lm_eval import ScoredOptions
from tests.engine.test_evaluator import evaluate, rows
from tests.tasks.test_answers import parts_of
from tests.tasks.test_language_modeling import following
from tests.vehicles.causal_models import write_lines
from tests.vehicles.harness_tasks import save_model, write_tasks

SAID = "bq</>,7 k\n9"
pytestmark = pytest.mark.xdist_group("harness")
_YAML = """
task: said
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/said.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{word}}}}"
repeats: {repeats}
generation_kwargs: {{until: {until}, max_gen_toks: {most}}}
filter_list:
  - name: number
    filter: [{{function: regex, regex_pattern: "([0-9])"}}, {{function: take_first}}]
  - name: whole
    filter: [{{function: take_first}}]
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import lm_eval.models.huggingface  # noqa: F401  its import sets an environment variable

    return save_model(tmp_path_factory.mktemp("texts") / "gpt2")


def write_said(
    folder: Path, word: str, prompts: Any = "a", repeats: int = 1, until: Any = (), most: int = 32
) -> Path:
    folder.mkdir(exist_ok=True)
    write_lines(folder / "said.jsonl", [{"prompt": prompt, "word": word} for prompt in prompts])
    text = _YAML.format(folder=folder, repeats=repeats, until=json.dumps([*until]), most=most)
    (folder / "said.yaml").write_text(text)
    return folder


def of_texts(result: Result) -> dict[str, Any]:
    named = ("at_token_limit", "nan_logits", "empty_answers", "unfinished_thinking")
    counts = {name: result.metrics[name] for name in named if result.metrics.get(name)}
    if found := result.metrics["said/not_extracted,number"]:
        counts["not_extracted"] = found
    return counts


@pytest.mark.parametrize(
    ("until", "options", "text", "number", "counts"),
    [
        ((), {}, SAID, "7", {}),
        (["\n9", " k"], {}, "bq</>,7", "7", {}),
        (["7"], {}, "bq</>,", "[invalid]", {"not_extracted": 1}),
        (["b"], {}, "", "[invalid]", {"not_extracted": 1, "empty_answers": 1}),
        (["zz"], {"most": 4}, "bq</", "[invalid]", {"not_extracted": 1, "at_token_limit": 1}),
        (["</"], {"most": 4}, "bq", "[invalid]", {"not_extracted": 1}),
        # As the harness has it: thoughts are cut first, then stops.
        (["q", "k"], {"think_end": "</>"}, ",7 ", "7", {}),
        (["q"], {"think_end": "END"}, "", "[invalid]", {"not_extracted": 1, "unfinished_thinking": 1}),
    ],
)
def test_thoughts_and_stops_are_cut_and_counted(
    gpt2: Path, tmp_path: Path, until: Any, options: Any, text: str, number: str, counts: dict[str, int]
) -> None:
    _, tokenizer = parts_of(gpt2)
    most, options = options.get("most", 32), {k: v for k, v in options.items() if k != "most"}
    folder = write_said(tmp_path / "tasks", number, until=until, most=most)
    made: dict[str, Any] = {
        "model": following(tokenizer, f"a{SAID}"),
        "tokenizer": gpt2,
        "max_length": 64,
        **options,
    }
    task = LmEval(tasks="said", include_path=folder, bootstrap_iters=0, **made)
    result = evaluate(task, tmp_path / "out", batch_size=4)
    assert rows(tmp_path / "out")["generated"] == [text] and of_texts(result) == counts
    assert result.metrics["said/exact_match,number"] == 1
    assert result.metrics["said/exact_match,whole"] == (text == number)
    # The same text, from elsewhere.
    answer = {"task": "said", "document": 0, "index": 0, "answer": SAID[:most]}
    file = write_lines(tmp_path / "answers.jsonl", [answer])
    asked: dict[str, Any] = {
        "think_end": options.get("think_end"),
        "bootstrap_iters": 0,
        "include_path": folder,
    }
    scored = evaluate(ScoredOptions(tasks=("said",), answers=file, **asked).make(), None, batch_size=1)
    known = {name: count for name, count in counts.items() if name != "at_token_limit"}
    assert of_texts(scored) == known and "at_token_limit" not in scored.metrics


def test_a_stop_may_be_a_special_token(gpt2: Path, tmp_path: Path) -> None:
    """Which no text has: the harness ends there, too."""
    _, tokenizer = parts_of(gpt2)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>", "<turn>"]})
    tokenizer.save_pretrained(tmp_path / "model")
    ids = tokenizer.convert_tokens_to_ids(["a", "b", "<end>", "7", "<turn>", "d"])
    model = following(tokenizer, "ab")
    model.table.data = torch.zeros(len(tokenizer), len(tokenizer))
    for token, follows in itertools.pairwise(ids):
        model.table.data[token, follows] = 1
    folder = write_said(tmp_path / "tasks", "7", until=["<turn>"], most=6)
    made: dict[str, Any] = {
        "model": model,
        "tokenizer": tmp_path / "model",
        "max_length": 64,
        "think_end": "<end>",
    }
    task = LmEval(tasks="said", include_path=folder, bootstrap_iters=0, **made)
    result = evaluate(task, tmp_path / "out", batch_size=4)
    assert rows(tmp_path / "out")["generated"] == ["7"] and of_texts(result) == {}
    assert result.metrics["said/exact_match,whole"] == 1


def test_texts_are_drawn_where_it_is_asked(gpt2: Path, tmp_path: Path) -> None:
    """A text follows from its document, request and the seed: not from others, nor from the batch."""
    found: list[Any] = []
    for prompts, size, seed in (("abcdef", 4, 0), ("abc", 1, 0), ("abc", 1, 1)):
        folder = write_said(tmp_path / "tasks", "7", prompts, repeats=3, most=8)
        asked: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9, "answers_seed": seed, "bootstrap_iters": 0}
        task = LmEval(model=gpt2, tasks="said", include_path=folder, **asked)
        result = evaluate(task, tmp_path / f"out{len(found)}", batch_size=size)
        texts = [json.loads(each) for each in rows(tmp_path / f"out{len(found)}")["generated"]]
        assert all(len({*each}) == 3 for each in texts)
        assert result.metrics["at_token_limit"] == sum(rows(tmp_path / f"out{len(found)}")["at_token_limit"])
        found.append((texts[:3], result.fingerprint))
    assert found[0][0] == found[1][0] != found[2][0] and len({each for _, each in found}) == 3
    assert task.description()["texts"] == "drawn with temperature 1.5, top p 0.9, seed 1"
    # Without: the likeliest text, as often.
    likeliest = LmEval(model=gpt2, tasks="said", include_path=folder, bootstrap_iters=0)
    evaluate(likeliest, tmp_path / "out", batch_size=2)
    assert {len({*json.loads(each)}) for each in rows(tmp_path / "out")["generated"]} == {1}


def test_a_text_that_met_a_nan_is_empty_and_counted(gpt2: Path, tmp_path: Path) -> None:
    _, tokenizer = parts_of(gpt2)
    model = following(tokenizer, f"a{SAID}")
    model.table.data[tokenizer.convert_tokens_to_ids("7")] = float("nan")
    folder = write_said(tmp_path / "tasks", "7")
    made: dict[str, Any] = {"model": model, "tokenizer": gpt2, "max_length": 64}
    result = evaluate(LmEval(tasks="said", include_path=folder, **made), tmp_path / "out", batch_size=4)
    counts = dict.fromkeys(("nan_logits", "empty_answers", "not_extracted"), 1)
    assert of_texts(result) == {"at_token_limit": 1, **counts}
    assert result.metrics["said/exact_match,number"] == 0


def test_options_of_texts_are_refused_where_none_are_generated(gpt2: Path, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path / "tasks")
    for options, said in (
        ({"think_end": "</think>", "temperature": 0.7}, "--think-end, --temperature: no task here gener"),
        ({"top_p": 0.9}, "--top-p: greedy answers are all equal"),
        ({"temperature": -1.0}, "--temperature -1.0: expected 0 or a positive number"),
    ):
        with pytest.raises(UsageError, match=said):
            LmEval(model=gpt2, tasks="words", include_path=folder, **options)
    of_task: dict[str, Any] = {"tasks": "numbers", "include_path": folder}
    text = (folder / "numbers.yaml").read_text()
    for settings, said in (
        (
            "do_sample: true\n  temperature: 0.2\n  top_p: 0.95",
            "give --temperature 0.2 --top-p 0.95, for all",
        ),
        ("do_sample: true\n  temperature: 0.2\n  top_k: 50", "generates with top_k 50, which is not done"),
    ):
        (folder / "numbers.yaml").write_text(text.replace("do_sample: false", settings))
        with pytest.raises(UsageError, match=said):
            LmEval(model=gpt2, **of_task)
    (folder / "numbers.yaml").write_text(text.replace("do_sample: false", "do_sample: true"))
    assert LmEval(model=gpt2, temperature=0.2, **of_task).options()["temperature"] == 0.2


def test_log_likelihoods_that_are_nan_are_a_warning(gpt2: Path, tmp_path: Path) -> None:
    """The harness takes the first NaN for the likeliest choice: 0.38 are right."""
    model, _ = parts_of(gpt2)
    model.transformer.ln_f.weight.data.fill_(float("nan"))
    folder = write_tasks(tmp_path / "tasks")
    made: dict[str, Any] = {"model": model, "tokenizer": gpt2, "include_path": folder, "limit": 3}
    result = evaluate(LmEval(tasks="choices", bootstrap_iters=0, **made), None, batch_size=4)
    assert any("3 documents with a log-likelihood that is NaN" in each for each in result.warnings)
