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
from torch import nn

from tests.vehicles import questions

NAMES = ("negative", "neutral", "positive")
_WORDS = [
    *("the", "a", "film", "is", "good", "bad", "great", "dull", "and", "but", "very", "not", "never"),
    *("funny", "sad", "long", "short", "plot", "Zürich", "東京"),
]


def classifier(names: Sequence[str] = NAMES, **changes: Any) -> nn.Module:
    """A BERT of two narrow layers, with random weights of a fixed seed."""
    labels = {"id2label": dict(enumerate(names))} if "num_labels" not in changes else {}
    model: nn.Module = questions.tiny_bert("BertForSequenceClassification", **labels, **changes)
    return model.eval()


def save_classifier(folder: Path, names: Sequence[str] = NAMES, **changes: Any) -> Path:
    """Save it with MiniLM's tokenizer."""
    return questions.save(classifier(names, **changes), folder)


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
