"""The command line: bad input ends in exit code 2 with one message, on one rank and on several."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file

from dualeval.cli import dualeval
from dualeval.errors import UsageError
from dualeval.options.job import start_of
from dualeval.tasks.image_classification import EMBEDDED_WEIGHTS
from dualeval.tasks.image_data import ASSETS
from dualeval.tools.submit.command import SlurmJob
from tests.conftest import ROOT, Launch
from tests.vehicles.environments import read_variables

RUN: list[str | Path] = [sys.executable, "-m", "dualeval", "run"]


# What is typed, words of the message, and on how many ranks: "plain" on one alone, "long" on two in the long
# run alone, as no rank finds it.
CASES = {
    "no image": (
        "--model resnet18 --weights random:0 --num-classes 2 --data {tmp}/images --batch-size 1 --crop 32",
        *("a/broken.png ... cannot be read ... --on-error skip", "long"),
    ),
    "weights that do not fit": (
        "--model fashion-cnn --weights {tmp}/misfit.pt",
        "missing in the file: classifier.4.bias ... not in the model: stray ... (2, 2) ... (96, 3136)",
        "both",
    ),
    "a model without data": (
        "--model resnet18 --weights random:0",
        *(f"--model resnet18 was given without --data ... or --data {ASSETS} for", "long"),
    ),
    "unknown option": ("--bacth-size 3", "--bacth-size ... --batch-size", "long"),
    "unknown option of the task": ("--crpo=3", "--crpo ... --crop", "plain"),
    "unwritable output": ("--out /proc/out", "/proc/out ... cannot be written ... --out", "long"),
    "output without a name": ("--out ''", "'--out' ... it is empty ... runs/mine", "plain"),
    "earlier run": ("--out {tmp}/finished", "{tmp}/finished ... --fresh", "long"),
    "nproc beyond reason": ("--nproc 100000", "--nproc 100000 ... smaller --nproc", "plain"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wrong files."""
    tmp = tmp_path_factory.mktemp("inputs")
    for name in ("a", "b"):
        (tmp / "images" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (40, 40), (number, 2, 3)).save(tmp / f"images/{name}/{number}.png")
    (tmp / "images/a/broken.png").write_text("no image")
    state = load_file(EMBEDDED_WEIGHTS)
    misfit = {**state, "stray": torch.zeros(1), "classifier.1.weight": torch.zeros(2, 2)}
    del misfit["classifier.4.bias"]
    torch.save(misfit, tmp / "misfit.pt")
    (tmp / "finished").mkdir()
    (tmp / "finished/result.json").write_text("{}")
    return tmp


@pytest.mark.parametrize(
    ("name", "nproc"),
    [
        pytest.param(name, nproc, marks=[pytest.mark.long] if nproc and ranks == "long" else [])
        for name, (_, _, ranks) in CASES.items()
        for nproc in (False, True)
        if not (nproc and ranks == "plain")
    ],
    ids=lambda value: {False: "plain", True: "nproc"}.get(value, value),
)
def test_bad_input_exits_with_2(launch: Launch, inputs: Path, tmp_path: Path, name: str, nproc: bool) -> None:
    typed, says, _ = CASES[name]
    words = shlex.split(typed.format(tmp=inputs))
    words += [] if "--out" in words else ["--out", f"{tmp_path}/out"]
    start = ["--nproc", "2"] if nproc else []
    done = launch([*RUN, *start, *words], cwd=tmp_path, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("dualeval: error: ") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert [word for word in says.format(tmp=inputs).split(" ... ") if word not in done.stderr] == []
    assert not (tmp_path / "out/result.json").exists()
    if name == "no image":
        assert json.loads((tmp_path / "out/status.json").read_text())["state"] == "failed"
    else:
        assert list(tmp_path.iterdir()) == []


def test_nproc_under_a_launcher_is_refused(launch: Launch, tmp_path: Path) -> None:
    variables = read_variables(
        "RANK=0 LOCAL_RANK=0 GROUP_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 "
        "MASTER_PORT=1 TORCHELASTIC_RUN_ID=none"
    )
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


def test_flags_override_out_and_nproc_of_a_job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_wrong_out_or_nproc_in_a_job_file_is_refused(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "job.toml").write_text(line + "\n")
    with pytest.raises(UsageError, match=said):
        start_of(tmp_path / "job.toml")


def test_logs_of_submit_are_ignored_by_git() -> None:
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
        (["run", "--out", "gs://runs"], "--out gs://runs is a URL"),
        (["run", "--model", "resnet18", "--weights", "ftp://a/b.pt"], "--weights ftp://a/b.pt is a URL"),
        (["run", "--data", "http://a/b"], "--data http://a/b: over http://"),
        (["run", "--task", "object-detection"], "--task examples/detection.py:rectangles"),
    ],
)
def test_urls_and_unknown_tasks_are_refused_with_advice(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=re.escape(message)):
        dualeval(words, standalone_mode=False)
