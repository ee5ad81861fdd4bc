"""The engine over several real processes: the same bits, the collectives, and failures that all hear of."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Launch
from tests.vehicles.launchers import start, way
from tests.vehicles.sessions import FILES, evaluate
from tests.vehicles.tiny import TinyTask
from tests.vehicles.workers.engine_worker import ContentsTask, MedianTask

WORKER = ROOT / "tests/vehicles/workers" / "engine_worker.py"
OTHER_WAYS = [("horovodrun", "horovod"), ("mpirun", "horovod"), ("mpirun", "mpi")]
WAYS = [way("torchrun", "torch"), *(way(*names, long=True) for names in OTHER_WAYS)]


def run_ranks(
    launch: Launch,
    scenario: str,
    size: int,
    folder: Path,
    way: tuple[str, str] = ("torchrun", "torch"),
    timeout: float = 120,
) -> list[dict[str, Any]]:
    """Run a scenario of the worker on ``size`` ranks; returns their reports in rank order."""
    launcher, backend = way
    words = [sys.executable, str(WORKER), scenario, str(folder), backend]
    launch([*start(launcher, size), *words], timeout=timeout).ok()
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def wanted() -> str:
    return evaluate(TinyTask(997), batch_size=16).metrics_digest


def test_every_rank_gets_the_same_result(launch: Launch, tmp_path: Path, wanted: str) -> None:
    reports = run_ranks(launch, "together", 3, tmp_path)
    assert reports == 3 * [{"digest": wanted, "homogeneous": True}]


def test_no_collective_in_the_loop_and_one_for_all_metrics(launch: Launch, tmp_path: Path) -> None:
    for report in run_ranks(launch, "collectives", 2, tmp_path):
        assert len(report) == 4
        counts = list(report.values())
        assert counts[0]["_all_reduce"] == 1
        assert [count["in_loop"] for count in counts] == [0, 0, 0, 0]
        assert all(count == counts[0] for count in counts), "the number depends on samples or metrics"


def test_without_a_shared_folder_a_run_goes_on_from_what_rank_0_sees(
    launch: Launch, tmp_path: Path, wanted: str
) -> None:
    first, second = run_ranks(launch, "apart_again", 2, tmp_path)
    assert first["digest"] == second["digest"] == wanted
    assert first["resumed"] == second["resumed"] == 20
    [goes_on, apart] = first["notes"]
    assert "20 of 63 chunks are finished already" in goes_on
    assert apart.startswith("rank 1 of 2 cannot see ")
    assert "lost if it ends early" in apart
    assert second["notes"] == []
    assert first["left"] == FILES
    assert second["left"] == []


def test_failed_samples_of_all_ranks_are_listed(launch: Launch, tmp_path: Path) -> None:
    for name in ("one", "three"):
        (tmp_path / name).mkdir()
    [alone] = run_ranks(launch, "broken", 1, tmp_path / "one")
    first, *others = run_ranks(launch, "broken", 3, tmp_path / "three")
    assert first == alone
    # The errors stay in the journal, from which rank 0 reads them: at 1,000 ranks they would be gigabytes.
    nothing_said = [{**entry, "error": ""} for entry in alone["failed"]]
    assert others == [{**alone, "failed": nothing_said}] * 2
    assert [entry["id"] for entry in alone["failed"]] == ["tiny/5", "tiny/50", "tiny/99"]


@pytest.mark.parametrize(("launcher", "backend"), [*WAYS, way("mpirun", "torch", long=True)])
@pytest.mark.parametrize(
    ("scenario", "message"),
    [("one_fails_in_the_loop", "the last rank broke"), ("one_fails_before_the_loop", "no model here")],
)
def test_all_ranks_hear_of_the_first_failure(
    launch: Launch, tmp_path: Path, scenario: str, message: str, launcher: str, backend: str
) -> None:
    reports = run_ranks(launch, scenario, 3, tmp_path, (launcher, backend))
    assert [report["raised"] for report in reports] == ["PeerError", "PeerError", "DualevalError"]
    assert {(report["message"], report["rank"], report["code"]) for report in reports} == {(message, 2, 1)}


def test_ranks_on_two_machines_say_so(launch: Launch, tmp_path: Path) -> None:
    for report in run_ranks(launch, "two_machines", 2, tmp_path):
        assert report["bits"] == report["mixed"] == {"homogeneous": False, "chunks": [5, 5]}
        assert report["refused"]["code"] == 2
        for words in ("rank 1 on ", "versions.torch: 2.", "1.13 there", "--mix-machines"):
            assert words in report["refused"]["message"]


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        (
            "another_job",
            ["rank 1 on", "samples: 20 on rank 0, 21 here", "Pass the whole data set on every rank"],
        ),
        ("one_id_on_two_ranks", ["2 samples have the id 's0': each sample needs an id of its own"]),
        ("rank_in_the_model", [".drawn: ", "a rank, a time or a random number does not belong there"]),
    ],
)
def test_what_ranks_do_not_share_is_refused_on_all(
    launch: Launch, tmp_path: Path, scenario: str, words: list[str]
) -> None:
    for report in run_ranks(launch, scenario, 2, tmp_path):
        assert report["code"] == 2
        assert all(each in report["message"] for each in words), report
    assert not (tmp_path / "out").exists()


def test_a_data_set_that_reads_the_rank_is_refused_and_no_other(launch: Launch, tmp_path: Path) -> None:
    for report in run_ranks(launch, "reads_rank", 2, tmp_path):
        assert report["evaluated"] == [2, 2, 2, 1]
        assert (report["code"], "sample 0 (index 0) is a different one on rank 1" in report["message"]) == (
            2,
            True,
        )


def test_contents_are_read_once_a_node_and_compared(launch: Launch, tmp_path: Path) -> None:
    task = ContentsTask(300)
    alone = evaluate(task, tmp_path / "alone")
    blocks = [[0, 64], [64, 128], [128, 192], [192, 256], [256, 300]]
    assert task.contents.asked == blocks
    first, second = reports = run_ranks(launch, "contents", 2, tmp_path)
    assert (first["asked"], second["asked"]) == (blocks[::2], blocks[1::2])
    host = socket.gethostname()
    for report in reports:
        assert report["asked_alone"] == blocks
        assert report["contents"] == [alone.data["contents"]] * 2
        assert (report["raised"], report["code"]) == ("UsageError", 2)
        assert f"contents on {host} (rank 1) than on {host} (rank 0)" in report["message"]
        assert "samples 192 to 255 (tiny/192 to tiny/255) differ, and 0 more of 5" in report["message"]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_what_says_which_process_it_is_is_the_same_job_on_any_number(
    launch: Launch, tmp_path: Path, size: int
) -> None:
    """And a rank of another kind, such as that of recall at rank, is another job where it changes."""
    [begun] = run_ranks(launch, "numbered", 1, tmp_path)
    assert begun["message"] == "enough"
    for report in run_ranks(launch, "numbered", size, tmp_path):
        assert report["attributes"] == {"rank": 1, "local_rank": 0, "world_size": 1}
        assert report["replay"] == "same bits"
        assert report["resumed"] > 0
        assert "job.task_attributes.rank: 1 there, 5 now" in report["refused"]


@pytest.mark.parametrize("size", [1, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 3))])
def test_nothing_is_written_without_out(launch: Launch, tmp_path: Path, size: int) -> None:
    expected = evaluate(MedianTask(997, broken=[3, 500, 996]), None, batch_size=16, on_error="skip")
    for report in run_ranks(launch, "nothing_written", size, tmp_path):
        assert report["written"] == []
        assert report["written_with_out"]
        assert report["digests"] == 2 * [expected.metrics_digest]
        assert len(set(report["fingerprints"])) == 1
        assert report["metrics"]["rows"] == 994
        assert (report["failed"], report["folder"]) == (3, None)
