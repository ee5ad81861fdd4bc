"""What ``gpu.py`` has a process of its own measure: ``python gpu_worker.py NAME JSON`` prints its answer."""

from __future__ import annotations

import cProfile
import hashlib
import json
import os
import pstats
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from common import take_turns
from gpu import ANSWER
from problems import Problem, fashion_cnn, resnet18, small_cnn
from torch import Tensor
from torch.utils.data import TensorDataset

import dualeval
from dualeval import ModelTask, Session, connect, detect
from dualeval.backends.selftest import check_operations, measure_all_reduce
from dualeval.engine.device.accelerator import accelerator_of
from dualeval.engine.device.numerics import NumericSettings
from dualeval.engine.device.transfer import Uploads, start_download
from dualeval.errors import DualevalError
from dualeval.options.precision import PRECISIONS, Precision

_BATCH = 64
_FEW, _MANY = 8, 40  # batches of the evaluations whose waits are compared


def _problem(name: str, images: int) -> Problem:
    """ResNet-18 has a quarter of the images, and the small CNN up to eight times as many."""
    if name == "resnet18":
        problem = resnet18(images // 4, _BATCH)
    else:
        problem = fashion_cnn().first(images) if name == "fashion-cnn" else small_cnn().first(8 * images)
    return replace(problem, ready=True, batch_size=_BATCH)


def _task(name: str, device: str, images: int, *, sharded: bool = False) -> ModelTask:
    """The transformer has 500 MB on a GPU and 20 on a CPU; made by a function, as what is divided must be.

    A precision casts the inputs of the model: only floats, as the other problems' images are not.
    """
    if name == "transformer":
        from tests.vehicles import large_model

        def build() -> torch.nn.Module:
            torch.manual_seed(0)
            model = large_model.Transformer(**large_model.arguments(20 if device == "cpu" else 500)).eval()
            return _sharded(model, device) if sharded else model

        problem = fashion_cnn().first(512)
        data = TensorDataset(problem.images.float() / 255, problem.targets)
        return ModelTask(model=build() if sharded else build, data=data, name=name)
    if name == "resnet18, float images":
        problem = _problem("resnet18", images)
        floats = TensorDataset(problem.images / 255 - 0.5, problem.targets)
        return ModelTask(model=problem.network.network, data=floats, name=name)
    return _problem(name, images).task()


def _sharded(model: torch.nn.Module, device: str) -> torch.nn.Module:
    """The transformer as a training script shards it, in the script's own process group."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    model = model.to(device)
    for block in model.get_submodule("blocks").children():
        fully_shard(block)
    fully_shard(model)
    return model


def _peak_mb(device: str, work: Callable[[], Any]) -> tuple[Any, float | None]:
    """What some work returns, and the most that tensors have held on the GPU meanwhile."""
    if device == "cpu":
        return work(), None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return work(), torch.cuda.max_memory_allocated() / 1e6


def evaluate(given: dict[str, Any]) -> Any:
    """Digest, images/s and peak memory by model; None on other ranks than 0."""
    device, answer = given["device"], {}
    tasks = {
        name: _task(name, device, given["images"], sharded="in_training" in given) for name in given["models"]
    }
    # Ranks share the first GPU.
    with Session(device="cuda:0" if device == "cuda" else device, allow_shared_gpu=True) as session:
        for name, task in tasks.items():
            options = {"batch_size": _BATCH, "workers": given.get("workers", 0), **given.get("options", {})}
            result, peak = _peak_mb(device, partial(session.evaluate, task, **options))
            found = {"digest": result.metrics_digest, "images_per_s": result.samples_per_s, "peak_mb": peak}
            answer[name] = found
    return answer if session.world.is_main else None


def transport(given: dict[str, Any]) -> Any:
    """Whether the torch backend's operations are right, and from whose memory each kind of tensor travels."""
    with connect("torch", detect(os.environ), given["device"]) as backend:
        return {
            "problems": check_operations(backend),
            "speed": measure_all_reduce(backend),
            "carriers": {kind: backend.carrier(torch.device(kind)).type for kind in ("cpu", "cuda")},
        }


def waits(given: dict[str, Any]) -> Any:
    """Calls of a short and of a longer evaluation, and the lines of Python that wait more often in it."""
    problem = _problem("resnet18", 4 * _BATCH * _MANY)
    with Session(device=given["device"]) as session:

        def of(batches: int) -> Callable[[], object]:
            task = problem.first(_BATCH * batches).task()
            return partial(session.evaluate, task, batch_size=_BATCH, workers=0)

        of(_FEW)()  # libraries begin, and pinned memory is asked for
        few, many = calls_in(of(_FEW)), calls_in(of(_MANY))
        lines = _lines_that_wait(of(_MANY))
        lines.subtract(_lines_that_wait(of(_FEW)))
    told = [f"{count} in {line}" for line, count in lines.most_common(3) if count > 0]
    return {"few": few, "many": many, "batches": _MANY - _FEW, "lines": told}


def calls_in(work: Callable[[], object]) -> dict[str, int]:
    """How often the profiler has seen each operation, call of the runtime, kernel and copy."""
    with torch.profiler.profile() as profile:
        work()
    return dict(Counter(event.name for event in profile.events() or ()))


def _lines_that_wait(work: Callable[[], object]) -> Counter[str]:
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    torch.cuda.set_sync_debug_mode("default")
    return Counter(
        f"{Path(one.filename).name}:{one.lineno}" for one in caught if "synchroniz" in str(one.message)
    )


def _bare(problem: Problem, device: torch.device, precision: Precision) -> float:
    """Seconds of a loop by hand, with dualeval's numeric settings."""
    network, targets = problem.network.to(device), problem.targets.to(device)
    right = torch.zeros((), dtype=torch.int64, device=device)
    settings = NumericSettings(precision, device)
    start = perf_counter()
    with torch.inference_mode(), precision.forward_context(device)():
        for first in range(0, len(problem.images), _BATCH):
            rows = slice(first, first + _BATCH)
            logits = network(problem.images[rows].to(device, non_blocking=True))
            right += (logits.argmax(1) == targets[rows]).sum()
    right.item()
    seconds = perf_counter() - start
    settings.restore()
    network.to("cpu")
    return seconds


def speed(given: dict[str, Any]) -> Any:
    """Images/s of each round and peak memory, by way."""
    problem = _problem(given["model"], given["images"])
    peaks: dict[str, float | None] = {}
    with Session(device=given["device"]) as session:
        device = session.backend.device
        pinned = problem if device.type == "cpu" else replace(problem, images=problem.images.pin_memory())

        def ours(layout: str) -> float:
            own = {"layout": layout, "precision": given["precision"]}
            result = session.evaluate(problem.task(), batch_size=_BATCH, workers=0, **own)
            return float(result.timing["evaluate_s"])

        def images_per_s(way: str, run: Callable[[], float]) -> float:
            seconds, peaks[way] = _peak_mb(given["device"], run)
            return float(len(problem.images) / seconds)

        ways = {
            "bare": partial(_bare, pinned, device, PRECISIONS[given["precision"]]),
            "dualeval contiguous": partial(ours, "contiguous"),
            "dualeval": partial(ours, "auto"),
        }
        entries = {way: partial(images_per_s, way, run) for way, run in ways.items()}
        take_turns(1, entries)
        return {"images_per_s": take_turns(given["rounds"], entries), "peak_mb": peaks}


def profile(given: dict[str, Any]) -> Any:
    """What a batch costs in dualeval's loop and in the bare one: on the card, and on the launching thread."""
    problem = _problem(given["model"], 4 * 4 * _BATCH * _MANY)
    precision, answer = given["precision"], {}
    with Session(device=given["device"]) as session:
        device = session.backend.device

        def ours(part: Problem) -> Callable[[], object]:
            options = {"batch_size": _BATCH, "workers": 0, "precision": precision}
            return partial(session.evaluate, part.task(), **options)

        def bare(part: Problem) -> Callable[[], object]:
            pinned = replace(part, images=part.images.pin_memory())
            return partial(_bare, pinned, device, PRECISIONS[precision])

        for way, of in {"dualeval": ours, "bare": bare}.items():
            few, many = (of(problem.first(_BATCH * batches)) for batches in (_FEW, _MANY))
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


def _costs_in(work: Callable[[], object]) -> dict[str, float]:
    """Counts, microseconds and bytes by kind of the profiler's events, and the seconds of kernels by name."""
    with torch.profiler.profile() as seen:
        work()
    with tempfile.TemporaryDirectory() as folder:
        seen.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text("utf-8"))["traceEvents"]
    found = Counter[str]()
    for event in events:
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


