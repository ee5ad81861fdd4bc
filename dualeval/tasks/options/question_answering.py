"""The options of question-answering, and of answers that are there already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from dualeval.options.fields import option
from dualeval.tasks.options.base import DATA, TextOptions, start_of_texts

if TYPE_CHECKING:
    from dualeval.tasks.given_answers import GivenAnswers

_QUESTIONS, _ANSWERS = "Questions", "A file of answers"


@dataclass(frozen=True, kw_only=True)
class GivenAnswersOptions:
    """Answers in a file, scored as the official scripts of SQuAD do."""

    data: Path = option(help="Questions: JSON file of SQuAD.", group=_ANSWERS, metavar="FILE")
    predictions: Path = option(
        help="Answers: JSON object, question id to text.", group=_ANSWERS, metavar="FILE"
    )
    null_odds: Path | None = option(
        None,
        "JSON object, question id to no-answer score; adds the best thresholds.",
        group=_ANSWERS,
        metavar="FILE",
    )
    metric: tuple[str, ...] = ()

    def make(self) -> GivenAnswers:
        """The task."""
        from dualeval.tasks.given_answers import GivenAnswers

        return GivenAnswers(
            data=self.data, predictions=self.predictions, null_odds=self.null_odds, metrics=self.metric
        )


@dataclass(frozen=True, kw_only=True)
class QuestionAnsweringOptions(TextOptions):
    """Answers in texts, in the format of SQuAD v1.1 and v2.0."""

    # The answers in a file.
    scored: ClassVar[type] = GivenAnswersOptions
    start: ClassVar[Mapping[str, str]] = start_of_texts("AutoModelForQuestionAnswering", "dev-v2.0.json")

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

    data: Path = option(
        help="Questions: JSON of SQuAD, or rows (.jsonl, .parquet, tar shards).",
        group=DATA,
        metavar="FILE",
        takes_urls=True,
    )
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
