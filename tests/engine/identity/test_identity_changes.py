"""One thing is changed at a time: the second run in a folder refuses and names it, or evaluates anew.

And what must not matter does not: the run goes on, or is printed again.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dualeval
from dualeval.engine.device import machines
from dualeval.errors import UsageError
from dualeval.metrics import Measured, Metric, RowMetric
from dualeval.tasks import Task
from tests.engine.identity.test_identity_data import bmp, small_task
from tests.engine.test_evaluator import evaluate
from tests.vehicles.tiny import CLASSES, FEATURES, TinyTask

SAMPLES = 40


# Models


class Net(nn.Module):
    """A small network in which something can be changed that no parameter's name or shape tells of.

    What else decides the numbers of a model is changed in ``tests/vehicles/made_models.py``, without a run.
    """

    def __init__(self, activation: Callable[[Tensor], Tensor] = functional.relu) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.activation(x))
        return logits


class NetTask(TinyTask):
    """Evaluates what a function makes, with a fixed seed."""

    def __init__(self, make: Callable[[], nn.Module], extra_metrics: tuple[Metric, ...] = ()) -> None:
        super().__init__(SAMPLES, metrics=["loss", "top1"])
        self._make = make
        self._extra_metrics = extra_metrics

    def build_model(self, device: torch.device) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self._make().eval().to(device)

    def metrics(self) -> list[Metric | RowMetric]:
        return [*super().metrics(), *self._extra_metrics]


def changed_parameter() -> nn.Module:
    model = Net()
    with torch.no_grad():
        model.head.bias[3] += 1e-6
    return model


# By what is changed: two models, and the field that must be named.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "activation": (
        *(lambda: Net(activation=lambda x: x * 2), lambda: Net(activation=lambda x: x * 3)),
        "structure.Net.activation",
    ),
    "parameter": (Net, changed_parameter, "weights"),
}


def refused(
    before: Task, after: Task, out: Path, names: str, options: Mapping[str, Any] | None = None
) -> None:
    """The second run in a folder is refused, and the message names what differs, and nothing else."""
    evaluate(before, out)
    with pytest.raises(UsageError) as caught:
        evaluate(after, out, **(options or {}))
    message = str(caught.value)
    assert f"job.{names}" in message, message
    assert "--fresh" in message
    assert "dualeval_identity_ignores" in message or not names.startswith("structure")
    fields = {*re.findall(r"\bjob\.(\w+)", message)}
    # What a model holds may come from other modules, and a tensor that is not there is its structure, too.
    assert fields <= {names.partition(".")[0], "structure"}, message


@pytest.mark.parametrize("name", MODELS)
def test_a_changed_model_is_refused(tmp_path: Path, name: str) -> None:
    before, after, field = MODELS[name]
    refused(NetTask(before), NetTask(after), tmp_path, field)


# The engine's options

OPTIONS: dict[str, dict[str, Any]] = {
    "batch_size": {"batch_size": 8},
    "samples": {"limit": 10},
    "precision": {"precision": "amp-bf16"},
    "on_error": {"on_error": "skip"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_changed_option_is_refused(tmp_path: Path, name: str) -> None:
    # Of a data set whose fingerprint does not hold the number of samples.
    before, after = TinyTask(SAMPLES), TinyTask(SAMPLES)
    for task in (before, after):
        task.dataset().fingerprint = lambda count: "same"  # type: ignore[method-assign]
    refused(before, after, tmp_path, name, OPTIONS[name])


def test_a_changed_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate(TinyTask(SAMPLES), tmp_path)
    monkeypatch.setattr(
        machines, "version", lambda name: "0.0" if name == "numpy" else metadata.version(name)
    )
    with pytest.raises(UsageError, match=r"versions\.numpy: .* there, 0\.0 now"):
        evaluate(TinyTask(SAMPLES), tmp_path)


# Metrics


class Within:
    """The fraction of samples whose loss is below a limit."""

    name = "within"
    size = 2
    columns = ("loss",)

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        ledger += torch.tensor([len(columns["loss"]), int((columns["loss"] < self._limit).sum())])

    def compute(self, ledger: Tensor) -> Measured:
        samples, below = ledger.tolist()
        return Measured(values={self.name: below / samples})


class Described(Within):
    """Says itself what its values depend on."""

    def fingerprint(self) -> dict[str, Any]:
        return {"limit": round(self._limit, 3)}


def test_a_changed_parameter_of_a_metric_is_refused(tmp_path: Path) -> None:
    one, other = (NetTask(Net, (Within(limit),)) for limit in (1.0, 2.0))
    refused(one, other, tmp_path / "a", "metric_options.within._limit: 1.0 there, 2.0 now")
    one, other = (NetTask(Net, (Described(limit),)) for limit in (1.0, 2.0))
    refused(one, other, tmp_path / "b", "metric_options.within.limit: 1.0 there, 2.0 now")
    same = [NetTask(Net, (Described(limit),)) for limit in (1.0, 1.0001)]
    assert len({evaluate(task, tmp_path / "c").fingerprint for task in same}) == 1


def test_another_set_or_order_of_metrics_is_refused(tmp_path: Path) -> None:
    for name, metrics in (("more", ["loss", "top1", "top2"]), ("order", ["top1", "loss"])):
        tasks = [TinyTask(SAMPLES, metrics=names) for names in (["loss", "top1"], metrics)]
        evaluate(tasks[0], tmp_path / name)
        with pytest.raises(UsageError, match=r"job\.metrics(: \['loss', 'top1'\]|\[0\]: loss) there, "):
            evaluate(tasks[1], tmp_path / name)


def test_a_fingerprint_that_is_no_json_is_named(tmp_path: Path) -> None:
    metric, task = Described(1.0), TinyTask(SAMPLES)
    metric.fingerprint = lambda: {1, 2}  # type: ignore[method-assign, assignment, return-value]
    task.fingerprint = lambda: {"seed": object()}  # type: ignore[method-assign]
    for odd, name in ((NetTask(Net, (metric,)), "metric 'within'"), (task, "task 'tiny'")):
        said = rf"the fingerprint\(\) of {name} returned a value that is not JSON"
        with pytest.raises(UsageError, match=said):
            evaluate(odd, tmp_path)


# Source


@dataclass
class Sources:
    """Modules in a working folder that a test writes, and writes again."""

    home: Path
    written: list[str] = field(default_factory=list)

    def write(self, name: str, text: str) -> Any:
        """Write a module and import it, whatever was imported under that name before."""
        (self.home / f"{name}.py").write_text(text)
        self.written.append(name)
        for module in self.written:
            sys.modules.pop(module, None)
        importlib.invalidate_caches()
        return importlib.import_module(name)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", [str(home), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = Sources(home)
    yield found
    for name in found.written:
        sys.modules.pop(name, None)


METRIC = """
import os
from tests.engine.identity.test_identity_changes import Within

