"""Texts with labels in tables, and small classifiers of texts, built with a fixed seed."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from torch import nn

from tests import questions

NAMES = ("negative", "neutral", "positive")
_WORDS = [
    *("the", "a", "film", "is", "good", "bad", "great", "dull", "and", "but", "very", "not", "never"),
    *("funny", "sad", "long", "short", "plot", "Zürich", "東京"),
]


def classifier(names: Sequence[str] = NAMES, **changes: Any) -> nn.Module:
    """A BERT of two narrow layers, with random weights of a fixed seed."""
    library = questions.transformers()
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    labels = {"id2label": dict(enumerate(names))} if "num_labels" not in changes else {}
    config = library.BertConfig(**{**small, "initializer_range": 0.5, **labels, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        model: nn.Module = library.BertForSequenceClassification(config)
    return model.eval()


def save_classifier(folder: Path, names: Sequence[str] = NAMES, **changes: Any) -> Path:
    """Save it with MiniLM's tokenizer."""
    model: Any = classifier(names, **changes)
    model.save_pretrained(folder)
    questions.transformers().AutoTokenizer.from_pretrained(questions.minilm_folder()).save_pretrained(folder)
    return folder


def rows(count: int, *, pairs: bool = False, seed: int = 0) -> list[dict[str, Any]]:
    """Texts of 1 to 40 words with a class each."""
    draw = random.Random(seed)

    def text() -> str:
        return " ".join(draw.choices(_WORDS, k=draw.randint(1, 40)))

    texts = ("sentence1", "sentence2") if pairs else ("sentence",)
    return [{**{name: text() for name in texts}, "label": draw.choice(NAMES)} for _ in range(count)]


def write(path: Path, table: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows in the format of the suffix."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(table)), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, table)), "utf-8")
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(table[0]), delimiter={".csv": ",", ".tsv": "\t"}[path.suffix])
            writer.writeheader()
            writer.writerows(table)
    return path
