"""The README's commands for Slurm work as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster
from tests.conftest import ROOT, Launch
from tests.test_readme import commands, needs_slurm

pytestmark = pytest.mark.needs("cluster")


@pytest.mark.parametrize("command", [text for text in commands() if needs_slurm(text)])
def test_every_way_to_start_runs(cluster: Cluster, launch: Launch, tmp_path: Path, command: str) -> None:
    # As in a checkout, but with a folder of its own for what is written there.
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")
    # One rank for every four: this is about the words, and each rank costs a second of a core.
    words = ["1" if word == "4" else word for word in shlex.split(command)]
    line = cluster.on("h0", words)
    with launch.started(line, variables=cluster.variables, cwd=tmp_path) as process:
        stdout, stderr = process.communicate(timeout=90)
        if not command.startswith("srun"):
            [job] = re.findall(r"job (\d+)", stdout)
            assert cluster.wait_for_job(job, 90) == "COMPLETED"
            stdout += (tmp_path / f"dualeval-{job}.log").read_text("utf-8")
    assert process.returncode == 0, stderr
    assert re.search(r"([0-9,]+) of \1 evaluated", stdout)
