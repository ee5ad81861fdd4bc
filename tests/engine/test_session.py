"""A session in a script: an owner keeps the command line's promises, a guest leaves the script its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import dualeval
from dualeval.errors import UsageError
from tests.conftest import ROOT, Finished, Launch
from tests.engine.test_evaluator import evaluate
from tests.vehicles.launchers import needs, start
from tests.vehicles.tiny import TinyTask
from tests.vehicles.workers.session_worker import BATCH, SAMPLES

WORKER = ROOT / "tests/vehicles/workers" / "session_worker.py"
ALONE = [sys.executable]
TORCHRUN = [*start("torchrun", 2), sys.executable]
HOROVODRUN = ["horovodrun", "-np", "2", sys.executable]
MPIRUN = ["mpirun", "-np", "2", sys.executable]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("wanted")
    return evaluate(TinyTask(SAMPLES), out, batch_size=BATCH).metrics_digest


def lines(done: Finished) -> list[dict[str, Any]]:
    """What the ranks have printed, by rank; a launcher may put a prefix before a line, or join two."""
    decoder = json.JSONDecoder()
    found = []
    for line in done.stdout.splitlines():
        while "{" in line:
            line = line[line.index("{") :]
            value, end = decoder.raw_decode(line)
            found.append(value)
            line = line[end:]
    return sorted(found, key=lambda value: int(value["rank"]))


def status(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "status.json").read_text())
    return content


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        pytest.param(ALONE, 1, id="alone"),
        pytest.param(TORCHRUN, 2, id="torchrun"),
        pytest.param(HOROVODRUN, 2, id="horovodrun", marks=[*needs("horovodrun", ""), pytest.mark.long]),
        pytest.param(MPIRUN, 2, id="mpirun", marks=[*needs("mpirun", ""), pytest.mark.long]),
    ],
)
def test_an_owner_evaluates_twice(
    launch: Launch, tmp_path: Path, wanted: str, launcher: list[str], ranks: int
) -> None:
    done = launch([*launcher, WORKER, tmp_path / "out", "twice"]).ok()
    assert [(said["owner"], said["digest"], said["again"]) for said in lines(done)] == [
        (True, wanted, wanted)
    ] * ranks
    assert done.stdout.count("went on") == ranks


@pytest.mark.parametrize(
    ("launcher", "mode"),
    [
        pytest.param(TORCHRUN, "torch", id="torch"),
        pytest.param(ALONE, "spawned", id="spawned", marks=pytest.mark.long),
        pytest.param(HOROVODRUN, "horovod", id="horovod", marks=[*needs("horovodrun", ""), pytest.mark.long]),
        pytest.param(
            MPIRUN, "horovod", id="horovod under mpirun", marks=[*needs("mpirun", ""), pytest.mark.long]
        ),
    ],
)
def test_a_guest_leaves_the_group_as_it_was(
    launch: Launch, tmp_path: Path, wanted: str, launcher: list[str], mode: str
) -> None:
    done = launch([*launcher, WORKER, tmp_path / "out", mode, "twice"]).ok()
    found = [(said["owner"], said["digest"], said["again"], said["sum"]) for said in lines(done)]
    assert found == [(False, wanted, wanted, 2.0)] * 2
    assert done.stdout.count("went on") == 2


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("error", "twelve"),
        ("surrogate", r"bad \udcff name"),
        ("exit", "sys.exit(0)"),
        ("interrupt", "KeyboardInterrupt"),
        ("hang", "no progress for"),
    ],
)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_owner_that_fails_ends_the_script(
    launch: Launch, out: Path, mode: str, says: str, ranks: int
) -> None:
    launcher = ALONE if ranks == 1 else TORCHRUN
    done = launch([*launcher, WORKER, out, mode], variables={"BAD": str(ranks - 1)})
    assert done.returncode == 1, done.stderr
    assert done.stderr.count(says) >= 1 and "went on" not in done.stdout
    assert (f'File "{WORKER}", line' in done.stderr) == (mode in ("error", "surrogate"))
    assert ranks == 2 or (out / "stacks").exists() == (mode == "hang"), "no empty folder is left"
    assert status(out)["state"] == "failed" and says in status(out)["reason"]


def test_an_owner_that_is_stopped_exits_75_and_goes_on(launch: Launch, out: Path, wanted: str) -> None:
    done = launch([*ALONE, WORKER, out, "term"])
    assert done.returncode == 75, done.stderr
    assert "stopped by SIGTERM" in done.stderr and "Traceback" not in done.stderr
    assert status(out)["state"] == "stopped"
    again = launch([*ALONE, WORKER, out])
    [said] = lines(again)
    assert said["digest"] == wanted and said["resumed"] > 0


def test_what_is_caught_does_not_end_the_script(launch: Launch, tmp_path: Path) -> None:
    done = launch([*ALONE, WORKER, tmp_path / "out", "term", "catches"]).ok()
    assert lines(done)[0]["raised"] == "Stopped" and "went on" in done.stdout


def test_an_error_that_is_caught_is_not_printed(launch: Launch, tmp_path: Path) -> None:
    done = launch([*ALONE, WORKER, tmp_path / "out", "error", "catches"], variables={"BAD": "0"}).ok()
    assert lines(done)[0]["raised"] == "ValueError" and "dualeval: " not in done.stderr
    done = launch([*ALONE, WORKER, tmp_path / "other", "error"], variables={"BAD": "0"})
    assert done.returncode == 1 and done.stderr.count("dualeval: error: ") == 1
    assert done.stderr.count("dualeval: in your code") == 1


@pytest.mark.parametrize("mode", ["error", "hang"])
@pytest.mark.parametrize(
    "group", ["torch", pytest.param("horovod", marks=[*needs("horovodrun", ""), pytest.mark.long])]
)
def test_a_guest_that_fails_raises_on_every_rank(launch: Launch, out: Path, mode: str, group: str) -> None:
    launcher = TORCHRUN if group == "torch" else HOROVODRUN
    done = launch([*launcher, WORKER, out, group, mode], variables={"BAD": "1"}).ok()
    assert [said["sum"] for said in lines(done)] == [2.0, 2.0]
    first, second = lines(done)
    says = "twelve" if mode == "error" else "no progress for"
    assert first["raised"] == "PeerError" and says in first["says"]
    assert second["raised"] == ("ValueError" if mode == "error" else "PeerError") and says in second["says"]
    assert status(out)["state"] == "failed"
    assert "frame #" not in done.stderr


def test_a_guest_is_stopped_by_what_it_polls(launch: Launch, out: Path, wanted: str) -> None:
    # Python that ends while the thread of beats is in a call of torch's would abort.
    done = launch([*TORCHRUN, WORKER, out, "torch", "stop", "fast"]).ok()
    assert [(said["raised"], said["says"]) for said in lines(done)] == [("Stopped", "enough")] * 2
    assert status(out)["state"] == "stopped"
    again = launch([*TORCHRUN, WORKER, out, "torch"])
    assert [said["digest"] for said in lines(again)] == [wanted] * 2


@pytest.mark.parametrize(
    ("options", "says"),
    [({"heartbeat_timeout": 0.0}, "heartbeat_timeout 0"), ({"on_stall": "scream"}, "on_stall='scream'")],
)
def test_wrong_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        dualeval.Session(**options)


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean batch_size"):
        dualeval.evaluate(TinyTask(3), batchsize=3)  # type: ignore[call-arg]


def test_a_session_that_is_not_open_says_so() -> None:
    with pytest.raises(UsageError, match=r"with dualeval\.Session"):
        dualeval.Session().evaluate(TinyTask(3))


CAUGHT = """
import time
import dualeval
from dualeval.engine.end import watch
from tests.vehicles.tiny import TinyTask

