"""What a refusal advises is typed word for word, and gets further: a table of call, advice and next call."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dualeval
from dualeval.cli import dualeval as command
from dualeval.errors import EXIT_DONE, EXIT_GATE, UsageError
from tests.tasks.test_image_classification import idx_folder

NETS = """
from torch import nn

POOL = nn.AdaptiveAvgPool2d(4)

def made(num_classes=2):
    return nn.Sequential(nn.Conv2d(3, 3, 1), POOL, nn.Flatten(), nn.Linear(48, num_classes))

def grey(num_classes=2):
    return nn.Sequential(nn.Conv2d(1, 3, 3), POOL, nn.Flatten(), nn.Linear(48, num_classes))

def needs(width):
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, width))
"""
STEPS = """
import numpy as np
import torch

def scaled(picture):
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255
"""
MODEL = "--model nets:made "
RANDOM = "--weights random:0 "
VAL = "--data val "
NONE = "--preprocessing none "
BASE = MODEL + RANDOM + VAL
FULL = BASE + NONE
CSV = f"{MODEL}{RANDOM}{NONE}--data "
# A call of `run --dry-run`; what its refusal says; the call that follows it; "", or what is asked for next.
RUNS: list[tuple[str, str, str, str]] = [
    (VAL, "Name the model", BASE + NONE, ""),
    (MODEL + VAL + NONE, "Give --weights PATH or --weights random:SEED", FULL, ""),
    (MODEL + RANDOM + NONE, "Give --data PATH", FULL, ""),
    (BASE, "Type --preprocessing none", FULL, ""),
    (BASE, "--preprocessing imagenet", BASE + "--preprocessing imagenet", ""),
    (
        BASE,
        "as in --resize 64 --crop 64 --mean 0 --std 1",
        BASE + "--resize 64 --crop 64 --mean 0 --std 1",
        "",
    ),
    (
        BASE + "--resize 64",
        "missing: --crop, --mean, --std",
        BASE + "--resize 64 --crop 64 --mean 0 --std 1",
        "",
    ),
    (
        FULL + "--resize 64",
        "Give --crop, too, as in --resize 64 --crop 64",
        FULL + "--resize 64 --crop 64",
        "",
    ),
    (
        FULL + "--interpolation bicubic",
        "Give --resize and --crop, too",
        FULL + "--resize 64 --crop 64 --interpolation bicubic",
        "",
    ),
    (FULL + "--channels 1", "Give --channels 3", FULL + "--channels 3", ""),
    (
        f"--model nets:grey {RANDOM}{VAL}{NONE}",
        "Give --channels 1.",
        f"--model nets:grey {RANDOM}{VAL}{NONE}--channels 1",
        "",
    ),
    (
        f"--model nets:grey {RANDOM}{VAL}--preprocessing imagenet",
        "Give --channels 1 and the --mean and --std",
        f"--model nets:grey {RANDOM}{VAL}--preprocessing imagenet --channels 1 --mean 0.5 --std 0.5",
        "",
    ),
    (
        f"--model nets:grey {RANDOM}{VAL}--preprocessing imagenet --channels 1",
        "as in --mean 0.5 --std 0.5",
        f"--model nets:grey {RANDOM}{VAL}--preprocessing imagenet --channels 1 --mean 0.5 --std 0.5",
        "",
    ),
    (
        BASE + "--preprocessing imagenet --crop 300",
        "Give --resize as well",
        BASE + "--preprocessing imagenet --crop 300 --resize 300",
        "",
    ),
    (
        BASE + "--preprocessing steps.py:scale",
        "Nearest: scaled",
        BASE + "--preprocessing steps.py:scaled",
        "",
    ),
    (
        BASE + "--preprocessing steps.py:scaled --crop 8",
        "Leave --crop out",
        BASE + "--preprocessing steps.py:scaled",
        "",
    ),
    (
        f"{MODEL}{RANDOM}--data idx",
        "as in --mean 0.5 --std 0.5",
        f"--model nets:grey --num-classes 10 {RANDOM}--data idx --mean 0.5 --std 0.5",
        "",
    ),
    (
        f"{MODEL}{RANDOM}{NONE}--num-classes 10 --data idx",
        "Give --channels 3",
        f"{MODEL}{RANDOM}{NONE}--num-classes 10 --data idx --channels 3",
        "",
    ),
    # -- models and weights
    (
        f"--model nets.py {RANDOM}{VAL}{NONE}",
        "Type: --model nets.py:made",
        f"--model nets.py:made {RANDOM}{VAL}{NONE}",
        "",
    ),
    (
        f"--model inner:made {RANDOM}{VAL}{NONE}",
        "Type --model sub/inner.py:made",
        f"--model sub/inner.py:made {RANDOM}{VAL}{NONE}",
        "",
    ),
    (f"--model netz:made {RANDOM}{VAL}{NONE}", "Nearest: nets", FULL, ""),
    (f"--model nets:mad {RANDOM}{VAL}{NONE}", "Nearest: made", FULL, ""),
    (
        f"--model net.py:made {RANDOM}{VAL}{NONE}",
        "Nearest: nets.py",
        f"--model nets.py:made {RANDOM}{VAL}{NONE}",
        "",
    ),
    (
        f"--model nets:needs {RANDOM}{VAL}{NONE}",
        "--model-arg NAME=VALUE",
        f"--model nets:needs {RANDOM}{VAL}{NONE}--model-arg width=2",
        "",
    ),
    (
        FULL + "--model-arg depth",
        "as in --model-arg depth=18",
        FULL + "--model-arg depth=18",
        "unexpected keyword",
    ),
    (
        f"--model squeezenet11 {RANDOM}{VAL}",
        "Nearest: squeezenet1_1",
        f"--model squeezenet1_1 {RANDOM}{VAL}",
        "",
    ),
    (
        f"{MODEL}{VAL}{NONE}--weights DEFAULT",
        "Give a state_dict file",
        f"{MODEL}{VAL}{NONE}--weights two.pt",
        "",
    ),
    (
        f"{MODEL}{VAL}{NONE}--weights tow.pt",
        "Give a checkpoint with --weights PATH",
        f"{MODEL}{VAL}{NONE}--weights two.pt",
        "",
    ),
    (FULL + "--weights-key model", "give --weights", f"{MODEL}{VAL}{NONE}--weights two.pt", ""),
    (FULL + "--download", "--weights", FULL, ""),
    (
        f"{CSV}m.csv --num-classes 5 --weights two.pt",
        "Give --num-classes 2.",
        f"{CSV}m.csv --num-classes 2 --weights two.pt",
        "",
    ),
    (
        f"{CSV}m.csv --model nets:needs --model-arg width=3 --num-classes 2",
        "Give --num-classes 3",
        f"{CSV}m.csv --model nets:needs --model-arg width=3 --num-classes 3",
        "",
    ),
    # -- data and labels
    (
        f"{CSV}far.csv",
        "far.csv, line 3: the label (column 'label') is 7",
        f"{CSV}far.csv --class-order name",
        "",
    ),
    (f"{CSV}far.csv", "--class-order name", f"{CSV}far.csv --class-order name", ""),
    (
        FULL + "--num-classes 3",
        "--class-map FILE (folder to index, JSON)",
        FULL + "--num-classes 3 --class-map map.json",
        "",
    ),
    (
        FULL + "--weights three.pt",
        "--class-map FILE (folder to index, JSON)",
        FULL + "--weights three.pt --class-map map.json --num-classes 3",
        "",
    ),
    (FULL + "--split test", "Leave it out", FULL, ""),
    (FULL + "--path-column path", "Leave it out", FULL, ""),
    (f"{CSV}m.csv --path-column file", "path", f"{CSV}m.csv --path-column path", ""),
    (f"{CSV}odd.csv", "--label-column", f"{CSV}odd.csv --label-column kind", ""),
    (f"{CSV}moved.csv", "give --image-root DIR", f"{CSV}moved.csv --image-root val", ""),
    (FULL + "--class-map map.json --class-order name", "Leave one out", FULL + "--class-order name", ""),
    (f"{MODEL}{RANDOM}{NONE}--data vall", "does not exist", FULL, ""),
    (
        f"{MODEL}{RANDOM}{NONE}--data deep",
        "Give one of them: --data deep/val",
        f"{MODEL}{RANDOM}{NONE}--data deep/val",
        "",
    ),
    # -- metrics, groups, the run
    (FULL + "--metric macro_f2", "Nearest: macro_f1", FULL + "--metric macro_f1", ""),
    (FULL + "--metric Default", "Nearest: default", FULL + "--metric default", ""),
    (FULL + "--metric topp1", "Nearest: top1", FULL + "--metric top1", ""),
    (FULL + "--metric top9", "ask for a smaller k", FULL + "--metric top1", ""),
    (f"{CSV}m.csv --bins 1,2", "give --by, too", f"{CSV}m.csv --bins 1,2 --by number", ""),
    (f"{CSV}m.csv --by sit", "site", f"{CSV}m.csv --by site", ""),
    (FULL + "--precision tf32", "Leave it out (fp32)", FULL, ""),
    (FULL + "--precision fp17", "fp16", FULL + "--precision amp-bf16", ""),
    (FULL + "--schedule dynamc", "dynamic", FULL + "--schedule dynamic", ""),
    (FULL + "--nproc 9999", "Type a smaller --nproc", FULL, ""),
    (
        FULL + "--task image-clasification",
        "Did you mean image-classification?",
        FULL + "--task image-classification",
        "",
    ),
    ("--task nets.py", "as in --task nets.py:Class", "--task nets.py:made", "expected"),
    (FULL + "--batchsize 4", "--batch-size", FULL + "--batch-size 4", ""),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, manifests, checkpoints, code, and two finished runs."""
    root = tmp_path_factory.mktemp("advice")
    for place, side in (("val", 8), ("deep/val", 8), ("sizes", 8)):
        for number, name in enumerate("ab"):
            (root / place / name).mkdir(parents=True)
            size = side + 4 * number * (place == "sizes")
            Image.new("RGB", (size, size), (100 * number, 0, 0)).save(root / place / name / "1.png")
    (root / "idx").mkdir()
    idx_folder(root / "idx", [0, 9])
    (root / "sub").mkdir()
    for file in ("nets.py", "sub/inner.py"):
        (root / file).write_text(NETS)
    (root / "steps.py").write_text(STEPS)
    (root / "map.json").write_text(json.dumps({"a": 0, "b": 2}))
    for file, head, rows in (
        ("m", "path,label,site,number", ["val/a/1.png,0,x,1", "val/b/1.png,1,y,2"]),
        ("far", "path,label", ["val/a/1.png,0", "val/b/1.png,7"]),
        ("odd", "path,kind", ["val/a/1.png,0", "val/b/1.png,1"]),
        ("moved", "path,label", ["a/1.png,0", "b/1.png,1"]),
    ):
        (root / f"{file}.csv").write_text("\n".join([head, *rows, ""]))
    for classes, file in ((2, "two"), (3, "three")):
        net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, classes))
        torch.save(net.state_dict(), root / f"{file}.pt")
    return root


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder to stand in; nothing of it stays imported."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield folder
    for name in ("nets", "inner", "steps"):
        sys.modules.pop(name, None)


