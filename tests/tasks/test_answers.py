"""Answers to prompts: of several families of models, drawn ones, where they end, and what is in them."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from dualeval.errors import UsageError
from dualeval.models import generation
from dualeval.models.generation import MOST_DRAWN, Way, drawn, way_of
from dualeval.tasks.language_modeling import LanguageModeling
from tests.engine.test_evaluator import rows
from tests.tasks.test_language_modeling import following, run
from tests.vehicles import questions
from tests.vehicles.causal_models import prompt_rows, save_causal, write_lines
from tests.vehicles.made_tokenizers import RIVER

# Those without a cache compute all tokens again: the state of RWKV mixes the rows of a batch, and Bamba would
# have to be told the places of its tokens.
FAMILIES = {
    "Mamba": Way(cache="cache_params"),
    "Rwkv": Way(),
    "RecurrentGemma": Way(),
    "T5": Way(cache="past_key_values", start=1),
    "Bamba": Way(),
    "Bart": Way(cache="past_key_values", start=2),
}
IN_LONG_TESTS = ("Bamba", "Bart")


def parts_of(folder: Path) -> tuple[Any, Any]:
    library = questions.transformers()
    form = "Seq2SeqLM" if library.AutoConfig.from_pretrained(folder).is_encoder_decoder else "CausalLM"
    model = getattr(library, f"AutoModelFor{form}").from_pretrained(folder).eval()
    return model, library.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.long) if kind in IN_LONG_TESTS else kind for kind in FAMILIES],
)
def test_answers_of_each_family_are_those_of_generate_one_by_one(tmp_path: Path, kind: str) -> None:
    """But RecurrentGemma's ``generate`` begins a prompt of one token with the state of the one before."""
    way = FAMILIES[kind]
    of_encoder = {"decoder_start_token_id": way.start, "forced_eos_token_id": None}
    changes: dict[str, Any] = {} if way.start is None else of_encoder
    folder = save_causal(tmp_path / "model", kind, pad_token_id=1, **changes)
    # One that samples unasked, in generate.
    unasked = {"do_sample": True, "temperature": 5.0, "eos_token_id": 5, "pad_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps({**unasked, **changes}))
    texts = (RIVER[:20], "a", RIVER[9:29], "b", "cd")
    asked = [{"prompt": text, "answer": "-"} for text in texts]
    data = write_lines(tmp_path / "p.jsonl", asked)
    run(folder, data, tmp_path / "out", max_new_tokens=6, max_length=64)
    model, tokenizer = parts_of(folder)
    assert way_of(model, torch.arange(16).view(2, 8)) == way
    for text, row in zip(rows(tmp_path / "out")["generated"], asked, strict=True):
        ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        answer = one_by_one(model, ids, "generate" if kind != "RecurrentGemma" else "", way.start is not None)
        assert text == tokenizer.decode([token for token in answer if token not in (2, 5)])


def one_by_one(model: Any, ids: Any, how: str, is_encoded: bool) -> list[int]:
    """The six tokens that follow, from the library; or token by token, computing all again."""
    if how == "generate":
        found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        return list(found[0, 1 if is_encoded else ids.shape[1] :].tolist())
    found = ids
    with torch.inference_mode():
        for _ in range(6):
            token = model(found, use_cache=False).logits[:, -1:].argmax(2)
            found = torch.cat([found, token], 1)
            if token.item() == 5:
                break
    return list(found[0, ids.shape[1] :].tolist())


def test_a_model_with_an_encoder_predicts_no_other_texts(tmp_path: Path) -> None:
    folder = save_causal(tmp_path / "model", "T5", pad_token_id=1)
    with pytest.raises(UsageError, match=r"has an encoder: expected rows with prompt and answer, .* docu"):
        LanguageModeling(model=folder, data=[{"text": "a"}])
    task = LanguageModeling(model=folder, data=[{"prompt": "a", "answer": "b"}], max_length=64)
    with pytest.raises(UsageError, match="no decoder_start_token_id, which begins its answers"):
        task.build_model(torch.device("cpu"))


# -- drawn answers -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2(made: dict[str, Path]) -> Path:
    return made["gpt2"]


def drawn_from(logits: list[float], count: int, temperature: float, top_p: float) -> Counter[int]:
    numbers = torch.randint(MOST_DRAWN, (count,), generator=torch.Generator().manual_seed(1))
    tokens = drawn(torch.tensor([logits]).expand(count, -1), numbers, temperature, top_p)
    return Counter(tokens.tolist())


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    shares = [0.05, 0.5, 0.25, 0.2]
    logits = torch.tensor(shares).log()
    counts = drawn_from(logits.tolist(), 20_000, 1.0, 1.0)
    assert all(abs(counts[token] / 20_000 - share) < 0.02 for token, share in enumerate(shares))
    # Of half the logits, a temperature of 0.5 has the same shares.
    assert drawn_from((logits / 2).tolist(), 20_000, 0.5, 1.0) == counts
    kept = drawn_from(logits.tolist(), 20_000, 1.0, 0.75)
    assert {*kept} == {1, 2} and abs(kept[1] / 20_000 - 2 / 3) < 0.02
    assert {*drawn_from(logits.tolist(), 100, 1.0, 0.76)} == {1, 2, 3}
    assert {*drawn_from(logits.tolist(), 100, 1e-3, 1.0)} == {*drawn_from(logits.tolist(), 9, 1, 0.1)} == {1}
    # A NaN is told of elsewhere, and must not end a GPU's context.
    assert max(drawn_from([float("nan"), 1.0, float("inf")], 9, 1.0, 0.9)) < 3


def test_an_answer_follows_from_the_row_and_the_seed(gpt2: Path, tmp_path: Path) -> None:
    """Among others, in another order: with the id goes what draws."""
    table = [{"id": f"row {place}", **row} for place, row in enumerate(prompt_rows(9))]
    found = []
    for place, (data, seed) in enumerate(((table, 0), (table[::-1], 0), (table, 1))):
        drawing = {"temperature": 1.0, "answers_per_prompt": 2, "answers_seed": seed}
        run(gpt2, data, tmp_path / str(place), max_new_tokens=8, **drawing)
        said = rows(tmp_path / str(place))
        found.append(dict(zip(said["id"], said["generated"], strict=True)))
    assert found[0] == found[1] != found[2]
    assert all(len({*json.loads(pair)}) == 2 for pair in found[0].values())


def test_several_answers_are_counted_each(gpt2: Path, tmp_path: Path) -> None:
    _, tokenizer = parts_of(gpt2)
    model = following(tokenizer, "ab")
    # Behind an "a" there are "b" and "c", equally likely.
    model.table.data.mul_(1e4)
    b, c = (tokenizer.convert_tokens_to_ids(letter) for letter in "bc")
    model.table.data[tokenizer.convert_tokens_to_ids("a"), c] = 1e4
    model.table.data[c, tokenizer.eos_token_id] = 1e4
    assert model.table[tokenizer.convert_tokens_to_ids("a"), b] == 1e4
    data = [{"id": str(place), "prompt": "xa", "answer": "b"} for place in range(40)]
    given = {"tokenizer": gpt2, "max_length": 64, "temperature": 1.0, "answers_per_prompt": 4}
    result = run(model, data, tmp_path / "out", max_new_tokens=3, **given)
    table = rows(tmp_path / "out")
    right = [json.loads(texts).count("b") for texts in table["generated"]]
    assert table["exact_match"] == [count / 4 for count in right] and len({*right}) == 5
    assert result.metrics["exact_match"] == sum(right) / 160
    assert result.metrics["any_match"] == sum(count > 0 for count in right) / 40 > 0.8
    assert result.metrics["at_token_limit"] == 0
    drawn_as = "temperature 1.0, top p 1.0, answers per prompt 4, answers seed 0"
    assert result.description["tokens"].endswith(drawn_as)


def test_the_result_says_how_answers_are_read_in_one_line(gpt2: Path) -> None:
    task = LanguageModeling(model=gpt2, data=prompt_rows(), stop=["e", "\n\n"], ignore=["none"])
    said = "max length 64, max new tokens 32, stop at newline no, stop e,\\n\\n, ignore none"
    assert task.description()["tokens"] == said


# -- where answers end, and what is in them ------------------------------------------------------------

SAID = "bq</>,7 k\n9"
READ: list[tuple[dict[str, Any], str, str, dict[str, int]]] = [
    ({}, SAID, SAID, {}),
    ({"stop": ["\n9"]}, "bq</>,7 k", "bq</>,7 k", {}),
    ({"stop": [" k", "7"]}, "bq</>,", "bq</>,", {}),
    ({"stop": ["b"]}, "", "", {"empty_answers": 1}),
    ({"stop": ["zz"], "max_new_tokens": 4}, "bq</", "bq</", {"at_token_limit": 1}),
    ({"stop": ["</"], "max_new_tokens": 4}, "bq", "bq", {}),
    ({"think_end": "</>"}, ",7 k\n9", ",7 k\n9", {}),
    ({"think_end": "</>", "stop": ["q"]}, ",7 k\n9", ",7 k\n9", {}),
    ({"think_end": "</>", "stop": ["k"]}, ",7 ", ",7 ", {}),
    ({"think_end": "</>,"}, "7 k\n9", "7 k\n9", {}),
    ({"think_end": "</>", "stop_at_newline": True}, ",7 k", ",7 k", {}),
    ({"think_end": "END"}, "", SAID, {"unfinished_thinking": 1}),
    ({"extract": r"\d"}, "9", SAID, {}),
    ({"extract": r"([a-z])</|(\d) k"}, "", SAID, {"not_extracted": 1}),
    ({"extract": r"(\d) k"}, "7", SAID, {}),
    ({"extract": "w", "think_end": "</>"}, "", ",7 k\n9", {"not_extracted": 1}),
]


@pytest.mark.parametrize(("options", "answer", "generated", "flags"), READ)
def test_stops_thinking_and_extraction(
    gpt2: Path, tmp_path: Path, options: Any, answer: str, generated: str, flags: dict[str, int]
) -> None:
    _, tokenizer = parts_of(gpt2)
    model = following(tokenizer, f"a{SAID}")
    data = [{"prompt": "a", "answer": answer}]
    given = {"tokenizer": gpt2, "max_length": 64, "ignore": ["none"], **options}
    result = run(model, data, tmp_path / "out", **given)
    assert rows(tmp_path / "out")["generated"] == [generated]
    counts = {
        name: value for name, value in result.metrics.items() if name not in ("exact_match", "cut_contexts")
    }
    assert {name: count for name, count in counts.items() if count} == flags
    wrong = {"not_extracted", "unfinished_thinking"} & {*flags}
    assert result.metrics["exact_match"] == (not wrong)


def test_tags_and_stops_may_be_special_tokens(tmp_path: Path) -> None:
    """Which no text has: they are known by their numbers."""
    folder = save_causal(tmp_path / "model")
    _, tokenizer = parts_of(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>", "<turn>"]})
    tokenizer.save_pretrained(folder)
    tokens = ["a", "b", "<end>", "c", "<turn>", "d"]
    ids = tokenizer.convert_tokens_to_ids(tokens)
    table = torch.zeros(len(tokenizer), len(tokenizer))
    for token, follows in itertools.pairwise(ids):
        table[token, follows] = 1
    model = following(tokenizer, "ab")
    model.table.data = table
    given = {"tokenizer": folder, "max_length": 64, "stop": ["<turn>"], "think_end": "<end>"}
    result = run(model, [{"prompt": "a", "answer": "c"}], tmp_path / "out", max_new_tokens=5, **given)
    assert rows(tmp_path / "out")["generated"] == ["c"]
    assert result.metrics["exact_match"] == 1 and result.metrics["at_token_limit"] == 0


def test_a_row_is_computed_no_further_than_its_stop(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tokenizer = parts_of(gpt2)
    calls: list[int] = []
    plain = generation._Texts.logits

    def logits(texts: Any) -> Any:
        calls.append(1)
        return plain(texts)

    monkeypatch.setattr(generation._Texts, "logits", logits)
    model = following(tokenizer, f"a{SAID}")
    for stop, count in (("q<", 3), (" k\n", 10)):
        task = LanguageModeling(
            model=model, data=[{"prompt": "a", "answer": "b"}], tokenizer=gpt2, max_length=64, stop=[stop]
        )
        made = task.build_model(torch.device("cpu"))
        calls.clear()
        task.forward(made, task.collate(task.dataset().__getitems__([0])))
        assert len(calls) == count
