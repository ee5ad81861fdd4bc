"""The options of the task question-answering; light to import, for the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from dualeval.models.weights_name import is_path_of_weights
from dualeval.options.fields import check_fields, option

if TYPE_CHECKING:
    from dualeval.data.cache import DataCache
    from dualeval.tasks.question_answering import QuestionAnswering

_MODEL = "Model"
_DATA = "Data"
_QUESTIONS = "Questions"


@dataclass(frozen=True, kw_only=True)
class QuestionAnsweringOptions:
    """Answers in texts, in the format of SQuAD v1.1 and v2.0."""

    # What ``dualeval init`` writes for this task.
    start: ClassVar[Mapping[str, str]] = {
        "imports": "from transformers import AutoModelForQuestionAnswering",
        "model": 'return AutoModelForQuestionAnswering.from_pretrained("models/mine")',
        "data": "dev-v2.0.json",
        "more": ', tokenizer="models/mine"',
    }

    # The metrics that can be asked for by name.
    known_metrics: ClassVar[Mapping[str, str]] = {
        "exact_match": "percentage of questions whose answer is right",
        "f1": "mean F1 of the words of the answers, in percent",
        "answer_counts": "how many questions have an answer, and how many none (SQuAD v2.0)",
        "nonfinite_logits": "how many questions have a NaN or an infinity among their logits",
        "window_work": "computed windows and tokens; always included",
        "best_thresholds": "the null thresholds that give the best exact match and F1 (SQuAD v2.0)",
    }

    model: Path = option(
        help="Folder with a model and tokenizer of the transformers library.",
        group=_MODEL,
        metavar="DIR",
    )
    data: Path = option(
        help="Questions in the JSON format of SQuAD.",
        group=_DATA,
        metavar="FILE",
    )
    weights: str | None = option(
        None,
        "Checkpoint, or random:SEED.",
        group=_MODEL,
        is_path=is_path_of_weights,
        shown="in the model's folder",
    )
    weights_key: str | None = option(
        None, "Key of the state_dict in a checkpoint, such as model_ema.", group=_MODEL
    )
    weights_prefix: str | None = option(
        None, "Use only tensors whose names start with this; remove it.", group=_MODEL
    )
    trust_checkpoint: bool = option(
        False, "Read checkpoints that run code, such as pickled models.", group=_MODEL
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
    metric: tuple[str, ...] = ()
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_fields(self)

    def make(self, cache: DataCache | None = None) -> QuestionAnswering:
        """The task."""
        from dualeval.tasks.question_answering import QuestionAnswering

        return QuestionAnswering(
            model=self.model,
            data=self.data,
            weights=self.weights,
            weights_key=self.weights_key,
            weights_prefix=self.weights_prefix,
            trust_checkpoint=self.trust_checkpoint,
            metrics=self.metric,
            batch_size=self.batch_size,
            max_length=self.max_length,
            stride=self.stride,
            n_best=self.n_best,
            max_answer_length=self.max_answer_length,
            null_threshold=self.null_threshold,
            cache=cache,
        )
