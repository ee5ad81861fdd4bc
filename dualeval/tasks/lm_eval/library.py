"""The tasks of lm-evaluation-harness: checked before code of theirs runs, then loaded with their requests."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import logging
import random
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualeval.data.cache import DataCache
from dualeval.errors import UsageError
from dualeval.messages import did_you_mean, listed
from dualeval.models.model_errors import first_line
from dualeval.tasks.options.lm_eval import PromptOptions

PACKAGE = "lm_eval"
# As the harness seeds Python's, numpy's and torch's numbers, and draws its examples.
SEEDS = {"random_seed": 0, **dict.fromkeys(("numpy_seed", "torch_seed", "fewshot_seed"), 1234)}
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Of a task's configuration: paths and the names of data. What is read there is in the identity.
_PLACES = ("dataset_path", "dataset_name", "dataset_kwargs")
# Where libraries keep whether they may use a network.
_SWITCHES = (
    ("huggingface_hub.constants", "HF_HUB_OFFLINE"),
    ("datasets.config", "HF_HUB_OFFLINE"),
    ("evaluate.config", "HF_EVALUATE_OFFLINE"),
)
# Compiled templates that are kept: texts of documents may be templates, too.
_TEMPLATES = 256

# -- the library, quiet and without a network ------------------------------------------------------------


def check_installed() -> None:
    if importlib.util.find_spec(PACKAGE) is None:
        raise UsageError(
            "--task lm-eval needs lm-evaluation-harness, which is not installed. Type: pip install "
            "'dualeval[lm-eval]'"
        )


class _OtherThreads(io.TextIOBase):
    """A stream that drops what this thread writes: progress bars, and what the harness prints."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else int(self._stream.write(text))

    def flush(self) -> None:
        self._stream.flush()


