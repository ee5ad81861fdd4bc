"""The task language-modeling in one process: windows, choices and greedy answers beside loops by hand."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dualeval.errors import UsageError
from dualeval.models.text_models import CausalTokens, read_tokenizer
from dualeval.tasks.language_modeling import USE, LanguageModeling
from dualeval.tasks.options.language_modeling import LanguageModelingOptions
from tests.engine.test_evaluator import evaluate, rows
from tests.tasks.conftest import check_doors
from tests.vehicles import questions
from tests.vehicles.causal_models import (
    POSITIONS,
    TEXTS,
    choice_rows,
    prompt_rows,
    save_causal,
    write_lines,
    write_texts,
)
from tests.vehicles.made_tokenizers import RIVER

BATCH = 4
Made = dict[str, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Models, and data of the three kinds."""
    home = tmp_path_factory.mktemp("made")
    return {
        "gpt2": save_causal(home / "gpt2"),
        "llama": save_causal(home / "llama", "Llama", begins=True),
        "texts": write_texts(home / "texts"),
        "choices": write_lines(home / "choices.jsonl", choice_rows()),
        "prompts": write_lines(home / "prompts.jsonl", prompt_rows()),
    }


def run(model: Any, data: Any, out: Path | None, **options: Any) -> Any:
    task = LanguageModeling(model=model, data=data, **options)
    return evaluate(task, out, batch_size=BATCH)


def parts_of(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer, as the library loads them."""
    library = questions.transformers()
    model = library.AutoModelForCausalLM.from_pretrained(folder).eval()
    return model, library.AutoTokenizer.from_pretrained(folder)


def plain_loglikelihoods(model: Any, inputs: list[int], targets: list[int]) -> list[float]:
    """Of the last tokens, one after the other, without a batch."""
    with torch.inference_mode():
        found = model(torch.tensor([inputs])).logits[0].log_softmax(1)[-len(targets) :]
    return [float(found[place, token]) for place, token in enumerate(targets)]


def text_of(name: str) -> str:
    return TEXTS[name].removeprefix("\ufeff")


# -- texts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("stride", [None, 40])
def test_perplexities_are_those_of_a_loop_by_hand(
    made: Made, tmp_path: Path, kind: str, stride: int | None
) -> None:
    """Which takes the windows of each document one after the other, by the harness's definitions."""
    result = run(made[kind], made["texts"], tmp_path / "out", stride=stride)
    model, tokenizer = parts_of(made[kind])
    sums: dict[str, float] = {}
    counts = dict.fromkeys(("tokens", "words", "bytes"), 0)
    for name in sorted(TEXTS):
        text = text_of(name)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        found = plain_loglikelihoods(model, [0, *tokens[:-1]][:POSITIONS], tokens[:POSITIONS])
        done, step = POSITIONS, stride or POSITIONS
        while done < len(tokens):
            end = min(done + step, len(tokens))
            found += plain_loglikelihoods(model, tokens[end - POSITIONS - 1 : end - 1], tokens[done:end])
            done = end
        sums[name] = math.fsum(found)
        counts["tokens"] += len(tokens)
        counts["words"] += len(re.split(r"\s+", text))
        counts["bytes"] += len(text.encode("utf-8"))
    table = rows(tmp_path / "out")
    assert {name: sum(table[name]) for name in counts} == counts
    for name, total in sums.items():
        own = [nll for nll, of in zip(table["nll"], table["document"], strict=True) if of == name]
        assert -math.fsum(own) == pytest.approx(total, rel=1e-5)
    # lm-evaluation-harness: weighted_perplexity, and bits_per_byte, of the same log-likelihoods.
    loglikelihood = -math.fsum(table["nll"])
    assert result.metrics == {
        "perplexity": pytest.approx(math.exp(-loglikelihood / counts["tokens"]), rel=1e-14),
        "word_perplexity": pytest.approx(math.exp(-loglikelihood / counts["words"]), rel=1e-14),
        "byte_perplexity": pytest.approx(math.exp(-loglikelihood / counts["bytes"]), rel=1e-14),
        "bits_per_byte": pytest.approx(-(loglikelihood / counts["bytes"]) / math.log(2), rel=1e-14),
    }
    assert -loglikelihood == pytest.approx(-math.fsum(sums.values()), rel=1e-5)
    for name in result.metrics:
        low, high = result.intervals[name]
        assert low < result.metrics[name] < high
    assert result.clusters["count"] == len(TEXTS)


def test_the_tokens_of_padding_change_no_bit(made: Made) -> None:
    task = LanguageModeling(model=made["gpt2"], data=made["texts"])
    model = task.build_model(torch.device("cpu"))
    samples = task.dataset().__getitems__(range(len(task.dataset())))
    batch, other = task.collate(samples), task.collate(samples)
    changed = 0
    for group in other["groups"]:
        for inputs, (_, stop) in zip(group["inputs"], group["predicted"], strict=True):
            changed += len(inputs) - stop
            inputs[stop:] = 77
    assert changed > 0
    with torch.inference_mode():
        pairs = zip(task.forward(model, batch), task.forward(model, other), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)


def test_a_table_of_texts_has_the_metrics_of_their_files(made: Made, tmp_path: Path) -> None:
    """Whatever they come from: the same texts have the same value."""
    import pyarrow
    import pyarrow.parquet

    wanted = run(made["gpt2"], made["texts"], None, max_length=32).metrics
    table = [{"id": name, "text": text_of(name)} for name in TEXTS]
    lines = write_lines(tmp_path / "a.jsonl", table)
    other = write_lines(tmp_path / "b.jsonl", [{"body": row["text"], "text": 3} for row in table])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "c.parquet")
    for data, options in ((lines, {}), (other, {"text": "body"}), (tmp_path / "c.parquet", {}), (table, {})):
        assert run(made["gpt2"], data, None, max_length=32, **options).metrics == wanted


