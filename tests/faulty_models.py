"""Models that go wrong where a test says so: ``--model tests.faulty_models:fashion_cnn``.

The variable DUALEVAL_TEST_FAULT holds words "KIND RANK BATCH": the rank (or "all") whose forward does it, and the
first of its batches that does. The model itself is the embedded job's, and so are its bits.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time

import torch
from torch import Tensor

from dualeval.launch import detect
from dualeval.models.fashion_cnn import FashionCNN

FAULT = "DUALEVAL_TEST_FAULT"
FOREVER_S = 3600


def _hold_the_lock() -> None:
    # PyDLL keeps the interpreter's lock for as long as the C function runs.
    ctypes.PyDLL(None).sleep(FOREVER_S)


def _raise() -> None:
    raise RuntimeError("the model broke")


KINDS = {
    "stall": lambda: time.sleep(FOREVER_S),
    "slow": lambda: time.sleep(0.05),
    "long": lambda: time.sleep(10),
    "lock": _hold_the_lock,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raise": _raise,
    "memory": lambda: torch.empty(1 << 55, dtype=torch.uint8),
}


class Faulty(FashionCNN):
    """The embedded job's model, and a fault."""

    def __init__(self) -> None:
        super().__init__()
        kind, rank, batch = os.environ.get(FAULT, "slow none 0").split()
        self._fault = KINDS[kind]
        own = str(detect(os.environ).rank)
        self._batch = int(batch) if rank in ("all", own) else None
        self._seen = 0

    def forward(self, images: Tensor) -> Tensor:
        self._seen += 1
        # The first is the trial that the task makes.
        if self._batch is not None and self._seen - 1 > self._batch:
            self._fault()
        return super().forward(images)


def fashion_cnn() -> Faulty:
    return Faulty()
