"""Data sets of torchvision by name, as they lie on the disk, and small images in other sizes."""

from __future__ import annotations

import gzip
import hashlib
import pickle
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from dualeval.data.image_sets.class_folders import imagenet_folder
from dualeval.data.image_sets.idx import MNIST_CLASSES, IdxImages
from dualeval.data.labels import imagenet_wnids
from dualeval.data.pictures import read_pixels
from dualeval.data.preprocessing import Preprocessing
from dualeval.data.set_names import SETS, data_beside, named_set
from dualeval.data.small_images import FASHION_MNIST_CLASSES, SmallImages
from dualeval.errors import EXIT_USAGE, UsageError
from dualeval.tasks.image_classification import ImageClassification
from dualeval.tasks.image_data import ASSETS
from dualeval.vision_library import torchvision
from tests.data.test_image_folder import save
from tests.engine.test_evaluator import evaluate
from tests.vehicles.assets import package_folder

TORCHVISION = torchvision()
CPU = torch.device("cpu")
CIFAR = {"CIFAR10": "cifar10", "CIFAR100": "cifar100"}


def pictures_of(name: str) -> list[tuple[Path, int]]:
    """Twenty real pictures and their labels."""
    found = sorted((package_folder("foolbox") / "data").glob(f"{CIFAR[name]}_*.png"))
    return [(path, int(path.stem.split("_")[2])) for path in found]


