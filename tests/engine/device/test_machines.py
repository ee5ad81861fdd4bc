"""What was computed where: journal files name their machine, and mixed results say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dualeval.engine.device.machines import chunks_by_machine, is_same
from dualeval.engine.folder import recorder
from dualeval.engine.job import agreement
from dualeval.errors import UsageError
from tests.engine.checks.test_replay import played_machine
from tests.engine.folder.test_resume import begin
from tests.engine.test_evaluator import evaluate
from tests.vehicles.tiny import TinyTask

SAMPLES = 400
BATCH = 10


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(recorder, "FLUSH_ROWS", 50)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    begin(tmp_path / "out")
    return tmp_path / "out"


def go_on(out: Path, **options: Any) -> Any:
    return evaluate(TinyTask(SAMPLES), out, batch_size=BATCH, **options)


def test_one_machine_is_homogeneous(begun: Path) -> None:
    result = go_on(begun)
    assert result.homogeneous
    [machine] = result.machines
    assert machine["chunks"] == 40
    assert not [warning for warning in result.warnings if "machine" in warning]


@pytest.mark.parametrize("change", [{"model": "another"}, {"bits": "0123"}, {"cpu_capability": "DEFAULT"}])
def test_other_bits_go_on_and_are_not_comparable(
    begun: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    from dualeval.report.table import print_result

    played_machine(monkeypatch, **change)
    result = go_on(begun)
    assert not result.homogeneous
    assert [machine["chunks"] for machine in result.machines] == [23, 17]
    assert any("cannot be compared" in warning for warning in result.warnings)
    assert json.loads((begun / "result.json").read_text())["homogeneous"] is False
    print_result(result)
    assert "not comparable: 2 kinds of machine" in capsys.readouterr().out
    assert go_on(begun).earlier


@pytest.mark.parametrize("finished", [False, True])
def test_another_kind_of_machine_is_refused_and_can_be_mixed(
    begun: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    if finished:
        go_on(begun)
    played_machine(monkeypatch, versions={"torch": "1.13"})
    with pytest.raises(UsageError) as caught:
        go_on(begun)
    assert "versions.torch: 2." in str(caught.value)
    assert "1.13 now" in str(caught.value)
    assert "--mix-machines" in str(caught.value)
    result = go_on(begun, mix_machines=True)
    assert result.homogeneous == finished
    assert result.replay == "within tolerance" or result.replay == "same bits"


def test_another_device_is_refused(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played_machine(monkeypatch, device="cuda")
    with pytest.raises(UsageError, match="device: cpu there, cuda now"):
        go_on(begun)


def test_a_result_that_names_no_cublas_yet_is_of_the_same_machine() -> None:
    old = {"model": "H100", "bits": "1"}
    new, other = ({**old, "runtime": {"cublas": version}} for version in ("13.1.1", "12.8.4"))
    assert is_same(old, new) and is_same({**new, "chunks": 3}, old)
    assert (
        not is_same(new, other) and not is_same(new, {**old, "bits": "2"}) and not is_same(old, {"bits": "1"})
    )
    assert chunks_by_machine([(old, 1), (new, 2)]) == [{**old, "chunks": 3}]
    assert len(chunks_by_machine([(new, 1), (other, 2)])) == 2


def test_a_result_is_resumed_on_the_machine_that_now_says_more(
    begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played_machine(monkeypatch, runtime={"cublas": "13.1.1"})
    result = go_on(begun)
    assert result.homogeneous and result.replay == "same bits"


def test_a_patched_library_is_another_kind(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same version, and with other source: as somebody's own build of it."""
    real = vars(agreement)["job_identity"]

    def patched(*args: Any) -> dict[str, Any]:
        return {**real(*args), "libraries": {"torch": "0123"}}

    monkeypatch.setattr(agreement, "job_identity", patched)
    with pytest.raises(UsageError, match=r"libraries\.torch: \S+ [0-9a-f]{16} there, 0123 now"):
        go_on(begun)
    assert not go_on(begun, mix_machines=True).homogeneous
