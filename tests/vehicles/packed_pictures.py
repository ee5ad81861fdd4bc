"""Small real pictures in class folders, and the same ones in each form that holds many in a file."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from PIL import Image

from dualeval.data.small_images import read_idx
from tests.conftest import ROOT

ASSETS = ROOT / "dualeval/assets"
# What makes a job of them, with the embedded model; and as the keywords of its task.
JOB = [
    *("--model", "tests.vehicles.faulty_models:fashion_cnn", "--no-progress", "--batch-size", "4"),
    *("--weights", str(ASSETS / "fashion_cnn.safetensors"), "--channels", "1"),
    *("--resize", "28", "--crop", "28", "--mean", "0.286", "--std", "0.353"),
]
# Path below the data folder and content, in the order of the folder.
Pictures = Sequence[tuple[str, bytes]]


def pack(path: Path, members: Mapping[str, bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    """Write a tar file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:", format=form) as file:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return path


def fashion(count: int) -> Pictures:
    """The first pictures of Fashion-MNIST's test set, in folders by class."""
    images = read_idx(ASSETS / "t10k-images-idx3-ubyte.gz")[:count]
    targets = read_idx(ASSETS / "t10k-labels-idx1-ubyte.gz")[:count]
    pictures = []
    for number, (pixels, target) in enumerate(zip(images, targets, strict=True)):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        pictures.append((f"{target}/{number:05}.png", file.getvalue()))
    return sorted(pictures)


def as_folder(pictures: Pictures, home: Path) -> Path:
    """Class folders."""
    for name, content in pictures:
        path = home / "val" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return home / "val"


def as_tars(pictures: Pictures, home: Path) -> Path:
    """Three shards, of one, two and the other pictures."""
    for number, part in enumerate((pictures[:1], pictures[1:3], pictures[3:])):
        members = {}
        for name, content in part:
            members[name] = content
            members[name.replace(".png", ".cls")] = name[:1].encode()
        pack(home / f"shards/val-{number}.tar", members)
    return home / "shards/val-{0..2}.tar"


FORMS: Mapping[str, Callable[[Pictures, Path], Path]] = {"tar": as_tars}