def write_cifar(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of the twenty pictures, which torchvision takes for the published ones."""
    kind = getattr(TORCHVISION.datasets, name)
    pixels = [np.asarray(Image.open(path).convert("RGB")) for path, _ in pictures_of(name)]
    data = np.stack(pixels).transpose(0, 3, 1, 2).reshape(len(pixels), -1)
    labels = [label for _, label in pictures_of(name)]
    batch = {"data": data, "labels" if name == "CIFAR10" else "fine_labels": labels}
    names = [f"{name} {index}" for index in range(10 if name == "CIFAR10" else 100)]
    (root / kind.base_folder).mkdir()

    def publish(file: str, value: object) -> str:
        content = pickle.dumps(value, protocol=2)
        (root / kind.base_folder / file).write_bytes(content)
        return hashlib.md5(content).hexdigest()

    for attribute in ("train_list", "test_list"):
        files = [[file, publish(file, batch)] for file, _ in getattr(kind, attribute)]
        monkeypatch.setattr(kind, attribute, files)
    meta = publish(kind.meta["filename"], {kind.meta["key"]: names})
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": meta})


def read(data: str, split: str | None = None) -> SmallImages:
    found = named_set(data, split)
    assert found is not None
    kind = import_module(f"dualeval.data.image_sets.{SETS[found.name][1]}")
    images: SmallImages = kind.open_images(found)
    return images


def refused(data: str, split: str | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        read(data, split)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value)


def squeezed(data: str | Path, **pixels: Any) -> ImageClassification:
    return ImageClassification(model="squeezenet1_1", weights="random:0", data=data, preprocessing=pixels)


@pytest.fixture
def fashion(tmp_path: Path) -> Path:
    """FashionMNIST as torchvision unpacks it; the training files are a few of the test's."""
    raw = tmp_path / "FashionMNIST/raw"
    raw.mkdir(parents=True)
    for path in ASSETS.glob("*.gz"):
        (raw / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        shutil.copy(path, raw / path.name.replace("t10k", "train"))
    return tmp_path


# -- names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FashionMNIST", "fashionmnist", "Fashion-MNIST", "fashion_mnist"])
def test_a_set_is_found_by_its_name_in_any_case(tmp_path: Path, name: str) -> None:
    found = named_set(f"{name}:{tmp_path}")
    assert found is not None
    assert (found.name, found.root, found.split) == ("FashionMNIST", tmp_path, "test")
    assert data_beside(f"{name}:sub", tmp_path) == f"{name}:{tmp_path / 'sub'}"


def test_paths_are_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnist:old").mkdir()
    assert named_set("mnist:old") is None
    assert named_set("/data/val") is None
    assert data_beside("sub/m.csv", tmp_path) == str(tmp_path / "sub/m.csv")
    assert "Did you mean CIFAR10:here?" in refused("CIFAR:here")
    assert "no data set 'SVHN'" in refused("SVHN:.")
    assert "one of CIFAR10, CIFAR100, FashionMNIST, ImageNet, MNIST" in refused("SVHN:.")
    assert "expected the folder that holds MNIST" in refused("MNIST:")
    assert "the folder nowhere does not exist. Nothing is downloaded" in refused("mnist:nowhere")
    assert "--split of CIFAR10 'val': expected one of test, train" in refused("CIFAR10:.", "val")


def test_names_of_classes_are_torchvisions() -> None:
    assert list(FASHION_MNIST_CLASSES) == TORCHVISION.datasets.FashionMNIST.classes
    assert list(MNIST_CLASSES) == TORCHVISION.datasets.MNIST.classes
    assert all(hasattr(TORCHVISION.datasets, name) for name in SETS)


# -- CIFAR -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CIFAR)
def test_cifar_is_the_pictures(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, name, monkeypatch)
    for split, times in (("test", 1), ("train", 5 if name == "CIFAR10" else 1)):
        own, pictures = read(f"{name}:{tmp_path}", split), pictures_of(name) * times
        assert (len(own), own.sample_shape) == (len(pictures), (3, 32, 32))
        batch = own.__getitems__(range(len(own)))
        for image, target, (path, label) in zip(*batch.values(), pictures, strict=True):
            assert image.permute(1, 2, 0).numpy().tobytes() == Image.open(path).convert("RGB").tobytes()
            assert target == label
        assert own.labels.names[7] == f"{name} 7"
        assert own.id(7) == f"{split}-00007"


class Marker:
    """A pickle of it writes a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_changed_batch_is_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, "CIFAR10", monkeypatch)
    marker = tmp_path / "ran"
    malicious = pickle.dumps({"data": Marker(marker), "labels": []}, protocol=2)
    pickle.loads(malicious)  # noqa: S301 - here it is to run
    assert marker.exists(), "it does run code"
    marker.unlink()
    batch = tmp_path / "cifar-10-batches-py/test_batch"
    batch.write_bytes(malicious)
    message = refused(f"CIFAR10:{tmp_path}")
    assert f"{batch.parent} does not hold the published files of CIFAR10" in message
    assert not marker.exists()


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    message = refused(f"CIFAR100:{tmp_path}")
    assert f"{tmp_path}/cifar-100-python does not hold the published files of CIFAR100" in message
    assert "cifar-100-python.tar.gz" in message
    assert f"{tmp_path}/MNIST/raw/t10k-images-idx3-ubyte.gz is missing" in refused(f"MNIST:{tmp_path}")


# -- idx files -------------------------------------------------------------------------------------------


def test_fashion_mnist_is_the_folder_of_its_files(fashion: Path, tmp_path: Path) -> None:
    """The same numbers by name, by folder and embedded; the folder alone has no names of classes."""
    named, shipped = read(f"fashionmnist:{fashion}"), IdxImages(ASSETS)
    assert named.fingerprint(10_000) == shipped.fingerprint(10_000)
    assert named.content_fingerprint(range(10_000)) == shipped.content_fingerprint(range(10_000))
    assert read(f"FashionMNIST:{fashion}", "train").id(3) == "train-00003"
    results = {}
    jobs: dict[str, dict[str, Any]] = {
        "named": {"data": f"FashionMNIST:{fashion}"},
        "folder": {"data": fashion / "FashionMNIST/raw"},
        "embedded": {},
    }
    for name, options in jobs.items():
        task = ImageClassification(model="fashion-cnn", metrics=["top1", "confusion"], **options)
        results[name] = evaluate(task, tmp_path / name, limit=100)
    assert len({result.metrics_digest for result in results.values()}) == 1
    assert results["folder"].labels == {}
    for name in ("named", "embedded"):
        assert results[name].labels["classes"] == list(FASHION_MNIST_CLASSES)
        table = pyarrow.parquet.read_table(tmp_path / name / "predictions.parquet").to_pydict()
        assert table["target_name"] == [FASHION_MNIST_CLASSES[index] for index in table["target"]]
        assert table["prediction_name"] == [FASHION_MNIST_CLASSES[index] for index in table["prediction"]]
    folder = pyarrow.parquet.read_schema(tmp_path / "folder/predictions.parquet")
    assert "target_name" not in folder.names
    assert results["named"].job["data"] == f"FashionMNIST:{fashion}"
    assert results["named"].job["split"] == "test"
    assert results["named"].description["data"].startswith(f"FashionMNIST, test split, in {fashion} (")


def test_options_that_do_not_fit_are_refused(fashion: Path, tmp_path: Path) -> None:
    def said(**options: Any) -> str:
        with pytest.raises(UsageError) as caught:
            ImageClassification(model="fashion-cnn", **options)
        return str(caught.value)

    name = f"MNIST:{fashion}"
    assert "--class-order does not apply to the images of MNIST" in said(data=name, class_order="name")
    assert "--label-column does not apply to MNIST" in said(data=name, label_column="x")
    save(tmp_path / "val/a/0.png")
    assert "--split train does not apply to" in said(data=tmp_path / "val", split="train")
    assert "--split 'dev': expected one of" in said(data=name, split="dev")
    assert "--num-classes 12, but the data has 10 classes" in said(
        data=f"FashionMNIST:{fashion}", num_classes=12
    )
    with pytest.raises(UsageError, match=r"the images of FashionMNIST:\S+ need --mean and --std"):
        squeezed(f"FashionMNIST:{fashion}")


# -- other sizes -----------------------------------------------------------------------------------------


def test_resized_images_are_picture_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit: colours as PNG files, grey ones as well."""
    write_cifar(tmp_path, "CIFAR10", monkeypatch)
    pixels: dict[str, Any] = {"resize": 48, "crop": 40, "interpolation": "bicubic"}
    task = squeezed(f"cifar10:{tmp_path}", **pixels)
    data = task.dataset()
    assert task.wants_workers
    assert (data.sample_shape, len(data), data.labels.num_classes) == ((3, 40, 40), 20, 10)
    wanted = Preprocessing(**pixels)
    for (own, target), (path, label) in zip(
        data.__getitems__(range(20)), pictures_of("CIFAR10"), strict=True
    ):
        with path.open("rb") as file:
            assert own.equal(read_pixels(file, wanted))
        assert target == label
    assert task.fingerprint()["preprocessing"]["resize"] == 48
    assert data.fingerprint(20) == read(f"cifar10:{tmp_path}").fingerprint(20)


def test_images_of_other_channels_keep_their_own_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar(tmp_path, "CIFAR10", monkeypatch)
    values: dict[str, Any] = {"mean": (0.5,), "std": (0.5,)}
    grey = squeezed(f"cifar10:{tmp_path}", channels=1, **values)
    assert grey.dataset().sample_shape == (1, 32, 32)
    three = squeezed(ASSETS, channels=3, **values)
    [(image, _)] = three.dataset().__getitems__([0])
    own = IdxImages(ASSETS).__getitems__([0])["images"][0]
    assert image.equal(own.expand(3, -1, -1))
    three.build_model(CPU)


# -- ImageNet --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["val", "validation", "ILSVRC/Data/CLS-LOC/val"])
def test_imagenet_has_the_classes_of_its_wnids(tmp_path: Path, place: str) -> None:
    wnids = imagenet_wnids()
    save(tmp_path / place / wnids[7] / "x.png")
    save(tmp_path / place / wnids[300] / "y.png")
    data = squeezed(f"imagenet:{tmp_path}", resize=40, crop=40).dataset()
    assert np.asarray(data.targets).tolist() == [7, 300]
    assert data.id(0) == f"{wnids[7]}/x.png"
    assert data.labels.num_classes == 1000
    assert data.labels.names[7] == "cock"


def test_imagenet_that_is_laid_out_otherwise_is_refused(tmp_path: Path) -> None:
    def said(split: str = "val") -> str:
        with pytest.raises(UsageError) as caught:
            imagenet_folder(tmp_path, split)
        return str(caught.value)

    assert f"{tmp_path}/val is missing" in said()
    (tmp_path / "ILSVRC2012_img_train.tar").touch()
    assert "ILSVRC2012_img_train.tar is an archive: unpack it" in said("train")
    save(tmp_path / "val/ILSVRC2012_val_00000001.png")
    assert "the pictures lie in" in said()
    save(tmp_path / "val/cat/0.png")
    assert "found cat, expected folders that are named by the wnids" in said()
