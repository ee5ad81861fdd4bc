"""``dualeval.evaluate(task, nproc=N)``: the script itself is run again as the ranks."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.engine.test_endings import Words, await_that, end, read
from tests.faulty_models import FLUSH_S
from tests.sessions import evaluate
from tests.tiny import TinyTask

SCRIPT = """
import os, sys, time
import torch
import dualeval
from tests.faulty_models import FLUSH_S
from tests.tiny import TinyTask
from dualeval.engine import recorder

recorder.FLUSH_EVERY_S = float(os.environ.get(FLUSH_S, "5"))

class Slow(TinyTask):
    def forward(self, model, batch):
        time.sleep(float(os.environ.get("SLOW", "0")))
        return super().forward(model, batch)

os.write(1, b"before\\n")
out, *more = sys.argv[1:]
os.chdir(os.path.dirname(out))
options = dict(word.split("=") for word in more)
count = int(options.pop("nproc"))
result = dualeval.evaluate(Slow(4000), out=out, batch_size=20, nproc=count, **options)
line = f"after {result.world['size']} {sys.flags.optimize} {sys.warnoptions} {result.metrics_digest}\\n"
os.write(1, line.encode())
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = tmp_path_factory.mktemp("scripts") / "evaluations"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "small.py").write_text(SCRIPT)
    return package / "small.py"


@pytest.fixture(scope="module")
def wanted() -> str:
    """The digest of one process."""
    return evaluate(TinyTask(4000), batch_size=20).metrics_digest


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("file", marks=pytest.mark.long),
        "module",
        pytest.param("horovod", marks=[pytest.mark.needs("horovod"), pytest.mark.long]),
    ],
)
def test_the_script_becomes_the_ranks(
    launch: Launch, script: Path, tmp_path: Path, wanted: str, way: str
) -> None:
    """With its arguments and the interpreter's options, by a relative name, from another folder later."""
    run: Words = ["-m", "evaluations.small"] if way == "module" else ["evaluations/small.py"]
    command: Words = [sys.executable, "-O", "-W", "ignore::ImportWarning", *run, tmp_path / "out", "nproc=2"]
    more: Words = ["backend=horovod"] if way == "horovod" else []
    variables = {"PYTHONPATH": f"{Path.cwd()}{os.pathsep}{script.parent.parent}"}
    done = launch([*command, *more], cwd=script.parent.parent, variables=variables).ok()
    before, *rest = sorted(done.stdout.splitlines(), reverse=True)
    after = f"after 2 1 ['ignore::ImportWarning'] {wanted}"
    assert [before, *rest] == ["before", "before", "before", after, after]
    assert done.stderr == ""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_signal_stops_all_and_the_same_command_goes_on(
    launch: Launch, script: Path, tmp_path: Path, wanted: str, number: signal.Signals
) -> None:
    out = tmp_path / "out"
    command: Words = ["env", "--default-signal", sys.executable, script, out, "nproc=2"]
    with launch.started(command, variables={"SLOW": "0.05", FLUSH_S: "0.2"}) as process:
        await_that(lambda: list(out.glob("journal/*.journal")), process)
        process.send_signal(number)
        code, said = end(process)
    assert code == 75, said
    assert said.count(f"dualeval: stopped by {number.name}.") == said.count("\n") == 1, said
    launch(command).ok()
    result = read(out / "result.json")
    assert result["metrics_digest"] == wanted
    assert result["chunks"]["resumed"] > 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["-c", SCRIPT], "nproc=2 runs the script again as 2 processes, and there is no file to run"),
        (["-"], "there is no file to run"),
    ],
    ids=["c", "standard-input"],
)
def test_no_script_to_run_again(launch: Launch, tmp_path: Path, command: list[str], message: str) -> None:
    (tmp_path / "code").write_text(SCRIPT)
    shell: Words = ["bash", "-c", 'exec "$@" <code', "bash", sys.executable, *command]
    done = launch([*shell, tmp_path / "out", "nproc=2"], cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr
    assert "type 'python FILE'" in done.stderr


@pytest.mark.long
def test_under_a_launcher(launch: Launch, script: Path, tmp_path: Path, wanted: str) -> None:
    torchrun: Words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", script]
    done = launch([*torchrun, tmp_path / "out", "nproc=1"]).ok()
    assert done.stdout.split()[-1] == wanted, "as many: it has nothing to do"
    done = launch([*torchrun, tmp_path / "other", "nproc=3"])
    assert done.returncode != 0
    assert "nproc=3: this process is rank 0 of 1 already (started by torchrun)" in done.stderr


@pytest.mark.long
def test_no_ranks_without_end(launch: Launch, script: Path, tmp_path: Path) -> None:
    forgetful = script.with_name("forgetful.py")
    forgetful.write_text(
        "import os\nfor name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE',"
        " 'GROUP_RANK', 'MASTER_ADDR', 'MASTER_PORT', 'TORCHELASTIC_RUN_ID'):\n"
        "    os.environ.pop(name, None)\n" + SCRIPT
    )
    done = launch([sys.executable, forgetful, tmp_path / "out", "nproc=2"])
    assert done.returncode == 1
    assert "no variable of torchrun is set" in done.stderr, done.stderr


def test_an_error_of_a_rank(launch: Launch, script: Path, tmp_path: Path) -> None:
    """Its exit code is the script's, and nothing is said twice."""
    done = launch([sys.executable, script, tmp_path / "out", "nproc=2", "precision=fp7"])
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("fp7") == 1, done.stderr
