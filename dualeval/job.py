"""Job: everything that defines a run, from flags and a TOML file, checked before anything is started."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dualeval.choices import (
    DATA_FINGERPRINTS,
    ON_ERROR,
    PRECISIONS,
    check_choice,
    check_count,
    check_mean,
    check_std,
)
from dualeval.errors import UsageError
from dualeval.weights_name import is_published_name

# The options that have a meaning for one task only.
OPTIONS = {
    "image-classification": frozenset(
        ("num_classes", "resize", "crop", "interpolation", "mean", "std", "download", "data_fingerprint")
    ),
    "question-answering": frozenset(
        ("max_length", "stride", "n_best", "max_answer_length", "null_threshold")
    ),
}
TASKS = tuple(OPTIONS)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to evaluate and how. Every field is also a flag of ``dualeval run`` and a key of a job file.

    Attributes:
        task: the kind of evaluation, one of ``TASKS``.
        model: the model's name, or its folder; None is the embedded job's.
        weights: a path, the name of weights that torchvision publishes ("DEFAULT", "IMAGENET1K_V1") or
            "random:SEED"; None is the embedded job's, or what the model's folder holds.
        weights_key: where the state_dict lies in a checkpoint, nested keys with dots between; None finds it.
        weights_prefix: take only the tensors whose names begin with this, without it.
        data: the data folder or file; None is the embedded job's.
        num_classes: number of classes, where neither data nor weights tell.
        resize: side in pixels that images are resized to; None is the model's own, as for the next four.
        crop: side in pixels of the crop from the centre.
        interpolation: how images are resized.
        mean: per channel.
        std: per channel.
        max_length: most tokens of a window; None is the task's own, as for the next four.
        stride: tokens that windows of a long text share.
        n_best: starts and ends of a window that are paired.
        max_answer_length: most tokens of an answer.
        null_threshold: how much better "no answer" must be to be the answer.
        metric: names of metrics; empty for the task's default ones.
        batch_size: samples a batch.
        limit: evaluate only the first samples.
        precision: one of ``choices.PRECISIONS``.
        device: "cpu", "cuda" or "cuda:N"; None takes a GPU where there is one.
        workers: reading processes of each rank; None decides by task and cores.
        on_error: what a sample that cannot be read does, one of ``choices.ON_ERROR``.
        download: whether weights that torchvision publishes may be fetched.
        data_fingerprint: which bytes of image files tell one data set from another, one of
            ``choices.DATA_FINGERPRINTS``: size and both ends ("ends", which None is), or all.
    """

    task: str = TASKS[0]
    model: str | None = None
    weights: str | None = None
    weights_key: str | None = None
    weights_prefix: str | None = None
    data: str | None = None
    num_classes: int | None = None
    resize: int | None = None
    crop: int | None = None
    interpolation: str | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    max_length: int | None = None
    stride: int | None = None
    n_best: int | None = None
    max_answer_length: int | None = None
    null_threshold: float | None = None
    metric: tuple[str, ...] = ()
    batch_size: int = 64
    limit: int | None = None
    precision: str = "fp32"
    device: str | None = None
    workers: int | None = None
    on_error: str = "stop"
    download: bool = False
    data_fingerprint: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("limit", 1), ("workers", 0), ("num_classes", 1)):
            check_count(_flag(name), getattr(self, name), least)
        for name in ("resize", "crop", "max_length", "n_best", "max_answer_length"):
            check_count(_flag(name), getattr(self, name), 1)
        check_count("--stride", self.stride, 0)
        check_choice(_flag("task"), self.task, TASKS)
        self._refuse_options_of_other_tasks()
        check_choice(_flag("precision"), self.precision, PRECISIONS)
        check_choice(_flag("on_error"), self.on_error, ON_ERROR)
        if self.data_fingerprint is not None:
            check_choice(_flag("data_fingerprint"), self.data_fingerprint, DATA_FINGERPRINTS)
        check_mean("--mean", self.mean)
        check_std("--std", self.std)
        if self.download and not (self.weights and is_published_name(self.weights)):
            found = "is not given" if self.weights is None else f"is {self.weights}"
            raise UsageError(
                f"--download fetches weights that torchvision publishes, and --weights {found}. Give "
                "--weights DEFAULT or a name such as IMAGENET1K_V1, or leave --download out."
            )

    def _refuse_options_of_other_tasks(self) -> None:
        for task, names in OPTIONS.items():
            given = [name for name in sorted(names) if _is_given(getattr(self, name))]
            if given and task != self.task:
                raise UsageError(
                    f"{', '.join(map(_flag, given))} belongs to --task {task}, and the task is {self.task}. "
                    f"Leave it out, or give --task {task}."
                )

    def own_options(self) -> dict[str, Any]:
        """The options of this task alone that were given."""
        own = {name: getattr(self, name) for name in sorted(OPTIONS[self.task])}
        return {name: value for name, value in own.items() if _is_given(value)}

    @classmethod
    def read(cls, path: Path | None, flags: Mapping[str, Any]) -> Job:
        """Make a job of a TOML file and flags; a flag that is given (not None, not empty) wins.

        Paths in the file count from the file's folder.

        Raises:
            UsageError: the file is missing or malformed, or has an unknown key or a value of a wrong type.
        """
        given = {name: value for name, value in flags.items() if _is_given(value)}
        if path is None:
            return cls(**given)
        values = _from_file(path)
        task = given.get("task", values.get("task", TASKS[0]))
        return cls(**{**_resolved(values, task, path.parent), **given})

    def to_json(self) -> dict[str, Any]:
        """The job as plain JSON values."""
        return asdict(self)


def _from_file(path: Path) -> dict[str, Any]:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[import-not-found, no-redef, unused-ignore]

    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not valid TOML: {error}") from error
    hints = typing.get_type_hints(Job)
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name in values:
            raise UsageError(f"--config {path}: {key!r} is there twice, with - and with _. Remove one.")
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=3)
            hint = f" Nearest: {', '.join(near)}." if near else ""
            raise UsageError(
                f"--config {path}: unknown key {key!r}.{hint} Keys: {', '.join(f.name for f in fields(Job))}"
            )
        values[name] = _typed(value, hints[name], f"--config {path}: {key}")
    return values


def _resolved(values: Mapping[str, Any], task: str, folder: Path) -> dict[str, Any]:
    """Values of a job file, with paths that count from its folder."""
    # The model's name or, for this task, a path.
    paths = ["data", *(["model"] if task == "question-answering" else [])]
    weights = values.get("weights", "DEFAULT")
    if not is_published_name(weights) and not weights.startswith("random:"):
        paths.append("weights")
    return {name: str(folder / value) if name in paths else value for name, value in values.items()}


def _is_given(value: Any) -> bool:
    # Identity, not equality: 0 is a value (and a wrong one for most), though it equals False.
    return not any(value is nothing for nothing in (None, (), False))


def _typed(value: Any, hint: Any, where: str) -> Any:
    """A TOML value as the field's type: int, float, str, bool, or a tuple of one of them."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind = options[0]
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if isinstance(value, list):
            return tuple(_typed(entry, item, where) for entry in value)
        kind = list
    elif kind is float and type(value) is int:
        return float(value)
    elif type(value) is kind:
        return value
    raise UsageError(f"{where} = {value!r}: expected a {kind.__name__}, found a {type(value).__name__}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
