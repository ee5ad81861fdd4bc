"""The task question-answering with answers that are there already: they are scored, nothing is computed."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dualeval.columns.ragged import Column
from dualeval.data.squad import Questions, read_null_odds, read_predictions, read_questions
from dualeval.errors import UsageError
from dualeval.messages import first_of
from dualeval.metrics import Metric, RowMetric
from dualeval.metrics.metric import chosen
from dualeval.metrics.squad import BestThresholds
from dualeval.tasks.scored_answers import ARTICLE, ScoredAnswers, answer_metrics

# Behind all odds that a run writes.
_NEVER = float(np.finfo(np.float32).max)


class GivenAnswers(ScoredAnswers):
    """Answers that are there already: no model, and nothing is computed on the device."""

    wants_workers = False
    thread_safe = False

    def __init__(
        self, *, data: Path, predictions: Path, null_odds: Path | None = None, metrics: Sequence[str] = ()
    ) -> None:
        self._data = data
        self._predictions = predictions
        self._answers = read_predictions(predictions)
        self._odds = None if null_odds is None else read_null_odds(null_odds)
        questions = read_questions(data)
        every = _all_metrics(unanswerable=questions.unanswerable, with_odds=null_odds is not None)
        super().__init__(questions, every, metrics)
        asked = {question.id for question in self._questions.questions}
        if not asked & self._answers.keys():
            raise UsageError(
                f"none of the {len(self._answers)} ids in {predictions} belongs to one of the {len(asked)} "
                f"questions in {data}. Give the predictions for these questions."
            )
        self._unasked = [name for name in self._answers if name not in asked]
        if self._odds is not None:
            if not self._unanswerable:
                raise UsageError(
                    f"--null-odds {null_odds}: every question of {data} has an answer (SQuAD v1.1). Leave it "
                    "out."
                )
            if without := [name for name in self._answers if name in asked and name not in self._odds]:
                raise UsageError(
                    f"{null_odds} has no value for {len(without)} questions with a prediction: "
                    f"{first_of(without, 5)}"
                )

    @property
    def rows(self) -> tuple[str, ...]:
        """How each answer is scored, and the article that its question is on."""
        of_nulls = ("span_exact_match", "span_f1", "span_is_empty", "null_odds")
        return (
            *("exact_match", "f1"),
            *(("has_answer",) if self._unanswerable else ()),
            *(of_nulls if self._odds is not None else ()),
            ARTICLE,
        )

    def dataset(self) -> Questions:
        return self._questions

    def collate(self, samples: Any) -> dict[str, Tensor]:
        return {}

    def build_model(self, device: torch.device) -> nn.Module:
        return nn.Module().eval()

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return batch

    def observe(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        return {}

    def postprocess(self, columns: Mapping[str, Tensor], samples: range) -> dict[str, Column]:
        """Score the answers; a question that has none in the file is wrong."""
        ids = [self._questions.id(index) for index in samples]
        answers = [self._answers.get(name) for name in ids]
        scored: dict[str, Column] = {**self._scored(answers, samples)}
        if self._odds is not None:
            scored |= {f"span_{name}": column for name, column in scored.items()}
            scored["span_is_empty"] = torch.tensor([answer == "" for answer in answers])
            # What is not answered is answered last.
            odds = [
                _NEVER if answer is None else self._odds[name]
                for name, answer in zip(ids, answers, strict=True)
            ]
            scored["null_odds"] = torch.tensor(odds, dtype=torch.float64)
        if self._unanswerable:
            scored["has_answer"] = self._has_answer(samples)
        scored[ARTICLE] = self._articles(samples)
        return scored

    def texts(self, rows: Mapping[str, npt.NDArray[Any]], first: int) -> dict[str, list[str | None]]:
        """The answers; None for none in the file."""
        count = len(rows["exact_match"])
        return {"answer": [self._answers.get(self._questions.id(first + place)) for place in range(count)]}

    def findings(self, count: int) -> dict[str, list[str]]:
        """Questions without a prediction, predictions without a question, gold answers out of place."""
        missing = [
            question.id for question in self._questions.questions[:count] if question.id not in self._answers
        ]
        return {
            "no_prediction_so_wrong": missing,
            "prediction_without_a_question": self._unasked,
            **super().findings(count),
        }

    def data_warnings(self) -> list[str]:
        asked = [one for one in self._questions.questions if not one.answers and self._answers.get(one.id)]
        absent = [t for one in asked if (t := self._answers[one.id]).lower() not in one.context.lower()]
        text, count = next(iter(Counter(absent).most_common(1)), ("", 0))
        warnings = super().data_warnings()
        if count > max(2, len(asked) // 10):
            warnings.append(
                f"{count} questions without an answer have the prediction {text!r:.60}, which is not in "
                f'their texts and counts as wrong: where it means no answer, write "" '
                f"into {self._predictions}"
            )
        return warnings

    def description(self) -> dict[str, str]:
        return {"data": str(self._data), "predictions": str(self._predictions)}

    def fingerprint(self) -> dict[str, Any]:
        return {
            "unanswerable": self._unanswerable,
            "predictions": _hash(self._answers),
            "null_odds": None if self._odds is None else _hash(self._odds),
        }


def _hash(of_questions: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(of_questions).encode()).hexdigest()


def _all_metrics(*, unanswerable: bool, with_odds: bool) -> list[Metric | RowMetric]:
    best: list[RowMetric] = [BestThresholds()] if with_odds else []
    return [*answer_metrics(unanswerable=unanswerable), *best]


def stored_metrics(options: Mapping[str, Any], names: Sequence[str]) -> Sequence[Metric | RowMetric]:
    """Metrics by name, for the rows of a run with these ``options``, which are its ``fingerprint()``."""
    with_odds = options["null_odds"] is not None
    return chosen(names, _all_metrics(unanswerable=options["unanswerable"], with_odds=with_odds))
