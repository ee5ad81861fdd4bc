"""The model of benchmarks/ends.py, ``--model ends_model:net``: a rank of its run comes to harm at the end.

The variable DUALEVAL_ENDS holds a ``Harm``: the step, what happens, the rank, the seconds that rank 0 then
stays in the step, and a folder by which the ranks wait for each other. Each step is the entry of a function
of rank 0, which is wrapped here; another rank waits where it is while rank 0 is in that step.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dualeval import cli
from dualeval.engine import finish
from dualeval.engine.control.plane import ControlPlane
from dualeval.engine.folder.folder import RunFolder
from dualeval.engine.job.run_state import Run
from dualeval.engine.joining import Joined
from dualeval.launch import detect
from dualeval.report.loggers import log
from dualeval.report.page import html, page
from dualeval.report.page.content import PageContent

HARM = "DUALEVAL_ENDS"
TERM, INT, ERROR, KILL, DISK, LAUNCHER = "SIGTERM", "SIGINT", "error", "SIGKILL", "full disk", "launcher"
# What is entered at each step on rank 0, and where another rank is meanwhile. The first is none of the
# end: from there on an end is written down.
_ENDED = finish._Ended
STEPS: dict[str, tuple[tuple[Any, str], tuple[Any, str]]] = {
    "opening": ((RunFolder, "to_message"), (Run, "from_rank_0")),
    "ledger": ((_ENDED, "_reduce"), (_ENDED, "_reduce")),
    "metrics": ((_ENDED, "_with_numbers"), (_ENDED, "_without_numbers")),
    "predictions": ((finish, "write_predictions"), (ControlPlane, "meet")),
    "result": ((RunFolder, "write"), (ControlPlane, "meet")),
    "status": ((RunFolder, "finish"), (ControlPlane, "meet")),
    "lease": ((finish, "let_go"), (finish, "let_go")),
    "page": ((page, "write_page"), (Joined, "leave")),
    "store": ((Joined, "leave"), (Joined, "leave")),
    "loggers": ((log, "send"), (cli, "_end_process")),
    "exit": ((cli, "_end_process"), (cli, "_end_process")),
}
HIT = "hit"
_HERE, _FILLER = "here", "filler"
# The others come to where they wait; and until one that does not come is waited for no longer.
_OTHERS_COME_S, _MOST_S = 0.3, 10.0


@dataclass(frozen=True, kw_only=True)
class Harm:
    """What happens, where, and when."""

    step: str
    fault: str
    rank: int
    stays_s: float
    folder: Path
    disk: Path

    def __str__(self) -> str:
        return "|".join(map(str, vars(self).values()))

    @classmethod
    def read(cls, text: str) -> Harm:
        step, fault, rank, stays_s, folder, disk = text.split("|")
        return cls(
            step=step,
            fault=fault,
            rank=int(rank),
            stays_s=float(stays_s),
            folder=Path(folder),
            disk=Path(disk),
        )


def _await(path: Path) -> None:
    limit = time.monotonic() + _MOST_S
    while not path.exists() and time.monotonic() < limit:
        time.sleep(0.01)


def fill(disk: Path) -> None:
    """Leave no room on a disk."""
    # In small pieces at last: a file of one byte takes a page, and no page is left.
    with (disk / _FILLER).open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def empty(disk: Path) -> None:
    """Make room again."""
    (disk / _FILLER).unlink(missing_ok=True)


def _come_to(harm: Harm, rank: int) -> None:
    """Be at the step: wait for the harm, or come to it."""
    if rank == 0:
        (harm.folder / _HERE).touch()
    else:
        _await(harm.folder / _HERE)
    if rank == harm.rank:
        time.sleep(_OTHERS_COME_S)
        (harm.folder / HIT).write_text(str(time.time()))
        _happen(harm)
    else:
        _await(harm.folder / HIT)
    if rank == 0:
        time.sleep(harm.stays_s)


def _happen(harm: Harm) -> None:
    if harm.fault in (TERM, INT, KILL):
        os.kill(os.getpid(), signal.Signals[harm.fault])
    elif harm.fault == DISK:
        fill(harm.disk)
    elif harm.fault == ERROR and (harm.step, harm.rank) == ("loggers", 0):
        # A tracker's error, which is in a process of its own.
        log._CODE = "raise RuntimeError('injected')"
    elif harm.fault == ERROR:
        raise RuntimeError("injected")


def _wrap(owner: Any, name: str, come: Callable[[], None]) -> None:
    original = getattr(owner, name)
    seen: list[bool] = []

    def wrapped(*arguments: Any, **named: Any) -> Any:
        # The ranks meet several times; the last time, for the result, is the one.
        if not seen and (name != "meet" or named.get("stoppable") is False):
            seen.append(True)
            come()
        return original(*arguments, **named)

    setattr(owner, name, wrapped)


def _prepare() -> None:
    harm, rank = Harm.read(os.environ[HARM]), detect(os.environ).rank
    if rank in (0, harm.rank):
        owner, name = STEPS[harm.step][0 if rank == 0 else 1]
        _wrap(owner, name, lambda: _come_to(harm, rank))


_prepared: list[bool] = []


class Net(nn.Module):
    """Ten classes of the mean pictures: it takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(784, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classes(images.flatten(1))
        return logits


def _plain_page(content: PageContent, limit: int = 0) -> str:
    return "a page"


def net() -> Net:
    # Not at the import: benchmarks/ends.py imports this as well. Once, though a model may be built twice.
    if not _prepared:
        _prepared.append(True)
        # Its pictures take three seconds.
        html.render = _plain_page
        if HARM in os.environ:
            _prepare()
    return Net()
