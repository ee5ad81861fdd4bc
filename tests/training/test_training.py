"""The example that trains: its bits with and without evaluations, after a resume, and by dualeval run."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import json
import pickle
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import dualeval
from dualeval.data.small_images import read_idx
from dualeval.tasks.image_classification import FASHION_MEAN, FASHION_STD, ImageClassification
from tests.conftest import ROOT, Launch
from tests.engine.end.test_endings import ASSETS, await_that, read
from tests.vehicles.launchers import way

EXAMPLES = ROOT / "examples"
SCRIPTS = EXAMPLES / "scripts"
FILES = ["best.pt", "last.pt", "log.jsonl", "run.json"]
PIXELS = {"mean": (FASHION_MEAN,), "std": (FASHION_STD,)}
# Everything that draws random numbers: order, augmentation, dropout.
AUGMENTED = ["--crop", "--flip", "--rand-augment", "--erasing", "0.5"]
SMALL = ["--batch-size", "16", "--lr", "0.05", "--workers", "0", *AUGMENTED]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class TinyNet(nn.Module):
    """With what a training can get wrong: batch norm's statistics, and dropout."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 5, stride=3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(256, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


MODEL = "tests.training.test_training:TinyNet"


def write_idx(path: Path, values: np.ndarray) -> None:
    header = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(gzip.compress(header + values.tobytes(), compresslevel=1))


def write_fashion(folder: Path, training: int, validation: int) -> Path:
    """Fashion-MNIST's four files, with some of the shipped images in place of the others."""
    folder.mkdir()
    for kind in ("images-idx3", "labels-idx1"):
        values = read_idx(ASSETS / f"t10k-{kind}-ubyte.gz")
        write_idx(folder / f"train-{kind}-ubyte.gz", values[:training])
        write_idx(folder / f"t10k-{kind}-ubyte.gz", values[training : training + validation])
    return folder


@pytest.fixture(scope="module")
def fashion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fashion(tmp_path_factory.mktemp("data") / "fashion", 100, 70)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree as ImageNet's: three classes of coloured noise."""
    root, draw = tmp_path_factory.mktemp("data") / "tree", np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 5)):
        for label in range(3):
            folder = root / part / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 256, (40 + number, 48, 3), dtype=np.uint8)
                pixels[..., label] //= 4
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example as a module: ``example.main([...])`` trains in this process, on one thread."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(ROOT)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module("train_with_eval")
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():  # where a test has interrupted it
        torch.distributed.destroy_process_group()
    for name in ("train_with_eval", "training_ranks", "image_sets"):
        sys.modules.pop(name, None)


def trained(example: Any, data: Path, out: Path, *options: Any) -> Path:
    words = ["--data", data, "--out", out, "--epochs", "2", *SMALL, *options]
    words += [] if "--model" in words else ["--model", MODEL]
    assert example.main([*map(str, words)]) == 0
    return out


def log_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def bits(run: Path, *parts: str, name: str = "last.pt") -> dict[str, str]:
    """A hash of each part of a checkpoint."""
    checkpoint = torch.load(run / name, weights_only=True)
    chosen = parts or ("model", "optimizer", "lr_scheduler", "scaler", "epoch")
    return {part: hashlib.sha256(pickle.dumps(_plain(checkpoint[part]))).hexdigest() for part in chosen}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (
            (str(value.dtype), tuple(value.shape), value.view(torch.uint8).numpy().tobytes())
            if value.ndim
            else value.item()
        )
    if isinstance(value, dict):
        return [(name, _plain(each)) for name, each in value.items()]
    return [_plain(each) for each in value] if isinstance(value, list) else value


def digest_by_dualeval(run: Path, data: Path, name: str = "last.pt", **options: Any) -> str:
    """Of what ``dualeval run --model ... --weights RUN/last.pt`` evaluates."""
    model = read(run / "run.json")["model"]
    preprocessing = options.pop("preprocessing", PIXELS)
    task = ImageClassification(model=model, weights=str(run / name), data=data, preprocessing=preprocessing)
    return dualeval.evaluate(task, workers=0, **options).metrics_digest


# -- several ranks ---------------------------------------------------------------------------------------

