"""What processes of the speed steps measure: samples/s, memory, decoding, and the profiler's counts."""

from __future__ import annotations

import cProfile
import json
import pstats
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from common import take_turns
from torch import Tensor

from dualeval import Session
from dualeval.engine.device.numerics import NumericSettings
from dualeval.engine.samples.feed import Feed, Reader
from dualeval.launch.cores import usable_cores
from dualeval.options.evaluation import readers_of
from dualeval.options.job import Job
from dualeval.options.precision import PRECISIONS
from dualeval.result import TimedStage
from gpu_steps.networks import BATCH, Load, load_of

_FEW, _MANY = 8, 40  # batches of the evaluations whose calls are compared
# Seconds of each pass on a card; on a CPU a pass is as long as the images last.
_PASS_S = 1.0
_MOST_SAMPLES = 2_000_000
# Of ranks, whose starts take longer than their passes.
_MOST_PASSES = 3


def peak_mb(device: str, work: Callable[[], Any]) -> tuple[Any, float | None]:
    """What some work returns, and the most that tensors have held on the GPU meanwhile."""
    if device == "cpu":
        return work(), None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return work(), torch.cuda.max_memory_allocated() / 1e6


class Loops:
    """The ways in which samples of a load are computed on a session's device; each returns seconds."""

    def __init__(self, session: Session, load: Load, precision: str) -> None:
        self._session, self._load = session, load
        self._device = session.backend.device
        self._precision_name, self._precision = precision, PRECISIONS[precision]
        self._pinned = load.inputs if self._device.type == "cpu" else load.inputs.pin_memory()
        # What dualeval chooses by itself; known once it has evaluated.
        self.layout = "contiguous"
        # Seconds of dualeval's that come once a run, of the last pass.
        self.look_s = 0.0

    def ours(self, count: int) -> float:
        """dualeval's loop, without its one look at the first samples."""
        options: dict[str, Any] = {"batch_size": BATCH, "workers": 0, "precision": self._precision_name}
        result = self._session.evaluate(self._load.task(count), **options)
        self.layout = str(result.job["layout"])
        self.look_s = result.timing["ranks"][0][TimedStage.LOOK]
        return float(result.timing["evaluate_s"] - self.look_s)

    def forward(self, count: int) -> float:
        """The same forward on data that is on the device already, and nothing else."""
        inputs = self._load.inputs.to(self._device)
        return self._by_hand(count, lambda rows: inputs[rows], counts=False)

    def bare(self, count: int) -> float:
        """A loop by hand: copies from pinned memory, and counts where argmax is the target."""
        return self._by_hand(
            count, lambda rows: self._pinned[rows].to(self._device, non_blocking=True), counts=True
        )

    def _by_hand(self, count: int, inputs_at: Callable[[slice], Tensor], *, counts: bool) -> float:
        device, load = self._device, self._load
        network: Any = load.network
        is_last = self.layout == "channels-last"
        network.to(device, memory_format=torch.channels_last if is_last else torch.contiguous_format)
        targets = load.targets.to(device)
        right = torch.zeros((), dtype=torch.int64, device=device)
        settings = NumericSettings(self._precision, device)
        with torch.inference_mode(), self._precision.forward_context(device)():
            network(inputs_at(slice(0, BATCH)))
            _wait(device)
            start = perf_counter()
            for number in range(0, count, BATCH):
                first = number % len(load.inputs)
                rows = slice(first, first + BATCH)
                logits = network(inputs_at(rows))
                if counts:
                    right += (logits.argmax(1) == targets[rows]).sum()
            _wait(device)
            seconds = perf_counter() - start
        settings.restore()
        network.to("cpu", memory_format=torch.contiguous_format)
        return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def speed(given: dict[str, Any]) -> Any:
    """Samples/s of each round and peak memory, by way."""
    load = load_of(given["model"], given["images"], given["device"])
    peaks: dict[str, float | None] = {}
    with Session(device=given["device"]) as session:
        loops = Loops(session, load, given["precision"])
        count = max(BATCH, len(load.inputs))
        loops.ours(count)  # libraries begin
        if given["device"] != "cpu":
            wanted = int(_PASS_S * 4 * BATCH / loops.forward(4 * BATCH))
            count = max(count, min(wanted, _MOST_SAMPLES) // BATCH * BATCH)

        def samples_per_s(way: str, run: Callable[[int], float]) -> float:
            seconds, peaks[way] = peak_mb(given["device"], partial(run, count))
            return float(count / seconds)

        ways = {"forward alone": loops.forward, "bare loop": loops.bare, "dualeval": loops.ours}
        entries = {way: partial(samples_per_s, way, run) for way, run in ways.items()}
        take_turns(1, entries)
        speeds = take_turns(given["rounds"], entries)
        return {
            "samples_per_s": speeds,
            "peak_mb": peaks,
            "samples": count,
            "layout": loops.layout,
            "look_s": loops.look_s,
        }


def throughput(given: dict[str, Any]) -> Any:
    """Samples/s of ranks that a launcher has started, all together; None on other ranks than 0."""
    load = load_of(given["model"], given["images"], given["device"])
    with Session(backend=given["backend"], device=given["device"]) as session:
        size = session.world.size

        def run(count: int) -> tuple[Any, float]:
            task = load.task(count)
            result = session.evaluate(task, batch_size=BATCH, workers=0, precision=given["precision"])
            # Until the sums of all ranks are there: the same moment on each of them.
            times = result.timing["ranks"]
            whole = [one["evaluate"] - one["look"] + one["meet"] + one["reduce"] for one in times]
            return result, max(whole)

        each = len(load.inputs)
        _, warm_s = run(each * size)
        if given["device"] != "cpu":
            # Twice as many: the first pass has what begins once, too.
            wanted = session.backend.broadcast_json(each * 2 * _PASS_S / warm_s)
            each = max(each, int(min(wanted, _MOST_SAMPLES)) // BATCH * BATCH)
        passes = [run(each * size) for _ in range(min(given["rounds"], _MOST_PASSES))]
        speeds = [each * size / seconds for _, seconds in passes]
        nodes = passes[0][0].world["nodes"]
    return {"samples_per_s": speeds, "size": size, "nodes": nodes} if session.world.is_main else None


def decode(given: dict[str, Any]) -> Any:
    """Pictures/s that reading processes decode, and nobody computes; as many as a rank beside a GPU has."""
    cores = usable_cores()
    readers = readers_of(cores, "cuda")
    job = Job.of("image-classification", model=given["model"], weights="random:0", data=Path(given["folder"]))
    task = job.make_task()
    dataset = task.dataset()
    batches = [range(first, min(first + BATCH, len(dataset))) for first in range(0, len(dataset), BATCH)]
    feed = Feed(Reader(dataset, task), batches, workers=readers, device=torch.device("cpu"))
    reading = iter(feed)
    for _ in range(min(readers, len(batches) // 2)):
        next(reading)  # each reader is at its second batch
    start = perf_counter()
    read = sum(1 for _ in reading)
    seconds = perf_counter() - start
    return {"pictures_per_s": read * BATCH / max(seconds, 1e-9), "readers": readers, "cores": cores}


# -- by the profiler -----------------------------------------------------------------------------------


def waits(given: dict[str, Any]) -> Any:
    """Calls of a short and of a longer evaluation, and the lines of Python that wait more often in it."""
    load = load_of("resnet18", BATCH, given["device"])
    with Session(device=given["device"]) as session:

        def of(batches: int) -> Callable[[], object]:
            return partial(session.evaluate, load.task(BATCH * batches), batch_size=BATCH, workers=0)

        of(_FEW)()  # libraries begin, and pinned memory is asked for
        few, many = calls_in(of(_FEW)), calls_in(of(_MANY))
        lines = _lines_that_wait(of(_MANY))
        lines.subtract(_lines_that_wait(of(_FEW)))
    told = [f"{count} in {line}" for line, count in lines.most_common(3) if count > 0]
    return {"few": few, "many": many, "batches": _MANY - _FEW, "lines": told}


def calls_in(work: Callable[[], object]) -> dict[str, int]:
    """How often the profiler has seen each operation, call of the runtime, kernel and copy."""
    with torch.profiler.profile() as seen:
        work()
    return dict(Counter(event.name for event in seen.events() or ()))


def _lines_that_wait(work: Callable[[], object]) -> Counter[str]:
    if not torch.cuda.is_available():
        return Counter()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    torch.cuda.set_sync_debug_mode("default")
    return Counter(
        f"{Path(one.filename).name}:{one.lineno}" for one in caught if "synchroniz" in str(one.message)
    )


def profile(given: dict[str, Any]) -> Any:
    """What a batch costs in dualeval's loop and in the bare one: on the card, and on the launching thread."""
    load, answer = load_of(given["model"], BATCH, given["device"]), {}
    with Session(device=given["device"]) as session:
        loops = Loops(session, load, given["precision"])
        for way, loop in {"dualeval": loops.ours, "bare": loops.bare}.items():
            few, many = (partial(loop, BATCH * batches) for batches in (_FEW, _MANY))
            few(), many()
            costs = [_costs_in(work) for work in (few, many)]
            functions = [_python_in(work) for work in (few, many)] if way == "dualeval" else [{}, {}]
            answer[way] = {"a batch": _difference(*costs), "functions": _difference(*functions)}
    return answer


def _difference(few: Mapping[str, float], many: Mapping[str, float]) -> dict[str, float]:
    """What one batch adds, the most first, without what rounds to nothing."""
    each = {name: (many[name] - few.get(name, 0)) / (_MANY - _FEW) for name in many}
    return dict(
        sorted(((k, round(v, 3)) for k, v in each.items() if v >= 0.01), key=lambda row: -row[1])[:60]
    )


def _events_of(work: Callable[[], object]) -> Iterator[dict[str, Any]]:
    with torch.profiler.profile() as seen:
        work()
    with tempfile.TemporaryDirectory() as folder:
        seen.export_chrome_trace(f"{folder}/trace.json")
        yield from json.loads(Path(folder, "trace.json").read_text("utf-8"))["traceEvents"]


def _costs_in(work: Callable[[], object]) -> dict[str, float]:
    """Counts, microseconds and bytes by kind of the profiler's events, and the seconds of kernels by name."""
    found = Counter[str]()
    for event in _events_of(work):
        kind, name = event.get("cat"), str(event.get("name"))[:90]
        if kind in ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver"):
            what = kind if kind == "kernel" else f"{kind} {name}"
            found[f"{what}: count"] += 1
            found[f"{what}: us"] += event["dur"]
            found[f"{what}: bytes"] += event.get("args", {}).get("bytes", 0)
            if kind == "kernel":
                found[f"kernel {name}: us"] += event["dur"]
    return dict(found)


def _python_in(work: Callable[[], object]) -> dict[str, float]:
    """Microseconds of this thread's functions, without those that they call."""
    profiler = cProfile.Profile()
    profiler.runcall(work)
    stats: Any = pstats.Stats(profiler)
    return {
        f"{Path(file).name}:{line} {name}": row[2] * 1e6 for (file, line, name), row in stats.stats.items()
    }
