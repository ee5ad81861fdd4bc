"""Job: flags and a file, which of them wins, and what is wrong with either."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dualeval.errors import EXIT_USAGE, UsageError
from dualeval.options.job import COMMON, Job
from dualeval.options.plugins import task_kind

FILE = """
model = "resnet18"
weights = "ckpt/best.pt"
weights-key = "ema.state_dict"
weights_prefix = "module."
data = "val"
num-classes = 10
resize = 64
crop = 56
interpolation = "bicubic"
mean = [0.5, 0, 1]
std = [1, 0.5, 0.25]
metric = ["loss", "top3"]
batch_size = 32
limit = 100
precision = "amp-bf16"
device = "cpu"
workers = 0
on-error = "skip"
"""

QUESTIONS: dict[str, Any] = {"task": "question-answering", "model": Path("bert"), "data": Path("dev.json")}


def write(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text, "utf-8")
    return path


def fails(path: Path | None, **flags: Any) -> str:
    with pytest.raises(UsageError) as caught:
        Job.read(path, flags)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value)


def test_no_file_and_no_flags_is_the_embedded_job() -> None:
    job = Job.read(None, {})
    assert job == Job.of()
    assert job.task == "image-classification"
    assert (job.options.model, job.options.weights, job.options.data) == (None, None, None)
    assert (job.batch_size, job.limit, job.precision, job.on_error) == (64, None, "fp32", "stop")


def test_every_key_of_a_file_is_an_option(tmp_path: Path) -> None:
    assert Job.read(write(tmp_path, FILE), {}) == Job.of(
        model="resnet18",
        weights=str(tmp_path / "ckpt/best.pt"),
        weights_key="ema.state_dict",
        weights_prefix="module.",
        data=str(tmp_path / "val"),
        num_classes=10,
        resize=64,
        crop=56,
        interpolation="bicubic",
        mean=(0.5, 0.0, 1.0),
        std=(1.0, 0.5, 0.25),
        metric=("loss", "top3"),
        batch_size=32,
        limit=100,
        precision="amp-bf16",
        device="cpu",
        workers=0,
        on_error="skip",
    )


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    own = {"model": "resnet50", "weights": "other.pt", "data": Path("here"), "mean": (0.1, 0.2, 0.3)}
    common = {"metric": ("top1",), "batch_size": 8, "workers": 2, "on_error": "stop"}
    job = Job.read(write(tmp_path, FILE), {**own, **common})
    # A path in a flag counts from the working folder, so it stays as it is.
    assert {name: getattr(job.options, name) for name in own} == own
    assert {name: getattr(job, name) for name in common} == common
    assert (job.limit, job.options.crop) == (100, 56)


def test_absent_flags_leave_the_file_alone(tmp_path: Path) -> None:
    """As click gives them: None, an empty tuple for a repeated flag."""
    path = write(tmp_path, FILE)
    absent = {"model": None, "metric": (), "download": None, "batch_size": None, "mean": None}
    assert Job.read(path, absent) == Job.read(path, {})


def test_paths_count_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    write(tmp_path / "jobs", 'data = "../val"\nweights = "w.pt"\n')
    monkeypatch.chdir(tmp_path)
    job = Job.read(Path("jobs/job.toml"), {})
    assert (job.options.data, job.options.weights) == ("jobs/../val", "jobs/w.pt")
    absolute = Job.read(write(tmp_path, 'data = "/val"\nweights = "/w.pt"\n'), {})
    assert (absolute.options.data, absolute.options.weights) == ("/val", "/w.pt")


NAMES = ["DEFAULT", "IMAGENET1K_V1", "ResNet50_Weights.IMAGENET1K_V2", "IMAGENET1K_SWAG_E2E_V1"]


@pytest.mark.parametrize("weights", [*NAMES, "random:3"])
def test_words_for_weights_are_no_paths(tmp_path: Path, weights: str) -> None:
    assert Job.read(write(tmp_path, f'weights = "{weights}"\n'), {}).options.weights == weights


@pytest.mark.parametrize("weights", ["DEFAULTS/w.pt", "./DEFAULT", "IMAGENET1K_V1.pt", "my_Weights.pt"])
def test_a_path_that_begins_like_a_word_is_a_path(tmp_path: Path, weights: str) -> None:
    job = Job.read(write(tmp_path, f'weights = "{weights}"\n'), {})
    assert job.options.weights == str(tmp_path / weights)


@pytest.mark.parametrize("weights", NAMES)
def test_what_is_published_may_be_downloaded(tmp_path: Path, weights: str) -> None:
    assert Job.of(model="resnet50", weights=weights, download=True).options.download
    assert Job.read(write(tmp_path, f'weights = "{weights}"\ndownload = true\n'), {}).options.download


@pytest.mark.parametrize("weights", [None, "w.pt", "random:0", "imagenet1k_v1"])
def test_a_download_of_nothing_is_refused(weights: str | None) -> None:
    """It did nothing, and said nothing."""
    message = fails(None, model="resnet50", weights=weights, download=True)
    assert f"--weights is {weights}" in message if weights else "--weights is not given" in message
    assert "Give --weights DEFAULT or a name such as IMAGENET1K_V1, or leave --download out" in message


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


# Flags, and what is said of them.
WRONG_FLAGS: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: value}, f"{flag_of(name)} {value}: expected a whole number of at least 1")
        for name in ("batch_size", "limit", "num_classes", "resize", "crop")
        for value in (0, -1)
    ),
    ({"workers": -1}, "--workers -1: expected a whole number of at least 0"),
    *(
        ({**QUESTIONS, name: least - 1}, f"{flag_of(name)} {least - 1}: expected .* of at least {least}")
        for name, least in {"max_length": 1, "n_best": 1, "max_answer_length": 1, "stride": 0}.items()
    ),
    *(({"std": std}, "--std") for std in ((0.0,), (0.5, -0.5, 0.5), (float("nan"),), (float("inf"),))),
    *(
        ({"mean": mean}, "Divide the mean of pixels from 0 to 255 by 255")
        for mean in ((72.9,), (0.5, -0.1), (float("nan"),), (float("inf"),))
    ),
    ({"precision": "fp8"}, r"--precision 'fp8': expected one of .*Did you mean fp32\?"),
    ({"on_error": "skipp"}, r"--on-error 'skipp': expected one of .*Did you mean skip\?"),
    (
        {"task": "image-clasification"},
        r"--task 'image-clasification': expected one of .*Did you mean image-classification\?",
    ),
]


@pytest.mark.parametrize(("flags", "says"), WRONG_FLAGS)
def test_wrong_flags_are_refused(flags: dict[str, Any], says: str) -> None:
    assert re.search(says, fails(None, **flags))


# The text of a file, and what is said of it.
WRONG_FILES: list[tuple[str | bytes, str]] = [
    ("limit = 0", "--limit 0"),
    ("batch_size = 0", "--batch-size 0"),
    ("std = []", "--std"),
    ('batch-size = "64"', "batch-size = '64'.*expected an int.*found a str"),
    ("batch-size = 64.0", "expected an int.*found a float"),
    ("limit = true", "expected an int.*found a bool"),
    ("download = 1", "expected a bool.*found an int"),
    ("model = 18", "expected a str.*found an int"),
    ("metric = 'top1'", "expected a list.*found a str"),
    ("metric = ['top1', 5]", "metric = 5.*expected a str"),
    ("mean = 0.5", "expected a list.*found a float"),
    ("mean = ['a']", "mean = 'a'.*expected a float"),
    ("std = [true]", "std = True.*expected a float.*found a bool"),
    ("data = ['a']", "expected a str.*found a list"),
    ("bacth-size = 3", r"job\.toml.*unknown key 'bacth-size'\. Nearest: batch_size\..*Keys: .*on_error"),
    ("zzzz = 3", "unknown key 'zzzz'(?!.*Nearest)"),
    ("[job]\nlimit = 3", "unknown key 'job'"),
    ("batch-size = 8\nbatch_size = 16", "'batch_size' is there twice"),
    ("model = ", "is not valid TOML"),
    ("limit = 1\nlimit = 2", "is not valid TOML.*line 2"),
    (b'model = "\xff"', "is not valid TOML"),
]


@pytest.mark.parametrize(("text", "says"), WRONG_FILES)
def test_wrong_files_are_refused(tmp_path: Path, text: str | bytes, says: str) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(text if isinstance(text, bytes) else f"{text}\n".encode())
    assert re.search(f"(?s){says}", fails(path))


def test_least_numbers_are_taken(tmp_path: Path) -> None:
    """Also where a flag of 0 stands against the file."""
    for name in ("batch_size", "limit", "num_classes", "resize", "crop"):
        assert Job.read(None, {name: 1}).to_json()[name] == 1
    path = write(tmp_path, "workers = 3\nlimit = 5\n")
    assert Job.read(path, {"workers": 0}).workers == 0
    assert "--limit 0" in fails(path, limit=0)


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert "none.toml cannot be read: No such file" in fails(tmp_path / "none.toml")
    assert "cannot be read: Is a directory" in fails(tmp_path)


def test_to_json_is_plain() -> None:
    job = Job.of(mean=(0.5,), data=Path("val"), metric=("top1",), limit=3)
    read = json.loads(json.dumps(job.to_json()))
    assert (read["mean"], read["metric"], read["limit"], read["model"]) == ([0.5], ["top1"], 3, None)
    assert read["data"] == "val"
    options = {field.name for field in task_kind("image-classification").fields}
    assert set(read) == {"task", *COMMON, *options}


def test_options_of_another_task_are_refused() -> None:
    for options, flag in (
        ({"stride": 0}, "--stride"),
        ({"null_threshold": 0.0}, "--null-threshold"),
        ({"task": "question-answering", "download": True}, "--download"),
        ({"task": "question-answering", "resize": 3}, "--resize"),
    ):
        with pytest.raises(UsageError, match=f"{flag} belongs to --task"):
            Job.of(**options)
    assert Job.of(**QUESTIONS, stride=0).options.stride == 0


@pytest.mark.parametrize("in_file", [True, False])
def test_the_model_is_a_path_for_some_tasks(tmp_path: Path, in_file: bool) -> None:
    task = "question-answering"
    lines = ['model = "bert"', 'data = "dev.json"', *([f'task = "{task}"'] if in_file else [])]
    path = write(tmp_path, "\n".join(lines))
    options = Job.read(path, {} if in_file else {"task": task}).options
    assert (options.model, options.data) == (tmp_path / "bert", tmp_path / "dev.json")
    given = Job.read(path, {"task": task, "model": Path("here"), "data": Path("there.json")}).options
    assert (given.model, given.data) == (Path("here"), Path("there.json"))
    if not in_file:
        assert Job.read(path, {}).options.model == "bert"
