"""The classes of folders on the whole way: into metrics, result.json, Parquet, identity and messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from PIL import Image

from dualeval.data.image_sets.class_folders import ImageFolder
from dualeval.engine.scoring.rescoring import verify
from dualeval.errors import UsageError
from dualeval.result import read_result
from dualeval.tasks.image_classification import ImageClassification
from dualeval.tasks.stored import metrics_of_run
from dualeval.vision_library import torchvision
from tests.conftest import working_module
from tests.engine.test_evaluator import evaluate
from tests.tasks.test_image_classification import refused
from tests.vehicles.published_weights import Publish

TORCHVISION = torchvision()
CPU = torch.device("cpu")
SIZE = {"resize": 32, "crop": 32}
# The class with the largest logit is the mean red value, in steps of 10: a picture says its own class.
MODELS = """
import torch
from torch import nn


class Red(nn.Module):
    def __init__(self, num_classes, channels=3):
        super().__init__()
        self.places = nn.Parameter(torch.arange(float(num_classes)), requires_grad=False)
        self.channels = channels

    def forward(self, images):
        assert images.shape[1] == self.channels
        return -(images[:, 0].mean((1, 2)).mul(25.5).unsqueeze(1) - self.places).abs()


def red(num_classes): return Red(num_classes)
def thousand(): return Red(1000)
def three(): return Red(3)
def grey(num_classes): return Red(num_classes, channels=1)
"""


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working folder with ``reds``, a module of models that see a picture's class."""
    with working_module(tmp_path, "reds", MODELS, monkeypatch):
        yield


def lay_out(root: Path, classes: dict[str, int]) -> Path:
    """A folder a class, each with one picture that shows the model its class."""
    for name, index in classes.items():
        (root / name).mkdir(parents=True)
        Image.new("RGB", (40, 40), (10 * index, 0, 0)).save(root / name / "0.png")
    return root


def task(data: Path, model: str = "reds:red", **options: Any) -> ImageClassification:
    plain = {"mean": (0.0,), "std": (1.0,), **SIZE, **options.pop("preprocessing", {})}
    arguments = {"weights": "random:0", "metrics": ["top1", "loss"], **options}
    return ImageClassification(model=model, data=data, preprocessing=plain, **arguments)


def class_map(folder: Path, **classes: int | None) -> Path:
    path = folder / "map.json"
    path.write_text(json.dumps(classes))
    return path


