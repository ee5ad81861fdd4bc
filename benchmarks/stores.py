"""Tar shards in a store whose answers take 50 ms: requests, bytes and seconds of a batch, and of the index.

The store is a server of the tests in this process: it shows how requests overlap, not what a network carries.
Pictures are of random bytes, as large as those of ImageNet's validation set, and are not decoded.

    python benchmarks/stores.py [--samples 1024] [--delay 0.05] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from common import ROOT, machine, spread, table, write_results

sys.path.insert(0, str(ROOT))

from dualeval.data.image_sets import tar_shards
from dualeval.data.packed import Pieces
from dualeval.data.stores.path import path_at
from dualeval.tasks.labels import FolderLabels
from dualeval.vision_library import torchvision
from tests.vehicles.object_store import CREDENTIALS, ObjectStore, object_store
from tests.vehicles.packed_pictures import pack

_BYTES = 110 * 1024
_IN_A_SHARD, _BATCH, _PART = 256, 64, 4 << 20
_LABEL: Any = FolderLabels(class_map=None, order=None, num_classes=None, of_weights=None)


def fill(store: ObjectStore, folder: Path, samples: int) -> str:
    """Put shards into the store; returns their pattern, below the store's address."""
    random = np.random.default_rng(0)
    for first in range(0, samples, _IN_A_SHARD):
        members = {}
        for number in range(first, min(first + _IN_A_SHARD, samples)):
            size = int(random.integers(_BYTES // 2, _BYTES * 3 // 2))
            members[f"{number:06}.jpg"] = random.integers(0, 256, size, np.uint8).tobytes()
            members[f"{number:06}.cls"] = str(number % 1000).encode()
        path = pack(folder / "shard.tar", members)
        store.put(f"bucket/{first // _IN_A_SHARD}.tar", path.read_bytes())
    return f"bucket/{{0..{(samples - 1) // _IN_A_SHARD}}}.tar"


def opened(at: str, cache: Path) -> tuple[float, Pieces]:
    """Seconds to open shards, and where their samples are."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    start = perf_counter()
    images = tar_shards.open_images(
        path_at(at), label=_LABEL, label_key=None, keep=(), whole_files=False, cache=None
    )
    return perf_counter() - start, images._pieces


def read(pieces: Pieces, samples: int, *, together: bool) -> float:
    """Seconds to read all samples, batch by batch."""
    start = perf_counter()
    for first in range(0, samples, _BATCH):
        batch = range(first, min(first + _BATCH, samples))
        get = pieces.together(batch) if together else pieces.read
        for index in batch:
            get(index)
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--delay", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    host, samples, rows, found = machine(), options.samples, [], {}
    with tempfile.TemporaryDirectory() as name, object_store() as store:
        folder = Path(name)
        os.environ.update(CREDENTIALS, AWS_ENDPOINT_URL=store.endpoint)
        # What the first reading would import, for seconds.
        import pyarrow.fs  # noqa: F401

        torchvision()
        pattern, store.delay = fill(store, folder, samples), options.delay
        for kind, at in (("S3, by pyarrow", f"s3://{pattern}"), ("web", f"{store.endpoint}/{pattern}")):
            found[kind], row = measure(store, at, folder / kind[0], samples, options.rounds)
            rows.append([kind, *row])
    head = ["", "index", "GET / needed", "bytes / needed", "HEAD", "at once", "pictures/s", "one by one"]
    shards = -(-samples // _IN_A_SHARD)
    body = (
        f"{samples:,} pictures of 110 KiB on the average in {shards} shards, not decoded; batches of "
        f"{_BATCH}, "
        f"one process. Each answer takes {options.delay * 1000:.0f} ms. GETs that are needed: each batch's "
        "bytes in parts of 4 MiB. Median of the rounds, and the middle half.\n\n"
    )
    write_results("stores", "Tar shards in a store that answers late", body + table(head, rows), found, host)


def measure(
    store: ObjectStore, at: str, cache: Path, samples: int, rounds: int
) -> tuple[dict[str, Any], list[str]]:
    """The figures of an address, and its row of the table."""
    store.forget()
    cold, pieces = opened(at, cache)
    of_index = f"{len(store.requests)} requests, {store.sent / 1e6:.0f} MB"
    warm, _ = opened(at, cache)
    sizes = pieces.sizes(samples)
    needed = sum(-(-sum(sizes[first : first + _BATCH]) // _PART) for first in range(0, samples, _BATCH))
    store.forget()
    read(pieces, samples, together=True)
    gets = sum(method == "GET" for method, *_ in store.requests)
    heads, sent, most = len(store.requests) - gets, store.sent, store.most_at_once
    timed = [read(pieces, samples, together=True) for _ in range(rounds)]
    alone = [read(pieces, _BATCH, together=False) / _BATCH * samples for _ in range(rounds)]
    figures = {
        "index_cold_s": cold,
        "index_warm_s": warm,
        "gets": gets,
        "gets_needed": needed,
        "heads": heads,
        "bytes_sent": sent,
        "bytes_needed": sum(sizes),
        "most_at_once": most,
        "together_s": timed,
        "one_by_one_s": alone,
    }
    row = [
        f"{cold:.1f} s ({of_index}); kept {warm:.1f} s",
        f"{gets / needed:.3f} ({gets} of {needed})",
        f"{sent / sum(sizes):.3f}",
        f"{heads}",
        f"{most}",
        spread([samples] * rounds, timed),
        spread([samples] * rounds, alone),
    ]
    return figures, row


if __name__ == "__main__":
    main()
