"""Steps of several ranks, here or on the nodes of a Slurm job: digests, speed, the modes of bench."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common import BIN, table
from made_pictures import write_pictures

from dualeval.launch.site import Site
from dualeval.launch.ways import child_environ, start_words
from dualeval.tools import node_facts
from dualeval.tools.starts import Start
from gpu_steps.trial import FAILED, MOST_S, NOT_HERE, PASSED, Step, Trial, Verdict

_SIZES = (1, 2, 4, 8)
# Each with the backends whose ranks it starts here.
_LAUNCHERS = {"torchrun": ("torch",), "srun": ("torch", "horovod"), "horovodrun": ("horovod",)}


def site_here() -> Site:
    """Where ranks can be started: this machine, or the nodes of the Slurm job."""
    environ = child_environ(os.environ, str(BIN))
    return node_facts.find_site(environ, lambda: None)[0]


def sizes_on(site: Site, device: str) -> list[int]:
    """The numbers of ranks: 1, 2, 4 and 8 as far as there are GPUs; on CPUs 1, 2 and 4 in any case."""
    most = 4 if device == "cpu" else sum(node.gpus for node in site.nodes)
    return [size for size in _SIZES if size <= most]


def _starts(trial: Trial, site: Site, launcher: str) -> list[Start]:
    """A start for each backend and number of ranks; each says why it cannot be made here."""
    return [
        Start.on(site, launcher, backend, size, trial.device)
        for backend in _LAUNCHERS[launcher]
        for size in sizes_on(site, trial.device)
    ]


# -- digests -------------------------------------------------------------------------------------------


def _digests(launcher: str) -> Callable[[Trial], None]:
    """``dualeval conformance``: the digest by backend and ranks, and each backend's collectives."""

    def run(trial: Trial) -> None:
        trial.row(f"dualeval conformance --launchers {launcher}", partial(_conform, trial, launcher))

    return run


def _conform(trial: Trial, launcher: str) -> Verdict:
    site = site_here()
    reasons = [start.reason for start in _starts(trial, site, launcher)]
    if None not in reasons:
        return NOT_HERE, str(reasons[0])
    sizes = ",".join(map(str, sizes_on(site, trial.device)))
    # Beside the part: all nodes of a job have to see it.
    with tempfile.TemporaryDirectory(prefix="dualeval-gpu-", dir=trial.folder) as folder:
        given = ["--ranks", sizes, "--launchers", launcher, "--device", trial.device]
        given += ["--out", f"{folder}/out"]
        trial.run_dualeval("conformance", *given, limit_s=MOST_S, any_exit_code=True)
        said = json.loads(Path(folder, "out/conformance.json").read_text("utf-8"))
        page = Path(folder, "out/conformance.md").read_text("utf-8")
    trial.sections.append(below(page))
    outcomes = Counter(run["outcome"] for run in (*said["runs"], *said["self_tests"]))
    told = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    return PASSED if "**Agrees.**" in page else FAILED, f"{told}, at {sizes} ranks"


def below(page: str) -> str:
    """A page as a part of another: its headings two levels lower."""
    return re.sub(r"^#", "###", page, flags=re.MULTILINE)


# -- speed ---------------------------------------------------------------------------------------------


