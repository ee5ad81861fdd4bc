"""Runs over pictures inside of larger files: those of the folder, to the digest, also after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualeval.result import Result, read_result
from dualeval.tasks.image_classification import ImageClassification
from tests.conftest import Launch
from tests.engine.test_evaluator import evaluate
from tests.vehicles.faults import ended_run
from tests.vehicles.packed_pictures import ASSETS, FORMS, JOB, as_folder, fashion

COUNT = 120
# The others have no names, and their ids are numbers.
WITH_NAMES = ("tar", "parquet", "saved")


def task_of(data: Path) -> ImageClassification:
    return ImageClassification(
        model="tests.vehicles.faulty_models:fashion_cnn",
        weights=str(ASSETS / "fashion_cnn.safetensors"),
        data=data,
        resize=28,
        crop=28,
        channels=1,
        mean=(0.286,),
        std=(0.353,),
    )


def run(data: Path, out: Path) -> Result:
    return evaluate(task_of(data), out, batch_size=4)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pictures in all forms."""
    home, pictures = tmp_path_factory.mktemp("packed"), fashion(COUNT)
    as_folder(pictures, home)
    return home


@pytest.fixture(scope="module")
def packed(home: Path) -> dict[str, Path]:
    """The value of --data by form."""
    return {form: pack(fashion(COUNT), home) for form, pack in FORMS.items()}


@pytest.fixture(scope="module")
def of_folder(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(home / "val", tmp_path_factory.mktemp("run") / "out")


@pytest.mark.parametrize("form", FORMS)
def test_each_form_has_the_digests_of_the_folder(home: Path, of_folder: Result, out: Path, form: str) -> None:
    result = run(FORMS[form](fashion(COUNT), home), out)
    assert result.samples["evaluated"] == COUNT
    assert result.metrics_digest == of_folder.metrics_digest
    assert (result.samples_digest == of_folder.samples_digest) == (form in WITH_NAMES)


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.long] if form != "tar" else []) for form in FORMS]
)
def test_two_ranks_that_are_killed_go_on_to_the_digest(
    launch: Launch, packed: dict[str, Path], of_folder: Result, tmp_path: Path, form: str
) -> None:
    command = ["dualeval", "run", *JOB, "--data", str(packed[form]), "--workers", "1", "--out", "out"]
    killed = ended_run(
        launch, [*command, "--nproc", "2"], 2, tmp_path, fault="slow:0.1 all 0;kill 1 7", flush_s=0.1
    )
    assert killed.launchers[0].returncode != 0, killed.said()
    done = ended_run(launch, [*command, "--nproc", "2"], 2, tmp_path)
    assert done.launchers[0].returncode == 0, done.said()
    result = read_result(tmp_path / "out" / "result.json")
    assert result.chunks["resumed"] > 0
    assert result.metrics_digest == of_folder.metrics_digest
