"""``dualeval run --dry-run``: the run, stopped before its loop; nothing is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dualeval.cli import dualeval
from dualeval.errors import EXIT_USAGE, DualevalError, UsageError
from dualeval.models import classifiers
from dualeval.models.sources.fashion_cnn import FashionCNN
from dualeval.tasks.image_classification import EMBEDDED_WEIGHTS, ImageClassification
from dualeval.vision_library import torchvision
from tests.conftest import Launch
from tests.data.test_image_folder import save
from tests.vehicles.launchers import start

# Imported here, not in the first test that needs it: the import sets an environment variable.
torchvision()
DryRun = Callable[..., dict[str, Any]]
RUN: list[str | Path] = [sys.executable, "-m", "dualeval", "run"]


@pytest.fixture
def dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> DryRun:
    """Run in this process, and check that nothing is written in ``tmp_path``; returns what is printed."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> dict[str, Any]:
        before = sorted(tmp_path.rglob("*"))
        command = ["run", *map(str, arguments), "--launcher", "none", "--out", "out", "--dry-run"]
        try:
            code = dualeval.main(command, standalone_mode=False, obj=command)
        finally:
            said = capsys.readouterr()
            # Python may keep what it compiles of a module.
            assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts] == before
        if code == EXIT_USAGE:
            raise UsageError(said.err)
        job: dict[str, Any] = json.loads(said.out)
        return job

    return run


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for name in "ab":
        save(tmp_path / "val" / name / "0.png")
    return tmp_path


def test_a_dry_run_prints_the_options_of_the_embedded_job(launch: Launch, tmp_path: Path) -> None:
    done = launch([*RUN, "--dry-run", "--out", tmp_path / "out"], cwd=tmp_path, timeout=60).ok()
    assert list(tmp_path.iterdir()) == []
    job = json.loads(done.stdout)
    assert job["weights"] == str(EMBEDDED_WEIGHTS)
    assert (job["model"], job["num_classes"]) == ("fashion-cnn", 10)
    assert (job["mean"], job["std"]) == ([0.286], [0.353])
    assert (job["resize"], job["crop"], job["interpolation"]) == (None, None, None)
    assert (job["device"], job["workers"], job["metric"][:2]) == ("cpu", 0, ["loss", "top1"])


def test_a_dry_run_prints_the_options_of_a_job_of_pictures(dry_run: DryRun, pictures: Path) -> None:
    (pictures / "job.toml").write_text('data = "val"\nbatch-size = 32\nmetric = ["loss"]\n')
    model = ["--model", "squeezenet1_1", "--weights", "random:0"]
    job = dry_run("--config", "job.toml", *model, "--crop", "64")
    assert (job["data"], job["num_classes"], job["metric"]) == (str(pictures / "val"), 2, ["loss"])
    assert (job["resize"], job["crop"], job["interpolation"]) == (256, 64, "bilinear")
    assert job["mean"] == [0.485, 0.456, 0.406]
    assert job["batch_size"] == 32
    assert job["workers"] >= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "nowhere"], ["nowhere", "does not exist"]),
        (["--weights", "none.pt"], ["none.pt", "does not exist"]),
        (["--weights", "text.pt"], ["text.pt"]),
        (["--weights", "twelve.pt"], ["are for 12 classes", "2 were expected"]),
        (["--weights", "IMAGENET1K_V7"], ["IMAGENET1K_V7", "IMAGENET1K_V1"]),
        (["--model", "squeezenet"], ["there is no model 'squeezenet'"]),
        (["--metric", "topp1"], ["'topp1'", "top1"]),
        (["--mean", "nan"], ["--mean nan", "expected numbers"]),
        (["--mean", "0.5,0.5"], ["--mean has 2 values", "expected 3"]),
        (["--crop", "300"], ["black borders", "--resize"]),
        (["--crop", "8"], ["cannot take images of shape (3, 8, 8)"]),
        (["--download"], ["--download", "random:0"]),
        (["--device", "tpu"], ["--device 'tpu'"]),
        (["--backend", "torch"], ["--backend torch", "--nproc"]),
        (["--nproc", "2", "--backend", "mpi"], ["--backend mpi"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_a_dry_run_refuses_what_the_run_would_refuse(
    dry_run: DryRun, pictures: Path, arguments: list[str], words: list[str]
) -> None:
    """These were all well."""
    (pictures / "text.pt").write_text("no weights")
    torch.save(classifiers.create("squeezenet1_1", 12).state_dict(), pictures / "twelve.pt")
    with pytest.raises(DualevalError) as caught:
        dry_run("--model", "squeezenet1_1", "--weights", "random:0", "--data", "val", *arguments)
    assert caught.value.exit_code == EXIT_USAGE
    for word in words:
        assert word in str(caught.value)


def test_rank_0_of_a_launcher_prints_the_job_or_the_error(launch: Launch, tmp_path: Path) -> None:
    """Rank 0 speaks, whether it is well or not."""
    torch.save({**FashionCNN().state_dict(), "stray": torch.zeros(1)}, tmp_path / "misfit.pt")
    command = [*start("torchrun", 2), *RUN, "--dry-run", "--out", tmp_path / "out"]
    done = launch(command, cwd=tmp_path, timeout=60).ok()
    assert json.loads(done.stdout)["model"] == "fashion-cnn"
    done = launch([*command, "--model", "fashion-cnn", "--weights", "misfit.pt"], cwd=tmp_path, timeout=60)
    assert done.returncode != 0
    assert done.stderr.count("dualeval: error: ") == 1
    assert "not in the model: stray" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["misfit.pt"]


def test_a_dry_run_with_nproc_prints_the_job(launch: Launch, tmp_path: Path) -> None:
    done = launch([*RUN, "--nproc", "2", "--dry-run"], cwd=tmp_path, timeout=60).ok()
    assert json.loads(done.stdout)["model"] == "fashion-cnn"


def test_a_model_that_is_divided_is_not_built_whole(dry_run: DryRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(*arguments: object) -> None:
        pytest.fail("the dry run builds all of it")

    monkeypatch.setattr(ImageClassification, "build_model", whole)
    assert dry_run("--shard", "fsdp")["shard"] == "fsdp"


def test_a_file_as_output_folder_is_refused(dry_run: DryRun, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UsageError, match="out is a file, and a run needs a folder"):
        dry_run()
