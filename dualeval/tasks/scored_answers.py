"""What the tasks that score answers to questions have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dualeval.columns.ragged import Text
from dualeval.data.squad import Questions
from dualeval.metrics import Metric, RowMetric
from dualeval.metrics.metric import chosen
from dualeval.metrics.squad import F1, AnswerCounts, ExactMatch, score_answer
from dualeval.tasks import Task, place_of

NAME = "question-answering"
# The column of the articles' titles: questions on one article are not independent.
ARTICLE = "article"
# Two characters of Thai, Lao, Burmese, Khmer, Japanese or Chinese.
_WITHOUT_SPACES = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]{2}")


def answer_metrics(*, unanswerable: bool) -> list[Metric]:
    """The metrics of answers, wherever they come from."""
    metrics: list[Metric] = [ExactMatch(parts=unanswerable), F1(parts=unanswerable)]
    return [*metrics, AnswerCounts()] if unanswerable else metrics


class ScoredAnswers(Task):
    """Columns and metrics of answers to questions, wherever the answers come from."""

    name = NAME
    cluster = ARTICLE

    def __init__(
        self, questions: Questions, every: Sequence[Metric | RowMetric], names: Sequence[str]
    ) -> None:
        self._questions = questions
        self._unanswerable = questions.unanswerable
        # A name that no metric has is refused now, before anything is built.
        self._metrics = chosen(names, every)

    def metrics(self) -> list[Metric | RowMetric]:
        return self._metrics

    def options(self) -> Mapping[str, Any]:
        return {"metric": [metric.name for metric in self.metrics()]}

    def findings(self, count: int) -> dict[str, list[str]]:
        """Questions with a gold answer that is not at its ``answer_start``; its text counts all the same."""
        return {"gold_answer_not_at_its_place": self._questions.misplaced(count)}

    def data_warnings(self) -> list[str]:
        gold = [text for question in self._questions.questions for text in question.answers]
        joined = [text for text in gold if _WITHOUT_SPACES.search(text)]
        warnings = [*super().data_warnings()]
        if len(joined) > len(gold) // 10:
            warnings.append(
                f"{len(joined)} of {len(gold)} gold answers are in a script without white space between "
                "words: f1 counts all text between white space as one word, so it is not an F1 of words or "
                "characters"
            )
        return warnings

    def _scored(self, answers: Sequence[str | None], samples: range) -> dict[str, Tensor]:
        """exact_match and f1 of answers to consecutive questions; None is wrong whatever is right."""
        scores = [
            (False, 0.0)
            if answer is None
            else score_answer(answer, self._questions[index].answers, unanswerable=self._unanswerable)
            for index, answer in zip(samples, answers, strict=True)
        ]
        return {
            "exact_match": torch.tensor([exact for exact, _ in scores]),
            "f1": torch.tensor([f1 for _, f1 in scores], dtype=torch.float64),
        }

    def show(self, row: Mapping[str, Any]) -> Any:
        """Question, the answer that was given, gold answers, and text."""
        question = self._questions[place_of(self._questions, row)]
        gold = " | ".join(dict.fromkeys(question.answers)) or "(none: the text does not say it)"
        answers = {"answer": str(row.get("answer") or "(none)"), "expected": gold}
        return {"question": question.question, **answers, "text": question.context}

    def _articles(self, samples: range) -> Text:
        return Text(self._questions[index].article for index in samples)

    def _has_answer(self, samples: range) -> Tensor:
        return torch.tensor([bool(self._questions[index].answers) for index in samples])
