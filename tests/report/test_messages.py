"""What is said where a user's model, data and functions do not fit: found, expected, what to type."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import dualeval
from dualeval.cli import dualeval as command
from dualeval.errors import EXIT_FAILED, EXIT_USAGE, DualevalError, UsageError
from dualeval.metrics import Mean
from dualeval.tasks.image_classification import ImageClassification
from dualeval.user_code.origin import own_code
from tests.conftest import working_module

CPU = torch.device("cpu")
INPUTS = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(12) % 3
TOKENS = torch.arange(12 * 5).view(12, 5) % 20


def evaluated(**options: Any) -> dualeval.Result:
    # The model decides which classes are predicted, and with them some messages.
    torch.manual_seed(0)
    given = {"model": nn.Linear(4, 3).eval(), "data": TensorDataset(INPUTS, LABELS), "workers": 0, **options}
    return dualeval.evaluate(**given)


def refused(**options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        evaluated(**options)
    return str(caught.value)


# -- a model and its inputs ----------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """Of ten tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens))
        return logits


def losses(outputs: Tensor, batch: list[Tensor]) -> dict[str, Tensor]:
    found = nn.functional.cross_entropy(outputs.flatten(0, 1), batch[1].flatten(), reduction="none")
    return {"loss": found.view(len(outputs), -1).mean(1)}


class Returning(nn.Module):
    """Gives its outputs in something."""

    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.head(x), x)


class Plain(Dataset[tuple[Tensor, int]]):
    """As torch's tutorials write one, with ids."""

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return INPUTS[index], int(LABELS[index])

    def id(self, index: int) -> str:
        return f"row {index}"

    def fingerprint(self, count: int) -> str:
        return "rows"


class Differing(Plain):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(3 + index % 2), 1


class Failing(Plain):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = {"pixels": INPUTS[index]}
        return row["pixel"], 1


