"""A played accelerator: the CPU behind ``engine.accelerator``, with late streams and memory handed on.

It keeps to what CUDA promises, and to no more. Work that the host gives a stream runs later: as late as can
be (when the host waits for an event behind it, or another stream does), or at once for the streams in
``prompt``. Fresh memory holds noise. Memory that nobody holds any more is given to whoever asks next in the
same stream, unless another stream was named that still works with it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.engine.device.accelerator import Host
from tests.vehicles.tiny import CLASSES, TinyTask

NOISE = 0x51


class PlayedStream:
    """Work in the order given; ``done`` of it has run."""

    def __init__(self, device: Played, name: str) -> None:
        self._device = device
        self.name = name
        self.work: list[Callable[[], None]] = []
        self.done = 0
        self._outer: list[PlayedStream] = []

    def give(self, work: Callable[[], None]) -> None:
        self.work.append(work)
        if self.name in self._device.prompt:
            self.run(len(self.work))

    def run(self, until: int) -> None:
        while self.done < until:
            self.work[self.done]()
            self.done += 1

    def wait_event(self, event: PlayedEvent) -> None:
        if "wait_event" not in self._device.forgets:
            self.give(lambda: event.stream.run(event.behind))

    def record_event(self) -> PlayedEvent:
        return PlayedEvent(self._device, self, len(self.work))

    def __enter__(self) -> PlayedStream:
        self._outer.append(self._device.current)
        self._device.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self._device.current = self._outer.pop()


@dataclass
class PlayedEvent:
    device: Played
    stream: PlayedStream
    behind: int

    def synchronize(self) -> None:
        if f"synchronize {self.stream.name}" not in self.device.forgets:
            self.stream.run(self.behind)


@dataclass(eq=False)
class _Block:
    """A piece of the device's memory, and the streams that were named for it."""

    memory: Tensor
    stream: PlayedStream
    named: set[int] = field(default_factory=set)
    # Until when it must not be given on: stream and its amount of work.
    needed: list[tuple[PlayedStream, int]] = field(default_factory=list)


class Played(Host):
    """The played device."""

    is_host = False
    batches_ahead = 2

    def __init__(self, prompt: Sequence[str] = (), forgets: Sequence[str] = ()) -> None:
        super().__init__(torch.device("cpu"))
        self.prompt = frozenset(prompt)
        self.forgets = frozenset(forgets)
        self.computing = PlayedStream(self, "computing")
        # A thread's current stream is its own.
        self._of_thread = threading.local()
        self.streams = [self.computing]
        self.reused = 0
        self._blocks: dict[int, _Block] = {}
        self._given_back: list[_Block] = []

    @property
    def current(self) -> PlayedStream:
        found: PlayedStream = getattr(self._of_thread, "stream", self.computing)
        return found

    @current.setter
    def current(self, stream: PlayedStream) -> None:
        self._of_thread.stream = stream

    @property
    def held(self) -> int:
        """Tensors of the device that somebody holds."""
        return len(self._blocks)

    def new_stream(self) -> PlayedStream:
        self.streams.append(PlayedStream(self, "copying"))
        return self.streams[-1]

    def current_stream(self) -> PlayedStream:
        return self.current

    def record_event(self) -> PlayedEvent:
        return PlayedEvent(self, self.current, len(self.current.work))

    def pinned(self, like: Tensor) -> Tensor:
        like = torch.empty_like(like, device="meta", requires_grad=False)
        return _view(torch.full((like.numel() * like.itemsize,), NOISE, dtype=torch.uint8), like)

    def empty(self, like: Tensor) -> Tensor:
        block = self._block(like.numel() * like.itemsize)
        found = _view(block.memory, like)
        self._blocks[id(found)] = block
        weakref.finalize(found, self._give_back, id(found)).atexit = False
        return found

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        whole = self.empty(torch.empty(sum(map(len, parts)), dtype=torch.uint8))
        self.launch(lambda *parts: torch.cat(parts[:-1], out=parts[-1]), *parts, whole)
        return whole

    def start_copy(self, source: Tensor, target: Tensor) -> None:
        self.launch(lambda source, target: target.copy_(source), source, target)

    def keep_for(self, tensor: Tensor, stream: Any) -> None:
        if "keep_for" not in self.forgets:
            self._blocks[id(tensor)].named.add(self.streams.index(stream))

    def launch(self, kernel: Callable[..., object], *tensors: Tensor) -> None:
        """Have the current stream run a kernel, which holds the tensors' memory no longer than CUDA's do."""
        memory = [_same_memory(tensor) for tensor in tensors]

        def run() -> None:
            with torch.inference_mode():
                kernel(*memory)

        self.current.give(run)

    def _block(self, size: int) -> _Block:
        for block in self._given_back:
            if (
                block.memory.numel() == size
                and block.stream is self.current
                and all(stream.done >= behind for stream, behind in block.needed)
            ):
                self._given_back.remove(block)
                self.reused += 1
                return _Block(block.memory, block.stream)
        return _Block(torch.full((size,), NOISE, dtype=torch.uint8), self.current)

    def _give_back(self, key: int) -> None:
        block = self._blocks.pop(key)
        block.needed = [(self.streams[number], len(self.streams[number].work)) for number in block.named]
        self._given_back.append(block)


def _view(memory: Tensor, like: Tensor) -> Tensor:
    return memory.view(like.dtype).as_strided(like.shape, like.stride())


def _same_memory(tensor: Tensor) -> Tensor:
    found = torch.empty(0, dtype=tensor.dtype)
    found.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return found.conj() if tensor.is_conj() else found


class PlayedTask(TinyTask):
    """The tiny task with kernels of the played device: what forward and observe give is not there yet."""

    def __init__(self, count: int, device: Played, broken: Sequence[int] = ()) -> None:
        super().__init__(count, broken)
        # Not the device itself, which the look would put back with all that the task holds.
        self._device = weakref.ref(device)

    @property
    def _played(self) -> Played:
        device = self._device()
        assert device is not None
        return device

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        features = batch["features"]
        logits = self._played.empty(torch.empty(len(features), CLASSES))
        self._played.launch(lambda features, logits: logits.copy_(model(features)), features, logits)
        return logits

    def observe(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        shapes = super().observe(torch.zeros_like(outputs), {"targets": torch.zeros(len(outputs)).long()})
        columns = {name: self._played.empty(shape.contiguous()) for name, shape in shapes.items()}

        def kernel(outputs: Tensor, targets: Tensor, *found: Tensor) -> None:
            made = TinyTask.observe(self, outputs, {"targets": targets})
            for column, memory in zip(made.values(), found, strict=True):
                memory.copy_(column)

        self._played.launch(kernel, outputs, batch["targets"], *columns.values())
        return columns
