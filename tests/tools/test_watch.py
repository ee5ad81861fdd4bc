"""The watcher of a training: which checkpoints are complete, each evaluated once, and the leaderboard."""

from __future__ import annotations

import csv
import os
import re
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dualeval.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, UsageError
from dualeval.result import RESULT, read_result
from dualeval.tools.watch.checkpoints import Board, Checkpoint, Checkpoints, step_of
from dualeval.tools.watch.command import Wanted, Watching
from tests.cli.test_several import Little, in_process, pictures
from tests.conftest import Launch
from tests.engine.end.test_endings import await_that
from tests.vehicles.launchers import start

__all__ = ["pictures"]  # a fixture

watch = partial(in_process, "watch")
WATCH: list[str | Path] = [sys.executable, "-m", "dualeval", "watch"]
# As Little, and slow where a file says so: its evaluation can be met in the middle.
SLOW = """
from pathlib import Path
from tests.cli.test_several import Little


class Slow(Little):
    def forward(self, images):
        while Path("hold").exists() and len(images) > 2:
            Path("in-hand").touch()
            time.sleep(0.05)
        return super().forward(images)
"""


def options(*more: str | Path, model: str = "tests.cli.test_several:Little") -> list[str | Path]:
    return [
        *("ckpts", "--out", "runs", "--model", model, "--data", "val", "--crop", "32", "--resize", "36"),
        *("--mean", "0.5", "--std", "0.5", "--batch-size", "4", "--workers", "0", "--settle", "0.1"),
        *("--no-progress", *more),
    ]


def leaderboard(folder: Path) -> list[dict[str, str]]:
    with (folder / "runs/leaderboard.csv").open() as file:
        return list(csv.DictReader(file))


def save(path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    torch.save(Little().state_dict(), path)


# -- which are complete ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("epoch=3-step=1200.ckpt", 1200),
        ("checkpoint-500", 500),
        ("model_epoch10_v2.pt", 10),
        ("iter_0000100", 100),
        ("7b-step100.pt", 100),
        ("0042.pt", 42),
        ("best.pt", None),
    ],
)
def test_a_step_is_the_number_in_a_checkpoints_name(name: str, step: int | None) -> None:
    assert step_of(name) == step


def test_a_checkpoint_is_complete_when_it_has_not_changed_for_a_while(tmp_path: Path) -> None:
    now = [0.0]
    checkpoints = Checkpoints(str(tmp_path), settle_s=10, marker=None, clock=lambda: now[0])
    file, folder = tmp_path / "step2.pt", tmp_path / "step10"

    def names() -> list[str]:
        return [each.name for each in checkpoints.complete()]

    folder.mkdir()
    (tmp_path / "train.log").write_text("no checkpoint")
    (tmp_path / ".hidden.pt").write_text("no checkpoint")
    (tmp_path / "last.pt").symlink_to(file)
    file.write_text("a")
    (folder / "part0.bin").write_text("a")
    assert names() == []
    assert checkpoints.unsettled == ["step2.pt", "step10"]
    now[0] = 8.0
    (folder / "part1.bin").write_text("a")
    assert names() == []
    now[0] = 11.0
    assert names() == ["step2.pt"]
    stamp = checkpoints.complete()[0].stamp
    os.utime(file, ns=(0, 0))  # the clock of the training's host may go anywhere
    assert names() == []
    now[0] = 21.0
    assert names() == ["step2.pt", "step10"]
    assert checkpoints.complete()[0].stamp != stamp
    # torch.distributed.checkpoint writes this last.
    (tmp_path / "step11").mkdir()
    (tmp_path / "step11/.metadata").write_text("a")
    assert names() == ["step2.pt", "step10", "step11"]


