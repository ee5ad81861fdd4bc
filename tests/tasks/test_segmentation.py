"""The task segmentation: counts beside numpy's, groups of sizes, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

import dualeval
from dualeval.cli import dualeval as dualeval_command
from dualeval.data.preprocessing import Uncropped
from dualeval.errors import UsageError
from dualeval.metrics.segmentation import counts_of, segmentation_metrics
from dualeval.models.sources.processors import uncropped_of
from dualeval.tasks.segmentation import Segmentation, _is_whole
from dualeval.vision_library import torchvision
from tests.engine.test_evaluator import evaluate, rows
from tests.tasks.conftest import check_doors
from tests.vehicles import masked_pictures as made
from tests.vehicles.masked_pictures import CLASSES, IGNORED, Exact
from tests.vehicles.measuring import measure

CPU = torch.device("cpu")
AS_STORED: dict[str, Any] = {"preprocessing": "none"}


def task(home: Path, **changes: Any) -> Segmentation:
    given = {"model": Exact(), "data": home / "img", "masks": home / "masks", **AS_STORED, **changes}
    return Segmentation(**given)


def by_hand(home: Path, model: nn.Module | None = None) -> dict[str, Any]:
    """Labels, predictions and counts of each picture, one after the other."""
    found: dict[str, Any] = {"labels": [], "predicted": [], "counts": []}
    for path in sorted((home / "img").iterdir()):
        pixels = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)[None] / 255
        labels = np.array(Image.open(home / "masks" / path.name))
        logits = (model or Exact())(pixels)
        if logits.shape[2:] != labels.shape:
            logits = interpolate(logits, size=labels.shape, mode="bilinear", align_corners=False)
        predicted = logits.argmax(1)[0].numpy()
        for name, value in zip(found, (labels, predicted, made.counts(labels, predicted)), strict=True):
            found[name].append(value)
    return found


# -- counts and metrics --------------------------------------------------------------------------------


def test_counts_are_those_of_numpy(home: Path, tmp_path: Path) -> None:
    """Of each picture, whatever sizes are in its batch; and the metrics are made of their sums."""
    wanted = by_hand(home)
    result = evaluate(task(home), tmp_path / "out", batch_size=4)
    table = rows(tmp_path / "out")
    each = np.array([table[name] for name in ("intersection", "target_pixels", "predicted_pixels")])
    assert (each == np.stack(wanted["counts"], axis=1)).all()
    right, target, predicted = sum(wanted["counts"])
    iou, dice = right / (target + predicted - right), 2 * right / (target + predicted)
    assert result.metrics["iou_per_class"] == iou.tolist()
    assert result.metrics["mean_iou"] == math.fsum(iou) / CLASSES
    assert result.metrics["dice_per_class"] == dice.tolist()
    assert result.metrics["accuracy_per_class"] == (right / target).tolist()
    assert result.metrics["pixel_accuracy"] == right.sum() / target.sum()
    of_pictures = np.mean([*map(_own_iou, wanted["counts"])])
    assert result.metrics["picture_iou"] == pytest.approx(of_pictures, rel=1e-12)
    assert table["labelled_pixels"] == [int(of.sum()) for of in np.array(wanted["counts"])[:, 1]]
    low, high = result.intervals["pixel_accuracy"]
    assert low < right.sum() / target.sum() < high
    names = ["id", "index", *task(home).rows]
    assert [name for name in table if name not in ("status", "error")] == names


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        ({"ignore_index": (0, 255)}, [0]),
        ({"mask_values": "0=none,1=1,2=2,3=3,4=4,255=none"}, [0]),
        ({"mask_values": "0=0,1=1,2=3,3=3,4=4,255=none"}, [2]),
    ],
)
def test_a_class_that_no_label_stands_for_is_in_no_mean(
    home: Path, changes: dict[str, Any], left_out: list[int]
) -> None:
    made_task = task(home, **changes)
    result = evaluate(made_task, None)
    for name in ("iou", "dice"):
        each: Any = result.metrics[f"{name}_per_class"]
        assert [number for number, value in enumerate(each) if value is None] == left_out
        assert result.metrics[f"mean_{name}"] == pytest.approx(np.mean([v for v in each if v is not None]))
    assert result.job["left_out"] == left_out
    assert f"not in the means: {left_out[0]}, which no label is" in made_task.description()["compared"]
    assert "left_out" not in evaluate(task(home), None).job


def _own_iou(counts: Any) -> float:
    right, target, predicted = counts
    union = target + predicted - right
    return float((right[union > 0] / union[union > 0]).mean())


def test_a_class_without_pixels_is_in_no_mean() -> None:
    """A class without pixels is in no mean, one that is only predicted in that of IoU and Dice."""
    metrics = {metric.name: metric for metric in segmentation_metrics(4)}
    columns = {
        "intersection": torch.tensor([[3, 0, 0, 0]]),
        "target_pixels": torch.tensor([[4, 2, 0, 0]]),
        "predicted_pixels": torch.tensor([[5, 0, 1, 0]]),
    }
    assert measure(metrics["iou"], columns).values == {
        "mean_iou": 0.5 / 3,
        "iou_per_class": [0.5, 0.0, 0.0, None],
    }
    assert measure(metrics["mean_accuracy"], columns).values == {
        "mean_accuracy": 0.375,
        "accuracy_per_class": [0.75, 0.0, None, None],
    }
    assert measure(metrics["dice"], columns).values["mean_dice"] == (6 / 9) / 3
    nothing = {name: column[:0] for name, column in columns.items()}
    assert measure(metrics["iou"], nothing).values == {"mean_iou": None, "iou_per_class": [None] * 4}


def test_pixels_without_a_label_are_not_counted() -> None:
    labels = torch.tensor([[0, 1], [-1, 1]], dtype=torch.int16)
    predicted = torch.tensor([[0, -1], [0, 0]])
    assert counts_of(labels, predicted, 2).tolist() == [[1, 0], [1, 2], [2, 0]]


class Special(nn.Module):
    """Equal logits, but for a NaN at one pixel and an infinity at another one."""

    def __init__(self) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        logits = images.new_zeros(len(images), CLASSES, *images.shape[2:])
        if images.any():
            logits[:, 3, 0, 0] = math.nan
            logits[:, 3, 0, 1] = math.inf
        return logits


def test_the_first_of_equal_classes_is_predicted_and_none_with_nan(home: Path, tmp_path: Path) -> None:
    """The first of equal classes is predicted, none where a logit is NaN."""
    result = evaluate(task(home, model=Special()), tmp_path / "out", batch_size=4)
    assert result.metrics["nonfinite_logits"] == {"nan": 13, "inf": 13}
    labels = by_hand(home)["labels"]
    table = rows(tmp_path / "out")
    for own, of_class in zip(labels, table["predicted_pixels"], strict=True):
        counted = own != IGNORED
        assert of_class == [
            int(counted.sum() - counted[0, 0] - counted[0, 1]),
            *(0, 0),
            int(counted[0, 1]),
            0,
        ]


def test_logits_are_compared_at_the_size_of_the_mask(home: Path, tmp_path: Path) -> None:
    """By bilinear interpolation, as torchvision's networks do it themselves."""
    low = nn.Sequential(Exact(), nn.AvgPool2d(4))
    evaluate(task(home, model=low), tmp_path / "out", batch_size=1)
    wanted = by_hand(home, low)["counts"]
    assert rows(tmp_path / "out")["intersection"] == [each[0].tolist() for each in wanted]
    assert "at each mask's own size" in task(home).description()["compared"]


