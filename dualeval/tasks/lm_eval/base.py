"""What both tasks on the harness's documents do: with a model, and with answers that are there already."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from dualeval.columns.ragged import Column, Ragged, Text
from dualeval.messages import counted, listed
from dualeval.metrics import Metric, RowMetric
from dualeval.metrics.metric import chosen
from dualeval.tasks import Task, place_of
from dualeval.tasks.lm_eval import figures as of
from dualeval.tasks.lm_eval.library import Loaded
from dualeval.tasks.lm_eval.requests import Requests
from dualeval.tasks.options.lm_eval import PromptOptions


class HarnessTask(Task):
    """Documents of the harness, and the figures of their answers."""

    name = "lm-eval"
    wants_workers = False
    # The metrics beside the figures.
    _counts: Sequence[Metric] = ()

    def _set_up(
        self, options: PromptOptions, loaded: Loaded, dataset: Requests, model: str, template: str | None
    ) -> None:
        """Keep what was loaded; ``model`` and ``template`` are named in the harness's files."""
        self._asked, self._loaded, self._dataset = options, loaded, dataset
        self._figures = of.Figures(loaded, options.bootstrap_iters, {"model": model, "template": template})
        self._metrics = chosen(options.metric, [self._figures, *self._counts])

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

    def _columns(self, samples: range, answers: Mapping[int, of.Answers]) -> dict[str, Column]:
        """The columns of consecutive documents; one without answers could not be read."""
        documents = [self._dataset.documents[index] for index in samples]
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
        return {
            of.TASK: Text(document.task for document in documents),
            of.DOCUMENT: torch.tensor([*samples], dtype=torch.int64),
            of.LOGLIKELIHOODS: Ragged(torch.cat(lls), torch.tensor([*map(len, lls)])),
            of.GREEDY: Ragged(torch.cat(greedy), torch.tensor([*map(len, greedy)])),
            of.GENERATED: Text(texts),
            **{name: torch.tensor(column, dtype=torch.float64) for name, column in values.items()},
        }

    def show(self, row: Mapping[str, Any]) -> dict[str, str]:
        """The requests of a document with their answers."""
        document = self._dataset.documents[place_of(self._dataset, row)]
        answers = of.answers_of(document, *(row[name] for name in of.ANSWERS))
        shown: dict[str, str] = {}
        for number, (request, of_request) in enumerate(zip(document.requests, answers, strict=True)):
            context, *more = request.args
            shown.setdefault("prompt", str(context))
            first = of_request[0]
            if request.request_type == of.GENERATE:
                shown[f"answer {number}"] = " | ".join(of_request)
            elif more:
                shown[f"continuation {number}"] = f"{more[0]} ({first[0]:.2f})"
            else:
                shown["log-likelihood"] = f"{first:.2f}"
        return shown

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
        given = {each.name: getattr(asked, each.name) for each in fields(PromptOptions)}
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
        return {**self._loaded.fingerprint(), "groups": sorted(self._loaded.tree["groups"])}
