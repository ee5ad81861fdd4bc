"""The seconds of the end: rows of benchmarks/ends.py, which has the whole table and says what is wanted."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="module")
def ends() -> Iterator[Any]:
    """The script, by its path: a package of its name may be installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        spec = importlib.util.spec_from_file_location("benchmark_of_ends", ROOT / "benchmarks/ends.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def of_ends(ends: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Plays rows in a usual folder: none with a full disk."""
    folder: Path = tmp_path_factory.mktemp("ends")
    (folder / "disk-0").mkdir()
    return ends.Player(folder, 1, None)


@pytest.mark.parametrize(
    ("row", "code", "state"),
    [
        # The state stayed "running": rank 0 had opened the folder, and nobody was to write there yet.
        ("variables 2 opening error 1 0", [1, 1], "failed"),
        ("variables 1 ledger SIGTERM 0 0", [75], "stopped"),
        pytest.param("variables 1 metrics error 0 0", [1], "failed", marks=pytest.mark.long),
        pytest.param("variables 1 predictions SIGKILL 0 0", [-9], "failed", marks=pytest.mark.long),
        # The process ended before the table and the tracker: with 0, and without a word of them.
        ("variables 1 result SIGTERM 0 1.5", [0], "done"),
        pytest.param("variables 1 page error 0 0", [0], "done", marks=pytest.mark.long),
        pytest.param("variables 1 loggers error 0 0", [0], "done", marks=pytest.mark.long),
        pytest.param("variables 1 exit SIGINT 0 0", [0], "done", marks=pytest.mark.long),
        pytest.param("variables 2 ledger SIGINT 1 0", [75, 75], "stopped", marks=pytest.mark.long),
        # It said "None came while the result was being written".
        ("variables 2 store SIGKILL 1 1.5", [0, -9], "done"),
        ("nproc 2 store SIGTERM 1 0", [0], "done"),
    ],
)
def test_a_run_that_is_hit_in_its_end_has_code_and_state_of_its_row(
    ends: Any, of_ends: Any, row: str, code: list[int], state: str
) -> None:
    played = of_ends.play(ends.Case.read(row))
    assert (played["problems"], played["codes"], played["state"]) == ([], code, state), played


@pytest.mark.long
@pytest.mark.needs("mpi", "horovod")
@pytest.mark.parametrize("launcher", ["nproc", "torchrun", "horovodrun", "mpirun"])
def test_drawn_rows_of_each_launcher_have_no_problems(ends: Any, of_ends: Any, launcher: str) -> None:
    drawn = [
        case for case in ends.cases([launcher], [2, 3], [*ends.STEPS], 0.05, 7) if case.fault != ends.DISK
    ]
    assert drawn
    rows = [of_ends.play(case) for case in drawn]
    assert [row for row in rows if row["problems"]] == []


def test_the_page_has_a_cell_for_every_row(ends: Any) -> None:
    case = ends.Case.read("variables 2 status SIGKILL 1 1.5")
    row = {**vars(case), "codes": [0, -9], "state": "done", "seconds": 1.0, "kinds": ["lost rank"]}
    row |= {"traceback": False, "problems": ["hangs"]}
    page = ends.report([row], [case], 1)
    assert "| status | 0/-9 done 1.0 **!!** |" in page and "`variables 2 status SIGKILL 1 1.5`: hangs" in page


def test_each_wrong_ending_is_found(ends: Any) -> None:
    """A run that says 0 without a result, leaves a half, or ends with a traceback, is found."""
    case = ends.Case.read("variables 1 ledger SIGTERM 0 0")
    again = {"codes": [0], "state": "done", "result": "whole", "left": []}
    row: dict[str, Any] = {"hit": True, "codes": [75], "state": "stopped", "result": "none", "again": again}
    row |= {"kinds": ["stopped by"], "traceback": False, "processes_left": False, "left": [], "shown": False}
    assert ends.problems_of(case, row) == []
    changes: list[dict[str, Any]] = [
        {"codes": [0]},
        {"codes": [1]},
        {"codes": [None]},
        {"state": "running"},
        {"result": "damaged"},
        {"traceback": True},
        {"kinds": []},
        {"left": ["predictions.parquet.*.partial"]},
        {"again": {**again, "codes": [2]}},
        {"hit": False},
    ]
    for change in changes:
        assert ends.problems_of(case, {**row, **change}), change
