"""What both tasks on the harness's documents do: with a model, and with answers that are there already."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from dualeval.columns.ragged import Column, Ragged, Text
from dualeval.errors import UsageError
from dualeval.messages import counted, listed
from dualeval.metrics import Count, Metric, RowMetric
from dualeval.metrics.metric import chosen
from dualeval.options.fields import flag_of
from dualeval.tasks import Task, place_of
from dualeval.tasks.lm_eval import figures as of
from dualeval.tasks.lm_eval.library import Loaded
from dualeval.tasks.lm_eval.requests import Requests
from dualeval.tasks.options.base import AnswerOptions
from dualeval.tasks.options.lm_eval import LmEvalOptions, PromptOptions, ScoredOptions

_EMPTY, _UNFINISHED = "empty_answers", "unfinished_thinking"
_PROMPTS = [each.name for each in fields(PromptOptions)]
# With what each is without.
_ANSWERS = {each.name: each.default for each in fields(AnswerOptions)}


class HarnessTask(Task):
    """Documents of the harness, and the figures of their answers."""

    name = "lm-eval"
    wants_workers = False
    # What is counted of generated texts, beside what all texts have.
    _counted: Sequence[str] = ()
    # The metrics beside the figures.
    _counts: Sequence[Metric] = ()

    def _set_up(
        self,
        options: LmEvalOptions | ScoredOptions,
        loaded: Loaded,
        dataset: Requests,
        model: str,
        template: str | None,
    ) -> None:
        """Keep what was loaded; ``model`` and ``template`` are named in the harness's files."""
        self._asked, self._loaded, self._dataset = options, loaded, dataset
        self._figures = of.Figures(loaded, options.bootstrap_iters, {"model": model, "template": template})
        kinds = {request.request_type for each in loaded.documents for request in each.requests}
        of_thoughts = [_UNFINISHED] * (options.think_end is not None)
        of_texts = [*self._counted, _EMPTY, *of_thoughts] * (of.GENERATE in kinds)
        if (given := self._of_answers()) and not of_texts:
            raise UsageError(
                f"{listed(map(flag_of, given))}: no task here generates texts, all have log-likelihoods. "
                "Leave it out."
            )
        self._counts = (*self._counts, *(Count(name, name=name) for name in of_texts))
        self._metrics = chosen(options.metric, [self._figures, *self._counts])

    def _of_answers(self) -> dict[str, Any]:
        """The options of generated texts that were given."""
        values = {name: getattr(self._asked, name, None) for name in _ANSWERS}
        return {name: value for name, value in values.items() if value not in (None, _ANSWERS[name])}

    @property
    def rows(self) -> tuple[str, ...]:
        return (*self._figures.columns, *(name for each in self._counts for name in each.columns))

    @property
    def exports(self) -> Mapping[str, str | Callable[[Path], object]]:
        return self._figures.files() if self._figures in self._metrics else {}

    def dataset(self) -> Requests:
        return self._dataset

    def metrics(self) -> Sequence[Metric | RowMetric]:
        return self._metrics

    def _columns(
        self, samples: range, answers: Mapping[int, of.Answers], counts: Mapping[str, Sequence[int]]
    ) -> dict[str, Column]:
        """The columns of consecutive documents; one without answers could not be read.

        None is the answer where thoughts have no end: the harness gets an empty text.
        """
        documents = [self._dataset.documents[index] for index in samples]
        said = [[each for one in answers.get(index, ()) for each in one] for index in samples]
        answers = {
            index: [["" if each is None else each for each in one] for one in of_one]
            for index, of_one in answers.items()
        }
        lls, greedy, texts = [], [], []
        for index, document in zip(samples, documents, strict=True):
            pairs: list[tuple[float, bool]] = []
            generated: list[str] = []
            for request, of_request in zip(document.requests, answers.get(index, ()), strict=False):
                first = of_request[0]
                if request.request_type == of.GENERATE:
                    generated += of_request
                else:
                    pairs.append(first if isinstance(first, tuple) else (first, False))
            lls.append(torch.tensor([each for each, _ in pairs], dtype=torch.float64))
            greedy.append(torch.tensor([each for _, each in pairs], dtype=torch.bool))
            texts.append(of.generated_text(generated))
        values = self._figures.values(samples, answers)
        counts = {
            **counts,
            _EMPTY: [sum(isinstance(each, str) and not each.strip() for each in one) for one in said],
            _UNFINISHED: [sum(each is None for each in one) for one in said],
        }
        return {
            **{name: torch.tensor(column, dtype=torch.int64) for name, column in counts.items()},
            of.TASK: Text(document.task for document in documents),
            of.DOCUMENT: torch.tensor([*samples], dtype=torch.int64),
            of.LOGLIKELIHOODS: Ragged(torch.cat(lls), torch.tensor([*map(len, lls)])),
            of.GREEDY: Ragged(torch.cat(greedy), torch.tensor([*map(len, greedy)])),
            of.GENERATED: Text(texts),
            **{name: torch.tensor(column, dtype=torch.float64) for name, column in values.items()},
        }

    def show(self, row: Mapping[str, Any]) -> dict[str, str]:
        """The requests of a document with their answers, and what its task expects."""
        document = self._dataset.documents[place_of(self._dataset, row)]
        answers = of.answers_of(document, *(row[name] for name in of.ANSWERS))
        shown: dict[str, str] = {}
        for number, (request, of_request) in enumerate(zip(document.requests, answers, strict=True)):
            context, *more = request.args
            shown.setdefault("prompt", str(context))
            first = of_request[0]
            if request.request_type == of.GENERATE:
                several = f" {number}" * (len(document.requests) > 1)
                shown[f"answer{several}"] = " | ".join(of_request)
            elif more:
                shown[f"continuation {number}"] = f"{more[0]} ({first[0]:.2f})"
            else:
                shown["log-likelihood"] = f"{first:.2f}"
        expected = self._loaded.expected(document)
        return {**shown, **({"expected": " | ".join(expected)} if expected else {})}

    def data_warnings(self) -> list[str]:
        limit = self._asked.limit
        part = f"the first {limit} documents of each task are evaluated (--limit)"
        shown = self._loaded.showing_answers()
        answers = (
            f"the examples of {listed(shown, 5)} are drawn from the documents that are evaluated: a prompt "
            "may have its own document with the answer. Set fewshot_split in a YAML of your own"
        )
        return [*super().data_warnings(), *([part] if limit else []), *([answers] if shown else [])]

    def options(self) -> dict[str, Any]:
        asked = self._asked
        given = {name: getattr(asked, name) for name in (*_PROMPTS, *_ANSWERS) if hasattr(asked, name)}
        path = None if asked.include_path is None else str(asked.include_path.absolute())
        names = [metric.name for metric in self._metrics]
        return {**given, "metric": names, "tasks": [*asked.tasks], "include_path": path}

    def description(self) -> dict[str, str]:
        versions = [f"{name} (version {version})" for name, version in self._loaded.versions().items()]
        many = f", and {len(versions) - 5} more" if len(versions) > 5 else ""
        requests = sum(len(each.requests) for each in self._dataset.documents)
        return {
            "data": f"{', '.join(versions[:5])}{many}, {counted(requests, 'request')}",
            "harness": self._loaded.library(),
        }

    def fingerprint(self) -> dict[str, Any]:
        """Configuration of the tasks, with the source of their functions; the data set has the prompts."""
        groups = sorted(self._loaded.tree["groups"])
        return {**self._loaded.fingerprint(), "groups": groups, **self._of_answers()}
