"""The options of text-classification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dualeval.options.fields import option
from dualeval.tasks.options.base import DATA, TEXTS, TextOptions, same, start_of_texts


@dataclass(frozen=True, kw_only=True)
class TextClassificationOptions(TextOptions):
    """One class or one number a text or pair of texts, from a table."""

    start: ClassVar[Mapping[str, str]] = start_of_texts("AutoModelForSequenceClassification", "dev.csv")

    @staticmethod
    def known_metrics() -> Mapping[str, str]:
        """The metrics that can be asked for by name; it imports torch."""
        from dualeval.metrics.classification import LINES

        return {
            **LINES,
            "binary_f1": "F1 of class 1, if there are two classes",
            "pearson": "Pearson's correlation of prediction and label (regression)",
            "spearman": "Spearman's rank correlation of prediction and label (regression)",
            "mse": "mean squared error (regression)",
            "rmse": "its square root (regression)",
            "mae": "mean absolute error (regression)",
            "r2": "coefficient of determination (regression)",
            "text_work": "computed tokens, and texts that were cut; always included",
        }

    data: Path = option(
        help="Texts and labels: .csv, .tsv, .jsonl, .parquet or tar shards.",
        group=DATA,
        metavar="FILE",
        takes_urls=True,
    )
    text: str | None = option(
        None, "Column of the texts.", group=DATA, metavar="COLUMN", shown="text, sentence, ..."
    )
    text_pair: str | None = option(
        None, "Column of the second text of a pair.", group=DATA, metavar="COLUMN", shown="sentence2, ..."
    )
    label: str | None = option(
        None, "Column of the labels.", group=DATA, metavar="COLUMN", shown="label, ..."
    )
    quoting: str | None = same("quoting")
    class_map: Path | None = same("class_map")
    class_order: str | None = same("class_order")
    max_length: int | None = option(
        None,
        "Maximum tokens of a text or pair; longer ones are cut.",
        group=TEXTS,
        least=1,
        shown="the tokenizer's, at most 512",
    )
    keep: tuple[str, ...] = ()
