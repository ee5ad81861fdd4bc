"""The task lm-eval in one process: figures and samples beside the harness itself, and what is refused."""

from __future__ import annotations

import json
import math
import types
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

from dualeval.cli import dualeval as command
from dualeval.comparison.compared import compare
from dualeval.errors import UsageError
from dualeval.result import Result
from dualeval.tasks import LmEval
from dualeval.tasks.lm_eval import template_of
from dualeval.tasks.lm_eval.library import Loaded
from dualeval.tasks.options.lm_eval import RequestOptions, ScoredOptions
from tests.engine.test_evaluator import evaluate, rows
from tests.tasks.conftest import check_doors, message_of
from tests.vehicles import questions
from tests.vehicles.causal_models import save_causal, write_lines
from tests.vehicles.harness_tasks import (
    ALL,
    PLAIN,
    SHIPPED,
    as_ours,
    harness_figures,
    save_model,
    write_shipped,
    write_tasks,
)
from tests.vehicles.harness_tasks import rows as harness_rows

# The harness takes each process seconds to import.
pytestmark = pytest.mark.xdist_group("harness")

Made = dict[str, Path]
DRAWS = 100


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    import lm_eval.models.huggingface  # its import sets an environment variable

    home = tmp_path_factory.mktemp(lm_eval.__name__)
    return {
        "gpt2": save_model(home / "gpt2"),
        "llama": save_model(home / "llama", "Llama", begins=True),
        "tasks": write_tasks(home / "tasks"),
    }


def task_of(made: Made, model: str = "gpt2", tasks: Any = PLAIN, **options: Any) -> LmEval:
    given = {"include_path": made["tasks"], "bootstrap_iters": DRAWS, **options}
    return LmEval(model=made[model], tasks=tasks, **given)


def run(
    made: Made, model: str = "gpt2", out: Path | None = None, tasks: Any = PLAIN, **options: Any
) -> Result:
    return evaluate(task_of(made, model, tasks, **options), out, batch_size=4)


def number(value: Any) -> float:
    return float(value)


def ours_of(result: Result) -> set[str]:
    """The figures, without what is counted besides."""
    return {key for key in result.metrics if "/" in key and "/not_extracted" not in key}


