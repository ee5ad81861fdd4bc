"""How a run that was stopped says what to type."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualeval.engine.end.process import how_to_resume


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
    out = "" if named is None else f", with --out {named},"
    assert how_to_resume(Path(folder)) == f"the same command again{out} to resume"


def test_no_folder_no_name() -> None:
    assert how_to_resume(None) == "the same command again to resume"
