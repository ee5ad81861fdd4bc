"""Tasks and metrics by name: of files, modules and installed packages, and what is said of broken ones."""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from dualeval import tasks
from dualeval.cli import dualeval
from dualeval.errors import EXIT_USAGE, LibraryError, UsageError
from dualeval.metrics import split_by_kind
from dualeval.metrics.by_name import chosen_metrics
from dualeval.metrics.classification import BY_NAME, classification_metric
from dualeval.options.fields import check_fields, fields_of
from dualeval.options.job import Job
from dualeval.options.plugins import BUILT_IN, made_task, task_kind
from dualeval.tasks.options import TASKS
from dualeval.vision_library import torchvision
from tests.conftest import ROOT

TASK = """
    from __future__ import annotations
    from dataclasses import dataclass, field
    from pathlib import Path

    import torch
    import dualeval
    import dualeval.metrics

    class Mine(dualeval.Task):
        '''Tells even numbers from odd ones.

        Args:
            threshold: above it a number is large.
        '''

        def __init__(self, threshold: float, data: Path = Path("here"), size=100):
            self.threshold, self.data, self.size = threshold, data, size

        def dataset(self):
            return [(torch.tensor([float(i)]), i % 2) for i in range(self.size)]

        def build_model(self, device):
            return torch.nn.Linear(1, 2).requires_grad_(False).eval()

        def forward(self, model, batch):
            return model(batch[0]) * 0 + torch.tensor([0.0, self.threshold])

        def observe(self, outputs, batch):
            return {"right": outputs.argmax(1) == batch[1], "large": outputs[:, 1] > 0.5}

        def metrics(self):
            return [dualeval.metrics.Mean("right"), dualeval.metrics.Mean("large")]

    @dataclass
    class Asked:
        threshold: float = field(metadata={"help": "Above it a number is large."})
        metric: tuple[str, ...] = ()
        batch_size: int = 1

        def __post_init__(self):
            if self.threshold > 9:
                raise ValueError("threshold is at most 9")

    class WithOptions(Mine):
        options_class = Asked

        def __init__(self, options):
            super().__init__(options.threshold, size=options.batch_size)

    class Annotated(Mine):
        def __init__(self, options: Asked):
            super().__init__(options.threshold)

    def made(threshold: float = 0.25) -> dualeval.Task:
        return Mine(threshold)

    ready = Mine(0.75)

    class Half(dualeval.Task):
        def dataset(self):
            return [1]

        def build_model(self, device):
            return torch.nn.Linear(1, 1)

    class Untyped(Mine):
        def __init__(self, model: torch.nn.Module):
            pass

    class Clash(Mine):
        def __init__(self, limit: str = "no"):
            pass

    class Stranger:
        pass

    def number():
        return 5

    number_of_classes = 5
"""
# Imported here, not in the first test that needs it: the import sets an environment variable.
torchvision()
# The tests' own, so that no other module has it.
NAME = "dualeval_test_mine"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to stand in, from which modules can be imported until the test is over."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def mine(here: Path) -> str:
    """The file of a task, by its path."""
    (here / "tasks").mkdir()
    (here / f"tasks/{NAME}.py").write_text(textwrap.dedent(TASK))
    return f"tasks/{NAME}.py"


def refused(task: str, **options: object) -> str:
    with pytest.raises(UsageError) as caught:
        Job.of(task, **options).make_task()
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value)


@pytest.mark.parametrize("name", ["Mine", "WithOptions", "Annotated", "made"])
def test_a_task_of_a_file_gets_its_options(mine: str, name: str) -> None:
    job = Job.read(None, {"task": f"{mine}:{name}"}, {"threshold": "0.5"})
    task = job.make_task()
    assert task.threshold == 0.5  # type: ignore[attr-defined]
    assert type(task).__module__ == NAME, "the same name on every rank, wherever the file lies"
    assert task.given_options["threshold"] == 0.5
    assert "data" not in task.given_options, "where the data lie decides nothing"
    assert job.to_json()["threshold"] == 0.5


