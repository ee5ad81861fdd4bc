"""The task language-modeling in one process: windows, choices and greedy answers beside loops by hand."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn

import dualeval
from dualeval.models.text_models import CausalTokens, read_tokenizer
from dualeval.tasks.language_modeling import USE, LanguageModeling
from dualeval.tasks.options.language_modeling import LanguageModelingOptions
from tests.engine.test_evaluator import evaluate, rows
from tests.tasks.conftest import check_doors
from tests.vehicles import questions
from tests.vehicles.causal_models import POSITIONS, TEXTS, choice_rows, prompt_rows, write_lines

BATCH = 4
Made = dict[str, Path]


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


def test_kept_losses_are_those_of_each_token_and_change_no_figure(made: Made, tmp_path: Path) -> None:
    plain = run(made["gpt2"], made["texts"], tmp_path / "plain", stride=40)
    kept = run(made["gpt2"], made["texts"], tmp_path / "kept", stride=40, keep_losses=True)
    assert kept.metrics_digest == plain.metrics_digest and kept.samples_digest == plain.samples_digest
    table = rows(tmp_path / "kept")
    assert {*table} - {*rows(tmp_path / "plain")} == {"token_ids", "token_losses"}
    assert table["nll"] == rows(tmp_path / "plain")["nll"] == [*map(sum, table["token_losses"])]
    model, tokenizer = parts_of(made["gpt2"])
    for document in {*table["document"]}:
        windows = [at for at, of in enumerate(table["document"]) if of == document]
        tokens = [token for at in windows for token in table["token_ids"][at]]
        assert tokens == tokenizer(text_of(document), add_special_tokens=False)["input_ids"]
        wanted = plain_loglikelihoods(model, [0, *tokens[:-1]][:POSITIONS], tokens[:POSITIONS])
        losses = table["token_losses"][windows[0]]
        assert losses == pytest.approx([-each for each in wanted], rel=1e-4)
    # Another job, and one without it is the same as before there was the option.
    assert kept.fingerprint != plain.fingerprint and kept.job["keep_losses"] is True
    task = LanguageModeling(model=made["gpt2"], data=made["texts"], stride=40)
    assert "keep_losses" not in {**plain.job, **task.fingerprint()}
    assert not dualeval.compare(tmp_path / "plain", tmp_path / "kept").differs_in


def test_an_unread_document_has_no_losses(made: Made, tmp_path: Path) -> None:
    task = LanguageModeling(model=made["gpt2"], data=[{"text": ""}, {"text": "one"}], keep_losses=True)
    evaluate(task, tmp_path / "out", batch_size=BATCH, on_error="skip")
    table = rows(tmp_path / "out")
    assert table["token_losses"][0] is None and len(table["token_losses"][1]) == table["tokens"][1]
    assert task.show({name: column[0] for name, column in table.items()}) == ""


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_pieces_are_the_text_of_the_data_and_whole_characters(made: Made, kind: str) -> None:
    tokens = CausalTokens(read_tokenizer(made[kind], USE), made[kind])
    for text in ("One and two.", "a 🙂🙂é\n b  c", "\ufffd" * 9, " the  key . ", ""):
        pieces = tokens.pieces(text)
        assert "".join(pieces) == text
        assert len(pieces) == len(tokens.fast.encode(text, add_special_tokens=False).ids)
        assert not text.isascii() or all(pieces)


def test_a_document_is_shown_as_the_data_have_it(made: Made, tmp_path: Path) -> None:
    """A decoder of words puts a space before a full stop, and leaves out what its splitter leaves out."""
    words = Tokenizer(WordLevel({"<s>": 0, "<unk>": 1, "the": 2, "key": 3, ".": 4}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    shutil.copytree(made["gpt2"], tmp_path / "model")
    words.save(str(tmp_path / "model" / "tokenizer.json"))
    text = "The key.  the\tkey . "
    task = LanguageModeling(
        model=tmp_path / "model", data=[{"text": text}], max_length=3, stride=3, keep_losses=True
    )
    evaluate(task, tmp_path / "out", batch_size=BATCH)
    table = rows(tmp_path / "out")
    windows = [{name: column[at] for name, column in table.items()} for at in range(2)]
    shown = [[piece for piece, _ in task.show(row)[0]] for row in windows]
    assert shown == [["The", " key", "."], ["  the", "\tkey", " . "]]
    assert "".join(task.show({**row, "token_losses": None}) for row in windows) == text


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