CHAT: dict[str, Any] = {"apply_chat_template": True, "system": "Be short."}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gpt2", {}),
        ("llama", {**CHAT, "num_fewshot": 3, "limit": 5}),
        pytest.param("llama", {}, marks=pytest.mark.long),
        pytest.param("gpt2", {**CHAT, "fewshot_as_multiturn": False}, marks=pytest.mark.long),
        pytest.param("gpt2", {"num_fewshot": 2, "system": "Words:"}, marks=pytest.mark.long),
        pytest.param("llama", {"max_length": 90}, marks=pytest.mark.long),
    ],
)
def test_figures_and_files_are_those_of_the_harness(
    made: Made, tmp_path: Path, model: str, options: dict[str, Any]
) -> None:
    """All kinds of requests, filters, a group, examples, a function; its own model class beside ours."""
    tasks = [name for name in ALL if name not in ("choices", "mutual")]
    result = run(made, model, tmp_path, tasks, trust_tasks=True, **options)
    of_prompts = {
        ("system_instruction" if name == "system" else name): value for name, value in options.items()
    }
    length = of_prompts.pop("max_length", None)
    arguments = "" if length is None else f",max_length={length}"
    wanted = harness_figures(
        made[model], tasks, made["tasks"], arguments=arguments, bootstrap_iters=DRAWS, **of_prompts
    )
    figures = as_ours(wanted)
    assert ours_of(result) == {*figures}
    for key, value in figures.items():
        assert math.isclose(number(result.metrics[key]), value, rel_tol=1e-5, abs_tol=1e-9), key
    assert len(figures) > 20 and any("stderr" in key for key in figures)
    # What reads its files finds the same documents, prompts and answers.
    written = json.loads((tmp_path / "results_dualeval.json").read_text())
    assert written["results"].keys() == wanted["results"].keys()
    assert written["config"]["limit"] == options.get("limit") and written["versions"] == wanted["versions"]
    for name, samples in wanted["samples"].items():
        lines = (tmp_path / f"samples_{name}_dualeval.jsonl").read_text().splitlines()
        assert len(lines) == len(samples)
        for line, sample in zip(map(json.loads, lines), samples, strict=True):
            for key in ("doc_id", "doc_hash", "prompt_hash", "target_hash", "filter"):
                assert line[key] == sample[key], (name, key)
            if name in ("numbers", "own"):
                assert line["resps"] == [[str(each) for each in one] for one in sample["resps"]]


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, CHAT], ids=["plain", "chat"])
def test_shipped_tasks_have_the_figures_of_the_harness(
    made: Made, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Files of the library that name its own functions are run without --trust-tasks."""
    folder = write_shipped(tmp_path / "tasks")
    tasks = [*(name for name in SHIPPED if "mmlu" not in name), "my_mmlu"]
    result = run({**made, "tasks": folder}, "llama", None, tasks, **options)
    of_prompts = {
        ("system_instruction" if name == "system" else name): value for name, value in options.items()
    }
    figures = as_ours(harness_figures(made["llama"], tasks, folder, bootstrap_iters=DRAWS, **of_prompts))
    assert ours_of(result) == {*figures} and len(figures) > 20
    for key, value in figures.items():
        assert math.isclose(number(result.metrics[key]), value, rel_tol=1e-5, abs_tol=1e-9), key


# Of four families, shortened; Gemma's refuses a system message.
TEMPLATES = {
    "llama": "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}<|end|>\n\n"
    "{{ m['content'] | trim }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant"
    "<|end|>\n\n{% endif %}",
    "chatml": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "mistral": "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %} "
    "{{ m['content'] }}</s>{% else %}[INST] {{ m['content'] }} [/INST]{% endif %}{% endfor %}",
    "gemma": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('none') }}"
    "{% endif %}{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] | trim }}</turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}",
}


@pytest.mark.parametrize("family", TEMPLATES)
def test_chats_are_written_as_the_harness_has_them_written(made: Made, family: str) -> None:
    from lm_eval.models.huggingface import HFLM

    tokenizer = questions.transformers().AutoTokenizer.from_pretrained(made["llama"])
    tokenizer.chat_template = TEMPLATES[family]
    theirs = types.SimpleNamespace(tokenizer=tokenizer, chat_template_args={})
    turns = ("system", "Be short. "), ("user", " One? "), ("assistant", "Two."), ("user", "Three?")
    messages = [{"role": role, "content": text} for role, text in turns]
    warnings: list[str] = []
    ours = template_of(tokenizer, made["llama"], warnings.append)
    for ends in (True, False):
        said = [*messages, *([] if ends else [{"role": "assistant", "content": "Four"}])]
        wanted = HFLM.apply_chat_template(theirs, said, add_generation_prompt=ends)
        assert ours(said, add_generation_prompt=ends) == wanted
    assert ["takes no system message" in each for each in warnings] == [True] * 2 * (family == "gemma")


def test_a_document_is_a_sample_whose_values_are_in_its_row(made: Made, tmp_path: Path) -> None:
    result = run(made, out=tmp_path / "out")
    table = rows(tmp_path / "out")
    assert len(table["id"]) == 65 and table["id"][14] == "mutual/1" and table["task"][14] == "mutual"
    acc = [value for value, task in zip(table["acc"], table["task"], strict=True) if task == "choices"]
    assert result.metrics["choices/acc"] == sum(acc) / 13
    low, high = result.intervals["both/acc"]
    assert low < number(result.metrics["both/acc"]) < high
    assert result.scores["both/acc"] == {"column": "acc", "where": "task", "where_is": ("choices", "mutual")}
    # 156 requests: with a batch of one document their values are the same to rounding.
    alone = evaluate(task_of(made), None, batch_size=1)
    for key, value in result.metrics.items():
        assert math.isclose(number(alone.metrics[key]), number(value), rel_tol=1e-6), key
    task = task_of(made)

    def shown_at(place: int) -> Any:
        return task.show({name: values[place] for name, values in table.items()})

    shown = shown_at(0)
    assert shown["prompt"].count("The r") >= 1 and "(-" in shown["continuation 2"]
    # The right choice as a text, and a right answer; of a text to score nothing but that.
    places = {task: table["task"].index(task) for task in ("choices", "words", "pages", "numbers")}
    expected = [shown_at(place + 1).get("expected") for place in places.values()]
    assert expected == ["a", None, None, harness_rows(2)[1]["word"]]
    answer = shown_at(places["numbers"] + 1)
    assert [*answer] == ["prompt", "answer", "expected"]
    assert answer["answer"] == table["generated"][places["numbers"] + 1]


def test_samples_are_listed_by_the_metric_that_is_asked_for(made: Made, tmp_path: Path) -> None:
    run(made, out=tmp_path / "out", tasks=["words", "numbers", "pages"], limit=3)

    def shown(*words: str) -> list[str]:
        done = CliRunner().invoke(command, ["show", str(tmp_path / "out"), "--worst", "2", *words])
        return (done.output if done.exit_code == 0 else message_of(done)).splitlines()

    # Without it by the first one.
    assert shown()[0] == "highest perplexity of words: 2 of 3"
    lines = shown("--metric", "pages/word_perplexity")
    assert lines[0] == "highest word_perplexity / word_perplexity_over of pages: 2 of 3"
    assert all(line.startswith("pages/") for line in lines[2:4])
    assert shown("--metric", "numbers/exact_match,loose")[0] == "lowest exact_match,loose of numbers: 2 of 3"
    [said] = shown("--metric", "numbers/exact_match")
    assert "no number of each sample for the metric 'numbers/exact_match'." in said
    assert "numbers/exact_match,strict, numbers/exact_match,loose" in said


def test_names_of_metrics_and_filters_may_have_a_slash(made: Made, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path / "tasks")
    changed(folder, "numbers", "name: strict", "name: a/b")
    changed(folder, "own", "metric: length", "metric: per/length")
    code = folder / "own_code.py"
    code.write_text(code.read_text().replace('"length"', '"per/length"'))
    task = task_of({**made, "tasks": folder}, tasks=["numbers", "own"], trust_tasks=True, limit=3)
    result = evaluate(task, tmp_path / "out", batch_size=4)
    assert {"numbers/exact_match,a/b", "own/per/length"} <= result.scores.keys() & result.metrics.keys()
    assert len(rows(tmp_path / "out")["per/length"]) == 6


def test_two_models_are_compared_by_task_and_group(made: Made, tmp_path: Path) -> None:
    for model in ("gpt2", "llama"):
        run(made, model, tmp_path / model, ["both", "pages", "numbers"])
    # A run of one task alone has its figure defined alike.
    run(made, "llama", tmp_path / "alone", ["pages"])
    with pytest.raises(UsageError, match=r"only in A.*over the same samples \(--tasks, --limit"):
        compare(tmp_path / "gpt2", tmp_path / "alone")
    found = compare(tmp_path / "gpt2", tmp_path / "llama", by=["topic"])
    assert {"choices/acc", "both/acc", "pages/bits_per_byte"} <= found.metrics.keys()
    assert {group.label for group in found.slices["topic"]} == {"north", "south"}
    wrong = found.metrics["numbers/exact_match,strict"]
    assert wrong.a == wrong.b == 0 and wrong.flips is not None and wrong.interval[0] < 0 < wrong.interval[1]


def test_both_doors_have_the_same_job(made: Made) -> None:
    typed = {"model": made["gpt2"], "tasks": ("words",), "include_path": str(made["tasks"]), "limit": 3}
    result = check_doors("lm-eval", "LmEval", {**typed, "bootstrap_iters": 0})
    assert result.samples["evaluated"] == 3 and result.job["limit"] == 3
    assert any("first 3 documents of each task" in sentence for sentence in result.warnings)


def test_what_decides_a_figure_is_in_the_identity(made: Made, tmp_path: Path) -> None:
    def identity(folder: Path, **options: Any) -> tuple[str, str]:
        task = LmEval(model=made["gpt2"], tasks=["own"], include_path=folder, trust_tasks=True, **options)
        return json.dumps(task.fingerprint(), sort_keys=True), task.dataset().fingerprint(13)

    first = identity(write_tasks(tmp_path / "a"))
    assert identity(write_tasks(tmp_path / "b")) == first, "where files lie is no part of it"
    code = tmp_path / "b/own_code.py"
    code.write_text(code.read_text().replace("len(text)", "len(text) + 1"))
    assert identity(tmp_path / "b")[0] != first[0], "a function that the task's own calls"
    assert identity(tmp_path / "a", num_fewshot=1)[1] != first[1]
    data = tmp_path / "a/rows.jsonl"
    data.write_text(data.read_text().replace("river", "brook", 1))
    assert identity(tmp_path / "a")[1] != first[1]


def changed(folder: Path, name: str, before: str, after: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(path.read_text().replace(before, after))
    return folder


@pytest.mark.parametrize(
    ("tasks", "before", "after", "said"),
    [
        ("own", "", "", r"name functions of their own folder, which would be run: own_code\.results"),
        (
            "numbers",
            "output_type",
            "unsafe_code: true\noutput_type",
            "task numbers runs the code that the mod",
        ),
        ("numbers", "metric: exact_match", "metric: rougeL", "metric rougeL is not the harness's own"),
        ("words", "metric: acc", "metric: acc\n    hf_evaluate: true", "metric acc is not the harness's own"),
        (
            "words",
            "dataset_path: json",
            "dataset_path: nobody/nothing",
            "its data nobody/nothing are not in the",
        ),
        (
            "numbers",
            "do_sample: false",
            "do_sample: true",
            "task numbers draws .* give --temperature 0.7, for",
        ),
        ("numbers", "do_sample: false", "num_beams: 3", "generates with num_beams 3, which is not done"),
        ("numbers", "max_gen_toks: 12", "max_gen_toks: 400", "asks for 400 new tokens .max_gen_toks"),
        ("words", "question", "quest", "lm_eval cannot load words: UndefinedError: 'quest' is undefined"),
        pytest.param("both", "mutual]", "mutuel]", "a group names 'mutuel'", marks=pytest.mark.long),
        pytest.param("wordz", "", "", "--tasks wordz: there is no such task", marks=pytest.mark.long),
        ("words.yaml", "", "", "--tasks words.yaml: give the name in it"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_it_runs(
    made: Made, tmp_path: Path, tasks: str, before: str, after: str, said: str
) -> None:
    folder = write_tasks(tmp_path / "tasks")
    if before:
        changed(folder, tasks, before, after)
    with pytest.raises(UsageError, match=said):
        LmEval(model=made["gpt2"], tasks=tasks, include_path=folder)


def test_a_model_with_an_encoder_is_refused(made: Made, tmp_path: Path) -> None:
    folder = save_causal(tmp_path / "t5", "T5", pad_token_id=1)
    with pytest.raises(UsageError, match="t5 has an encoder: expected a causal language model"):
        LmEval(model=folder, tasks="words", include_path=made["tasks"])


def test_an_own_yaml_that_includes_own_code_is_refused(made: Made, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path / "tasks")
    (folder / "shared").mkdir()
    (folder / "own.yaml").rename(folder / "shared/own_base.yaml")
    (folder / "mine.yaml").write_text("include: shared/own_base.yaml\ntask: mine\n")
    with pytest.raises(UsageError, match=r"own_code\.results .*own_base\.yaml"):
        LmEval(model=made["gpt2"], tasks="mine", include_path=folder)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            '    raise KeyError("gold")',
            r"task own: .*own_code\.results fails on document 0: KeyError: 'gold'",
        ),
        (
            '    SEEN.append(1)\n    return {"length": len(SEEN)}',
            r"task own: .*own_code\.results gives other values",
        ),
    ],
)
def test_code_of_a_task_that_fails_is_named(made: Made, tmp_path: Path, code: str, said: str) -> None:
    folder = write_tasks(tmp_path / "tasks")
    (folder / "own_code.py").write_text(f"SEEN = []\ndef results(doc, results):\n{code}\n")
    with pytest.raises(UsageError, match=said):
        run({**made, "tasks": folder}, tasks=["own"], trust_tasks=True)


def test_a_metric_that_is_not_for_texts_is_refused(made: Made, tmp_path: Path) -> None:
    """The harness gives 1 for every text."""
    folder = changed(write_tasks(tmp_path / "tasks"), "numbers", "metric: exact_match", "metric: acc")
    changed(folder, "numbers", "    ignore_case: true\n", "")
    with pytest.raises(UsageError, match=r"task numbers: the metric acc,strict gives \[.*expected a number"):
        run({**made, "tasks": folder}, tasks=["numbers"], limit=1)


def test_options_without_use_are_refused(made: Made, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--no-fewshot-as-multiturn is of a chat"):
        task_of(made, fewshot_as_multiturn=False)
    with pytest.raises(UsageError, match="--max-length 1000 is more than the 320 positions"):
        task_of(made, max_length=1000)
    library = questions.transformers()
    tokenizer = library.AutoTokenizer.from_pretrained(made["gpt2"])
    tokenizer.chat_template = None
    model = library.AutoModelForCausalLM.from_pretrained(made["gpt2"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="has no chat template"):
        LmEval(
            model=model,
            tokenizer=tmp_path,
            tasks="words",
            include_path=made["tasks"],
            apply_chat_template=True,
        )


def test_a_document_that_cannot_be_answered_is_left_out_where_asked(made: Made, tmp_path: Path) -> None:
    """Its figures are those of the others, as the harness has them without it."""
    folder = write_tasks(tmp_path / "tasks")
    lines = (folder / "rows.jsonl").read_text().splitlines()
    long = json.dumps({**json.loads(lines[2]), "word": "the " * 400})
    (folder / "rows.jsonl").write_text("\n".join([*lines[:2], long, *lines[3:], ""]))
    there = {**made, "tasks": folder}
    with pytest.raises(
        UsageError, match=r"words/2: request 0 is \d+ tokens after its context, expected 320 at most"
    ):
        run(there, tasks=["words"])
    result = evaluate(task_of(there, tasks=["words"]), tmp_path / "out", batch_size=4, on_error="skip")
    assert [each["id"] for each in result.failed] == ["words/2"]
    (folder / "rows.jsonl").write_text("\n".join([*lines[:2], *lines[3:], ""]))
    without = run(there, tasks=["words"])
    assert math.isclose(
        *(number(each.metrics["words/perplexity"]) for each in (result, without)), rel_tol=1e-6
    )
    assert len((tmp_path / "out/samples_words_dualeval.jsonl").read_text().splitlines()) == 12


def test_a_task_of_which_no_document_is_drawn_has_an_empty_file(made: Made, tmp_path: Path) -> None:
    evaluate(task_of(made, tasks=["words", "pages"]), tmp_path, batch_size=4, sample=1)
    files = [(tmp_path / f"samples_{name}_dualeval.jsonl").read_text() for name in ("words", "pages")]
    assert sorted(len(text.splitlines()) for text in files) == [0, 1]


def test_a_text_without_tokens_is_named(made: Made, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path / "tasks")
    changed(
        changed(folder, "words", '" {{word}}"', '"{{word}}"'),
        "words",
        "output_type",
        'target_delimiter: ""\noutput_type',
    )
    lines = (folder / "rows.jsonl").read_text().splitlines()
    for word, said in (("", r"the text to score \(a choice, a target\) is empty"),):
        row = json.dumps({**json.loads(lines[1]), "word": word})
        (folder / "rows.jsonl").write_text("\n".join([lines[0], row, *lines[2:], ""]))
        with pytest.raises(UsageError, match=f"words/1: request 0: {said}"):
            run({**made, "tasks": folder}, tasks=["words"])


def test_a_template_is_compiled_once(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness compiles it for each document and example: 4 s of 1,200 documents with 5 examples."""
    from lm_eval.utils import env

    compiled = mock.Mock(wraps=env.compile)
    monkeypatch.setattr(env, "compile", compiled)
    Loaded(RequestOptions(tasks=("numbers",), include_path=made["tasks"]))
    texts = [call.args[0] for call in compiled.call_args_list]
    assert texts and len(texts) == len({*texts})


def test_examples_from_the_evaluated_documents_are_a_warning(made: Made, tmp_path: Path) -> None:
    folder = changed(
        write_tasks(tmp_path / "tasks"), "numbers", "training_split: train\nfewshot_split: train\n", ""
    )
    there = {**made, "tasks": folder}
    said = "the examples of numbers are drawn from the documents that are evaluated"
    result = run(there, tasks=["numbers", "choices"], limit=2)
    assert any(said in each for each in result.warnings)
    # Where the split is named the document itself is left out.
    changed(folder, "numbers", "test_split: test\n", "test_split: test\nfewshot_split: test\n")
    assert not Loaded(RequestOptions(tasks=("numbers",), include_path=folder, limit=2)).showing_answers()


# -- answers from elsewhere ------------------------------------------------------------------------------


def answers_from(out: Path, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What another program would have answered: what the rows of a run have."""
    table = rows(out)
    places: dict[tuple[str, int], int] = {}
    answers = []
    for request in requests:
        row = table["id"].index(f"{request['task']}/{request['document']}")
        key = (request["task"], request["document"])
        if request["type"] == "generate_until":
            # Programs that stop late: what follows the task's stop is cut.
            answer: Any = table["generated"][row] + request["generation"]["until"][0] + "more"
        else:
            place = places[key] = places.get(key, -1) + 1
            value = table["loglikelihoods"][row][place]
            is_rolling = request["type"] == "loglikelihood_rolling"
            answer = value if is_rolling else [value, table["greedy"][row][place]]
        answers.append({**request, "answer": answer})
    return answers


def test_answers_from_a_file_give_the_runs_own_figures(made: Made, tmp_path: Path) -> None:
    words = ["--tasks", ",".join(PLAIN), "--include-path", str(made["tasks"]), "--limit", "5"]
    requests_file, file, out = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl", tmp_path / "out"
    done = CliRunner().invoke(command, ["requests", *words, "--out", str(requests_file)])
    assert done.output == f"wrote 60 requests to {requests_file}\n"
    requests = [json.loads(line) for line in requests_file.read_text().splitlines()]
    result = run(made, out=out, limit=5)
    answers = answers_from(out, requests)
    write_lines(file, answers[::-1])
    options = ScoredOptions(
        tasks=PLAIN, include_path=made["tasks"], limit=5, bootstrap_iters=DRAWS, answers=file
    )
    scored = evaluate(options.make(), tmp_path / "scored", batch_size=7)
    of_model = ("cut_contexts", "at_token_limit", "nan_logits")
    figures = {name: value for name, value in result.metrics.items() if name not in of_model}
    assert (scored.metrics, scored.intervals) == (figures, result.intervals)
    assert scored.fingerprint != result.fingerprint and scored.samples_digest == result.samples_digest
    found = compare(out, tmp_path / "scored")
    assert found.metrics["choices/acc"].difference == 0
    written = [
        (folder / "samples_numbers_dualeval.jsonl").read_text() for folder in (out, tmp_path / "scored")
    ]
    assert written[0] == written[1] and not any("hash" in each for each in scored.warnings)
    for lines, said in (
        (answers[:-2], "the answer to numbers/3 0, numbers/4 0 is missing"),
        ([*answers, answers[3]], "the answer to choices/1 0 is there twice"),
        ([*answers, {**answers[0], "document": 5}], "the answer to choices/5 0 belongs to no request"),
        (
            [{**answers[0], "answer": 1.0}],
            r"line 1: the answer is 1\.0, expected \[a log-likelihood \(0 or less; .*\), whether",
        ),
        (
            [{**answers[0], "answer": [3.5, True]}],
            r"line 1: the answer is \[3\.5, true\], expected \[a log-lik",
        ),
        ([{**answers[0], "document": "0"}], 'line 1: document is "0", expected a whole number'),
        ([{**answers[1], "index": True}], "line 1: index is true, expected a whole number"),
        ([{**answers[-1], "answer": 4}], "line 1: the answer is 4, expected a text"),
        ([{"task": "choices"}], r"line 1: expected a JSON object with task, document, index and answer"),
    ):
        write_lines(file, lines)
        with pytest.raises(UsageError, match=said):
            options.make()
    write_lines(file, answers)
    other = replace(options, num_fewshot=3)
    with pytest.raises(UsageError, match=r"choices/0 0, .* more is to another prompt .*same .*--num-fewshot"):
        other.make()
    # Of answers without hashes nobody knows; and a file of Windows begins with a mark.
    write_lines(file, [{name: each[name] for name in each if name != "hash"} for each in answers])
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert any("60 answers without a hash" in each for each in other.make().data_warnings())


def test_files_of_answers_belong_to_a_task(made: Made, tmp_path: Path) -> None:
    for words, said in (
        (["--answers", "a.jsonl"], "--answers belongs to --task lm-eval"),
        (["--task", "lm-eval", "--data", "a.json"], "--data belongs to --task question-answering"),
        (["--task", "lm-eval", "--answers", "a.jsonl"], "--tasks"),
    ):
        done = CliRunner().invoke(command, ["score", *words, "--out", str(tmp_path / "out")])
        assert said in message_of(done)
    with pytest.raises(UsageError, match="give --tokenizer DIR"):
        ScoredOptions(
            tasks=("words",), include_path=made["tasks"], apply_chat_template=True, answers=Path("none")
        ).make()
