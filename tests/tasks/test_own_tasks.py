"""A task of one's own from the command line: any launcher, killed and resumed, reading processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dualeval.cli import dualeval
from dualeval.options.job import Job
from tests.conftest import Finished, Launch

DUALEVAL: list[str | Path] = [sys.executable, "-m", "dualeval"]
RUN: list[str | Path] = [*DUALEVAL, "run", "--no-progress"]
TASK = """
import os
import signal

import torch

import dualeval
from dualeval.metrics import Mean
from helper_beside_it import MODULUS


class Mine(dualeval.Task):
    wants_workers = False

    def __init__(self, size: int = 2000, threshold: float = 0.5, kill_at: int = -1):
        self.size, self.threshold, self.kill_at = size, threshold, kill_at

    def dataset(self):
        return Numbers(self.size, self.kill_at)

    def build_model(self, device):
        torch.manual_seed(0)
        return torch.nn.Linear(1, 1).eval()

    def forward(self, model, batch):
        return model(batch[0])[:, 0].sigmoid()

    def observe(self, outputs, batch):
        return {"right": (outputs > self.threshold) == batch[1], "output": outputs}

    def metrics(self):
        return [Mean("right"), Mean("output")]


class Numbers(torch.utils.data.Dataset):
    def __init__(self, size, kill_at):
        self.size, self.kill_at = size, kill_at

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == self.kill_at and os.path.exists("kill"):
            os.kill(os.getpid(), signal.SIGTERM)
        return torch.tensor([index / MODULUS]), index % MODULUS == 0
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "tasks").mkdir()
    (folder / "tasks/mine.py").write_text(TASK)
    (folder / "tasks/helper_beside_it.py").write_text("MODULUS = 7\n")
    return folder


def result(done: Finished, out: Path) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((out / "result.json").read_text())
    return found


@pytest.fixture(scope="module")
def alone(home: Path, launch: Launch) -> dict[str, Any]:
    """The result of one process."""
    out = home / "alone"
    words: list[str | Path] = ["--task", "tasks/mine.py:Mine", "--batch-size", "8", "--threshold", "0.4"]
    return result(launch([*RUN, *words, "--out", out], cwd=home, timeout=120), out)


def test_options_are_in_the_result(alone: dict[str, Any]) -> None:
    assert alone["samples"]["evaluated"] == 2000
    job = alone["job"]
    assert (job["task"], job["size"], job["threshold"], job["kill_at"]) == (
        "tasks/mine.py:Mine",
        2000,
        0.4,
        -1,
    )
    assert set(alone["metrics"]) == {"right", "output"}


def test_a_stopped_run_goes_on_from_elsewhere_with_more_ranks(
    home: Path, alone: dict[str, Any], launch: Launch, tmp_path: Path
) -> None:
    words = ["--batch-size", "8", "-T", "threshold=0.4", "-T", "kill_at=1000", "--out", "out"]
    (tmp_path / "kill").touch()
    done = launch([*RUN, "--task", home / "tasks/mine.py:Mine", *words], cwd=tmp_path, timeout=120)
    assert done.returncode == 75, done.stderr
    (tmp_path / "kill").unlink()
    (tmp_path / "job.toml").write_text(
        f'task = "{home}/tasks/mine.py:Mine"\nthreshold = 0.4\nkill-at = 1000\n'
    )
    words = ["--config", "job.toml", "--batch-size", "8", "--out", "out"]
    done = launch([*RUN, *words, "--nproc", "2"], cwd=tmp_path, timeout=120)
    found = result(done, tmp_path / "out")
    assert found["chunks"]["resumed"] > 0
    assert found["metrics_digest"] == alone["metrics_digest"]
    other = launch([*RUN, *words, "-T", "threshold=0.5"], cwd=tmp_path, timeout=120)
    assert other.returncode == 2
    assert "options.threshold: 0.4 there, 0.5 now" in other.stderr


def test_none_and_an_empty_list_are_values_that_a_flag_gives(tmp_path: Path) -> None:
    (tmp_path / "emptied.py").write_text(
        "import dualeval\n"
        "def made(most: int | None = 3, sizes: tuple[int, ...] = (1, 2)):\n"
        "    raise dualeval.UsageError(f'most {most} sizes {sizes}')\n"
    )
    (tmp_path / "job.toml").write_text(f'task = "{tmp_path}/emptied.py:made"\nmost = 5\nlimit = 7\n')
    for words, most, sizes in (
        ([], "5", "(1, 2)"),
        (["--most", "none", "--sizes", ""], "None", "()"),
        (["-T", "most=none", "-T", "sizes="], "None", "()"),
    ):
        config = str(tmp_path / "job.toml")
        done = CliRunner().invoke(dualeval, ["run", "--config", config, "--dry-run", *words])
        assert f"most {most} sizes {sizes}" in str(done.exception) + done.output


def test_a_text_that_begins_like_a_path_is_in_the_identity(tmp_path: Path) -> None:
    (tmp_path / "prompted.py").write_text(
        "import dualeval, torch\n"
        "def prompted(prefix: str = '', data: str = '') -> dualeval.Task:\n"
        "    return dualeval.ModelTask(model=torch.nn.Identity(), data=[1.0])\n"
    )
    texts = {"prefix": "/think", "data": str(tmp_path)}
    job = Job.read(None, {"task": f"{tmp_path / 'prompted.py'}:prompted"}, texts)
    assert job.make_task().given_options == {"prefix": "/think"}
