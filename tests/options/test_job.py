"""Job: flags and a file, which of them wins, and what is wrong with either."""

from __future__ import annotations

import json
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


def test_every_key_of_a_file(tmp_path: Path) -> None:
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


def test_flags_win(tmp_path: Path) -> None:
    own = {"model": "resnet50", "weights": "other.pt", "data": Path("here"), "mean": (0.1, 0.2, 0.3)}
    common = {"metric": ("top1",), "batch_size": 8, "workers": 2, "on_error": "stop"}
    job = Job.read(write(tmp_path, FILE), {**own, **common})
    # A path in a flag counts from the working folder, so it stays as it is.
    assert {name: getattr(job.options, name) for name in own} == own
    assert {name: getattr(job, name) for name in common} == common
    assert (job.limit, job.options.crop) == (100, 56)


def test_a_zero_flag_wins_too(tmp_path: Path) -> None:
    path = write(tmp_path, "workers = 3\nlimit = 5\n")
    assert Job.read(path, {"workers": 0}).workers == 0
    assert "--limit 0" in fails(path, limit=0)


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
def test_a_path_that_begins_like_a_word(tmp_path: Path, weights: str) -> None:
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


def test_unknown_keys_get_the_nearest_names(tmp_path: Path) -> None:
    message = fails(write(tmp_path, "bacth-size = 3\n"))
    assert "unknown key 'bacth-size'. Nearest: batch_size." in message
    assert "job.toml" in message
    assert "on_error" in message.partition("Keys: ")[2]
    far = fails(write(tmp_path, "zzzz = 3\n"))
    assert "Nearest" not in far
    assert "unknown key 'job'" in fails(write(tmp_path, "[job]\nlimit = 3\n"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('batch-size = "64"', ["batch-size = '64'", "expected an int", "found a str"]),
        ("batch-size = 64.0", ["expected an int", "found a float"]),
        ("limit = true", ["expected an int", "found a bool"]),
        ("download = 1", ["expected a bool", "found an int"]),
        ("model = 18", ["expected a str", "found an int"]),
        ("metric = 'top1'", ["expected a list", "found a str"]),
        ("metric = ['top1', 5]", ["metric = 5", "expected a str"]),
        ("mean = 0.5", ["expected a list", "found a float"]),
        ("mean = ['a']", ["mean = 'a'", "expected a float"]),
        ("std = [true]", ["std = True", "expected a float", "found a bool"]),
        ("data = ['a']", ["expected a str", "found a list"]),
    ],
)
def test_values_of_a_wrong_type(tmp_path: Path, line: str, words: list[str]) -> None:
    message = fails(write(tmp_path, line))
    assert message.startswith(f"--config {tmp_path / 'job.toml'}: ")
    for word in words:
        assert word in message


def test_malformed_files(tmp_path: Path) -> None:
    assert "is not valid TOML" in fails(write(tmp_path, "model = \n"))
    assert "line 2" in fails(write(tmp_path, "limit = 1\nlimit = 2\n"))
    (tmp_path / "job.toml").write_bytes(b'model = "\xff"\n')
    assert "is not valid TOML" in fails(tmp_path / "job.toml")


def test_missing_files(tmp_path: Path) -> None:
    assert "none.toml cannot be read: No such file" in fails(tmp_path / "none.toml")
    assert "cannot be read: Is a directory" in fails(tmp_path)


@pytest.mark.parametrize("name", ["batch_size", "limit", "num_classes", "resize", "crop"])
def test_numbers_have_bounds(tmp_path: Path, name: str) -> None:
    flag = "--" + name.replace("_", "-")
    for value in (0, -1):
        assert f"{flag} {value}: expected a whole number of at least 1" in fails(None, **{name: value})
    assert f"{flag} 0" in fails(write(tmp_path, f"{name} = 0\n"))
    assert Job.read(None, {name: 1}).to_json()[name] == 1


def test_workers_may_be_none_at_all() -> None:
    assert "--workers -1: expected a whole number of at least 0" in fails(None, workers=-1)
    assert Job.read(None, {"workers": 0}).workers == 0


@pytest.mark.parametrize("bad", [(0.0,), (0.5, -0.5, 0.5), (float("nan"),), (float("inf"),)])
def test_standard_deviations_are_positive(tmp_path: Path, bad: tuple[float, ...]) -> None:
    assert "--std" in fails(None, std=bad)
    assert "--std" in fails(write(tmp_path, "std = []\n"))


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [
        ("precision", "fp8", "fp32"),
        ("on_error", "skipp", "skip"),
        ("task", "image-clasification", "image-classification"),
    ],
)
def test_choices(name: str, value: str, near: str) -> None:
    message = fails(None, **{name: value})
    assert f"--{name.replace('_', '-')} {value!r}: expected one of " in message
    assert f"Did you mean {near}?" in message


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


@pytest.mark.parametrize(
    ("name", "least"), [("max_length", 1), ("n_best", 1), ("max_answer_length", 1), ("stride", 0)]
)
def test_numbers_of_windows_and_answers(name: str, least: int) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(UsageError, match=f"{flag} {least - 1}: expected a whole number of at least {least}"):
        Job.of(**{**QUESTIONS, name: least - 1})


@pytest.mark.parametrize("mean", [(72.9,), (0.5, -0.1), (float("nan"),), (float("inf"),)])
def test_means_are_of_scaled_pixels(mean: tuple[float, ...]) -> None:
    assert "Divide that of pixels from 0 to 255 by 255" in fails(None, mean=mean)


def test_a_key_in_two_spellings(tmp_path: Path) -> None:
    written = write(tmp_path, "batch-size = 8\nbatch_size = 16\n")
    assert "'batch_size' is there twice" in fails(written)