watch._AT_LAST_S = 0.5
end = watch.Watch._end

def late(self):
    time.sleep(0.3)
    end(self)

watch.Watch._end = late
for _ in range(2):
    try:
        dualeval.evaluate(TinyTask(3), batchsize=3)
    except dualeval.UsageError:
        pass
time.sleep(1.5)
"""


def test_nothing_ends_a_script_that_went_on(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CAUGHT)
    done = launch([*ALONE, tmp_path / "script.py"]).ok()
    assert done.stderr == ""


OWN_ERROR = """
import sys

import dualeval
from tests.vehicles.tiny import TinyTask

found = sys.excepthook
for options in ({}, {"batchsize": 3}, {}):
    try:
        dualeval.evaluate(TinyTask(3), backend="torch", **options)
    except dualeval.UsageError:
        pass
print(sys.excepthook is found)
raise KeyError("own")
"""


def test_an_error_of_a_script_after_several_sessions_is_shown_once(launch: Launch, tmp_path: Path) -> None:
    """torch puts a hook of its own around the session's for each group: both are removed with the session."""
    (tmp_path / "script.py").write_text(OWN_ERROR)
    done = launch([*start("torchrun", 1), sys.executable, tmp_path / "script.py"])
    assert done.stdout.splitlines()[-1] == "True", "a hook is left behind"
    assert "KeyError: 'own'" in done.stderr
    assert "_distributed_excepthook" not in done.stderr and "Error in sys.excepthook" not in done.stderr
    assert "RecursionError" not in done.stderr
