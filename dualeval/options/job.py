"""Job: everything that defines a run, from flags and a TOML file, checked before anything is started."""

from __future__ import annotations

import os
import re
import shlex
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dualeval.errors import UsageError
from dualeval.messages import nearest
from dualeval.options.choices import columns_of_groups
from dualeval.options.evaluation import LAUNCH, EvaluationOptions
from dualeval.options.fields import Given, OptionField, as_json, check_fields, fields_of, flag_of, option
from dualeval.options.plugins import (
    BUILT_IN,
    DEFAULT_TASK,
    TaskKind,
    is_metric_of_no_task,
    made_task,
    task_kind,
)
from dualeval.tasks.options import TASKS

if TYPE_CHECKING:
    from dualeval.data.cache import DataCache
    from dualeval.tasks import Task


@dataclass(frozen=True, kw_only=True)
class Job(EvaluationOptions):
    """What to evaluate and how; ``Job.of`` makes one.

    Every field but the first two is also a flag of ``dualeval run`` and a key of a job file, and so is every
    field of ``options``. A task that has an option with the name of one of these fields gets its value.

    Attributes:
        kind: the kind of evaluation.
        options: the task's own, an object of ``kind.options_class``.
        device: "cpu", "cuda" or "cuda:N"; None takes a GPU where there is one.
    """

    kind: TaskKind
    options: Any
    device: str | None = option(None, "cpu, cuda or cuda:N.", group=LAUNCH, shown="a GPU if any")

    _sign: ClassVar[str] = "--"

    @property
    def task(self) -> str:
        """The task's name, as it was asked for."""
        return self.kind.name

    @property
    def metric_of_run(self) -> tuple[str, ...]:
        """Those chosen of what the task has and of others; empty where the task has chosen itself."""
        has_metric = "metric" in {field.name for field in self.kind.fields}
        return () if has_metric and len(_of_task(self.metric)) == len(self.metric) else self.metric

    @property
    def run_options(self) -> dict[str, Any]:
        """The options of ``Session.evaluate`` that are the job's; the device is its session's."""
        options = {field.name: getattr(self, field.name) for field in fields(EvaluationOptions)}
        if getattr(self.options, "limits_itself", False):
            options["limit"] = None
        return {**options, "metric": self.metric_of_run}

    @classmethod
    def of(cls, task: str = DEFAULT_TASK, **values: Any) -> Job:
        """Make a job of options by name: those of every run, and those of the task.

        Raises:
            UsageError: there is no such task, an option is unknown or missing, or a value is wrong.
        """
        return cls._made(task_kind(task), values)

    @classmethod
    def _made(cls, kind: TaskKind, values: Mapping[str, Any]) -> Job:
        fields = {field.name: field for field in kind.fields}
        shared = {name: value for name, value in values.items() if name in COMMON}
        options = {name: value for name, value in values.items() if name not in COMMON}
        for name in options:
            if name not in fields:
                raise _unknown(name, kind)
        for name in fields.keys() & COMMON.keys():
            if name in _TASKS_OWN_TOO and name not in shared:
                continue
            _check_kinds(kind, fields[name])
            options[name] = shared.get(name, COMMON[name].default)
        if options.get("keep") and kind.origin == BUILT_IN:
            # What else names a column of the data.
            others = (*columns_of_groups(shared.get("by", ())), shared.get("cluster"))
            options["keep"] = tuple(dict.fromkeys((*options["keep"], *filter(None, others))))
        if "metric" in fields:
            options["metric"] = _of_task(options["metric"])
        if missing := [field for name, field in fields.items() if field.is_required and name not in options]:
            needs = " and ".join(_flag_and_help(field) for field in missing)
            raise UsageError(f"--task {kind.name} needs {needs}.")
        if "seed" in fields and shared.get("sample") is None:
            shared.pop("seed", None)  # the task's alone
        # What every run has is checked first.
        job = cls(kind=kind, options=None, **shared)
        return replace(job, options=_options(kind, options))

    @classmethod
    def read(cls, path: Path | None, flags: Mapping[str, Any], texts: Mapping[str, str] | None = None) -> Job:
        """Make a job of a TOML file and flags; a flag that is given (not None, not empty; ``Given``) wins.

        Paths in the file count from the file's folder; ``texts`` are the task's options of ``-T name=text``.
        """
        name, job = cls.read_all(path, flags, texts)[0]
        if name is not None:
            raise UsageError(
                f"--config {path}: [[{MODELS_KEY}]] belongs to 'dualeval run'. Name one model here."
            )
        return job

    @classmethod
    def read_all(
        cls, path: Path | None, flags: Mapping[str, Any], texts: Mapping[str, str] | None = None
    ) -> list[tuple[str | None, Job]]:
        """As ``read``, of a file that may have several models, each in a table ``[[models]]``: name and job.

        A table has any options of the task, and those of every run that decide a number. It wins over what
        stands above the tables. A flag counts for all models, so that no table may have what a flag gives.
        Without such tables there is one job, whose name is None; a model without a name has "".
        """
        typed = {
            name: value.value if isinstance(value, Given) else value
            for name, value in flags.items()
            if value is not None and value != ()
        }
        content = _content(path)
        kind = task_kind(asked_task(path, typed.pop("task", None), content))
        of_texts = _of_texts(texts or {}, kind, typed)
        tables = None if path is None else _tables_of(path, content, kind)
        values = {} if path is None else _from_file(f"--config {path}", path, content, kind)
        typed = {**typed, **of_texts}
        if path is None or tables is None:
            return [(None, cls._made(kind, {**values, **typed}))]
        jobs = []
        for number, table in enumerate(tables, 1):
            where = f"--config {path}: model {number} of [[{MODELS_KEY}]]"
            options = _of_table(where, path, table, kind)
            name = options.pop(_NAME, "")
            if twice := options.keys() & typed.keys():
                flag = flag_of(min(twice))
                raise UsageError(f"{where} has {min(twice)}, and so does the command: leave out {flag}.")
            try:
                jobs.append((name, cls._made(kind, {**values, **options, **typed})))
            except UsageError as error:
                raise UsageError(f"{where}: {error}") from error
        return jobs

    def make_task(self, cache: DataCache | None = None) -> Task:
        """The task that is evaluated; models of one run share what is read in the ``cache``."""
        task = made_task(self.kind, self.options, cache)
        if self.kind.origin != BUILT_IN:
            # Before the user's own attributes of that name.
            object.__setattr__(task, "given_options", self._decisive())
        return task

    def _decisive(self) -> dict[str, Any]:
        """The task's options that may decide its numbers: no path does, nor what the run itself decides."""
        plain = as_json(self.options)
        return {
            field.name: plain[field.name]
            for field in self.kind.fields
            if field.is_settable
            and (field.name not in COMMON or field.name in _TASKS_OWN_TOO)
            and not _has_path(getattr(self.options, field.name))
        }

    def to_json(self) -> dict[str, Any]:
        """The job as plain JSON values, the task's options among them."""
        common = {key: getattr(self, key) for key in COMMON}
        values = as_json(self.options)
        of_task = {key: values[key] for key in _TASKS_OWN_TOO if key in values and common[key] in (None, ())}
        return {"task": self.task, **values, **common, **of_task, "metric": list(self.metric)}


