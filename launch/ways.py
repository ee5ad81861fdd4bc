"""How ranks are started with each launcher: for `dualeval conformance`, `bench`, and their like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dualeval.errors import UsageError
from dualeval.launch.launchers import LAUNCHERS, launcher_of
from dualeval.launch.launchers.base import Way
from dualeval.launch.site import Site, spread
from dualeval.messages import counted

# One process first: it is what the others are compared with.
WAYS: Mapping[str, Way] = {
    way.name: way for launcher in ("none", *LAUNCHERS) for way in launcher_of(launcher).ways
}


def start_words(way: str, ranks: int, site: Site, number: int = 0) -> list[str]:
    """Give the words before a command that start so many ranks of it."""
    return WAYS[way].words(site, spread(ranks, len(site.nodes)), number)


def why_not(way: str, backend: str, ranks: int, device: str, site: Site) -> str | None:
    """Say why so many ranks of a backend cannot be started in a way on a site; None where they can."""
    entry = WAYS[way]
    if entry.program is not None and entry.program not in site.programs:
        return f"there is no {entry.program} on the PATH"
    on_nodes = spread(ranks, len(site.nodes))
    if problem := entry.lacks(site, on_nodes, backend):
        return problem
    for node, count in zip(site.nodes, on_nodes, strict=False):
        if device != "cpu" and count > node.gpus:
            gpus = counted(node.gpus, "GPU")
            return f"{counted(count, 'rank')} on a node with {gpus}: each takes one of its own"
    return None


def choose_ways(names: Sequence[str]) -> list[str]:
    """Check names of ways to start ranks, and give them in the order of the table, each once."""
    for name in names:
        if name not in WAYS:
            raise UsageError(f"--launchers {name!r}: expected some of {', '.join(WAYS)}.")
    return [name for name in WAYS if name in names]


def child_environ(environ: Mapping[str, str], folder: str) -> dict[str, str]:
    """Make the environment of launchers: without variables that would place the ranks of their steps.

    Nor has it what makes this process itself a rank: ranks would find two launchers that disagree.
    """
    dropped = {name for launcher in map(launcher_of, LAUNCHERS) for name in launcher.not_handed_on(environ)}
    kept = {name: value for name, value in environ.items() if name not in dropped}
    return {**kept, "PATH": f"{folder}:{environ.get('PATH', '/usr/bin:/bin')}"}
