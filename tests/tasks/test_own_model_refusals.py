"""Arguments of ModelTask that are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

import dualeval
from dualeval.errors import UsageError
from dualeval.metrics import Mean
from tests.conftest import Launch
from tests.tasks.test_own_model import SAMPLES, TORCHMETRICS, Mapped, evaluate, linear, numbers


def wrong(**changes: Any) -> Mapping[str, Any]:
    given = {"model": linear(5, 7), "data": TensorDataset(numbers(8, 5), torch.zeros(8, dtype=torch.long))}
    return {**given, **changes}


def winner(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = model(batch[0]).argmax(1)
    return found


def triple(index: int) -> tuple[Tensor, int, int]:
    return numbers(5), index, index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def of_library(module: str) -> Any:
    """A stream of a library's."""
    kind = type("IterableDataset", (), {"__iter__": lambda self: iter(range(8)), "__module__": module})
    return kind()


WRONG: list[tuple[Callable[[], Mapping[str, Any]], str]] = [
    (lambda: {"data": [1]}, r"given no model\. Give a task"),
    (lambda: {"model": linear(1, 1)}, r"given no data\. Give a task"),
    (lambda: wrong(model=3), "model is a int"),
    (lambda: wrong(model=lambda: 3), r"returned a int: expected an nn\.Module"),
    (lambda: wrong(metrics="top1"), r"metrics is a str: expected a list.*Write metrics=\['top1'\]"),
    (
        lambda: wrong(metrics=[lambda t: 1.0]),
        r"the function <lambda>: .*Or write dualeval\.metrics\.Rows\(fun",
    ),
    (lambda: wrong(model=linear(1, 1).state_dict()), r"is a OrderedDict.*: model\.load_state_dict\("),
    (lambda: wrong(metrics=["AUROC"]), r"Nearest: auroc\. "),
    (lambda: wrong(forward=winner), "such as a class number, whose mean"),
    (lambda: wrong(logger="jsonl:x"), r"'logger' is not an option of an evaluation\. Did you mean loggers\?"),
    (lambda: wrong(xyzzy=2), r"There are .*, backend, .*, loggers, .*, note, nproc, .*"),
    (lambda: wrong(rows="target"), r"rows is the text 'target': expected a list"),
    (lambda: wrong(observe=lambda outputs, batch: outputs), "observe returned a Tensor, expected a dict"),
    (lambda: wrong(collate=1), "collate is a int"),
    (lambda: wrong(metrics=["top8"]), "needs at least 8 classes, found 7"),
    (lambda: wrong(metrics=["nothing"]), "there is no metric 'nothing'"),
    *(
        (
            lambda name=name: wrong(metrics=[name], observe=lambda outputs, batch: {"score": outputs.sum(1)}),
            rf"no metric '{name}' here: .* observe replaces by score.*metrics=\['default', worst\]{hint}",
        )
        for name, hint in (("default", ""), ("mae", ""), ("scor", r".*Did you mean score\?"))
    ),
    (lambda: wrong(data=DataLoader(Mapped())), r"Give the loader's data set \(loader\.dataset\)"),
    (
        lambda: wrong(data=DataLoader(Mapped(), sampler=SubsetRandomSampler([4, 2]))),
        r"\(Subset\(loader\.dataset, sorted\(loader\.sampler\)\)\)",
    ),
    (lambda: wrong(data={"validation": [1]}), r"Give one part of it: data\['validation'\]"),
    (lambda: wrong(data=iter([1])), "no length or no samples by index"),
    (
        lambda: wrong(data=Stream()),
        r"cannot be divided .*\. Keep its samples, data=list\(data\); index .*; or loop over .* ids",
    ),
    (lambda: wrong(data=DataLoader(Stream())), r"a DataLoader, .* Keep its samples"),
    (
        lambda: wrong(data=of_library("webdataset")),
        r"reads the shards by itself, .* In Python keep its samples",
    ),
    (lambda: wrong(data=of_library("datasets.iterable_dataset")), "Load it without streaming=True. Or keep"),
    (lambda: wrong(data=[triple(i) for i in range(4)]), "the samples are 3 values"),
    (
        lambda: wrong(data=[(numbers(5), np.ma.masked_equal([index % 2], 1)) for index in range(8)]),
        "torch ignores",
    ),
    (
        lambda: wrong(data=[{"x": numbers(5), "y": each} for each in np.ma.masked_equal([1.0, 2.0], 2)]),
        "torch ignores",
    ),
    (
        lambda: wrong(data=[(np.ones(5, ">f4"), 1)]),
        r"byte order different .*newbyteorder\('='\)\)\), in pairs",
    ),
    (lambda: wrong(data=[(object(), 1)]), "default_collate makes no batch of these samples"),
    (lambda: wrong(data=[{"x": numbers(5), "z": numbers(5), "y": 1}]), r"which is which cannot be seen"),
    (lambda: wrong(data=[{"x": numbers(5), "y": 1, "label": 1}]), r"'y' and 'label', both names of a target"),
    (lambda: wrong(data=[(numbers(5), -100)]), r"has the label -100"),
    (lambda: wrong(model=nn.Sequential(linear(5, 7), nn.Softmax(1))), "the model returned probabilities"),
    (lambda: wrong(forward=lambda model, batch: "text"), "the model returned a str, expected a tensor"),
    (
        lambda: wrong(model=nn.Identity(), data=numbers(4, 3)),
        r"none with one number per sample: give "
        r"metrics",
    ),
    (lambda: wrong(data=(numbers(4, 5), torch.zeros(4))), r"TensorDataset\(inputs, targets\)"),
    (lambda: wrong(metrics=[3]), "metrics has a int, which is not a metric"),
    (lambda: wrong(metrics=[Mean]), r"metrics has Mean, which is the class of a metric: give an object"),
    (
        lambda: wrong(metrics=[TORCHMETRICS.classification.MulticlassAUROC(num_classes=7)]),
        r"a MulticlassAUROC of TorchMetrics: write dualeval\.metrics\.from_torchmetrics",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments_are_refused(arguments: Callable[[], Mapping[str, Any]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        evaluate(**arguments())


def test_a_task_beside_a_model_is_refused() -> None:
    task = dualeval.ModelTask(model=linear(5, 7), data=Mapped())
    assert dualeval.evaluate(task, launcher="none", workers=0).samples["total"] == SAMPLES
    with pytest.raises(UsageError, match="model and a task were given"):
        dualeval.evaluate(task, model=linear(5, 7))


def test_data_without_a_readable_sample_are_refused() -> None:
    class Torn(Mapped):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            raise ValueError("torn")

    with pytest.raises(UsageError, match=r"none of the first samples can be read.*torn\. Fix the data"):
        evaluate(model=linear(5, 7), data=Torn(), on_error="skip")


def test_an_input_that_is_refused_ends_a_script_with_one_line(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import dualeval\ndualeval.evaluate(model={}, data=[1])\n")
    done = launch([sys.executable, tmp_path / "script.py"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dualeval: error: model is a dict") and done.stderr.count("\n") == 1
