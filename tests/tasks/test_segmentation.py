"""The task segmentation: counts beside numpy's, groups of sizes, and what is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from dualeval.data.masks import LabelRule
from dualeval.data.preprocessing import Uncropped
from dualeval.errors import DualevalError, UsageError
from dualeval.metrics.segmentation import COUNTS, PixelCheck, counts_of, segmentation_metrics
from dualeval.models.sources.processors import uncropped_of
from dualeval.options.fields import fields_of
from dualeval.tasks.options.segmentation import SegmentationOptions
from dualeval.tasks.segmentation import Segmentation, _is_whole
from dualeval.vision_library import torchvision
from tests.engine.test_evaluator import evaluate, rows
from tests.tasks.conftest import check_doors
from tests.vehicles import masked_pictures as made
from tests.vehicles.masked_pictures import CLASSES, IGNORED, Exact
from tests.vehicles.measuring import measure

CPU = torch.device("cpu")
AS_STORED: dict[str, Any] = {"preprocessing": "none"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``img`` and ``masks``, 13 pictures of three sizes."""
    folder = tmp_path_factory.mktemp("pictures")
    made.write_pictures(folder)
    return folder


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


# -- data ----------------------------------------------------------------------------------------------


def test_a_manifest_has_the_digest_of_its_folders(home: Path, tmp_path: Path) -> None:
    path = home / "list.csv"
    path.write_text("image,mask\n" + "".join(f"img/{n:03}.png,masks/{n:03}.png\n" for n in range(13)))
    found = evaluate(task(home, data=path, masks=None), None, batch_size=4)
    assert found.metrics_digest == evaluate(task(home), None, batch_size=4).metrics_digest
    with pytest.raises(UsageError, match="--mask-column nothing"):
        task(home, data=path, masks=None, mask_column="nothing")
    with pytest.raises(UsageError, match="none of its masks exists"):
        task(home, data=path, masks=tmp_path)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("image\na.png\n", "expected one of their masks' paths"),
        ("image,mask\na.png,\n", "line 2 has '' in the column 'mask', expected a path"),
        ("image,mask\na.png,b.png\na.png,c.png\n", "line 3 has the picture of line 2, a.png"),
        ("image,mask\n", "has no rows"),
    ],
)
def test_a_manifest_without_its_columns_or_masks_is_refused(tmp_path: Path, lines: str, said: str) -> None:
    (tmp_path / "list.csv").write_text(lines)
    with pytest.raises(UsageError, match=said):
        task(tmp_path, data=tmp_path / "list.csv", masks=None)


def test_masks_of_8_and_16_bits_have_the_same_metrics(home: Path, tmp_path: Path) -> None:
    made.write_pictures(tmp_path, count=3)
    wanted = evaluate(task(tmp_path), None, batch_size=4).metrics
    for name, mode in (("000", "L"), ("001", "I;16")):
        path = tmp_path / f"masks/{name}.png"
        labels = np.array(Image.open(path))
        Image.fromarray(labels.astype(np.uint16 if mode == "I;16" else np.uint8)).save(path)
        with Image.open(path) as image:
            assert image.mode == mode
    assert evaluate(task(tmp_path), None, batch_size=4).metrics == wanted


def _beyond(mask: Path) -> None:
    labels = np.array(Image.open(mask))
    labels[0, :3] = 34
    made.write_mask(mask, labels)


def _picture_of(mask: Path) -> Path:
    return mask.parent.parent / "img" / mask.name


BAD: list[tuple[str, Callable[[Path], object], list[str]]] = [
    ("no mask", Path.unlink, ["its mask", "masks/002.png: there is no such file"]),
    (
        "of another size",
        lambda mask: made.write_mask(mask, np.zeros((9, 7))),
        ["masks/002.png: it has 7 x 9 pixels, and its picture 20 x 20"],
    ),
    ("beyond", _beyond, ["3 pixels with the label 34, expected 0 to 4", "--ignore-index 255,34"]),
    (
        "in colours",
        lambda mask: Image.open(mask).convert("RGB").save(mask),
        ["its pixels are colours (mode RGB)", "PIL.Image.fromarray"],
    ),
    (
        "as JPEG",
        lambda mask: Image.open(mask).convert("L").save(mask, format="JPEG"),
        ["a JPEG, whose pixels are approximate, expected PNG, TIFF, BMP"],
    ),
    (
        "too large",
        lambda mask: Image.new("1", (600, 400)).save(_picture_of(mask)),
        ["MAX_IMAGE_PIXELS = None"],
    ),
    (
        "a mask too large",
        lambda mask: Image.new("1", (600, 400)).save(mask),
        ["its mask", "MAX_IMAGE_PIXELS"],
    ),
    # Its head is whole: its size is known.
    (
        "a picture cut short",
        lambda mask: _picture_of(mask).write_bytes(_picture_of(mask).read_bytes()[:200]),
        ["image file is truncated"],
    ),
    ("an empty picture", lambda mask: _picture_of(mask).write_bytes(b""), ["is empty (0 bytes)"]),
]