# -- choices -------------------------------------------------------------------------------------------


def plain_choices(model: Any, tokenizer: Any, row: dict[str, Any], begins: bool) -> list[float]:
    """The log-likelihood of each choice, by the harness's way to encode pairs and to cut them."""
    found = []
    for choice in row["choices"]:
        context, follows = row["question"], f" {choice}"
        blanks = len(context) - len(context.rstrip())
        if blanks:
            context, follows = context[:-blanks], context[-blanks:] + follows
        if context:
            before = tokenizer(context)["input_ids"]
            after = tokenizer(context + follows)["input_ids"][len(before) :]
        else:
            before, after = [0], tokenizer(follows, add_special_tokens=False)["input_ids"]
        assert (before[0] == 0) == (begins or not context)
        inputs = [*before, *after][-(POSITIONS + 1) :][:-1]
        found.append(math.fsum(plain_loglikelihoods(model, inputs, after)))
    return found


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_choices_are_those_of_a_loop_by_hand(made: Made, tmp_path: Path, kind: str) -> None:
    result = run(made[kind], made["choices"], tmp_path / "out")
    model, tokenizer = parts_of(made[kind])
    right: dict[str, list[float]] = {"acc": [], "acc_norm": [], "acc_bytes": []}
    table = rows(tmp_path / "out")
    for place, row in enumerate(choice_rows()):
        choices, answer = row["choices"], row["answer"]
        gold = answer if isinstance(answer, int) else choices.index(answer)
        found = np.array(plain_choices(model, tokenizer, row, kind == "llama"))
        assert table["loglikelihoods"][place] == pytest.approx(found, rel=1e-5)
        assert table["prediction"][place] == np.argmax(found)
        assert table["answer"][place] == gold
        right["acc"].append(np.argmax(found) == gold)
        # lm-evaluation-harness, ConfigurableTask.process_results: completion_len and byte_length.
        right["acc_norm"].append(np.argmax(found / [float(len(each)) for each in choices]) == gold)
        lengths = [float(len(each.encode("utf-8"))) for each in choices]
        right["acc_bytes"].append(np.argmax(found / lengths) == gold)
    for name, each in right.items():
        assert result.metrics[name] == sum(each) / len(each)
        assert table[name] == each
    assert result.metrics["cut_contexts"] == sum(table["cut"]) > 0
    assert right["acc"] != right["acc_norm"]