@pytest.mark.parametrize("size", [1, 3, 13])
def test_grouping_pictures_by_size_changes_no_metric(home: Path, tmp_path: Path, size: int) -> None:
    seen: list[list[tuple[int, ...]]] = []

    class Seeing(Segmentation):
        def forward(self, model: nn.Module, batch: Any) -> list[Tensor]:
            seen.append([tuple(group["images"].shape) for group in batch["groups"]])
            return super().forward(model, batch)

    given = {"model": Exact(), "data": home / "img", "masks": home / "masks", **AS_STORED}
    found = evaluate(Seeing(**given), None, batch_size=size, layout="contiguous")
    assert found.metrics == evaluate(task(home), None, batch_size=5).metrics
    if size == 13:
        assert [(5, 3, 16, 24), (5, 3, 24, 16), (3, 3, 20, 20)] in seen


# -- models and preprocessing --------------------------------------------------------------------------


def test_the_class_and_the_command_line_make_the_same_job(home: Path) -> None:
    """The same defaults, identity and digest through both doors."""
    words: dict[str, Any] = {
        "model": "lraspp_mobilenet_v3_large",
        "weights": "random:0",
        "num_classes": CLASSES,
        "data": home / "img",
        "masks": home / "masks",
        "resize": 32,
        "mean": (0.5,),
        "std": (0.5,),
    }
    typed = check_doors("segmentation", "Segmentation", words)
    other = evaluate(Segmentation(**{**words, "ignore_index": (4, 255)}), None, batch_size=4)
    assert other.fingerprint != typed.fingerprint
    assert other.metrics != typed.metrics
    with pytest.raises(TypeError, match="crop"):
        Segmentation(**words, crop=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["fcn_resnet50", "lraspp_mobilenet_v3_large"])
