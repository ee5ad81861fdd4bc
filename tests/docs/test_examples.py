"""The examples of sessions: under launchers and without, killed, stalled, and in the midst of a training."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.conftest import ROOT, Launch
from tests.engine.test_endings import ASSETS, await_that, ranks_of, read
from tests.faulty_models import FAULT, FLUSH_S
from tests.launchers import needs, start

SCRIPT = ROOT / "examples" / "evaluate_in_a_script.py"
TRAINING = ROOT / "examples" / "evaluate_while_training.py"
WORKER = ROOT / "tests" / "workers" / "example_worker.py"
ALONE = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
HOROVODRUN = ["horovodrun", "-np", "2", sys.executable]
FAULTY = [
    "model=tests.faulty_models:fashion_cnn",
    f"weights={ASSETS / 'fashion_cnn.safetensors'}",
    f"data={ASSETS}",
    "timeout=3",
]
SLOWLY = {FAULT: "slow all 0", FLUSH_S: "0.2", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("path", [SCRIPT, TRAINING], ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    text = path.read_text("utf-8")
    body = text.replace(ast.get_docstring(ast.parse(text), clean=False) or "", "").splitlines()
    assert len([line for line in body if line.strip(' "')]) <= 25


@pytest.fixture(scope="module")
def digest(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the embedded job, in the example's batches."""
    out = tmp_path_factory.mktemp("run") / "out"
    launch([*ALONE, "-m", "dualeval", "run", "--batch-size", "50", "--out", out]).ok()
    return str(read(out / "result.json")["metrics_digest"])


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(ALONE, id="alone", marks=pytest.mark.long),
        pytest.param([*start("torchrun", 2), sys.executable], id="torchrun"),
        pytest.param(HOROVODRUN, id="horovodrun", marks=[*needs("horovodrun", ""), pytest.mark.long]),
    ],
)
def test_a_script_evaluates(launch: Launch, tmp_path: Path, digest: str, launcher: list[str]) -> None:
    done = launch([*launcher, SCRIPT, tmp_path / "out"]).ok()
    assert done.stdout.count(digest) == 1


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(TORCHRUN, ALONE, id="torchrun, alone"),
        pytest.param(
            ALONE, HOROVODRUN, id="alone, horovodrun", marks=[*needs("horovodrun", ""), pytest.mark.long]
        ),
    ],
)
def test_a_killed_script_goes_on(
    launch: Launch, tmp_path: Path, digest: str, first: list[str], then: list[str]
) -> None:
    out = tmp_path / "out"
    with launch.started([*first, SCRIPT, out, *FAULTY], variables=SLOWLY) as process:
        await_that(lambda: list(out.glob("journal/*.journal")), process)
        ranks_of(process)[-1].kill()
        process.communicate(timeout=60)
    launch([*then, SCRIPT, out, *FAULTY], variables={"OMP_NUM_THREADS": "1"}).ok()
    result = read(out / "result.json")
    assert result["metrics_digest"] == digest and result["chunks"]["resumed"] > 0


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(ALONE, id="alone"),
        pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.long),
        pytest.param(HOROVODRUN, id="horovodrun", marks=[*needs("horovodrun", ""), pytest.mark.long]),
    ],
)
def test_a_script_that_stands_still_is_named(launch: Launch, tmp_path: Path, launcher: list[str]) -> None:
    out = tmp_path / "out"
    done = launch([*launcher, SCRIPT, out, *FAULTY], variables={**SLOWLY, FAULT: "stall 0 5"})
    assert done.returncode == 1, done.stderr
    assert re.search(
        r"rank 0 on \S+ \(pid \d+\): no progress for \d+ s, chunk \d+, stage forward", done.stderr
    )
    assert read(out / "status.json")["state"] == "failed"
    assert not [child for child in psutil.Process().children() if str(out) in child.cmdline()]


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        pytest.param([*start("torchrun", 2), sys.executable], [], id="DDP"),
        pytest.param(
            HOROVODRUN, ["horovod"], id="Horovod", marks=[*needs("horovodrun", ""), pytest.mark.long]
        ),
    ],
)
def test_training_goes_on_bit_for_bit(launch: Launch, launcher: list[str], words: list[str]) -> None:
    found = []
    for evaluates in ("with", "without"):
        done = launch([*launcher, WORKER, TRAINING, evaluates, *words]).ok()
        found.append(sorted(re.findall(r"<(\d) (\w+) (\w+)>", done.stdout)))
        assert len(re.findall(r"epoch 2: \{'correct': \d", done.stdout)) == 2
    assert found[0] == found[1] and len(found[0]) == 2
    assert {owner for _, owner, _ in found[0]} == {"False"}
    assert len({digest for *_, digest in found[0]}) == 1