class Fixed(nn.Module):
    """A model that is not of transformers: logits of a token that follow from the one before it."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


def test_the_first_of_equal_choices_is_taken_and_none_with_nan(made: Made, tmp_path: Path) -> None:
    _, tokenizer = parts_of(made["gpt2"])
    table = torch.zeros(len(tokenizer), len(tokenizer))
    # What follows a z.
    table[tokenizer.convert_tokens_to_ids("z")] = math.nan
    data = [
        {"context": "b", "choices": ["c", "d"], "answer": 0},
        {"context": "b", "choices": ["c", "d"], "answer": 1},
        {"context": "b", "choices": ["c", "dd"], "answer": "c"},
        {"context": "b", "choices": ["zc", "d"], "answer": 0},
    ]
    task = {"model": Fixed(table), "tokenizer": made["gpt2"], "max_length": 64}
    result = run(data=data, out=tmp_path / "out", **task)
    table_of = rows(tmp_path / "out")
    assert table_of["prediction"] == [0, 0, 0, -1]
    assert table_of["acc"] == [True, False, True, False]
    assert table_of["acc_norm"] == [True, False, False, False]
    assert result.metrics["acc"] == 0.5


def test_white_space_twice_before_a_choice_is_warned_of(made: Made) -> None:
    def said(**options: Any) -> str:
        return str(run(made["gpt2"], made["choices"], None, **options).warnings)

    assert "10 of 14 contexts end in white space, and --target-delimiter ' ' adds more" in said()
    assert "white space" not in said(target_delimiter="")


def test_a_beginning_of_text_is_not_added_twice(made: Made) -> None:
    """As where a chat template has written it."""
    for kind, begun in (("llama", True), ("gpt2", False)):
        tokens = CausalTokens(read_tokenizer(made[kind], USE), made[kind])
        plain, marked = tokens.pair("the river", " ends"), tokens.pair("<s>the river", " ends")
        assert marked == ([0, *plain[0][begun:]], plain[1])


# -- greedy answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_answers_are_those_of_the_library(made: Made, tmp_path: Path, kind: str) -> None:
    """Which generates them one at a time."""
    result = run(made[kind], made["prompts"], tmp_path / "out", max_new_tokens=12)
    model, tokenizer = parts_of(made[kind])
    table = rows(tmp_path / "out")
    for row, text in zip(prompt_rows(), table["generated"], strict=True):
        inputs = tokenizer(row["prompt"], return_tensors="pt")["input_ids"][:, -(POSITIONS - 12) :]
        mask = torch.ones_like(inputs)
        found = model.generate(inputs, attention_mask=mask, do_sample=False, max_new_tokens=12)
        assert text == tokenizer.decode(found[0, inputs.shape[1] :], skip_special_tokens=True)
    flags = {"at_token_limit": 14, "empty_answers": 0}
    assert result.metrics == {"exact_match": 0.0, "cut_contexts": 0, **flags}
    assert len(set(table["generated"])) > 3


def test_a_configuration_that_changes_greedy_search_is_named(made: Made, tmp_path: Path) -> None:
    folder, plain = (shutil.copytree(made["gpt2"], tmp_path / name) for name in ("other", "plain"))
    for each, changes in ((folder, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}), (plain, {})):
        usual = {"repetition_penalty": 1.0, "num_beams": 1, "do_sample": True, "temperature": 0.6}
        (each / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **usual, **changes}))
    said = run(folder, made["prompts"], None, max_new_tokens=2).warnings
    assert any("asks for repetition_penalty 1.3, no_repeat_ngram_size 2, which is not" in one for one in said)
    asked = [(plain, "prompts"), (folder, "texts")]
    assert not any("generation_config" in str(run(one, made[kind], None).warnings) for one, kind in asked)


def following(tokenizer: Any, text: str) -> Fixed:
    """A model that says the same text after each of its characters: which are all different."""
    tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert len({*tokens}) == len(tokens) == len(text) + 1
    table = torch.zeros(len(tokenizer), len(tokenizer))
    for token, follows in itertools.pairwise(tokens):
        table[token, follows] = 1
    return Fixed(table)


@pytest.mark.parametrize(
    ("options", "answers", "generated"),
    [
        ({}, "b,\nC", "b,\nC"),
        ({}, ["x", "the B c!"], "b,\nC"),
        ({"stop_at_newline": True}, "b", "b,"),
        ({"max_new_tokens": 1}, "B.", "b"),
        ({"ignore": ["case"]}, "B,\nc", "b,\nC"),
        ({"ignore": ["none"]}, "b,\nC", "b,\nC"),
        ({"ignore": ["case", "punctuation"]}, "b\nc", "b,\nC"),
    ],
)
def test_exact_match_leaves_out_the_ignored(
    made: Made, tmp_path: Path, options: Any, answers: Any, generated: str
) -> None:
    _, tokenizer = parts_of(made["gpt2"])
    task = {"model": following(tokenizer, "ab,\nC"), "tokenizer": made["gpt2"], "max_length": 64}
    data = [{"prompt": "a", "answer": answers}, {"prompt": "xa", "answer": "never"}]
    result = run(data=data, out=tmp_path / "out", **task, **options)
    assert rows(tmp_path / "out")["generated"] == [generated, generated]
    assert rows(tmp_path / "out")["exact_match"] == [True, False]
    assert result.metrics["exact_match"] == 0.5


@pytest.mark.parametrize(
    ("ignore", "answer"), [(["punctuation"], "B"), (["none"], "b"), (["case", "whitespace"], "b, C.")]
)
def test_a_difference_that_is_not_ignored_is_wrong(made: Made, ignore: list[str], answer: str) -> None:
    _, tokenizer = parts_of(made["gpt2"])
    task = {"model": following(tokenizer, "ab,\nC"), "tokenizer": made["gpt2"], "max_length": 64}
    data = [{"prompt": "a", "answer": answer}]
    assert run(data=data, out=None, ignore=ignore, **task).metrics["exact_match"] == 0.0


def test_an_answer_with_a_nan_logit_is_wrong(made: Made) -> None:
    _, tokenizer = parts_of(made["gpt2"])
    model = following(tokenizer, "ab,\nC")
    model.table.data[tokenizer.convert_tokens_to_ids("b"), 5] = math.nan
    data = [{"prompt": "a", "answer": "b!"}, {"prompt": ",", "answer": "C"}]
    given = {"tokenizer": made["gpt2"], "max_length": 64, "max_new_tokens": 2}
    assert run(model, data, None, **given).metrics["exact_match"] == 0.5


# -- one task, two doors -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["texts", "choices", "prompts"])
def test_the_class_and_the_command_line_make_the_same_job(made: Made, kind: str) -> None:
    library = questions.transformers()

    def make() -> nn.Module:
        model: nn.Module = library.AutoModelForCausalLM.from_pretrained(made["gpt2"])
        return model

    typed = {"model": made["gpt2"], "data": made[kind]}
    found = check_doors(
        "language-modeling", "LanguageModeling", typed, [make(), make], tokenizer=typed["model"]
    )
    assert {*found.metrics} <= {*LanguageModelingOptions.known_metrics()}


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("texts", {"max_length": 32}),
    ("texts", {"stride": 32}),
    ("choices", {"target_delimiter": ""}),
    ("prompts", {"max_new_tokens": 3}),
    ("prompts", {"stop_at_newline": True}),
    ("prompts", {"ignore": ("case",)}),
    ("prompts", {"stop": ("x",)}),
    ("prompts", {"think_end": "x"}),
    ("prompts", {"extract": "x"}),
    ("prompts", {"temperature": 0.5}),
]


@pytest.mark.parametrize(("kind", "change"), CHANGES)
def test_another_option_is_another_job(made: Made, kind: str, change: dict[str, Any]) -> None:
    tasks = [LanguageModeling(model=made["gpt2"], data=made[kind], **options) for options in ({}, change)]
    assert tasks[0].fingerprint() != tasks[1].fingerprint()


def test_the_result_says_what_was_evaluated(made: Made, tmp_path: Path) -> None:
    result = run(made["gpt2"], made["texts"], tmp_path / "out", stride=16, metrics=["bits_per_byte"])
    assert [*result.metrics] == ["bits_per_byte"]
    assert result.description["tokens"] == "max length 64, stride 16"
    assert result.description["data"].startswith(f"{made['texts']}, 4 documents (")
    names = ("metric", "data", "text", "max_length", "stride")
    assert [result.job[name] for name in names] == [["bits_per_byte"], str(made["texts"]), None, 64, 16]


# -- bad input -----------------------------------------------------------------------------------------


def lines(*rows: Any) -> Callable[[Path], Path]:
    return lambda folder: write_lines(folder / "bad.jsonl", rows)


CHOICES = {"context": "a", "choices": ["b", "c"], "answer": 0}
PROMPT = {"prompt": "a", "answer": "b"}
REFUSED: list[tuple[Callable[[Path], Any], dict[str, Any], str]] = [
    (lambda folder: folder / "none.txt", {}, "none.txt does not exist. Expected a .txt file"),
    (lambda folder: folder, {}, "holds no .txt file. Expected a .txt file, a folder"),
    (lambda folder: folder / "none", {"text": "a"}, "none does not exist. Expected a .txt file"),
    (
        lambda folder: write_texts(folder, {"a.png": "x"}) / "a.png",
        {},
        "a.png is neither a text file nor a table",
    ),
    (lambda folder: write_texts(folder), {"text": "a"}, "--text a: --data"),
    (lines({"text": "a"}), {"text": "body"}, "bad.jsonl has the columns text"),
    (lines({"title": "a", "answer": "b"}), {}, "bad.jsonl has the columns title, answer: expected text"),
    (lines({"question": "a", "answer": "b"}), {}, "prompt and answer (greedy answers)"),
    (lines({"context": "a", "choices": ["b", "c"]}), {}, "context or question with choices and answer"),
    (lines({"text": "a"}, {"body": "b"}), {}, "bad.jsonl, line 2 has no 'text'"),
    (lines({"text": "a"}), {"max_length": 65}, "--max-length 65 is more than the 64 positions"),
    (lines({"text": "a"}), {"stride": 65}, "--stride 65 is more than the 64 tokens of a window"),
    (lines({"text": "a"}), {"max_new_tokens": 3}, "--max-new-tokens is for rows with prompt and answer, and"),
    (lines({"text": "a"}), {"ignore": ["case"]}, "--ignore is for rows with prompt and answer, and"),
    (lines(CHOICES), {"stride": 3}, "--stride is for documents, and"),
    (lines(PROMPT), {"target_delimiter": ""}, "--target-delimiter is for rows with choices, and"),
    (lines(PROMPT), {"max_new_tokens": 64}, "--max-new-tokens 64 leaves no room for a prompt"),
    (lines(PROMPT), {"ignore": ["cases"]}, "--ignore 'cases': expected one of case, punctuation"),
    (lines(PROMPT), {"max_new_tokens": 0}, "--max-new-tokens 0"),
    (lines(CHOICES), {"temperature": 0.5}, "--temperature is for rows with prompt and answer, and"),
    (lines(PROMPT), {"temperature": -1.0}, "--temperature -1.0"),
    (lines(PROMPT), {"temperature": 1.0, "top_p": 0.0}, "--top-p 0.0"),
    (lines(PROMPT), {"answers_per_prompt": 2, "top_p": 0.9}, "--top-p and --answers-per-prompt: greedy"),
    (lines(PROMPT), {"stop": ("",)}, "--stop"),
    (lines(PROMPT), {"extract": "("}, "--extract '(' is no regular expression: missing )"),
    (lines(CHOICES), {"metrics": ["perplexity"]}, "there is no metric 'perplexity' here"),
]


class SeesAll(nn.Module):
    """Tells each token from all of its text, as a masked language model does."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Embedding(300, 8), nn.Linear(8, 300))

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.network(tokens)
        return found + found.mean(1, keepdim=True)