def test_a_checkpoint_of_torchvision_gives_its_logits(home: Path, tmp_path: Path, name: str) -> None:
    """With the head for training that its published weights have, and without."""
    models = torchvision().models
    options: dict[str, Any] = {"aux_loss": True} if name.startswith("fcn") else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = models.get_model(
            name, weights=None, weights_backbone=None, num_classes=CLASSES, **options
        ).eval()
    torch.save({"model": net.state_dict()}, tmp_path / "c.pt")
    made_of = task(home, model=name, weights=str(tmp_path / "c.pt"), num_classes=CLASSES)
    built = made_of.build_model(CPU)
    batch = made_of.collate(made_of.dataset().__getitems__([0, 3]))
    with torch.inference_mode():
        [logits] = made_of.forward(built, batch)
        images = batch["groups"][0]["images"] / 255
        assert torch.equal(logits, net(images)["out"])
    assert made_of.loaded_weights is not None


def test_published_models_have_their_preprocessing_unless_one_is_given(home: Path) -> None:
    given = {"model": "fcn_resnet50", "weights": "random:0", "preprocessing": None}
    published = task(home, **given)
    line = published.description()["preprocessing"]
    assert line == "shorter side 520 bilinear, ImageNet mean and std (the model's defaults)"
    assert not published.data_warnings()
    own = task(home, **given, resize=64)
    assert own.description()["preprocessing"].startswith("shorter side 64")
    assert "own size, ImageNet" in task(home, preprocessing="imagenet").description()["preprocessing"]
    kept = task(home, preprocessing=None, mean=(0.5,), std=(0.5,))
    assert kept.description()["preprocessing"] == "own size, mean 0.5, std 0.5 (given)"


def test_a_resized_picture_has_torchvisions_pixels(home: Path) -> None:
    resize = torchvision().transforms.Resize(11, antialias=True)
    samples = task(home, resize=11).dataset().__getitems__(range(3))
    for number, (pixels, labels, _) in enumerate(samples):
        picture = Image.open(home / f"img/00{number}.png")
        assert torch.equal(pixels, torchvision().transforms.functional.pil_to_tensor(resize(picture)))
        assert labels.shape == (picture.height, picture.width)


def test_a_function_prepares_pictures(home: Path) -> None:
    def half(picture: Image.Image) -> Tensor:
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1)[:, ::2, ::2] / 255

    found = evaluate(task(home, preprocessing=half), None, batch_size=4)
    assert found.metrics["mean_iou"] != evaluate(task(home), None, batch_size=4).metrics["mean_iou"]
    with pytest.raises(UsageError, match=r"--resize: the function .*half does it all"):
        task(home, preprocessing=half, resize=32)


PREPARED: dict[str, Callable[[Tensor], Tensor]] = {
    "pads": lambda pixels: pad(pixels, (0, -pixels.shape[2] % 32, 0, -pixels.shape[1] % 32)),
    "pads around": lambda pixels: pad(pixels, (2, 2, 2, 2), mode="reflect"),
    "crops": lambda pixels: pixels[:, 2:, :-2],
    "": lambda pixels: interpolate(pixels[None], size=(15, 33), mode="bilinear")[0],
}


