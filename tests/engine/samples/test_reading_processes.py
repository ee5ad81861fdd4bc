"""Reading processes are forked: what they inherit, where they are refused, and how they end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dualeval.engine.building import automatic_workers
from dualeval.engine.samples.feed import Feed, Reader, own_storages, why_not_forked
from dualeval.engine.samples.samples import as_dataset
from dualeval.engine.values.limits import limit_of
from dualeval.engine.values.nests import tensors_in
from dualeval.errors import UsageError
from dualeval.options.evaluation import cores_for, readers_of
from dualeval.result import Result
from tests.conftest import Launch
from tests.vehicles.sessions import noted
from tests.vehicles.tiny import TinyTask

SPAWN = r"reading processes are forked, and this program has them started by spawn \(.*_method\('spawn'\)\)"


class Holding(TinyTask):
    """Keeps what nobody can pickle, and uses it where it reads."""

    wants_workers = True

    def build_model(self, device: torch.device) -> nn.Module:
        self.lock = threading.Lock()
        self.model = super().build_model(device)
        self.steps = [lambda samples: TinyTask.collate(self, samples)]
        return self.model

    def collate(self, samples: Any) -> dict[str, Tensor]:
        with self.lock:
            found: dict[str, Tensor] = self.steps[0](samples)
        assert list(self.model.parameters())
        return found


def evaluated(task: TinyTask, **options: Any) -> tuple[Result, list[str]]:
    return noted(task, cores=2, **options)


@pytest.fixture
def set_to(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a way of starting processes the one that the program has chosen, or that Python has by itself."""

    def choose(method: str | None, *, usual: str = "fork") -> None:
        others = [each for each in ("fork", "spawn", "forkserver") if each != usual]
        monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: method)
        monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: [usual, *others])

    return choose


def test_reading_processes_inherit_what_cannot_be_pickled() -> None:
    expected, _ = evaluated(TinyTask(40))
    found, _ = evaluated(Holding(40), batch_size=8, workers=2)
    assert found.metrics == expected.metrics


@pytest.mark.parametrize(
    ("method", "usual", "words"),
    [
        (None, "fork", None),
        ("fork", "fork", None),
        ("forkserver", "forkserver", None),  # Python 3.14, where somebody has asked which it is
        (None, "forkserver", None),
        ("forkserver", "fork", "started by forkserver"),
        ("spawn", "forkserver", "started by spawn"),
    ],
)
def test_another_start_method_that_the_program_has_chosen_is_named(
    set_to: Any, method: str | None, usual: str, words: str | None
) -> None:
    set_to(method, usual=usual)
    why = why_not_forked()
    assert why is None if words is None else words in str(why)


def test_spawn_is_refused_with_what_to_type(set_to: Any) -> None:
    set_to("spawn")
    with pytest.raises(UsageError, match=rf"^--workers 2: {SPAWN}\. Type --workers 0 \(in Python: workers=0"):
        evaluated(TinyTask(8), workers=2)
    assert evaluated(TinyTask(8), workers=0)[0].samples["evaluated"] == 8


def test_workers_that_nobody_chose_become_none_with_a_note(set_to: Any) -> None:
    set_to("spawn")
    assert automatic_workers(Holding(40), TinyTask(40).dataset(), 2, "cpu") == 0
    result, notes = evaluated(Holding(40))
    assert result.samples["evaluated"] == 40
    assert [note for note in notes if note.startswith("reading processes are forked")]
    _, notes = evaluated(TinyTask(40))
    assert not [note for note in notes if "forked" in note], "this one reads from memory"


class Where(torch.utils.data.Dataset[Any]):
    """Its samples are the cores that the process that reads them may run on."""

    def __len__(self) -> int:
        return 4

    def __getitems__(self, indices: range) -> list[list[int]]:
        return [sorted(os.sched_getaffinity(0)) for _ in indices]