BEYOND: dict[str, Any] = {"model": LanguageModel(), "observe": losses, "batch_size": 4}
MULTICLASS = "torchmetrics:MulticlassAccuracy(num_classes={})"
ONE_HOT = nn.functional.one_hot(LABELS, 3)
# Options, and words of what is said, in their order.
UNFIT: list[tuple[dict[str, Any], str]] = [
    (
        {"model": LanguageModel(), "data": TensorDataset(TOKENS + 10)},
        "the layer 'embedding', Embedding(10, 4), has 10 rows and was given the index 10, ex ... different "
        "vocabularies ... tokenised with this model's own tokenizer",
    ),
    (
        {**BEYOND, "data": TensorDataset(TOKENS % 10, TOKENS)},
        "cross_entropy was given the target 10 and outputs of shape (20, 10), expected targets of 0 to 9",
    ),
    (
        {"model": nn.Linear(4, 3).half()},
        "float16 parameters and was given float32 inputs ... Return model.float(), and --precision amp-bf16",
    ),
    (
        {"data": TensorDataset(INPUTS.double(), LABELS)},
        "float32 parameters and was given float64 inputs ... Make the samples float32 (tensor.float()",
    ),
    ({"data": TensorDataset(INPUTS.long(), LABELS)}, "was given int64 inputs ... Make the samples float32"),
    (
        {"model": nn.Sequential(nn.Linear(5, 3))},
        "the layer '0', Linear(in_features=5,  ... cannot take a tensor of shape (2, 4) and float32",
    ),
    (
        {"data": [([1.0, 2.0, 3.0, 4.0], 1)] * 4},
        "the input of a sample is 4 values, and Linear.forward takes ... make it a torch.tensor",
    ),
    (
        {"model": Returning(lambda out, x: {"scores": out, "features": x})},
        "the model returned a dict of 'scores', 'features', expected a tensor ... "
        "Wrap it: forward=lambda model, batch: model(batch[0])['scores']",
    ),
    (
        {"model": Returning(lambda out, x: {"scores": out}), "data": [{"pixels": INPUTS[0], "label": 1}] * 4},
        "Wrap it: forward=lambda model, batch: model(batch['pixels'])['scores']",
    ),
    (
        {"model": Returning(lambda out, x: (None, out))},
        "a tuple of 2 values (NoneType, Tensor) ... lambda model, batch: model(batch[0])[1]",
    ),
    ({"model": Returning(lambda out, x: None)}, "the model returned None, expected a tensor"),
    (
        {"forward": lambda model, batch: model(batch[0])[:1]},
        "the model returned 1 rows (shape (1, 3)) for a batch of 2 samples, expected one row for each",
    ),
    (
        {"data": TensorDataset(INPUTS, LABELS + 7)},
        "sample 0 has the label 7, but the model has 3 classes (labels 0 to 2). Give the labels of its",
    ),
    (
        {"data": TensorDataset(INPUTS, LABELS.float()), "metrics": ["top1"]},
        "no metric 'top1' here ... the targets (2,) and torch.float32 ... target.long()",
    ),
    ({"data": TensorDataset(INPUTS, LABELS.float())}, "none with one number per sample ... target.long()"),
    (
        {"data": TensorDataset(INPUTS, LABELS[:, None]), "metrics": ["top1"]},
        "the targets (2, 1) and torch.int64 ... target.squeeze(1)",
    ),
    (
        {"data": INPUTS, "metrics": ["top1"]},
        "no metric 'top1' here ... The samples have no target: give pairs (input, target)",
    ),
    (
        {"data": [(row, "cat") for row in INPUTS]},
        "none with one number per sample ... The targets are not numbers, such as 'cat': give each class a "
        "number",
    ),
    (
        {"data": TensorDataset(INPUTS, ONE_HOT), "metrics": ["top1"]},
        "the targets (2, 3) and torch.int64 ... target.argmax(1)",
    ),
    (
        {"data": Differing()},
        "makes no batch of these samples ... got [3] at entry 0 and [4] at entry 1. Give collate=",
    ),
    (
        {"metrics": [MULTICLASS.format(1)]},
        "TorchMetrics cannot make this metric: Expected argument `num_classes`",
    ),
    (
        {"metrics": [MULTICLASS.format(2)]},
        "refuses its columns (prediction: int32 (12,); target: int32 (12,)): preds has the class 2, not 0 "
        "to 1. Change the metric's arguments or its columns",
    ),
    ({"data": (row for row in INPUTS)}, "data is a generator ... Make a list of it, as list("),
    ({"data": lambda: INPUTS}, "the data is a function ... Call it, and give what it returns"),
    ({"data": "/data/val"}, "data folder /data/val does not exist ... a manifest"),
    ({"data": None}, "the data is None"),
    ({"data": []}, "the data set is empty: nothing to evaluate"),
    ({"model": "resnet18"}, "a str ... torchvision.models.resnet18(weights=...)"),
    (
        {"forward": lambda batch: batch},
        "is called as <lambda>(model, batch): expected a function that takes these",
    ),
    (
        {"observe": lambda outputs: {"a": outputs}},
        "observe is <lambda>(outputs), and is called as <lambda>(outputs, batch)",
    ),
    ({"model": Returning}, "model is Returning(wrap: ... takes no arguments, as lambda: Net(10)"),
]


@pytest.mark.parametrize(("options", "says"), UNFIT, ids=[says for _, says in UNFIT])
def test_model_data_and_arguments_that_do_not_fit_are_explained(options: dict[str, Any], says: str) -> None:
    message = refused(**options)
    for words in says.split(" ... "):
        assert words in message
    assert "class folders" not in message
    assert "--resize" not in message


def test_a_path_of_texts_names_the_tasks(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    with pytest.raises(UsageError) as caught:
        dualeval.evaluate(model=nn.Linear(4, 2), data=tmp_path)
    for said in (f"LanguageModeling(model=..., data='{tmp_path}')", "Segmentation, Detection, Text"):
        assert said in str(caught.value)


# -- the user's own lines ------------------------------------------------------------------------------


def helper(values: Tensor) -> Tensor:
    raise KeyError("no such layer")


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return helper(self.head(x))


class OwnMetric:
    name, columns, size = "own", ("loss",), 1

    def update(self, ledger: Tensor, columns: Any) -> None:
        ledger += columns["los"]

    def compute(self, ledger: Tensor) -> dualeval.Measured:
        return dualeval.Measured(values={})


def no_model() -> nn.Module:
    return undefined_layer  # type: ignore[name-defined, no-any-return]  # noqa: F821


def bad_collate(samples: Any) -> Any:
    return samples.stacked


OWN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "forward": ({"model": Broken()}, ["return helper(self.head(x))", 'raise KeyError("no such layer")']),
    "forward=": ({"forward": lambda model, batch: batch.missing}, ["batch.missing"]),
    "observe=": ({"observe": lambda outputs, batch: outputs.missing}, ["outputs.missing"]),
    "collate=": ({"collate": bad_collate}, ["return samples.stacked"]),
    "collate= in a reading process": ({"collate": bad_collate, "workers": 1}, ["return samples.stacked"]),
    "model=": ({"model": no_model}, ["return undefined_layer"]),
    "data=": ({"data": Failing()}, ['return row["pixel"], 1']),
    "data= in a reading process": ({"data": Failing(), "workers": 1}, ['return row["pixel"], 1']),
    "a metric": ({"metrics": [OwnMetric()]}, ['ledger += columns["los"]']),
}