@pytest.mark.parametrize("does", PREPARED)
def test_a_function_that_pads_or_crops_is_refused(home: Path, does: str) -> None:
    """Its logits would be laid over the whole mask; a squash moves nothing."""

    def own(picture: Image.Image) -> Tensor:
        return PREPARED[does](torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255)

    if not does:
        assert evaluate(task(home, preprocessing=own), None).samples["evaluated"] == 13
        return
    with pytest.raises(UsageError, match=r"picture of 16 x 24 .height x width.*its border is not"):
        evaluate(task(home, preprocessing=own), None)


WHOLE = [
    *[((713, 500), (-(-713 // stride), 500 // stride)) for stride in (1, 2, 4, 8, 16, 32)],
    *[((518, 518), (148, 148)), ((64, 48), (128, 96)), ((41, 50), (40, 50)), ((520, 392), (37, 28))],
]
PARTS = [((40, 52), (24, 36)), ((572, 572), (388, 388)), ((64, 64), (60, 60)), ((512, 512), (250, 250))]


@pytest.mark.parametrize(
    ("size", "logits", "whole"), [(*e, True) for e in WHOLE] + [(*e, False) for e in PARTS]
)
def test_partial_logits_are_told_by_size(size: tuple[int, int], logits: tuple[int, int], whole: bool) -> None:
    assert _is_whole(size, logits) == whole


def test_a_network_without_padding_is_refused(home: Path) -> None:
    model = torch.nn.Sequential(Exact(), torch.nn.AvgPool2d(5, stride=1))
    with pytest.raises(UsageError, match=r"logits of 12 x 20 for pictures of 16 x 24, .* forward pad"):
        evaluate(task(home, model=model), None)


def write_segformer(folder: Path, *, reduce: bool = False) -> None:
    """A tiny SegFormer with random weights, and its processor."""
    import transformers

    config = transformers.SegformerConfig(
        depths=[1] * 4,
        hidden_sizes=[8] * 4,
        num_attention_heads=[1] * 4,
        decoder_hidden_size=8,
        id2label=dict(enumerate("abcde")),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.SegformerForSemanticSegmentation(config).save_pretrained(folder)
    size = {"height": 64, "width": 96}
    transformers.SegformerImageProcessor(size=size, do_reduce_labels=reduce).save_pretrained(folder)


def test_a_segformer_gets_the_pixels_and_labels_of_its_processor(home: Path, tmp_path: Path) -> None:
    """With its processor's pixels, and its labels: 0 may stand for none."""
    import transformers

    write_segformer(tmp_path / "net")
    found = task(home, model=f"hf:{tmp_path / 'net'}", preprocessing=None)
    net = transformers.SegformerForSemanticSegmentation.from_pretrained(tmp_path / "net").eval()
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "net")
    built = found.build_model(CPU)
    batch = found.collate(found.dataset().__getitems__([0]))
    inputs = processor(Image.open(home / "img/000.png"), return_tensors="pt")
    with torch.inference_mode():
        assert torch.allclose(found.forward(built, batch)[0], net(**inputs).logits, atol=2e-2)
    assert found.labels_used()["classes"] == [*"abcde"]
    assert found.description()["preprocessing"].startswith("exactly 64 x 96 bilinear, ImageNet")
    assert found.options()["reduce_labels"] == "no"
    write_segformer(tmp_path / "reducing", reduce=True)
    reducing = task(home, model=f"hf:{tmp_path / 'reducing'}", preprocessing=None)
    reducing.build_model(CPU)
    [(_, labels, _)] = reducing.dataset().__getitems__([0])
    stored = np.array(Image.open(home / "masks/000.png")).astype(int)
    assert (labels.numpy() == np.where((stored == 0) | (stored == IGNORED), -1, stored - 1)).all()
    assert "labels less 1 (0 ignored)" in reducing.description()["compared"]
    given = task(home, model=f"hf:{tmp_path / 'reducing'}", preprocessing=None, reduce_labels="no")
    assert given.fingerprint()["reduce_labels"] == "no"


def test_reduce_labels_of_an_older_processor_is_read(home: Path, tmp_path: Path) -> None:
    """SegFormer's published files say reduce_labels, which newer versions of transformers pass over."""
    write_segformer(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    said = json.loads(file.read_text())
    del said["do_reduce_labels"]
    file.write_text(json.dumps({**said, "reduce_labels": True, "size": 64}))
    found = task(home, model=f"hf:{tmp_path}", preprocessing=None)
    assert found.fingerprint()["reduce_labels"] == "yes"


def test_processors_give_preprocessing_and_those_that_crop_are_refused() -> None:
    said = {"kind": "Segformer", "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_normalize": True}
    half: dict[str, Any] = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    assert uncropped_of({**said, "do_resize": False}, "it") == Uncropped(**half)
    assert uncropped_of({**said, "size": {"shortest_edge": 48}}, "it") == Uncropped(resize=48, **half)
    with pytest.raises(UsageError, match="cuts off parts of pictures"):
        uncropped_of({**said, "size": {"shortest_edge": 48}, "do_center_crop": True}, "it")


def test_class_names_come_from_a_file_or_a_text(home: Path, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("sky\nroad\ncar\ntree\nwall\n")
    (tmp_path / "names.json").write_text(json.dumps(["sky", "road", "car", "tree", "wall"]))
    for given in (tmp_path / "names.txt", str(tmp_path / "names.json"), "sky, road,car,tree,wall"):
        result = evaluate(task(home, class_names=given), None, batch_size=4)
        assert result.labels["classes"] == ["sky", "road", "car", "tree", "wall"]


# -- what is refused before anything is read -----------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"preprocessing": None}, ["nothing says how its pictures are prepared", "--preprocessing none"]),
        ({"preprocessing": {"resize": 8, "crop": 8, "mean": [0], "std": [1]}}, ["cuts a part out"]),
        ({"data": "nowhere"}, ["--data nowhere does not exist", "manifest"]),
        ({"masks": None}, ["--masks is not given", "a.jpg and a.png"]),
        ({"mask_column": "m"}, ["--mask-column are for a manifest"]),
        ({"model": "resnet18"}, ["--model resnet18 is not a network for segmentation", "fcn_resnet50"]),
        ({"model": "models/none"}, ["--model models/none is not a network for segmentation", "hf:DIR"]),
        ({"model": "fcn_resnet5"}, ["Nearest: fcn_resnet50"]),
        ({"model": "fcn_resnet50"}, ["without --weights", "--weights DEFAULT", "random:SEED"]),
        ({"model": "nets:make"}, ["without --weights. Give --weights PATH or --weights random:SEED"]),
        ({"metrics": ["miou"]}, ["no metric 'miou'", "iou"]),
        ({"class_names": "missing.txt"}, ["--class-names missing.txt cannot be read"]),
        ({"resize": 0}, ["--resize 0"]),
    ],
)
def test_wrong_options_are_refused(home: Path, changes: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        task(home, **changes)
    for part in said:
        assert part in str(caught.value)


def test_folders_of_another_kind_are_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=f"Type --model hf:{tmp_path}"):
        task(home, model=str(tmp_path))
    for flag, kind in (("data", "pictures"), ("masks", "masks")):
        with pytest.raises(UsageError, match=f"--{flag} {tmp_path}.* found .*{kind} 0 files"):
            task(home, **{flag: tmp_path})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_classes": 6}, ["has 5 classes, and --num-classes 6"]),
        ({"class_names": "a,b"}, ["--class-names gives 2"]),
        (
            {"model": Exact(1)},
            ["one logit per pixel", "torch.cat([torch.zeros_like(logits), logits], dim=1)"],
        ),
        ({"model": nn.Conv2d(1, 5, 1)}, ["1, and the images have 3 channels", "--channels 1"]),
        ({"model": nn.Linear(7, 5)}, ["Set the size with --resize, or give data of the model's size"]),
        ({"model": nn.Flatten()}, ["expected logits of shape (pictures, classes, height, width)"]),
    ],
)
def test_models_that_do_not_fit_are_refused(home: Path, changes: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        task(home, **changes).build_model(CPU)
    for part in said:
        assert part in str(caught.value)


def test_pictures_and_masks_of_different_names_are_refused(tmp_path: Path) -> None:
    made.write_pictures(tmp_path, count=2)
    for path in (tmp_path / "masks").iterdir():
        path.rename(path.with_name(f"{path.stem}_labels.png"))
    with pytest.raises(
        UsageError, match=r"pictures 2 files \(000.png.*masks 2 files \(000_labels.png.*FILE.csv"
    ):
        task(tmp_path)
    (tmp_path / "masks/000.png").write_bytes(b"")
    (tmp_path / "masks/000.tif").write_bytes(b"")
    with pytest.raises(UsageError, match=r"000.(png|tif) and 000.(png|tif), and each may be meant"):
        task(tmp_path)


# -- predicted masks -----------------------------------------------------------------------------------


def test_kept_masks_are_the_predicted_ones_and_change_no_figure(home: Path, tmp_path: Path) -> None:
    plain = evaluate(task(home), tmp_path / "plain", batch_size=4)
    kept = evaluate(task(home, keep_masks=True), tmp_path / "kept", batch_size=4)
    assert kept.metrics_digest == plain.metrics_digest and kept.samples_digest == plain.samples_digest
    table = rows(tmp_path / "kept")
    assert {*table} - {*rows(tmp_path / "plain")} == {"predicted_mask"}
    for runs, predicted in zip(table["predicted_mask"], by_hand(home)["predicted"], strict=True):
        # As docs/result-files.md has it.
        values = np.array(runs)
        assert (np.repeat(values[2::2], values[3::2]).reshape(values[:2]) == predicted).all()
    # Another job, and one without it is the same as before there was the option.
    assert kept.fingerprint != plain.fingerprint and kept.job["keep_masks"] is True
    assert "keep_masks" not in {**plain.job, **task(home).fingerprint()}
    found = dualeval.compare(tmp_path / "plain", tmp_path / "kept")
    assert not found.differs_in
    verified = CliRunner().invoke(dualeval_command, ["verify", str(tmp_path / "kept")])
    assert verified.exit_code == 0 and "verified" in verified.output


def test_a_mask_of_what_cannot_be_read_is_null_and_a_pixel_of_nan_has_no_class(tmp_path: Path) -> None:
    names = made.write_pictures(tmp_path)
    (tmp_path / "masks" / f"{names[1]}.png").unlink()

    class OneNan(Exact):
        def forward(self, images: Tensor) -> Tensor:
            logits = super().forward(images)
            logits[:, 2, 0, 0] = math.nan
            return logits

    given = task(tmp_path, model=OneNan(), keep_masks=True)
    evaluate(given, tmp_path / "out", batch_size=4, on_error="skip")
    masks = rows(tmp_path / "out")["predicted_mask"]
    assert masks[1] is None and all(runs[2:4] == [-1, 1] for runs in masks if runs is not None)
    _, layers = given.show({"id": given.dataset().id(0), "index": 0, "predicted_mask": masks[0]})
    assert [*layers] == ["target", "prediction", "wrong"]
    covered = np.asarray(layers["prediction"])[..., 3] > 0
    assert not covered[0, 0] and covered.sum() == covered.size - 1
    # Wrong is what counts and is another class; the pixel without one, too.
    labels = np.array(Image.open(tmp_path / "masks" / f"{names[0]}.png"))
    values = np.array(masks[0])
    differs = np.repeat(values[2::2], values[3::2]).reshape(values[:2]) != labels
    is_wrong = np.asarray(layers["wrong"])[..., 3] > 0
    assert (is_wrong == (differs & (labels != IGNORED))).all() and is_wrong.any() and not is_wrong.all()


def test_masks_are_kept_of_segmentation_alone() -> None:
    refused = "--keep-masks belongs to --task segmentation, and the task is image-classification"
    with pytest.raises(UsageError, match=refused):
        CliRunner().invoke(
            dualeval_command, ["run", "--keep-masks"], catch_exceptions=False, standalone_mode=False
        )
