"""The options of the task question-answering; light to import, for the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dualeval.options.fields import option
from dualeval.tasks.text_options import TextOptions

_DATA = "Data"
_QUESTIONS = "Questions"


@dataclass(frozen=True, kw_only=True)
class QuestionAnsweringOptions(TextOptions):
    """Answers in texts, in the format of SQuAD v1.1 and v2.0."""

    # What ``dualeval init`` writes for this task.
    start: ClassVar[Mapping[str, str]] = {
        "imports": "from transformers import AutoModelForQuestionAnswering",
        "model": 'return AutoModelForQuestionAnswering.from_pretrained("models/mine")',
        "data": "dev-v2.0.json",
        "more": ', tokenizer="models/mine"',
    }

    @staticmethod
    def known_metrics() -> Mapping[str, str]:
        """The metrics that can be asked for by name."""
        return {
            "exact_match": "percentage of questions whose answer is right",
            "f1": "mean F1 of the words of the answers, in percent",
            "answer_counts": "how many questions have an answer, and how many none (SQuAD v2.0)",
            "nonfinite_logits": "how many questions have a NaN or an infinity among their logits",
            "window_work": "computed windows and tokens; always included",
            "best_thresholds": "the null thresholds that give the best exact match and F1 (SQuAD v2.0)",
        }

    data: Path = option(help="Questions in the JSON format of SQuAD.", group=_DATA, metavar="FILE")
    max_length: int = option(
        384, "Maximum tokens of a window (question and text).", group=_QUESTIONS, least=1
    )
    stride: int = option(128, "Tokens by which windows overlap.", group=_QUESTIONS, least=0)
    n_best: int = option(20, "Best start and end positions of a window to pair.", group=_QUESTIONS, least=1)
    max_answer_length: int = option(30, "Maximum tokens of an answer.", group=_QUESTIONS, least=1)
    null_threshold: float | None = option(
        None, "Answer '' if the no-answer score leads by more than this.", group=_QUESTIONS, shown="0"
    )
    batch_size: int = 64