def uncaught(error: BaseException) -> None:
    """As Python ends a script by an error that nobody catches."""
    with pytest.raises(SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)


@pytest.mark.parametrize("name", OWN)
def test_the_users_own_lines_are_shown(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    options, lines = OWN[name]
    with pytest.raises(Exception) as caught:
        evaluated(**options)
    shown = own_code(caught.value)
    assert capfd.readouterr().err == "", "who catches it has its text"
    uncaught(caught.value)
    printed = capfd.readouterr().err
    for text in (shown, printed):
        assert f'File "{__file__}", line' in text
        for line in lines:
            assert line in text
        # What calls dualeval is not what has failed, and neither dualeval nor torch is the user's.
        assert "evaluated(**options)" not in text
        assert f"torch{os.sep}nn" not in text
        assert "session.py" not in text
    assert "--debug or DUALEVAL_DEBUG=1 shows the whole traceback" in printed
    assert "dualeval: error: " in printed


@pytest.mark.parametrize("how", ["option", "variable"])
def test_debug_shows_the_whole_traceback(
    how: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "variable":
        monkeypatch.setenv("DUALEVAL_DEBUG", "1")
    with pytest.raises(KeyError) as caught:
        evaluated(model=Broken(), **({"debug": True} if how == "option" else {}))
    monkeypatch.undo()
    uncaught(caught.value)
    printed = capfd.readouterr().err
    assert "Traceback (most recent call last)" in printed
    assert "compute.py" in printed
    assert 'raise KeyError("no such layer")' in printed


def test_an_error_of_ours_alone_has_no_lines(capfd: pytest.CaptureFixture[str]) -> None:
    refused(data=[])
    assert "in your code" not in capfd.readouterr().err


def test_debug_is_an_option_of_the_session() -> None:
    with (
        dualeval.Session() as session,
        pytest.raises(UsageError, match=r"write dualeval\.Session\(debug=\.\.\.\)"),
    ):
        session.evaluate(dualeval.ModelTask(model=nn.Linear(4, 3), data=INPUTS), debug=True)  # type: ignore[call-arg]


# -- metrics -------------------------------------------------------------------------------------------


def test_a_metric_that_needs_more_samples_than_a_batch_is_computed() -> None:
    """R2Score needs two; the first batch has one."""
    said: list[str] = []
    options = {"metrics": ["torchmetrics:R2Score()"], "model": nn.Linear(4, 1).eval(), "batch_size": 1}
    data = TensorDataset(INPUTS, LABELS.float())
    assert evaluated(**options, data=data, note=said.append).metrics["R2Score"] is not None
    assert any("on the first batch alone" in sentence and "at least two" in sentence for sentence in said)
    message = refused(**options, data=TensorDataset(INPUTS[:1], LABELS[:1].float()))
    assert "R2Score cannot compute from these samples: Needs at least two samples" in message


@pytest.mark.parametrize(
    "options",
    [
        {"metric": ("top1",)},
        {"metrics": ["top1"]},
        {"metrics": [Mean("confidence")], "rows": ("target",)},
        {"metric": ("confidence",)},
    ],
    ids=["by name", "by name in a list", "a metric", "of a column"],
)
def test_nonfinite_logits_are_warned_of_whatever_is_asked_for(options: dict[str, Any]) -> None:
    inputs = INPUTS.clone()
    inputs[3] = float("nan")
    result = evaluated(data=TensorDataset(inputs, LABELS), **options)
    assert "logits: 1 samples have a NaN, 0 an infinity" in result.warnings
    assert "nonfinite_logits" not in result.metrics
    assert "logits: " not in "".join(evaluated(**options).warnings)


# -- the command line ----------------------------------------------------------------------------------

LITE = """
import torch
from torch import nn

class Lite(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.conv(x).mean((2, 3)))

class Wrong(Lite):
    def forward(self, x):
        return self.heads(x)

class Logits(Lite):
    def forward(self, x):
        return {"logits": super().forward(x)}

def half():
    return Lite().half()

def grey():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))

def needs(width):
    return Lite()
"""
NONE = {"preprocessing": "none"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to stand in, with ``lite.py`` and pictures of two classes."""
    for name in "ab":
        (tmp_path / "pictures" / name).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "pictures" / name / "1.png")
    with working_module(tmp_path, "lite", LITE, monkeypatch):
        yield tmp_path


def said_of(model: str, *, error: type[DualevalError] = UsageError, **options: Any) -> str:
    given = {"weights": "random:0", "data": Path("pictures"), "preprocessing": NONE, **options}
    with pytest.raises(error) as caught:
        ImageClassification(model=model, **given).build_model(CPU)
    return str(caught.value)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("lite:half", "its parameters are float16, and images come as float32 ... Return model.float()"),
        ("lite:grey", "a layer takes 1, and the images have 3 channels ... Give --channels 1."),
        (
            "lite:Logits",
            "returned a dict of 'logits' ... Wrap it in a module ... self.model(images)['logits']",
        ),
        ("lite:needs", "needs(width) is called with no arguments ... def make(num_classes=10)"),
    ],
)
def test_a_model_of_ones_own_that_does_not_fit_is_explained(model: str, says: str) -> None:
    message = said_of(model)
    assert [words for words in says.split(" ... ") if words not in message] == []
    assert "--resize" not in message


@pytest.mark.usefixtures("here")
def test_an_error_in_a_models_own_forward_shows_its_line() -> None:
    words = ["run", "--model", "lite:Wrong", "--weights", "random:0", "--data", "pictures", "--no-progress"]
    words += ["--preprocessing", "none"]
    done = CliRunner().invoke(command, words)
    sys.modules.pop("lite")
    assert done.exit_code == EXIT_FAILED
    assert 'lite.py", line 16, in forward\n    return self.heads(x)' in done.output
    assert "the code of the model lite:Wrong raised AttributeError: 'Wrong' object has no attribute" in (
        done.output
    )
    assert "--resize" not in done.output
    assert "Traceback" not in done.output
    done = CliRunner().invoke(command, [*words, "--debug"])
    assert "Traceback (most recent call last)" in done.output
    assert "image_classification.py" in done.output


@pytest.mark.usefixtures("here")
def test_data_of_questions_name_the_task_for_them() -> None:
    Path("tiny").mkdir()
    (Path("tiny") / "config.json").write_text("{}")
    Path("dev.json").write_text("{}")
    done = CliRunner().invoke(command, ["run", "--model", "tiny", "--data", "dev.json", "--dry-run"])
    assert done.exit_code == EXIT_USAGE
    message = done.output
    assert "--data dev.json is a JSON file, expected a folder of images" in message
    assert "dualeval run --task question-answering --model tiny --data dev.json" in message


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0.1,nan,0.2"])
def test_a_wrong_mean_is_refused(value: str) -> None:
    done = CliRunner().invoke(command, ["run", f"--mean={value}", "--std", "1", "--dry-run"])
    assert isinstance(done.exception, UsageError)
    assert own_code(done.exception) == "", "a dataclass's generated __init__ is nobody's own code"
    assert f"--mean {','.join(map(str, map(float, value.split(','))))}: expected numbers from 0 to 1" in str(
        done.exception
    )


def test_a_file_without_a_picture_is_named(here: Path) -> None:
    """What it holds instead: tests/data/test_pictures.py has the other kinds."""
    (here / "pictures" / "a" / "2.png").write_bytes(b"<!DOCTYPE html>")
    task = ImageClassification(
        model="lite:Lite", weights="random:0", data=here / "pictures", preprocessing=NONE
    )
    with dualeval.Session() as session, pytest.raises(UsageError) as caught:
        session.evaluate(task, workers=0)
    words = "sample a/2.png (index 1) cannot be read: OSError: the file is a web page, and begins with '<!DOC"
    assert words in str(caught.value)
    assert "BufferedReader" not in str(caught.value)


def test_weights_DEFAULT_are_the_embedded_ones() -> None:
    named, own = ImageClassification(model="fashion-cnn", weights="DEFAULT"), ImageClassification()
    assert named.description()["weights"] == own.description()["weights"]
    assert "shipped with dualeval" in named.description()["weights"]