@pytest.mark.parametrize(("spoil", "said"), [case[1:] for case in BAD], ids=[name for name, *_ in BAD])
def test_a_bad_sample_is_named_and_skipping_it_leaves_the_others(
    tmp_path: Path, spoil: Callable[[Path], object], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named with its file; skipped, the other pictures of its batch keep their numbers."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100_000)
    made.write_pictures(tmp_path, count=7)
    evaluate(task(tmp_path), tmp_path / "whole", batch_size=7)
    spoil(tmp_path / "masks/002.png")
    with pytest.raises((UsageError, DualevalError)) as caught:
        evaluate(task(tmp_path), None, batch_size=7)
    for part in ["002.png (index 2)", *said]:
        assert part in str(caught.value)
    result = evaluate(task(tmp_path), tmp_path / "out", batch_size=7, on_error="skip")
    assert [failed["id"] for failed in result.failed] == ["002.png"]
    whole, kept = rows(tmp_path / "whole"), rows(tmp_path / "out")
    for name in ("intersection", "predicted_pixels", "picture_iou"):
        assert kept[name][:2] + kept[name][3:] == whole[name][:2] + whole[name][3:]


def test_a_bad_row_of_a_manifest_is_named(home: Path, tmp_path: Path) -> None:
    made.write_pictures(tmp_path, count=3)
    _beyond(tmp_path / "masks/001.png")
    (tmp_path / "list.csv").write_text(
        "image,mask\n" + "".join(f"img/00{n}.png,masks/00{n}.png\n" for n in range(3))
    )
    with pytest.raises((UsageError, DualevalError), match=r"list.csv, line 3\): 3 pixels with the label 34"):
        evaluate(task(tmp_path, data=tmp_path / "list.csv", masks=None), None, batch_size=3)


def test_pictures_without_a_mask_and_masks_without_a_picture_are_named(tmp_path: Path) -> None:
    made.write_pictures(tmp_path, count=4)
    (tmp_path / "img/001.png").unlink()
    (tmp_path / "masks/002.png").unlink()
    found = task(tmp_path)
    assert "no picture for 1 file (001.png): left out." in found.notes()
    assert "no mask for 1 file (002.png)." in found.data_warnings()


def test_label_255_is_ignored_only_where_it_can_be_no_class(tmp_path: Path) -> None:
    """255 where nobody says another one; but not where it may be a class."""
    made.write_pictures(tmp_path, count=3)
    found = task(tmp_path, model=Exact(300))
    found.build_model(CPU)
    assert found.options()["ignore_index"] == []
    assert task(tmp_path, ignore_index=3).fingerprint()["ignore_index"] == [3]
    # 255 is the last one of 255 classes where 1 is the first.
    found = task(tmp_path, model=Exact(255), reduce_labels="yes")
    found.build_model(CPU)
    assert found.options()["ignore_index"] == []


def test_a_blurred_mask_is_refused() -> None:
    stored = np.arange(250, dtype=np.uint8)[None]
    with pytest.raises(
        ValueError, match=r"248 such labels, as blurred masks have: .*--mask-values FILE.json$"
    ):
        LabelRule(ignore=(255,), reduce=False, classes=2).of(stored)


def test_minus_one_counts_as_a_label_unless_it_is_ignored() -> None:
    """In masks of 32 bits: it counts unless it is named, as others do."""
    stored = np.array([[0, 2, -1]], np.int32)
    with pytest.raises(ValueError, match=r"1 pixel with the label -1, .*--ignore-index 255,-1"):
        LabelRule(ignore=(255,), reduce=False, classes=5).of(stored)
    assert LabelRule(ignore=(255, -1), reduce=False, classes=5).of(stored).tolist() == [[0, 2, -1]]
    assert LabelRule(ignore=(255, -1), reduce=True, classes=5).of(stored).tolist() == [[-1, 1, -1]]


# -- what labels stand for -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``img``, and the same masks of 0 and 1 in ``masks`` and of 0 and 255 in ``m255``."""
    folder = tmp_path_factory.mktemp("binary")
    for name in made.write_pictures(folder, count=4, classes=2):
        path = folder / f"masks/{name}.png"
        labels = np.array(Image.open(path)) % 2
        for below, most in (("masks", 1), ("m255", 255)):
            (folder / below).mkdir(exist_ok=True)
            Image.fromarray((labels * most).astype(np.uint8)).save(folder / below / f"{name}.png")
    return folder


def of_two(binary: Path, **changes: Any) -> Segmentation:
    return task(binary, **{"model": Exact(2), "masks": binary / "m255", **changes})


def test_a_foreground_of_255_is_asked_for(binary: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        evaluate(of_two(binary), None)
    assert "has 2 classes: 255 may be class 1, or no class" in str(caught.value)
    wanted = evaluate(of_two(binary, masks=binary / "masks"), None)
    assert "--mask-values 0=0,255=1;" in str(caught.value)
    (tmp_path / "map.json").write_text('{"0": 0, "255": 1, "7": null}')
    for values in ("0=0,255=1,7=none", tmp_path / "map.json", {0: 0, 255: 1, 7: None}):
        own = of_two(binary, mask_values=values)
        found = evaluate(own, None) if values == tmp_path / "map.json" else own.build_model(CPU)
        assert isinstance(found, nn.Module) or found.metrics_digest == wanted.metrics_digest
        assert own.fingerprint()["mask_values"] == own.options()["mask_values"] == "0=0,7=none,255=1"
        assert "2 classes, mask values 0=0,7=none,255=1" in own.description()["compared"]
    assert "--ignore-index 255." in str(caught.value)
    ignored = evaluate(of_two(binary, ignore_index=255), None)
    assert "no mask has a pixel of 1 of 2 classes, and " in " ".join(ignored.warnings)
    assert "no mask has" not in " ".join(wanted.warnings)


def test_255_is_ignored_where_a_mask_has_another_class_too(home: Path, tmp_path: Path) -> None:
    """So it is of the embedded pictures; and nothing is, where nobody wants it."""
    made.write_pictures(tmp_path, count=2, classes=2)
    result = evaluate(of_two(tmp_path, masks=tmp_path / "masks"), None)
    assert "no mask has" not in " ".join(result.warnings)
    assert result.job["ignore_index"] == [255]
    for nothing in ("none", (), -1):
        found = task(home, ignore_index=nothing)
        found.build_model(CPU)
        with pytest.raises(ValueError, match=r"with the label 255, expected 0 to 4"):
            found.dataset().__getitems__([0])
    [field] = [each for each in fields_of(SegmentationOptions) if each.name == "ignore_index"]
    assert [field.parse(text, "") for text in ("none", "255,3", "-1")] == ["none", (255, 3), (-1,)]
    with pytest.raises(UsageError, match="or none"):
        field.parse("nothing", "--ignore-index")


def test_advice_on_labels_holds_for_all_masks(binary: Path, tmp_path: Path) -> None:
    """The first has 7 and 8 alone: what is advised there names the 11 of others, too."""
    (tmp_path / "masks").mkdir()
    for number, path in enumerate(sorted((binary / "masks").iterdir())):
        labels = np.array([7, 11 if number else 8], np.uint8)[np.array(Image.open(path))]
        Image.fromarray(labels).save(tmp_path / "masks" / path.name)

    def read(**changes: Any) -> None:
        found = of_two(binary, **{"masks": tmp_path / "masks", "model": Exact(3), **changes})
        found.build_model(CPU)
        found.dataset().__getitems__(range(4))

    with pytest.raises(ValueError, match=r"--mask-values 7=0,8=1,11=2$"):
        read()
    with pytest.raises(ValueError, match=r"7=0,8=1,11=2, or, .*--ignore-index 8,11$"):
        read(ignore_index=(), model=Exact(8))
    read(mask_values="7=0,8=1,11=2")
    read(ignore_index=(255, 7, 8, 11))
    with pytest.raises(ValueError, match=r"none for what does not count: 7=0,8=none,11=none$"):
        read(mask_values="7=0")
    read(mask_values="7=0,8=none,11=none")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mask_values": "0=0,0=1"}, "a label is there twice"),
        ({"mask_values": "0=0,255=-1"}, "a class is below 0"),
        ({"mask_values": "0=0,255"}, "Expected the class of each label, as 0=0,255=1,7=none"),
        ({"mask_values": {0: 1.5}}, "Expected the class of each label"),
        ({"mask_values": {0: True}}, "Expected the class of each label"),
        ({"mask_values": "missing.json"}, "No such file.*or a JSON file"),
        ({"mask_values": "0=0,1=5"}, "has 5 classes, and --mask-values has the class 5, expected at most 4"),
        ({"mask_values": "0=0", "ignore_index": 255}, "Leave --ignore-index out"),
        ({"mask_values": "0=0", "reduce_labels": "yes"}, "Leave --reduce-labels yes out"),
        ({"ignore_index": "nothing"}, "--ignore-index 'nothing': expected whole numbers"),
    ],
)
def test_wrong_mask_values_are_refused(home: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        task(home, **changes).build_model(CPU)


# Width and height as stored, EXIF's turn of the picture, of the mask, and how the mask is stored.
TURNED = [
    ((20, 20), 6, 1, "shown", True),
    ((20, 20), 3, 1, "shown", True),
    ((24, 16), 6, 1, "shown", True),
    # Only as they are stored they have one size, or nothing is turned alone.
    ((24, 16), 6, 1, "stored", False),
    ((20, 20), 6, 6, "stored", False),
    ((20, 20), 1, 1, "stored", False),
    ((20, 20), 0, 1, "stored", False),
]


@pytest.mark.parametrize(("size", "turn", "of_mask", "stored", "warns"), TURNED)
def test_pictures_that_exif_turns_are_compared_upright(
    tmp_path: Path, size: tuple[int, int], turn: int, of_mask: int, stored: str, warns: bool
) -> None:
    """Compared as programs show them, with a warning; the numbers are those of upright files."""
    draw = np.random.default_rng(0)
    picture = Image.fromarray(draw.integers(0, 256, (size[1], size[0], 3), np.uint8))
    mask = Image.fromarray(draw.integers(0, CLASSES, (size[1], size[0]), np.uint8))
    exifs = {number: Image.Exif() for number in (turn, of_mask)}
    for number, exif in exifs.items():
        exif[0x0112] = number
    method = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_270}.get(turn)
    shown = [
        each if method is None or stored == "stored" else each.transpose(method) for each in (picture, mask)
    ]
    samples = []
    for name, pair, kept in (("own", (picture, shown[1]), exifs), ("upright", shown, None)):
        for folder, image, number in (("img", pair[0], turn), ("masks", pair[1], of_mask)):
            (tmp_path / name / folder).mkdir(parents=True)
            image.save(tmp_path / name / folder / "a.png", exif=kept[number] if kept else b"")
        samples += task(tmp_path / name).dataset().__getitems__([0])
    assert [turned for *_, turned in samples] == [warns, False]
    assert torch.equal(samples[0][0], samples[1][0])
    assert torch.equal(samples[0][1], samples[1][1])
    found, over = task(tmp_path / "own").dataset().picture(0)
    assert found.size == over.size == shown[0].size
    measured = measure(PixelCheck(2), check_columns([1, 2], [1, 2], [1, 2], ignored=2, turned=warns))
    assert [text[:26] for text in measured.warnings] == ["EXIF turns 1 picture and n"] * warns


