"""The task language-modeling: data, options and models that are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dualeval.errors import UsageError
from dualeval.tasks.language_modeling import LanguageModeling
from tests.engine.test_evaluator import evaluate
from tests.tasks.test_language_modeling import BATCH, Fixed, Made, parts_of, run
from tests.vehicles import questions
from tests.vehicles.causal_models import save_causal, write_lines, write_texts
from tests.vehicles.made_tokenizers import RIVER


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
    (lines(CHOICES), {"keep_losses": True}, "--keep-losses is for documents, and"),
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
    with pytest.raises(UsageError, match=r"the model has no number of positions in its config\.json: give"):
        LanguageModeling(model=fixed, **texts)
    # Of a function it is known when the model is built: the folder of the tokenizer may be another model's.
    with pytest.raises(
        UsageError, match=r"has no number .*: give --max-length N, such as 512 \(max_length=N\)"
    ):
        run(lambda: fixed, out=None, **texts)
    fixed.config = library.GPT2Config(n_positions=32)
    with pytest.raises(
        UsageError, match=r"the model has 32 positions in its config.*, and not those of .*gpt2"
    ):
        run(lambda: fixed, out=None, **texts)
    with pytest.raises(UsageError, match=r"mamba has no number of positions in its config\.json: give --max"):
        run(save_causal(tmp_path / "mamba", "Mamba"), made["texts"], None)
    with pytest.raises(UsageError, match="--max-length 65 is more than the 64 positions"):
        make = lambda: library.AutoModelForCausalLM.from_pretrained(made["gpt2"])  # noqa: E731
        run(make, out=None, max_length=65, **texts)
    bare = tmp_path / "bare"
    library.AutoTokenizer.from_pretrained(made["gpt2"], bos_token=None, eos_token=None).save_pretrained(bare)
    with pytest.raises(UsageError, match=r"no token for the beginning of a text, nor one for its end"):
        LanguageModeling(model=parts_of(made["gpt2"])[0], data=made["texts"], tokenizer=bare)
