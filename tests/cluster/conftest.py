"""The cluster that all of these tests run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Cluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """Two hosts with sshd and Slurm: ``launch(cluster.on("h0", [...]), variables=cluster.variables)``."""
    with Cluster() as cluster:
        yield cluster
