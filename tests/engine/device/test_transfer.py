"""Transfer: what gets to a device and how, tried on a played one that runs late and hands memory on."""

from __future__ import annotations

import decimal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
import torch
from torch import Tensor, nn

from dualeval.engine.checks import repeatability as looks
from dualeval.engine.device import accelerator
from dualeval.engine.device.transfer import Uploads, start_download
from dualeval.engine.folder import recorder
from dualeval.engine.model.compute import Compute, usable_threads
from dualeval.engine.samples import feed
from dualeval.engine.samples.feed import Feed, Reader
from dualeval.engine.values.options import RunOptions
from dualeval.errors import DualevalError, Stopped
from dualeval.metrics import Mean
from dualeval.metrics.classification import LogitColumns
from dualeval.options.precision import FP32
from dualeval.world import World
from dualeval.world.devices import connect
from tests.engine.test_evaluator import rows
from tests.vehicles.played_device import Played, PlayedEvent, PlayedTask
from tests.vehicles.sessions import evaluate, joined, run_task
from tests.vehicles.tiny import TinyTask

CPU = torch.device("cpu")
SPEEDS = [(), ("computing",), ("copying",), ("computing", "copying")]

_Device = TypeVar("_Device", bound=Played)


class Play(Protocol):
    def __call__(self, device: _Device) -> _Device: ...


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Put a played device behind "cpu", as another accelerator would be added: by one entry."""

    def played(device: _Device) -> _Device:
        monkeypatch.setitem(accelerator.ACCELERATORS, "cpu", lambda _: device)
        copied = looks._copied

        def copied_behind(data: Any) -> Any:
            # torch's own clone is no kernel of the played device, whose streams would run before it.
            for stream in device.streams:
                stream.run(len(stream.work))
            return copied(data)

        monkeypatch.setattr(looks, "_copied", copied_behind)
        return device

    return played


# -- the order of copies, kernels and events -------------------------------------------------------


@pytest.mark.parametrize("prompt", SPEEDS, ids=["late", "kernels early", "copies early", "early"])
def test_the_engine_gives_the_same_through_a_device(
    tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch, prompt: Sequence[str]
) -> None:
    if len(prompt) == 1:  # a thread writes the batches into pinned memory
        monkeypatch.setattr(feed, "_LARGE_BATCH", 1)
    options: dict[str, Any] = {"batch_size": 8, "on_error": "skip", "workers": 1 if prompt else 0}
    expected = evaluate(TinyTask(301, broken=[9, 77]), tmp_path / "cpu", **options)
    device = play(Played(prompt))
    found = evaluate(PlayedTask(301, device, broken=[9, 77]), tmp_path / "played", **options)
    assert found.metrics_digest == expected.metrics_digest
    assert rows(tmp_path / "played") == rows(tmp_path / "cpu")
    assert device.reused > 200


class FirstLogit(PlayedTask):
    """A user's observe, which gives a part of the outputs."""

    def observe(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        pairs = self._played.empty(torch.empty(len(outputs), 2))
        self._played.launch(lambda outputs, pairs: pairs.copy_(outputs[:, :2]), outputs, pairs)
        return {**super().observe(outputs, batch), "first": pairs[:, 0]}


def test_a_last_batch_of_one_sample_gets_through(play: Play) -> None:
    expected = evaluate(TinyTask(33), batch_size=8, workers=0)
    found = evaluate(FirstLogit(33, play(Played())), batch_size=8, workers=0)
    assert found.metrics_digest == expected.metrics_digest


def columns_of(task: TinyTask, batches: int = 12) -> list[dict[str, list[Any]]]:
    """All that a loop does with a device, with three batches under way."""
    found, under_way = [], deque[Any]()
    batches_of = Feed(
        Reader(task.dataset(), task),
        (range(first, first + 6) for first in range(0, 6 * batches, 6)),
        workers=0,
        device=CPU,
    )
    with Compute(task, task.build_model(CPU), CPU, FP32, 1) as compute:
        for data, _ in batches_of:
            under_way.append(compute.start(data))
            if len(under_way) > compute.ahead:
                found.append(under_way.popleft()())
        found += [pending() for pending in under_way]
    return [{name: column.tolist() for name, column in columns.items()} for columns in found]


@pytest.mark.parametrize(
    ("forgets", "prompt"),
    [("wait_event", ("computing",)), ("synchronize computing", ("copying",)), ("keep_for", ("copying",))],
)
def test_each_wait_is_needed(play: Play, forgets: str, prompt: Sequence[str]) -> None:
    """Or else the played device would prove nothing."""
    expected = columns_of(TinyTask(72))
    assert columns_of(PlayedTask(72, play(Played(prompt)))) == expected
    try:
        found = columns_of(PlayedTask(72, play(Played(prompt, [forgets]))))
    except (RuntimeError, IndexError):
        return  # noise where a class number should be
    assert found != expected


class Watched(Played):
    """Writes down what is given to it, and by which thread."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.of_other_threads: list[str] = []
        # Called when a batch is written into pinned memory.
        self.filling: Callable[[], object] = lambda: None

    def note(self, what: str) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        (self.log if is_main else self.of_other_threads).append(what)

    def pinned(self, like: Tensor) -> Tensor:
        if self.current is not self.computing or like.dtype != torch.uint8:
            self.filling()
        return super().pinned(like)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        self.note(f"pack {len(parts)}")
        return super().joined(parts)

    def launch(self, kernel: Callable[..., object], *tensors: Tensor) -> None:
        self.note("launch" if self.current is self.computing else "copy")
        super().launch(kernel, *tensors)

    def record_event(self) -> PlayedEvent:
        event = super().record_event()
        return WatchedEvent(event.device, event.stream, event.behind)


class WatchedEvent(PlayedEvent):
    def synchronize(self) -> None:
        assert isinstance(self.device, Watched)
        self.device.note("wait")
        super().synchronize()


class Reading(PlayedTask):
    """Writes down when it reads."""

    def collate(self, samples: Any) -> Any:
        device = self._played
        assert isinstance(device, Watched)
        device.note("read")
        return super().collate(samples)


# Forward and observe are a kernel each; packing is one, and one copy brings the eight columns back.
LAUNCHED = ["launch", "launch", "pack 8", "launch", "launch"]


def test_a_batch_is_launched_before_the_next_is_waited_for(play: Play) -> None:
    device = play(Watched())
    columns_of(Reading(30, device), 5)
    batch = ["read", "copy", "copy", *LAUNCHED]
    # The host waits once a batch, for the one two behind; at the end for those that are left.
    assert device.log == [*batch * 3, "wait", *batch, "wait", *batch, *["wait"] * 3]
    assert device.of_other_threads == []


def test_large_batches_are_written_by_a_thread_while_others_are_launched(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = columns_of(TinyTask(30), 5)
    monkeypatch.setattr(feed, "_LARGE_BATCH", 1)
    device = play(Watched())

    def fill() -> None:
        """Of the third batch, no sooner than the first is launched: who waits for it there waits in vain."""
        if len(device.of_other_threads) == 4:
            while device.log.count("launch") < 4:
                assert ticks.acquire(timeout=20)

    ticks = threading.Semaphore(0)
    note = device.note

    def ticking(what: str) -> None:
        note(what)
        ticks.release()

    monkeypatch.setattr(device, "note", ticking)
    device.filling = fill
    assert columns_of(Reading(30, device), 5) == expected
    assert device.of_other_threads == ["copy"] * 10
    batch = ["read", *LAUNCHED]
    assert device.log == ["read", *batch * 3, "wait", *batch, "wait", *LAUNCHED, *["wait"] * 3]
    assert not [each for each in threading.enumerate() if each.name.startswith("dualeval-upload")]


def test_a_batch_waits_for_its_own_copies_alone() -> None:
    device = Played()
    uploads = Uploads(device)
    first, _ = (uploads.begin(torch.full((3,), number)) for number in range(2))
    there = uploads.hand_over(first)
    [copies] = [stream for stream in device.streams if stream is not device.computing]
    device.computing.run(len(device.computing.work))
    assert there.tolist() == [0] * 3 and (copies.done, len(copies.work)) == (1, 2)


@pytest.mark.parametrize("large", [1, 1 << 20], ids=["thread", "no thread"])
def test_the_batches_on_a_device_are_few(play: Play, monkeypatch: pytest.MonkeyPatch, large: int) -> None:
    monkeypatch.setattr(feed, "_LARGE_BATCH", large)
    device, most = play(Played(["computing", "copying"])), 0

    class Counting(PlayedTask):
        def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            nonlocal most
            most = max(most, device.held)
            return super().forward(model, batch)

    columns_of(Counting(240, device), 40)
    # Two tensors a batch: of the one that is launched, and, with the thread, of the two that it may be at.
    assert most <= (6 if large == 1 else 2)


@pytest.mark.parametrize("what", ["memory", "other"])
def test_a_thread_that_fails_ends_the_run_with_what_is_finished(
    tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    options: dict[str, Any] = {"batch_size": 8, "workers": 0}
    expected = evaluate(TinyTask(301), tmp_path / "cpu", **options)
    monkeypatch.setattr(feed, "_LARGE_BATCH", 1)
    device = play(Watched())
    error = torch.OutOfMemoryError("CUDA out of memory.") if what == "memory" else RuntimeError("broken")
    task = PlayedTask(301, device)

    def fill() -> None:
        # Of the batch with sample 100, or of the one before, which may be written when it is read.
        if threading.current_thread() is not threading.main_thread() and 100 in task.dataset().reads:
            raise error

    device.filling = fill
    says = r"out of memory on .* with --batch-size 8: CUDA out of memory" if what == "memory" else "broken"
    with pytest.raises(DualevalError if what == "memory" else RuntimeError, match=says):
        evaluate(task, tmp_path / "out", **options)
    # The status line's own thread, which a test before may have begun, ends within its next drawing.
    names = {each.name for each in threading.enumerate()} - {"dualeval-status"}
    assert not [name for name in names if name.startswith("dualeval-")]
    device.filling = lambda: None
    found = evaluate(PlayedTask(301, device), tmp_path / "out", **options)
    assert found.metrics_digest == expected.metrics_digest
    # All but the two that were under way; a chunk is a batch here.
    assert found.chunks["resumed"] in (9, 10)


@pytest.mark.parametrize("large", [1, 1 << 20], ids=["thread", "no thread"])
def test_a_batch_that_cannot_be_read_loses_none_before_it(
    tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    monkeypatch.setattr(feed, "_LARGE_BATCH", large)
    device, breaks = play(Played()), [True]

    class Breaking(PlayedTask):
        def collate(self, samples: Any) -> Any:
            if breaks and 100 in self.dataset().reads:
                raise ValueError("cannot be collated")
            return super().collate(samples)

    options: dict[str, Any] = {"batch_size": 8, "workers": 0}
    with pytest.raises(ValueError, match="cannot be collated"):
        evaluate(Breaking(301, device), tmp_path / "out", **options)
    breaks.clear()
    # Of 12 all but the two that were computed; with the thread it is no more.
    assert evaluate(Breaking(301, device), tmp_path / "out", **options).chunks["resumed"] == 10


class Failing(Mean):
    """Counts the first batch, and fails at the first fold of more."""

    def update(self, ledger: Tensor, columns: Any) -> None:
        if len(columns["loss"]) > 8:
            raise ValueError(f"{threading.current_thread().name}: the metric's own")
        super().update(ledger, columns)


class FailingTask(PlayedTask):
    def metrics(self) -> list[Any]:
        return [Failing("loss")]


@pytest.mark.parametrize("writes", [True, False])
def test_a_fold_that_fails_in_its_thread_ends_the_run(
    tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    monkeypatch.setattr(recorder, "FLUSH_ROWS", 16)
    task = FailingTask(301, play(Played()))
    with pytest.raises(ValueError, match="dualeval-journal: the metric's own"):
        evaluate(task, tmp_path / "out" if writes else None, batch_size=8, workers=0)
    # The next chunk finds it, or the one behind that: no batch is computed in vain for long.
    assert max(task.dataset().reads) < 80
    # The status line's own thread, which a test before may have begun, ends within its next drawing.
    names = {each.name for each in threading.enumerate()} - {"dualeval-status"}
    assert not [name for name in names if name.startswith("dualeval-")]


def test_a_fold_in_its_thread_is_as_in_the_callers(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric that asks for "cuda" gets the rank's; and one that computes with decimals, their precision."""
    monkeypatch.setattr(recorder, "FLUSH_ROWS", 16)
    current, met = threading.local(), set()

    class Current(Played):
        @contextmanager
        def as_current(self) -> Iterator[None]:
            current.device = self
            yield
            del current.device

    class Noting(Mean):
        def update(self, ledger: Tensor, columns: Any) -> None:
            met.add((threading.current_thread().name, hasattr(current, "device"), decimal.getcontext().prec))
            super().update(ledger, columns)

    class NotingTask(PlayedTask):
        def metrics(self) -> list[Any]:
            return [Noting("loss")]

    device = play(Current())
    with decimal.localcontext(prec=50):
        evaluate(NotingTask(60, device), batch_size=8, workers=0, guest=True)
    assert met == {("MainThread", True, 50), ("dualeval-journal", True, 50)}


def test_a_stop_keeps_the_chunk_in_hand_and_leaves_the_next(
    tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"batch_size": 8, "workers": 0}
    expected = evaluate(TinyTask(301), tmp_path / "cpu", **options)
    monkeypatch.setattr(feed, "_LARGE_BATCH", 1)
    device = play(Watched())
    with connect(None, World.alone(), "cpu") as backend, joined(backend) as control:
        stops = ["SIGTERM"]

        class Stopping(PlayedTask):
            def collate(self, samples: Any) -> Any:
                if stops and 100 in self.dataset().reads:
                    control.stop(stops.pop())
                return super().collate(samples)

        task, run_options = Stopping(301, device), RunOptions(out=tmp_path / "out", **options)
        with pytest.raises(Stopped, match="SIGTERM"):
            run_task(task, backend, control, run_options)
    # The status line's own thread, which a test before may have begun, ends within its next drawing.
    names = {each.name for each in threading.enumerate()} - {"dualeval-status"}
    assert not [name for name in names if name.startswith("dualeval-")]
    # The stop came as batch 12 was read, while batch 11 was to be launched: that is the last one.
    assert max(task.dataset().reads) == 103
    found = evaluate(Stopping(301, device), tmp_path / "out", **options)
    assert found.chunks["resumed"] == 12 and found.metrics_digest == expected.metrics_digest


@pytest.mark.parametrize("guest", [True, False])
def test_a_guests_device_is_current_while_it_computes(play: Play, guest: bool) -> None:
    """Of a caller that has not chosen one, GPU 0 is current on every rank."""
    log: list[str] = []

    class Current(Played):
        @contextmanager
        def as_current(self) -> Iterator[None]:
            is_main = threading.current_thread() is threading.main_thread()
            log.extend(["in"] * is_main)
            yield
            log.extend(["out"] * is_main)

    class Noting(PlayedTask):
        def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            log.append("forward")
            return super().forward(model, batch)

    evaluate(Noting(60, play(Current())), batch_size=20, guest=guest)
    assert log[0] == ("in" if guest else "forward") and {*log[1:-1]} == {"forward"}
    assert log[-1] == ("out" if guest else "forward")


# -- memory ----------------------------------------------------------------------------------------


def test_a_column_of_an_earlier_batch_stays() -> None:
    device = Played(["computing"])
    pending = [start_download(device, {"x": torch.full((5,), number)}) for number in range(8)]
    assert [wait()["x"].tolist() for wait in pending] == [[number] * 5 for number in range(8)]


def test_a_pending_batch_holds_nothing_on_the_device() -> None:
    device, pending = Played(), []
    for shape in ((8, 10), (8,)):
        given = {"logits": device.empty(torch.empty(shape)), "target": device.empty(torch.empty(8).long())}
        columns = given if len(shape) == 1 else LogitColumns(given, 5, (), any_label=False)
        pending.append(start_download(device, columns))
        del given, columns
    # The packed bytes of each are free again, too, once their copies are queued.
    assert device.held == 0 and len(pending) == 2


class Pinned(Tensor):
    def is_pinned(self, *_: Any) -> bool:
        return True


def test_a_column_on_the_host_is_that_of_its_batch() -> None:
    device = Played()
    device.device = torch.device("meta")  # so that a CPU's tensors are not the device's
    memory, arriving = torch.zeros(3), torch.zeros(3).as_subclass(Pinned)
    pending = []
    for number in range(3):
        memory.fill_(number)
        pending.append(start_download(device, {"x": memory, "y": arriving}))
    arriving.fill_(7)  # the end of a copy of the user's own, which was begun before
    assert [wait()["x"].tolist() for wait in pending] == [[number] * 3 for number in range(3)]
    assert pending[0]()["y"].tolist() == [7] * 3


TENSORS = {
    "float32": torch.rand(3, 4),
    "bfloat16": torch.rand(3, 4).bfloat16(),
    "complex": torch.randn(2, dtype=torch.complex64).conj(),
    "bool": torch.tensor([True, False, True]),
    "one number": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "channels last": torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "transposed": torch.rand(3, 4).t(),
    "expanded": torch.rand(3, 1).expand(3, 4),
    "part": torch.rand(6, 8)[::2, 1:7:3],
    "column of one row": torch.rand(1, 5)[:, 0],
    "column of no row": torch.rand(4, 2)[4:, 0],
    "needs a gradient": torch.rand(3, requires_grad=True),
    "negated": torch._neg_view(torch.rand(3)),
    "imaginary": torch.randn(2, dtype=torch.complex64).conj().imag,
}


def test_tensors_keep_bytes_shapes_and_order_in_memory() -> None:
    device = Played(["copying"])
    up = Uploads(device).start(TENSORS)
    down = start_download(device, TENSORS)()
    for name, tensor in TENSORS.items():
        for found in (up[name], down[name]):
            assert isinstance(found, Tensor)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor), name
            if tensor.numel() > 1:
                assert found.stride() == torch.empty_like(tensor).stride(), name


def test_a_device_orders_its_batches_by_itself(play: Play) -> None:
    assert usable_threads(TinyTask(1), nn.Linear(2, 2), CPU, 4, 100) == 4
    play(Played())
    assert usable_threads(TinyTask(1), nn.Linear(2, 2), CPU, 4, 100) == 1
