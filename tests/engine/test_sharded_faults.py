"""Sharded runs that are killed at a random moment: gone on with, sharded or whole, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from tests.conftest import Launch
from tests.faults import JOB, hurt_run, look_into, uninterrupted
from tests.faulty_models import POINTS
from tests.launchers import start

BATCH = 20
# A batch takes so long at least, and a journal file is written after a few of them.
SLOW_S = 0.01
FLUSH_S = 0.05


def job(batches: int) -> list[str]:
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
        command = [*one.words, "dualeval", "run", *job(batches), *one.options, "--out", "out"]
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
    digest = uninterrupted(launch, tmp_path / "whole", job(20))
    typed = [Typed(size=2, sharded=True, fault="kill 1 5"), Typed(size=1, sharded=False)]
    play(launch, tmp_path / "hurt", typed, digest, 20)


@pytest.fixture(scope="module")
def digest(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> str:
    return uninterrupted(launch, tmp_path_factory.mktemp("whole"), job(60))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_random_kills(launch: Launch, tmp_path: Path, digest: str, seed: int) -> None:
    play(launch, tmp_path, commands(Random(seed), 60), digest, 60)
