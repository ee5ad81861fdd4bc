"""Runs that are hurt, and what is found afterwards: for the tests of faults and for benchmarks/faults.py.

A round is a run of a small job that is hurt at a random moment, and goes on with another launcher, backend
and number of ranks, to be hurt again or not, until it is done. What is random in it comes from its seed, but
for the pace of the machine.
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil  # type: ignore[import-untyped]
import pyarrow.parquet
import pytest

from tests.conftest import ROOT, Launch
from tests.vehicles.faulty_models import FAULT, FLUSH_S

SAMPLES = 2_000
JOB = [
    *("--model", "tests.vehicles.faulty_models:fashion_cnn", "--batch-size", "20", "--no-progress"),
    *("--weights", str(ROOT / "dualeval/assets/fashion_cnn.safetensors")),
    *("--data", str(ROOT / "dualeval/assets")),
]
SMALL_JOB = [*JOB, "--limit", str(SAMPLES)]
# Seconds: what a rank may stand still for, what the others then take at most to be gone, and what a machine
# takes on top that has other things to do.
HEARTBEAT_S = 3.0
GONE_WITHIN_S = 10.0
LOADED_S = 15.0
# A run that has not ended by then hangs. torch's agent kills after 30 s what it could not end.
PATIENCE = 90.0
_PAUSE = 0.05

# What a person types for so many ranks on this machine, by the backend.
ON_ONE_HOST = {
    "torch": "dualeval run --nproc {n}",
    "horovod": "dualeval run --nproc {n} --backend horovod",
    "mpi": "mpirun -np {n} dualeval run --backend mpi",
}
_WAYS = [*ON_ONE_HOST.values(), "torchrun --standalone --nproc-per-node {n} -m dualeval run"]
# The first that is set says which rank a process is.
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "SLURM_PROCID")


class Hanging(Exception):
    """Something that was awaited did not come."""


class Run:
    """A run under way, from ``hurt_run``."""

    def __init__(
        self,
        launchers: Sequence[Any],
        size: int,
        folder: Path,
        find: Callable[[], list[psutil.Process]] | None,
    ) -> None:
        self.launchers = launchers
        self.size = size
        self.ranks: dict[int, psutil.Process] = {}
        self.first_gone: float | None = None  # when the first rank was seen to have ended
        self.last_gone: float | None = None  # when all had
        self._folder = folder
        self._find = find or self._descendants

    def said(self) -> str:
        """All that was printed so far, by launchers and ranks."""
        return "".join(path.read_text(errors="replace") for path in sorted(self._folder.glob("*.log")))

    def look(self) -> None:
        """Note which ranks have come, and which have gone."""
        # A search costs more than a look at what is known.
        for process in self._find() if len(self.ranks) < self.size else []:
            rank = rank_of(process)
            if rank is not None:
                # A reading process, forked from its rank, looks the same.
                self.ranks.setdefault(rank, process)
        now = time.monotonic()
        alive = [rank for rank, process in self.ranks.items() if is_alive(process)]
        if len(alive) < len(self.ranks):
            self.first_gone = self.first_gone or now
        self.last_gone = None if alive or not self.ranks else self.last_gone or now

    def has_ended(self) -> bool:
        """Whether all launchers have."""
        return all(launcher.poll() is not None for launcher in self.launchers)

    def wait(self, condition: Callable[[], object], what: str, within_s: float = PATIENCE) -> None:
        """Look until a condition holds."""
        deadline = time.monotonic() + within_s
        while True:
            self.look()
            if condition():
                return
            if time.monotonic() > deadline:
                raise Hanging(f"{what}: not within {within_s:g} s. Said so far:\n{self.said()[-6000:]}")
            time.sleep(_PAUSE)

    def wait_for_end(self, within_s: float = PATIENCE) -> None:
        """Wait until all ranks are gone, and all launchers."""
        self.wait(self.has_ended, "the end of the launcher", within_s)
        self.wait(lambda: not self.ranks or self.last_gone, "the end of all ranks", within_s)

    def _descendants(self) -> list[psutil.Process]:
        found = []
        for launcher in self.launchers:
            with suppress(psutil.NoSuchProcess):
                own = psutil.Process(launcher.pid)
                found += [own, *own.children(recursive=True)]
        return found


def rank_of(process: psutil.Process) -> int | None:
    """Which rank a process is; None where it is none, as a launcher or a shell."""
    try:
        _, *words = process.cmdline() or [""]
        environ = process.environ()
    except psutil.Error:
        return None
    if "run" not in words or "--nproc" in words:
        return None
    before = [word for word in words[: words.index("run")] if word not in ("-u", "-m")]
    if len(before) != 1 or not before[0].endswith(("dualeval", "dualeval/__main__.py")):
        return None
    return int(next((environ[name] for name in _RANK_VARIABLES if name in environ), 0))


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs, or is stopped; not where it only waits for its parent to ask for its end."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def hurt_run(
    launch: Launch,
    commands: Sequence[Sequence[str | Path]],
    size: int,  # the number of ranks
    folder: Path,
    *,
    fault: str = "",
    variables: Mapping[str, str] | None = None,
    find: Callable[[], list[psutil.Process]] | None = None,
    flush_s: float = 0.2,
) -> Iterator[Run]:
    """Start a run whose model has a fault, and let the caller hurt it further and wait for its end."""
    folder.mkdir(parents=True, exist_ok=True)
    for log in folder.glob("*.log"):
        log.unlink()
    environ = {"OMP_NUM_THREADS": "1", FLUSH_S: str(flush_s), FAULT: fault, **(variables or {})}
    with _all_started(
        launch,
        [
            ["sh", "-c", 'exec "$@" > "$0" 2>&1', folder / f"launcher-{number}.log", *command]
            for number, command in enumerate(commands)
        ],
        environ,
        folder,
    ) as launchers:
        yield Run(launchers, size, folder, find)


def ended_run(launch: Launch, command: Sequence[str | Path], size: int, folder: Path, **options: Any) -> Run:
    """A run whose model has a fault, at its end."""
    with hurt_run(launch, [command], size, folder, **options) as run:
        run.wait_for_end()
    return run


@contextmanager
def _all_started(
    launch: Launch, commands: Sequence[Sequence[str | Path]], environ: Mapping[str, str], folder: Path
) -> Iterator[list[Any]]:
    if not commands:
        yield []
        return
    first, *others = commands
    with (
        launch.started(first, variables=environ, cwd=folder) as process,
        _all_started(launch, others, environ, folder) as processes,
    ):
        yield [process, *processes]


def kill(process: psutil.Process) -> None:
    """Kill a process, which may be gone already."""
    with suppress(psutil.NoSuchProcess):
        process.kill()


# -- what is found in the folder of a run that is done -----------------------------------------------------


@dataclass(kw_only=True)
class Found:
    """What a finished run has in its folder, against what it should have."""

    lost: int = 0  # samples that are missing
    twice: int = 0  # samples that are there more than once
    differs: bool = False
    resumed: int = 0  # chunks that were taken from the journal
    wrong: list[str] = field(default_factory=list)  # sentences on what else is not as it should be


def look_into(out: Path, samples: int, digest: str) -> Found:
    """Look into the folder of a run that is done."""
    result = json.loads((out / "result.json").read_text())
    index = pyarrow.parquet.read_table(out / "predictions.parquet")["index"].to_pylist()
    counts = Counter(index)
    found = Found(
        lost=len(set(range(samples)) - set(index)) or max(0, samples - result["samples"]["evaluated"]),
        twice=sum(count - 1 for count in counts.values()) or max(0, result["samples"]["evaluated"] - samples),
        differs=result["metrics_digest"] != digest,
        resumed=result["chunks"]["resumed"],
    )
    if result["samples"] != {"total": samples, "evaluated": samples, "failed": 0}:
        found.wrong.append(f"samples {result['samples']}")
    if index != list(range(samples)):
        found.wrong.append("predictions.parquet is not in the order of the data set")
    chunks = result["chunks"]
    if chunks["evaluated_now"] + chunks["resumed"] != chunks["total"]:
        found.wrong.append(f"chunks {chunks}")
    left = [path.name for path in (out / "journal").glob("*.journal")] if (out / "journal").exists() else []
    if left:
        found.wrong.append(f"left in the journal: {left}")
    if json.loads((out / "status.json").read_text())["state"] != "done":
        found.wrong.append("status.json does not say done")
    return found


# -- rounds ------------------------------------------------------------------------------------------------

POINTS = {f"SIGKILL within the {point} of a journal file": point for point in ("write", "fsync", "rename")}
KILL, KILL_0, TERM = "SIGKILL of a rank", "SIGKILL of rank 0", "SIGTERM to the launcher"
KINDS = (KILL, KILL_0, TERM, *POINTS)


@dataclass(kw_only=True)
class Round:
    """One round, and what came of it."""

    kind: str  # one of ``KINDS``
    seed: str  # of all that is random in it
    story: list[str] = field(default_factory=list)  # what was done, a sentence a run
    hurt: int = 0  # how often a run was hurt
    # For each of these, the seconds until the last rank was gone.
    notice_s: list[float] = field(default_factory=list)
    saved: int = 0  # number of journal files that the last run found
    found: Found | None = None  # in the folder, once it was done; None where it never was
    wrong: list[str] = field(default_factory=list)  # sentences on what went wrong
    hanging: bool = False  # whether a run, or a process of it, did not end

    def __str__(self) -> str:
        found = self.found
        return "\n".join([f"{self.kind}, seed {self.seed!r}:", *self.story, f"{found}", *self.wrong])

    @property
    def went_well(self) -> bool:
        """Whether nothing was lost, counted twice, different, hanging or else wrong."""
        found = self.found
        if found is None or self.hanging or self.wrong:
            return False
        return not (found.lost or found.twice or found.differs or found.wrong)


def uninterrupted(launch: Launch, folder: Path, job: Sequence[str] = SMALL_JOB) -> str:
    """The digest of a job, from one process that nobody hurts."""
    run = ended_run(launch, ["dualeval", "run", *job, "--out", "out"], 1, folder)
    assert run.launchers[0].returncode == 0, run.said()
    return str(json.loads((folder / "out/result.json").read_text())["metrics_digest"])


def play(launch: Launch, folder: Path, kind: str, seed: str, digest: str, *, sharded: bool = False) -> Round:
    """Play one round: hurt a run, whose model may be sharded, and go on until it is done, or whole."""
    random = Random(seed)
    round_ = Round(kind=kind, seed=seed)
    try:
        again = True
        while not _is_done(folder / "out") or not round_.story:
            if len(round_.story) >= 12:
                round_.wrong.append("it does not come to its end")
                return round_
            _play_run(launch, folder, round_, random, hurt=again, sharded=sharded)
            if round_.wrong:
                return round_
            again = random.random() < 1 / 3
    except Hanging as error:
        round_.hanging = True
        round_.wrong.append(str(error))
        return round_
    except pytest.fail.Exception as error:
        # Launch: processes were left behind.
        round_.hanging = True
        round_.wrong.append(str(error))
        return round_
    round_.found = look_into(folder / "out", SAMPLES, digest)
    if round_.saved and not round_.found.resumed:
        round_.wrong.append("what was saved has not been used")
    return round_


def _is_done(out: Path) -> bool:
    try:
        return bool(json.loads((out / "status.json").read_text())["state"] == "done")
    except FileNotFoundError:
        return False


def _play_run(
    launch: Launch, folder: Path, round_: Round, random: Random, *, hurt: bool, sharded: bool
) -> None:
    size = random.randint(1, 4)
    ways = [way for way in _WAYS if "--backend" not in way] if sharded else _WAYS
    typed = random.choice(["dualeval run", *ways] if size == 1 else ways).format(n=size)
    if sharded and (not round_.story or random.random() < 2 / 3):
        typed += " --shard fsdp"
    # Long enough that the moment lies within it.
    evaluate_s = random.uniform(0.8, 1.6)
    faults = [f"slow:{evaluate_s * size / (SAMPLES / 20):.4f} all 0"] if hurt else []
    point = POINTS.get(round_.kind) if hurt else None
    if point is not None:
        faults.append(f"{point} {random.randrange(size)} {random.randrange(3)}")
    victim_at = random.random()
    delay_s = random.uniform(0.0, 1.5 + 0.7 * size + evaluate_s)
    after_a_file = random.random() < 0.5
    command = [*typed.split(), *SMALL_JOB, "--out", "out", "--heartbeat-timeout", "10"]
    journal = folder / "out/journal"
    before = len(list(journal.glob("*.journal")))
    # With a result, the run that made it says what was resumed.
    if not (folder / "out/result.json").exists():
        round_.saved = before
    with hurt_run(launch, [command], size, folder, fault=";".join(faults)) as run:
        start = time.monotonic()
        story = f"{typed}: "

        def the_moment_has_come() -> bool:
            if after_a_file:
                return len(list(journal.glob("*.journal"))) > before
            return time.monotonic() - start > delay_s

        hurt_at: float | None = None
        if hurt and point is None:
            run.wait(lambda: run.has_ended() or (run.ranks and the_moment_has_come()), "the moment")
            alive = [rank for rank, process in sorted(run.ranks.items()) if is_alive(process)]
            if not run.has_ended() and alive:
                hurt_at = time.monotonic()
                story += _hurt(run, round_.kind, alive, victim_at)
                story += f" after {hurt_at - start:.2f} s"
        run.wait_for_end()
        if point is not None and run.launchers[0].returncode != 0:
            hurt_at = run.first_gone
            story += f"ended itself ({faults[-1]})"
        files = len(list(journal.glob("*.journal")))
        code = run.launchers[0].returncode
        if hurt_at is not None:
            assert run.last_gone is not None
            round_.hurt += 1
            round_.notice_s.append(run.last_gone - hurt_at)
            story += f", all gone {round_.notice_s[-1]:.2f} s later"
        story += f"; exit code {code}, {files} journal files"
        round_.story.append(story)
        if hurt_at is None and code != 0:
            round_.wrong.append(f"a run that nobody hurt failed:\n{run.said()[-6000:]}")
        if hurt_at is not None and code == 0 and not _is_done(folder / "out"):
            round_.wrong.append(f"a run was hurt, and says that all is well:\n{run.said()[-6000:]}")
        if code == 0 and not _is_done(folder / "out"):
            round_.wrong.append("exit code 0, but the result is not there")


def _hurt(run: Run, kind: str, alive: list[int], victim_at: float) -> str:
    if kind == TERM:
        run.launchers[0].send_signal(signal.SIGTERM)
        return "SIGTERM"
    rank = alive[int(victim_at * len(alive))]
    if kind == KILL_0 and 0 in alive:
        rank = 0
    kill(run.ranks[rank])
    return f"SIGKILL of rank {rank}"
