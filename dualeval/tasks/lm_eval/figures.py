"""Answers become the harness's own figures: its ``evaluate``, with a model that only looks answers up."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualeval.atomic_files import write_text
from dualeval.errors import DualevalError, UsageError, with_type
from dualeval.messages import counted, listed
from dualeval.metrics import Mean, Measured, Ratio
from dualeval.metrics.means import BitsPerByte
from dualeval.metrics.metric import direction
from dualeval.metrics.scores import FRACTION
from dualeval.tasks.lm_eval.library import SEEDS, Document, Loaded, alone

ROLLING, GENERATE = "loglikelihood_rolling", "generate_until"
TASK, DOCUMENT = "task", "document"
LOGLIKELIHOODS, GREEDY, GENERATED = "loglikelihoods", "greedy", "generated"
ANSWERS = (LOGLIKELIHOODS, GREEDY, GENERATED)
# Of a request, one a repetition: (float, bool), float or str.
Answers = Sequence[Sequence[Any]]
# By the name of an aggregation of the harness, the metric of ours that has its value, which reads a column
# and, for two of them, the column of its divisors.
_OURS: Mapping[str, Callable[[str], Mean | Ratio]] = {
    "mean": Mean,
    "perplexity": lambda column: Mean(column, transform="exp", least=0),
    "weighted_perplexity": lambda column: Ratio(column, over(column), "exp", least=0),
    "bits_per_byte": lambda column: BitsPerByte(column, over(column)),
}
_DATE = "dualeval"
# What a filter of the library gives for a text of which it extracts nothing, unless its task says otherwise.
_INVALID = "[invalid]"
_REGEX = ("regex", "multi_choice_regex")
_NOT_EXTRACTED, _COUNT = "not_extracted", "count"
# Metrics between 0 and 1.
_FRACTIONS = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match")


def over(column: str) -> str:
    """The column that a column is divided by."""
    return f"{column}_over"


def named(metric: str, filter_name: str) -> str:
    """A metric's name of a filter, as that of a column."""
    return metric if filter_name == "none" else f"{metric},{filter_name}"


def _is_divided(aggregation: str) -> bool:
    return aggregation in ("weighted_perplexity", "bits_per_byte")