def command_of(used: Mapping[str, Any]) -> str | None:
    """The command of a run of a built-in task, by the options that its result shows; None where none is.

    Its options are those that were used, defaults that followed from model and data among them.
    """
    if used.get("task") not in TASKS or used.get("weights") == _OF_MODULE:
        return None
    words = ["dualeval", "run", "--task", str(used["task"])]
    for field in (*task_kind(str(used["task"])).fields, *COMMON.values()):
        value = used.get(field.name)
        value = list(value) if isinstance(value, tuple) else value
        if value in (None, False, []) or value == field.default or field.flag in words:
            continue
        if value is True:
            words.append(field.flag)
        elif isinstance(value, list) and (field.is_repeated or field.name == "metric"):
            words += [word for each in value for word in (field.flag, str(each))]
        else:
            words += [field.flag, ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return shlex.join(words)


# What a result says of the weights of a module from Python, which no command names.
_OF_MODULE = "as the module has them"

# Older tasks use these names for options of their own, so a value is passed on only if the user gave one.
_TASKS_OWN_TOO = (
    *("sample", "seed", "cluster", "keep", "by", "bins"),
    *("layout", "optimize", "shard", "offload"),
)

# The options that every run has, by name.
COMMON = {field.name: field for field in fields_of(Job) if field.name not in ("kind", "options")}


@dataclass(frozen=True, kw_only=True)
class _Start:
    """What a job file may say of one start; no part of the job."""

    out: Path | None = option(None)
    reference: Path | None = option(None)
    nproc: int | None = option(None, least=1)
    logger: tuple[str, ...] = option(())


# The tables of a job file that name one model each, and what names a model in its table.
MODELS_KEY = "models"
_NAME = "name"
# What is every model's: where and how they are computed.
_OF_NO_MODEL = ("task", "device", "workers")

_START = {field.name: field for field in fields_of(_Start)}


def start_of(path: Path | None) -> dict[str, Any]:
    """``out``, ``reference``, ``nproc`` and ``logger`` of a job file, where they are in it.

    Paths count from its folder.
    """
    content = _content(path)
    start = {}
    for name in _START.keys() & content.keys():
        start[name] = _START[name].of_toml(content[name], f"--config {path}: {name}", Path(path or "").parent)
        _START[name].check(start[name])
    return start


def asked_task(path: Path | None, flag: str | None, content: Mapping[str, Any] | None = None) -> str:
    """The task that a flag or, without it, a job file asks for.

    A file of code in a job file counts from the job file's folder.
    """
    if flag is not None:
        return flag
    asked = (content or _content(path)).get("task", DEFAULT_TASK)
    if not isinstance(asked, str):
        raise UsageError(f"--config {path}: task = {asked!r}: expected a str, found a {type(asked).__name__}")
    file, colon, name = asked.rpartition(":")
    if path is not None and file.endswith(".py"):
        return f"{path.parent / file}{colon}{name}"
    return asked


def owners_of(name: str) -> list[str]:
    """The built-in tasks that have an option of this name."""
    return [task for task in TASKS if any(field.name == name for field in task_kind(task).fields)]


def refuse_foreign(name: str, task: str) -> None:
    """Refuse an option that belongs to another built-in task, and say to which."""
    if owners := owners_of(name):
        raise UsageError(
            f"{flag_of(name)} belongs to --task {owners[0]}, and the task is {task}. Leave it out, or give "
            f"--task {owners[0]}."
        )


def _unknown(name: str, kind: TaskKind) -> UsageError:
    refuse_foreign(name, kind.name)
    return UsageError(f"--task {kind.name} has no option {name!r}.{_nearest(name, kind)}")


def _nearest(name: str, kind: TaskKind) -> str:
    """The options of a task that are nearest to a name, and all of them."""
    names = [field.name for field in kind.fields if field.is_settable]
    return f"{nearest(name, names)} Its options: {', '.join(names) or 'none'}."


def _flag_and_help(field: OptionField) -> str:
    text = field.help.rstrip(".")
    return f"{field.flag} {field.metavar}" + (f" ({text[:1].lower()}{text[1:]})" if text else "")


def _options(kind: TaskKind, values: Mapping[str, Any]) -> Any:
    try:
        options = kind.options_class(**values)
    except (TypeError, ValueError) as error:
        # What the options' own __post_init__ refuses.
        raise UsageError(f"the options of --task {kind.name}: {error}") from error
    check_fields(options)
    return options


def _check_kinds(kind: TaskKind, field: OptionField) -> None:
    """Refuse an option of a task that has a run's option's name and another type."""
    expected = set(typing.get_args(COMMON[field.name].kind) or (COMMON[field.name].kind,)) - {type(None)}
    kinds = set(typing.get_args(field.kind) or (field.kind,)) - {type(None)}
    if field.kind is not Any and not expected & kinds and typing.get_origin(field.kind) not in (tuple, list):
        names = "/".join(getattr(each, "__name__", str(each)) for each in kinds)
        raise UsageError(
            f"--task {kind.name}: its option {field.name} is a {names}, but {field.flag} is an option of "
            "every run, whose value the task gets. Give its own another name."
        )


def _of_task(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of metrics that a task has to know itself."""
    return tuple(name for name in names if not is_metric_of_no_task(name))


def _has_path(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_has_path, value))
    if isinstance(value, str):
        # A text may begin like a path, as a prompt does, and decide the numbers.
        return value.startswith("/") and Path(value).exists()
    return isinstance(value, Path)


# -- -T and job files ----------------------------------------------------------------------------------


def texts_of(words: tuple[str, ...]) -> dict[str, str]:
    """The ``name=text`` of several -T, by the field's name."""
    texts: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or not name:
            raise UsageError(f"-T {word}: expected NAME=VALUE, as in -T threshold=0.5")
        if name in texts:
            raise UsageError(f"-T {name} is given twice: {name}={texts[name]} and {name}={text}")
        texts[name] = text
    return texts


def _of_texts(texts: Mapping[str, str], kind: TaskKind, typed: Mapping[str, Any]) -> dict[str, Any]:
    fields_by_name = {field.name: field for field in kind.fields}
    values = {}
    for name, text in texts.items():
        if name in COMMON or name == "task":
            raise UsageError(
                f"-T {name}={text}: {flag_of(name)} is an option of every run: {flag_of(name)} {text}"
            )
        if name not in fields_by_name:
            raise UsageError(
                f"-T {name}={text}: --task {kind.name} has no such option.{_nearest(name, kind)}"
            )
        if name in typed:
            raise UsageError(f"-T {name}={text} and {flag_of(name)} give the same option. Leave out one.")
        field = fields_by_name[name]
        if not field.is_settable:
            raise UsageError(
                f"-T {name}={text}: its type, {field.kind_name}, cannot be typed. Set it in Python."
            )
        values[name] = field.parse(text, f"-T {name}")
    return values


def _content(path: Path | None) -> dict[str, Any]:
    """What a job file says; nothing without one."""
    if path is None:
        return {}
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--config {path} is not valid TOML: {error}. Expected one option per line, as batch_size = 64"
        ) from error


def _tables_of(path: Path, content: dict[str, Any], kind: TaskKind) -> list[dict[str, Any]] | None:
    """Take the models out of a job file's content; None where it has none."""
    if MODELS_KEY not in content or MODELS_KEY in {field.name for field in kind.fields}:
        return None
    tables = content.pop(MODELS_KEY)
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise UsageError(
            f"--config {path}: {MODELS_KEY}: expected tables, each below a line [[{MODELS_KEY}]], as in "
            f'\n[[{MODELS_KEY}]]\nname = "first"\nweights = "first.pt"'
        )
    return tables


def _of_table(where: str, path: Path, table: Mapping[str, Any], kind: TaskKind) -> dict[str, Any]:
    """The options of one model, and its name where it has one."""
    options = {key: value for key, value in table.items() if key != _NAME}
    for key in options:
        if key.replace("-", "_") in (*_OF_NO_MODEL, *_START):
            raise UsageError(f"{where}: {key} is the same for all models: put it above the tables.")
    values = _from_file(where, path, options, kind)
    if _NAME in table:
        if not isinstance(table[_NAME], str) or not table[_NAME]:
            raise UsageError(f"{where}: name = {table[_NAME]!r}: expected a text")
        values[_NAME] = table[_NAME]
    return values


def _from_file(where: str, path: Path, content: Mapping[str, Any], kind: TaskKind) -> dict[str, Any]:
    fields = {field.name: field for field in kind.fields if field.is_settable}
    known = {**fields, **COMMON}
    values: dict[str, Any] = {}
    seen = set()
    for key, value in content.items():
        name = key.replace("-", "_")
        if name in seen:
            raise UsageError(f"{where}: {key!r} is there twice, with - and with _. Remove one.")
        seen.add(name)
        if name == "task" or name in _START:
            continue
        if name not in known:
            refuse_foreign(name, kind.name)
            names = ["task", *known, *_START]
            hint = nearest(name, names)
            raise UsageError(f"{where}: unknown key {key!r}.{hint} Keys: {', '.join(names)}")
        values[name] = known[name].of_toml(value, f"{where}: {key}", path.parent)
    return values


# -- several models ----------------------------------------------------------------------------------------

# What makes a path a pattern; and the option that may be one.
WILD, WEIGHTS = re.compile(r"[*?\[]"), "weights"


def is_several(jobs: Sequence[tuple[str | None, Job]]) -> bool:
    """Whether a command asks for several models: in tables of a job file, or by a pattern of weights."""
    return any(name is not None or pattern_of(job) is not None for name, job in jobs)


def pattern_of(job: Job) -> str | None:
    """The pattern that names the weights of a job; None where they are a file, or no path at all."""
    if job.kind.origin != BUILT_IN:
        return None
    text = getattr(job.options, WEIGHTS, None)
    return str(text) if text is not None and is_pattern(str(text)) else None


def is_pattern(text: str) -> bool:
    """Whether a path is a pattern, and none that is there under this very name."""
    return bool(WILD.search(text)) and not os.path.lexists(text)
