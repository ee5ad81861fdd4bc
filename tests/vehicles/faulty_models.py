"""Models that go wrong where a test says so: ``--model tests.vehicles.faulty_models:fashion_cnn``.

The variable DUALEVAL_TEST_FAULT holds words "KIND RANK NUMBER", and more of them after a semicolon: the rank
(or "all") that does it, and how many of its batches come before; "slow:0.02" is slow by so many seconds.
"write", "fsync" and "rename" end the process at that point of a journal file, with so many files before. The
model itself is the embedded job's, and so are its bits.

DUALEVAL_TEST_FLUSH_S is how often a journal file is written.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.engine.folder import recorder
from dualeval.engine.folder.layout import SUFFIX
from dualeval.launch import detect
from dualeval.models.sources.fashion_cnn import FashionCNN
from dualeval.vision_library import torchvision

FAULT = "DUALEVAL_TEST_FAULT"
FLUSH_S = "DUALEVAL_TEST_FLUSH_S"
FOREVER_S = 3600
COMPUTE_S = 5.0


def _hold_the_lock() -> None:
    # PyDLL keeps the interpreter's lock for as long as the C function runs.
    ctypes.PyDLL(None).sleep(FOREVER_S)


def _raise() -> None:
    raise RuntimeError("the model broke")


def _interrupt() -> None:
    raise KeyboardInterrupt


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_computed = threading.Event()


def _compute() -> None:
    """Once, for longer than the tests' heartbeats take."""
    end = time.monotonic() + COMPUTE_S
    while not _computed.is_set() and time.monotonic() < end:
        torch.ones(256, 256) @ torch.ones(256, 256)
    _computed.set()


KINDS: dict[str, Callable[[], object]] = {
    "stall": lambda: time.sleep(FOREVER_S),
    "slow": lambda: time.sleep(0.05),
    "long": lambda: time.sleep(10),
    "compute": _compute,
    "lock": _hold_the_lock,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": _kill,
    "raise": _raise,
    "exit:0": lambda: sys.exit(0),
    "exit:3": lambda: sys.exit(3),
    "interrupt": _interrupt,
    "memory": lambda: torch.empty(1 << 55, dtype=torch.uint8),
}
POINTS = ("write", "fsync", "rename")


def began(kind: str) -> str:
    """What a rank prints when its fault begins, but for the slow ones."""
    return f"fault: {kind}"


def _fault_of(kind: str) -> Callable[[], object]:
    name, _, seconds = kind.partition(":")
    if kind in KINDS:
        name = kind
    elif seconds:
        assert name == "slow", kind
        return lambda: time.sleep(float(seconds))
    if name == "slow":
        return KINDS[name]

    def fault() -> None:
        # One write: ranks share the stream.
        sys.stderr.write(f"{began(name)}\n")
        sys.stderr.flush()
        KINDS[name]()

    return fault


def _end_at(point: str, number: int) -> None:
    """Have this process end at a point of its journal file of that number, from 0; half of it written."""
    seen = itertools.count()
    opened, fsync, replace = Path.open, os.fsync, Path.replace

    def is_the_one(path: Path) -> bool:
        return path.name.endswith(f"{SUFFIX}.partial") and next(seen) >= number

    def torn_open(path: Path, mode: str = "r", *options: Any, **named: Any) -> Any:
        file = opened(path, mode, *options, **named)
        if mode == "wb" and is_the_one(path):
            file.write(b"DUALEVL3, and a part of what comes behind it")
            file.flush()
            _kill()
        return file

    def no_fsync(descriptor: int) -> None:
        if is_the_one(Path(f"/proc/self/fd/{descriptor}").readlink()):
            _kill()
        fsync(descriptor)

    def no_replace(path: Path, target: Path) -> Path:
        if is_the_one(path):
            _kill()
        return replace(path, target)

    {
        "write": lambda: setattr(Path, "open", torn_open),
        "fsync": lambda: setattr(os, "fsync", no_fsync),
        "rename": lambda: setattr(Path, "replace", no_replace),
    }[point]()


# Of this process: (batches that come before, what happens). No part of the model, which is the same job with
# any.
_faults: list[tuple[int, Callable[[], object]]] = []


class Faulty(FashionCNN):
    """The embedded job's model, and its faults."""

    def __init__(self) -> None:
        super().__init__()
        own = str(detect(os.environ).rank)
        _faults.clear()
        # Not a number: what a model holds of these is part of its identity.
        self._seen = itertools.count(1)
        for words in filter(None, os.environ.get(FAULT, "").split(";")):
            kind, rank, number = words.split()
            if rank not in ("all", own):
                continue
            if kind in POINTS:
                _end_at(kind, int(number))
            else:
                _faults.append((int(number), _fault_of(kind)))
        if FLUSH_S in os.environ:
            recorder.FLUSH_EVERY_S = float(os.environ[FLUSH_S])

    def forward(self, images: Tensor) -> Tensor:
        seen = next(self._seen)
        # The trial that the task makes is a copy's.
        for batch, fault in _faults:
            if seen > batch:
                fault()
        return super().forward(images)


def fashion_cnn() -> Faulty:
    return Faulty()


class Means(nn.Module):
    """The brightest channel: a model that takes no time, for loaders that stand still."""

    def __init__(self) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        return images.mean((2, 3))


def means() -> Means:
    # Seconds of an import that would come within the first reading otherwise, and pass for a standstill.
    torchvision()
    return Means()
