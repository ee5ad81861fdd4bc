"""Pictures in shards: seconds and memory of the index of a million, and pictures/s beside other loaders.

The index is that of made shards, whose pictures are holes in sparse files: a header is read for each file, as
of real ones. "Cold" is without a kept index and without pages of the shards in memory; "warm" is with both.

The loaders give the same JPEG files one after the other in one process, as bytes, or decoded and resized by
dualeval's function. webdataset and datasets are measured where they are installed.

    python benchmarks/shards.py [--samples 1300000] [--pictures 1000] [--rounds 7]
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import pyarrow
import pyarrow.parquet
from common import machine, spread, table, take_turns, write_results
from made_pictures import write_pictures

from dualeval.data.image_sets import hugging_face, tar_shards
from dualeval.data.image_sets.class_folders import ImageFolder
from dualeval.data.packed import PackedImages
from dualeval.data.pictures import read_pixels
from dualeval.data.preprocessing import Preprocessing
from dualeval.tasks.labels import FolderLabels
from dualeval.vision_library import torchvision

_IN_A_SHARD = 10_000
# Of a picture of ImageNet's validation set.
_BYTES = 110 * 1024
_LABEL: Any = FolderLabels(class_map=None, order=None, num_classes=None, of_weights=None)


def write_index(folder: Path, samples: int) -> str:
    """Write shards of so many samples; returns their pattern."""
    for first in range(0, samples, _IN_A_SHARD):
        with (folder / f"val-{first // _IN_A_SHARD:04}.tar").open("wb") as file:
            for number in range(first, min(first + _IN_A_SHARD, samples)):
                key = f"n{number % 1000:08}/ILSVRC2012_val_{number:08}"
                for name, size in ((f"{key}.jpg", _BYTES), (f"{key}.cls", 4)):
                    info = tarfile.TarInfo(name)
                    info.size = size
                    file.write(info.tobuf(tarfile.USTAR_FORMAT))
                    file.seek(-(-size // 512) * 512, os.SEEK_CUR)
                file.seek(-512, os.SEEK_CUR)
                file.write(f"{number % 1000}".encode().ljust(4).ljust(512, b"\0"))
            file.write(bytes(10240))
            os.fsync(file.fileno())
    return f"val-{{0000..{(samples - 1) // _IN_A_SHARD:04}}}.tar"


def index(at: Path, *, drop: bool) -> tuple[float, float, PackedImages]:
    """Seconds to open shards, processor seconds of that, and the pictures."""
    for path in at.parent.glob("*.tar") if drop else ():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start, cpu = perf_counter(), _cpu_s()
    images = tar_shards.open_images(at, label=_LABEL, label_key=None, keep=(), whole_files=False, cache=None)
    return perf_counter() - start, _cpu_s() - cpu, images


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def bytes_a_sample(images: PackedImages) -> float:
    """Of the arrays and the ids."""
    pieces: Any = images._pieces
    names, arrays = images._paths, (pieces.places, pieces.lengths, images.targets)
    of_names = len(names._bytes) + names._ends.itemsize * len(names._ends)
    return (of_names + sum(array.nbytes for array in arrays)) / len(images)


def measure_index(samples: int) -> tuple[str, dict[str, Any]]:
    """Build the index cold, then take it from the cache."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        shards = Path(folder, "shards")
        shards.mkdir()
        at = shards / write_index(shards, samples)
        cold = index(at, drop=True)
        warm = min((index(at, drop=False) for _ in range(3)), key=lambda each: each[0])
    figures = {
        "samples": samples,
        "cold_s": cold[0],
        "cold_cpu_s": cold[1],
        "warm_s": warm[0],
        "bytes_a_sample": bytes_a_sample(warm[2]),
    }
    rows = [
        [
            f"{samples:,}",
            f"{cold[0]:.1f} ({cold[1]:.1f})",
            f"{warm[0]:.2f}",
            f"{figures['bytes_a_sample']:.1f}",
        ]
    ]
    head = [
        "samples, of two files each",
        "cold, s (processor)",
        "warm, s",
        "memory, bytes a sample with its id",
    ]
    return table(head, rows), figures