def test_reading_processes_run_on_the_cores_near_the_gpu() -> None:
    mine = os.sched_getaffinity(0)
    data = as_dataset(Where())
    for cores in ([min(mine)], []):
        reader = Reader(data, Uncollated(4), cores=cores)
        feed = Feed(reader, [range(2), range(2, 4)], workers=2, device=torch.device("cpu"))
        assert [batch for batch, _ in feed] == [[cores or sorted(mine)] * 2] * 2
    assert os.sched_getaffinity(0) == mine, "the process that computes stays where it was"


class Uncollated(TinyTask):
    def collate(self, samples: Any) -> Any:
        return samples


@pytest.mark.parametrize(
    ("cores", "on_cpu", "on_gpu"), [(1, 1, 1), (2, 2, 1), (4, 4, 2), (16, 8, 14), (128, 8, 32)]
)
def test_the_default_number_of_reading_processes(cores: int, on_cpu: int, on_gpu: int) -> None:
    assert (readers_of(cores, "cpu"), readers_of(cores, "cuda")) == (on_cpu, on_gpu)
    assert cores_for(readers_of(16, "cuda")) == 16


def of_rank(data: float, evaluate: float = 100.0, workers: int = 4, cores: int = 16) -> dict[str, Any]:
    return {"times": {"data": data, "evaluate": evaluate}, "workers": workers, "cores": cores}


@pytest.mark.parametrize(
    ("ranks", "batches", "device", "text"),
    [
        ([of_rank(62)], 99, "cuda", "62 % of the time for data: more reading processes (--workers 8)"),
        ([of_rank(62, workers=8)], 99, "cuda", "more reading processes (--workers 14)"),
        ([of_rank(62, workers=8)], 99, "cpu", "more reading processes (--workers 16)"),
        ([of_rank(0), of_rank(62)], 99, "cuda", "31 % of the time for data: more reading processes"),
        ([of_rank(62, workers=14)], 999, "cuda", "more cores a rank than its 16 (under Slurm --cpus-per"),
        ([of_rank(62, workers=1, cores=1)], 99, "cuda", "more cores a rank than its 1 (under Slurm --cpus"),
        # Too little to say so: time, share, batches; a rank that reads itself.
        ([of_rank(8, evaluate=9.9)], 99, "cuda", None),
        ([of_rank(19)], 99, "cuda", None),
        ([of_rank(62)], 31, "cuda", None),
        ([of_rank(62, workers=0)], 99, "cuda", None),
    ],
)
def test_a_run_that_waited_for_data_says_what_to_do(
    ranks: list[dict[str, Any]], batches: int, device: str, text: str | None
) -> None:
    found = limit_of(ranks, batches, device)
    assert found is None if text is None else text in str(found and found["text"])


def test_a_system_where_a_fork_is_not_safe_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert why_not_forked() == "reading processes are forked, which is not safe on darwin"


