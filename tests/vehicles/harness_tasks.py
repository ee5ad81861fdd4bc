"""Small tasks of lm-evaluation-harness of each kind, and its own figures for them."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tests.vehicles import questions
from tests.vehicles.causal_models import save_causal, write_lines
from tests.vehicles.made_tokenizers import RIVER

# The most positions of the models: prompts with examples have to fit.
LENGTH = 320
CHAT = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_DATA = """
dataset_path: json
dataset_name: null
dataset_kwargs:
  data_files:
    test: {folder}/rows.jsonl
    train: {folder}/examples.jsonl
test_split: test
training_split: train
fewshot_split: train
"""
_MEAN = "aggregation: mean\n    higher_is_better: true"
_CHOICES = f"""
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
    {_MEAN}
"""
_TASKS = {
    "choices": f"""{_CHOICES}  - metric: acc_norm
    {_MEAN}
  - metric: mcc
    aggregation: matthews_corrcoef
    higher_is_better: true
num_fewshot: 2
metadata:
  version: 2.0
""",
    "mutual": f"""{_CHOICES}  - metric: acc_mutual_info
    {_MEAN}
""",
    "words": f"""
output_type: loglikelihood
doc_to_text: "{{{{question}}}}"
doc_to_target: " {{{{word}}}}"
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
  - metric: acc
    {_MEAN}
""",
    "pages": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
""",
    "numbers": f"""
output_type: generate_until
num_fewshot: 1
doc_to_text: "Q: {{{{question}}}}\\nA:"
doc_to_target: "{{{{word}}}}"
generation_kwargs:
  until: ["Q:", "\\n\\n"]
  max_gen_toks: 12
  do_sample: false
filter_list:
  - name: strict
    filter:
      - function: regex
        regex_pattern: "([a-z]+)"
      - function: take_first
  - name: loose
    filter:
      - function: regex
        group_select: -1
        regex_pattern: "([a-zA-Z])"
      - function: take_first
metric_list:
  - metric: exact_match
    {_MEAN}
    ignore_case: true
""",
    "own": f"""
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{word}}}}"
process_results: !function own_code.results
generation_kwargs:
  until: []
  max_gen_toks: 6
metric_list:
  - metric: length
    {_MEAN}
""",
}
_CODE = """
def length_of(text):
    return len(text)

def results(doc, results):
    return {"length": float(length_of(results[0]))}
"""
_GROUP = """
group: both
task: [choices, mutual]
aggregate_metric_list:
  - metric: acc
    weight_by_size: true
"""
ALL = (*_TASKS, "both")
# Those without code of their own.
PLAIN = ("both", "words", "pages", "numbers")


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "question": RIVER[: 5 + number * 7 % 50].rstrip(),
            "choices": ["the sea", "a", f"mills {number}, and meadows"],
            "answer": number % 3,
            "word": RIVER.split()[number % 20],
            "page": RIVER[number % 60 :] * (1 + number % 4),
            "topic": ["north", "south"][number % 2],
        }
        for number in range(start, start + count)
    ]


def write_tasks(folder: Path, count: int = 13) -> Path:
    """YAML files of the tasks, with their data."""
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "rows.jsonl", rows(count))
    write_lines(folder / "examples.jsonl", rows(6, 100))
    for name, text in _TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}{_DATA.format(folder=folder)}{text}")
    (folder / "both.yaml").write_text(_GROUP)
    (folder / "own_code.py").write_text(_CODE)
    return folder


def save_model(folder: Path, kind: str = "GPT2", *, begins: bool = False) -> Path:
    """A model that takes these prompts, with a chat template."""
    size = {"n_positions": LENGTH} if kind == "GPT2" else {"max_position_embeddings": LENGTH}
    save_causal(folder, kind, begins=begins, **size)
    tokenizer = questions.transformers().AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def harness_figures(
    model: Path, tasks: Sequence[str], folder: Path | None, *, arguments: str = "", **options: Any
) -> dict[str, Any]:
    """What the harness itself gives with its own model class, one request at a time."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    own = None if folder is None else str(folder)
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        mock.patch.dict(os.environ, DISABLE_MULTIPROC="1"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        manager = TaskManager(include_path=own, include_defaults=folder is None)
        found: dict[str, Any] = lm_eval.simple_evaluate(
            model="hf",
            model_args=f"pretrained={model},dtype=float32,trust_remote_code=False{arguments}",
            tasks=[*tasks],
            task_manager=manager,
            batch_size=1,
            device="cpu",
            **options,
        )
    return found


def as_ours(found: dict[str, Any]) -> dict[str, float]:
    """The harness's figures under our names."""
    ours = {}
    for name, figures in {**found["results"], **found.get("groups", {})}.items():
        for key, value in figures.items():
            metric, comma, kind = key.partition(",")
            if comma and not isinstance(value, str):
                ours[f"{name}/{metric}" + ("" if kind == "none" else f",{kind}")] = float(value)
    return ours


