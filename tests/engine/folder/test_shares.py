"""Shares of a job: each is evaluated by itself, in any order; together they are the run of one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from dualeval.cli import dualeval
from dualeval.cli.run import Invocation
from dualeval.engine.control.plane import open_control_plane
from dualeval.engine.folder import lease, opening, recorder
from dualeval.engine.folder.journal import read_journal_file
from dualeval.engine.folder.layout import Share, unfinished
from dualeval.engine.folder.lease import Lease
from dualeval.engine.run import evaluate_share
from dualeval.engine.values.options import RunOptions
from dualeval.errors import DualevalError, UsageError
from dualeval.process.identity import Process
from dualeval.result import Result, read_status
from dualeval.world import World
from dualeval.world.devices import connect
from tests.conftest import Launch
from tests.engine.checks.test_replay import played_machine
from tests.engine.folder.test_resume import BATCH, SAMPLES, Ending
from tests.engine.folder.test_resume import check as check_run
from tests.engine.test_evaluator import evaluate
from tests.vehicles.sessions import run_of, watched
from tests.vehicles.tiny import TinyTask

COUNT = 4
CHUNKS = SAMPLES // BATCH


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch, no_look: None) -> None:
    """A journal file holds three batches."""
    monkeypatch.setattr(recorder, "FLUSH_ROWS", 3 * BATCH)


@pytest.fixture
def wanted(tmp_path: Path) -> str:
    return evaluate(TinyTask(SAMPLES), tmp_path / "whole", batch_size=BATCH).metrics_digest


def share(
    out: Path, number: int, task: TinyTask | None = None, *, count: int = COUNT, **options: Any
) -> list[str]:
    """Evaluate a share in this process; returns what was noted."""
    noted: list[str] = []
    with connect(None, World.alone(), "cpu") as backend:
        control = open_control_plane(backend)
        with watched(control) as watch:
            run = run_of(
                backend,
                control,
                watch,
                RunOptions(out=out, **{"batch_size": BATCH, **options}),
                share=Share.of_text(f"{number}/{count}"),
                command={"words": [], "folder": "/"},
                note=noted.append,
            )
            evaluate_share(task or TinyTask(SAMPLES), run)
    return noted


def finish(out: Path, task: TinyTask | None = None, **options: Any) -> Result:
    given = {"batch_size": BATCH, "evaluate_missing": False, **options}
    return evaluate(task or TinyTask(SAMPLES), out, **given)


def all_shares(out: Path, *but: int, **options: Any) -> None:
    for number in range(1, COUNT + 1):
        if number not in but:
            share(out, number, **options)


def check(out: Path, result: Result, wanted: str, now: int = 0) -> None:
    check_run(out, result, wanted, CHUNKS - now)


def test_shares_in_any_order_are_the_run_of_one_process(tmp_path: Path, wanted: str) -> None:
    out, reads = tmp_path / "out", list[int]()
    for number in (3, 1, 4, 2):
        task = TinyTask(SAMPLES)
        noted = share(out, number, task)
        assert noted == [
            f"share {number}/4 is done, 10 of its 10 chunks evaluated now: {out}/shares/{number}-of-4"
        ]
        reads += task.dataset().reads
    assert sorted(reads) == list(range(SAMPLES))
    task = TinyTask(SAMPLES)
    check(out, finish(out, task), wanted)
    assert len(task.dataset().reads) == 2 * BATCH, "what proves that nothing has changed"
    assert share(out, 2) == [f"share 2/4 is done: the result of all shares is in {out}"]
    assert not (out / "shares").exists()


def test_what_a_share_has_finished_is_not_evaluated_again(out: Path, wanted: str) -> None:
    all_shares(out, 2)
    with pytest.raises(RuntimeError, match="enough"):
        share(out, 2, Ending(SAMPLES, 7))
    with pytest.raises(UsageError) as caught:
        finish(out)
    assert str(caught.value) == (
        f"{out} is not finished: 3 of 4 shares. Missing: 3 chunks (29, 33, 37) of share 2. Start "
        "what is missing with --share I/4 (Slurm: --array=2), or type "
        f"'dualeval finish {out} --evaluate-missing'."
    )
    assert share(out, 2)[0] == f"resumes in {out}/shares/2-of-4: 7 of 10 chunks are finished already"
    assert share(out, 2)[-1].startswith("share 2/4 is done, 0 of its 10 chunks evaluated now")
    check(out, finish(out), wanted)


def test_finish_evaluates_what_is_missing(out: Path, wanted: str) -> None:
    share(out, 1)
    with pytest.raises(RuntimeError, match="enough"):
        share(out, 2, Ending(SAMPLES, 7))
    task = TinyTask(SAMPLES)
    check(out, finish(out, task, evaluate_missing=True), wanted, now=23)
    assert len(task.dataset().reads) == 23 * BATCH + 2 * BATCH


def test_a_finish_that_breaks_is_gone_on_with(out: Path, wanted: str) -> None:
    all_shares(out, 3, 4)
    with pytest.raises(RuntimeError, match="enough"):
        finish(out, Ending(SAMPLES, 7), evaluate_missing=True)
    check(out, finish(out, evaluate_missing=True), wanted, now=20 - 7)


def test_shares_count_before_a_finish_that_broke(out: Path, wanted: str) -> None:
    """What it has saved holds parts of shares that were started after it."""
    share(out, 1)
    with pytest.raises(RuntimeError, match="enough"):
        finish(out, Ending(SAMPLES, 7), evaluate_missing=True)
    all_shares(out, 1)
    check(out, finish(out), wanted)


def test_there_may_be_more_shares_than_chunks(out: Path) -> None:
    for number in (1, 2, 3):
        share(out, number, TinyTask(2 * BATCH), count=3)
    assert finish(out, TinyTask(2 * BATCH)).samples["evaluated"] == 2 * BATCH


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda out: share(out, 2, TinyTask(SAMPLES + 1)),
            "holds another job (job.samples: 400 there, 401 now",
        ),
        (lambda out: share(out, 1, batch_size=20), "holds another job"),
        (lambda out: share(out, 2, TinyTask(SAMPLES + 1)), "Give another --out, or remove "),
        (lambda out: finish(out, TinyTask(SAMPLES + 1)), "or --fresh to remove what is there and start over"),
        (lambda out: finish(out, TinyTask(SAMPLES + 1), start_over="Remove it"), "now). Remove it."),
        (lambda out: share(out, 2, count=5), "holds shares of 4, and this is share 2/5. Give --share I/4,"),
    ],
)
def test_a_folder_holds_shares_of_one_job(out: Path, call: Callable[[Path], object], said: str) -> None:
    share(out, 1)
    with pytest.raises(UsageError) as caught:
        call(out)
    assert said in str(caught.value)


def test_other_versions_are_refused_and_other_processors_are_marked(
    out: Path, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_shares(out, 2)
    with monkeypatch.context() as patch:
        played_machine(patch, versions={"torch": "1.0"})
        with pytest.raises(UsageError, match="holds work from another kind of machine"):
            share(out, 2)
    with monkeypatch.context() as patch:
        played_machine(patch, model="another CPU")
        share(out, 2)
    # Nothing remains: the machine that joins them computes nothing, and may be any.
    played_machine(monkeypatch, device="other")
    result = finish(out)
    check(out, result, wanted)
    assert [kind["chunks"] for kind in result.machines] == [30, 10]
    assert (result.homogeneous, result.device["device"]) == (False, "cpu")


class Nearly(TinyTask):
    """The same job as a TinyTask, whose logits are others in their last bits."""

    __module__ = TinyTask.__module__

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(model, batch) * (1 + 2**-20)


def test_another_machine_may_join_them_to_tolerance(
    out: Path, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_shares(out)
    with pytest.raises(UsageError, match="holds other numbers than this job gives now"):
        finish(out, Nearly(SAMPLES))
    played_machine(monkeypatch, bits="0")
    result = finish(out, Nearly(SAMPLES))
    check(out, result, wanted)
    assert (result.replay, result.homogeneous) == ("within tolerance", True)


def test_failed_samples_of_shares_are_in_the_result(tmp_path: Path, out: Path) -> None:
    broken = (3, 17, 210)
    options: dict[str, Any] = {"on_error": "skip"}
    whole = evaluate(TinyTask(SAMPLES, broken), tmp_path / "whole", batch_size=BATCH, **options)
    for number in range(1, COUNT + 1):
        share(out, number, TinyTask(SAMPLES, broken), **options)
    result = finish(out, TinyTask(SAMPLES, broken), **options)
    assert (result.metrics_digest, result.failed) == (whole.metrics_digest, whole.failed)
    assert result.samples == {"total": SAMPLES, "evaluated": SAMPLES - 3, "failed": 3}
    assert any("3 samples could not be read" in sentence for sentence in result.warnings)


def test_a_share_tries_its_failed_samples_again(tmp_path: Path) -> None:
    out, task = tmp_path / "out", TinyTask(SAMPLES, (3,))
    assert "evaluated now, 1 sample could not be read: " in share(out, 1, task, on_error="skip")[-1]
    task.dataset()._broken.clear()
    task.dataset().fingerprint = TinyTask(SAMPLES, (3,)).dataset().fingerprint  # type: ignore[method-assign]
    again = share(out, 1, task, on_error="skip")[-1]
    assert again.startswith("share 1/4 is done, 1 of its 10 chunks evaluated now: ")
    assert rows_left(out) == 100


def test_a_damaged_file_of_a_share_is_missing(out: Path, wanted: str) -> None:
    all_shares(out)
    file = min((out / "shares/3-of-4/journal").glob("*.journal"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        UsageError, match=r"4 of 4 shares. Missing: 3 chunks \(2, 6, 10; .*damaged.*\) of share 3\."
    ):
        finish(out)
    assert "3 of its 10 chunks evaluated now" in share(out, 3)[-1]
    check(out, finish(out), wanted)


def rows_left(out: Path) -> int:
    """Rows in the journal of the first share."""
    return sum(
        sum(read_journal_file(file).rows) for file in (out / "shares/1-of-4/journal").glob("*.journal")
    )


@contextmanager
def at_work(folder: Path) -> Iterator[None]:
    """Another run that holds a folder."""
    held = Lease.take(folder, "01234567")
    try:
        yield
    finally:
        held.close()


@pytest.mark.parametrize(
    ("where", "call", "said"),
    [
        ("shares/2-of-4", finish, "1 of 4 shares; at work: 2. Wait for them to end."),
        ("shares/2-of-4", lambda out: finish(out, evaluate_missing=True), "at work: 2"),
        ("shares/2-of-4", lambda out: finish(out, evaluate_missing=True, fresh=True), "at work: 2"),
        ("shares/2-of-4", lambda out: share(out, 2), "is in use by another run"),
        (".", lambda out: share(out, 2), "is being finished"),
    ],
)
def test_a_share_or_finish_at_work_is_not_begun_again(
    out: Path, monkeypatch: pytest.MonkeyPatch, where: str, call: Callable[[Path], object], said: str
) -> None:
    monkeypatch.setattr(lease, "RENEW_EVERY_S", 0.1)
    share(out, 1)
    (out / where).mkdir(exist_ok=True)
    with at_work(out / where), pytest.raises(UsageError) as caught:
        call(out)
    assert said in str(caught.value)
    assert read_status(out / "shares/1-of-4") is not None, "nothing was removed"


def test_a_killed_share_is_not_waited_for(out: Path, wanted: str) -> None:
    all_shares(out, 2)
    space = Process.own().space
    killed = {"host": "h", "pid": 2**22 + 1, "space": space, "start": "", "token": "01234567", "counter": 1}
    (out / "shares/2-of-4").mkdir()
    (out / "shares/2-of-4/lease.json").write_text(json.dumps(killed))
    check(out, finish(out, evaluate_missing=True), wanted, now=10)


def test_fresh_removes_the_shares(out: Path, wanted: str) -> None:
    all_shares(out)
    check(out, finish(out, fresh=True, evaluate_missing=True), wanted, now=CHUNKS)
    assert unfinished(out) is None


def test_a_share_that_is_not_whole_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder.Recorder, "flush", lambda *_: None)
    with pytest.raises(DualevalError, match=r"share 1/4 lacks \d+ chunks?: files of its journal are gone"):
        share(tmp_path / "out", 1)
    status = read_status(tmp_path / "out/shares/1-of-4")
    assert status is not None
    assert status.state == "failed"


def test_what_shares_say_is_in_the_result(out: Path) -> None:
    all_shares(out)
    said = out / "shares/3-of-4/said.json"
    said.write_text(json.dumps({"warnings": ["a warning of share 3"], "unlike": [["another each time"]]}))
    result = finish(out)
    assert {"a warning of share 3", "another each time"} <= {*result.warnings}
    assert result.deterministic is False


def test_a_damaged_result_of_shares_is_said(out: Path, wanted: str) -> None:
    all_shares(out)
    finish(out)
    (out / "predictions.parquet").write_bytes(b"")
    with pytest.raises(UsageError) as caught:
        finish(out)
    assert str(caught.value).startswith(f"{out} has no whole result: 40 chunks (0, 1, ")
    check(out, finish(out, evaluate_missing=True), wanted, now=CHUNKS)


def test_a_damaged_job_of_shares_is_made_again(
    out: Path, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is typed, as it is said, leads to the result, and nothing is evaluated again."""
    all_shares(out)
    job = json.loads((out / "job.json").read_text())
    monkeypatch.chdir("/")
    words = ["finish", str(out)]
    with monkeypatch.context() as patch:
        asked: list[Any] = []
        nothing: dict[str, Any] = {**dict.fromkeys(field.name for field in fields(Invocation)), "run": {}}
        patch.setattr("dualeval.cli.finish.prepared", lambda *_: ([], Invocation(**nothing)))
        patch.setattr("dualeval.cli.finish.evaluate", lambda _, how: asked.append(how.run))
        dualeval.main(words, standalone_mode=False, obj=words)
    assert asked == [{"evaluate_missing": False, "start_over": f"Remove {out} to start over"}]
    for content in ("{", "[]", '{"job": {}, "shares": "4"}', json.dumps({**job, "command": 7})):
        (out / "job.json").write_text(content)
        with pytest.raises(
            UsageError, match=r"job.json is damaged: .* Remove it and start a share again, whi"
        ):
            dualeval.main(words, standalone_mode=False, obj=words)
        with pytest.raises(
            UsageError, match=r"job.json is damaged: .* Remove it and start a share again, whi"
        ):
            share(out, 1)
    (out / "job.json").unlink()
    assert share(out, 1)[-1].startswith("share 1/4 is done, 0 of its 10 chunks evaluated now")
    assert (out / "job.json").read_text() == json.dumps(job, indent=2, ensure_ascii=False) + "\n"
    check(out, finish(out), wanted)


