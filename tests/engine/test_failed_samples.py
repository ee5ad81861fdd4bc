"""A sample that cannot be read changes no other sample's bits, whatever the samples are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from PIL import Image

from tests import questions
from tests.conftest import ROOT, Launch
from tests.launchers import start
from tests.workers.failing_worker import FAILING

WORKER = ROOT / "tests" / "workers" / "failing_worker.py"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions of many lengths with a model, and pictures of many sizes."""
    folder = tmp_path_factory.mktemp("inputs")
    questions.save_tiny_bert(folder / "model")
    questions.write_questions(folder / "questions.json", unanswerable=True)
    for number in range(10):
        picture = Image.linear_gradient("L").resize((70 + 9 * number, 120 - 5 * number)).rotate(7 * number)
        path = folder / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    return folder


def rows_of(out: Path) -> dict[int, dict[str, Any]]:
    """The rows of samples that could be read, by index."""
    table = pyarrow.parquet.read_table(out / "predictions.parquet").to_pylist()
    return {
        row["index"]: row
        for row in table
        if any(value is not None for name, value in row.items() if name not in ("id", "index"))
    }


@pytest.fixture(scope="module")
def one_process(launch: Launch, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one")
    launch([sys.executable, WORKER, inputs, out]).ok()
    return out


@pytest.fixture(scope="module")
def two_processes(launch: Launch, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two")
    launch([*start("torchrun", 2), sys.executable, WORKER, inputs, out]).ok()
    return out


@pytest.mark.parametrize("kind", FAILING)
@pytest.mark.parametrize("processes", ["one_process", pytest.param("two_processes", marks=pytest.mark.long)])
def test_the_others_rows_are_the_same(
    request: pytest.FixtureRequest, one_process: Path, processes: str, kind: str
) -> None:
    out: Path = request.getfixturevalue(processes)
    whole = rows_of(one_process / kind / "0")
    assert list(whole) == list(range(max(whole) + 1))
    for number, failing in enumerate(FAILING[kind]):
        wanted = {index: row for index, row in whole.items() if index not in failing}
        assert rows_of(out / kind / str(number)) == wanted