def said(words: str) -> str:
    """What a command line is refused with; "" where it is not; a gate that has not passed is an answer."""
    done = CliRunner().invoke(command, words.split(), obj=words.split())
    if done.exit_code in (EXIT_DONE, EXIT_GATE):
        return ""
    assert isinstance(done.exception, (UsageError, SystemExit)) or done.exit_code == 2, done.exception
    return f"{done.output} {done.exception}"


def run(words: str) -> str:
    return said(f"run {words} --device cpu --workers 0 --no-progress --launcher none --dry-run")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("call", "advice", "following", "outcome"), RUNS)
def test_advice_of_run_can_be_followed(call: str, advice: str, following: str, outcome: str) -> None:
    first = run(call)
    assert advice in " ".join(first.split())
    then = run(following)
    assert outcome in then if outcome else not then, then


# -- runs that have an output folder ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(folder: Path) -> Path:
    """Two finished runs in the folder: of the command line, and of Python."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        done = CliRunner().invoke(command, f"run {FULL}{REAL} --out runs/a".split())
        assert done.exit_code == 0, done.output
        classified(out="runs/py", metrics=["top1", "loss"])
    finally:
        os.chdir(before)
        sys.modules.pop("nets", None)
    return folder


REAL = "--device cpu --workers 0 --no-progress --launcher none"
OTHER = f"run {MODEL}{VAL}{NONE}{REAL} --weights random:1"
FINISHED: list[tuple[str, str, str]] = [
    (
        f"{OTHER} --out runs/a",
        "(--weights random:0 there, random:1 now; the weights' values (job.weights.fing",
        f"{OTHER} --out runs/b",
    ),
    (
        f"{OTHER} --out runs/a",
        "--fresh to remove what is there and start over",
        f"{OTHER} --out runs/a --fresh",
    ),
    (
        f"run {MODEL}{RANDOM}{NONE}--data sizes {REAL}",
        "as in --resize 64 --crop 64",
        f"run {MODEL}{RANDOM}{NONE}--data sizes {REAL} --resize 64 --crop 64",
    ),
    ("compare runs/a runs/py/no", "Give the output folder of a finished run", "compare runs/a runs/a"),
    ("compare runs/a runs/a --gate top1=2", "give top1=0.02", "compare runs/a runs/a --gate top1=0.02"),
    ("compare runs/a runs/a --gate top1", "such as top1=0.002", "compare runs/a runs/a --gate top1=0.002"),
    ("compare runs/a runs/a --gate top2=0", "has loss, top1", "compare runs/a runs/a --gate loss=0"),
    ("slice runs/a", "as in 'dualeval slice RUN --by scanner'", "slice runs/a --by target"),
    ("slice runs/a --by scanner", "target", "slice runs/a --by target"),
    (
        "report runs/a --out page.htm",
        "the name of a file that ends in .html",
        "report runs/a --out page.html",
    ),
    ("score runs/a --metric macro_f2", "Nearest: macro_f1", "score runs/a --metric macro_f1"),
    ("score runs/a --metric Default", "Nearest: default", "score runs/a --metric default"),
    ("verify runs", "Give the output folder of a finished run", "verify runs/py"),
]


@pytest.mark.usefixtures("runs", "here")
@pytest.mark.parametrize(("call", "advice", "following"), FINISHED)
def test_advice_of_commands_on_finished_runs_can_be_followed(call: str, advice: str, following: str) -> None:
    assert advice in " ".join(said(call).split())
    assert not said(following)


# -- Python ----------------------------------------------------------------------------------------------

INPUTS = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(12) % 3
ONE_HOT = nn.functional.one_hot(LABELS, 3)


def classified(**options: Any) -> dualeval.Result:
    torch.manual_seed(0)
    given = {"model": nn.Linear(4, 3).eval(), "data": TensorDataset(INPUTS, LABELS), "workers": 0, **options}
    return dualeval.evaluate(**given)


class Named(nn.Module):
    """Returns its logits in something."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.head(x))


