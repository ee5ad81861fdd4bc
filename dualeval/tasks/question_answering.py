"""The task question-answering: spans of a text as answers, in the format of SQuAD v1.1 and v2.0.

Two tasks share data, scoring and metrics: ``QuestionAnswering`` has a model answer, ``GivenAnswers`` takes
the answers from a file.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dualeval.data.squad import Question, Questions, read_null_odds, read_predictions, read_questions
from dualeval.data.windows import WindowEncoder
from dualeval.errors import UsageError
from dualeval.metrics import Metric, RowMetric
from dualeval.metrics.classification import NonfiniteLogits
from dualeval.metrics.spans import best_of_windows, best_spans, columns_of
from dualeval.metrics.squad import (
    F1,
    AnswerCounts,
    BestThresholds,
    ExactMatch,
    WindowWork,
    score_answer,
)
from dualeval.models import question_answering as models
from dualeval.tasks import Task

NAME = "question-answering"
# What the model gives in files of their own, under the names that the official scripts' users know.
PREDICTIONS = "predictions.json"
NULL_ODDS = "null_odds.json"

_NEVER = float(np.finfo(np.float32).max)


class _Answers(Task):
    """What both tasks have in common: the columns and metrics of answers that are scored.

    Args:
        questions: what is asked.
        metrics: names of metrics; empty for all.

    Raises:
        UsageError: a metric is not known.
    """

    name = NAME

    def __init__(self, questions: Questions, metrics: Sequence[str]) -> None:
        self._questions = questions
        known = [metric.name for metric in self._all_metrics()]
        known += [metric.name for metric in self._all_row_metrics()]
        for name in metrics:
            if name not in known:
                near = difflib.get_close_matches(name, known)
                hint = f" Nearest: {', '.join(near)}." if near else ""
                raise UsageError(f"there is no metric {name!r} here.{hint} Metrics: {', '.join(known)}")
        self._wanted = frozenset(metrics or known)

    @property
    def _unanswerable(self) -> bool:
        return self._questions.unanswerable

    def _all_metrics(self) -> list[Metric]:
        found: list[Metric] = [ExactMatch(parts=self._unanswerable), F1(parts=self._unanswerable)]
        return [*found, AnswerCounts()] if self._unanswerable else found

    @abstractmethod
    def _all_row_metrics(self) -> list[RowMetric]:
        """Those of ``row_metrics``, wanted or not."""

    def metrics(self) -> list[Metric]:
        """The metrics asked for, or all that the data allow."""
        return [metric for metric in self._all_metrics() if metric.name in self._wanted]

    def row_metrics(self) -> list[RowMetric]:
        """The best thresholds, where there are questions without an answer."""
        return [metric for metric in self._all_row_metrics() if metric.name in self._wanted]

    def findings(self, count: int) -> dict[str, list[str]]:
        """Questions with a gold answer that is not at its ``answer_start``; its text counts all the same."""
        return {"gold_answer_not_at_its_place": self._questions.misplaced(count)}

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

    def _has_answer(self, samples: range) -> Tensor:
        return torch.tensor([bool(self._questions[index].answers) for index in samples])


class QuestionAnswering(_Answers):
    """A model that marks the answer in a text.

    Args:
        model: a local folder with a model of the transformers library and its fast tokenizer.
        data: a JSON file in the format of SQuAD.
        weights: None for those in the folder; else a state_dict file or "random:SEED".
        metrics: names of metrics; empty for all.
        batch_size: questions a batch, and most windows of a forward.
        max_length: most tokens of a window.
        stride: tokens that a window of a long text shares with the one before.
        n_best: starts and ends of a window that are paired.
        max_answer_length: most tokens of an answer.
        null_threshold: a question gets no answer where "no answer" scores higher than its best answer by more
            than this; only with data that have questions without an answer, and 0 there where it is None.

    Raises:
        UsageError: data, folder and options do not make a job.
    """

    decodes = True
    concurrent = True
    libraries = ("transformers", "tokenizers")

    def __init__(
        self,
        *,
        model: Path,
        data: Path,
        weights: str | None = None,
        metrics: Sequence[str] = (),
        batch_size: int = 64,
        max_length: int = 384,
        stride: int = 128,
        n_best: int = 20,
        max_answer_length: int = 30,
        null_threshold: float | None = None,
    ) -> None:
        models.check_folder(model)
        super().__init__(read_questions(data), metrics)
        if null_threshold is not None and not self._unanswerable:
            raise UsageError(
                f"--null-threshold {null_threshold:g}: every question of {data} has an answer (SQuAD v1.1), "
                "so none is ever left without one. Leave it out."
            )
        self._folder = model
        self._weights = weights
        self._options = {
            "max_length": max_length,
            "stride": stride,
            "n_best": n_best,
            "max_answer_length": max_answer_length,
            "null_threshold": (null_threshold or 0.0) if self._unanswerable else None,
        }
        self._max_length = max_length
        self._n_best = n_best
        self._max_answer_length = max_answer_length
        self._null_threshold = null_threshold or 0.0
        tokenizer, self._facts = models.load_tokenizer(model)
        self._tokens = tokenizer.get_vocab_size()
        special = tokenizer.num_special_tokens_to_add(True)
        if not stride < max_length - special:
            raise UsageError(
                f"--stride {stride} is not less than the {max_length - special} tokens that --max-length "
                f"{max_length} leaves between the tokenizer's own. Give a smaller --stride."
            )
        self._dataset = _Encoded(
            self._questions,
            WindowEncoder(
                tokenizer, self._facts, max_length=max_length, stride=stride, batch_size=batch_size
            ),
        )

    @property
    def rows(self) -> tuple[str, ...]:
        """The best span of each question and how it is scored."""
        of_nulls = ("null_odds", "has_answer", "span_exact_match", "span_f1", "span_is_empty")
        return (
            *("start", "end", "score", "exact_match", "f1", "windows"),
            *(of_nulls if self._unanswerable else ()),
        )

    @property
    def json_files(self) -> dict[str, str]:
        """The answers in the official format; with questions without an answer also their null_odds."""
        return {PREDICTIONS: "answer", **({NULL_ODDS: "null_odds"} if self._unanswerable else {})}

    def dataset(self) -> _Encoded:
        """The questions, as windows of tokens."""
        return self._dataset

    def collate(self, samples: Any) -> dict[str, Any]:
        """Sort the windows of a batch by length, and pad them in groups."""
        return self._dataset.encoder.collate(samples)

    def build_model(self, device: torch.device) -> nn.Module:
        """Make the model, try it on one window of full length, and bring it to its device.

        Raises:
            UsageError: model, weights, tokenizer and window do not fit together.
        """
        model = models.build(self._folder, self._weights)
        models.check_fits(self._folder, model, self._tokens, self._facts, self._max_length)
        return model.to(device)

    def forward(self, model: nn.Module, batch: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
        """Start and end logits of each group of windows, (windows, tokens)."""
        outputs = [model(**group["inputs"]) for group in batch["groups"]]
        return [(output.start_logits, output.end_logits) for output in outputs]

    def observe(self, outputs: list[tuple[Tensor, Tensor]], batch: dict[str, Any]) -> dict[str, Tensor]:
        """The best span of each question over its windows, in characters of its text."""
        windows = [
            best_spans(
                start,
                end,
                mask=group["inputs"]["attention_mask"],
                characters=group["spans"],
                null=group["null"],
                n_best=self._n_best,
                most_tokens=self._max_answer_length,
            )
            for (start, end), group in zip(outputs, batch["groups"], strict=True)
        ]
        work = {name: batch[name] for name in ("windows", "tokens", "padded_tokens")}
        return {**columns_of(best_of_windows(windows, batch["places"])), **work}

    def postprocess(self, columns: Mapping[str, Tensor], samples: range) -> dict[str, Tensor]:
        """Cut the answers out of their texts and score them."""
        spans = [
            _without_blanks(self._questions[index].context, start, end)
            for index, start, end in zip(
                samples, columns["start"].tolist(), columns["end"].tolist(), strict=True
            )
        ]
        starts, ends = (torch.tensor(ends, dtype=torch.int32) for ends in zip(*spans, strict=True))
        given = self._cut(starts.tolist(), ends.tolist(), samples.start)
        # Whatever is right: a logit that is NaN is no answer.
        failed = columns["nan_logits"].tolist()
        spans_scored = self._scored(
            [None if nan else text for text, nan in zip(given, failed, strict=True)], samples
        )
        scored = spans_scored
        found = {**columns, "start": starts, "end": ends}
        if self._unanswerable:
            final = self._final(given, columns["null_odds"].tolist())
            scored = self._scored(
                [None if nan else text for text, nan in zip(final, failed, strict=True)], samples
            )
            found["has_answer"] = self._has_answer(samples)
            found["span_is_empty"] = starts == ends
            found |= {f"span_{name}": column for name, column in spans_scored.items()}
        return {**found, **scored}

    def _cut(self, starts: Sequence[int], ends: Sequence[int], first: int) -> list[str]:
        """The texts of spans of consecutive questions; "" for none."""
        return [
            self._questions[index].context[start:end]
            for index, (start, end) in enumerate(zip(starts, ends, strict=True), first)
        ]

    def _final(self, texts: Sequence[str], null_odds: Sequence[float]) -> list[str]:
        """The texts, less those in which "no answer" is believed more."""
        if not self._unanswerable:
            return list(texts)
        return [
            "" if odds > self._null_threshold else text for text, odds in zip(texts, null_odds, strict=True)
        ]

    def texts(self, rows: Mapping[str, npt.NDArray[Any]], first: int) -> dict[str, list[str]]:
        """The answers, "" for none."""
        texts = self._cut(rows["start"].tolist(), rows["end"].tolist(), first)
        return {"answer": self._final(texts, rows["null_odds"].tolist()) if self._unanswerable else texts}

    def _all_metrics(self) -> list[Metric]:
        return [*super()._all_metrics(), NonfiniteLogits(), WindowWork()]

    def _all_row_metrics(self) -> list[RowMetric]:
        return [BestThresholds()] if self._unanswerable else []

    def metrics(self) -> list[Metric]:
        """The metrics asked for, or all that the data allow; and always what the windows took."""
        chosen = super().metrics()
        return chosen if any(metric.name == WindowWork.name for metric in chosen) else [*chosen, WindowWork()]

    def fingerprint(self) -> dict[str, Any]:
        """The options of windows and answers, and the files of the tokenizer."""
        return {**self._options, "tokenizer": self._dataset.encoder.fingerprint()}


def _without_blanks(context: str, start: int, end: int) -> tuple[int, int]:
    """A span without the white space at its ends, which some tokens hold; (0, 0) where nothing is left."""
    if start < 0:
        return 0, 0
    text = context[start:end]
    start += len(text) - len(text.lstrip())
    text = text.strip()
    return (start, start + len(text)) if text else (0, 0)


class _Encoded:
    """Questions as windows of tokens.

    Attributes:
        encoder: makes the windows.
    """

    def __init__(self, questions: Questions, encoder: WindowEncoder) -> None:
        self._questions = questions
        self.encoder = encoder

    def __len__(self) -> int:
        return len(self._questions)

    def id(self, index: int) -> str:
        """The question's id in the file."""
        return self._questions.id(index)

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Encode questions with their texts.

        Raises:
            ValueError: a question leaves too little room for its text.
        """
        return [self._encoded(self._questions[index]) for index in indices]

    def _encoded(self, question: Question) -> dict[str, Tensor]:
        return self.encoder.encode(question.question, question.context)

    def fingerprint(self, count: int) -> str:
        """sha256, in hex, over the first ``count`` questions."""
        return self._questions.fingerprint(count)


class GivenAnswers(_Answers):
    """Answers that are there already.

    Args:
        data: a JSON file in the format of SQuAD.
        predictions: a JSON object of question id to answer.
        null_odds: a JSON object of question id to number, as a run writes it; None for no best thresholds.
        metrics: names of metrics; empty for all.

    Raises:
        UsageError: a file is not of its format, or they do not belong together.
    """

    decodes = False
    concurrent = False

    def __init__(
        self, *, data: Path, predictions: Path, null_odds: Path | None = None, metrics: Sequence[str] = ()
    ) -> None:
        self._answers = read_predictions(predictions)
        self._odds = None if null_odds is None else read_null_odds(null_odds)
        super().__init__(read_questions(data), metrics)
        asked = {question.id for question in self._questions.questions}
        if not asked & self._answers.keys():
            raise UsageError(
                f"none of the {len(self._answers)} ids in {predictions} is that of one of the {len(asked)} "
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
                    f"{', '.join(without[:5])}{', ...' if len(without) > 5 else ''}"
                )

    @property
    def rows(self) -> tuple[str, ...]:
        """How each answer is scored."""
        of_nulls = ("span_exact_match", "span_f1", "span_is_empty", "null_odds")
        return (
            *("exact_match", "f1"),
            *(("has_answer",) if self._unanswerable else ()),
            *(of_nulls if self._odds is not None else ()),
        )

    def dataset(self) -> Questions:
        """The questions."""
        return self._questions

    def collate(self, samples: Any) -> dict[str, Tensor]:
        """Nothing is computed."""
        return {}

    def build_model(self, device: torch.device) -> nn.Module:
        """No model."""
        return nn.Module()

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Nothing is computed."""
        return batch

    def observe(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        """Nothing is computed."""
        return {}

    def postprocess(self, columns: Mapping[str, Tensor], samples: range) -> dict[str, Tensor]:
        """Score the answers; a question that has none in the file is wrong."""
        ids = [self._questions.id(index) for index in samples]
        given = [self._answers.get(name) for name in ids]
        found = self._scored(given, samples)
        if self._odds is not None:
            found |= {f"span_{name}": column for name, column in found.items()}
            found["span_is_empty"] = torch.tensor([answer == "" for answer in given])
            # What is not answered is answered last.
            odds = [
                _NEVER if answer is None else self._odds[name]
                for name, answer in zip(ids, given, strict=True)
            ]
            found["null_odds"] = torch.tensor(odds, dtype=torch.float64)
        if self._unanswerable:
            found["has_answer"] = self._has_answer(samples)
        return found

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

    def _all_row_metrics(self) -> list[RowMetric]:
        return [BestThresholds()] if self._odds is not None else []

    def fingerprint(self) -> dict[str, Any]:
        """What is scored."""
        return {
            "predictions": hashlib.sha256(json.dumps(self._answers).encode()).hexdigest(),
            "null_odds": None
            if self._odds is None
            else hashlib.sha256(json.dumps(self._odds).encode()).hexdigest(),
        }
