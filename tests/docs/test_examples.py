"""The examples: sessions, one in the midst of a training, collectives, and curves of trainings."""

from __future__ import annotations

import ast
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from tests.conftest import ROOT, Launch
from tests.engine.end.test_endings import read
from tests.vehicles.launchers import needs, start, way

SCRIPT = ROOT / "examples" / "evaluate_in_a_script.py"
TRAINING = ROOT / "examples" / "evaluate_while_training.py"
WORKER = ROOT / "tests/vehicles/workers" / "example_worker.py"
ALONE = [sys.executable]
HOROVODRUN = ["horovodrun", "-np", "2", sys.executable]


@pytest.mark.parametrize("path", [SCRIPT, TRAINING], ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    text = path.read_text("utf-8")
    body = text.replace(ast.get_docstring(ast.parse(text), clean=False) or "", "").splitlines()
    assert len([line for line in body if line.strip(' "')]) <= 25


@pytest.fixture(scope="module")
def digest(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the embedded job, in the example's batches."""
    out = tmp_path_factory.mktemp("run") / "out"
    launch([*ALONE, "-m", "dualeval", "run", "--batch-size", "50", "--out", out]).ok()
    return str(read(out / "result.json")["metrics_digest"])


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(ALONE, id="alone", marks=pytest.mark.long),
        pytest.param([*start("torchrun", 2), sys.executable], id="torchrun"),
        pytest.param(HOROVODRUN, id="horovodrun", marks=[*needs("horovodrun", ""), pytest.mark.long]),
    ],
)
def test_a_script_evaluates_to_the_digest(
    launch: Launch, tmp_path: Path, digest: str, launcher: list[str]
) -> None:
    done = launch([*launcher, SCRIPT, tmp_path / "out"]).ok()
    assert done.stdout.count(digest) == 1


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        pytest.param([*start("torchrun", 2), sys.executable], [], id="DDP"),
        pytest.param(
            HOROVODRUN, ["horovod"], id="Horovod", marks=[*needs("horovodrun", ""), pytest.mark.long]
        ),
    ],
)
def test_training_goes_on_bit_for_bit(launch: Launch, launcher: list[str], words: list[str]) -> None:
    found = []
    for evaluates in ("with", "without"):
        done = launch([*launcher, WORKER, TRAINING, evaluates, *words]).ok()
        found.append(sorted(re.findall(r"<(\d) (\w+) (\w+)>", done.stdout)))
        assert len(re.findall(r"epoch 2: \{'correct': \d", done.stdout)) == 2
    assert found[0] == found[1] and len(found[0]) == 2
    assert {owner for _, owner, _ in found[0]} == {"False"}
    assert len({digest for *_, digest in found[0]}) == 1


# -- the collectives: under every launcher, and in docs/backends.md as it is --------------------------


COLLECTIVES = ROOT / "examples/mean_of_shards.py"
SAID = {1: "first: 1 ranks, 3 losses, mean 1.0000", 2: "first: 2 ranks, 7 losses, mean 1.2857"}


@pytest.mark.parametrize(
    ("launcher", "backend", "size"),
    [
        way("torchrun", "torch", 2),
        way("none", "single", 1, long=True),
        way("mpirun", "mpi", 2, long=True),
        *(way(launcher, "horovod", 2, long=True) for launcher in ("horovodrun", "horovodrun --mpi")),
    ],
)
def test_the_collectives_print_the_same_over_every_backend(
    launch: Launch, tmp_path: Path, launcher: str, backend: str, size: int
) -> None:
    done = launch([*start(launcher, size), sys.executable, COLLECTIVES], cwd=tmp_path).ok()
    assert done.stdout.count(SAID[size]) == 1


def test_the_page_has_the_collectives() -> None:
    code = COLLECTIVES.read_text("utf-8").partition('"""\n\n')[2]
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/backends.md").read_text("utf-8"), re.DOTALL)
    assert code in blocks


# -- plot_curves.py: the pictures and the Markdown of trainings whose numbers are known -------------------


CURVES = ROOT / "examples" / "plot_curves.py"
FACTS = {
    "model": "resnet18",
    "data": "cifar10",
    "precision": "fp32",
    "backend": "torch",
    "seed": 0,
    "lr": 0.1,
    "launcher": "torchrun",
    "device": "cpu",
    "versions": {"torch": "2.13.0"},
}


