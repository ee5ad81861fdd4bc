"""What reading processes get that inherit nothing: data set and collate, without device state."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dualeval.engine.control.plane import open_control_plane
from dualeval.engine.feed import Feed, Reader
from dualeval.engine.options import RunOptions
from dualeval.engine.worker_state import unpack
from dualeval.errors import UsageError
from dualeval.tasks.image_classification import ImageClassification
from dualeval.world import World
from dualeval.world.devices import connect
from tests.conftest import Launch
from tests.sessions import run_task
from tests.tiny import TinyTask

CPU = torch.device("cpu")


@pytest.fixture(params=["forkserver", "spawn"])
def started_anew(request: pytest.FixtureRequest) -> Iterator[str]:
    """Reading processes that do not inherit their parent's memory, as Python 3.14 starts them by itself."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(request.param, force=True)
    yield request.param
    multiprocessing.set_start_method(before, force=True)


class Holding(TinyTask):
    """Keeps its model, a part of it, and what nobody can pickle."""

    def build_model(self, device: torch.device) -> nn.Module:
        self.model = nn.Sequential(super().build_model(device))
        self.head = self.model[0]
        self.weights = {"w": self.model[0].weight}
        self.lock = threading.Lock()
        self.steps = [lambda inputs: self.model(inputs)]
        self.length = 12
        # Of the host and no part of the model: its memory is shared, once, with each process.
        self.table = torch.ones(12)
        return self.model

    def collate(self, samples: Any) -> dict[str, Tensor]:
        batch = super().collate(samples)
        # What the constructor or build_model have left, and can be sent, is there.
        assert batch["features"].shape[1] == self.length == int(self.table.sum())
        return batch


class Asking(Holding):
    """A collate that uses what stays behind."""

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count)
        self.name_used = name

    def collate(self, samples: Any) -> dict[str, Tensor]:
        batch = super().collate(samples)
        used = getattr(self, self.name_used)
        if self.name_used == "lock":
            with used:
                return batch
        return {**batch, "logits": used["w"] if isinstance(used, dict) else used(batch["features"])}


def packed(task: TinyTask, *, build: bool = True) -> bytes:
    model = task.build_model(CPU) if build else None
    return Reader(task.dataset(), task, model=model).pack()


def test_a_task_that_holds_its_model_is_read_by_new_processes(tmp_path: Path, started_anew: str) -> None:
    task = Holding(40)
    with connect(None, World.alone(), "cpu") as backend:
        expected = run_task(TinyTask(40), backend, open_control_plane(backend), RunOptions())
        found = run_task(
            task, backend, open_control_plane(backend), RunOptions(out=tmp_path, batch_size=8, workers=1)
        )
    assert found.metrics == expected.metrics
    # What is sent to another process is moved into the shared memory first.
    shared = [parameter.is_shared() for parameter in task.model.parameters()]  # type: ignore[no-untyped-call]
    assert not any(shared)
    assert started_anew == multiprocessing.get_start_method()


def test_a_collate_is_told_what_has_stayed_behind(started_anew: str) -> None:
    task = Asking(8, "lock")
    feed = Feed(Reader(task.dataset(), task, model=task.build_model(CPU)), [range(8)], workers=1, device=CPU)
    with pytest.raises(UsageError) as error:
        list(feed)
    for words in ("uses Asking.lock", "cannot pickle '_thread.lock' object", "--workers 0", "constructor"):
        assert words in str(error.value)
    assert "Traceback" not in str(error.value)
    assert started_anew == multiprocessing.get_start_method()


