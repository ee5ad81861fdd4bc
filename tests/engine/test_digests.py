"""The same bits whatever the number of processes, loader workers and threads, and however started."""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from dualeval.engine.samples.subset import digest_of
from tests.conftest import ROOT, Launch
from tests.engine.test_engine_ranks import run_ranks
from tests.vehicles.assets import build_pictures
from tests.vehicles.launchers import needs, start

LIMITS = (10_000, 997, 3, 1)

# The embedded job on all 10,000 images with the shipped weights.
TOP1 = 0.9305
TOP1_OF_997 = 939 / 997

Digests = dict[int, str]


def matrix(launch: Launch, folder: Path, size: int, manners: list[tuple[int, int, int]]) -> list[str]:
    """Digests of the embedded job at a world size, for each (limit, workers, threads)."""
    folder.mkdir()
    (folder / "manners.json").write_text(json.dumps(manners))
    found: Any = run_ranks(launch, "manners", size, folder, timeout=280)[0]
    for (limit, _, _), entry in zip(manners, found, strict=True):
        assert (entry["total"], entry["resumed"]) == (limit, 0)
        assert entry["samples"] == digest_of(limit, (f"t10k-{number:05}" for number in range(limit)))
    return [entry["digest"] for entry in found]


@pytest.fixture(scope="module")
def wanted(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Digests:
    """The digest of each limit, from one process with one thread and no workers."""
    folder = tmp_path_factory.mktemp("wanted") / "out"
    digests = matrix(launch, folder, 1, [(limit, 0, 1) for limit in LIMITS])
    assert len(set(digests)) == len(LIMITS)
    return dict(zip(LIMITS, digests, strict=True))


def test_two_ranks_have_the_digest_of_one_with_workers_and_threads(
    launch: Launch, tmp_path: Path, wanted: Digests
) -> None:
    """A rank without any data (limit 1) finishes like the other."""
    manners = [(997, 0, 1), (997, 2, 2), (3, 2, 1), (1, 0, 1), (10_000, 0, 1)]
    found = matrix(launch, tmp_path / "out", 2, manners)
    assert found == [wanted[limit] for limit, _, _ in manners]


Table = list[tuple[object, ...]]


def table(name: str, title: str, columns: list[str]) -> Any:
    """A fixture: the rows of a table, which is written to benchmarks/results/ at the end."""

    @pytest.fixture(scope="module")
    def rows() -> Iterator[Table]:
        found: Table = []
        yield found
        now = datetime.now(timezone.utc)
        lines = [
            *(f"# {title}", ""),
            f"{now:%Y-%m-%d %H:%M} UTC, `make test-long`; Python {platform.python_version()}, "
            f"torch {torch.__version__}. Every run evaluated anew.",
            *("", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"),
            *(f"| {' | '.join(map(str, row))} |" for row in found),
        ]
        (ROOT / f"benchmarks/results/{name}-{now:%Y-%m-%d}.md").write_text("\n".join(lines) + "\n", "utf-8")

    return rows


combinations_table = table(
    "digests",
    "Digests of the embedded job",
    ["samples", "processes", "loader workers", "threads a process", "metrics_digest"],
)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_combination_has_the_digest_of_one_process(
    launch: Launch, tmp_path: Path, wanted: Digests, size: int, combinations_table: Table
) -> None:
    manners = list(itertools.product(LIMITS, (0, 2), (1, 2)))
    found = matrix(launch, tmp_path / "out", size, manners)
    combinations_table += [
        (f"{a:,}", size, b, c, f"`{digest[:16]}`") for (a, b, c), digest in zip(manners, found, strict=True)
    ]
    assert found == [wanted[limit] for limit, _, _ in manners]


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to start an evaluation, and what its ranks are then to find."""

    typed: str  # what a user types, with {n} for the number of processes
    launcher: str  # none, torchrun, horovodrun or mpirun, whose ranks they become
    backend: str  # over which they talk
    folder: Path | None = None  # where it is typed; None: anywhere

    def command(self, size: int) -> str:
        return self.typed.format(n=size)

    def parameter(self, size: int) -> ParameterSet:
        """The values (way, size) of a test, which is named by the command."""
        # More ranks than these share two cores for long.
        is_long = size > 3 or self.typed in DOUBLES
        marks = [*needs(self.launcher, self.backend), *([pytest.mark.long] if is_long else [])]
        return pytest.param(self, size, id=self.command(size), marks=marks)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is evaluated, and what is known of it beforehand."""

    name: str
    arguments: list[str | Path]
    samples: int
    top1: float
    folder: Path | None = None


# Each launcher and backend is in another way, too, or typed by the README's own test.
DOUBLES = {
    *("dualeval run --nproc {n}", "mpirun -np {n} dualeval run --backend torch"),
    *("horovodrun --gloo -np {n} dualeval run", "horovodrun --mpi -np {n} dualeval run"),
    *("mpirun -np {n} dualeval run --backend horovod", "python -m dualeval run"),
    *("torchrun dualeval run --backend torch", "torchrun --nproc-per-node {n} -m dualeval run"),
}
SINGLE = Way(typed="dualeval run", launcher="none", backend="single")
MANY = [
    Way(typed=typed, launcher=launcher, backend=backend)
    for typed, launcher, backend in [
        ("torchrun --nproc-per-node {n} -m dualeval run", "torchrun", "torch"),
        ("dualeval run --nproc {n}", "torchrun", "torch"),
        ("mpirun -np {n} dualeval run --backend torch", "mpirun", "torch"),
        ("horovodrun --gloo -np {n} dualeval run", "horovodrun", "horovod"),
        ("dualeval run --nproc {n} --backend horovod", "horovodrun", "horovod"),
        ("horovodrun --mpi -np {n} dualeval run", "mpirun", "horovod"),
        ("mpirun -np {n} dualeval run --backend horovod", "mpirun", "horovod"),
        ("mpirun -np {n} dualeval run --backend mpi", "mpirun", "mpi"),
    ]
]
# Words that README and --help give, exactly so, and what a checkout can do without being installed.
FURTHER = [
    (Way(typed="python -m dualeval run", launcher="none", backend="single"), 1),
    (Way(typed="horovodrun -np {n} dualeval run", launcher="mpirun", backend="horovod"), 8),
    (Way(typed="mpirun -np {n} dualeval run", launcher="mpirun", backend="horovod"), 4),
    (
        Way(typed="torchrun dualeval run --backend torch", launcher="torchrun", backend="torch", folder=ROOT),
        1,
    ),
]
# As detection names them: the ranks of mpirun are those of the MPI that is installed.
DETECTED = {"mpirun": ("openmpi", "mpich")}

EMBEDDED = Evaluation(name="embedded", arguments=[], samples=10_000, top1=TOP1)
PART = Evaluation(name="part", arguments=["--limit", "997"], samples=997, top1=TOP1_OF_997)
Evaluate = Callable[[Way, int, Evaluation], dict[str, Any]]


def once_each(run: Callable[[Way, int, Evaluation, Path], str], folders: pytest.TempPathFactory) -> Evaluate:
    """Run once in each way, size and job, each in a new folder; gives result.json."""
    results: dict[tuple[str, str], dict[str, Any]] = {}

    def once(way: Way, size: int, evaluation: Evaluation) -> dict[str, Any]:
        key = way.command(size), evaluation.name
        if key not in results:
            home = folders.mktemp("way")
            said = run(way, size, evaluation, home)
            results[key] = json.loads((home / "out/result.json").read_text())
            assert said.count(results[key]["metrics_digest"]) == 1
        return results[key]

    return once


@pytest.fixture(scope="module")
def evaluate(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Evaluate:
    def run(way: Way, size: int, evaluation: Evaluation, home: Path) -> str:
        words = [*way.command(size).split(), *evaluation.arguments, "--out", home / "out"]
        folder = way.folder or evaluation.folder or home
        done = launch(words, cwd=folder, variables={"PYTHONPATH": ""}, timeout=240).ok()
        assert f"{100 * evaluation.top1:.2f} %" in done.stdout
        return done.stdout

    return once_each(run, tmp_path_factory)


def check(
    evaluate: Evaluate, way: Way, size: int, evaluation: Evaluation, nodes: int = 1, digest: str | None = None
) -> dict[str, Any]:
    """Check a result against that of one process, where its digest is not given; returns it."""
    result = evaluate(way, size, evaluation)
    count = evaluation.samples
    assert result["chunks"]["resumed"] == 0
    assert result["chunks"]["evaluated_now"] == result["chunks"]["total"]
    assert result["samples"] == {"total": count, "evaluated": count, "failed": 0}
    assert result["metrics"]["top1"] == evaluation.top1
    world = result["world"]
    assert world["launcher"] in DETECTED.get(way.launcher, (way.launcher,))
    assert (world["size"], world["nodes"], world["backend"]) == (size, nodes, way.backend)
    assert result["metrics_digest"] == (digest or evaluate(SINGLE, 1, evaluation)["metrics_digest"])
    return result


@pytest.mark.parametrize(
    ("way", "size"),
    [
        SINGLE.parameter(1),
        *(way.parameter(2) for way in MANY),
        *(way.parameter(size) for way, size in FURTHER),
    ],
)
def test_every_way_to_start_has_the_digest_of_one_process(
    evaluate: Evaluate, wanted: Digests, way: Way, size: int
) -> None:
    evaluation = EMBEDDED if way == SINGLE else PART
    check(evaluate, way, size, evaluation, digest=wanted[evaluation.samples])


@pytest.fixture(scope="module", params=["embedded", "pictures"])
def evaluation(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    """The embedded job, or the twenty ImageNet pictures in five batches: one for each of four ranks."""
    if request.param == "embedded":
        return EMBEDDED
    pictures = build_pictures(tmp_path_factory.mktemp("imagenet"))
    return Evaluation(
        name="20 ImageNet pictures",
        arguments=[*pictures.arguments, "--batch-size", "4"],
        samples=20,
        top1=18 / 20,
        folder=pictures.home,
    )


launchers_table = table(
    "launchers",
    "Digests under every launcher and backend",
    ["job", "command", "launcher", "backend", "processes", "metrics_digest"],
)


def row(
    evaluation: Evaluation, way: Way, size: int, result: Mapping[str, Any], *names: str
) -> tuple[object, ...]:
    """A row of such a table, with these of the result's world."""
    world = [result["world"][name] for name in names]
    return (evaluation.name, f"`{way.command(size)}`", *world, f"`{result['metrics_digest'][:16]}`")


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "size"),
    [
        *(SINGLE.parameter(1), MANY[0].parameter(32)),
        *(way.parameter(size) for way in MANY for size in (1, 2, 3, 4)),
    ],
)
def test_every_launcher_at_every_size_has_the_digest(
    evaluate: Evaluate, way: Way, size: int, evaluation: Evaluation, launchers_table: Table
) -> None:
    result = check(evaluate, way, size, evaluation)
    launchers_table.append(row(evaluation, way, size, result, "launcher", "backend", "size"))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("size", [2, 3])
def test_fifty_of_fifty_runs_exit_0(launch: Launch, tmp_path: Path, size: int) -> None:
    command = [*start("torchrun", size), "dualeval", "run", "--limit", "200"]
    words = [[*command, "--out", str(tmp_path / str(number))] for number in range(50)]
    assert [launch(each, timeout=60).returncode for each in words] == [0] * 50