VOC = [(0, 0, 0), (128, 0, 0), (0, 128, 0), (128, 128, 0)]
OWN = [(9, 0, 0), (0, 9, 0), (0, 0, 9), (9, 9, 9)]
PALETTES: list[tuple[list[list[tuple[int, int, int]]], str]] = [
    # Of two masks that have the numbers 0 to 2 and 255; what is not there is black.
    ([VOC, VOC[:3]], ""),
    ([OWN, OWN], ""),
    ([OWN, VOC], ""),
    ([[VOC[0], *OWN], [VOC[0], *OWN]], ""),
    ([VOC, [VOC[1], VOC[0], VOC[2]]], "has the colour (128, 0, 0) at the number 1, and .* at 0: "),
    ([OWN, [*OWN[1:3], OWN[0]]], "has the colour (0, 9, 0) at the number 1, and .* at 0: "),
    (
        [[VOC[0], VOC[2], VOC[1]]] * 2,
        "classes, type --mask-values 0=0,1=2,2=1,255=none; if the numbers are, --",
    ),
]


@pytest.mark.parametrize(("palettes", "said"), PALETTES)
def test_palettes_whose_colours_may_be_the_classes_are_refused(
    tmp_path: Path, palettes: list[list[tuple[int, int, int]]], said: str
) -> None:
    for number, palette in enumerate(palettes):
        image = Image.fromarray(np.array([[0, 1, 2, 255]], np.uint8)).convert("P")
        image.frombytes(bytes((0, 1, 2, 255)))
        image.putpalette([value for colour in palette for value in colour] + [0] * (768 - 3 * len(palette)))
        for folder, picture in (("masks", image), ("img", Image.new("RGB", (4, 1)))):
            (tmp_path / folder).mkdir(exist_ok=True)
            picture.save(tmp_path / folder / f"{number}.png")
    task(tmp_path, mask_values="0=0,1=1,2=2,255=none").build_model(CPU)
    if not said:
        task(tmp_path).build_model(CPU)
        return
    with pytest.raises(UsageError, match=re.escape(said).replace(r"\.\*", ".*")) as raised:
        task(tmp_path).build_model(CPU)
    typed = str(raised.value).rpartition("--mask-values ")[2]
    assert typed == "0=0,1=1,2=2,255=none"


