"""Pictures per second from JPEG files and from their pack, read in batches without a model.

The files are those of ``pictures.py``. Each way reads all of them by the engine's own feed, with 0 and 2
reading processes, in turns; the page cache holds both.

    python benchmarks/packs.py [--files 1000] [--rounds 5] [--photographs FOLDER]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from common import machine, median_ratio, table, take_turns, write_results
from pictures import photographs, write_files

from dualeval.engine.samples.feed import Feed, Reader
from dualeval.tasks.image_classification import ImageClassification

_BATCH = 64
_WORKERS = (0, 2)
# Long enough that starts and the first use of memory do not count.
_PASSES = {"files": 1, "pack": 20}
_JOB = ("--model", "resnet18", "--weights", "random:0", "--preprocessing", "imagenet", "--num-classes", "10")


def read_all(data: Path, workers: int, passes: int) -> float:
    """Pictures per second."""
    task = ImageClassification(
        model="resnet18", weights="random:0", preprocessing="imagenet", num_classes=10, data=data
    )
    dataset = task.dataset()
    batches = [range(first, min(first + _BATCH, len(dataset))) for first in range(0, len(dataset), _BATCH)]
    start = perf_counter()
    feed = Feed(Reader(dataset, task), batches * passes, workers=workers, device=torch.device("cpu"))
    count = sum(len(data["targets"]) for data, _ in feed)
    assert count == passes * len(dataset)
    return count / (perf_counter() - start)


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--photographs", type=Path)
    arguments = parser.parse_args()
    host = machine()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="dualeval-packs-") as folder:
        files, pack = Path(folder) / "val", Path(folder) / "val.pack"
        write_files(files, arguments.photographs or photographs(), arguments.files)
        command = [sys.executable, "-m", "dualeval", "pack", *_JOB, "--data", str(files), "--out", str(pack)]
        start = perf_counter()
        subprocess.run(command, check=True, timeout=3600)
        packing_s = perf_counter() - start
        sizes = [sum(path.stat().st_size for path in files.rglob("*.jpg")), pack.stat().st_size]
        entries: dict[str, Callable[[], float]] = {
            f"{name}, {workers} reading processes": partial(read_all, data, workers, _PASSES[name])
            for workers in _WORKERS
            for name, data in (("files", files), ("pack", pack))
        }
        take_turns(1, entries)
        speeds = take_turns(arguments.rounds, entries)
    rows = []
    for name, each in speeds.items():
        of_files = speeds[name.replace("pack", "files")]
        rows.append([name, f"{statistics.median(each):,.0f}", f"{median_ratio(each, of_files):.1f}"])
    bytes_a_picture = [size / arguments.files for size in sizes]
    body = (
        f"{arguments.files} JPEG files in the sizes of ImageNet, resize 256, crop 224, in batches of {_BATCH}"
        f" on the host, without a model; median of {arguments.rounds} rounds in turns, after one that is not "
        f"counted. A round is {_PASSES['files']} pass over the files, or {_PASSES['pack']} over the pack, "
        "with the start of reading processes. All is in the page cache. One thread a process.\n\n"
        f"{table(['read from', 'pictures/s', 'over files'], rows)}\n"
        f"Bytes a picture: {bytes_a_picture[0]:,.0f} as files, {bytes_a_picture[1]:,.0f} in the pack. The "
        f"command that packed them took {packing_s:.1f} s, its start among these.\n"
    )
    figures = {"pictures_per_s": speeds, "bytes_a_picture": bytes_a_picture, "packing_s": packing_s}
    write_results("packs", "Reading from a pack", body, figures, host)


if __name__ == "__main__":
    main()