def right(prediction: Any, target: Any) -> float:
    return float((prediction == target).mean())


def with_softmax() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)).eval()


def of_log() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)).eval()


def pair() -> nn.Module:
    return Named(lambda x: {"a": x, "b": x})


# Arguments, what their refusal says, and the arguments that follow it; a text is evaluated, as it was typed.
DOOR: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"datset": 3}, "Did you mean data?", {}),
    ({"metrics": ["macro_f2"]}, "Nearest: macro_f1", {"metrics": ["macro_f1"]}),
    ({"metrics": "top1"}, "Write metrics=['top1']", {"metrics": ["top1"]}),
    ({"metrics": ["top4"]}, "ask for a smaller k", {"metrics": ["top3"]}),
    (
        {"metrics": [dualeval.metrics.Mean]},
        "give an object, Mean(...)",
        {"metrics": [dualeval.metrics.Mean("loss")]},
    ),
    ({"metrics": [lambda prediction, target: 1.0]}, "def error(prediction, target)", {"metrics": [right]}),
    ({"metric": ("top1",), "metrics": ["top1"]}, "give metrics=[...] alone", {"metrics": ["top1"]}),
    ({"weights": "w.pt"}, "leave it out", {}),
    ({"model": "resnet18"}, "write torchvision.models.resnet18(weights=...)", {}),
    ({"model": with_softmax()}, "return torch.log of the probabilities", {"model": of_log()}),
    (
        {"data": TensorDataset(INPUTS, ONE_HOT)},
        "take target.argmax(1)",
        {"data": TensorDataset(INPUTS, ONE_HOT.argmax(1))},
    ),
    (
        {"data": TensorDataset(INPUTS, LABELS[:, None])},
        "target.squeeze(1)",
        {"data": TensorDataset(INPUTS, LABELS[:, None].squeeze(1))},
    ),
    (
        {"data": TensorDataset(INPUTS, LABELS.float())},
        "target.long()",
        {"data": TensorDataset(INPUTS, LABELS.float().long())},
    ),
    (
        {"data": TensorDataset(INPUTS, LABELS + 1)},
        "sample 2 has the label 3",
        {"data": TensorDataset(INPUTS, LABELS)},
    ),
    (
        {"data": TensorDataset(INPUTS.double(), LABELS)},
        "tensor.float()",
        {"data": TensorDataset(INPUTS.double().float(), LABELS)},
    ),
    ({"model": lambda width: nn.Linear(4, 3)}, "as lambda: Net(10)", {"model": lambda: nn.Linear(4, 3)}),
    ({"precision": "fp17"}, "fp16", {"precision": "fp32"}),
    ({"rows": "loss"}, "as ['loss']", {"rows": ["loss"]}),
    ({"batch_size": None}, "expected a whole number", {"batch_size": 4}),
    ({"fresh": True}, "give a folder", {"fresh": True, "out": "runs/fresh"}),
    (
        {"out": "runs/py", "batch_size": 5},
        "--fresh to remove what is there",
        {"out": "runs/x", "batch_size": 5},
    ),
]


