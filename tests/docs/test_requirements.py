"""A test whose requirements are missing is skipped by name, or fails where they are required."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests import requirements


@pytest.mark.parametrize(
    ("required", "outcome", "said"),
    [
        ("", pytest.skip.Exception, "needs mpi: there is no mpirun; type: apt install openmpi-bin"),
        ("horovod", pytest.skip.Exception, "needs mpi: there is no mpirun"),
        ("mpi,horovod", pytest.fail.Exception, "DUALEVAL_REQUIRE has mpi, but there is no mpirun"),
        ("mpy", pytest.exit.Exception, r"DUALEVAL_REQUIRE names \['mpy'\]; it knows"),
    ],
)
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, required: str, outcome: Any, said: str
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("DUALEVAL_REQUIRE", required)
    item: Any = SimpleNamespace(iter_markers=lambda name: [pytest.mark.needs("mpi").mark])
    with pytest.raises(outcome, match=said):
        requirements.check(item)