def test_a_task_of_a_module_and_one_that_is_ready_are_found(
    mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A benchmark has a module of this name, which another test may have imported.
    monkeypatch.delitem(sys.modules, "tasks", raising=False)
    task: Any = Job.of(f"tasks.{NAME}:Mine", threshold=1.0).make_task()
    assert type(task).__module__ == f"tasks.{NAME}"
    kind = task_kind(f"{mine}:ready")
    assert (kind.fields, kind.summary) == ((), "Tells even numbers from odd ones.")
    ready: Any = made_task(kind, kind.options_class())
    assert ready.threshold == 0.75
    # An option with the name of a run's gets its value.
    task = Job.of(f"{mine}:WithOptions", threshold=1.0, batch_size=7).make_task()
    assert task.size == 7
    assert "batch_size" not in task.given_options


def test_paths_of_a_job_file_count_from_it(mine: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "tasks/job.toml").write_text(f'task = "{NAME}.py:Mine"\nthreshold = 1\ndata = "val"\n')
    job = Job.read(Path("tasks/job.toml"), {})
    assert job.options.data == Path("tasks/val")
    assert job.make_task().threshold == 1.0  # type: ignore[attr-defined]


def test_wrong_options_of_a_task_are_refused(mine: str) -> None:
    task = f"{mine}:Mine"

    def said(text: str, **flags: object) -> str:
        with pytest.raises(UsageError) as caught:
            Job.read(None, {"task": task, **flags}, dict([text.split("=")]))
        return str(caught.value)

    assert f"--task {task} needs --threshold X (above it a number is large)." in refused(task)
    assert "has no such option. Nearest: threshold. Its options: threshold, data, size." in said("treshold=1")
    assert "-T threshold 'x': expected a number" in said("threshold=x")
    assert "--limit is an option of every run: --limit 3" in said("limit=3")
    assert "give the same option" in said("threshold=3", threshold=4.0)
    assert "threshold is at most 9" in refused(f"{mine}:WithOptions", threshold=10.0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Mien", ["has no 'Mien'. Nearest: Mine. ", "Tasks there: Mine, "]),
        ("Half", ["Half does not say forward, metrics, observe"]),
        ("Stranger", ["Stranger is not a task", "derived from object"]),
        ("number_of_classes", ["a int is not a task"]),
        ("number", ["it returned a int, expected a task"]),
        ("Untyped", ["its option model has the type Module, which cannot be typed"]),
        ("Clash", ["its option limit is a str, but --limit is an option of every run"]),
    ],
)
def test_what_is_no_task_is_refused(mine: str, name: str, words: list[str]) -> None:
    message = refused(f"{mine}:{name}")
    for word in words:
        assert word in message


NO_OPERATOR = """
try:
    raise RuntimeError('operator torchvision::nms does not exist')
except RuntimeError as e:
    raise ImportError('no model') from e
"""


@pytest.mark.parametrize(
    ("text", "task", "says"),
    [
        ("def f(:\n", "{}.py:Mine", r"cannot be imported: SyntaxError(.|\n)*line 1\n +def f\(:"),
        ("raise SystemExit(3)\n", "{}.py:Mine", "cannot be imported: SystemExit: 3"),
        (
            *(NO_OPERATOR, "{}.py:Mine"),
            r"no model \(this torchvision .* another torch: .*index.*: python -m dualeval.vision_library\)",
        ),
        ("import no_library\n", "{}:Mine", f"module {NAME} cannot be imported: .*'no_library'"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named_with_the_reason(
    here: Path, text: str, task: str, says: str
) -> None:
    (here / f"{NAME}.py").write_text(text)
    with pytest.raises(LibraryError, match=says):
        task_kind(task.format(NAME))
    assert NAME not in sys.modules


def test_a_failed_import_shows_the_lines_of_its_own_file_alone(here: Path) -> None:
    file = here / f"{NAME}.py"
    file.write_text("def f():\n    return nothing_here\n\nx = f()\n")
    with pytest.raises(LibraryError) as caught:
        task_kind(f"{NAME}.py:Mine")
    first, *rest = str(caught.value).splitlines()
    assert first.endswith(f"{NAME}.py cannot be imported: NameError: name 'nothing_here' is not defined")
    assert rest[0] == f'  File "{file}", line 4, in <module>'
    assert any("in f" in line for line in rest)
    assert not [line for line in rest if "importlib" in line or "plugins.py" in line]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("none.py:Mine", "there is no file .*none.py"),
        ("no_such_package.mine:Mine", "there is no module 'no_such_package' in"),
        ("a b:Mine", "expected package.module:NAME or FILE.py:NAME"),
        ("mine.py", "expected a class after the file, as in --task mine.py:Class"),
        ("question-answring", "Did you mean question-answering?"),
        ("json.py:Mine", "would hide the module 'json'"),
    ],
)
def test_names_that_lead_nowhere_are_refused(here: Path, task: str, message: str) -> None:
    (here / "json.py").write_text("")
    with pytest.raises(UsageError, match=message):
        task_kind(task)


def test_the_pages_own_examples_run(here: Path) -> None:
    page = (ROOT / "docs/command-line.md").read_text("utf-8")
    function, written = (part.partition("```")[0] for part in page.split("```python\n")[1:])
    (here / f"{NAME}.py").write_text(function + written.replace("def __init__(self, options): ...", "pass"))
    job = Job.read(None, {"task": f"{NAME}.py:numbers", "limit": 5}, {"scale": "2"})
    assert len(job.make_task().dataset()) == 100
    assert job.kind.summary.startswith("Regression on numbers")
    module = sys.modules[NAME]
    assert [field.name for field in fields_of(module.Options)] == ["scale", "count", "kind"]
    with pytest.raises(ValueError, match="--scale -1: expected a number above 0"):
        module.Options(scale=-1)
    with pytest.raises(UsageError, match="--count 0: expected a whole number of at least 1"):
        check_fields(module.Options(count=0))


# -- packages ------------------------------------------------------------------------------------------


@pytest.fixture
def package(here: Path) -> Path:
    """An installed distribution with a task and metrics, whole ones and broken ones."""
    site = here / "site-packages"
    info = site / "dualeval_test_plugin-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dualeval-test-plugin\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(
        "[dualeval.tasks]\n"
        f"even-numbers = {NAME}_package:Mine\n"
        f"broken = {NAME}_broken:Mine\n"
        f"image-classification = {NAME}_package:Mine\n"
        "[dualeval.metrics]\n"
        f"rightness = {NAME}_package:Rightness\n"
        f"cracked = {NAME}_broken:Metric\n"
    )
    metric = """
    class Rightness(dualeval.metrics.Mean):
        '''How much is right.'''

        def __init__(self):
            super().__init__("right", name="rightness")
    """
    text = textwrap.dedent(TASK) + textwrap.dedent(metric)
    (site / f"{NAME}_package.py").write_text(text)
    (site / f"{NAME}_broken.py").write_text("import no_such_library\n")
    sys.path.append(str(site))
    return site


