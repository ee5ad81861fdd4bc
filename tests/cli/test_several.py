"""Several models in one run: which they are, what each one comes to, and the table of all."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from torch import nn

from dualeval.cli import dualeval
from dualeval.data import image_files
from dualeval.data.image_files import digest_of_file
from dualeval.data.image_sets import class_folders
from dualeval.engine.model import preparation
from dualeval.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE, UsageError
from dualeval.options.job import Job, is_several
from dualeval.options.several import TABLES, candidates_of, expanded, found_models, names_of
from dualeval.report.loggers.loggers import of_model, targets_of
from dualeval.report.models_table import DONE, FAILED
from dualeval.result import MODELS, read_result
from dualeval.vision_library import torchvision
from tests.conftest import Launch
from tests.data.test_image_folder import save
from tests.engine.end.test_endings import await_that
from tests.vehicles.launchers import needs, start

# Imported here, not in the first test that needs it: the import sets an environment variable.
torchvision()
RUN: list[str | Path] = [sys.executable, "-m", "dualeval", "run", "--no-progress"]
TORCHRUN: list[str | Path] = [*start("torchrun", 2), *RUN]

# Models of ten classes for idx files; what goes wrong does so on rank 1 alone.
FACTORIES = """
import os
import time

import torch
from torch import nn

RANKS = [os.environ.get(name) for name in ("RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK")]


class Odd(nn.Module):
    dualeval_identity_ignores = ("_calls",)

    def __init__(self, mode):
        super().__init__()
        self._mode, self._calls = mode, 0
        self.linear = nn.Linear(784, 10)

    def forward(self, images):
        self._calls += 1
        if self._calls > 5 and "1" in RANKS:
            if self._mode == "raise":
                raise ValueError("the fifth batch")
            if self._mode == "hang":
                time.sleep(1000)
        if self._mode == "slow":
            time.sleep(0.4)
        if self._mode == "memory":
            torch.empty(1 << 60)
        return self.linear(images.flatten(1))


def good(): return Odd("")
def raises(): return Odd("raise")
def hangs(): return Odd("hang")
def slow(): return Odd("slow")
def memory(): return Odd("memory")
def last(): return Odd("")


def unbuilt():
    if "1" in RANKS:
        raise RuntimeError("not on this node")
    return Odd("")