def test_a_model_that_sees_what_it_predicts_is_refused(made: Made, tmp_path: Path) -> None:
    data = write_texts(tmp_path)
    task = LanguageModeling(model=SeesAll, tokenizer=made["gpt2"], data=data, max_length=8)
    with pytest.raises(UsageError, match="is not causal: the logits of a token differ by"):
        task.build_model(torch.device("cpu"))


@pytest.mark.parametrize(("data", "options", "said"), REFUSED)
def test_wrong_data_and_options_are_refused(
    made: Made, tmp_path: Path, data: Callable[[Path], Any], options: Any, said: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        LanguageModeling(model=made["gpt2"], data=data(tmp_path), **options)


BAD_ROWS: list[tuple[list[Any], int, str]] = [
    ([{"text": RIVER}, {"text": " \n"}, {"text": "c"}], 1, "line 2: the column 'text' is empty"),
    ([{"text": "a"}, {"text": 3}], 1, "line 2: the column 'text' is 3 (int), expected a text"),
    ([CHOICES, {**CHOICES, "choices": ["b", ""]}], 1, "line 2: choice 1 is empty, expected a text"),
    ([CHOICES, {**CHOICES, "choices": "b"}], 1, "line 2: choices is 'b' (str), expected a list"),
    ([CHOICES, {**CHOICES, "answer": "d"}], 1, "line 2: answer is 'd' (str), expected one of the 2 choices"),
    ([CHOICES, {**CHOICES, "answer": 2}], 1, "or its index from 0 to 1"),
    ([CHOICES, {**CHOICES, "answer": True}], 1, "line 2: answer is True (bool)"),
    ([CHOICES, {**CHOICES, "context": None}], 1, "line 2: the column 'context' is empty"),
    ([CHOICES, {**CHOICES, "choices": ["b", RIVER]}], 1, "line 2: choice 1 is 182 tokens after its context"),
    ([PROMPT, {**PROMPT, "prompt": ""}], 1, "line 2: the column 'prompt' is empty"),
    ([PROMPT, {**PROMPT, "answer": []}], 1, "line 2: answer is [] (list), expected a text or a list"),
    ([PROMPT, {**PROMPT, "answer": 4}], 1, "line 2: answer is 4 (int)"),
]


@pytest.mark.parametrize(("data", "bad", "said"), BAD_ROWS)
def test_a_bad_row_stops_the_run_or_is_left_out(
    made: Made, tmp_path: Path, data: list[Any], bad: int, said: str
) -> None:
    path = write_lines(tmp_path / "data.jsonl", data)
    with pytest.raises(UsageError, match=re.escape(said)):
        run(made["gpt2"], path, None)
    task = LanguageModeling(model=made["gpt2"], data=path)
    result = evaluate(task, tmp_path / "out", batch_size=BATCH, on_error="skip")
    assert result.samples["failed"] == 1
    [failed] = result.failed
    assert said in failed["error"]
    good = write_lines(tmp_path / "good.jsonl", [row for place, row in enumerate(data) if place != bad])
    # Other windows share a batch there.
    assert result.metrics == pytest.approx(run(made["gpt2"], good, None).metrics, rel=1e-6)


def test_a_file_that_is_no_text_is_refused(made: Made, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "b.txt").write_text("")
    for name, said in (("a.txt", "a.txt is not UTF-8"), ("b.txt", "b.txt is empty: expected a text")):
        with pytest.raises(UsageError, match=re.escape(said)):
            run(made["gpt2"], tmp_path / name, None)


@pytest.mark.parametrize("kind", ["texts", "choices", "prompts"])
def test_a_token_that_the_model_does_not_know_is_refused(made: Made, tmp_path: Path, kind: str) -> None:
    """One that was added to the tokenizer alone matters where a text has it."""
    folder = save_causal(tmp_path / "model")
    wanted = run(folder, made[kind], None).metrics
    tokenizer = parts_of(folder)[1]
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder)
    assert run(folder, made[kind], None).metrics == wanted
    rows: dict[str, Any] = {
        "texts": [{"text": "a <new>"}],
        "choices": [{**CHOICES, "choices": ["b", "<new>"]}],
    }
    data = write_lines(tmp_path / "new.jsonl", rows.get(kind, [{**PROMPT, "prompt": "<new> a"}]))
    with pytest.raises(UsageError, match="has the token 264 of its tokenizer, and the model knows 264"):
        run(folder, data, None)