LAUNCHERS = [way("torchrun", "torch"), way("horovodrun", "horovod")]


def start(launch: Launch, launcher: str, data: Path, out: Path, *options: str) -> Any:
    words: list[str | Path] = [
        *(SCRIPTS / f"{launcher}_one_node.sh", "--model", MODEL, "--data", data, "--out", out)
    ]
    return launch([*words, "--epochs", "2", *SMALL, *options], variables=ONE_THREAD)


@pytest.fixture(scope="module")
def of_two_ranks(fashion: Path, tmp_path_factory: pytest.TempPathFactory, launch: Launch) -> Path:
    """A run of two ranks of torchrun; alone it takes as long as two tests."""
    out = tmp_path_factory.mktemp("runs") / "run"
    done = start(launch, "torchrun", fashion, out).ok()
    assert (
        done.stdout.count("Acc@1") == 1 and len(re.findall(r"^ +[12]/2 .*%", done.stdout, re.MULTILINE)) == 2
    )
    return out


def test_two_ranks_of_torchrun_log_the_digests_of_dualeval_run(of_two_ranks: Path, fashion: Path) -> None:
    assert sorted(path.name for path in of_two_ranks.iterdir()) == FILES
    run, log = read(of_two_ranks / "run.json"), log_of(of_two_ranks)
    expected = {"world_size": 2, "backend": "torch", "launcher": "torchrun", "batch_size": 16}
    assert {**expected, "global_batch_size": 32}.items() <= run.items()
    assert [entry["epoch"] for entry in log] == [1, 2]
    assert log[-1]["metrics_digest"] == digest_by_dualeval(of_two_ranks, fashion)
    best = max(log, key=lambda entry: entry["metrics"]["top1"])
    assert best["metrics_digest"] == digest_by_dualeval(of_two_ranks, fashion, "best.pt")
    assert log[0]["metrics_digest"] != log[1]["metrics_digest"]
    for entry in log:
        assert 0 < entry["train_s"] + entry["eval_s"] <= entry["elapsed_s"] and entry["images_per_s"] > 0
        low, high = entry["intervals"]["top1"]
        assert low <= entry["metrics"]["top1"] <= high