KILLED = """
import os, signal, threading, torch
from dualeval.engine.samples.feed import Feed, Reader
from tests.vehicles.tiny import TinyTask

class Hanging(TinyTask):
    def collate(self, samples):
        if len(samples) > 1:
            threading.Event().wait()
        return super().collate(samples)

task = Hanging(9)
batches = [range(1), range(4, 9)]
feed = iter(Feed(Reader(task.dataset(), task), batches, workers=1, device=torch.device("cpu")))
next(feed)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_reading_processes_end_with_the_process_they_read_for(tmp_path: Path, launch: Launch) -> None:
    """One that hangs in a read, too."""
    (tmp_path / "killed.py").write_text(KILLED)
    # Fails where a process is left behind.
    assert launch([sys.executable, tmp_path / "killed.py"], timeout=60).returncode == -signal.SIGKILL


# -- how reading processes hand over batches: parts of larger storages, and a shared memory without room


def bytes_of(batch: object) -> int:
    storages: list[Tensor] = [tensor for _, tensor in tensors_in(batch)]
    return sum(
        {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in storages}.values()
    )


def test_small_parts_of_a_storage_get_their_own() -> None:
    everything = torch.arange(3000.0).view(1000, 3)
    for batch, expected in (
        (everything[10:74], 64 * 12),
        ({"a": everything[:64], "b": [everything[64:128]]}, 128 * 12),
        (everything[10:74, 1:], 64 * 12 - 4),
        (everything[5:5], 0),
        # Its copy would be as large: contiguous columns; most of the samples.
        (torch.zeros(3, 1000).t()[:64], 12_000),
        (everything[:600], 12_000),
    ):
        assert bytes_of(own_storages(batch)) == expected
    found = own_storages({"a": [everything[7:9, 1:]]})["a"][0]
    assert torch.equal(found, everything[7:9, 1:]) and found.stride() == (3, 1)
    assert own_storages(everything) is everything
    conjugated = torch.zeros(100, 2, dtype=torch.complex64).conj()[:1]
    assert own_storages(conjugated) is conjugated


# Batches of 112 kB, as a collate of one's own and as torch's make them: in the shared memory.
SMALL_MEMORY = """
import json, os, subprocess, sys
import torch
from torch.utils.data import Dataset, default_collate
import dualeval
from dualeval.engine.samples.feed import Feed, Reader
from dualeval.errors import UsageError
from dualeval.metrics import Mean
from tests.vehicles.tiny import TinyTask

class ByTorch(TinyTask):
    def collate(self, samples):
        return default_collate([{"features": features, "targets": target} for features, target in samples])

class Large(Dataset):
    def __len__(self): return 12
    def __getitem__(self, index): return torch.full((750_000,), float(index))

def read():
    batches = [range(first, first + 2000) for first in range(0, 40_000, 2000)]
    for task in (TinyTask(40_000), ByTorch(40_000)):
        feed = Feed(Reader(task.dataset(), task), batches, workers=2, device=torch.device("cpu"))
        try:
            found = list(feed)
        except UsageError as error:
            print(error)
            continue
        for (data, failed), samples in zip(found, batches, strict=True):
            expected = task.collate(task.dataset().__getitems__(samples))
            assert not failed and all(torch.equal(data[name], expected[name]) for name in expected)
        print(len(found), *sorted({*feed.notes}))

def door():
    done = dualeval.evaluate(model=torch.nn.Identity().eval(), data=Large(),
        forward=lambda model, batch: batch.mean(1), observe=lambda out, batch: {"v": out},
        metrics=[Mean("v")], workers=2, batch_size=4, device="cpu", note=print)
    print(done.metrics["v"])

for work, size in ((read, "256k"), (door, "1m"), (read, "16k")):
    subprocess.run(["mount", "-o", f"remount,size={size}", "/dev/shm"], check=True)
    print("--", size, flush=True)
    if os.fork() == 0:
        work()
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.needs("mounts")
def test_a_shared_memory_without_room_is_named_and_pipes_are_used(launch: Launch) -> None:
    """As in a container: torch alone would lose batches, and wait for ever."""
    mount = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$0" "$@"'
    words = ["unshare", "--mount", "sh", "-c", mount, sys.executable, "-c", SMALL_MEMORY]
    done = launch(words, timeout=120, variables={"OMP_NUM_THREADS": "1"}).ok()
    said = dict(part.partition("\n")[::2] for part in done.stdout.split("-- ")[1:])
    pipes = " /dev/shm has no room for the batches of reading processes: they are sent through pipes"
    small, door, none = (said[size].splitlines() for size in ("256k", "1m", "16k"))
    assert [line.partition(",")[0] for line in small] == [f"20{pipes}"] * 2
    assert all("--ipc=host" in line for line in small)
    # The task has its own words for what torch's collate raises.
    assert door[-1] == "5.5" and any(pipes.strip() in line for line in door)
    assert len(none) == 2
    for line in none:
        assert line.startswith("/dev/shm on ") and "no room for the locks of reading processes." in line
        assert line.endswith("Or type --workers 0.")
