"""The README's commands for Slurm work as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster
from tests.cluster.test_launchers import Batch
from tests.conftest import Launch
from tests.docs.test_readme import commands, needs_slurm

pytestmark = pytest.mark.needs("cluster")


@pytest.mark.parametrize("command", [text for text in commands() if needs_slurm(text)])
def test_every_way_to_start_runs(cluster: Cluster, launch: Launch, tmp_path: Path, command: str) -> None:
    # One rank for every four: this is about the words, and each rank costs a second of a core.
    words = ["1" if word == "4" else word for word in shlex.split(command)]
    if command.startswith("srun"):
        done = launch(cluster.on("h0", words), variables=cluster.variables, cwd=tmp_path, timeout=90).ok()
        said = done.stdout
    else:
        ended = Batch(cluster, launch, tmp_path)(shlex.join(words))
        assert ended.state == "COMPLETED"
        said = ended.log
    assert re.search(r"([0-9,]+) of \1 evaluated|first 5,000 of 10,000", said)
