"""dualeval slice, and slices of a run on two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dualeval.engine.folder.stored_rows import StoredRows
from dualeval.result import read_result
from dualeval.tasks.image_classification import ImageClassification
from tests.comparison.conftest import calling
from tests.conftest import Launch
from tests.engine.test_evaluator import evaluate, rows
from tests.vehicles.launchers import start


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest of 120 pictures as the embedded network takes them."""
    folder = tmp_path_factory.mktemp("images")
    drawn = np.random.default_rng(0)
    lines = ["path,label,scanner,age,report,loss"]
    for at in range(120):
        Image.fromarray(drawn.integers(0, 255, (28, 28), dtype=np.uint8)).save(folder / f"{at}.png")
        lines.append(f"{at}.png,{at % 10},{'ABC'[at % 3]},{at},{'x' * 200},{at}")
    (folder / "val.csv").write_text("\n".join(lines) + "\n")
    return folder


PIXELS = ["--mean", "0.286", "--std", "0.353", "--channels", "1", "--resize", "28", "--crop", "28"]


@pytest.fixture(scope="module")
def run_of_images(images: Path) -> Path:
    task = ImageClassification(
        model="fashion-cnn",
        data=images / "val.csv",
        mean=(0.286,),
        std=(0.353,),
        channels=1,
        resize=28,
        crop=28,
    )
    evaluate(task, images / "run", by=("scanner", "age"))
    return images / "run"


def test_two_ranks_give_the_same_slices(
    launch: Launch, images: Path, run_of_images: Path, tmp_path: Path
) -> None:
    words: list[str | Path] = ["--model", "fashion-cnn", "--data", images / "val.csv", *PIXELS]
    words += ["--by", "scanner", "--by", "age"]
    words += ["--json", "--no-progress", "--out", tmp_path / "two"]
    done = launch([*start("torchrun", 2), "dualeval", "run", *words], timeout=120)
    found, alone = json.loads(done.stdout), read_result(run_of_images / "result.json")
    assert found["slices"] == alone.slices and found["fingerprint"] == alone.fingerprint
    assert found["metrics_digest"] == alone.metrics_digest
    assert repr(rows(tmp_path / "two")) == repr(rows(run_of_images))
    assert {*StoredRows(tmp_path / "two" / "predictions.parquet").data_names} == {"scanner", "age"}
    assert "the column report of the data is not kept: it has texts of 200 letters" in done.stderr


@pytest.fixture
def command() -> Callable[..., tuple[int, str, str]]:
    return calling("slice")


def test_the_command_slices_by_columns(
    command: Callable[..., tuple[int, str, str]], run_of_images: Path
) -> None:
    code, out, _ = command(run_of_images, "--by", "scanner", "--by", "age", "--json")
    assert code == 0 and json.loads(out)["slices"] == read_result(run_of_images / "result.json").slices
    code, out, _ = command(run_of_images, "--by", "age*scanner", "--bins", "60", "--metric", "top1")
    assert "│ <60 * A" in out and "│ 60 or more * C │ 20 (small) │" in out and "loss" not in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "--by is missing: name a column"),
        (("--by", "site"), "--by site: "),
        (("--by", "scaner"), " that --keep names. Did you mean scanner?"),
        (("--by", "scanner", "--cluster", "scaner"), ", age. A run keeps the column that its own --cluster "),
        (("--by", "top"), "--by top: it has several values per sample"),
        (("--by", "scanner", "--bins", "3,1"), "--bins 3,1: expected numbers that ascend"),
        (("--by", "scanner", "--bins", "40,60"), "--bins 40,60 cuts columns of numbers, and none is named: "),
        (("--by", "scanner", "--bins", "40,60"), "such as n/a means a missing number, leave its cell empty"),
    ],
)
def test_wrong_usage_of_the_command_is_refused(
    command: Callable[..., tuple[int, str, str]], run_of_images: Path, words: Sequence[str], says: str
) -> None:
    code, out, err = command(run_of_images, *words)
    assert (code, out) == (2, "") and says in err
