"""Images per second of ``Evaluator`` against a bare loop and against the loops that people write by hand.

The first comparison is in one process: the evaluation loop of a whole run (``timing.evaluate_s``: metrics,
journal and rows included) and the bare loop of ``loops.py`` take turns; the ratio is the median over the
pairs. The second is at 1 and 2 processes under torchrun, where all loops take turns in the same processes;
there the final reduction counts for all of them, and the slowest rank's time is taken.

    python benchmarks/overhead.py [--pairs N] [--rounds N]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import loops
import torch
from common import (
    ONE_THREAD,
    machine,
    median_ratio,
    run_process,
    spread,
    table,
    take_turns,
    torchrun,
    write_results,
)
from loops import Outcome, Problem
from torch import Tensor, nn

from dualeval import Backend, Result, World, connect, detect
from dualeval.data.idx import IdxImages
from dualeval.engine.control.plane import ControlPlane, open_control_plane
from dualeval.engine.evaluator import Evaluator
from dualeval.engine.options import RunOptions
from dualeval.metrics import Metric
from dualeval.metrics.classification import classification_metric, default_metrics, observe_logits
from dualeval.models.classifiers import build
from dualeval.tasks import Task
from dualeval.tasks.image_classification import ASSETS, EMBEDDED_WEIGHTS, FASHION_MEAN, FASHION_STD

WANTED = {"fashion-cnn": 0.95, "resnet18": 0.98}
SIZES = (1, 2)
_UNEVEN = 997  # a prime: no number of ranks divides it
_RESNET_IMAGES = 96
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_TIMEOUT_S = 600
_HANDWRITTEN: dict[str, Callable[[Problem], Outcome]] = {
    "DistributedSampler, .item(), all_reduce": loops.all_reduce,
    "DistributedSampler, TorchMetrics": loops.torchmetrics,
    "Accelerate gather_for_metrics": loops.accelerate,
}


class InMemory:
    """The images of a problem as a data set of dualeval.

    Attributes:
        first_read_cpu_s: this process's processor time at the first read: the start of the loop.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.first_read_cpu_s: float | None = None

    def __len__(self) -> int:
        return len(self._problem.images)

    def id(self, index: int) -> str:
        """The sample's number."""
        return f"{index:06d}"

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """One ready batch, a view: the engine asks for ranges."""
        assert isinstance(indices, range), "no sample in memory can fail"
        if self.first_read_cpu_s is None:
            self.first_read_cpu_s = process_time()
        rows = slice(indices.start, indices.stop)
        return {"images": self._problem.images[rows], "targets": self._problem.targets[rows]}

    def fingerprint(self, count: int) -> str:
        """sha256 over the first targets."""
        return hashlib.sha256(self._problem.targets[:count].numpy().data).hexdigest()


