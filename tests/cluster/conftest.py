"""The cluster that all of these tests run on, and what is typed on its first host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster
from tests.conftest import Finished, Launch

# Runs words on h0, in the test's own folder.
Typed = Callable[..., Finished]


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """Two hosts with sshd and Slurm: ``launch(cluster.on("h0", [...]), variables=cluster.variables)``."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def typed(cluster: Cluster, launch: Launch, tmp_path: Path) -> Typed:
    """Type a command on h0: ``typed(*words, timeout=90, **variables)``."""

    def run(*words: str | Path, timeout: float = 90, **variables: str) -> Finished:
        environ = {**cluster.variables, **variables}
        return launch(cluster.on("h0", words), variables=environ, cwd=tmp_path, timeout=timeout)

    return run