def test_a_choice_of_no_token_is_refused(tmp_path: Path) -> None:
    """Between context and choice stands a space, which is all that would count."""
    from tokenizers import normalizers

    folder = save_causal(tmp_path / "model")
    tokenizer = parts_of(folder)[1]
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("~", "")
    tokenizer.save_pretrained(folder)
    with pytest.raises(UsageError, match=r"choice 0 is 0 tokens after its context, .* leaves it out"):
        run(folder, [{**CHOICES, "choices": ["~", "b"]}], None)


def test_models_and_tokenizers_that_do_not_fit_are_refused(made: Made, tmp_path: Path) -> None:
    library = questions.transformers()
    texts: dict[str, Any] = {"data": made["texts"], "tokenizer": made["gpt2"]}
    small = save_causal(tmp_path / "small", vocab_size=100)
    with pytest.raises(UsageError, match="tells 264 tokens apart, its model only 100"):
        run(small, made["texts"], None)
    with pytest.raises(UsageError, match=r"gave \(2, 2, 3\) for tokens of shape \(2, 2\): expected logits"):
        run(Fixed(torch.zeros(300, 3)), out=None, max_length=8, **texts)
    with pytest.raises(UsageError, match="holds no model for language modeling"):
        folder = tmp_path / "vit"
        library.ViTConfig().save_pretrained(folder)
        library.AutoTokenizer.from_pretrained(made["gpt2"]).save_pretrained(folder)
        run(folder, made["texts"], None, max_length=8)
    fixed = Fixed(torch.zeros(300, 300))
    with pytest.raises(UsageError, match="does not say in a configuration how many tokens"):
        LanguageModeling(model=fixed, **texts)
    # Of a function it is known when the model is built: the folder of the tokenizer may be another model's.
    with pytest.raises(UsageError, match=r"or others than .*: give --max-length N \(max_length=N\)"):
        run(lambda: fixed, out=None, **texts)
    with pytest.raises(UsageError, match="--max-length 65 is more than the 64 positions"):
        make = lambda: library.AutoModelForCausalLM.from_pretrained(made["gpt2"])  # noqa: E731
        run(make, out=None, max_length=65, **texts)
    bare = tmp_path / "bare"
    library.AutoTokenizer.from_pretrained(made["gpt2"], bos_token=None, eos_token=None).save_pretrained(bare)
    with pytest.raises(UsageError, match=r"no token for the beginning of a text, nor one for its end"):
        LanguageModeling(model=parts_of(made["gpt2"])[0], data=made["texts"], tokenizer=bare)