"""
JOB = """
weights = "random:1"
mean = [0.28]
std = [0.35]
num-classes = 10
metric = ["loss", "top1"]
batch-size = 50
limit = 2000
"""


def job_file(folder: Path, *models: str) -> Path:
    """A job file of models by their factories, in a folder that has these."""
    from dualeval.tasks.image_data import ASSETS

    (folder / "odd.py").write_text(FACTORIES)
    tables = [f'[[models]]\nname = "{name}"\nmodel = "odd:{name}"\n' for name in models]
    path = folder / "job.toml"
    path.write_text(f'data = "{ASSETS}"\n{JOB}{"".join(tables)}')
    return path


def statuses(out: Path) -> dict[str, str]:
    models = json.loads((out / "models.json").read_text())["models"]
    return {model["name"]: model["status"] for model in models}


class Little(nn.Module):
    """A classifier of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(images.mean((2, 3)))
        return logits


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with pictures in ``val`` and checkpoints of ``Little`` in ``ckpts``."""
    monkeypatch.chdir(tmp_path)
    for number in range(18):
        save(tmp_path / "val" / "abc"[number % 3] / f"{number // 3}.png", size=(40, 40 + number))
    (tmp_path / "ckpts").mkdir()
    for epoch in (10, 2, 1):
        torch.manual_seed(epoch)
        torch.save(Little().state_dict(), tmp_path / "ckpts" / f"epoch{epoch}.pt")
    return tmp_path


def in_process(command: str, *arguments: str | Path) -> int:
    """A command in this process, on one rank; returns the exit code."""
    words = [command, *map(str, arguments), "--launcher", "none", "--no-progress"]
    try:
        found = dualeval.main(words, standalone_mode=False, obj=words)
    except SystemExit as error:
        found = error.code
    return int(found or 0)


run = partial(in_process, "run")


def little(data: Path, weights: str, *more: str | Path) -> list[str | Path]:
    return [
        *("--model", "tests.cli.test_several:Little", "--weights", weights, "--data", data, "--crop", "32"),
        *("--resize", "36", "--mean", "0.5", "--std", "0.5", "--batch-size", "4", "--workers", "0", *more),
    ]


# -- which models ----------------------------------------------------------------------------------------


def test_a_pattern_gives_files_in_natural_order(pictures: Path) -> None:
    assert expanded("ckpts/*.pt") == ["ckpts/epoch1.pt", "ckpts/epoch2.pt", "ckpts/epoch10.pt"]
    assert expanded("ckpts/epoch[12].pt") == ["ckpts/epoch1.pt", "ckpts/epoch2.pt"]
    assert [Path(path).name for path in expanded(f"{pictures}/**/epoch1?.pt")] == ["epoch10.pt"]
    with pytest.raises(
        UsageError, match=r"ckpts/\*\.bin: no file or folder matches. In ckpts there is epoch1.pt"
    ):
        expanded("ckpts/*.bin")


@pytest.mark.parametrize(
    ("pattern", "paths", "names"),
    [
        ("ckpts/*.pt", ["ckpts/a.pt", "ckpts/b 1.pt"], ["a", "b-1"]),
        ("runs/*/best.pt", ["runs/a/best.pt", "runs/b/best.pt"], ["a-best", "b-best"]),
        ("ckpts/*", ["ckpts/a.pt", "ckpts/a.safetensors"], ["a.pt", "a.safetensors"]),
        ("*.p[tk]", ["a.pt", "a.pk"], ["a.pt", "a.pk"]),
        ("/x/*.pt", ["/x/\udcff.pt"], ["udcff"]),
        (
            "*.pt",
            ["result.json.pt", "models.csv.pt", "lease.json.pt", "job.json.pt"],
            ["result.json-model", "models.csv-model", "lease.json-model", "job.json-model"],
        ),
    ],
)
def test_names_are_those_of_files(pattern: str, paths: list[str], names: list[str]) -> None:
    assert names_of(pattern, paths) == names


def test_equal_names_are_made_distinct() -> None:
    first, second = names_of("runs/*/*.pt", ["runs/a/b-c.pt", "runs/a-b/c.pt"])
    assert first != second
    assert first.startswith("a-b-c-")


def test_a_file_whose_name_has_brackets_is_no_pattern(pictures: Path) -> None:
    (pictures / "ckpts/model[1].pt").write_bytes(b"")
    assert not is_several([(None, Job.of(model="resnet18", weights="ckpts/model[1].pt"))])
    assert is_several([(None, Job.of(model="resnet18", weights="ckpts/*"))])
    assert not is_several([(None, Job.of(model="resnet18", weights="DEFAULT"))])


def test_tables_of_a_job_file_are_models_with_their_options(pictures: Path) -> None:
    path = pictures / "job.toml"
    path.write_text(
        'model = "resnet18"\nbatch-size = 8\n'
        '[[models]]\nname = "first"\nweights = "ckpts/epoch1.pt"\nbatch_size = 4\n'
        '[[models]]\nname = "e"\nweights = "ckpts/*.pt"\nresize = 40\n'
        '[[models]]\nmodel = "vgg11"\nweights = "DEFAULT"\n'
    )
    jobs = Job.read_all(path, {"precision": "amp-bf16"})
    found = candidates_of(jobs, found_models(jobs))
    assert [each.name for each in found] == ["first", "e-epoch1", "e-epoch2", "e-epoch10", "vgg11-DEFAULT"]
    assert [each.job.batch_size for each in found] == [4, 8, 8, 8, 8]
    assert {each.job.precision for each in found} == {"amp-bf16"}
    assert [each.job.options.resize for each in found] == [None, 40, 40, 40, None]
    assert found[0].job.options.weights == str(pictures / "ckpts/epoch1.pt")
    with pytest.raises(UsageError, match="belongs to 'dualeval run'"):
        Job.read(path, {})


@pytest.mark.parametrize(
    ("tables", "flags", "says"),
    [
        ("[[models]]\nwidth = 3", {}, "model 1 of .*unknown key 'width'"),
        ('[[models]]\ndevice = "cpu"', {}, "device is the same for all models"),
        ('[[models]]\nout = "x"', {}, "out is the same for all models"),
        ("[[models]]\nname = 3", {}, "name = 3: expected a text"),
        ("models = 3", {}, "expected tables"),
        ("[[models]]\nresize = -1", {}, "model 1 of .*--resize"),
        ("[[models]]\nresize = 3", {"resize": 4}, "has resize, and so does the command: leave out --resize"),
    ],
)
def test_wrong_tables_are_refused(tmp_path: Path, tables: str, flags: dict[str, Any], says: str) -> None:
    (tmp_path / "job.toml").write_text(f"{tables}\n")
    with pytest.raises(UsageError, match=says):
        Job.read_all(tmp_path / "job.toml", flags)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["a", "a"], "2 of the models are called a"),
        (["a/b"], "expected letters, digits"),
        (["models.csv"], "expected letters, digits.* such as models.csv-model"),
        (["result.json"], "expected letters, digits.* such as result.json-model"),
        (["..", "b"], "expected letters, digits"),
    ],
)
def test_wrong_names_of_models_are_refused(names: Sequence[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        found_models([(name, Job.of(model="resnet18", weights="DEFAULT")) for name in names])


# -- results ---------------------------------------------------------------------------------------------


def test_each_result_is_that_of_a_run_alone(
    pictures: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where one fails; data is opened once, and what is done is shown again."""
    (pictures / "ckpts/epoch3.pt").write_bytes(b"PK\x03\x04")
    opened: list[Any] = []
    monkeypatch.setattr(
        class_folders, "class_folders", _counted(class_folders.class_folders, opened, "listed")
    )
    monkeypatch.setattr(image_files, "digest_of_file", _counted(digest_of_file, opened, "read"))
    alive = _models_alive(monkeypatch)
    assert run(*little(pictures / "val", "ckpts/*.pt", "--out", "all")) == EXIT_USAGE
    assert alive == [1] * 3, "the one before is released"
    assert (opened.count("listed"), opened.count("read")) == (1, 18)
    done = {"epoch1": DONE, "epoch2": DONE, "epoch3": FAILED, "epoch10": DONE}
    assert statuses(pictures / "all") == done
    said = capsys.readouterr()
    assert "error: model epoch3: ckpts/epoch3.pt is cut short" in said.err
    for epoch in (1, 10):
        alone = pictures / f"alone{epoch}"
        assert run(*little(pictures / "val", f"ckpts/epoch{epoch}.pt", "--out", alone)) == 0
        one, other = (read_result(path / "result.json") for path in (alone, pictures / f"all/epoch{epoch}"))
        same = ("fingerprint", "metrics_digest", "metrics", "intervals", "data", "weights", "labels", "job")
        assert [getattr(one, name) for name in same] == [getattr(other, name) for name in same]
        assert one.description == other.description
        # The failed checkpoint is as it was; a good one takes its place, and another one comes.
    (pictures / "ckpts/epoch3.pt").write_bytes((pictures / "ckpts/epoch1.pt").read_bytes())
    (pictures / "all/models.csv.0123abcd.partial").write_text("of a killed run")
    capsys.readouterr()
    assert run(*little(pictures / "val", "ckpts/*.pt", "--out", "all", "--json")) == EXIT_DONE
    models = json.loads(capsys.readouterr().out)["models"]
    earlier = {model["name"]: model["result"]["earlier"] for model in models}
    assert earlier == {"epoch1": True, "epoch2": True, "epoch3": False, "epoch10": True}
    assert TABLES[0] == MODELS
    assert {path.name for path in (pictures / "all").iterdir()} == {*TABLES, *done}


