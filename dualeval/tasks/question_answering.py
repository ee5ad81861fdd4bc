"""The task question-answering: a model marks the answers in texts, in the format of SQuAD v1.1 and v2.0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from dualeval.columns.ragged import Column
from dualeval.data.cache import DataCache
from dualeval.data.squad import questions_of_rows, read_questions
from dualeval.data.stores.path import path_at
from dualeval.data.windows import EncodedQuestions, WindowEncoder
from dualeval.errors import UsageError
from dualeval.metrics import Metric, RowMetric
from dualeval.metrics.classification import NonfiniteLogits
from dualeval.metrics.metric import chosen
from dualeval.metrics.spans import best_of_windows, best_spans, columns_of
from dualeval.metrics.squad import BestThresholds, WindowWork
from dualeval.models.text_models import Use, known_tokens, load_tokenizer, shorter, try_out
from dualeval.options.fields import of_python, with_keywords
from dualeval.tasks.keywords import QuestionAnsweringKeywords
from dualeval.tasks.options.question_answering import QuestionAnsweringOptions
from dualeval.tasks.scored_answers import ARTICLE, ScoredAnswers, answer_metrics
from dualeval.tasks.text_task import Model, TextTask

USE = Use(name="question answering", kind="AutoModelForQuestionAnswering")
# What the model gives in files of their own, under the names that the official scripts' users know.
PREDICTIONS = "predictions.json"
NULL_ODDS = "null_odds.json"


class QuestionAnswering(TextTask, ScoredAnswers):
    """A model that marks the answer in a text.

    Args:
        model: a folder with a model and its tokenizer, as ``save_pretrained`` writes them; or a module, or a
            function without arguments that returns one.
        data: a file in the format of SQuAD, or rows as of ``load_dataset("squad")``.
        tokenizer: the folder of the tokenizer, where the model is no folder.
        metrics: names of metrics; none for the default ones.
        cache: what other tasks of the run have read of their data.
        options: the others of ``dualeval run``, by the same names (docs/question-answering.md):
            weights, weights_key, weights_prefix, adapter, trust_checkpoint, max_length, stride, n_best,
            max_answer_length, null_threshold, and batch_size, the most windows of a question.

    Raises:
        UsageError: options, model, tokenizer and data do not fit together.
        TypeError: there is no such option.
    """

    wants_workers = True

    @with_keywords(QuestionAnsweringKeywords, QuestionAnsweringOptions)
    def __init__(
        self,
        *,
        model: Model,
        data: str | Path | Sequence[Mapping[str, Any]],
        tokenizer: str | Path | None = None,
        metrics: Sequence[str] = (),
        cache: DataCache | None = None,
        **options: Unpack[QuestionAnsweringKeywords],
    ) -> None:
        if TYPE_CHECKING:  # for jedi, as in dualeval.evaluate
            QuestionAnsweringOptions(metric=(), **options)  # type: ignore[arg-type]
        settings = of_python(QuestionAnsweringOptions, options, metrics, model=Path(), data=Path())
        max_length, stride, null_threshold = settings.max_length, settings.stride, settings.null_threshold
        TextTask.__init__(self, model, tokenizer, USE, settings)
        if isinstance(data, (str, Path)):
            self._data, named = str(path_at(data).absolute()), str(path_at(data))
            key = ("questions", self._data)
            questions = (cache or DataCache()).once(key, lambda: read_questions(path_at(data)))
        else:
            questions, self._data = questions_of_rows(data), type(data).__name__
            named = f"{len(questions):,} rows of a {self._data}"
        self._described_data = named
        ScoredAnswers.__init__(self, questions, _all_metrics(questions.unanswerable), metrics)
        if null_threshold is not None and not self._unanswerable:
            raise UsageError(
                f"--null-threshold {null_threshold:g}: every question of {data} has an answer (SQuAD v1.1), "
                "so it does not apply. Leave it out."
            )
        if null_threshold is not None and not math.isfinite(null_threshold):
            raise UsageError(
                f"--null-threshold {null_threshold}: expected a finite number. 1e30 leaves no question "
                "without an answer, -1e30 all."
            )
        self._n_best, self._max_answer_length = settings.n_best, settings.max_answer_length
        self._null_threshold = null_threshold or 0.0
        encoder, facts = load_tokenizer(self._model.folder, USE)
        self._vocabulary = encoder
        special = encoder.num_special_tokens_to_add(True)
        if not stride < max_length - special:
            raise UsageError(
                f"--stride {stride} is not less than the {max_length - special} tokens that --max-length "
                f"{max_length} leaves between the tokenizer's own. Give a smaller --stride."
            )
        self._encoder = WindowEncoder(
            encoder, facts, max_length=max_length, stride=stride, most_windows=settings.batch_size
        )
        self._dataset = EncodedQuestions(self._questions, self._encoder)

    @property
    def rows(self) -> tuple[str, ...]:
        """The best span of each question, how it is scored, and the article that it is on."""
        of_nulls = ("null_odds", "has_answer", "span_exact_match", "span_f1", "span_is_empty")
        return (
            *("start", "end", "score", "exact_match", "f1", "windows", "nan_logits", "inf_logits"),
            *(of_nulls if self._unanswerable else ()),
            ARTICLE,
        )

    @property
    def exports(self) -> dict[str, str]:
        """The answers in the official format; with questions without an answer also their null_odds."""
        return {PREDICTIONS: "answer", **({NULL_ODDS: "null_odds"} if self._unanswerable else {})}

    def dataset(self) -> EncodedQuestions:
        return self._dataset

    def collate(self, samples: Any) -> dict[str, Any]:
        return self._encoder.collate(samples)

    def _try(self, model: nn.Module, device: torch.device) -> None:
        known = known_tokens(self._model.folder, model, self._vocabulary)
        self._encoder.facts = replace(self._encoder.facts, known=known)
        self._try_out(model, "a")
        try:
            self._try_out(model, "a " * self._encoder.max_length)
        except UsageError as error:
            raise UsageError(f"{error}. {shorter(model)}") from error

    def _try_out(self, model: nn.Module, context: str) -> None:
        windows, folder = self._windows_on(context), self._model.folder
        shape = tuple(windows["input_ids"].shape)
        outputs = try_out(folder, lambda: model(**windows), shape[1])
        for name in ("start_logits", "end_logits"):
            logits = getattr(outputs, name, None)
            if logits is None or tuple(logits.shape) != shape:
                gave = "no" if logits is None else tuple(logits.shape)
                raise UsageError(
                    f"the model in {folder} gave {gave} {name} for windows of shape {shape}, expected one "
                    "per token."
                )

    def _windows_on(self, context: str) -> Mapping[str, Tensor]:
        """The longest windows of a text, as the model takes them; the question leaves all room to it."""
        batch = self._encoder.collate([self._encoder.encode("", context)])
        windows: Mapping[str, Tensor] = batch["groups"][0]["inputs"]
        return windows

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

    def postprocess(self, columns: Mapping[str, Tensor], samples: range) -> dict[str, Column]:
        """Cut the answers out of their texts and score them."""
        spans = [
            _without_blanks(self._questions[index].context, start, end)
            for index, start, end in zip(
                samples, columns["start"].tolist(), columns["end"].tolist(), strict=True
            )
        ]
        starts, ends = (torch.tensor(places, dtype=torch.int32) for places in zip(*spans, strict=True))
        texts = self._cut(starts.tolist(), ends.tolist(), samples.start)
        marks: dict[str, Column] = {**columns, "start": starts, "end": ends, ARTICLE: self._articles(samples)}
        # Whatever the right answer is: a NaN logit is not an answer.
        failed = columns["nan_logits"].tolist()
        of_spans = self._scored(_without(texts, failed), samples)
        if not self._unanswerable:
            return {**marks, **of_spans}
        final = self._final(texts, columns["null_odds"].tolist())
        return {
            **marks,
            "has_answer": self._has_answer(samples),
            "span_is_empty": starts == ends,
            **{f"span_{name}": column for name, column in of_spans.items()},
            **self._scored(_without(final, failed), samples),
        }

    def _cut(self, starts: Sequence[int], ends: Sequence[int], first: int) -> list[str]:
        """The texts of spans of consecutive questions; "" for none."""
        return [
            self._questions[index].context[start:end]
            for index, (start, end) in enumerate(zip(starts, ends, strict=True), first)
        ]

    def _final(self, texts: Sequence[str], null_odds: Sequence[float]) -> list[str]:
        """The texts, less those in which "no answer" is believed more."""
        return [
            "" if odds > self._null_threshold else text for text, odds in zip(texts, null_odds, strict=True)
        ]

    def texts(self, rows: Mapping[str, npt.NDArray[Any]], first: int) -> dict[str, list[str]]:
        texts = self._cut(rows["start"].tolist(), rows["end"].tolist(), first)
        return {"answer": self._final(texts, rows["null_odds"].tolist()) if self._unanswerable else texts}

    def metrics(self) -> list[Metric | RowMetric]:
        others = [metric for metric in self._metrics if metric.name != WindowWork.name]
        return self._metrics if len(others) < len(self._metrics) else [*others, WindowWork()]

    def options(self) -> dict[str, Any]:
        return {**super().options(), **self._model.options(), "data": self._data, **self._answer_options()}

    def _answer_options(self) -> dict[str, Any]:
        return {
            "max_length": self._encoder.max_length,
            "stride": self._encoder.stride,
            "n_best": self._n_best,
            "max_answer_length": self._max_answer_length,
            "null_threshold": self._null_threshold if self._unanswerable else None,
        }

    def description(self) -> dict[str, str]:
        answers = f"at most {self._max_answer_length} tokens, of the {self._n_best} best starts and ends"
        if self._unanswerable:
            answers += f", null threshold {self._null_threshold:g}"
        return {
            **self._model.description(),
            "data": self._described_data,
            "windows": f"at most {self._encoder.max_length} tokens, stride {self._encoder.stride}",
            "answers": answers,
        }

    def fingerprint(self) -> dict[str, Any]:
        """What windows, logits and answers depend on, besides the weights."""
        return {
            "config": self._model.fingerprint(),
            "tokenizer": self._encoder.fingerprint(),
            "most_windows": self._encoder.most_windows,
            "unanswerable": self._unanswerable,
            **self._answer_options(),
        }


def _all_metrics(unanswerable: bool) -> list[Metric | RowMetric]:
    best: list[RowMetric] = [BestThresholds()] if unanswerable else []
    return [*answer_metrics(unanswerable=unanswerable), NonfiniteLogits(), WindowWork(), *best]


def stored_metrics(options: Mapping[str, Any], names: Sequence[str]) -> Sequence[Metric | RowMetric]:
    """Metrics by name, for the rows of a run with these ``options``, which are its ``fingerprint()``."""
    return chosen(names, _all_metrics(options["unanswerable"]))


def _without(texts: Sequence[str], failed: Sequence[bool]) -> list[str | None]:
    return [None if wrong else text for text, wrong in zip(texts, failed, strict=True)]


def _without_blanks(context: str, start: int, end: int) -> tuple[int, int]:
    """A span without the white space at its ends, which some tokens hold; (0, 0) where nothing is left."""
    if start < 0:
        return 0, 0
    text = context[start:end]
    start += len(text) - len(text.lstrip())
    text = text.strip()
    return (start, start + len(text)) if text else (0, 0)
