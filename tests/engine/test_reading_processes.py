"""Reading processes are forked: what they inherit, where they are refused, and how they end."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dualeval.engine.building import automatic_workers
from dualeval.engine.control.plane import open_control_plane
from dualeval.engine.feed import why_not_forked
from dualeval.engine.options import RunOptions
from dualeval.errors import UsageError
from dualeval.world import World
from dualeval.world.devices import connect
from tests.conftest import Launch
from tests.sessions import run_task
from tests.tiny import TinyTask

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


def evaluated(task: TinyTask, **options: Any) -> tuple[Any, list[str]]:
    notes: list[str] = []
    with connect(None, World.alone(), "cpu") as backend:
        control = open_control_plane(backend)
        return run_task(task, backend, control, RunOptions(**options), note=notes.append, cores=2), notes


@pytest.fixture
def set_to(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a way of starting processes the one that the program has chosen, or that Python has by itself."""

    def choose(method: str | None, *, usual: str = "fork") -> None:
        others = [each for each in ("fork", "spawn", "forkserver") if each != usual]
        monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: method)
        monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: [usual, *others])

    return choose


def test_they_inherit_what_cannot_be_pickled() -> None:
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
def test_what_the_program_has_chosen(set_to: Any, method: str | None, usual: str, words: str | None) -> None:
    set_to(method, usual=usual)
    why = why_not_forked()
    assert why is None if words is None else words in str(why)


def test_spawn_is_refused_with_what_to_type(set_to: Any) -> None:
    set_to("spawn")
    with pytest.raises(UsageError, match=rf"^--workers 2: {SPAWN}\. Type --workers 0 \(in Python: workers=0"):
        evaluated(TinyTask(8), workers=2)
    assert evaluated(TinyTask(8), workers=0)[0].samples["evaluated"] == 8


def test_nobody_s_choice_becomes_none_with_a_note(set_to: Any) -> None:
    set_to("spawn")
    assert automatic_workers(Holding(40), TinyTask(40).dataset(), 2) == 0
    result, notes = evaluated(Holding(40))
    assert result.samples["evaluated"] == 40
    assert [note for note in notes if note.startswith("reading processes are forked")]
    _, notes = evaluated(TinyTask(40))
    assert not [note for note in notes if "forked" in note], "this one reads from memory"


def test_systems_where_a_fork_is_not_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert why_not_forked() == "reading processes are forked, which is not safe on darwin"


KILLED = """
import os, signal, threading, torch
from dualeval.engine.feed import Feed, Reader
from tests.tiny import TinyTask

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


def test_they_end_with_the_process_that_they_read_for(tmp_path: Path, launch: Launch) -> None:
    """One that hangs in a read, too."""
    (tmp_path / "killed.py").write_text(KILLED)
    # Fails where a process is left behind.
    assert launch([sys.executable, tmp_path / "killed.py"], timeout=60).returncode == -signal.SIGKILL