# Shipped tasks by their files, with the splits and a document each.
_SHIPPED: dict[str, tuple[str, tuple[str, ...], Callable[[int], dict[str, Any]]]] = {
    "arc_easy": (
        "arc/arc_easy.yaml",
        ("train", "validation", "test"),
        lambda n: {
            "question": f"What does river {n} reach?",
            "choices": {"text": ["the sea", "a mill", f"town {n}"], "label": ["A", "B", "C"]},
            "answerKey": "ABC"[n % 3],
        },
    ),
    "hellaswag": (
        "hellaswag/hellaswag.yaml",
        ("train", "validation"),
        lambda n: {
            "ctx_a": f"A man of {n} walks.",
            "ctx_b": "then he",
            "activity_label": "Walking",
            "endings": ["runs [title] on.", "sits  down.", f"sings {n}.", "sleeps."],
            "label": str(n % 4),
        },
    ),
    "gsm8k": (
        "gsm8k/gsm8k.yaml",
        ("train", "test"),
        lambda n: {"question": f"{n} and 2?", "answer": f"{n} + 2 = {n + 2}\n#### {n + 2}"},
    ),
    "lambada_openai": (
        "lambada/lambada_openai.yaml",
        ("test",),
        lambda n: {"text": f"{RIVER[: 30 + n]} the sea"},
    ),
    "wikitext": (
        "wikitext/wikitext.yaml",
        ("train", "validation", "test"),
        lambda n: {"page": f" = {n} = \n {RIVER} @-@ {RIVER[: 9 * n]} 's . "},
    ),
    "truthfulqa_mc2": (
        "truthfulqa/truthfulqa_mc2.yaml",
        ("validation",),
        lambda n: {
            "question": f"Is {n} a number?",
            "mc1_targets": {"choices": ["Yes", "No"], "labels": [1, 0]},
            "mc2_targets": {"choices": ["Yes", "It is", f"No {n}"], "labels": [1, 1, 0]},
        },
    ),
    **{
        f"mmlu_{subject}": (
            f"mmlu/default/mmlu_{subject}.yaml",
            ("dev", "test"),
            lambda n: {"question": f" Which is {n}? ", "choices": ["a", "the", f"{n}", "x"], "answer": n % 4},
        )
        for subject in ("anatomy", "astronomy")
    },
}
SHIPPED = tuple(f"my_{name}" for name in _SHIPPED)


def write_shipped(folder: Path, count: int = 4) -> Path:
    """YAML files that include the library's, with made documents in place of those of a hub."""
    import lm_eval

    folder.mkdir()
    for name, (file, splits, document) in _SHIPPED.items():
        for place, split in enumerate(splits):
            rows_of_split = [document(number + 10 * place) for number in range(max(count, 6))]
            write_lines(folder / f"{name}-{split}.jsonl", rows_of_split[: count if split == "test" else None])
        files = ", ".join(f"{split}: {folder}/{name}-{split}.jsonl" for split in splits)
        lines = [
            f"include: {Path(str(lm_eval.__file__)).parent}/tasks/{file}",
            f"task: my_{name}",
            "dataset_path: json\ndataset_name: null",
            f"dataset_kwargs: {{data_files: {{{files}}}}}",
        ]
        (folder / f"my_{name}.yaml").write_text("\n".join(lines) + "\n")
    members = "[my_mmlu_anatomy, my_mmlu_astronomy]"
    means = "aggregate_metric_list: [{metric: acc, weight_by_size: true}]"
    (folder / "my_mmlu.yaml").write_text(f"group: my_mmlu\ntask: {members}\n{means}\n")
    return folder