def test_what_a_share_has_said_stays(out: Path) -> None:
    share(out, 1)
    said = out / "shares/1-of-4/said.json"
    said.write_text(json.dumps({"warnings": ["one"], "unlike": [["another each time"]]}))
    share(out, 1)
    assert json.loads(said.read_text())["warnings"] == ["one"]
    with pytest.raises(RuntimeError, match="enough"):
        share(out, 1, Ending(SAMPLES, 7), fresh=True)
    assert not said.exists()


def test_a_run_of_the_whole_job_gets_no_folder_of_shares(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="enough"):
        evaluate(Ending(SAMPLES, 7), tmp_path / "out", batch_size=BATCH)
    with pytest.raises(UsageError, match="holds a run of the whole job"):
        share(tmp_path / "out", 1)
    assert not (tmp_path / "out/shares").exists()


def test_a_failed_finish_leaves_the_machine_of_the_shares(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_shares(out)
    before = (out / "job.json").read_text()
    with monkeypatch.context() as patch:
        played_machine(patch, device="other")
        patch.setattr("dualeval.engine.finish.write_predictions", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            finish(out)
    assert (out / "job.json").read_text() == before
    share(out, 1)
    with monkeypatch.context() as patch:
        played_machine(patch, device="other")
        with pytest.raises(UsageError, match=f"Give another --out, or remove {out} to start over"):
            share(out, 2)


def test_half_written_files_of_shares_go(out: Path, wanted: str) -> None:
    all_shares(out)
    (out / "shares/1-of-4/said.json.01234567.partial").write_text("{")
    check(out, finish(out), wanted)


def test_a_share_and_a_finish_that_begin_at_once_see_each_other(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OUT is taken between the share's joining and its lease."""
    monkeypatch.setattr(lease, "RENEW_EVERY_S", 0.1)
    join, held = opening.join_shares, list[Lease]()

    def joined(*given: Any, **more: Any) -> object:
        found = join(*given, **more)
        held.append(Lease.take(out, "01234567"))
        return found

    monkeypatch.setattr("dualeval.engine.job.opened.join_shares", joined)
    with pytest.raises(UsageError, match="is being finished"):
        share(out, 1)
    held[0].close()
    assert not (out / "shares/1-of-4").exists()
    assert read_status(out) is None


# -- the command line ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--share 0/3", "--share 0/3: expected I/N, such as 3/100, with I from 1 to N"),
        ("--share 4/3 --out out", "--share 4/3: expected I/N"),
        ("--share 3 --out out", "--share 3: expected I/N"),
        ("--share 1/3", "--share 1/3: give --out DIR"),
        ("--share 1/3 --out out --json", "a share has no result, so --json has nothing to print"),
    ],
)
def test_a_share_that_cannot_be_is_refused(words: str, said: str) -> None:
    command = ["run", *words.split()]
    with pytest.raises(UsageError) as caught:
        dualeval.main(command, standalone_mode=False, obj=command)
    assert said in str(caught.value)


def test_the_command_line_evaluates_shares_and_finishes_them(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ["--limit", "500", "--no-progress"]
    whole = launch(["dualeval", "run", *job, "--json"], cwd=tmp_path).ok()
    # Two ranks of a share, and one of the other.
    first = launch(
        ["dualeval", "run", *job, "--share", "1/2", "--out", "out", "--nproc", "2"], cwd=tmp_path
    ).ok()
    assert "share 1/2 is done, 4 of its 4 chunks evaluated now" in first.stderr
    monkeypatch.chdir(tmp_path)
    for command in (
        "verify out",
        "score out --out x",
        "compare out out",
        "slice out --by class",
        "report out",
        "export out --to jsonl:x",
    ):
        words = command.split()
        with pytest.raises(UsageError) as caught:
            dualeval.main(words, standalone_mode=False, obj=words)
        assert (
            str(caught.value)
            == "out is not finished: 1 of 2 shares. Type 'dualeval finish out' when all are done."
        )
    launch(["dualeval", "run", *job, "--share", "2/2", "--out", "out"], cwd=tmp_path).ok()
    (tmp_path / "elsewhere").mkdir()
    refused = launch(["dualeval", "finish", "../out"], cwd=tmp_path / "elsewhere")
    assert (refused.returncode, f"Type 'cd {tmp_path}', and there" in refused.stderr) == (2, True)
    done = launch(["dualeval", "finish", "out", "--nproc", "2", "--json"], cwd=tmp_path).ok()
    results = [json.loads(text.stdout) for text in (whole, done)]
    assert results[0]["metrics_digest"] == results[1]["metrics_digest"]
    assert results[1]["chunks"] == {"total": 8, "evaluated_now": 0, "resumed": 8}
    assert results[1]["folder"] == str(tmp_path / "out")


def test_finish_of_no_shares_is_refused(tmp_path: Path, out: Path) -> None:
    words = ["finish", str(out)]
    with pytest.raises(UsageError, match="holds no shares"):
        dualeval.main(words, standalone_mode=False, obj=words)
    for option in ("--fresh", "--out=x"):
        with pytest.raises(UsageError, match=f"{option} does not go with 'dualeval finish'"):
            dualeval.main([*words, option], standalone_mode=False, obj=words)
    share(out, 1)
    job = json.loads((out / "job.json").read_text())
    for command, said in (
        (None, "evaluated from Python"),
        ({"words": [], "folder": str(tmp_path / "gone")}, "type their command without --share"),
        ({"words": []}, "its field command lacks the folder or the words. Remove it and start a share again"),
        ({"folder": "/", "words": "run"}, "its field command lacks the folder or the words"),
    ):
        (out / "job.json").write_text(json.dumps({**job, "command": command}))
        with pytest.raises(UsageError, match=said):
            dualeval.main(words, standalone_mode=False, obj=words)
    for count in (0, -1):
        (out / "job.json").write_text(json.dumps({**job, "shares": count}))
        with pytest.raises(UsageError, match="holds no shares"):
            dualeval.main(words, standalone_mode=False, obj=words)