@pytest.mark.needs("horovod")
def test_horovod_trains_to_the_same_bits(
    of_two_ranks: Path, fashion: Path, tmp_path: Path, launch: Launch
) -> None:
    # Over gloo: MPI's ranks wait with a core each, which other tests could use.
    words: list[str | Path] = [
        *("horovodrun", "--gloo", "-np", "2", sys.executable, EXAMPLES / "train_with_eval.py")
    ]
    words += ["--model", MODEL, "--data", fashion, "--out", tmp_path / "run", "--epochs", "2", *SMALL]
    launch(words, variables=ONE_THREAD).ok()
    assert read(tmp_path / "run/run.json")["backend"] == "horovod"
    assert bits(tmp_path / "run", "model", "epoch") == bits(of_two_ranks, "model", "epoch")
    wanted = [entry["metrics_digest"] for entry in log_of(of_two_ranks)]
    assert [entry["metrics_digest"] for entry in log_of(tmp_path / "run")] == wanted


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "backend"), LAUNCHERS)
def test_a_killed_run_goes_on_to_the_same_bits(
    launch: Launch, fashion: Path, tmp_path: Path, launcher: str, backend: str
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = ["--epochs", "6", "--precision", "amp-bf16"]
    assert start(launch, launcher, fashion, whole, *options).returncode == 0
    command: list[str | Path] = [
        *(SCRIPTS / f"{launcher}_one_node.sh", "--model", MODEL, "--data", fashion, "--out", killed)
    ]
    with launch.started([*command, *SMALL, *options], variables=ONE_THREAD) as process:
        await_that(lambda: [killed] * (killed / "last.pt").exists(), process)
        process.kill()
        process.communicate(timeout=60)
    start(launch, launcher, fashion, killed, *options, "--resume").ok()
    assert bits(killed) == bits(whole)
    assert bits(killed, "model", name="best.pt") == bits(whole, "model", name="best.pt")
    digests = [[entry["metrics_digest"] for entry in log_of(run)] for run in (killed, whole)]
    assert digests[0] == digests[1] and len(digests[0]) == 6


# -- one process -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "evaluation"),
    [
        ("fp32", "fp32"),
        *(
            pytest.param(precision, evaluation, marks=pytest.mark.long)
            for precision, evaluation in (
                ("amp-fp16", "amp-fp16"),
                ("amp-bf16", "amp-bf16"),
                ("fp16", "amp-fp16"),
            )
        ),
        ("bf16", "amp-bf16"),
    ],
)
def test_evaluations_change_no_bit_of_a_training_in_each_precision(
    example: Any, fashion: Path, tmp_path: Path, precision: str, evaluation: str
) -> None:
    options = ["--precision", precision]
    run = trained(example, fashion, tmp_path / "with", *options)
    without = trained(example, fashion, tmp_path / "without", *options, "--no-eval")
    assert bits(run) == bits(without)
    assert sorted(path.name for path in without.iterdir()) == [name for name in FILES if name != "best.pt"]
    assert log_of(run)[-1]["metrics_digest"] == digest_by_dualeval(run, fashion, precision=evaluation)
    state = torch.load(run / "last.pt")["model"]
    assert state["layers.1.num_batches_tracked"] == 2 * (100 // 16)
    dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    assert dtypes == {torch.bfloat16 if precision == "bf16" else torch.float32}


def test_a_resume_has_the_bits_of_a_run_without_a_break(
    example: Any, fashion: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(example, fashion, tmp_path / "whole")
    with monkeypatch.context() as patch:
        written: list[Any] = []

        def write_log(folder: Path, log: list[Any]) -> None:
            written.append(log)  # killed when last.pt of the first epoch is there, and its line is not
            raise KeyboardInterrupt

        patch.setattr(example, "write_log", write_log)
        with pytest.raises(KeyboardInterrupt):
            trained(example, fashion, tmp_path / "run")
    torch.distributed.destroy_process_group()
    assert torch.load(tmp_path / "run/last.pt")["epoch"] == 1 and len(written) == 1
    torch.manual_seed(99)
    run = trained(example, fashion, tmp_path / "run", "--resume")
    assert bits(run) == bits(whole)
    assert bits(run, "model", name="best.pt") == bits(whole, "model", name="best.pt")
    assert [entry["metrics_digest"] for entry in log_of(run)] == [
        entry["metrics_digest"] for entry in log_of(whole)
    ]
    elapsed = [entry["elapsed_s"] for entry in log_of(run)]
    assert elapsed[1] > elapsed[0]


def test_a_tree_of_classes_and_a_torchvision_model_have_the_digest(
    example: Any, pictures: Path, tmp_path: Path
) -> None:
    options = ["--model", "squeezenet1_1", "--size", "32", "--resize", "36", "--batch-size", "4"]
    run = trained(example, pictures, tmp_path / "run", *options, "--epochs", "1", "--limit-train", "9")
    [entry] = log_of(run)
    digest = digest_by_dualeval(run, pictures / "val", preprocessing={"resize": 36, "crop": 32})
    assert entry["metrics_digest"] == digest
    # As `dualeval run --task examples/train_with_eval.py:saved -T run=RUN` does.
    assert dualeval.evaluate(example.saved(str(run)), workers=0).metrics_digest == digest


def test_a_training_stops_when_nothing_improves(example: Any, fashion: Path, tmp_path: Path) -> None:
    # With a rate of 0 only the statistics of batch norms change.
    options = ["--lr", "0", "--epochs", "9", "--patience", "2"]
    run = trained(example, fashion, tmp_path / "run", *options)
    accuracies = [entry["metrics"]["top1"] for entry in log_of(run)]
    assert len(accuracies) == accuracies.index(max(accuracies)) + 3 < 9
    assert log_of(trained(example, fashion, run, *options, "--resume")) == log_of(run)


def test_cifar_is_read_from_disk(example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets, classes = importlib.import_module("image_sets"), 100
    kind = sets.torchvision.datasets.CIFAR100
    folder = tmp_path / kind.base_folder
    folder.mkdir()
    draw = np.random.default_rng(0)

    def write(file: str, content: Any) -> str:
        (folder / file).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / file).read_bytes()).hexdigest()

    for part in ("train_list", "test_list"):
        files = [file for file, _ in getattr(kind, part)]
        content = {"data": draw.integers(0, 256, (2, 3072), dtype=np.uint8), "fine_labels": [0, 99]}
        # The sums that torchvision knows are those of the real files.
        monkeypatch.setattr(kind, part, [[file, write(file, content)] for file in files])
    meta = kind.meta
    names = {meta["key"]: [f"class{number}" for number in range(classes)]}
    monkeypatch.setattr(kind, "meta", {**meta, "md5": write(meta["filename"], names)})
    data = sets.open_set(tmp_path, training=True)
    assert len(data) == 2 * len(kind.train_list) and len(data.classes) == classes
    options = SimpleNamespace(model="resnet18", size=None, resize=None)
    data.transform = sets.transform_of(options, data, 3, training=False)
    assert data[1][0].shape == (3, 32, 32) and data[1][1] == classes - 1
    (folder / meta["filename"]).write_bytes(b"")
    with pytest.raises(dualeval.UsageError, match=r"--data .*corrupted"):
        sets.open_set(tmp_path, training=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data", "/nowhere"], r"--data /nowhere: expected a folder with train/CLASS/"),
        (["--model", "resnet81"], r"there is no model 'resnet81'. Nearest: resnet18"),
        (
            ["--model", "squeezenet1_1", "--size", "8"],
            r"squeezenet1_1 cannot take images of shape \(3, 8, 8\)",
        ),
        (["--batch-size", "101"], r"--batch-size 101 is more than a rank's share of the 100 training images"),
        (["--no-eval", "--patience", "2"], r"--patience, --limit-eval and --logger have no meaning with"),
        (["--logger", "tensorbord:tb"], r"--logger 'tensorbord:tb': expected one of tensorboard:DIR"),
        (["--device", "cuda"], r"--device cuda: rank 0 is number 0 on its node, which has 0 GPUs"),
        (["--lr", "-1"], r"argument --lr: expected a number of at least 0, not '-1'"),
        (["--out", "/dev/null/run"], r"--out /dev/null/run: no folder can be made there"),
        (["--precision", "fp8"], r"argument --precision: invalid choice: 'fp8'"),
    ],
)
def test_wrong_input_is_one_sentence(
    example: Any, fashion: Path, tmp_path: Path, capsys: Any, options: list[str], said: str
) -> None:
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    words = ["--model", MODEL, "--data", str(fashion), "--out", str(tmp_path / "run"), *options]
    try:
        code = example.main(words)
    except SystemExit as ended:  # of argparse
        code = ended.code
    assert code == 2
    error = capsys.readouterr().err
    assert re.search(rf"error: {said}", error) and error.count("error") == 1
    assert not (tmp_path / "run").exists()


