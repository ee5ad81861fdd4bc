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

    # The metrics that can be asked for by name.
    known_metrics: ClassVar[Mapping[str, str]] = {
        "accuracy": "fraction of texts whose class is the first prediction; also top2, top3, ...",
        "f1": "mean of the F1 of each class",
        "binary_f1": "F1 of class 1, where there are two",
        "mcc": "Matthews' correlation coefficient, of any number of classes",
        "loss": "mean cross entropy",
        "ece": "expected calibration error, 15 bins",
        "auroc": "area under the ROC curve of each class against the rest, averaged",
        "precision_recall": "precision, recall and F1, for each class and averaged",
        "confusion": "counts of each class predicted as each other class",
        "nonfinite_logits": "how many texts have a NaN or an infinity among their logits",
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