class ProblemTask(Task):
    """A problem as a task of dualeval, with the default metrics of classification."""

    name = "benchmark-overhead"
    rows = ("target", "prediction", "confidence", "loss", "top")
    wants_workers = False
    thread_safe = True

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._dataset = InMemory(problem)
        self._normalise = problem.normaliser()
        with torch.inference_mode():
            self._classes = problem.model(self._normalise(problem.images[:2])).shape[1]

    def dataset(self) -> InMemory:
        """The images."""
        return self._dataset

    def collate(self, samples: Any) -> Any:
        """Pass on what is a batch already."""
        return samples

    def build_model(self, device: torch.device) -> nn.Module:
        """The problem's model."""
        return self._problem.model.to(device)

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        """Logits (n, classes)."""
        return model(self._normalise(batch["images"]))

    def observe(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The columns of a classification."""
        return observe_logits(outputs, batch["targets"], 5)

    def metrics(self) -> Sequence[Metric]:
        """The default metrics."""
        return [classification_metric(name, self._classes) for name in default_metrics(self._classes)]

    def fingerprint(self) -> dict[str, Any]:
        """Nothing beyond data and weights."""
        return {}


def fashion_cnn() -> Problem:
    """The embedded job: its network, weights and 10,000 images."""
    images = IdxImages(ASSETS)
    everything = images.__getitems__(range(len(images)))
    return Problem(
        model=build("fashion-cnn", str(EMBEDDED_WEIGHTS), None),
        images=everything["images"],
        targets=everything["targets"],
        mean=(FASHION_MEAN,),
        std=(FASHION_STD,),
        batch_size=64,
    )


def resnet18() -> Problem:
    """ResNet-18 with random weights on random images of 224 by 224."""
    generator = torch.Generator().manual_seed(0)
    shape = (_RESNET_IMAGES, 3, 224, 224)
    return Problem(
        model=build("resnet18", "random:0", None),
        images=torch.randint(256, shape, dtype=torch.uint8, generator=generator),
        targets=torch.randint(1000, shape[:1], generator=generator),
        mean=_IMAGENET_MEAN,
        std=_IMAGENET_STD,
        batch_size=32,
    )


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A whole run of the engine.

    Attributes:
        result: what it returned.
        cpu_s: processor seconds of the loop, all threads; on rank 0 only, 0 elsewhere.
    """

    result: Result
    cpu_s: float


def evaluate(problem: Problem, backend: Backend, control: ControlPlane, folder: Path) -> Evaluated:
    """Run the engine; an earlier run in ``folder`` is removed."""
    task = ProblemTask(problem)
    reported_cpu_s = 0.0

    def show(done: int, total: int) -> None:
        # The engine's last report, after the last flush, ends the loop.
        nonlocal reported_cpu_s
        reported_cpu_s = process_time()

    result = Evaluator(
        task, backend, control, RunOptions(out=folder, batch_size=problem.batch_size, fresh=True), show=show
    ).run()
    assert result.chunks["resumed"] == 0, "the folder was emptied"
    began = task.dataset().first_read_cpu_s
    assert began is not None, "no problem is empty"
    return Evaluated(result=result, cpu_s=max(0.0, reported_cpu_s - began))


# -- one process: dualeval and the bare loop take turns -----------------------------------------------


def against_bare(problem: Problem, pairs: int) -> dict[str, dict[str, list[float]]]:
    """By loop: wall and processor seconds, a value a pair."""
    backend = connect("single", World.alone(), "cpu")
    control = open_control_plane(backend)
    with tempfile.TemporaryDirectory(prefix="dualeval-overhead-") as folder:

        def ours() -> tuple[float, float]:
            evaluated = evaluate(problem, backend, control, Path(folder) / "out")
            return evaluated.result.timing["evaluate_s"], evaluated.cpu_s

        def bare() -> tuple[float, float]:
            outcome = loops.bare(problem)
            return outcome.seconds, outcome.cpu_s

        entries = {"dualeval": ours, "bare": bare}
        take_turns(1, entries)
        measured = take_turns(pairs, entries)
    return {
        loop: {"wall_s": [wall for wall, _ in turns], "cpu_s": [cpu for _, cpu in turns]}
        for loop, turns in measured.items()
    }


# -- one or two processes: all loops take turns -------------------------------------------------------


def be_rank(rounds: int, folder: Path) -> None:
    """Be one rank under torchrun: every loop in turn; rank 0 writes folder/measured.json."""
    torch.set_num_threads(1)
    world = detect(os.environ)
    backend = connect("torch", world, "cpu")
    control = open_control_plane(backend)
    try:
        problem = fashion_cnn()
        entries = _entries(problem, backend, control, folder)
        uneven = {
            name: _over_ranks(backend, run)
            for name, run in _entries(problem.first(_UNEVEN), backend, control, folder).items()
        }
        turns = {name: partial(_over_ranks, backend, run) for name, run in entries.items()}
        measured = {
            "exact_loss": _exact_loss(problem.first(_UNEVEN)),
            "uneven": uneven,
            "rounds": take_turns(rounds, turns),
        }
        if world.is_main:
            (folder / "measured.json").write_text(json.dumps(measured))
        control.leave()
    finally:
        backend.close()


def _entries(
    problem: Problem, backend: Backend, control: ControlPlane, folder: Path
) -> dict[str, Callable[[], Outcome]]:
    world = backend.world
    return {
        "dualeval": partial(_dualeval, problem, backend, control, folder),
        "bare loop, no reduction": partial(loops.bare, problem, world.rank, world.size),
        **{name: partial(loop, problem) for name, loop in _HANDWRITTEN.items()},
    }


def _dualeval(problem: Problem, backend: Backend, control: ControlPlane, folder: Path) -> Outcome:
    evaluated = evaluate(problem, backend, control, folder / "out")
    result = evaluated.result
    own = result.timing["ranks"][backend.world.rank]
    top1, loss = result.metrics["top1"], result.metrics["loss"]
    assert isinstance(top1, float) and isinstance(loss, float)
    return Outcome(
        seconds=own["evaluate"] + own["meet"] + own["reduce"],
        cpu_s=evaluated.cpu_s,
        # The result's count is over all ranks.
        samples=result.samples["evaluated"] if backend.world.is_main else 0,
        top1=top1,
        loss=loss,
    )


def _over_ranks(backend: Backend, run: Callable[[], Outcome]) -> dict[str, Any]:
    """Start a loop on all ranks together; the slowest rank's seconds, all samples, rank 0's other values."""
    backend.barrier()
    outcome = run()
    seconds = backend.all_reduce(torch.tensor(outcome.seconds, dtype=torch.float64), op="max")
    samples = backend.all_reduce(torch.tensor(outcome.samples), op="sum")
    return {
        "seconds": seconds.item(),
        "cpu_s": outcome.cpu_s,
        "samples": samples.item(),
        "top1": outcome.top1,
        "loss": outcome.loss,
    }


def _exact_loss(problem: Problem) -> float:
    """Mean loss of every image once: float32 losses of the same batches, summed without rounding."""
    normalise = problem.normaliser()
    losses: list[float] = []
    with torch.inference_mode():
        for first in range(0, len(problem.images), problem.batch_size):
            rows = slice(first, first + problem.batch_size)
            logits = problem.model(normalise(problem.images[rows]))
            losses += nn.functional.cross_entropy(logits, problem.targets[rows], reduction="none").tolist()
    return math.fsum(losses) / len(losses)


def against_handwritten(size: int, rounds: int) -> dict[str, Any]:
    """Measure all loops on ``size`` ranks."""
    with tempfile.TemporaryDirectory(prefix="dualeval-overhead-") as folder:
        command = torchrun(size, str(Path(__file__).resolve()), "--rank-of", folder, "--rounds", str(rounds))
        run_process(command, timeout_s=_TIMEOUT_S, environ=ONE_THREAD)
        measured: dict[str, Any] = json.loads((Path(folder) / "measured.json").read_text())
    return measured


# -- the report ---------------------------------------------------------------------------------------


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        be_rank(arguments.rounds, arguments.rank_of)
        return
    host = machine()
    torch.set_num_threads(1)
    pairs = {
        "fashion-cnn": against_bare(fashion_cnn(), arguments.pairs),
        "resnet18": against_bare(resnet18(), arguments.pairs),
    }
    handwritten = {str(size): against_handwritten(size, arguments.rounds) for size in SIZES}
    body = _pairs_text(pairs, arguments.pairs) + _handwritten_text(handwritten, arguments.rounds)
    print(body)
    figures = {
        "ratios": {
            name: {clock: median_ratio(of["bare"][clock], of["dualeval"][clock]) for clock in of["bare"]}
            for name, of in pairs.items()
        },
        "wanted_at_least": WANTED,
        "pairs": pairs,
        "handwritten": handwritten,
    }
    page = write_results("overhead", "Speed of the evaluation loop", body, figures, host)
    print(f"written to {page}")


def _pairs_text(pairs: dict[str, dict[str, dict[str, list[float]]]], count: int) -> str:
    images = {"fashion-cnn": 10_000, "resnet18": _RESNET_IMAGES}
    rows = []
    for name, of in pairs.items():
        bare, ours = of["bare"], of["dualeval"]
        speeds = [f"{images[name] / statistics.median(loop['wall_s']):,.0f}" for loop in (bare, ours)]
        ratios = [spread(bare[clock], ours[clock]) for clock in ("wall_s", "cpu_s")]
        rows.append([name, *speeds, f"**{ratios[0]}**", ratios[1], f"{WANTED[name]}"])
    head = ["model", "bare images/s", "dualeval images/s", "dualeval over bare", "by CPU time", "wanted"]
    return (
        "## Against a bare loop\n\n"
        f"One process, one thread, {count} pairs taken in turns; the median ratio of images/s, and the "
        "middle half of the ratios in brackets. CPU time leaves out waiting, but not a core that runs slower "
        "because of its neighbours.\n\n"
        f"{table(head, rows)}\n"
    )


def _handwritten_text(by_size: dict[str, dict[str, Any]], rounds: int) -> str:
    head = ["loop", "ranks", "images/s", "over dualeval", "by CPU time"]
    head += [f"samples counted of {_UNEVEN}", "loss error"]
    rows = []
    for size, measured in by_size.items():
        ours = measured["rounds"]["dualeval"]
        for name, turns in measured["rounds"].items():
            seconds = [turn["seconds"] for turn in turns]
            uneven = measured["uneven"][name]
            error = "" if uneven["loss"] is None else f"{abs(uneven['loss'] - measured['exact_loss']):.1e}"
            speed = f"{turns[0]['samples'] / statistics.median(seconds):,.0f}"
            ratios = [
                spread([turn[clock] for turn in ours], [turn[clock] for turn in turns])
                for clock in ("seconds", "cpu_s")
            ]
            rows.append([name, size, speed, *ratios, str(uneven["samples"]), error])
    return (
        "## Against loops written by hand\n\n"
        f"fashion-cnn, one thread a rank, {rounds} rounds taken in turns in the same processes, the final "
        "reduction included, the slowest rank's time; CPU time is rank 0's. Above 1 is faster than dualeval. "
        f"Samples and loss on the first {_UNEVEN} images, against the exact mean.\n\n"
        f"{table(head, rows)}"
    )


if __name__ == "__main__":
    main()