def names_in(out: Path, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    table = pyarrow.parquet.read_table(out / "predictions.parquet").to_pydict()
    return list(zip(*(table[name] for name in columns), strict=True))


# -- the numbers -----------------------------------------------------------------------------------------


def test_numbered_folders_in_the_order_of_names_are_warned_of(tmp_path: Path) -> None:
    """Eight of twelve were counted as wrong, without a word."""
    data = lay_out(tmp_path / "val", {str(number): number for number in range(12)})
    said: list[str] = []
    result = evaluate(task(data), tmp_path / "names", note=said.append)
    assert result.metrics["top1"] == 2 / 12
    [warning] = [sentence for sentence in result.warnings if "numbered" in sentence]
    assert "--class-order number" in warning
    assert any(warning in sentence for sentence in said), "at the start, too"
    result = evaluate(task(data, class_order="number"), tmp_path / "numbers")
    assert result.metrics["top1"] == 1
    assert result.labels["rule"] == "order of numbers"
    assert not [sentence for sentence in result.warnings if "numbered" in sentence]


def test_a_class_map_gives_folders_classes_and_leaves_others_out(tmp_path: Path) -> None:
    data = lay_out(tmp_path / "val", {"cat": 7, "dog": 2, "kitten": 7, "sheep": 1})
    chosen = class_map(tmp_path, cat=7, dog=2, kitten=7, sheep=None, absent=9)
    out = tmp_path / "out"
    result = evaluate(task(data, class_map=chosen), out)
    assert result.metrics["top1"] == 1
    assert result.samples["total"] == 3
    names = [None] * 10
    assert result.labels == {
        "rule": "class map",
        "folders": {"cat": 7, "dog": 2, "kitten": 7},
        "left_out": ["sheep"],
        # Nothing says that there are classes beyond the largest of a folder.
        "classes": [*names[:2], "dog", *names[3:7], "cat, kitten"],
        "passed_over": {"files": {}, "hidden_folders": 0, "repeated_folders": 0},
    }
    assert result.job["class_map"] == str(chosen)
    assert read_result(out / "result.json").labels == result.labels
    assert names_in(out, ("id", "target", "target_name", "prediction", "prediction_name")) == [
        ("cat/0.png", 7, "cat, kitten", 7, "cat, kitten"),
        ("dog/0.png", 2, "dog", 2, "dog"),
        ("kitten/0.png", 7, "cat, kitten", 7, "cat, kitten"),
    ]


def test_rows_with_a_class_map_serve_verify_and_a_second_run(tmp_path: Path) -> None:
    data = lay_out(tmp_path / "val", {"a": 2, "b": 0})
    (data / "b/broken.png").touch()
    out, chosen = tmp_path / "out", class_map(tmp_path, a=2, b=0)
    result = evaluate(task(data, class_map=chosen), out, on_error="skip")
    assert result.failed[0]["error"].endswith(
        "the file is empty (0 bytes): its download or copy has failed. Fetch it again"
    )
    assert names_in(out, ("target_name", "prediction_name")) == [("a", "a"), ("b", "b"), (None, None)]
    assert not [check for check in verify(out, metrics_of_run(out / "job.json")) if check.differences]
    again = evaluate(task(data, class_map=chosen), out, on_error="skip")
    assert (again.earlier, again.replay, again.labels) == (True, "same bits", result.labels)


def test_pictures_that_are_passed_over_are_in_the_result(tmp_path: Path) -> None:
    data = lay_out(tmp_path / "val", {"a": 0, "b": 1, ".ipynb_checkpoints": 2})
    for name in ("a/1.gif", "b/1.heic", "notes.txt"):
        (data / name).touch()
    result = evaluate(task(data), tmp_path / "out")
    assert "passed over: 3 files (.gif, .heic, .txt); 1 hidden folder" in result.warnings
    assert result.labels["passed_over"]["files"] == {".gif": 1, ".heic": 1, ".txt": 1}
    assert result.labels["classes"] == ["a", "b"]
    for name in ("a/1.gif", "b/1.heic"):
        (data / name).unlink()
    other = task(data)
    other.build_model(CPU)
    assert "passed over: 1 file (.txt); 1 hidden folder" in other.notes()
    assert other.data_warnings() == []


def test_a_model_of_one_channel_gets_grey_pictures(tmp_path: Path) -> None:
    data = lay_out(tmp_path / "val", {"a": 0, "b": 1})
    Image.new("L", (40, 40), 10).save(data / "b/1.png")
    grey = {"preprocessing": {"channels": 1}}
    result = evaluate(task(data, "reds:grey", **grey), tmp_path / "out")
    assert result.job["channels"] == 1
    assert result.description["preprocessing"].startswith("grey, 32 bilinear, crop 32, mean 0.0, std 1.0")
    [_, rgb, as_grey] = names_in(tmp_path / "out", ("id", "prediction"))
    assert as_grey == ("b/1.png", 1)
    assert rgb == ("b/0.png", 0), "of pure red little is left"
    with pytest.raises(UsageError, match=r"--channels 1 needs --mean and --std"):
        ImageClassification(
            model="reds:grey", weights="random:0", data=data, preprocessing={"channels": 1, "mean": (0.5,)}
        )
    with pytest.raises(UsageError, match="--channels 2: expected one of 1, 3"):
        task(data, preprocessing={"channels": 2})


# -- identity --------------------------------------------------------------------------------------------


def test_another_class_map_is_another_job(tmp_path: Path) -> None:
    data = lay_out(tmp_path / "val", {"a": 0, "b": 1})
    out = tmp_path / "out"
    evaluate(task(data), out)
    assert evaluate(task(data, class_map=class_map(tmp_path, a=0, b=1)), out).earlier, "the same classes"
    with pytest.raises(UsageError, match=r"job\.task_options\.classes_of_folders"):
        evaluate(task(data, class_map=class_map(tmp_path, a=1, b=0)), out)
    with pytest.raises(UsageError, match=r"job\.task_options\.preprocessing\.channels: 3 there, 1 now"):
        evaluate(task(data, "reds:grey", preprocessing={"channels": 1}), out)


def test_another_name_of_an_empty_folder_is_another_job(tmp_path: Path) -> None:
    """With --limit the data alone may be the same."""
    data = lay_out(tmp_path / "val", {"a": 0, "b": 1, "c": 2})
    out = tmp_path / "out"
    evaluate(task(data), out, limit=1)
    (data / "c").rename(data / "d")
    with pytest.raises(UsageError, match=r"job\.task_options\.classes_of_folders"):
        evaluate(task(data), out, limit=1)


# -- how many classes ------------------------------------------------------------------------------------


def test_a_class_map_leaves_the_number_of_classes_to_the_model(tmp_path: Path) -> None:
    data = lay_out(tmp_path / "val", {"a": 1, "b": 2})
    chosen = class_map(tmp_path, a=1, b=2)
    for options, classes in (({}, 3), ({"num_classes": 5}, 5), ({"model": "reds:thousand"}, 1000)):
        made = task(data, class_map=chosen, **options)
        made.build_model(CPU)
        assert made.options()["num_classes"] == classes
        assert len(made.labels_used()["classes"]) == classes
    network = TORCHVISION.models.squeezenet1_1(num_classes=6)
    torch.save(network.state_dict(), tmp_path / "six.pt")
    made = task(data, "squeezenet1_1", class_map=chosen, weights=str(tmp_path / "six.pt"))
    made.build_model(CPU)
    assert made.options()["num_classes"] == 6


def test_a_class_map_beyond_the_models_classes_is_refused(tmp_path: Path) -> None:
    data = lay_out(tmp_path / "val", {"a": 0, "b": 2})
    chosen = class_map(tmp_path, a=0, b=4)
    message = refused(task(data, "reds:three", class_map=chosen))
    assert (
        f"--class-map {chosen} makes 'b' class 4, but the model reds:three has 3 classes (0 to 2)" in message
    )
    with pytest.raises(UsageError, match="makes 'b' class 4, but --num-classes is 3"):
        task(data, class_map=chosen, num_classes=3)


def test_a_class_map_that_begins_at_1_is_refused_with_advice(tmp_path: Path) -> None:
    """It is the map that is wrong, not the weights; with an output more than classes, it is right."""
    data, chosen = lay_out(tmp_path / "val", {"a": 1, "b": 2}), class_map(tmp_path, a=1, b=2)
    for outputs in (2, 3):
        network = TORCHVISION.models.squeezenet1_1(num_classes=outputs)
        torch.save(network.state_dict(), tmp_path / f"{outputs}.pt")
        (tmp_path / f"reds{outputs}.py").write_text(f"from reds import Red\ndef red(): return Red({outputs})")
    advice = r"begin at 1, those of a model at 0: write each one less\."
    made = task(data, "squeezenet1_1", class_map=chosen, weights=str(tmp_path / "2.pt"))
    with pytest.raises(
        UsageError, match=f"makes 'b' class 2, but the weights .* are for 2 classes.*{advice}"
    ):
        made.build_model(CPU)
    with pytest.raises(UsageError, match=f"--num-classes is 2 .*{advice}"):
        task(data, class_map=chosen, num_classes=2)
    with pytest.raises(
        UsageError, match=f"makes 'b' class 2, but the model reds2:red has 2 classes.*{advice}"
    ):
        task(data, "reds2:red", class_map=chosen).build_model(CPU)
    task(data, "reds3:red", class_map=chosen).build_model(CPU)
    task(data, "squeezenet1_1", class_map=chosen, weights=str(tmp_path / "3.pt")).build_model(CPU)


def test_folders_of_some_wnids_get_imagenets_classes_with_num_classes(tmp_path: Path) -> None:
    data = lay_out(tmp_path / "val", {"n01440764": 0, "n01443537": 1, "n01491361": 3})
    message = refused(task(data, "reds:thousand"))
    assert "has 1000 classes, but 3 were expected" in message
    assert "The folders are 3 of ImageNet's 1,000 wnids: add --num-classes 1000." in message
    result = evaluate(task(data, "reds:thousand", num_classes=1000), tmp_path / "out")
    assert result.metrics["top1"] == 1
    assert result.labels["folders"] == {"n01440764": 0, "n01443537": 1, "n01491361": 3}
    assert names_in(tmp_path / "out", ("id", "prediction_name"))[-1] == ("n01491361/0.png", "tiger shark")
    # A model that was trained on these alone.
    made = task(data, "reds:three")
    made.build_model(CPU)
    assert made.labels_used()["rule"] == "order of names"


def test_weights_of_more_classes_than_folders_ask_for_a_class_map(tmp_path: Path) -> None:
    data = lay_out(tmp_path / "val", {"a": 0, "b": 1})
    network = TORCHVISION.models.squeezenet1_1(num_classes=5)
    torch.save(network.state_dict(), tmp_path / "w.pt")
    message = refused(task(data, "squeezenet1_1", weights=str(tmp_path / "w.pt")))
    assert "are for 5 classes, but 2 were expected" in message
    assert "say which with --class-map FILE" in message


def test_published_weights_give_folders_their_classes(tmp_path: Path, publish: Publish, cache: Path) -> None:
    publish("squeezenet1_1", "IMAGENET1K_V1", TORCHVISION.models.squeezenet1_1(), cache)
    data = lay_out(tmp_path / "val", {"golden_retriever": 0, "n01491361": 3, "tench": 1})
    made = task(data, "squeezenet1_1", weights="DEFAULT")
    made.build_model(CPU)
    assert made.options()["num_classes"] == 1000
    assert list(made.labels_used()["folders"].values()) == [207, 3, 0]
    data_set = made.dataset()
    assert isinstance(data_set, ImageFolder)
    assert [target for _, target in data_set.__getitems__(range(3))] == [207, 3, 0]
    assert "3 folders by wnids and names of the 1,000 classes of SqueezeNet1_1_Weights" in made.notes()[0]
    with pytest.raises(UsageError, match=r"--num-classes 3, but the data has 3 class folders of 1000"):
        task(data, "squeezenet1_1", weights="DEFAULT", num_classes=3)
    (data / "poodle").mkdir()
    with pytest.raises(UsageError, match=r"1 of 4 class folders are not classes of Squeeze.*: poodle"):
        task(data, "squeezenet1_1", weights="DEFAULT")


# -- options ---------------------------------------------------------------------------------------------


def test_a_class_map_beside_a_class_order_is_refused(tmp_path: Path) -> None:
    data = lay_out(tmp_path / "val", {"a": 0})
    with pytest.raises(UsageError, match=r"--class-map .* and --class-order name both say"):
        task(data, class_map=class_map(tmp_path, a=0), class_order="name")
    with pytest.raises(UsageError, match=r"--class-order 'size': expected one of name, number"):
        task(data, class_order="size")


def test_weights_for_another_number_of_classes_than_folders_are_refused(tmp_path: Path) -> None:
    torch.save({"places": torch.arange(4.0)}, tmp_path / "w.pt")
    data = lay_out(tmp_path / "val", {"a": 0, "b": 1, "junk": 2})
    with pytest.raises(
        UsageError,
        match=r"\(3,\).*for 3 classes, as the data has 3 class folders: a, b, junk\. .* --class-map FILE",
    ):
        task(data, weights="w.pt").build_model(CPU)
    with pytest.raises(UsageError, match=r"Give the weights of this --model\. Where the"):
        task(data, weights="w.pt", num_classes=3).build_model(CPU)


PETS = ["dog", "cat", "owl"]
BESIDE: list[tuple[dict[str, Any], bool]] = [
    # Whether the names are the folders'.
    ({"class_to_idx": {name: index for index, name in enumerate(PETS)}}, True),
    ({"class_to_idx": {name: index for index, name in enumerate(PETS, 1)}}, True),
    ({"idx_to_class": dict(enumerate(PETS)), "epoch": 3}, True),
    ({"names": {str(index): name.title() for index, name in enumerate(PETS)}}, True),
    ({"hyper_parameters": {"class_names": PETS}}, True),
    ({"meta": {"CLASSES": tuple(PETS)}}, True),
    ({"meta": {"dataset_meta": {"classes": PETS}}}, True),
    ({"classes": ["wolf", "lynx", "owl"]}, False),
    ({"classes": ["wolf", "lynx", "hawk"]}, False),
    ({"classes": [*PETS, "newt"]}, False),
]


@pytest.mark.parametrize(("beside", "fits"), BESIDE)
def test_names_in_a_checkpoint_order_the_folders(tmp_path: Path, beside: dict[str, Any], fits: bool) -> None:
    state = {"places": torch.arange(3.0)}
    torch.save({"state_dict": state, **beside}, tmp_path / "w.pt")
    data = lay_out(tmp_path / "data", {name: index for index, name in enumerate(PETS)})
    found = task(data, weights="w.pt")
    assert found.dataset().labels.classes == {"cat": int(fits), "dog": int(not fits), "owl": 2}
    said = [text for text in found.data_warnings() if "w.pt" in text]
    assert len(said) == (not fits)
    assert all("in the order cat, dog, owl." in text and "--class-order name" in text for text in said)
    # Who says it is asked for nothing, and is no other job than before.
    ordered = task(data, weights="w.pt", class_order="name")
    assert [*ordered.dataset().labels.classes.values()] == [0, 1, 2]
    assert not [text for text in ordered.data_warnings() if "w.pt" in text]


@pytest.mark.parametrize(
    "beside",
    [
        # In the same order; indices, of which the checkpoint has names; no names of classes.
        {"classes": ["0", "1"]},
        {"names": ["zero", "one"]},
        {"names": ["conv.weight", "conv.bias", "bn"], "classes": 2, "class_to_idx": {"a": 1, "b": 2}},
        {"classes": ["a", "a"], "idx_to_class": {0: 0, 1: 1}, "meta": [3]},
    ],
)
def test_names_in_a_checkpoint_leave_numbered_folders_alone(tmp_path: Path, beside: dict[str, Any]) -> None:
    torch.save({"state_dict": {"places": torch.arange(2.0)}, **beside}, tmp_path / "w.pt")
    torch.save({"places": torch.arange(2.0)}, tmp_path / "plain.pt")
    data = lay_out(tmp_path / "data", {"0": 0, "1": 1})
    found, plain = (task(data, weights=name) for name in ("w.pt", "plain.pt"))
    assert found.fingerprint() == plain.fingerprint()
    assert found.data_warnings() == plain.data_warnings()
