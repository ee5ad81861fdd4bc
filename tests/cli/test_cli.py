"""The command line: bad input ends in exit code 2 with one message, on one rank and on several."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file

from dualeval.cli import dualeval
from dualeval.errors import UsageError
from dualeval.models.sources.factory import FactoryModel
from dualeval.options.job import start_of
from dualeval.tasks.image_classification import EMBEDDED_WEIGHTS
from dualeval.tasks.image_data import ASSETS
from dualeval.tools.submit import SlurmJob
from tests.conftest import ROOT, Finished, Launch
from tests.launchers import check_torchrun_reports

RUN: list[str | Path] = [sys.executable, "-m", "dualeval", "run"]
RESNET: list[str] = ["--model", "resnet18", "--weights", "random:0"]


@dataclass(frozen=True, kw_only=True)
class BadInput:
    """A wrong command and the words that its message must hold."""

    arguments: list[str]
    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)


CASES = {
    "empty data folder": BadInput(
        arguments=[*RESNET, "--data", "{tmp}/empty"], words=["{tmp}/empty", "no sample", "CLASS/IMAGE"]
    ),
    "no image": BadInput(
        arguments=[
            *(*RESNET, "--num-classes", "2", "--data", "{tmp}/images", "--batch-size", "1"),
            *("--crop", "32"),
        ],
        words=["a/broken.png", "cannot be read", "--on-error skip"],
    ),
    "weights that do not fit": BadInput(
        arguments=["--model", "fashion-cnn", "--weights", "{tmp}/misfit.pt"],
        words=["missing in the file: classifier.4.bias", "not in the model: stray", "(2, 2)", "(96, 3136)"],
    ),
    "a model without data": BadInput(
        arguments=RESNET, words=["--model resnet18 was given without --data", f"or --data {ASSETS} for"]
    ),
    "input size": BadInput(
        arguments=[*RESNET, "--data", str(ASSETS)],
        words=["cannot take images of shape (1, 28, 28)", "a layer takes 3", "Give --channels 3"],
    ),
    "unknown option": BadInput(arguments=["--bacth-size", "3"], words=["--bacth-size", "--batch-size"]),
    "TF32 on a CPU": BadInput(
        arguments=["--precision", "tf32", "--device", "cpu"], words=["--precision tf32", "cpu", "fp32", "GPU"]
    ),
    "unwritable output": BadInput(
        arguments=["--out", "/proc/out"], words=["/proc/out", "cannot be written", "--out"]
    ),
    "output is a file": BadInput(arguments=["--out", "{tmp}/misfit.pt"], words=["misfit.pt", "--out"]),
    "output without a name": BadInput(arguments=["--out", ""], words=["'--out'", "it is empty", "runs/mine"]),
    "earlier run": BadInput(arguments=["--out", "{tmp}/finished"], words=["{tmp}/finished", "--fresh"]),
    "nproc beyond reason": BadInput(
        arguments=["--nproc", "100000"], words=["--nproc 100000", "smaller --nproc"]
    ),
    "half-set torchrun": BadInput(
        arguments=[], variables={"RANK": "1"}, words=["WORLD_SIZE", "RANK=1", "--launcher none"]
    ),
}
# These say no before any process is started, or are about starting itself.
PLAIN_ONLY = {*("output without a name", "nproc beyond reason", "half-set torchrun")}
# Of those that ranks find: in the data, in the weights, and in the output folder.
ON_RANKS = {"weights that do not fit"}


def two_in_one(average: dict[str, torch.Tensor]) -> dict[str, object]:
    """A checkpoint with a model that knows nothing, and an average that knows it all."""
    return {
        "model": {name: torch.zeros_like(tensor) for name, tensor in average.items()},
        "model_ema": {
            "n_averaged": torch.tensor(5),
            **{f"module.{name}": tensor for name, tensor in average.items()},
        },
        "args": argparse.Namespace(lr=0.1, output_dir=Path("runs")),
    }


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wrong files."""
    tmp = tmp_path_factory.mktemp("inputs")
    (tmp / "empty").mkdir()
    for name in ("a", "b"):
        (tmp / "images" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (40, 40), (number, 2, 3)).save(tmp / f"images/{name}/{number}.png")
    (tmp / "images/a/broken.png").write_text("no image")
    state = load_file(EMBEDDED_WEIGHTS)
    misfit = {**state, "stray": torch.zeros(1), "classifier.1.weight": torch.zeros(2, 2)}
    del misfit["classifier.4.bias"]
    torch.save(misfit, tmp / "misfit.pt")
    torch.save(two_in_one(state), tmp / "several.pt")
    (tmp / "finished").mkdir()
    (tmp / "finished/result.json").write_text("{}")
    return tmp


