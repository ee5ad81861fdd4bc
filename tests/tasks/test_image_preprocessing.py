"""Which preprocessing an image classifier's job has, and that result and terminal say so."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from PIL import Image

import dualeval.tasks
from dualeval.data.preprocessing import Preprocessing
from dualeval.engine.finish import _samples
from dualeval.errors import EXIT_USAGE, UsageError
from dualeval.models import classifiers
from dualeval.models.sources.fashion_cnn import FashionCNN
from dualeval.tasks.image_classification import EMBEDDED_WEIGHTS, ImageClassification
from dualeval.tasks.image_data import ASSETS
from tests.conftest import Launch
from tests.engine.test_evaluator import evaluate
from tests.tasks.conftest import check_doors
from tests.tasks.test_image_classification import idx_folder
from tests.vehicles.assets import Pictures, build_pictures
from tests.vehicles.published_weights import Publish

CPU = torch.device("cpu")
IMAGENET, OWN = "ImageNet mean and std", "the model's defaults"
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# With idx files.
NOT_DONE = {"resize": None, "crop": None, "interpolation": None, "channels": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes with two images each."""
    root = tmp_path_factory.mktemp("val")
    for name in "ab":
        (root / name).mkdir()
        for number in range(2):
            Image.new("RGB", (50, 40), (90 * number, 50, 9)).save(root / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Idx files of somebody else's."""
    return idx_folder(tmp_path_factory.mktemp("digits"), [1, 2, 3])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A network like the embedded one, trained otherwise."""
    path = tmp_path_factory.mktemp("trained") / "mine.pt"
    torch.manual_seed(0)
    torch.save(FashionCNN().state_dict(), path)
    return str(path)


def refused(**arguments: Any) -> str:
    with pytest.raises(UsageError) as caught:
        ImageClassification(**arguments)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value)


def preprocessing_line(**arguments: Any) -> str:
    return ImageClassification(**arguments).description()["preprocessing"]


def test_the_class_and_the_command_line_make_the_same_job(folder: Path) -> None:
    """The same defaults, identity and digest through both doors."""
    words: dict[str, Any] = {"model": "squeezenet1_1", "weights": "random:0", "data": folder}
    words |= {"resize": 40, "crop": 40}
    module = ImageClassification(**words).build_model(CPU)
    named = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    check_doors("image-classification", "ImageClassification", words, [module], **named)


def test_tasks_has_the_built_in_classes_and_no_other() -> None:
    assert {"ImageClassification", "QuestionAnswering"} <= {*dir(dualeval.tasks)}
    with pytest.raises(AttributeError, match="no attribute 'Tracking'"):
        _ = dualeval.tasks.Tracking


# -- idx files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "missing"),
    [({}, "--mean and --std"), ({"mean": (0.13,)}, "--std"), ({"std": (0.3,)}, "--mean")],
)
@pytest.mark.parametrize("weights", ["random:0", "trained"])
def test_other_idx_data_without_mean_and_std_are_refused(
    digits: Path, trained: str, given: dict[str, Any], missing: str, weights: str
) -> None:
    """They got Fashion-MNIST's, whatever the model."""
    chosen = trained if weights == "trained" else weights
    message = refused(model="fashion-cnn", weights=chosen, data=digits, preprocessing=given)
    assert f"the idx files in {digits} need {missing}: " in message
    assert "--mean 0.5 --std 0.5" in message
    assert "Give the values of its training" in message


@pytest.mark.parametrize("weights", [None, str(EMBEDDED_WEIGHTS)])
def test_the_embedded_weights_have_their_mean_and_std_on_any_data(digits: Path, weights: str | None) -> None:
    """On any data: they belong to the weights."""
    line = preprocessing_line(model="fashion-cnn", weights=weights, data=digits)
    assert line == "28 x 28 as stored, mean 0.286, std 0.353 (the model's defaults)"


@pytest.mark.parametrize("data", [None, ASSETS])
def test_the_embedded_data_have_their_mean_and_std(trained: str, data: Path | None) -> None:
    line = preprocessing_line(model="fashion-cnn", weights=trained, data=data, preprocessing={"std": (1.0,)})
    assert line == "28 x 28 as stored, mean 0.286, std 1.0 (std given; the rest: Fashion-MNIST's)"


def test_a_copy_of_the_embedded_data_asks_for_mean_and_std(trained: str, tmp_path: Path) -> None:
    shutil.copytree(ASSETS, tmp_path / "copy")
    assert "need --mean and --std" in refused(model="fashion-cnn", weights=trained, data=tmp_path / "copy")


# -- image files ---------------------------------------------------------------------------------------


NEAREST = {"resize": 9, "crop": 9, "interpolation": "nearest", "mean": (0.5,), "std": (1 / 3,)}


@pytest.mark.parametrize(
    ("model", "given", "line"),
    [
        ("resnet18", {}, f"256 bilinear, crop 224, {IMAGENET} (the model's defaults)"),
        ("resnet50", {}, f"256 bilinear, crop 224, {IMAGENET} (the model's defaults, as for IMAGENET1K_V1)"),
        ("efficientnet_v2_l", {}, "480 bicubic, crop 480, mean 0.5, std 0.5 (the model's defaults)"),
        ("resnet18", {"resize": 300}, f"300 bilinear, crop 224, {IMAGENET} (resize given; the rest: {OWN})"),
        (
            "resnet18",
            {"crop": 200, "interpolation": "bicubic", "mean": (0.5,) * 3, "std": (0.5, 0.25, 0.5)},
            "256 bicubic, crop 200, mean 0.5, std 0.5,0.25,0.5 "
            f"(interpolation, crop, mean and std given; the rest: {OWN})",
        ),
        ("resnet18", NEAREST, "9 nearest, crop 9, mean 0.5, std 0.3333333333333333 (given)"),
    ],
)
def test_the_description_says_where_each_preprocessing_value_comes_from(
    folder: Path, model: str, given: dict[str, Any], line: str
) -> None:
    assert preprocessing_line(model=model, weights="random:0", data=folder, preprocessing=given) == line


def test_published_weights_by_path_keep_their_preprocessing(
    folder: Path, publish: Publish, tmp_path: Path
) -> None:
    network = classifiers.build("mobilenet_v2", "random:0", None)
    published = publish("mobilenet_v2", "IMAGENET1K_V2", network, tmp_path)
    found = ImageClassification(model="mobilenet_v2", weights=str(published), data=folder).description()
    entry = "MobileNet_V2_Weights.IMAGENET1K_V2"
    assert found["preprocessing"] == f"232 bilinear, crop 224, {IMAGENET} (those of {entry})"
    assert found["weights"] == f"{entry}, {published}"


@pytest.mark.parametrize(
    ("given", "other"), [({"crop": 257}, "resize"), ({"resize": 223}, "crop"), ({"resize": 40}, "crop")]
)
def test_a_crop_beyond_the_resize_is_refused(folder: Path, given: dict[str, Any], other: str) -> None:
    """It padded with black."""
    message = refused(model="resnet18", weights="random:0", data=folder, preprocessing=given)
    assert "would get black borders" in message
    assert f"Give --{other} as well" in message
    both = {"resize": 40, "crop": 64}  # borders that are wanted
    ImageClassification(model="resnet18", weights="random:0", data=folder, preprocessing=both)


def test_the_description_says_that_a_model_normalises_anew(folder: Path) -> None:
    arguments: dict[str, Any] = {"weights": "random:0", "data": folder, "num_classes": 2}
    task = ImageClassification(model="googlenet", preprocessing={"resize": 64, "crop": 64}, **arguments)
    task.build_model(CPU)
    assert task.description()["model"] == "googlenet, transform_input False"


# -- the result ----------------------------------------------------------------------------------------


def test_the_result_has_the_options_as_they_are_used(folder: Path, tmp_path: Path) -> None:
    """They were null."""
    given = {"resize": 40, "crop": 40}
    task = ImageClassification(model="squeezenet1_1", weights="random:0", data=folder, preprocessing=given)
    result = evaluate(task, tmp_path / "out", job={"model": None, "crop": None, "batch_size": 64})
    assert result.job == {
        "model": "squeezenet1_1",
        "weights": "random:0",
        "weights_key": None,
        "weights_prefix": None,
        "trust_checkpoint": False,
        "data": str(folder),
        **dict.fromkeys(("split", "image_root", "path_column", "label_column", "label_key", "quoting")),
        "data_fingerprint": "ends",
        "num_classes": 2,
        "class_map": None,
        "class_order": None,
        "resize": 40,
        "crop": 40,
        "interpolation": "bilinear",
        "channels": 3,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "metric": [metric.name for metric in task.metrics()],
        "batch_size": 64,
        "layout": "channels-last",
        "precision": "fp32",
        "keep_batchnorm_fp32": False,
        "optimize": None,
    }
    origin = "resize and crop given; the rest: the model's defaults"
    assert result.description == {
        "model": "squeezenet1_1",
        "weights": f"random:0, untrained (fingerprint {result.weights['fingerprint'][:8]})",
        "data": f"{folder} (4 samples, fingerprint {result.data['fingerprint'][:8]}, "
        f"contents {result.data['contents'][:8]})",
        "labels": "2 names: a, b (order of names)",
        "preprocessing": f"40 bilinear, crop 40, {IMAGENET} ({origin})",
        "job": f"batch size 64, fp32, channels-last (fingerprint {result.fingerprint[:8]})",
    }


def test_options_of_idx_files_have_no_resize(tmp_path: Path) -> None:
    """job.json said 256, of images that are not resized."""
    result = evaluate(ImageClassification(), tmp_path / "out", limit=70, batch_size=32)
    kept = json.loads((tmp_path / "out/job.json").read_text())["job"]["task_options"]["preprocessing"]
    assert kept == {**NOT_DONE, "mean": [0.286], "std": [0.353]}
    used = {"model": "fashion-cnn", "weights": str(EMBEDDED_WEIGHTS), "data": str(ASSETS), "num_classes": 10}
    assert result.job == {**result.job, **NOT_DONE, "mean": (0.286,), **used}
    shown = result.description["data"].partition(" (")[2]
    assert shown.startswith("the first 70 of 10,000 samples, fingerprint ")
    assert _samples({"kind": "all", "samples": 1, "of": 1}) == "1 sample"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mean": (72.9,)}, "--mean 72.9: expected numbers from 0 to 1"),
        ({"mean": 0.5}, "--mean 0.5: expected numbers"),
        ({"mean": ()}, "--mean : expected numbers"),
        ({"std": (0.0,)}, "--std 0.0: expected numbers above 0"),
        ({"std": ("a",)}, "--std a: expected numbers"),
        ({"crop": -1}, "--crop -1: expected a whole number"),
        ({"interpolation": "cubic"}, "--interpolation 'cubic': expected one of .*bicubic"),
        ({"resize": 31.5}, "--resize 31.5: expected a whole number"),
    ],
)
def test_wrong_preprocessing_values_are_refused_in_python(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Preprocessing(**given)


# -- the whole way on twenty ImageNet pictures, on 1, 2 and 3 processes ----------------------------------


# Five batches, so that each of three ranks has at least one.
BATCH_SIZE = "4"
# result.json and the rows of predictions.parquet.
Run = tuple[dict[str, Any], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    return build_pictures(tmp_path_factory.mktemp("imagenet"))


def evaluated(launch: Launch, pictures: Pictures, out: Path, processes: int, workers: int) -> Run:
    command = [sys.executable, "-m", "dualeval", "run", *pictures.arguments, "--batch-size", BATCH_SIZE]
    command += ["--out", out, "--workers", str(workers)]
    command += ["--nproc", str(processes)] if processes > 1 else []
    launch(command, cwd=pictures.home, variables={"OMP_NUM_THREADS": "1"}).ok()
    result = json.loads((out / "result.json").read_text())
    assert (result["chunks"]["resumed"], result["world"]["size"]) == (0, processes)
    return result, pyarrow.parquet.read_table(out / "predictions.parquet").to_pylist()


@pytest.fixture(scope="session")
def alone(launch: Launch, pictures: Pictures, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return evaluated(launch, pictures, tmp_path_factory.mktemp("run") / "out", 1, 0)


def test_published_weights_have_their_accuracy(alone: Run, pictures: Pictures) -> None:
    result, rows = alone
    assert result["samples"] == {"total": 20, "evaluated": 20, "failed": 0}
    assert result["metrics"]["top1"] == 18 / 20
    assert result["metrics"]["top5"] == 19 / 20
    assert {row["id"]: row["target"] for row in rows} == pictures.labels
    assert [row["id"] for row in rows] == sorted(pictures.labels)
    losses = [row["loss"] for row in rows]
    assert result["metrics"]["loss"] == math.fsum(losses) / len(losses)


@pytest.mark.parametrize(
    ("processes", "workers"),
    [*(pytest.param(*each, marks=pytest.mark.long) for each in ((1, 2), (2, 0), (3, 0))), (2, 2)],
)
def test_processes_and_workers_change_no_bit(
    launch: Launch, alone: Run, pictures: Pictures, tmp_path: Path, processes: int, workers: int
) -> None:
    result, rows = evaluated(launch, pictures, tmp_path / "out", processes, workers)
    for name in ("samples", "metrics", "metrics_digest", "fingerprint"):
        assert result[name] == alone[0][name]
    assert rows == alone[1]