class Figures:
    """The figures of tasks and groups: a metric of all rows."""

    name = "harness"

    def __init__(self, loaded: Loaded, bootstrap_iters: int, config: Mapping[str, Any]) -> None:
        self._loaded = loaded
        self._iterations = bootstrap_iters
        self._config = config
        self._by_task = {name: _columns_of(task) for name, task in loaded.tasks.items()}
        self._fallbacks = {name: _fallbacks_of(task) for name, task in loaded.tasks.items()}
        # Those of all tasks, with the divisors.
        self.value_columns = tuple(
            dict.fromkeys(
                each
                for columns in self._by_task.values()
                for name, aggregation in columns.items()
                for each in (name, *[over(name)] * _is_divided(aggregation))
            )
        )
        self.columns = (TASK, DOCUMENT, *ANSWERS, *self.value_columns)
        # The results of the most documents so far, for the files, of which answers: groups may follow.
        self._last: tuple[dict[str, Any], Sequence[str]] = {}, ()
        self._digest, self._most = b"", 0

    def fingerprint(self) -> dict[str, Any]:
        return {"bootstrap_iters": self._iterations}

    def values(self, indices: Iterable[int], answers: Mapping[int, Answers]) -> dict[str, list[float]]:
        """The value columns of some documents; NaN where a document's task has no such value."""
        made: dict[str, list[float]] = {name: [] for name in self.value_columns}
        found: dict[int, dict[str, Any]] = {index: {} for index in answers}
        with self._only(answers) as tasks, alone():
            for name, indices_of_task in tasks.items():
                task = self._loaded.tasks[name]
                with _blaming(f"task {name}: its filters fail"):
                    task.apply_filters()
                for filter_name in task.instances[0].filtered_resps:
                    for index in indices_of_task:
                        requests = self._loaded.documents[index].requests
                        filtered = [each.filtered_resps[filter_name] for each in requests]
                        values = self._processed(index, filtered)
                        if index == indices_of_task[0]:
                            self._check_again(index, filtered, values)
                        found[index] |= {named(key, filter_name): value for key, value in values.items()}
                        if fallbacks := self._fallbacks[name].get(filter_name):
                            texts = [t for f in filtered for t in ([f] if isinstance(f, str) else f)]
                            found[index][named(_NOT_EXTRACTED, filter_name)] = sum(
                                text in fallbacks for text in texts
                            )
        for index in indices:
            of_document, columns = found.get(index, {}), self._by_task[self._loaded.documents[index].task]
            numbers = dict.fromkeys(self.value_columns, float("nan"))
            for name in (each for each in columns if each in of_document):
                value = of_document[name]
                if _is_divided(columns[name]):
                    value, numbers[over(name)] = value
                # Log-likelihoods have the other sign, as losses.
                sign = 1 if columns[name] in ("mean", _COUNT) else -1
                numbers[name] = sign * _number(self._loaded.documents[index].task, name, value)
            for name, number in numbers.items():
                made[name].append(number)
        return made

    def _processed(self, index: int, filtered: Sequence[Any]) -> dict[str, Any]:
        """The values of a document's filtered answers."""
        document = self._loaded.documents[index]
        task = self._loaded.tasks[document.task]
        with _blaming(f"task {document.task}: {_scoring(task)} fails on document {document.number}"):
            values: dict[str, Any] = task.process_results(document.requests[0].doc, [*filtered])
        return values

    def _check_again(self, index: int, filtered: Sequence[Any], values: Mapping[str, Any]) -> None:
        """Refuse code that gives other values the second time: figures would follow from the order."""
        if repr(self._processed(index, filtered)) != repr(values):
            name = self._loaded.documents[index].task
            raise UsageError(
                f"task {name}: {_scoring(self._loaded.tasks[name])} gives other values when it is called "
                "again for the same document and answers: it keeps a state, or draws random numbers. Write "
                "it without."
            )

    def compute(self, columns: Mapping[str, Any]) -> Measured:
        """The harness's figures, with our intervals where a figure follows from each document's value."""
        indices = columns[DOCUMENT].tolist()
        rows = zip(indices, *(columns[name] for name in ANSWERS), strict=True)
        answers = {
            index: answers_of(self._loaded.documents[index], lls.tolist(), greedy.tolist(), text)
            for index, lls, greedy, text in rows
        }
        digest = hashlib.sha256(repr(answers).encode()).digest()
        if digest != self._digest:
            is_whole = len(answers) == len(self._loaded.documents)
            results, warnings = self._evaluate(answers, self._iterations if is_whole else 0)
        else:  # of one batch alone, which was tried before
            results, warnings = self._last
        if len(answers) >= self._most:
            self._digest, self._last, self._most = digest, (results, warnings), len(answers)
        if nan := sum(bool(np.isnan(each).any()) for each in columns[LOGLIKELIHOODS]):
            warnings = [
                *warnings,
                f"{counted(nan, 'document')} with a log-likelihood that is NaN: the harness takes such a "
                "choice for the likeliest, so the figures mean nothing. Give --precision fp32 or bf16, or "
                "look for NaN in the weights",
            ]
        measured = Measured(values={}, warnings=tuple(warnings))
        tasks = np.asarray([*columns[TASK]])
        for name, figures in {**results["results"], **results.get("groups", {})}.items():
            for of_harness, value in figures.items():
                metric, comma, filter_name = of_harness.partition(",")
                if not comma or not isinstance(value, (int, float, np.number)):
                    continue
                column = named(metric, filter_name)
                key = f"{name}/{column}"  # never split: each part may have a slash
                measured.values[key] = value  # type: ignore[assignment]
                better = results["higher_is_better"].get(name, {}).get(metric)
                if better is not None:
                    measured.directions[key] = direction(better)
                self._estimate(measured, (name, metric, column), columns, tasks)
        for name, kinds in self._by_task.items():
            for column in (each for each, kind in kinds.items() if kind == _COUNT):
                measured.values[f"{name}/{column}"] = int(np.asarray(columns[column])[tasks == name].sum())
        return measured

    def _estimate(
        self,
        measured: Measured,
        figure: tuple[str, str, str],
        columns: Mapping[str, Any],
        tasks: np.ndarray[Any, Any],
    ) -> None:
        """If a figure follows from each document's value, say how, with an interval."""
        name, metric_name, column = figure
        key, members = f"{name}/{column}", self._members(*figure)
        aggregation = {self._by_task[each].get(column) for each in members} - {None}
        if len(aggregation) != 1:
            return
        of_mean = aggregation == {"mean"}
        metric = _OURS[str(aggregation.pop())](column)
        rows = np.isin(tasks, members)
        numbers = {each: torch.from_numpy(np.asarray(columns[each])[rows]) for each in metric.columns}
        if bool(numbers[column].isnan().any()):  # some documents have no such value
            return
        if is_fraction := metric_name in _FRACTIONS:
            measured.units[key] = FRACTION
        ones = (of := numbers[column]) == 1
        # Of another mean, 0 everywhere says nothing of how far others may be.
        if of_mean and (is_fraction or bool(ones.any())) and bool((of == 0).logical_or(ones).all()):
            numbers = {column: ones}
        ledger = torch.zeros(metric.size, dtype=torch.int64)
        metric.update(ledger, numbers)
        ours = metric.compute(ledger)
        for ends in ours.intervals.values():
            measured.intervals[key] = ends
        for why in ours.rough.values():
            measured.rough[key] = why
        measured.scores[key] = replace(metric.score, where=TASK, where_is=members)

    def _members(self, name: str, metric: str, column: str) -> tuple[str, ...]:
        """The tasks whose documents a figure is the mean of; none for a group that weighs them otherwise."""
        if name in self._loaded.tasks:
            return (name,)
        group = self._loaded.tree["groups"][name]
        weighs = {each.metric: each.weight_by_size for each in group.aggregate_metric_list or ()}
        members = tuple(task.task_name for task in group.get_all_tasks())
        of_means = all(self._by_task[member].get(column) == "mean" for member in members)
        return members if of_means and weighs.get(metric) else ()

    # -- the harness itself ------------------------------------------------------------------------------

    @contextmanager
    def _only(self, answers: Mapping[int, Answers]) -> Iterator[dict[str, list[int]]]:
        """Have the library's tasks hold these documents alone, answered; yields their indices by task."""
        chosen: dict[str, list[int]] = {}
        for index in sorted(answers):
            chosen.setdefault(self._loaded.documents[index].task, []).append(index)
        whole = {name: [*self._loaded.tasks[name].instances] for name in chosen}
        try:
            for name, indices in chosen.items():
                task, documents = self._loaded.tasks[name], [self._loaded.documents[each] for each in indices]
                task.instances[:] = [request for each in documents for request in each.requests]
                for index, document in zip(indices, documents, strict=True):
                    for request, answer in zip(document.requests, answers[index], strict=True):
                        request.resps, request.filtered_resps = [*answer], {}
                task.build_all_requests = lambda **_: None
                pairs = [(each.number, each.requests[0].doc) for each in documents]
                task.doc_iterator = lambda pairs=pairs, **_: iter(pairs)
            yield chosen
        finally:
            for name, requests in whole.items():
                task = self._loaded.tasks[name]
                task.instances[:] = requests
                for added in {"build_all_requests", "doc_iterator"} & vars(task).keys():
                    delattr(task, added)

    def _evaluate(
        self, answers: Mapping[int, Answers], iterations: int
    ) -> tuple[dict[str, Any], Sequence[str]]:
        """The library's results for these documents, and what it warned of."""
        import lm_eval
        from lm_eval.api import metrics

        with self._only(answers) as chosen, alone() as said:
            tasks = {name: self._loaded.tasks[name] for name in chosen}
            known = {
                name: group
                for name, group in self._loaded.tree["groups"].items()
                if all(task.task_name in tasks for task in group.get_all_tasks())
            }
            before, metrics.bootstrap_stderr = metrics.bootstrap_stderr, _bootstrap
            try:
                with _blaming(f"lm_eval cannot compute the figures of {listed(tasks)}"):
                    results = lm_eval.evaluate(
                        _looking_up([request for task in tasks.values() for request in task.instances]),
                        {"tasks": tasks, "groups": known},
                        bootstrap_iters=iterations,
                        log_samples=len(answers) >= self._most,
                    )
            finally:
                metrics.bootstrap_stderr = before
        return results, [f"lm_eval: {text.strip().splitlines()[0]:.200}" for text in dict.fromkeys(said)][:5]

    # -- files as the harness writes them ----------------------------------------------------------------

    def files(self) -> dict[str, Callable[[Path], None]]:
        """The harness's files by name, and what writes each, behind ``compute``."""
        samples = {
            f"samples_{_plain(name)}_{_DATE}.jsonl": partial(self._write_samples, name)
            for name in self._by_task
        }
        return {f"results_{_DATE}.json": self._write_results, **samples}

    def _write_results(self, path: Path) -> None:
        results = self._last[0]
        asked, model = self._loaded.asked, f"pretrained={self._config['model']}"
        parts = {key: value for key, value in results.items() if key != "samples"}
        config = {"model": "dualeval", "model_args": model, "limit": asked.limit, **SEEDS}
        config["bootstrap_iters"] = self._iterations

        def save(tracker: Any) -> None:
            tracker.general_config_tracker.log_experiment_args(
                "dualeval", model, asked.system, self._config["template"], asked.fewshot_as_multiturn
            )
            tracker.save_results_aggregated({**parts, "config": config}, results["samples"])

        content = json.loads(_saved(save, path))
        del content["total_evaluation_time_seconds"]  # the same bits from the same answers
        write_text(path, json.dumps(content, indent=2, ensure_ascii=False))

    def _write_samples(self, name: str, path: Path) -> None:
        samples = self._last[0]["samples"].get(name)

        def save(tracker: Any) -> None:
            tracker.date_id = _DATE  # else of save_results_aggregated, which hashes all samples
            tracker.save_results_samples(name, [dict(each) for each in samples])

        # None: no document of this task was drawn.
        write_text(path, "" if samples is None else _saved(save, path))