LIMIT = float(os.environ.get("TEST_LIMIT", "1"))
CALLS = 0

class Mine(Within):
    factor = 1.0
    def update(self, ledger, columns):
        global CALLS
        CALLS += 1
        super().update(ledger, {"loss": columns["loss"] * self.factor * LIMIT})

def made(factor, default=1.0):
    class Made(Within):
        def update(self, ledger, columns, by=default):
            super().update(ledger, {"loss": columns["loss"] * factor * by})
    return Made(1.0)
"""


def test_values_that_a_metrics_source_reads_from_outside_count(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one source, with other numbers: from the environment, a caller, or an assignment."""
    mine = sources.write("mine", METRIC.replace("* LIMIT", "* LIMIT * 1"))
    evaluate(NetTask(Net, (mine.Mine(1.0),)), tmp_path / "source")
    mine = sources.write("mine", METRIC)
    first = NetTask(Net, (mine.Mine(1.0),))
    with pytest.raises(
        UsageError, match=r"the code of mine \(job\.source\.mine\): [0-9a-f]{16} there, [0-9a-f]{16} now"
    ):
        evaluate(first, tmp_path / "source")
    evaluate(first, tmp_path / "class")
    assert evaluate(first, tmp_path / "class").earlier, "a global that is counted up is none"
    mine.Mine.factor = 2.0
    refused_as = r"job\.constants\.mine\.Mine\.factor: 1\.0 there, 2\.0 now"
    with pytest.raises(UsageError, match=refused_as):
        evaluate(NetTask(Net, (mine.Mine(1.0),)), tmp_path / "class")
    monkeypatch.setenv("TEST_LIMIT", "2")
    mine = sources.write("mine", METRIC)
    with pytest.raises(UsageError, match=r"job\.constants\.mine\.Mine\.LIMIT: 1\.0 there, 2\.0 now"):
        evaluate(NetTask(Net, (mine.Mine(1.0),)), tmp_path / "class")
    monkeypatch.setattr(mine.Mine, "dualeval_identity_ignores", ("LIMIT",), raising=False)
    notes = refused_notes(NetTask(Net, (mine.Mine(1.0),)), tmp_path / "class")
    assert "Mine.LIMIT: 1.0 there, None now" in notes, "it is left out"
    evaluate(NetTask(Net, (mine.made(1.0),)), tmp_path / "closure")
    for other, name in ((mine.made(2.0), "factor"), (mine.made(1.0, 2.0), "by")):
        with pytest.raises(UsageError, match=rf"Made\.update\.{name}: 1\.0 there, 2\.0 now"):
            evaluate(NetTask(Net, (other,)), tmp_path / "closure")


def refused_notes(task: Task, out: Path) -> str:
    with pytest.raises(UsageError) as caught:
        evaluate(task, out)
    return str(caught.value)


