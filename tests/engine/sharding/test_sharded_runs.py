"""The command line with a sharded model: the digest of the whole one, on real pictures and real questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Finished, Launch
from tests.vehicles import questions
from tests.vehicles.assets import build_pictures
from tests.vehicles.faults import JOB, KINDS, ended_run, look_into, play, uninterrupted
from tests.vehicles.launchers import start

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
def test_every_size_has_the_digest_of_the_whole_model(
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


# -- sharded runs that are killed at a random moment: gone on with, sharded or whole, on any number of ranks


def test_a_killed_run_goes_on_with_the_whole_model(launch: Launch, tmp_path: Path) -> None:
    job = [*JOB, "--limit", "400", "--heartbeat-timeout", "10"]
    digest = uninterrupted(launch, tmp_path / "whole", job)
    sharded = [*start("torchrun", 2), "dualeval", "run", *job, *SHARD, "--out", "out"]
    fault = "slow:0.01 all 0;kill 1 5"
    run = ended_run(launch, sharded, 2, tmp_path, fault=fault, flush_s=0.05)
    assert run.launchers[0].returncode != 0, run.said()
    run = ended_run(launch, ["dualeval", "run", *job, "--out", "out"], 1, tmp_path)
    assert run.launchers[0].returncode == 0, run.said()
    found = look_into(tmp_path / "out", 400, digest)
    assert not (found.lost or found.twice or found.differs or found.wrong), found
    assert found.resumed > 0


@pytest.fixture(scope="module")
def digest(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> str:
    return uninterrupted(launch, tmp_path_factory.mktemp("whole"))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_a_run_killed_at_random_has_the_digest_of_the_whole_model(
    launch: Launch, tmp_path: Path, digest: str, seed: int
) -> None:
    played = play(launch, tmp_path, KINDS[seed % len(KINDS)], f"sharded {seed}", digest, sharded=True)
    assert played.went_well, played