def test_a_marker_says_what_is_complete(tmp_path: Path) -> None:
    for name in ("a1.pt", "a2.pt"):
        (tmp_path / name).write_text("a")
    for name in ("b3", "b4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("a")
    (tmp_path / "a1.pt.done").write_text("")
    (tmp_path / "b4/done").write_text("")
    for where in (tmp_path, f"{tmp_path}/*"):
        found = Checkpoints(str(where), settle_s=0.1, marker="done").complete()
        assert [each.name for each in found] == ["a1.pt", "b4"]


def test_every_and_until_step_choose_the_checkpoints(tmp_path: Path) -> None:
    found = [Checkpoint(name=f"{step}", path="", step=step, stamp="") for step in (5, 10, 20, 25)]
    found.append(Checkpoint(name="best", path="", step=None, stamp=""))

    def steps(wanted: Wanted) -> list[int | None]:
        return [each.step for each in found if wanted.fits(each.step)]

    assert steps(Wanted()) == [5, 10, 20, 25, None]
    assert steps(Wanted(every=10)) == [10, 20]
    assert steps(Wanted(every=10, until_step=15)) == [10]
    seen = [each.step for each in found]
    assert Wanted(until_step=25).has_ended(seen)
    assert not Wanted(until_step=26).has_ended(seen)
    stop = Wanted(stop_file=tmp_path / "stop")
    assert not stop.has_ended(seen)
    (tmp_path / "stop").touch()
    assert stop.has_ended([])


def test_a_training_faster_than_its_evaluation_is_warned_of(tmp_path: Path) -> None:
    """By what came since the first look; again when twice as many wait."""
    notes: list[str] = []
    watching: Any = Watching(
        session=cast("Any", SimpleNamespace(note=notes.append)),
        checkpoints=Checkpoints(str(tmp_path), settle_s=1, marker=None),
        wanted=Wanted(),
        board=Board(tmp_path, metric=None, link=None),
        targets=(),
        job={},
        evaluate=cast("Any", None),
    )
    watching._waiting, watching._took = {"a", "b", "c"}, 9.0
    watching._note_pace([5.0, 5.0, 5.0, 20.0, 28.0])
    assert notes == []
    watching._note_pace([5.0, 5.0, 5.0, 20.0, 28.0, 36.0])
    watching._note_pace([5.0, 5.0, 5.0, 20.0, 28.0, 36.0, 44.0])
    assert len(notes) == 1
    assert "comes every 8.0 s, an evaluation takes 9.0 s, and 3 wait" in notes[0]


# -- one process -------------------------------------------------------------------------------------------


def test_each_is_evaluated_once_and_a_broken_one_again_when_it_changes(
    pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pictures / "ckpts/epoch3.pt").write_bytes(b"PK\x03\x04")
    for path in (pictures / "ckpts/epoch1.pt", pictures / "ckpts/epoch2.pt"):
        torch.save({"model": torch.load(path)}, path)
    words = options("--until-step", "10", "--best", "best.pt", "--best-by", "loss", "--logger", "jsonl:log")
    assert watch(*words) == EXIT_USAGE
    said = capsys.readouterr().err
    assert re.search("error: epoch3.pt: .*ckpts/epoch3.pt is cut short", said)
    assert said.count("note: weights: the state_dict under 'model'") == 1
    rows = leaderboard(pictures)
    assert [row["status"] for row in rows] == ["done"] * 3 + ["failed"]
    losses = [float(row["loss"]) for row in rows[:3]]
    assert losses == sorted(losses)
    best = pictures / "ckpts" / rows[0]["model"]
    assert (pictures / "best.pt").resolve() == best
    # Nothing changed: what is done is not evaluated again.
    times = {path: path.stat().st_mtime_ns for path in (pictures / "runs").glob(f"*/{RESULT}")}
    assert watch(*words) == EXIT_USAGE
    assert times == {path: path.stat().st_mtime_ns for path in (pictures / "runs").glob(f"*/{RESULT}")}
    capsys.readouterr()
    assert len((pictures / "log").read_text().splitlines()) == 3
    # The broken one is mended, and one that was evaluated is written again.
    save(pictures / "ckpts/epoch3.pt", 3)
    save(pictures / "ckpts/epoch1.pt", 4)
    assert watch(*words) == EXIT_DONE
    said = capsys.readouterr().err
    assert "epoch1.pt has changed since it was evaluated, but is not evaluated again" in said
    rows = leaderboard(pictures)
    assert {row["status"] for row in rows} == {"done"}
    # Its figures are of weights that are gone.
    assert (rows[-1]["model"], rows[-1]["reason"]) == (
        "epoch1.pt",
        "its files have changed since it was evaluated",
    )
    assert (pictures / "best.pt").resolve() == pictures / "ckpts" / rows[0]["model"]
    assert sorted(row["step"] for row in leaderboard(pictures)) == ["1", "10", "2", "3"]
    for name in ("epoch1.pt", "epoch10.pt"):
        assert read_result(pictures / "runs" / name / RESULT).samples["evaluated"] == 18


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--weights", "x.pt"], "each checkpoint replaces it"),
        (["--as", "checkpoint"], "--as checkpoint: the task has no option of this name"),
        (["--best", "val"], "--best val: this exists and is not a symbolic link"),
        (["--best-by", "los", "--until-step", "1"], "--best-by los: the results have .*Did you mean loss"),
        (["--data", "nowhere"], "nowhere"),
        (["--settle", "nan"], "--settle nan: expected seconds"),
        (["--out", "ckpts/runs"], "--out ckpts/runs lies in ckpts, where the checkpoints are"),
        (["also"], r"CKPTS is 2 paths, .*put it in quotes, as 'ckpts/\*\.pt'"),
        (["--batch-size", "8"], "is the folder of a watcher with other options.*batch_size"),
    ],
)
def test_wrong_options_are_refused(
    more: Sequence[str], says: str, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--batch-size" in more:
        assert watch(*options("--until-step", "1")) == EXIT_DONE
    try:
        assert watch(*options(*more)) == EXIT_USAGE
    except UsageError as error:
        said = str(error)
    else:
        said = capsys.readouterr().err
    assert re.search(says, said), said


@pytest.mark.parametrize(
    ("lost", "more", "says"),
    [
        ("runs", [], "runs is gone: somebody has removed or renamed it. Bring it back and type the same"),
        (
            "links",
            ["--best", "links/best.pt"],
            "error: .*--best links/best.pt cannot be written: No such file",
        ),
    ],
)
def test_a_renamed_folder_ends_the_watch_and_is_not_made_again(
    lost: str,
    more: Sequence[str],
    says: str,
    pictures: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No other one is made; when it is back, the same command goes on."""
    finishes = Watching._finish

    def finish(self: Watching, *what: Any) -> None:
        finishes(self, *what)
        if (pictures / lost).exists():
            (pictures / lost).rename(pictures / "elsewhere")

    words = options("--until-step", "10", *more)
    (pictures / "links").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Watching, "_finish", finish)
        assert watch(*words) == EXIT_FAILED
    assert re.search(says, capsys.readouterr().err)
    assert not (pictures / lost).exists()
    (pictures / "elsewhere").rename(pictures / lost)
    assert watch(*words) == EXIT_DONE
    assert [row["status"] for row in leaderboard(pictures)] == ["done"] * 3
    assert len(re.findall(r"(?m)^dualeval: epoch\S+: ", capsys.readouterr().err)) == 2


def test_a_damaged_job_json_in_a_run_is_refused(pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a folder with a file of torch.save is a checkpoint."""
    for name in ("epoch1.pt", "epoch2.pt"):
        (pictures / "ckpts" / name).unlink()
    (pictures / "ckpts/step_2").mkdir()
    (pictures / "ckpts/epoch10.pt").rename(pictures / "ckpts/step_2/model.pt")
    (pictures / "ckpts/step_2/optimizer.pt").write_bytes(b"an optimizer's")
    words = options("--until-step", "2")
    assert watch(*words) == EXIT_DONE
    # A stamp that says nothing is no stamp of other files.
    (pictures / "runs/.watchers/step_2/stamp").write_bytes(b"\xff")
    capsys.readouterr()
    assert watch(*words) == EXIT_DONE
    assert "has changed" not in capsys.readouterr().err
    # There is no --fresh.
    (pictures / "runs/step_2/job.json").write_text("[]")
    assert watch(*words) == EXIT_USAGE
    said = capsys.readouterr().err
    folder = pictures / "runs/step_2"
    assert (
        f"job.json is damaged: it holds [], expected values by name. Give another --out, or remove {folder}"
        in (said.replace(" runs/step_2", f" {folder}"))
    )
    assert "--fresh" not in said


# Of one's own, which opens its checkpoint itself.
OWN = """
import torch
import dualeval
from torch.utils.data import TensorDataset
from scale import SCALE


class Line(torch.nn.Linear):
    def forward(self, inputs):
        return SCALE * super().forward(inputs)


def task(weights="last.pt"):
    model = Line(3, 3)
    model.load_state_dict({name.removeprefix("linear."): each for name, each in torch.load(weights).items()})
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 3), torch.arange(40) % 3)
    return dualeval.ModelTask(model=model.eval(), data=data)
"""


def test_rows_of_a_task_before_its_code_changed_are_not_ranked(pictures: Path, launch: Launch) -> None:
    (pictures / "mine.py").write_text(OWN)
    command: list[str | Path] = [
        *(*WATCH, "ckpts", "--out", "runs", "--task", "mine.py:task", "--settle", "0.1", "--best", "best.pt"),
        *("--best-by", "loss", "--no-progress"),
    ]
    (pictures / "scale.py").write_text("SCALE = 1.0\n")
    said = launch([*command, "--until-step", "2"], cwd=pictures).ok().stderr
    assert [row["reason"] for row in leaderboard(pictures)] == ["", ""], said
    # A checkpoint that is gone keeps its row.
    (pictures / "ckpts/epoch1.pt").unlink()
    (pictures / "scale.py").write_text("SCALE = 0.001\n")
    done = launch([*command, "--until-step", "10"], cwd=pictures).ok()
    said = done.stderr
    # What is not ranked is not marked as the best, and says why.
    assert "*" not in done.stdout
    assert "epoch2.pt: done: not ranked: another" in done.stdout
    rows = {row["model"]: row["reason"] for row in leaderboard(pictures)}
    assert rows["epoch10.pt"] == "" and len(rows) == 3
    assert all("not ranked: another" in rows[name] for name in ("epoch1.pt", "epoch2.pt")), said
    assert "place 1 of 1" in said
    assert (pictures / "best.pt").resolve().name == "epoch10.pt"
    # It has come: nothing is waited for, though it is gone.
    (pictures / "ckpts/epoch10.pt").unlink()
    done = launch([*command, "--until-step", "10"], cwd=pictures).ok()
    assert done.stderr.count("no new checkpoint came, and nothing was evaluated") == 1


def test_checkpoints_without_a_marker_are_named_as_waited_for(
    pictures: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what lacks its marker does not keep the watcher from its end."""
    monkeypatch.setattr("dualeval.tools.watch.command._SILENT_S", 0.0)
    (pictures / "ckpts/epoch1.pt.done").touch()
    says = Watching._note_waiting

    def note_waiting(self: Watching, names: Sequence[str]) -> None:
        says(self, names)
        (pictures / "stop").touch()

    monkeypatch.setattr(Watching, "_note_waiting", note_waiting)
    assert watch(*options("--marker", "done", "--stop-file", "stop")) == EXIT_DONE
    said = capsys.readouterr().err
    assert "waits for checkpoints in ckpts. 1 checkpoint evaluated so far" in said
    assert "not evaluated, as their marker is missing: epoch2.pt, epoch10.pt" in said


# -- processes ---------------------------------------------------------------------------------------------


def held(folder: Path) -> dict[str, str]:
    (folder / "slow.py").write_text(SLOW)
    (folder / "hold").touch()
    return {"PYTHONPATH": f"{folder}:{Path(__file__).resolve().parents[2]}"}


@pytest.mark.long
def test_a_second_watcher_goes_on_with_a_killed_ones_checkpoint(launch: Launch, pictures: Path) -> None:
    """The killed one's checkpoint is gone on with by the other, and nothing is evaluated twice."""
    variables = held(pictures)
    command = [*WATCH, *options("--until-step", "10", model="slow:Slow")]
    with launch.started(command, variables=variables, cwd=pictures) as killed:
        await_that((pictures / "in-hand").exists, killed)
        with launch.started(command, variables=variables, cwd=pictures) as other:
            await_that((pictures / "runs/.watchers/epoch2.pt/lease.json").exists, other)
            killed.send_signal(signal.SIGKILL)
            killed.wait(60)
            (pictures / "hold").unlink()
            _, said = other.communicate(timeout=120)
    assert other.returncode == EXIT_DONE, said
    assert sorted(re.findall(r"(?m)^dualeval: (epoch\S+): ", said)) == [
        "epoch1.pt",
        "epoch10.pt",
        "epoch2.pt",
    ]
    assert {row["status"] for row in leaderboard(pictures)} == {"done"}


def test_two_ranks_stop_by_a_signal_and_the_next_watch_goes_on(launch: Launch, pictures: Path) -> None:
    """SIGTERM while they wait for more ends both; the next watcher ends by the stop file."""
    command: list[str | Path] = [
        *(*start("torchrun", 2), *WATCH, *options("--stop-file", "stop", "--newest"))
    ]
    with launch.started(command, cwd=pictures) as waiting:
        await_that((pictures / "runs/leaderboard.csv").exists, waiting)
        await_that(lambda: len(leaderboard(pictures)) == 3, waiting)
        waiting.send_signal(signal.SIGTERM)
        _, said = waiting.communicate(timeout=60)
    assert "stopped by SIGTERM. 3 checkpoints evaluated so far. Type the same command again to resume" in said
    order = re.findall(r"(?m)dualeval: (epoch\d+)\.pt: ", said)
    assert order == ["epoch10", "epoch2", "epoch1"]
    save(pictures / "ckpts/epoch11.pt", 11)
    (pictures / "stop").touch()
    finished = launch(command, cwd=pictures)
    assert finished.returncode == EXIT_DONE, finished.stderr
    assert [row["model"] for row in leaderboard(pictures) if row["step"] == "11"] == ["epoch11.pt"]
    assert read_result(pictures / "runs/epoch11.pt" / RESULT).world["size"] == 2