def _models_alive(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many models there are each time that one has been built; filled as they are."""
    counts: list[int] = []
    set_mode = preparation.set_evaluation_mode

    def counted(model: nn.Module) -> list[str]:
        counts.append(sum(type(each).__name__ == Little.__name__ for each in gc.get_objects()))
        return set_mode(model)

    monkeypatch.setattr("dualeval.engine.run.set_evaluation_mode", counted)
    return counts


def _counted(function: Callable[..., Any], calls: list[Any], name: str) -> Callable[..., Any]:
    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(name)
        return function(*arguments, **named)

    return counted


def test_a_picture_that_changes_is_read_again(pictures: Path) -> None:
    from dualeval.data.cache import DataCache
    from dualeval.data.preprocessing import Preprocessing

    cache = DataCache()

    def contents(crop: int, count: int = 18) -> str:
        data = class_folders.ImageFolder(pictures / "val", Preprocessing(resize=36, crop=crop), cache=cache)
        data.fingerprint(count)
        return data.content_fingerprint(range(count))

    before = contents(32)
    path = pictures / "val/a/0.png"
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    status = path.stat()
    path.write_bytes(changed)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert contents(24) == before, "nothing tells it from the file before"
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert contents(24) != before


def test_a_folder_of_one_model_is_refused_for_several_and_back(pictures: Path) -> None:
    assert run(*little(pictures / "val", "ckpts/epoch1.pt", "--out", "one")) == 0
    assert run(*little(pictures / "val", "ckpts/*.pt", "--out", "one")) == EXIT_USAGE
    assert run(*little(pictures / "val", "ckpts/*.pt", "--out", "several")) == 0
    assert run(*little(pictures / "val", "ckpts/epoch1.pt", "--out", "several")) == EXIT_USAGE
    assert run(*little(pictures / "val", "ckpts/*.bin", "--out", "none")) == EXIT_USAGE
    assert not (pictures / "none").exists()


def test_the_others_are_compared_with_one_of_them(pictures: Path) -> None:
    command = little(pictures / "val", "ckpts/*.pt", "--out", "all")
    assert run(*command) == 0
    assert run(*command, "--fresh", "--reference", "all/epoch1") == 0
    found = [read_result(pictures / f"all/epoch{epoch}/result.json").reference for epoch in (1, 2, 10)]
    assert [bool(each) for each in found] == [False, True, True]


def test_a_dry_run_checks_every_model(pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (pictures / "ckpts/epoch3.pt").write_bytes(b"")
    assert run(*little(pictures / "val", "ckpts/*.pt", "--dry-run", "--out", "out")) == EXIT_USAGE
    models = json.loads(capsys.readouterr().out)["models"]
    assert [model["name"] for model in models] == ["epoch1", "epoch2", "epoch3", "epoch10"]
    assert "is empty" in models[2]["error"]
    assert models[3]["job"]["weights"] == str(pictures / "ckpts/epoch10.pt")
    assert not (pictures / "out").exists()


def test_each_model_has_a_run_of_its_own_in_a_tracker() -> None:
    texts = ["tensorboard:tb", "wandb:project", "mlflow:file:m#mine", "jsonl:lines"]
    assert [of_model(target, "epoch=1").text for target in targets_of(texts, None)] == [
        "tensorboard:tb/epoch=1",
        "wandb:project",
        "mlflow:file:m#mine-epoch-1",
        "jsonl:lines",
    ]


# -- ranks -----------------------------------------------------------------------------------------------


def test_both_ranks_go_on_after_a_model_that_fails_on_one(launch: Launch, tmp_path: Path) -> None:
    """Before the loop and in it: both ranks go on with the next model."""
    job = job_file(tmp_path, "raises", "unbuilt", "good")
    done = launch([*TORCHRUN, "--config", job, "--out", "out"], cwd=tmp_path)
    assert done.returncode == EXIT_FAILED, done.stderr
    assert statuses(tmp_path / "out") == {"raises": FAILED, "unbuilt": FAILED, "good": DONE}
    assert "in your code" in done.stderr
    assert done.stderr.count("dualeval: error: model raises: rank 1 on ") == 1
    assert done.stderr.count("RuntimeError: not on this node") == 1
    status = json.loads((tmp_path / "out/raises/status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", EXIT_FAILED)
    assert "the fifth batch" in status["reason"]
    assert list((tmp_path / "out/raises/journal").glob("*.journal")), "what was finished is saved"
    assert not (tmp_path / "out/raises/lease.json").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param([*RUN, "--nproc", "2"], id="nproc"),
        pytest.param([*RUN, "--nproc", "2", "--schedule", "dynamic"], id="dynamic"),
        pytest.param(["horovodrun", "-np", "2", *RUN], id="horovodrun", marks=needs("horovodrun", "")),
        pytest.param(
            ["mpirun", "-np", "2", *RUN, "--backend", "mpi"], id="mpirun", marks=needs("mpirun", "")
        ),
    ],
)
def test_on_every_backend_the_next_model_goes_on(
    launch: Launch, tmp_path: Path, launcher: list[str | Path]
) -> None:
    job = job_file(tmp_path, "good", "raises", "memory", "unbuilt", "last")
    done = launch([*launcher, "--config", job, "--out", "out"], cwd=tmp_path)
    # mpirun and horovodrun have codes of their own for a rank that failed.
    assert done.returncode != 0
    found = statuses(tmp_path / "out")
    if "dynamic" in launcher:
        # The rank on which it raises may have come too late for enough batches.
        assert found.pop("raises") in (DONE, FAILED)
    else:
        assert found.pop("raises") == FAILED
    assert found == {"good": DONE, "memory": FAILED, "unbuilt": FAILED, "last": DONE}
    launch([*RUN, "--config", job_file(tmp_path, "last"), "--out", "alone"], cwd=tmp_path).ok()
    digests = {read_result(tmp_path / out / "last/result.json").metrics_digest for out in ("out", "alone")}
    assert len(digests) == 1


@pytest.mark.long
def test_a_killed_run_goes_on_in_the_third_model(launch: Launch, tmp_path: Path) -> None:
    job = job_file(tmp_path, "good", "unbuilt", "slow")
    command = [*TORCHRUN, "--config", job, "--out", "out"]
    with launch.started(command, cwd=tmp_path) as process:
        await_that(lambda: any((tmp_path / "out/slow/journal").glob("*.journal")), process)
        # torchrun's ranks are in sessions of their own.
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()
        process.communicate(timeout=60)
    assert statuses(tmp_path / "out") == {"good": DONE, "unbuilt": FAILED, "slow": "not done"}
    again = launch([*command, "--json"], cwd=tmp_path)
    assert again.returncode == EXIT_FAILED, again.stderr
    text = again.stdout[again.stdout.index("{") :]
    models = {model["name"]: model["result"] for model in json.loads(text)["models"]}
    assert models["good"]["earlier"]
    assert models["unbuilt"] is None
    assert models["slow"]["chunks"]["resumed"] > 0


@pytest.mark.long
def test_a_stop_says_how_many_are_done(launch: Launch, tmp_path: Path) -> None:
    job = job_file(tmp_path, "good", "slow", "raises")
    with launch.started([*RUN, "--nproc", "2", "--config", job, "--out", "out"], cwd=tmp_path) as process:
        await_that(lambda: any((tmp_path / "out/slow/journal").glob("*.journal")), process)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == EXIT_STOPPED, said
    assert "stopped by SIGTERM. 1 of 3 models are done. What is finished is saved in" in said
    assert statuses(tmp_path / "out") == {"good": DONE, "slow": "not done", "raises": "not done"}


@pytest.mark.long
def test_a_rank_that_hangs_ends_the_run(launch: Launch, tmp_path: Path) -> None:
    job = job_file(tmp_path, "good", "hangs", "slow")
    command = [*RUN, "--nproc", "2", "--heartbeat-timeout", "4", "--config", job, "--out", "out"]
    done = launch(command, cwd=tmp_path)
    assert done.returncode == EXIT_FAILED, done.stderr
    assert "no progress for 4 s" in done.stderr
    assert statuses(tmp_path / "out") == {"good": DONE, "hangs": "not done", "slow": "not done"}
