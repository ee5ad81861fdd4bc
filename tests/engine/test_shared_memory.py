"""Room in the shared memory for what reading processes hand over: estimated, compared, really too small."""

from __future__ import annotations

import errno
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dualeval.engine import shared_memory
from dualeval.engine.shared_memory import Reading, choose_workers, measure_reading, tensor_bytes
from dualeval.engine.storages import own_storages
from dualeval.errors import UsageError
from tests.conftest import Launch
from tests.tiny import FEATURES, TinyTask

MB = 10**6
# 4 processes with 2 batches ahead of them, and 2 in the rank: 10 batches of 10 MB.
ONE = Reading(host="n1", place="a", free=200 * MB, batch=10 * MB, workers=4, ahead=2, held=2, batches=100)


def ranks(count: int, **changes: Any) -> list[Reading]:
    return [replace(ONE, **changes)] * count


@pytest.mark.parametrize(
    ("everyone", "workers"),
    [
        (ranks(1), [4]),
        # Something beside the batches is needed as well.
        (ranks(1, free=100 * MB), [3]),
        (ranks(1, free=64 * MB), [2]),
        (ranks(1, free=39 * MB), [0]),
        (ranks(1, free=0), [0]),
        # Ranks that share it have equal parts, and those of another host have nothing to do with it.
        (ranks(2), [3, 3]),
        (ranks(3), [2, 2, 2]),
        (ranks(2) + ranks(1, place="b"), [3, 3, 4]),
        # What some had taken already when they looked counts once: the least that was seen.
        (ranks(1) + ranks(1, free=120 * MB), [1, 1]),
        # Few batches, one ahead, none that are tensors, no processes.
        (ranks(1, free=64 * MB, batches=6), [4]),
        (ranks(1, free=64 * MB, ahead=1), [4]),
        (ranks(1, free=0, batch=0), [4]),
        (ranks(1, free=0, workers=0), [0]),
        (ranks(1, workers=0) + ranks(1), [0, 4]),
    ],
)
def test_as_many_as_there_is_room_for(everyone: list[Reading], workers: list[int]) -> None:
    found, notes = choose_workers(everyone, chosen=False)
    assert found == workers
    assert len(notes) == (found != [reading.workers for reading in everyone])


def test_what_is_said() -> None:
    small = ranks(2, free=64 * MB) + ranks(1, place="b", host="n2", free=0) + ranks(1, place="c")
    workers, notes = choose_workers(small, chosen=False)
    assert workers == [0, 0, 0, 4]
    assert notes[0].startswith("/dev/shm on n1 has 64 MB free, and 2 ranks with 4 reading processes each may")
    assert "201 MB there (10 MB a batch)" in notes[0]
    assert "/dev/shm on n2 has 0 MB free, and 1 rank with 4" in notes[1]
    for word in ("docker run --ipc=host", "--shm-size", "emptyDir"):
        assert all(word in note for note in notes)
    with pytest.raises(UsageError, match=r"--workers: /dev/shm on n1 .* --ipc=host.*Or type --workers 2\."):
        choose_workers(ranks(1, free=64 * MB), chosen=True)
    assert choose_workers(ranks(1), chosen=True) == ([4], [])


def test_no_room_to_measure() -> None:
    everyone = [ONE, replace(ONE, free=16384, batch=0, full=True), replace(ONE, place="b")]
    workers, [note] = choose_workers(everyone, chosen=False)
    assert workers == [0, 0, 4]
    assert "room for none of them." in note
    _, [note] = choose_workers(everyone[1:], chosen=False)
    assert "n1 has 0.0164 MB free" in note
    assert "a batch" not in note
    with pytest.raises(UsageError, match=r"--workers: /dev/shm on n1 .* Or type --workers 0\."):
        choose_workers(everyone, chosen=True)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Padded:
    ids: Tensor
    texts: list[str]


def test_tensors_are_found_wherever_they_are() -> None:
    tensor = torch.zeros(10, 3)
    assert tensor_bytes(tensor) == 120
    assert tensor_bytes({"a": [tensor, (torch.zeros(2, dtype=torch.int64), None)], "b": "text"}) == 136
    assert tensor_bytes(Pair(tensor, torch.zeros(1, dtype=torch.uint8))) == 121
    assert tensor_bytes(Padded(ids=tensor, texts=["x"])) == 120
    assert tensor_bytes([tensor, tensor]) == 120, "what is sent once"
    assert tensor_bytes(["a", 1, None]) == 0
    assert tensor_bytes([tensor[:2], tensor[5:]]) == 120, "a storage is sent whole, and once"
    assert tensor_bytes(torch.eye(3).to_sparse()) > 0