def run_case(launch: Launch, case: BadInput, inputs: Path, tmp_path: Path, *, nproc: bool) -> Finished:
    arguments = [argument.format(tmp=inputs) for argument in case.arguments]
    if "--out" not in arguments:
        arguments += ["--out", str(tmp_path / "out")]
    start = ["--nproc", "2"] if nproc else []
    return launch([*RUN, *start, *arguments], variables=case.variables, cwd=tmp_path, timeout=60)


@pytest.mark.parametrize(
    ("name", "nproc"),
    [
        pytest.param(name, nproc, marks=[pytest.mark.long] if nproc and name not in ON_RANKS else [])
        for name in CASES
        for nproc in (False, True)
        if not (nproc and name in PLAIN_ONLY)
    ],
    ids=lambda value: {False: "plain", True: "nproc"}.get(value, value),
)
def test_bad_input(launch: Launch, inputs: Path, tmp_path: Path, name: str, nproc: bool) -> None:
    case = CASES[name]
    done = run_case(launch, case, inputs, tmp_path, nproc=nproc)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("dualeval: error: ") == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in case.words:
        assert word.format(tmp=inputs) in done.stderr
    assert not (tmp_path / "out/result.json").exists()
    if name == "no image":
        assert json.loads((tmp_path / "out/status.json").read_text())["state"] == "failed"
    else:
        assert list(tmp_path.iterdir()) == []