def test_a_task_of_a_package_is_found_by_its_name(package: Path) -> None:
    job = Job.of("even-numbers", threshold=0.5)
    assert job.kind.origin == "package dualeval-test-plugin 1.2"
    assert type(job.make_task()).__name__ == "Mine"
    assert task_kind("image-classification").origin == BUILT_IN
    with pytest.raises(
        UsageError, match=r"expected one of image-.*, even-numbers, broken.*mean even-numbers\?"
    ):
        task_kind("even-number")
    with pytest.raises(
        LibraryError, match=r"broken \(.*\) of package .* 1\.2 cannot be imported: .*no_such_li"
    ):
        task_kind("broken")


def test_lists_name_what_is_broken_and_go_on(package: Path) -> None:
    done = CliRunner().invoke(dualeval, ["list", "tasks"])
    assert done.exit_code == 0
    width = max(map(len, TASKS))
    for name, said in (
        ("even-numbers", "--threshold "),
        ("broken", "cannot be imported: ModuleNotFoundError: No module named 'no_such_library'"),
    ):
        assert f"{name:<{width}}  {said}" in done.stdout
    wants = (
        r"--threshold \S+ --data \S+: Tells even numbers from odd ones \(package dualeval-test-plugin 1\.2\)"
    )
    assert re.search(wants, done.stdout)
    assert all(f"\n{name} " in f"\n{done.stdout}" for name in TASKS)
    assert "dualeval: note: broken (" in done.stderr
    assert "has a built-in task's name: it is not used" in done.stderr
    done = CliRunner().invoke(dualeval, ["list", "metrics"])
    assert done.exit_code == 0
    assert "  rightness  How much is right (package dualeval-test-plugin 1.2)" in done.stdout
    assert "  cracked    cannot be imported" in done.stdout


def test_metrics_are_found_by_name(package: Path) -> None:
    own = [classification_metric(name, 3) for name in ("loss", "top1")]
    assert chosen_metrics((), own) == own
    assert chosen_metrics(("top1",), own) == [own[1]]
    chosen = chosen_metrics(("rightness", "loss"), own)
    assert [metric.name for metric in split_by_kind(chosen)[0]] == ["rightness", "loss"]
    with pytest.raises(
        UsageError, match=r"no metric 'rightnes' here\. Nearest: rightness\. Metrics: loss, top1, "
    ):
        chosen_metrics(("rightnes",), own)
    [mean] = chosen_metrics(("size",), own, ["size"])
    assert (mean.name, mean.columns) == ("size", ("size",))
    [taken] = chosen_metrics(("torchmetrics:MeanAbsoluteError()",), own, ["prediction", "target"])
    assert set(taken.columns) == {"prediction", "target"}
    with pytest.raises(
        UsageError, match=r"Metrics: loss, top1, (rightness, cracked|cracked, rightness), size$"
    ):
        chosen_metrics(("nothing",), own, ["loss", "size"])  # each name once
    with pytest.raises(LibraryError, match="cracked"):
        chosen_metrics(("cracked",), own)