def test_a_batch_of_many_samples_from_one() -> None:
    row = torch.zeros(1, 3)
    assert tensor_bytes(row, samples=64) == 64 * 12
    # A part of each sample keeps all of it, and so do two.
    assert tensor_bytes([row[:, 0]], samples=64) == 64 * 12
    assert tensor_bytes([row[:, :2], row[:, 2], row], samples=64) == 64 * 12
    everything = torch.zeros(1000, 3)
    assert tensor_bytes(everything[:1], samples=64) == 12_000


def test_small_parts_of_a_storage_get_their_own() -> None:
    everything = torch.arange(3000.0).view(1000, 3)
    for batch, bytes_ in (
        (everything[10:74], 64 * 12),
        ({"a": everything[:64], "b": [everything[64:128]]}, 128 * 12),
        (everything[5:5], 0),
        # Its copy would be as large: contiguous columns; most of the samples.
        (torch.zeros(3, 1000).t()[:64], 12_000),
        (everything[:600], 12_000),
    ):
        assert tensor_bytes(own_storages(batch)) == bytes_
    [one, again] = own_storages([everything[7:9]] * 2)
    assert one is again
    assert torch.equal(one, everything[7:9])
    whole = {"a": everything, "b": everything[:1]}
    assert own_storages(whole) is whole
    # From one sample, what is decided for 64.
    assert tensor_bytes(own_storages(everything[:1], samples=64), samples=64) == 64 * 12
    assert tensor_bytes(own_storages(everything[:1], samples=600), samples=600) == 12_000
    conjugated = torch.zeros(100, 2, dtype=torch.complex64).conj()[:1]
    assert own_storages(conjugated) is conjugated


def reading(task: TinyTask, workers: int) -> Reading:
    return measure_reading(task.dataset(), task, 64, workers=workers, ahead=2, held=2, batches=9)


def test_a_batch_is_estimated_from_a_sample(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = reading(TinyTask(500), workers=2)
    assert found.batch == 64 * (FEATURES * 4 + 8)
    assert found.free > 0
    assert found.place
    # A sample that cannot be read is no matter here; nor is a machine without such a memory.
    assert reading(TinyTask(500, broken=[0]), workers=2).batch == 0
    assert reading(TinyTask(500), workers=0).needed == 0
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path / "nowhere")
    assert reading(TinyTask(500), workers=2).needed == 0


def with_memory(size: str, *words: str | Path) -> list[str | Path]:
    """Python with these words, where /dev/shm has this size."""
    mount = f'mount -t tmpfs -o size={size} none /dev/shm && exec "$0" "$@"'
    return ["unshare", "--mount", "sh", "-c", mount, sys.executable, *words]


@pytest.mark.needs("mounts")
def test_a_memory_that_is_too_small(launch: Launch, tmp_path: Path) -> None:
    """As in a container: 1 MB, a batch of 112 kB. torch alone would wait for ever."""
    command = with_memory("1m", "-m", "tests.workers.small_memory_worker", tmp_path)
    launch(command, timeout=60, variables={"OMP_NUM_THREADS": "1"}).ok()
    found = json.loads((tmp_path / "found.json").read_text())
    [note] = found["notes"]
    assert "1.05 MB free, and 1 rank with 8 reading processes" in note
    assert 1 <= found["room"] < 8
    assert found["fewer"] == found["asked"]
    assert found["error"].startswith("--workers: /dev/shm on ")
    assert found["error"].endswith(f"Or type --workers {found['room']}.")


FULL = """
from dualeval.engine.shared_memory import measure_reading
from tests.tiny import TinyTask
task = TinyTask(500)
found = measure_reading(task.dataset(), task, 8, workers=2, ahead=2, held=2, batches=9)
print(found.full, found.free, found.place != "")
"""


def test_a_memory_that_fills_up_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared_memory, "Feed", full)
    found = reading(TinyTask(500), workers=2)
    assert found.full
    assert choose_workers([found], chosen=False)[0] == [0]


@pytest.mark.needs("mounts")
def test_a_memory_without_room_for_a_lock(launch: Launch) -> None:
    done = launch(with_memory("16k", "-c", FULL), timeout=60)
    assert done.stdout == "True 16384 True\n", done.stderr
    assert not done.stderr