def speed(trial: Trial) -> None:
    """Samples/s by launcher, backend and ranks, with the efficiency over one rank of the same."""
    model = "small-cnn" if trial.device == "cpu" else "resnet50"
    site, of_one = site_here(), dict[tuple[str, str], float]()
    cells: list[list[str]] = []

    def judge(start: Start, number: int) -> Verdict:
        if start.reason is not None:
            return NOT_HERE, start.reason
        words = start_words(start.launcher, start.ranks, site, number)
        said = trial.ask("throughput", start=words, model=model, precision="fp32", backend=start.backend)
        if said["size"] != start.ranks:
            return FAILED, f"{said['size']} ranks, expected {start.ranks}"
        found = statistics.median(said["samples_per_s"])
        of_one.setdefault((start.launcher, start.backend), found / start.ranks if start.ranks == 1 else 0.0)
        one = of_one[start.launcher, start.backend]
        efficiency = f"{found / start.ranks / one:.0%}" if one else "-"
        low, high = min(said["samples_per_s"]), max(said["samples_per_s"])
        shown = f"{found:,.0f} ({low:,.0f} to {high:,.0f})"
        cells.append([start.launcher, start.backend, str(start.ranks), str(said["nodes"]), shown, efficiency])
        return PASSED, f"{shown} samples/s, efficiency {efficiency}"

    # In a job torchrun starts the same ranks as srun.
    launchers = ("srun",) if site.job else ("torchrun", "horovodrun")
    starts = [start for launcher in launchers for start in _starts(trial, site, launcher)]
    for number, start in enumerate(starts):
        what = f"{start.launcher}, {start.backend}, {start.ranks} rank{'s' * (start.ranks > 1)}"
        trial.row(what, partial(judge, start, number))
    head = ["launcher", "backend", "ranks", "nodes", "samples/s", "efficiency"]
    if cells:
        cores = min(node.cores for node in site.nodes)
        trial.sections.append(
            f"### Throughput by ranks\n\n{model} in fp32, batches of 64 from memory, as many for each rank; "
            "the median of up to three passes, in brackets the lowest and the highest, without the "
            f"look at the first samples. Each node has {cores} cores; more ranks on CPUs share them.\n\n"
            f"{table(head, cells)}"
        )


# -- the modes of bench --------------------------------------------------------------------------------


def _seeds(trial: Trial, *own: str) -> Verdict:
    """``dualeval bench`` with all modes: its table, and its plot beside the part."""
    sizes = [
        size for size in sizes_on(site_here(), trial.device) if trial.device != "cpu" or size <= _cores()
    ]
    with tempfile.TemporaryDirectory(prefix="dualeval-gpu-") as folder:
        given = ["--processes", ",".join(map(str, sizes)), "--rounds", "1" if trial.rounds < 3 else "2"]
        given += ["--min-seconds", "0.5" if trial.device == "cpu" else "1", "--device", trial.device]
        if "--train" in own and trial.device != "cpu":
            write_pictures(Path(folder, "made"), 64 * 8 * max(sizes), 256, 10)
            own = (*own, "--model", "resnet18", "--weights", "random:0", "--data", f"{folder}/made")
        trial.run_dualeval(
            "bench", *given, *own, "--out", f"{folder}/out", limit_s=MOST_S, any_exit_code=True
        )
        report = json.loads(Path(folder, "out/bench.json").read_text("utf-8"))
        page = Path(folder, "out/bench.md").read_text("utf-8")
        picture, name = Path(folder, "out/speedup.png"), f"{trial.step}-speedup.png"
        page = re.sub(r"^!\[.*$", "", page, flags=re.MULTILINE)
        if picture.exists():
            shutil.copy(picture, trial.folder / name)
            page += f"\n![{name}]({name})\n"
    # The command names a folder that is gone.
    trial.sections.append(re.sub(r"`dualeval bench[^`]*`", "`dualeval bench`", below(page)))
    outcomes = Counter(cell["outcome"] for cell in report["cells"])
    told = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    return FAILED if outcomes["failed"] or not outcomes["measured"] else PASSED, told


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def seeds(trial: Trial) -> None:
    """Evaluation on this machine: one process, DataParallel, ranks over torch and over Horovod."""
    trial.row("dualeval bench", partial(_seeds, trial))


def seeds_train(trial: Trial) -> None:
    """Training steps on this machine, likewise."""
    trial.row("dualeval bench --train", partial(_seeds, trial, "--train"))


STEPS = (
    *(
        Step(
            name=f"ranks-{launcher}",
            run=_digests(launcher),
            minutes=2,
            about=f"several cards: digests at 1, 2, 4, 8 ranks over {launcher}, collectives",
            here=False,
        )
        for launcher in _LAUNCHERS
    ),
    Step(
        name="ranks-speed", run=speed, minutes=3, about="several cards: samples/s and efficiency", here=False
    ),
    Step(name="seeds", run=seeds, minutes=3, about="single, DataParallel, torch and Horovod: table and plot"),
    Step(name="seeds-train", run=seeds_train, minutes=4, about="the same of training steps"),
)
