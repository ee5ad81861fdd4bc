"""Small real pictures in class folders, and the same ones in each form that holds many in a file."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest
from PIL import Image

from dualeval.data.small_images import read_idx
from dualeval.errors import EXIT_USAGE, UsageError
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


def refusal(open_images: Callable[..., object], at: Path, **options: Any) -> str:
    """What opening says that is refused."""
    with pytest.raises(UsageError) as caught:
        open_images(at, **options)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value)


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


def as_dataset(pictures: Pictures) -> datasets.Dataset:
    """A data set of Hugging Face."""
    features = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=[f"kind {number}" for number in range(10)]),
        "shop": datasets.Value("string"),
    }
    rows = [
        {"image": {"bytes": content, "path": name}, "label": int(name[:1]), "shop": name[-5:-4]}
        for name, content in pictures
    ]
    return datasets.Dataset.from_list(rows, features=datasets.Features(features))


def as_parquet(pictures: Pictures, home: Path) -> Path:
    """Two files of Parquet, whose row groups are neither batches nor chunks."""
    folder = home / "parquet"
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate((pictures[:17], pictures[17:])):
        table = as_dataset(part).data.table
        pyarrow.parquet.write_table(table, folder / f"test-{number:05}-of-00002.parquet", row_group_size=7)
    return folder


def as_saved(pictures: Pictures, home: Path) -> Path:
    """A folder of save_to_disk, of two files, but with the whole paths: it leaves the folders out."""
    folder = home / "saved"
    as_dataset(pictures).save_to_disk(folder, num_shards=2)
    table, first = as_dataset(pictures).data.table, 0
    for file in sorted(folder.glob("*.arrow")):
        count = pyarrow.ipc.open_stream(file.read_bytes()).read_all().num_rows
        with pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table.slice(first, count), max_chunksize=7)
        first += count
    return folder


def as_mds(pictures: Pictures, home: Path, *, packed: bool = False) -> Path:
    """Two shards of MosaicML's streaming, as its writer has them."""
    folder = home / ("mds-zstd" if packed else "mds")
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for number, part in enumerate((pictures[:17], pictures[17:])):
        samples = [
            len(content).to_bytes(4, "little") + content + int(name[:1]).to_bytes(8, "little")
            for name, content in part
        ]
        config = b'{"version": 2}'
        ends = [8 + 4 * len(samples) + len(config)]
        for sample in samples:
            ends.append(ends[-1] + len(sample))
        numbers = b"".join(each.to_bytes(4, "little") for each in (len(samples), *ends))
        content, name = numbers + config + b"".join(samples), f"shard.{number:05}.mds"
        stored = pyarrow.compress(content, codec="zstd", asbytes=True) if packed else content
        (folder / (f"{name}.zstd" if packed else name)).write_bytes(stored)
        shards.append(
            {
                "column_encodings": ["png", "int"],
                "column_names": ["image", "label"],
                "column_sizes": [None, 8],
                "format": "mds",
                "samples": len(samples),
                "raw_data": {"basename": name, "bytes": len(content)},
                "zip_data": {"basename": f"{name}.zstd", "bytes": len(stored)} if packed else None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    return folder


FORMS: Mapping[str, Callable[[Pictures, Path], Path]] = {
    "tar": as_tars,
    "parquet": as_parquet,
    "saved": as_saved,
    "mds": as_mds,
}
