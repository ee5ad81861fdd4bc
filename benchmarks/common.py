"""What the benchmarks share: alternating measurements, timed processes, the machine, and result files."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

_T = TypeVar("_T")

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
BIN = Path(sys.executable).parent  # not resolved: in a venv the interpreter is a link out of it

_VERSIONS_OF = ("dualeval", "torch", "torchvision", "torchmetrics", "accelerate", "numpy", "pyarrow")
# One thread for each rank: on a shared machine a second one waits more than it works.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
_GRACE_S = 40  # torchrun ends its ranks in at most 30


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A process that ended with exit code 0.

    Attributes:
        wall_s: seconds from start to end.
        cpu_s: processor seconds, user and system, with those of its own processes.
        output: its standard output.
    """

    wall_s: float
    cpu_s: float
    output: str


def run_process(command: Sequence[str], *, timeout_s: float, environ: Mapping[str, str]) -> Finished:
    """Run a command in the checkout and time it; nothing else may be run beside it.

    Raises:
        RuntimeError: it ended with another code than 0; carries what it wrote.
        subprocess.TimeoutExpired: it took longer.
    """
    cpu = _cpu_of_children()
    start = perf_counter()
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            process.terminate()  # a launcher passes this on to its ranks, a kill it could not
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
        wall_s = perf_counter() - start
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{output}\n{errors}")
    return Finished(wall_s=wall_s, cpu_s=_cpu_of_children() - cpu, output=output)


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def torchrun(processes: int, *arguments: str) -> list[str]:
    """The command that starts so many ranks on this machine."""
    return [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(processes), *arguments]


def take_turns(rounds: int, entries: Mapping[str, Callable[[], _T]]) -> dict[str, list[_T]]:
    """Measure every entry once a round, every second round backwards, so that drift hits all alike."""
    measured: dict[str, list[_T]] = {name: [] for name in entries}
    for number in range(rounds):
        names = list(entries)
        for name in names if number % 2 == 0 else reversed(names):
            measured[name].append(entries[name]())
    return measured


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median over the rounds of numerator / denominator of the same round."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def spread(numerators: Sequence[float], denominators: Sequence[float]) -> str:
    """Median of the ratios, and the middle half of them, as text."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def machine() -> dict[str, Any]:
    """The machine, its load, and the versions of what computes: plain values."""
    versions = {"python": platform.python_version()}
    for name in _VERSIONS_OF:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # not every benchmark needs every library
            versions[name] = "not installed"
    system = platform.freedesktop_os_release()["PRETTY_NAME"]
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{system}, {platform.system()} {platform.release()}",
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "versions": versions,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def write_results(name: str, title: str, body: str, figures: Mapping[str, Any], host: dict[str, Any]) -> Path:
    """Write results/NAME-DATE.md for people and .json for programs; returns the first.

    Args:
        name: of the benchmark.
        title: first line of the page.
        body: Markdown.
        figures: all that was measured, as plain values.
        host: what ``machine`` said before the first measurement.
    """
    now = datetime.now(timezone.utc)
    command = " ".join(["python", *sys.argv])
    content = {"command": command, "utc": now.isoformat(timespec="seconds"), "machine": host, **figures}
    versions = ", ".join(f"{library} {number}" for library, number in host["versions"].items())
    text = (
        f"# {title}\n\n"
        f"{now:%Y-%m-%d %H:%M} UTC, `{command}`\n\n"
        f"{host['processor']}, {host['cores']} cores, {host['memory_gib']} GiB, {host['system']}; "
        f"load average at the start {host['load_average']}.\n{versions}.\n\n{body}"
    )
    RESULTS.mkdir(exist_ok=True)
    page = RESULTS / f"{name}-{now:%Y-%m-%d}.md"
    page.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    page.write_text(text, "utf-8")
    return page