@pytest.mark.parametrize(
    ("counted", "ignored", "share"), [(4, 3, ""), (3, 3, "50.0"), (1, 7, "87.5"), (0, 0, "")]
)
def test_many_ignored_pixels_are_warned_of(counted: int, ignored: int, share: str) -> None:
    measured = measure(
        PixelCheck(2), check_columns([counted, 0], [counted, 0], [counted, 0], ignored=ignored)
    )
    said = [text.partition(",")[0] for text in measured.warnings if "of the pixels are ignored" in text]
    assert said == [
        f"{share} % of the pixels are ignored by all metrics: check first which labels the masks hold"
    ] * bool(share)


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (([0, 2, 0], [0, 6, 4], [5, 5, 0]), "class 0, predicted for 50.0 % of the pixels"),
        (([0, 0, 0], [6, 4, 0], [0, 6, 4]), "labels are other classes, type --mask-values"),
        # As good as guessing, a class that few pixels are taken for, a model that misses: no other numbers.
        (([0, 4, 0], [0, 6, 4], [5, 5, 0]), ""),
        (([0, 2, 0], [0, 6, 4], [2, 6, 2]), ""),
        (([0, 0, 0], [1, 6, 4], [11, 0, 0]), ""),
    ],
)
def test_masks_without_some_classes_are_warned_of(counts: tuple[list[int], ...], said: str) -> None:
    warnings = measure(PixelCheck(3), check_columns(*counts)).warnings
    assert len(warnings) == bool(said) and said in "".join(warnings)


def check_columns(*counts: list[int], ignored: int = 0, turned: bool = False) -> dict[str, Tensor]:
    """What PixelCheck reads, of one picture: right, labelled and predicted pixels of each class."""
    named = zip(COUNTS, (torch.tensor([each]) for each in counts), strict=True)
    return {**dict(named), "ignored_pixels": torch.tensor([ignored]), "turned": torch.tensor([turned])}


def test_each_pixel_of_a_mask_is_part_of_the_job(tmp_path: Path) -> None:
    """One in the midst of a TIFF: the file's size and its ends stay as they are."""
    for folder in ("img", "masks"):
        (tmp_path / folder).mkdir()
    Image.new("RGB", (160, 120)).save(tmp_path / "img/a.png")
    labels = np.zeros((120, 160), np.uint8)
    found = []
    for value in (0, 1):
        labels[60, 80] = value
        Image.fromarray(labels).save(tmp_path / "masks/a.tif")
        found.append(task(tmp_path).dataset().content_fingerprint(range(1)))
    assert found[0] != found[1]


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
