"""The files of a run: synced before the journal goes, checked before a finished run is taken for one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dualeval import atomic_files as whole_files
from dualeval.engine.folder import recorder
from dualeval.errors import DualevalError
from dualeval.result import checksum_of
from tests.engine.folder.test_folder import await_that
from tests.engine.folder.test_resume import begin, go_on
from tests.engine.test_evaluator import evaluate, rows
from tests.vehicles.tiny import TinyTask

SAMPLES = 400


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "FLUSH_ROWS", 50)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (Path.unlink, "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "does not fit its checksum"),
        (lambda path: path.write_bytes(b""), "does not fit its checksum"),
        *((lambda path, at=at: flip(path, at), "does not fit its checksum") for at in (4, 100, 1000, -5)),
    ],
    ids=["gone", "cut", "empty", "flip 4", "flip 100", "flip 1000", "flip -5"],
)
def test_damaged_predictions_are_named_and_made_again(
    tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    first = go_on(tmp_path)
    path = tmp_path / "predictions.parquet"
    before = path.read_bytes()
    damage(path)
    notes: list[str] = []
    again = go_on(tmp_path, note=notes.append)
    assert not [warning for warning in again.warnings if "metrics_digest" in warning]
    assert [note for note in notes if str(path) in note and words in note]
    assert (again.metrics_digest, again.chunks["evaluated_now"]) == (first.metrics_digest, 40)
    assert path.read_bytes() == before
    assert go_on(tmp_path).earlier


def test_a_result_that_is_gone_is_said(tmp_path: Path) -> None:
    go_on(tmp_path)
    (tmp_path / "result.json").unlink()
    notes: list[str] = []
    assert go_on(tmp_path, note=notes.append).chunks["evaluated_now"] == 40
    assert "result.json is missing; all samples are evaluated again" in notes[0]


def test_checksums_are_in_the_result(tmp_path: Path) -> None:
    result = go_on(tmp_path)
    assert result.files == {"predictions.parquet": checksum_of(tmp_path / "predictions.parquet")}


def test_all_is_synced_before_the_journal_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order: the Parquet file's content, its name in the folder, then the first file is unlinked."""
    fsync, unlink, replace = os.fsync, Path.unlink, Path.replace
    calls: list[tuple[str, str]] = []

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        calls.append(("fsync", Path(f"/proc/self/fd/{descriptor}").readlink().name))

    def unlinked(path: Path, missing_ok: bool = False) -> None:
        calls.append(("unlink", path.name))
        unlink(path, missing_ok=missing_ok)

    def replaced(path: Path, target: Path) -> Path:
        calls.append(("replace", Path(target).name))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "unlink", unlinked)
    monkeypatch.setattr(Path, "replace", replaced)
    out = tmp_path / "out"
    go_on(out)
    synced_content = next(
        place
        for place, (what, name) in enumerate(calls)
        if what == "fsync" and name.startswith("predictions.parquet.")
    )
    renamed = calls.index(("replace", "predictions.parquet"))
    result = calls.index(("replace", "result.json"))
    folder = calls.index(("fsync", "out"), result)
    gone = next(
        place for place, (what, name) in enumerate(calls) if what == "unlink" and name.endswith(".journal")
    )
    assert synced_content < renamed < result < folder < gone


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_syncs_no_folders_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    fsync = os.fsync

    def refusing(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_dir():
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refusing)
    assert go_on(tmp_path / "out").samples["evaluated"] == SAMPLES


def test_any_other_failure_to_sync_a_folder_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="gone"):
        whole_files.sync_folder(tmp_path)


def test_a_file_is_whole_under_its_name_or_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "file"
    whole_files.write_text(file, "first \udcff")
    assert file.read_text() == "first \\udcff"
    with pytest.raises(KeyboardInterrupt), whole_files.whole_file(file) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert file.read_text() == "first \\udcff"
    with whole_files.whole_file(file, tmp_path / "own") as partial:
        partial.write_text("second")
    assert file.read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("at", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    def full(*words: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = tmp_path / "file"
    whole_files.write_text(file, "first")
    owner, name = {"write": (Path, "write_text"), "fsync": (os, "fsync"), "replace": (Path, "replace")}[at]
    monkeypatch.setattr(owner, name, full)
    with pytest.raises(OSError, match="No space left"):
        whole_files.write_text(file, "second")
    monkeypatch.undo()
    assert file.read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class Damaging(TinyTask):
    """Damages a file of the journal when a forward comes to a batch."""

    __module__ = TinyTask.__module__

    def __init__(self, count: int, batch: int, damage: Callable[[], object]) -> None:
        super().__init__(count)
        self._damage = damage
        self._left = batch

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self._left -= 1
        if self._left == 0:
            self._damage()
        return super().forward(model, batch)


@pytest.mark.parametrize("own", [False, True], ids=["of an earlier run", "of this run"])
def test_a_journal_file_damaged_after_the_start_is_named(tmp_path: Path, own: bool) -> None:
    wanted = evaluate(TinyTask(SAMPLES), tmp_path / "whole", batch_size=10)
    out = tmp_path / "out"
    earlier = begin(out)
    damaged: list[Path] = []

    def files() -> list[Path]:
        return sorted(set((out / "journal").glob("*.journal")) - (set(earlier) if own else set()))

    def damage() -> None:
        # A thread of its own writes them.
        await_that(files)
        damaged.append(files()[0])
        # A byte of the rows, not of the ledger.
        flip(damaged[0], -40)

    with pytest.raises(DualevalError) as caught:
        # The first file of its own is there after the replayed batch and five others.
        evaluate(Damaging(SAMPLES, 12, damage), out, batch_size=10)
    assert str(damaged[0]) in str(caught.value)
    assert "same command again" in str(caught.value)
    result = go_on(out)
    assert result.metrics_digest == wanted.metrics_digest
    assert rows(out) == rows(tmp_path / "whole")


def test_what_killed_writers_of_a_file_have_left_goes(tmp_path: Path) -> None:
    """Not that of a live one, and nothing that another file's writer, or somebody else, has left."""
    killed = tmp_path / "board.csv.0123abcd.partial"
    others = [
        tmp_path / "board.csv.89abcdef.partial",  # begun just now
        *(
            tmp_path / name
            for name in ("other.csv.0123abcd.partial", "board.csv.mine.partial", "board.csv.partial")
        ),
    ]
    for path in (killed, *others):
        path.write_text("half")
    for path in (killed, *others[1:]):
        os.utime(path, ns=(0, 0))
    whole_files.write_text(tmp_path / "board.csv", "whole")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "board.csv", *others])