def test_a_folder_is_not_trained_over(example: Any, fashion: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["--model", MODEL, "--data", str(fashion), "--out", str(tmp_path), "--epochs", "1", *SMALL]
    assert example.main(words) == 0
    assert example.main(words) == 2
    assert example.main([*words, "--resume", "--lr", "0.2"]) == 2
    torch.save({"model": {}}, tmp_path / "last.pt")
    assert example.main([*words, "--resume"]) == 2
    first, second, third = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "last.pt was not written by this example" in third
    assert "last.pt is there already: type --resume to go on, or give another --out" in first
    assert "was trained with lr 0.05, and now it is 0.2" in second


def test_the_best_is_one_that_was_evaluated(
    example: Any, fashion: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs that are not evaluated after a resume are not the best, nor are those of other images."""
    words = ["--model", MODEL, "--data", str(fashion), "--out", str(tmp_path), "--epochs", "2", *SMALL]

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(example, "write_log", killed)
        with pytest.raises(KeyboardInterrupt):
            example.main(words)
    torch.distributed.destroy_process_group()
    assert example.main([*words, "--resume", "--limit-eval", "20"]) == 2
    assert "was trained with limit eval None, and now it is 20" in capsys.readouterr().err
    assert example.main([*words, "--resume", "--no-eval"]) == 0
    assert torch.load(tmp_path / "best.pt", weights_only=True)["epoch"] == 1
    assert torch.load(tmp_path / "last.pt", weights_only=True)["epoch"] == 2