class _Kept(logging.Handler):
    """Takes the library's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def alone() -> Iterator[list[str]]:
    """Let the library work: seeded as by itself, without output, and without a network.

    Yields the warnings that it logs.
    """
    logger, kept = logging.getLogger(PACKAGE), _Kept()
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(kept)
    from lm_eval.utils import env

    changes: list[tuple[Any, str, Any]]
    changes = [(sys.modules[name], switch, True) for name, switch in _SWITCHES if name in sys.modules]
    # The library compiles a template anew for each document, and each example in its prompt.
    changes.append((env, "from_string", lru_cache(_TEMPLATES)(env.from_string)))
    before = [getattr(owner, name) for owner, name, _ in changes]
    of_numpy, of_python = np.random.get_state(), random.getstate()
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(_OtherThreads(sys.stdout)))
        stack.enter_context(redirect_stderr(_OtherThreads(sys.stderr)))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of statistics of few documents
        random.seed(SEEDS["random_seed"])
        np.random.seed(SEEDS["numpy_seed"])
        torch.manual_seed(SEEDS["torch_seed"])
        try:
            for owner, name, value in changes:
                setattr(owner, name, value)
            yield kept.texts
        finally:
            for (owner, name, _), value in zip(changes, before, strict=True):
                setattr(owner, name, value)
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            logger.removeHandler(kept)
            logger.propagate = propagates


# -- what is asked for, and whose code it names ----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Leaf:
    """A task as its files have it: nothing of it is imported."""

    name: str
    config: Mapping[str, Any]
    # Its file, and those of the groups that lead to it.
    files: tuple[Path, ...]


def _leaves(index: Mapping[str, Any], member: Any, more: Mapping[str, Any], files: Any) -> Iterator[_Leaf]:
    """The tasks that a name or an entry of a group stands for; KeyError names one that is not there."""
    item = {"task": member} if isinstance(member, str) else dict(member)
    name = item.pop("group", None) or item["task"]
    entry = index.get(name) if isinstance(name, str) else None
    if entry is None:
        if isinstance(item.get("task"), list):
            inherited = {**more, **{k: v for k, v in item.items() if k != "task"}}
            for each in item["task"]:
                yield from _leaves(index, each, inherited, files)
        elif len(item) == 1:
            raise KeyError(name)
        else:  # a task that a group defines itself
            yield _Leaf(name=name, config={**more, **item}, files=files)
        return
    files = (*files, entry.yaml_path) if entry.yaml_path else files
    item.pop("task", None)
    kind = entry.kind.name
    if kind in ("TAG", "GROUP"):
        members = sorted(entry.tags) if kind == "TAG" else entry.cfg.get("task") or ()
        for each in members:
            yield from _leaves(index, each, {**more, **item}, files)
    else:
        yield _Leaf(name=name, config={**(entry.cfg or {}), **more, **item}, files=files)


def _code_in(path: Path, seen: set[Path]) -> Iterator[str]:
    """The functions that a file outside the library names, those of what it includes too."""
    import yaml  # type: ignore[import-untyped]

    path = path.resolve()
    if path in seen or Path(_folder()) in path.parents:
        return
    seen.add(path)
    nodes = [yaml.compose(path.read_text("utf-8"), Loader=yaml.SafeLoader)]
    for node in nodes:  # grows
        if node.tag == "!function":
            yield f"{node.value} ({path})"
        for part in node.value if isinstance(node.value, list) else ():
            nodes += part if isinstance(part, tuple) else [part]
            if isinstance(part, tuple) and part[0].value == "include":
                named = part[1].value if isinstance(part[1].value, list) else [part[1]]
                for each in named:
                    yield from _code_in(path.parent / each.value, seen)


def _folder() -> str:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations is not None
    return str(Path(spec.submodule_search_locations[0]).resolve())


def _check(leaves: Sequence[_Leaf], trust: bool) -> None:
    """Refuse what must not run, and what would be fetched, before anything is imported."""
    from lm_eval.api.registry import get_metric, metric_registry

    get_metric("acc")  # the registry is filled when it is first asked
    seen: set[Path] = set()
    code = [each for leaf in leaves for file in leaf.files for each in _code_in(file, seen)]
    if code and not trust:
        raise UsageError(
            f"the tasks name functions of their own folder, which would be run: {listed(code, 3)}. Give "
            "--trust-tasks if you trust their author."
        )
    for leaf in leaves:
        if leaf.config.get("unsafe_code"):
            raise _unsafe(leaf.name)
        metrics = () if leaf.config.get("process_results") else leaf.config.get("metric_list") or ()
        named = [each.get("metric") for each in metrics]
        fetched = [
            name
            for name, each in zip(named, metrics, strict=True)
            if isinstance(name, str)
            and not (Path(name).is_absolute() or "." in name)
            and (each.get("hf_evaluate") is True or name not in metric_registry)
        ]
        if fetched:
            raise UsageError(
                f"task {leaf.name}: the metric {listed(fetched)} is not the harness's own: it would fetch it "
                "from a hub and run it. Write it as a function beside the task's YAML (metric: !function "
                "utils.NAME)."
            )


def _unsafe(name: str) -> UsageError:
    return UsageError(
        f"task {name} runs the code that the model writes (unsafe_code), on this machine. That is not done "
        "here: run it with lm_eval itself, in a container. Leave it out."
    )


# -- loaded ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Document:
    """A document of a task, with its requests."""

    task: str
    number: int
    requests: tuple[Any, ...]

    @property
    def name(self) -> str:
        return f"{self.task}/{self.number}"


class Loaded:
    """The tasks that were asked for, and all their requests, as one process of the harness has them."""

    def __init__(
        self, asked: PromptOptions, template: Callable[..., str] | None = None, cache: DataCache | None = None
    ) -> None:
        """``template`` is how a list of messages is written, and whether the model's turn begins."""
        check_installed()
        self.asked, self._template = asked, template
        with alone():
            manager, names, self.leaves = _chosen(asked, cache or DataCache())
            _check(self.leaves, asked.trust_tasks)
            try:
                self.tree = manager.load(names)
                self.tasks: dict[str, Any] = self.tree["tasks"]
                self._build()
            except UsageError:
                raise
            except Exception as error:
                raise self._refused(error) from error
        self.documents = [
            Document(task=name, number=number, requests=tuple(of_one))
            for name, task in self.tasks.items()
            for number, of_one in _by_document(task.instances).items()
        ]

    def _build(self) -> None:
        asked = self.asked
        for name, task in self.tasks.items():
            if getattr(task, "UNSAFE_CODE", False):
                raise _unsafe(name)
            if getattr(task, "MULTIMODAL", False):
                raise UsageError(f"task {name} has pictures or sound, which no language model takes here.")
            own = task.get_config("num_fewshot")
            if asked.num_fewshot is None or own == 0:  # the harness never changes a task's own 0
                task.set_config("num_fewshot", own or 0)
            else:
                task.set_config("num_fewshot", asked.num_fewshot)
            task.set_fewshot_seed(SEEDS["fewshot_seed"])
            task.build_all_requests(
                limit=asked.limit,
                rank=0,  # on every rank: its few-shot examples depend on the number of ranks
                world_size=1,
                system_instruction=asked.system,
                apply_chat_template=asked.apply_chat_template,
                fewshot_as_multiturn=asked.apply_chat_template and asked.fewshot_as_multiturn,
                chat_template=self._template,
            )

    def showing_answers(self) -> list[str]:
        """The tasks whose prompts may have the document itself, with its answer, as an example."""
        return [name for name, task in self.tasks.items() if _draws_itself(task)]

    def _refused(self, error: Exception) -> UsageError:
        paths = {leaf.name: leaf.config.get("dataset_path") for leaf in self.leaves}
        text = first_line(error)
        name = next((name for name, path in paths.items() if path and str(path) in text), None)
        if name is None:
            kind = type(error).__name__
            return UsageError(f"lm_eval cannot load {listed(self.asked.tasks)}: {kind}: {text}")
        return UsageError(
            f"task {name}: its data {paths[name]} are not in the cache of this machine ({text}). Nothing is "
            'fetched: load them once where there is a network (python -c "import datasets; '
            f"datasets.load_dataset('{paths[name]}')\"), or name a local copy in a YAML of your own, as in "
            "docs/lm-eval.md."
        )

    def expected(self, document: Document) -> list[str]:
        """The right answers to a document, or the right choices as texts; none where its task names none.

        Of a request to score one text this is that text: nothing more is known.
        """
        task, first = self.tasks[document.task], document.requests[0]
        is_one_text = len(document.requests) == 1 and first.request_type.startswith("loglikelihood")
        if is_one_text or task.config.doc_to_target is None:
            return []
        with alone():
            # As ``process_results`` in lm_eval/api/task.py.
            right = (task.doc_to_text if task.multiple_input else task.doc_to_target)(first.doc)
            choices = None if task.config.doc_to_choice is None else task.doc_to_choice(first.doc)
        found = right if isinstance(right, list) else [right]
        if choices is not None:
            # -100 stands for an answer that nobody knows.
            places = [each for each in found if isinstance(each, str) or 0 <= each < len(choices)]
            found = [each if isinstance(each, str) else choices[each] for each in places]
        return [text for text in map(str, found) if text.strip()]

    def versions(self) -> dict[str, Any]:
        return {name: task.VERSION for name, task in self.tasks.items()}

    def library(self) -> str:
        from importlib.metadata import version

        return f"lm_eval {version(PACKAGE)}"

    def fingerprint(self) -> dict[str, Any]:
        """By task its configuration with the source of its functions; where files lie is no part of it."""
        tasks = {name: _identity(task) for name, task in self.tasks.items()}
        return {"library": self.library(), "tasks": tasks, "versions": as_text(self.versions())}