@contextmanager
def _blaming(sentence: str) -> Iterator[None]:
    """Say whose code fails: a task's, and not the model's."""
    try:
        yield
    except Exception as error:
        raise UsageError(f"{sentence}: {with_type(error)}") from error


def _scoring(task: Any) -> str:
    """What makes values of a task's answers, in words."""
    function = task.config.process_results
    return f"{function.__module__}.{function.__name__}" if inspect.isfunction(function) else "its scoring"


def _number(task: str, metric: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(
            f"task {task}: the metric {metric} gives {value!r:.40} for a document, expected a number: it may "
            "not be for such requests. Name another one, such as exact_match for texts, in a YAML of your "
            "own that includes the task's."
        ) from None


def _saved(save: Callable[[Any], None], path: Path) -> str:
    """The file that the harness's tracker saves, which is to be ``path``."""
    from lm_eval.loggers import EvaluationTracker

    with tempfile.TemporaryDirectory() as folder, alone() as said:
        save(EvaluationTracker(output_path=str(Path(folder) / "results.json")))
        written = [*Path(folder).iterdir()]
        if said or not written:
            raise DualevalError(f"lm_eval cannot write {path.name}: {'; '.join(said)}")
        return written[0].read_text("utf-8")


def _columns_of(task: Any) -> dict[str, str]:
    """The values of a document that a figure of ours can follow from: column to aggregation."""
    from lm_eval.api.registry import get_aggregation

    names = {get_aggregation(name): name for name in _OURS}
    filters = [each["name"] for each in getattr(task.config, "filter_list", None) or ()] or ["none"]
    known = {metric: names.get(function) for metric, function in task.aggregation().items()}
    counts = {named(_NOT_EXTRACTED, each): _COUNT for each in _fallbacks_of(task)}
    return {
        **{named(metric, each): name for metric, name in known.items() if name for each in filters},
        **counts,
    }


def _fallbacks_of(task: Any) -> dict[str, list[Any]]:
    """By filter what it gives for a text of which it extracts nothing."""
    found: dict[str, list[Any]] = {}
    for each in getattr(task.config, "filter_list", None) or ():
        for step in each["filter"]:
            function = step["function"]
            # Those of tasks' own code are subclasses, by their names.
            if function in _REGEX or (callable(function) and "regex" in str(function).lower()):
                found.setdefault(each["name"], []).append(step.get("fallback", _INVALID))
    return found


def answers_of(document: Document, lls: Sequence[float], greedy: Sequence[bool], generated: str) -> Answers:
    """A document's answers as the harness takes them, of what its row has."""
    pairs = iter(zip(lls, greedy, strict=True))
    count = sum(each.repeats for each in document.requests if each.request_type == GENERATE)
    texts = iter([generated] if count == 1 else json.loads(generated or "[]"))
    answers = []
    for request in document.requests:
        if request.request_type == GENERATE:
            answers.append([next(texts) for _ in range(request.repeats)])
        else:
            pair = next(pairs)
            answers.append([pair[0] if request.request_type == ROLLING else pair] * request.repeats)
    return answers


def generated_text(texts: Sequence[str]) -> str:
    """A row's texts as ``answers_of`` reads them: one as it is, others as JSON."""
    return texts[0] if len(texts) == 1 else json.dumps([*texts], ensure_ascii=False) if texts else ""


def _looking_up(requests: Sequence[Any]) -> Any:
    """A model of the library's kind that gives each request the answers that it has already."""
    from lm_eval.api.model import LM

    given = {id(each): iter(each.resps) for each in requests}
    for each in requests:
        each.resps = []

    class LookingUp(LM):  # type: ignore[misc]
        def loglikelihood(self, requests: list[Any]) -> list[Any]:
            return [next(given[id(each)]) for each in requests]

        loglikelihood_rolling = generate_until = loglikelihood

    return LookingUp()


def _bootstrap(statistic: Callable[[Any], float], values: Sequence[Any], iters: int) -> float:
    """As the library's own, with its draws, whose processes would be copies of this one with its threads."""
    from lm_eval.api.metrics import perplexity, sample_stddev

    size, count = min(1000, iters), len(values)
    found: list[float] = []
    numbers = np.asarray(values, np.float64) if statistic is perplexity else None
    for seed in range(iters // size):
        _, state, _ = random.Random(seed).getstate()
        drawn = np.random.RandomState()
        drawn.set_state(("MT19937", np.array(state[:-1], np.uint32), state[-1], 0, 0.0))
        for _ in range(size):
            # As random.choices draws them.
            places = (drawn.random_sample(count) * count).astype(np.int64)
            if numbers is not None:
                found.append(math.exp(-numbers[places].mean()))
            else:
                found.append(statistic([values[place] for place in places.tolist()]))
    return float(sample_stddev(found))


def _plain(name: str) -> str:
    return "".join(each if each.isascii() and (each.isalnum() or each in "-_") else "_" for each in name)