KILLED = """
import multiprocessing, os, signal, threading, torch
from dualeval.engine.feed import Feed, Reader
from tests.conftest import Launch
from tests.tiny import TinyTask

class Hanging(TinyTask):
    def collate(self, samples):
        if len(samples) > 1:
            threading.Event().wait()
        return super().collate(samples)

if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    task = Hanging(9)
    batches = [range(1), range(4, 9)]
    feed = iter(Feed(Reader(task.dataset(), task), batches, workers=1, device=torch.device("cpu")))
    next(feed)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_reading_processes_end_with_the_one_they_read_for(tmp_path: Path, launch: Launch) -> None:
    """Their parent is the server of forkserver, which lives as long as they do."""
    (tmp_path / "killed.py").write_text(KILLED)
    # Fails where a process is left behind.
    assert launch([sys.executable, tmp_path / "killed.py"], timeout=60).returncode == -signal.SIGKILL


# -- what is sent, without a process ---------------------------------------------------------------


def test_the_model_stays_here() -> None:
    small = len(packed(Holding(4)))

    class Large(nn.Linear):
        def __init__(self) -> None:
            super().__init__(100, 100)

    task = Holding(4)
    task.build_model(CPU)
    task.model.append(nn.Linear(300, 300))
    task.weights["large"] = task.model[1].weight
    assert len(Reader(task.dataset(), task, model=task.model).pack()) < small + 200
    data, failed = unpack(packed(Holding(4)))[range(4)]
    assert data["targets"].tolist() == [0, 3, 6, 2] and failed == ()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model", "uses the model, which belongs to the device"),
        ("head", "uses a part of the model, which belongs to the device"),
        ("steps", "uses Asking.steps, which cannot be pickled (AttributeError: Can't pickle local object"),
    ],
)
def test_what_stays_behind_is_named(name: str, words: str) -> None:
    reader = unpack(packed(Asking(4, name)))
    with pytest.raises(UsageError) as error:
        reader[range(4)]
    assert words.partition(" (")[0] in str(error.value)


def test_tensors_are_told_to_torch_functions_too() -> None:
    task = Asking(4, "weights")
    reader = unpack(packed(task))
    data, _ = reader[range(4)]
    with pytest.raises(UsageError, match="uses a part of the model"):
        torch.nn.functional.linear(torch.ones(1, 12), data["logits"])


class Far(Tensor):
    """A tensor that says it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 1)


class Scaling(TinyTask):
    def build_model(self, device: torch.device) -> nn.Module:
        self.scales = [torch.ones(2), torch.ones(2).as_subclass(Far)]
        return super().build_model(device)


def test_tensors_of_a_device_stay_there() -> None:
    here, there = unpack(packed(Scaling(4)))._task.scales
    assert here.tolist() == [1, 1]
    with pytest.raises(
        UsageError, match=r"uses a tests\.engine\.test_worker_state\.Far on cuda:1, which belongs to"
    ):
        there.tolist()


class Cyclic(TinyTask):
    """Task and data set hold each other; one attribute of the task cannot be sent."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._dataset.owner = self  # type: ignore[attr-defined]
        self.lock = threading.Lock()


def test_task_and_data_set_stay_one_where_they_hold_each_other() -> None:
    reader = unpack(packed(Cyclic(4)))
    assert reader._task.dataset() is reader._dataset
    assert reader._dataset.owner is reader._task
    assert len(reader[range(4)][0]["targets"]) == 4


class Own(TinyTask):
    """A task that is its own data set."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return self._dataset.__getitems__(indices)

    def dataset(self) -> Any:
        return self


def test_a_task_may_be_its_own_data_set() -> None:
    reader = unpack(packed(Own(4)))
    assert reader._task is reader._dataset
    assert len(reader[range(4)][0]["targets"]) == 4


class Chosen(TinyTask):
    """Says by itself what is sent."""

    def __getstate__(self) -> dict[str, Any]:
        return {"_dataset": self._dataset, "said": True}


def test_a_task_may_choose_what_is_sent() -> None:
    task = Chosen(4)
    task.lock = threading.Lock()  # type: ignore[attr-defined]
    reader = unpack(packed(task))
    assert reader._task.said and not hasattr(reader._task, "lock")


def test_a_data_set_that_cannot_be_sent_is_named(started_anew: str) -> None:
    task = TinyTask(4)
    with Path(__file__).open() as opened, pytest.raises(UsageError) as error:
        task.dataset().opened = opened  # type: ignore[attr-defined]
        list(Feed(Reader(task.dataset(), task), [range(4)], workers=1, device=CPU))
    for words in ("data set TinyDataset (its attribute opened)", "cannot pickle '_io", "--workers 0"):
        assert words in str(error.value)
    assert started_anew == multiprocessing.get_start_method()


def test_a_class_that_is_nowhere_to_be_found_is_named() -> None:
    class Inner(TinyTask):
        pass

    with pytest.raises(
        UsageError, match=r"task Inner cannot be sent .* Can't pickle local object .* at the top"
    ):
        packed(Inner(4))


def test_a_class_that_the_other_process_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = packed(Chosen(4))
    with monkeypatch.context() as patch:
        patch.delattr("tests.engine.test_worker_state.Chosen")
        with pytest.raises(
            UsageError, match=r"cannot find what .* 'Chosen'.* in a module that can be imported"
        ):
            unpack(sent)


def test_the_embedded_job_can_be_sent() -> None:
    task = ImageClassification()
    model = task.build_model(CPU)
    reader = unpack(Reader(task.dataset(), task, model=model).pack())
    data, _ = reader[range(3)]
    assert data["images"].shape == (3, 1, 28, 28)