def make_run(folder: Path, top1: list[float | None], train_s: float, size: int = 1, **facts: Any) -> Path:
    """A training of 1,000 images an epoch, as examples/train_with_eval.py writes it."""
    folder.mkdir(parents=True)
    batch = facts.pop("batch_size", 64)
    sizes = {"world_size": size, "batch_size": batch, "global_batch_size": batch * size}
    (folder / "run.json").write_text(json.dumps({**FACTS, **sizes, **facts}))
    lines = [
        {
            "epoch": number,
            "metrics": {"top1": value, "loss": 1 / number},
            "intervals": {"top1": [value - 0.1, value + 0.1]} if value is not None else {},
            "train_s": train_s,
            "eval_s": 2.0,
            "elapsed_s": number * (train_s + 2.0),
            "images_per_s": 1000 / train_s,
        }
        for number, value in enumerate(top1, 1)
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def plot(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the script with these words; returns what it prints, or says where it ends in an error."""

    def run(*arguments: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["plot_curves.py", *map(str, arguments)])
        try:
            runpy.run_path(str(CURVES), run_name="__main__")
        except SystemExit as ended:
            assert ended.code == 2
            return capsys.readouterr().err
        return capsys.readouterr().out

    return run


def cells(markdown: str) -> list[list[str]]:
    """The rows of all tables, without their heads."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in markdown.splitlines()
        if line.startswith("| ")
    ]
    return [row for row in rows if row[0] != "run" and set(row[0]) != {"-"}]


def test_curves_and_tables_show_each_run(tmp_path: Path, plot: Callable[..., str]) -> None:
    runs = [
        make_run(tmp_path / "one", [0.5, 0.75, 0.7], 10.0),
        make_run(tmp_path / "two", [0.4, None, 0.6], 6.25, 2, lr=0.2),
        # What was resumed from epoch 1 has trained epoch 2 again, and is writing epoch 3.
        make_run(tmp_path / "half", [0.1, 0.2], 5.0, precision="amp-bf16"),
    ]
    log = runs[2] / "log.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines, lines[1].replace("0.2", "0.3"), lines[1][:30]]))
    said = plot(*runs, "--out", tmp_path / "plots")
    one, two = "fp32, 1 process, global batch 64, lr 0.1", "fp32, 2 processes, global batch 128, lr 0.2"
    half = "amp-bf16, 1 process, global batch 64, lr 0.1"
    assert said.startswith("Shared by all runs: resnet18, cifar10, batch 64, seed 0, over torch, cpu.")
    assert cells(said) == [
        [one, "3", "75.00% (epoch 2)", "70.00%", "10 + 2", "100"],
        [two, "3", "60.00% (epoch 3)", "60.00%", "6.25 + 2", "160"],
        [half, "2", "30.00% (epoch 2)", "30.00%", "5 + 2", "200"],
        [
            *[two, one, "1 → 2", "10 → 6.25", "1.60", "2", "80%"],
            "global batch 64 → global batch 128; lr 0.1 → lr 0.2",
        ],
    ]
    assert "**The global batch sizes differ**" in said and "**The learning rates differ**" in said
    assert "different set-ups" not in said and "**The runs have different numbers of epochs**" in said

    with Image.open(tmp_path / "plots" / "curves.png") as picture:
        assert picture.size[0] == 1500
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24) or []}
    assert {(0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00), (0x00, 0x9E, 0x73)} <= colours
    text = (tmp_path / "plots" / "curves.svg").read_text("utf-8")
    ElementTree.fromstring(text)
    for label in (one, two, half, "epoch", "seconds since the start (training and evaluation)"):
        assert f"<!-- {label} -->" in text
    assert "95 % intervals" not in text  # one epoch has none
    plot(*runs, "--out", tmp_path / "again")
    assert (tmp_path / "again" / "curves.svg").read_text("utf-8") == text


def test_the_run_that_is_most_alike_is_the_base(tmp_path: Path, plot: Callable[..., str]) -> None:
    runs = [
        make_run(tmp_path / "a", [0.5], 10.0, batch_size=32),
        make_run(tmp_path / "b", [0.5], 8.0, batch_size=128),
        make_run(tmp_path / "c", [0.5], 2.5, 4, batch_size=32, device="cuda", model="resnet18"),
        make_run(tmp_path / "d", [0.5], 1.0, 8, batch_size=32, model="vgg16"),
    ]
    said = plot(*runs, "--out", tmp_path, "--metric", "loss")
    (row,) = (row for row in cells(said) if "→" in row[2])
    assert row[2:7] == ["1 → 4", "8 → 2.5", "3.20", "4", "80%"]  # of the same global batch
    assert row[7] == "batch 128 → batch 32; cpu → cuda"
    assert "**The times are of different set-ups**: not the same device." in said
    assert "above the ideal" not in said
    assert "1 (epoch 1)" in said


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("run.json", None, "has no run.json: expected the --out folder"),
        ("log.jsonl", "", "log.jsonl has no whole epoch yet"),
        ("log.jsonl", "{\n", "log.jsonl, line 1, is no JSON"),
        (
            "log.jsonl",
            '{"epoch": 1, "metrics": {}}\n',
            "line 1, has no elapsed_s, eval_s, images_per_s, train_s",
        ),
    ],
)
def test_a_folder_that_is_no_run_is_named(
    file: str, text: str | None, said: str, tmp_path: Path, plot: Callable[..., str]
) -> None:
    run = make_run(tmp_path / "run", [0.5], 1.0)
    (run / file).unlink()
    if text is not None:
        (run / file).write_text(text)
    assert said in plot(run, "--out", tmp_path / "plots")
    assert not (tmp_path / "plots").exists()


def test_a_missing_metric_or_library_is_named(
    tmp_path: Path, plot: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", [0.5], 1.0)
    said = plot(run, "--out", tmp_path, "--metric", "top5")
    assert "has no metric 'top5': it has loss, top1" in said
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert 'type: pip install "dualeval[plots]"' in plot(run, "--out", tmp_path)
