"""How a run that was stopped says what to type."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dualeval.engine.conclusion import _with_out


@pytest.mark.parametrize(
    ("folder", "named"),
    [
        ("runs/mine", None),
        ("runs/20261122T184226-fdb49fd2", "runs/20261122T184226-fdb49fd2"),
        ("runs/20261122T184226.2-fdb49fd2", "runs/20261122T184226.2-fdb49fd2"),
        ("runs/20261122T184226-several-fdb49fd2/epoch1", "runs/20261122T184226-several-fdb49fd2"),
    ],
)
def test_a_folder_that_nobody_has_named_is_named_to_resume(folder: str, named: str | None) -> None:
    made: Any = SimpleNamespace(path=Path(folder))
    assert _with_out(made) == ("" if named is None else f", with --out {named},")


def test_no_folder_no_name() -> None:
    assert _with_out(None) == ""
