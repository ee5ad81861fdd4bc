"""The example of the collectives runs under every launcher, and stands in docs/backends.md as it is."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Launch
from tests.launchers import start, way

EXAMPLE = ROOT / "examples/mean_of_shards.py"
SAID = {1: "first: 1 ranks, 3 losses, mean 1.0000", 2: "first: 2 ranks, 7 losses, mean 1.2857"}


@pytest.mark.parametrize(
    ("launcher", "backend", "size"),
    [
        way("torchrun", "torch", 2),
        way("none", "single", 1, long=True),
        way("mpirun", "mpi", 2, long=True),
        *(way(launcher, "horovod", 2, long=True) for launcher in ("horovodrun", "horovodrun --mpi")),
    ],
)
def test_under_every_launcher(launch: Launch, tmp_path: Path, launcher: str, backend: str, size: int) -> None:
    done = launch([*start(launcher, size), sys.executable, EXAMPLE], cwd=tmp_path).ok()
    assert done.stdout.count(SAID[size]) == 1


def test_the_page_has_it() -> None:
    code = EXAMPLE.read_text("utf-8").partition('"""\n\n')[2]
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/backends.md").read_text("utf-8"), re.DOTALL)
    assert code in blocks
