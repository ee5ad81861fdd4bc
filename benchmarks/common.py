"""What the benchmarks share: alternating measurements, timed processes, the machine, and result files."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeVar

import psutil  # type: ignore[import-untyped]

_T = TypeVar("_T")


class Command(Protocol):
    """Gives the command that starts so many ranks of a Python script on this machine."""

    def __call__(self, processes: int, /, *arguments: str) -> list[str]: ...


ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
BIN = Path(sys.executable).parent  # not resolved: in a venv the interpreter is a link out of it

_VERSIONS_OF = (
    *("dualeval", "torch", "torchvision", "numpy", "pyarrow"),
    *("torchmetrics", "accelerate", "pytorch-ignite", "lightning"),
    *("transformers", "tokenizers", "horovod", "mpi4py"),
)
# One thread for each rank: on a shared machine a second one waits more than it works. Open MPI 4 and 5 start
# more ranks than there are cores, and do so as root, only when told to.
ONE_THREAD = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    **{f"{name}_ALLOW_RUN_AS_ROOT{suffix}": "1" for name in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")},
}
_GRACE_S = 40  # torchrun ends its ranks in at most 30


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A process that ended."""

    wall_s: float  # seconds from start to end
    cpu_s: float  # processor seconds, user and system, with those of its own processes
    output: str  # its standard output
    errors: str  # its standard error
    exit_code: int  # 0, but where another one was allowed


def run_process(
    command: Sequence[str], *, timeout_s: float, environ: Mapping[str, str], any_exit_code: bool = False
) -> Finished:
    """Run a command in the checkout and time it; nothing else may be run beside it."""
    cpu = _cpu_of_children()
    start = perf_counter()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ,
        text=True,
        encoding="utf-8",
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            _end(process)
            raise
        wall_s = perf_counter() - start
    if process.returncode != 0 and not any_exit_code:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{output}\n{errors}")
    return Finished(
        wall_s=wall_s,
        cpu_s=_cpu_of_children() - cpu,
        output=output,
        errors=errors,
        exit_code=process.returncode,
    )


def _end(process: subprocess.Popen[str]) -> None:
    """End a command and all that it started: ranks may wait for ever, or outlive their launcher."""
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.terminate()  # a launcher passes this on to its ranks
    _, left = psutil.wait_procs([psutil.Process(process.pid), *ranks], timeout=_GRACE_S)
    for survivor in left:
        with suppress(psutil.NoSuchProcess):
            survivor.kill()


def end_on_sigterm() -> None:
    """Have SIGTERM end this process as Ctrl-C does: with what it has started, and without its folders."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def torchrun(processes: int, *arguments: str) -> list[str]:
    """The command that starts so many ranks of a Python script or module on this machine."""
    return [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(processes), *arguments]


def python_or_torchrun(processes: int, *arguments: str) -> list[str]:
    """As ``torchrun``; one process is started as a script is."""
    return [sys.executable, *arguments] if processes == 1 else torchrun(processes, *arguments)


def horovodrun(processes: int, *arguments: str) -> list[str]:
    """As ``torchrun``; the ranks meet over gloo."""
    return _horovodrun("--gloo", processes, arguments)


def horovodrun_mpi(processes: int, *arguments: str) -> list[str]:
    """As ``torchrun``; horovodrun starts mpirun."""
    return _horovodrun("--mpi", processes, arguments)


def _horovodrun(controller: str, processes: int, arguments: Sequence[str]) -> list[str]:
    launcher = [sys.executable, str(BIN / "horovodrun"), controller, "-np", str(processes)]
    return [*launcher, sys.executable, *arguments]


def mpirun(processes: int, *arguments: str) -> list[str]:
    """As ``torchrun``."""
    return ["mpirun", "-np", str(processes), sys.executable, *arguments]


def missing(backend: str, *, over_mpi: bool) -> str | None:
    """What a backend needs and this machine lacks, where mpirun starts the ranks or not; None for nothing."""
    if backend == "horovod" and find_spec("horovod") is None:
        return "Horovod is not installed (make horovod)"
    if not over_mpi:
        return None
    if shutil.which("mpirun") is None or find_spec("mpi4py") is None:
        return "mpirun or mpi4py is missing"
    from dualeval.backends.horovod import runs_over_mpi  # imports torch

    return None if backend != "horovod" or runs_over_mpi() else "Horovod is built without MPI"


def take_turns(rounds: int, entries: Mapping[str, Callable[[], _T]]) -> dict[str, list[_T]]:
    """Measure every entry once a round; each round begins with another one, so that drift hits all alike."""
    measured: dict[str, list[_T]] = {name: [] for name in entries}
    names = list(entries)
    for number in range(rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
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
    versions["MPI"] = _mpi()
    system = platform.freedesktop_os_release()["PRETTY_NAME"]
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{system}, {platform.system()} {platform.release()}",
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "versions": versions,
    }


def _mpi() -> str:
    if shutil.which("mpirun") is None:
        return "not installed"
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=60).stdout
    return said.partition("\n")[0]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def write_results(
    name: str,
    title: str,
    body: str,
    figures: Mapping[str, Any],
    host: dict[str, Any],
    folder: Path = RESULTS,
    clean: Callable[[str], str] = str,
) -> None:
    """Print the page, and write it to results/NAME-DATE.md for people and .json for programs.

    What was typed goes through ``clean``.
    """
    print(body)
    now = datetime.now(timezone.utc)
    command = clean(" ".join(["python", *sys.argv]))
    content = {"command": command, "utc": now.isoformat(timespec="seconds"), "machine": host, **figures}
    versions = ", ".join(f"{library} {number}" for library, number in host["versions"].items())
    text = (
        f"# {title}\n\n"
        f"{now:%Y-%m-%d %H:%M} UTC, `{command}`\n\n"
        f"{host['processor']}, {host['cores']} cores, {host['memory_gib']} GiB, {host['system']}; "
        f"load average at the start {host['load_average']}.\n{versions}.\n\n{body}"
    )
    folder.mkdir(exist_ok=True)
    page = folder / f"{name}-{now:%Y-%m-%d}.md"
    page.with_suffix(".json").write_text(_record_a_line(content), "utf-8")
    page.write_text(text, "utf-8")
    print(f"written to {page}")


def _record_a_line(content: Mapping[str, Any]) -> str:
    """JSON with a line for each key, and one for each item of a list: a line for each number is thousands."""
    entries = []
    for key, value in content.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        entries.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"
