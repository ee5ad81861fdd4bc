"""Which starts ``dualeval conformance`` tries on a site: a pure function of what is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dualeval.launch.launchers import WAYS
from dualeval.launch.site import Site, default_ranks, spread
from dualeval.launch.starts import start_words, why_not


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One start of ``dualeval run`` or, as a self-test, of ``dualeval doctor``."""

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


def plan_trials(
    site: Site, devices: Sequence[str], launchers: Sequence[str], ranks: Sequence[int] | None
) -> list[Trial]:
    """List what to start, in this order; for each device its reference comes first.

    Each launcher and backend gets one self-test, with the most ranks that it can be started with.
    """
    trials = []
    for device in devices:
        trials.append(replace(_run(site, "none", "single", 1, device), is_reference=True))
        for launcher in launchers:
            if launcher == "none":
                continue
            for backend in WAYS[launcher].backends:
                sizes = default_ranks(site, device) if ranks is None else ranks
                runs = [_run(site, launcher, backend, size, device) for size in sizes]
                startable = [trial for trial in runs if trial.reason is None]
                trials += runs
                if startable and WAYS[launcher].has_doctor:
                    largest = max(startable, key=lambda trial: trial.ranks)
                    trials.append(replace(largest, is_self_test=True))
    return trials


def _run(site: Site, launcher: str, backend: str, ranks: int, device: str) -> Trial:
    return Trial(
        launcher=launcher,
        backend=backend,
        ranks=ranks,
        nodes=len(spread(ranks, len(site.nodes))),
        device=device,
        reason=why_not(launcher, backend, ranks, device, site),
    )


def command_of(
    trial: Trial, site: Site, number: int, dualeval: Sequence[str], arguments: Mapping[str, str]
) -> list[str]:
    """Give the whole command of a trial."""
    entry = WAYS[trial.launcher]
    own = [] if trial.backend == "single" else ["--backend", trial.backend]
    return [
        *start_words(trial.launcher, trial.ranks, site, number),
        *dualeval,
        *(["doctor", "--json"] if trial.is_self_test else ["run"]),
        *entry.after(trial.ranks),
        *own,
        "--device",
        trial.device,
        *(word for pair in arguments.items() for word in pair),
    ]