def test_a_column_of_predictions_may_hold_scores() -> None:
    """Which it does, where the task makes no ranks of classes; the first batch tells."""
    scores = "torchmetrics:MultilabelAUROC(num_labels=3)"
    [of_scores] = chosen_metrics((scores,), [], ["prediction", "target"])
    assert set(of_scores.columns) == {"prediction", "target"}
    with pytest.raises(UsageError, match="does not take predicted classes"):
        chosen_metrics((scores,), [], ["prediction", "target", "rank"])


def test_a_built_in_task_chooses_its_own_metrics(package: Path, mine: str) -> None:
    built_in = Job.of(metric=("top1", "rightness", "torchmetrics:X()"))
    assert built_in.options.metric == ("top1",)
    assert built_in.metric_of_run == built_in.metric
    assert Job.of(metric=("top1",)).metric_of_run == ()
    assert Job.of(f"{mine}:made", metric=("right",)).metric_of_run == ("right",)


def test_built_in_metrics_are_listed_by_their_names() -> None:
    from dualeval.data.language_rows import ANSWERS, CHOICES, DOCUMENTS
    from dualeval.metrics.texts import _OF_NUMBERS
    from dualeval.tasks.language_kinds import metrics_of_kind
    from dualeval.tasks.question_answering import _all_metrics

    assert set(task_kind("image-classification").source.known_metrics()) == {"top1", *BY_NAME} - {"acc"}
    questions = {metric.name for metric in _all_metrics(True)}
    assert set(task_kind("question-answering").source.known_metrics()) == questions
    answers = {"answers_per_prompt": 2, "extract": "x", "think_end": "x"}
    kinds = (DOCUMENTS, CHOICES, ANSWERS)
    language = {metric.name for kind in kinds for metric in metrics_of_kind(kind, answers)}
    assert set(task_kind("language-modeling").source.known_metrics()) == language
    others = {"binary_f1", "text_work", *_OF_NUMBERS}
    known = {"top1", *BY_NAME, *others} - {"acc"}
    assert set(task_kind("text-classification").source.known_metrics()) == known


@pytest.mark.parametrize("name", TASKS)
def test_the_class_of_a_task_has_the_options_of_the_command_line(name: str) -> None:
    """Its docstring names each; what only the command line has is refused, and so is what nobody has."""
    kind = getattr(tasks, task_kind(name).source.__name__.removesuffix("Options"))
    given = {"model": torch.nn.Identity(), ("tasks" if name == "lm-eval" else "data"): "nowhere"}
    of_command = {"metric": "metrics=", "model_arg": "model_arguments=", "download": "--download"}
    for option in task_kind(name).fields:
        wanted = "metrics" if option.name == "metric" else option.name
        named = re.search(rf"\b{wanted}\b", kind.__doc__)
        assert named or option.name in of_command, option.name
        if option.name in of_command:
            said = f"{option.name} is not an argument here: .*{of_command[option.name]}"
            with pytest.raises(TypeError, match=said):
                kind(**given, **{option.name: ("x",)})
    with pytest.raises(UsageError, match=r"metrics='f1': expected a list of names, as metrics=\['f1'\]"):
        kind(**given, metrics="f1")
    with pytest.raises(
        TypeError, match=rf"^{kind.__name__} has no option 'weight'\. Did you mean weights\?$"
    ):
        kind(**given, weight=1)


@pytest.mark.parametrize("name", TASKS)
def test_a_built_in_task_has_a_page(name: str) -> None:
    assert (ROOT / f"docs/{name}.md").is_file()


@pytest.mark.parametrize("module", [*tasks.class_names().values(), "dualeval.tasks.given_answers"])
def test_runs_of_a_built_in_task_can_be_scored(module: str) -> None:
    if module.endswith(".lm_eval"):
        assert task_kind("lm-eval").source.metrics_need_data  # the task is made again
        return
    assert callable(importlib.import_module(module).stored_metrics)
