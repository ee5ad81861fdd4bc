"""The options of the task text-classification; light to import, for the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dualeval.options.fields import option
from dualeval.tasks.text_options import TextOptions

_DATA = "Data"
_TEXTS = "Texts"


@dataclass(frozen=True, kw_only=True)
class TextClassificationOptions(TextOptions):
    """One class or one number a text or pair of texts, from a table."""

    # What ``dualeval init`` writes for this task.
    start: ClassVar[Mapping[str, str]] = {
        "imports": "from transformers import AutoModelForSequenceClassification",
        "model": 'return AutoModelForSequenceClassification.from_pretrained("models/mine")',
        "data": "dev.csv",
        "more": ', tokenizer="models/mine"',
    }

    @staticmethod
    def known_metrics() -> Mapping[str, str]:
        """The metrics that can be asked for by name; it imports torch."""
        from dualeval.metrics.classification import LINES

        return {
            **LINES,
            "binary_f1": "F1 of class 1, where there are two",
            "pearson": "Pearson's correlation of prediction and label (regression)",
            "spearman": "Spearman's rank correlation of prediction and label (regression)",
            "mse": "mean squared error (regression)",
            "mae": "mean absolute error (regression)",
            "text_work": "computed tokens, and texts that were cut; always included",
        }

    data: Path = option(
        help="Table of texts and labels: .csv, .tsv, .jsonl or .parquet.", group=_DATA, metavar="FILE"
    )
    text: str | None = option(
        None, "Column of the texts.", group=_DATA, metavar="COLUMN", shown="text, sentence, ..."
    )
    text_pair: str | None = option(
        None, "Column of the second text of a pair.", group=_DATA, metavar="COLUMN", shown="sentence2, ..."
    )
    label: str | None = option(
        None, "Column of the labels.", group=_DATA, metavar="COLUMN", shown="label, ..."
    )
    max_length: int | None = option(
        None,
        "Maximum tokens of a text or pair; longer ones are cut.",
        group=_TEXTS,
        least=1,
        shown="the tokenizer's, at most 512",
    )
    keep: tuple[str, ...] = ()
