"""The command line with a sharded model: the digest of the whole one, on real pictures and real questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests import questions
from tests.assets import build_pictures
from tests.conftest import Finished, Launch
from tests.faults import JOB, hurt_run, look_into, uninterrupted
from tests.faulty_models import POINTS
from tests.launchers import start

SHARD = ("--shard", "fsdp")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is evaluated, of so many samples."""

    arguments: Sequence[str | Path]
    samples: int


Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """ResNet-18 with random weights over the twenty pictures, in seven batches."""
    data = build_pictures(tmp_path_factory.mktemp("imagenet")).data
    model: list[str | Path] = ["--model", "resnet18", "--weights", "random:3"]
    return Job(arguments=[*model, "--data", data, "--batch-size", "3"], samples=20)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """MiniLM's encoder with an untrained head over the five questions, in five batches."""
    folder = questions.save_with_head(tmp_path_factory.mktemp("minilm"))
    job: list[str | Path] = ["--task", "question-answering", "--model", folder]
    job += ["--data", questions.squad_file()]
    return Job(arguments=[*job, "--batch-size", "1"], samples=5)


@pytest.fixture(scope="module", params=["pictures", "asked"])
def job(request: pytest.FixtureRequest) -> Job:
    found: Job = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def evaluate(launch: Launch, tmp_path: Path) -> Callable[..., Finished]:
    """Type a command into a new folder of its own, with one thread a rank."""

    def run(job: Job, *more: str, before: Sequence[str] = ()) -> Finished:
        command = [*before, "dualeval", "run", *job.arguments, "--no-progress", *more]
        return launch([*command, "--out", tmp_path / "out"], variables={"OMP_NUM_THREADS": "1"}, cwd=tmp_path)

    return run


@pytest.fixture(scope="module")
def whole(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The result of one process with the whole model, once for each job."""
    results: dict[str, dict[str, Any]] = {}

    def run(job: Job, *more: str) -> dict[str, Any]:
        key = " ".join(map(str, (*job.arguments, *more)))
        if key not in results:
            out = tmp_path_factory.mktemp("whole") / "out"
            words = ["dualeval", "run", *job.arguments, *more, "--no-progress", "--out", out]
            launch(words, variables={"OMP_NUM_THREADS": "1"}).ok()
            results[key] = json.loads((out / "result.json").read_text())
        return results[key]

    return run


def check(found: dict[str, Any], wanted: dict[str, Any], size: int, samples: int) -> None:
    """Compare all but what says how it was computed."""
    assert found["metrics_digest"] == wanted["metrics_digest"]
    for name in ("metrics", "fingerprint", "weights", "data"):
        assert found[name] == wanted[name], name
    assert found["samples"] == {"total": samples, "evaluated": samples, "failed": 0}
    assert (found["chunks"]["resumed"], found["world"]["size"]) == (0, size)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_size(
    evaluate: Callable[..., Finished], whole: Run, job: Job, size: int, tmp_path: Path
) -> None:
    """Two ranks have another number of batches than each other, and so have three."""
    evaluate(job, *SHARD, before=start("torchrun", size)).ok()
    found = json.loads((tmp_path / "out/result.json").read_text())
    check(found, whole(job), size, job.samples)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [2, 3])
def test_twenty_of_twenty_runs_exit_0(launch: Launch, tmp_path: Path, size: int) -> None:
    """gloo's threads abort a process that ends while they still hold a part of a model."""
    codes, digests = [], set()
    for number in range(20):
        words = [
            *("dualeval", "run", "--limit", "200", *SHARD, "--no-progress"),
            *("--out", str(tmp_path / str(number))),
        ]
        codes.append(
            launch([*start("torchrun", size), *words], variables={"OMP_NUM_THREADS": "1"}).returncode
        )
        digests.add(json.loads((tmp_path / f"{number}/result.json").read_text())["metrics_digest"])
    assert codes == [0] * 20
    assert len(digests) == 1


# -- sharded runs that are killed at a random moment: gone on with, sharded or whole, on any number of ra


BATCH = 20
# A batch takes so long at least, and a journal file is written after a few of them.
SLOW_S = 0.01
FLUSH_S = 0.05


def hurt_job(batches: int) -> list[str]:
    return [*JOB, "--limit", str(BATCH * batches), "--heartbeat-timeout", "10"]


@dataclass(frozen=True, kw_only=True)
class Typed:
    """One command: so many ranks, with a sharded model or a whole one, and the fault of one rank."""

    size: int
    sharded: bool
    fault: str = ""

    @property
    def words(self) -> list[str]:
        return start("torchrun", self.size) if self.size > 1 else []

    @property
    def options(self) -> list[str]:
        return ["--shard", "fsdp"] if self.sharded else []


def hurt(random: Random, *, size: int, sharded: bool, batches: int) -> Typed:
    """A command of which one rank dies after some of its batches, or within a journal file."""
    victim = random.randrange(size)
    moments = [f"kill {victim} {random.randrange(batches // size)}"] * 2
    moments += [f"{point} {victim} {random.randrange(2)}" for point in POINTS]
    return Typed(size=size, sharded=sharded, fault=random.choice(moments))


def commands(random: Random, batches: int) -> Iterator[Typed]:
    """A sharded run that is hurt, and what is typed then, which is hurt or not."""
    yield hurt(random, size=random.randint(1, 3), sharded=True, batches=batches)
    while True:
        size, sharded = random.randint(1, 3), random.random() < 2 / 3
        again = random.random() < 1 / 3
        whole = Typed(size=size, sharded=sharded)
        yield hurt(random, size=size, sharded=sharded, batches=batches) if again else whole


def play(launch: Launch, folder: Path, typed: Iterable[Typed], digest: str, batches: int) -> None:
    """Type one command after the other until the run is done, and look into its folder."""
    story: list[str] = []
    for one in islice(typed, 8):
        command = [*one.words, "dualeval", "run", *hurt_job(batches), *one.options, "--out", "out"]
        fault = f"slow:{SLOW_S} all 0;{one.fault}"
        with hurt_run(launch, [command], one.size, folder, fault=fault, flush_s=FLUSH_S) as run:
            run.wait_for_end()
            code = run.launchers[0].returncode
            story.append(f"{one}: exit code {code}")
            assert one.fault or code == 0, f"{story}\n{run.said()}"
            assert code or len(story) > 1, f"nobody was hurt: {story}\n{run.said()}"
        if code == 0:
            found = look_into(folder / "out", BATCH * batches, digest)
            assert not (found.lost or found.twice or found.differs or found.wrong), f"{story}: {found}"
            return
    pytest.fail(f"it does not come to its end: {story}")


def test_a_killed_run_goes_on_with_the_whole_model(launch: Launch, tmp_path: Path) -> None:
    digest = uninterrupted(launch, tmp_path / "whole", hurt_job(20))
    typed = [Typed(size=2, sharded=True, fault="kill 1 5"), Typed(size=1, sharded=False)]
    play(launch, tmp_path / "hurt", typed, digest, 20)


@pytest.fixture(scope="module")
def digest(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> str:
    return uninterrupted(launch, tmp_path_factory.mktemp("whole"), hurt_job(60))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_random_kills(launch: Launch, tmp_path: Path, digest: str, seed: int) -> None:
    play(launch, tmp_path, commands(Random(seed), 60), digest, 60)