def write_forms(folder: Path, count: int) -> None:
    """The same pictures as class folders, tar shards, Parquet and a folder of save_to_disk."""
    write_pictures(folder / "val", count, 400, 10)
    files = sorted((folder / "val").rglob("*.jpg"))
    (folder / "tar").mkdir()
    rows = []
    for number, path in enumerate(files):
        name = path.relative_to(folder / "val")
        rows.append(
            {"image": {"bytes": path.read_bytes(), "path": str(name)}, "label": int(name.parts[0][-2:])}
        )
        with tarfile.open(folder / f"tar/val-{number * 4 // len(files)}.tar", "a") as tar:
            for suffix, content in ((".jpg", path.read_bytes()), (".cls", name.parts[0].encode())):
                info = tarfile.TarInfo(str(name.with_suffix(suffix)))
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "x.parquet", row_group_size=100)
    if find_spec("datasets"):
        import datasets

        datasets.disable_progress_bars()
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        datasets.Dataset.from_list(rows, features=features).save_to_disk(folder / "saved")


def _own(images: Any) -> Iterator[bytes]:
    for place in range(len(images)):
        with images.opened(place) as file:
            yield file.read()


def loaders(folder: Path) -> dict[str, Callable[[], Iterator[bytes]]]:
    """What gives the bytes of all pictures, by name; libraries behind dualeval's way of the same form."""
    usual: Any = {"label": _LABEL, "whole_files": False, "cache": None}
    columns: Any = {"path_column": None, "label_column": None, "keep": ()}
    tars = tar_shards.open_images(folder / "tar", label_key=None, **usual)
    parquet = hugging_face.open_images(folder / "x.parquet", **columns, **usual)
    files = ImageFolder(folder / "val", Preprocessing())
    found: dict[str, Callable[[], Iterator[bytes]]] = {
        "files: dualeval": lambda: _own(files),
        "tar: dualeval": lambda: _own(tars),
    }
    if find_spec("webdataset"):
        import webdataset  # type: ignore[import-not-found, import-untyped, unused-ignore]

        paths = [str(path) for path in sorted((folder / "tar").iterdir())]
        found["tar: webdataset"] = lambda: (
            sample["jpg"] for sample in webdataset.WebDataset(paths, shardshuffle=False)
        )
    found["Parquet: dualeval"] = lambda: _own(parquet)
    if find_spec("datasets"):
        import datasets

        raw = datasets.Image(decode=False)
        stream = datasets.load_dataset(
            "parquet", data_files=str(folder / "x.parquet"), split="train", streaming=True
        ).cast_column("image", raw)
        found["Parquet: datasets, streaming"] = lambda: (row["image"]["bytes"] for row in stream)
        saved = hugging_face.open_images(folder / "saved", **columns, **usual)
        found["save_to_disk: dualeval"] = lambda: _own(saved)
        mapped = datasets.load_from_disk(folder / "saved").cast_column("image", raw)
        found["save_to_disk: datasets"] = lambda: (row["image"]["bytes"] for row in mapped)
    return found


def measure_loaders(count: int, rounds: int) -> tuple[str, dict[str, Any]]:
    """Give each loader's pictures in turns, as bytes and decoded."""
    figures: dict[str, Any] = {"pictures": count}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_forms(Path(folder), count)
        entries = loaders(Path(folder))
        measured = {
            kind: take_turns(rounds, {name: _timed(make, kind, count) for name, make in entries.items()})
            for kind in ("bytes", "decoded")
        }
    for name in entries:
        form = name.partition(":")[0]
        row = [name]
        for of in measured.values():
            best = min(of[name])
            row += [f"{count / best:,.0f}", spread(of[name], of[f"{form}: dualeval"])]
        rows.append(row)
    figures |= measured
    head = [
        "",
        "as bytes, pictures/s",
        "seconds over dualeval's",
        "decoded, pictures/s",
        "seconds over dualeval's",
    ]
    return table(head, rows), figures


def _timed(make: Callable[[], Iterator[bytes]], kind: str, count: int) -> Callable[[], float]:
    def measure() -> float:
        start, given = perf_counter(), 0
        for content in make():
            given += 1
            if kind == "decoded":
                read_pixels(io.BytesIO(content), Preprocessing())
        assert given == count, (given, count)
        return perf_counter() - start

    return measure


def main() -> None:
    """Measure both, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=1_300_000)
    parser.add_argument("--pictures", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    host = machine()
    torchvision()  # which opening pictures imports
    of_index, index_figures = measure_index(asked.samples)
    of_loaders, loader_figures = measure_loaders(asked.pictures, asked.rounds)
    body = (
        f"The index of tar shards:\n\n{of_index}\n{asked.pictures:,} JPEG files of 400 x 400 pixels, one "
        f"after the other in one process, {asked.rounds} rounds in turns (the best; median of the "
        f"ratios, and the middle half of them):\n\n{of_loaders}"
    )
    write_results("shards", "Pictures in shards", body, {**index_figures, **loader_figures}, host)


if __name__ == "__main__":
    main()