def _chosen(asked: PromptOptions, cache: DataCache) -> tuple[Any, list[str], list[_Leaf]]:
    """What finds tasks, and what it has found: in the caller's folder if that has all, else in all (15 s)."""
    from lm_eval.tasks import TaskManager

    own = asked.include_path
    if path := next((each for each in asked.tasks if each.endswith((".yaml", ".yml"))), None):
        raise UsageError(f"--tasks {path}: give the name in it, and its folder with --include-path.")
    if own is not None:
        if not own.is_dir():
            raise UsageError(f"--include-path {own}: expected a folder with YAML files of tasks.")
        manager = TaskManager(include_path=str(own), include_defaults=False)
        with suppress(UsageError):
            return (manager, *_found(manager, asked))
    path = None if own is None else str(own)
    manager = cache.once(("lm-eval", own), lambda: TaskManager(include_path=path))
    return (manager, *_found(manager, asked))


def _found(manager: Any, asked: PromptOptions) -> tuple[list[str], list[_Leaf]]:
    names = [name for each in asked.tasks for name in _matching(manager, each)]
    try:
        return names, [leaf for name in names for leaf in _leaves(manager.task_index, name, {}, ())]
    except KeyError as error:
        raise UsageError(
            f"--tasks {','.join(asked.tasks)}: a group names {error.args[0]!r}, and there is no such task, "
            "group or tag. Correct its YAML file, or give the folder of that task with --include-path."
        ) from error


def _matching(manager: Any, name: str) -> list[str]:
    found: list[str] = manager.match_tasks([name])
    if found:
        return found
    raise UsageError(
        f"--tasks {name}: there is no such task, group or tag; 'lm_eval ls tasks' lists all."
        f"{did_you_mean(name, manager.all_tasks)}"
    )


def _draws_itself(task: Any) -> bool:
    """As ``fewshot_context`` in lm_eval/api/task.py: examples are from the split that is evaluated, and the
    document is left out of them only where their split is named as the test split is.
    """
    config, few = task.config, getattr(task, "fewshot_cfg", None)
    if few is None or not config.num_fewshot or few.split == config.test_split:
        return False
    if few.split is None and few.samples is not None:
        return False
    splits = (config.training_split, config.validation_split, config.test_split)
    drawn = few.split or next((each for each in splits if each is not None), None)
    return bool(drawn == (config.test_split or config.validation_split))


def _by_document(requests: Sequence[Any]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for each in requests:
        found.setdefault(each.doc_id, []).append(each)
    return {number: sorted(found[number], key=lambda each: each.idx) for number in sorted(found)}


def _identity(task: Any) -> str:
    config = {name: value for name, value in task.dump_config().items() if name not in _PLACES}
    config["metadata"] = {k: v for k, v in (config.get("metadata") or {}).items() if k != "config_source"}
    digest = hashlib.sha256(_ADDRESS.sub("", as_text(config)).encode())
    files = {_file_of(value) for value in (type(task), *_functions(task.config))}
    for path in sorted(path for path in files if path is not None):
        digest.update(hashlib.sha256(Path(path).read_bytes()).digest())
    return digest.hexdigest()


def _functions(value: Any) -> Iterator[Any]:
    if callable(value):
        yield value
    held = vars(value) if is_dataclass(value) and not isinstance(value, type) else value
    for each in held.values() if isinstance(held, dict) else held if isinstance(held, list) else ():
        yield from _functions(each)


def _file_of(function: Any) -> str | None:
    """The file of a function's module: what it calls there decides, too."""
    return getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None)


def as_text(value: Any) -> str:
    """A document or configuration as JSON, and what JSON has not as its text."""
    return json.dumps(value, sort_keys=True, default=str)