@pytest.mark.usefixtures("runs", "here")
@pytest.mark.parametrize(("call", "advice", "following"), DOOR, ids=[advice for _, advice, _ in DOOR])
def test_advice_of_evaluate_is_followed(call: dict[str, Any], advice: str, following: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        classified(**call)
    assert advice in str(caught.value)
    assert classified(**following).samples["evaluated"] == 12


@pytest.mark.usefixtures("here")
def test_the_function_that_is_advised_works() -> None:
    with pytest.raises(UsageError, match="Wrap it: forward=") as caught:
        classified(model=pair())
    written = re.search(r"forward=(lambda model, batch: [^.]*)\.", str(caught.value))
    assert written is not None
    assert classified(model=pair(), forward=eval(written[1])).samples["evaluated"] == 12


@pytest.mark.usefixtures("runs", "here")
def test_positional_arguments_and_names_for_rescore_get_advice() -> None:
    data: Any = TensorDataset(INPUTS, LABELS)
    for given in ((nn.Linear(4, 3), data), (nn.Linear(4, 3),)):
        with pytest.raises(UsageError, match=r"write evaluate\(model=\.\.\., data=\.\.\.\)"):
            dualeval.evaluate(*given)
    with pytest.raises(UsageError, match="dualeval score RUN --metric f1"):
        dualeval.rescore("runs/py", metrics=["f1"])  # type: ignore[list-item]
    assert not said("score runs/py --metric f1")
    assert not said("verify runs/py")