def test_ranks_exit_2_under_a_users_own_launcher(launch: Launch, inputs: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    arguments: list[str | Path] = [*RESNET, "--data", inputs / "empty"]
    done = launch([*torchrun, "-m", "dualeval", "run", *arguments], cwd=tmp_path, timeout=60)
    assert done.returncode != 0
    assert done.stderr.count("dualeval: error: ") == 1
    check_torchrun_reports(done.stderr, 2)


def test_skip_counts_and_lists(launch: Launch, inputs: Path, tmp_path: Path) -> None:
    arguments: list[str | Path] = [
        *(*RESNET, "--batch-size", "2", "--crop", "32", "--on-error", "skip"),
        *("--data", inputs / "images"),
    ]
    done = launch([*RUN, "--nproc", "2", *arguments, "--out", tmp_path / "out"], timeout=60).ok()
    assert "6 of 7 evaluated, 1 failed" in done.stdout
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert [entry["id"] for entry in result["failed"]] == ["a/broken.png"]


def test_the_key_that_was_used_is_said_once(launch: Launch, inputs: Path, tmp_path: Path) -> None:
    weights: list[str | Path] = ["--model", "fashion-cnn", "--weights", inputs / "several.pt"]
    out: list[str | Path] = ["--limit", "200", "--out", tmp_path / "out"]
    done = launch(
        [*RUN, "--nproc", "2", *weights, "--weights-key", "model_ema", *out], cwd=tmp_path, timeout=60
    ).ok()
    note = (
        f"dualeval: note: weights: the state_dict under 'model_ema' of {inputs / 'several.pt'}, "
        "prefix 'module.' removed, 1 left out: n_averaged\n"
    )
    assert done.stderr.count(note) == 1
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert result["metrics"]["top1"] > 0.8
    assert result["job"]["weights_key"] == "model_ema"


def test_json_is_all_that_is_printed(launch: Launch, tmp_path: Path) -> None:
    done = launch(
        [*RUN, "--nproc", "2", "--limit", "70", "--json", "--out", tmp_path / "out"], timeout=60
    ).ok()
    assert json.loads(done.stdout) == json.loads((tmp_path / "out/result.json").read_text())


def test_nproc_under_a_launcher_is_refused(launch: Launch, tmp_path: Path) -> None:
    variables = {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"), "1"),
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "none",
    }
    done = launch([*RUN, "--nproc", "2"], cwd=tmp_path, variables=variables, timeout=60)
    assert done.returncode == 2
    assert "--nproc 2 was given to a process that torchrun had started" in done.stderr


def test_dualeval_alone_shows_the_commands() -> None:
    done = CliRunner().invoke(dualeval, [])
    assert done.exit_code == 0
    assert done.output.startswith("Usage: dualeval [OPTIONS] COMMAND [ARGS]...")
    assert "error" not in done.output
    assert re.search(r"^  run ", done.output, re.MULTILINE)


def test_a_job_file_says_where_and_on_how_many_ranks(launch: Launch, tmp_path: Path) -> None:
    """And the ranks that it starts, which read it as well, start no others."""
    (tmp_path / "jobs").mkdir()
    job = tmp_path / "jobs/job.toml"
    job.write_text('out = "found"\nnproc = 2\nlimit = 70\n')
    launch([*RUN, "--config", job, "--no-progress"], cwd=tmp_path, timeout=60).ok()
    result = json.loads((tmp_path / "jobs/found/result.json").read_text())
    assert (result["world"]["size"], result["samples"]["total"]) == (2, 70)
    assert "nproc" not in result["job"]


def test_flags_win_over_where_a_job_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.toml").write_text('out = "found"\nnproc = 2\n')
    assert start_of(tmp_path / "job.toml") == {"out": tmp_path / "found", "nproc": 2}
    assert start_of(None) == {}
    asked: list[Any] = []

    def start(*words: Any) -> int:
        asked.append(words)
        return 0

    monkeypatch.setattr(sys.modules["dualeval.cli.run"], "_start_ranks", start)
    for words, nproc in (([], 2), (["--nproc", "3"], 3)):
        done = CliRunner().invoke(dualeval, ["run", "--config", str(tmp_path / "job.toml"), *words], obj=[])
        assert done.exit_code == 0, done.output
        assert asked[-1][0] == nproc
        assert asked[-1][3].out == tmp_path / "found"
    CliRunner().invoke(
        dualeval, ["run", "--config", str(tmp_path / "job.toml"), "--out", str(tmp_path / "mine")], obj=[]
    )
    assert asked[-1][3].out == tmp_path / "mine"


@pytest.mark.parametrize(("line", "said"), [("nproc = 0", "nproc"), ('nproc = "two"', "expected an int")])
def test_a_job_file_with_a_wrong_start(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "job.toml").write_text(line + "\n")
    with pytest.raises(UsageError, match=said):
        start_of(tmp_path / "job.toml")


def test_logs_of_submit_are_no_part_of_the_repository() -> None:
    name = SlurmJob().log.replace("%j", "4711")
    done = subprocess.run(["git", "check-ignore", "-q", name], cwd=ROOT, check=False, timeout=30)
    assert done.returncode in (0, 128), f"{name} is not ignored"  # 128: this is no repository


def test_a_file_that_is_missing_is_named_before_torch_is_imported(launch: Launch, tmp_path: Path) -> None:
    code = """
import sys
from dualeval.cli import dualeval
from dualeval.errors import UsageError
try:
    dualeval(sys.argv[1:], standalone_mode=False)
except UsageError as error:
    print(error, "torch" in sys.modules)
"""
    for given in (["--weights", "none.pt", "--data", "."], ["--weights", "random:0", "--data", "nowhere"]):
        done = launch([sys.executable, "-c", code, "run", "--model", "resnet18", *given], cwd=tmp_path)
        assert re.search(r"does not exist\. Give .* False$", done.stdout), done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "s3://runs/1", "--to", "jsonl:x"], "the path s3://runs/1 is a URL, expected a path"),
        (["run", "--out", "gs://runs"], "the path gs://runs is a URL"),
        (["run", "--model", "resnet18", "--weights", "s3://a/b.pt"], "--weights s3://a/b.pt is a URL"),
        (["run", "--data", "https://a/b"], "--data https://a/b is a URL"),
        (["run", "--task", "object-detection"], "--task examples/detection.py:rectangles"),
    ],
)
def test_what_cannot_be_meant_is_said(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=re.escape(message)):
        dualeval(words, standalone_mode=False)


def test_a_module_that_is_missing_gets_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "netze.py").write_text("")
    with pytest.raises(UsageError, match=r"no module named 'netz' can be imported\. Nearest: netze\."):
        FactoryModel("netz:make").create(None)
