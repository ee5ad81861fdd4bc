"""Trials of ``bench`` and ``conformance``: starts of ranks in a launcher, which run one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import click

from dualeval.errors import LaunchError, UsageError
from dualeval.launch import detect
from dualeval.launch.launchers import WAYS, may_start_ranks, start_words, why_not
from dualeval.launch.site import Site, default_ranks, spread
from dualeval.tools.supervise import Ended, Interrupted, Interrupts, run_supervised

# Outcomes of a trial that has no result.
FAILED, NOT_HERE, NOT_RUN = "failed", "not here", "not run"


def words_of(_context: click.Context, _parameter: click.Parameter, value: str | None) -> list[str] | None:
    """Callback of an option: words with commas between, each once."""
    return None if value is None else list(dict.fromkeys(word.strip() for word in value.split(",")))


def counts_of(context: click.Context, parameter: click.Parameter, value: str | None) -> list[int] | None:
    """Callback of an option: whole numbers with commas between, in order."""
    words = words_of(context, parameter, value)
    if words is None:
        return None
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise click.BadParameter(
            f"{value!r}: expected whole numbers of at least 1 with commas between, as 1,2"
        )
    return sorted(set(map(int, words)))


def check_no_rank(launcher: str | None, why: str) -> None:
    """Refuse to be one of several ranks, each of which would start all trials."""
    world = detect(os.environ, launcher)
    if not may_start_ranks(world):
        raise LaunchError(
            f"{world.launcher} started this process as rank {world.rank} of {world.size}, and {why}"
        )


def new_folder(out: Path | None, tool: str) -> tuple[Path, str]:
    """The folder for a report, which is not made yet, and the time; refuses one that has something in it."""
    now = datetime.now(timezone.utc)
    folder = (out or Path("runs", f"{tool}-{now:%Y%m%dT%H%M%S}")).absolute()
    nearest = next(parent for parent in (folder / "x").parents if os.path.lexists(parent))
    if nearest == folder and not folder.is_dir():
        raise UsageError(f"--out {folder}: this is no folder. Give a new or an empty one.")
    if nearest == folder and any(folder.iterdir()):
        raise UsageError(f"--out {folder}: this folder is not empty. Give a new or an empty one.")
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        why = "cannot be written" if nearest.is_dir() else "is no folder"
        raise UsageError(f"--out {folder}: {nearest} {why}. Give a folder of your own.")
    return folder, f"{now:%Y-%m-%d %H:%M} UTC"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One start of ranks in a launcher."""

    # A name of `launch.launchers.WAYS`.
    launcher: str
    # Which backend is asked for.
    backend: str
    # How many ranks, on how many `nodes`.
    ranks: int
    nodes: int
    # "cpu" or "cuda".
    device: str
    # One process, with which the others of its device are compared.
    is_reference: bool = False
    # Every operation of the backend is tried in place of a run.
    is_self_test: bool = False
    # Why it cannot be started here; None where it can.
    reason: str | None = None

    @classmethod
    def on(cls, site: Site, launcher: str, backend: str, ranks: int, device: str) -> Trial:
        """Ranks on the nodes of a site."""
        return cls(
            launcher=launcher,
            backend=backend,
            ranks=ranks,
            nodes=len(spread(ranks, len(site.nodes))),
            device=device,
            reason=why_not(launcher, backend, ranks, device, site),
        )

    def command(self, site: Site, number: int, dualeval: Sequence[str], *arguments: str) -> list[str]:
        """Its whole command."""
        return [
            *start_words(self.launcher, self.ranks, site, number),
            *dualeval,
            *(["doctor", "--json"] if self.is_self_test else ["run"]),
            *WAYS[self.launcher].after(self.ranks),
            *([] if self.backend == "single" else ["--backend", self.backend]),
            *("--device", self.device),
            *arguments,
        ]


def plan_trials(
    site: Site, devices: Sequence[str], launchers: Sequence[str], ranks: Sequence[int] | None
) -> list[Trial]:
    """List what to start, in this order; for each device its reference comes first.

    Each launcher and backend gets one self-test, with the most ranks that it can be started with.
    """
    trials = []
    for device in devices:
        trials.append(replace(Trial.on(site, "none", "single", 1, device), is_reference=True))
        for launcher in (name for name in launchers if name != "none"):
            for backend in WAYS[launcher].backends:
                sizes = default_ranks(site, device) if ranks is None else ranks
                runs = [Trial.on(site, launcher, backend, size, device) for size in sizes]
                startable = [trial for trial in runs if trial.reason is None]
                trials += runs
                if startable and WAYS[launcher].has_doctor:
                    largest = max(startable, key=lambda trial: trial.ranks)
                    trials.append(replace(largest, is_self_test=True))
    return trials


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Where trials run one after the other, and within which limit."""

    folder: Path
    environ: Mapping[str, str]
    interrupts: Interrupts
    timeout_s: float

    def log(self, name: str, kind: str) -> Path:
        """The file for a trial's output of this kind."""
        return self.folder / "logs" / f"{name}.{kind}"

    def start(self, command: Sequence[str], name: str) -> Ended:
        """Run the command of a trial, with its output in its logs."""
        return run_supervised(
            command,
            stdout=self.log(name, "out"),
            stderr=self.log(name, "err"),
            environ=self.environ,
            timeout_s=self.timeout_s,
            check=self.interrupts.check,
        )

    def in_order(self, trials: Iterable[object], done: str, *folders: str) -> bool:
        """Make the folders, and take one trial after the other; returns whether a signal has ended that."""
        try:
            for name in ("logs", *folders):
                (self.folder / name).mkdir(parents=True)
        except OSError as error:
            raise UsageError(
                f"--out {self.folder}: it cannot be made ({error.strerror}). Give a folder of your own."
            ) from error
        try:
            for _ in trials:
                # A signal that came as it ended, which is the last one maybe.
                self.interrupts.check()
        except Interrupted as error:
            click.echo(f"dualeval: interrupted by {error}; what was {done} until then is reported", err=True)
            return True
        return False