def no_memory(given: dict[str, Any]) -> Any:
    """What an evaluation says that has too little memory, and its digest before and after that."""
    task = _problem("resnet18", 4 * 2 * _BATCH).task()

    def digest() -> str:
        with Session(device="cuda:0") as session:
            return str(session.evaluate(task, batch_size=_BATCH, workers=0).metrics_digest)

    first = digest()
    torch.cuda.empty_cache()
    held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    # Enough for the model's preparation, too little for a batch.
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((held + peak) / 2 / total)
    try:
        error = f"none: {digest()}"
    except DualevalError as failed:
        error = str(failed)
    torch.cuda.set_per_process_memory_fraction(1.0)
    return {"error": error, "first": first, "then": digest()}


class _Breaks(torch.nn.Module):
    """Reads behind the end of a tensor: on a GPU no error of Python, but the end of the process's GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(10, 10))

    def forward(self, images: Tensor) -> Tensor:
        rows: Tensor = self.table[images.flatten(1)[:, 0].long() + 10]
        return rows


def asserts(given: dict[str, Any]) -> Any:
    """What an evaluation says whose model fails on the device."""
    data = TensorDataset(torch.zeros(8, 1, 2, 2), torch.zeros(8, dtype=torch.int64))
    try:
        with Session(device=given["device"]) as session:
            session.evaluate(ModelTask(model=_Breaks(), data=data), batch_size=4, workers=0)
    except Exception as error:  # noqa: BLE001 - what is said is the answer
        return f"{type(error).__name__}: {str(error)[:500]}"
    return "no error"


def _device(given: dict[str, Any]) -> torch.device:
    return torch.device("cuda", 0) if given["device"] == "cuda" else torch.device("cpu")


def copies(given: dict[str, Any]) -> Any:
    """Tensors of every kind and of changing shapes there and back, with two batches under way."""
    device, pending = _device(given), list[Any]()
    problems: list[str] = []
    accelerator = accelerator_of(device)
    uploads = Uploads(accelerator)
    for number in range(12):
        dense = torch.rand(3 + number % 4, 5, 7, generator=torch.Generator().manual_seed(number))
        complex_ones = torch.view_as_complex(dense[..., :2].contiguous())
        batch = {
            "dense": dense,
            "part": dense[::2, 1:4],
            "transposed": dense.transpose(0, 2),
            "expanded": dense[:1].expand(6, 5, 7),
            "half": dense.bfloat16(),
            "empty": dense[:0],
        }
        _slow_kernel(device)
        on_device = uploads.start(batch)
        _slow_kernel(device)
        columns = {name: tensor * 2 for name, tensor in on_device.items()}
        moved = complex_ones.to(device)
        columns |= {"negated": torch._neg_view(moved.real), "imaginary": moved.conj().imag}
        columns |= {"conjugated": moved.conj(), "negated, dense": torch._neg_view(columns["dense"])}
        wanted = {name: tensor * 2 for name, tensor in batch.items()}
        wanted |= {"negated": -complex_ones.real, "imaginary": -complex_ones.imag}
        wanted |= {"conjugated": complex_ones.conj(), "negated, dense": -2 * dense}
        pending.append((number, start_download(accelerator, columns), wanted))
        while len(pending) > (2 if number < 11 else 0):
            of, wait, expected = pending.pop(0)
            found = wait()
            wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
            problems += [f"{name} of batch {of}" for name in wrong]
    return {"problems": problems, "found": f"12 batches of {len(wanted)} tensors"}


def _slow_kernel(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call] # tens of milliseconds


def errors_of_fp32(given: dict[str, Any]) -> Any:
    """The largest error of some operations against float64, relative to the largest value."""
    device = torch.device("cuda", 0)
    problems, told = list[str](), list[str]()
    torch.manual_seed(0)
    shapes = {
        "matrix": (1024, 1024),
        "images": (8, 64, 56, 56),
        "kernels": (64, 64, 3, 3),
        "heads": (2, 8, 256, 64),
    }
    of = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    attention = torch.nn.functional.scaled_dot_product_attention
    operations: dict[str, tuple[Callable[..., Tensor], list[str]]] = {
        "product": (torch.matmul, ["matrix", "matrix"]),
        "convolution": (torch.nn.functional.conv2d, ["images", "kernels"]),
        "attention": (attention, ["heads", "heads", "heads"]),
    }
    for precision, bounds in (("fp32", (0.0, 1e-5)), ("tf32", (1e-5, 1e-2))):
        settings = NumericSettings(PRECISIONS[precision], device)
        for name, (operation, names) in operations.items():
            exact = operation(*(of[each].double() for each in names))
            error = float((operation(*(of[each] for each in names)) - exact).abs().max() / exact.abs().max())
            told.append(f"{precision} {name} {error:.1e}")
            if not bounds[0] <= error <= bounds[1] and (precision, name) != ("tf32", "attention"):
                problems.append(f"{told[-1]}, expected {bounds[0]} to {bounds[1]}")
        settings.restore()
    return {"problems": problems, "found": ", ".join(told)}


def on_the_cpu(given: dict[str, Any]) -> Any:
    """Loss and top1 of the device against those of the CPU."""
    values: dict[str, dict[str, Any]] = {}
    for device in dict.fromkeys((given["device"], "cpu")):
        with Session(device=device) as session:
            result = session.evaluate(_task("fashion-cnn", device, 2000), batch_size=_BATCH, workers=0)
        values[device] = {name: result.metrics[name] for name in ("loss", "top1")}
    here, there = values[given["device"]], values["cpu"]
    wrong = [name for name, value in here.items() if abs(value - there[name]) > 1e-5 * abs(there[name])]
    return {"problems": [f"{name}: on the CPU {there[name]}" for name in wrong], "found": str(here)}


def in_training(given: dict[str, Any]) -> Any:
    """Weights and memory after 20 steps with dropout, with evaluations in between and without."""
    device, layers = _device(given), torch.nn
    problem = fashion_cnn().first(2000)
    images, targets = problem.images.float().div(255), problem.targets
    torch.use_deterministic_algorithms(True)

    def trained(*, evaluates: bool) -> tuple[str, int]:
        torch.manual_seed(0)
        model = layers.Sequential(
            *(layers.Conv2d(1, 16, 3), layers.BatchNorm2d(16), layers.ReLU(), layers.Flatten()),
            *(layers.Dropout(0.5), layers.Linear(16 * 26 * 26, 10)),
        ).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(20):
            rows = slice(_BATCH * step, _BATCH * (step + 1))
            logits = model(images[rows].to(device))
            loss = layers.functional.cross_entropy(logits, targets[rows].to(device))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if evaluates and step % 5 == 4:
                data = TensorDataset(images, targets)
                dualeval.evaluate(model=model, data=data, batch_size=_BATCH, workers=0)
        weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values())
        held = 0 if device.type == "cpu" else torch.cuda.memory_allocated()
        return hashlib.sha256(weights).hexdigest()[:8], held

    trained(evaluates=False)  # libraries begin
    without, within = trained(evaluates=False), trained(evaluates=True)
    # A constant or two may stay: libraries begin with the first evaluation, too.
    same = without[0] == within[0] and abs(within[1] - without[1]) <= 4096
    said = f"weights {within[0]} and {within[1]} bytes held"
    return {"problems": [] if same else [f"{said}, without {without}"], "found": f"{said} both times"}


_ALL = (
    evaluate,
    transport,
    waits,
    speed,
    profile,
    no_memory,
    asserts,
    copies,
    errors_of_fp32,
    on_the_cpu,
    in_training,
)
WORKERS: dict[str, Callable[[dict[str, Any]], Any]] = {worker.__name__: worker for worker in _ALL}

if __name__ == "__main__":
    said = WORKERS[sys.argv[1]](json.loads(sys.argv[2]))
    if said is not None:
        print(f"\n{ANSWER}{json.dumps(said)}", flush=True)