# Data


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two classes with two uncompressed pictures each."""
    for number, name in enumerate(("a/0", "a/1", "b/2", "b/3")):
        bmp(tmp_path / f"data/{name}.bmp", (number, number))
    return tmp_path / "data"


# What else of a file counts is tried on its fingerprint alone: tests/data/test_image_folder.py.
PICTURE_CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a pixel": ("contents", lambda data: bmp(data / "a/0.bmp", (0, 1))),
    "label": ("data", lambda data: (data / "b/2.bmp").rename(data / "a/2.bmp")),
}


@pytest.mark.parametrize("name", PICTURE_CHANGES)
def test_changed_pictures_are_refused(pictures: Path, tmp_path: Path, name: str) -> None:
    field, change = PICTURE_CHANGES[name]
    evaluate(small_task(pictures), tmp_path / "out")
    change(pictures)
    with pytest.raises(UsageError, match=rf"job\.{field}\)?: "):
        evaluate(small_task(pictures), tmp_path / "out")


SIZES = {"resize": 40, "crop": 32}
PREPROCESSING = [
    *(("resize", 36), ("crop", 24), ("interpolation", "bicubic"), ("mean", (0.5, 0.5, 0.4)), ("std", (0.25,)))
]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        *(
            ({"preprocessing": {**SIZES, name: value}}, f"preprocessing.{name}")
            for name, value in PREPROCESSING
        ),
        ({"data_fingerprint": "content"}, "data_fingerprint: ends there, content now"),
    ],
)
def test_changed_options_of_pictures_are_refused(
    pictures: Path, tmp_path: Path, options: dict[str, Any], field: str
) -> None:
    evaluate(small_task(pictures), tmp_path / "out")
    with pytest.raises(UsageError, match=rf"job\.task_options\.{field}"):
        evaluate(small_task(pictures, **options), tmp_path / "out")


# What must not matter


def test_a_moved_folder_goes_on(pictures: Path, tmp_path: Path) -> None:
    first = evaluate(small_task(pictures), tmp_path / "out")
    moved = pictures.rename(tmp_path / "elsewhere")
    for path in moved.rglob("*.bmp"):
        os.utime(path, (1, 1))
    out = (tmp_path / "out").rename(tmp_path / "other")
    again = evaluate(small_task(moved), out)
    assert again.earlier and again.metrics_digest == first.metrics_digest
    assert again.folder == str(out), "where it is now, and not where it was made"


@dataclass(frozen=True)
class Limits:
    low: float


class Plain(TinyTask):
    """Says nothing of what it depends on, but in an attribute; keeps in another what it has seen."""

    fingerprint = Task.fingerprint  # type: ignore[assignment]

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(20)
        setattr(self, name, value)
        self.seen: list[int] = []

    def observe(self, outputs: Any, batch: Any) -> Any:
        self.seen.append(len(outputs))
        return super().observe(outputs, batch)


@pytest.mark.parametrize(
    ("name", "value", "other", "said"),
    [
        ("threshold", 0.5, 0.6, ": 0.5 there, 0.6 now"),
        ("rank", 1, 5, ": 1 there, 5 now"),
        ("world_size", 1, 2, ": 1 there, 2 now"),
        ("prompt", "/think", "/no_think", ": /think there, /no_think now"),
        # What else a value may hold is tried on its hash alone: tests/vehicles/made_models.py.
        *(
            ("given", of(0.5), of(0.6), "")
            for of in (lambda value: {"low": (value,)}, Limits, lambda value: lambda: value)
        ),
    ],
)
def test_a_tasks_own_value_is_part_of_the_job_whatever_it_is_called(
    tmp_path: Path, name: str, value: Any, other: Any, said: str
) -> None:
    evaluate(Plain(name, value), tmp_path)
    assert evaluate(Plain(name, value), tmp_path).earlier
    with pytest.raises(UsageError, match=rf"task_attributes\.{name}{said}"):
        evaluate(Plain(name, other), tmp_path)


def test_what_a_given_function_closes_over_or_reads_is_part_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(factor: float, name: str) -> Any:
        return dualeval.evaluate(
            model=nn.Identity(),
            data=torch.arange(20.0),
            observe=functools.partial(scaled, factor=factor),
            batch_size=4,
            launcher="none",
            out=tmp_path / name,
        )

    run(1.0, "closure")
    assert run(1.0, "closure").earlier
    # Of the job, not of Python's library: that would be another machine, which may be allowed.
    with pytest.raises(UsageError, match=r"holds another job \(functions with values of their own"):
        run(2.0, "closure")
    run(1.0, "constant")
    monkeypatch.setitem(globals(), "ADDED", 1.0)
    with pytest.raises(UsageError, match=r"job\.constants\.tests.*scaled\.ADDED: 0\.0 there, 1\.0 now"):
        run(1.0, "constant")


ADDED = 0.0


def scaled(outputs: Any, batch: Any, factor: float) -> dict[str, Any]:
    return {"value": outputs * factor + ADDED}
