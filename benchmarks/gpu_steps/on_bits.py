"""What processes of the steps of ends and correctness measure: digests, copies, numbers, what errors say."""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from problems import Problem, fashion_cnn, resnet18, small_cnn
from tasks import segmentation
from torch import Tensor
from torch.utils.data import TensorDataset

import dualeval
from dualeval import ModelTask, Session, connect, detect
from dualeval.backends.selftest import check_operations, measure_all_reduce
from dualeval.engine.device.accelerator import accelerator_of
from dualeval.engine.device.numerics import NumericSettings
from dualeval.engine.device.transfer import Uploads, start_download
from dualeval.errors import DualevalError
from dualeval.metrics import Mean
from dualeval.options.precision import PRECISIONS
from gpu_steps.networks import BATCH
from gpu_steps.on_speed import peak_mb


def _problem(name: str, images: int) -> Problem:
    """ResNet-18 has a quarter of the images, and the small CNN up to eight times as many."""
    if name == "resnet18":
        problem = resnet18(images // 4, BATCH)
    else:
        problem = fashion_cnn().first(images) if name == "fashion-cnn" else small_cnn().first(8 * images)
    return replace(problem, ready=True, batch_size=BATCH)


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


def evaluate(given: dict[str, Any]) -> Any:
    """Digest, images/s and peak memory by model; None on other ranks than 0."""
    device, answer = given["device"], {}
    tasks = {
        name: _task(name, device, given["images"], sharded="in_training" in given) for name in given["models"]
    }
    # Ranks share the first GPU.
    with Session(device="cuda:0" if device == "cuda" else device, allow_shared_gpu=True) as session:
        for name, task in tasks.items():
            options = {"batch_size": BATCH, "workers": given.get("workers", 0), **given.get("options", {})}
            result, peak = peak_mb(device, partial(session.evaluate, task, **options))
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


def no_memory(given: dict[str, Any]) -> Any:
    """What an evaluation says that has too little memory, and its digest before and after that."""
    task = _problem("resnet18", 4 * 2 * BATCH).task()

    def digest() -> str:
        with Session(device="cuda:0") as session:
            return str(session.evaluate(task, batch_size=BATCH, workers=0).metrics_digest)

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
            result = session.evaluate(_task("fashion-cnn", device, 2000), batch_size=BATCH, workers=0)
        values[device] = {name: result.metrics[name] for name in ("loss", "top1")}
    here, there = values[given["device"]], values["cpu"]
    wrong = [name for name, value in here.items() if abs(value - there[name]) > 1e-5 * abs(there[name])]
    return {"problems": [f"{name}: on the CPU {there[name]}" for name in wrong], "found": str(here)}


def float64_columns(given: dict[str, Any]) -> Any:
    """The mean of a float64 column beside the exact one: 53 bits go in, and 53 come out."""
    count = 1000
    numbers = torch.arange(count, dtype=torch.float64) + 2.0**40

    def observe(outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"third": outputs / 3, "tiny": outputs * 2.0**-60}

    expected = {
        "third": math.fsum((numbers / 3).tolist()) / count,
        "tiny": math.fsum((numbers * 2.0**-60).tolist()) / count,
    }
    task = ModelTask(
        model=torch.nn.Identity,
        data=TensorDataset(numbers),
        observe=observe,
        metrics=[Mean("third"), Mean("tiny")],
    )
    with Session(device=given["device"]) as session:
        found = session.evaluate(task, batch_size=BATCH, workers=0).metrics
    wrong = [
        f"{name} {found[name]!r}, expected {value!r}"
        for name, value in expected.items()
        if found[name] != value
    ]
    return {"problems": wrong, "found": ", ".join(f"{name} {found[name]!r}" for name in expected)}


def outer_autocast(given: dict[str, Any]) -> Any:
    """An evaluation inside of a caller's autocast: fp32 as without it, and the caller's state as it was."""
    problem = fashion_cnn().first(512)
    problems = list[str]()
    device = _device(given)
    layer = torch.nn.Linear(8, 8).to(device)
    inputs = torch.ones(1, 8, device=device)

    def digest() -> str:
        return str(
            dualeval.evaluate(
                problem.task(), device=given["device"], batch_size=BATCH, workers=0
            ).metrics_digest
        )

    outside = digest()
    with torch.autocast(device.type, torch.bfloat16):
        before = layer(inputs)
        if (inside := digest()) != outside:
            problems.append(f"inside of it {inside}, outside {outside}")
        if before.dtype != torch.bfloat16 or not torch.equal(layer(inputs), before):
            problems.append("the caller's layer was not computed as before")
    return {"problems": problems, "found": f"{outside[:8]} both times"}


def masks(given: dict[str, Any]) -> Any:
    """Segmentation twice, once with reading processes, and its mean IoU by hand on the CPU."""
    with tempfile.TemporaryDirectory(prefix="dualeval-gpu-") as folder:
        pair = segmentation(Path(folder), min(given["images"], 480))
        found = []
        for workers in (0, 2):
            with Session(device=given["device"]) as session:
                found.append(session.evaluate(pair.task(), batch_size=pair.batch_size, workers=workers))
        wanted = pair.by_hand()
    value = found[0].metrics[pair.metric]
    digests = [one.metrics_digest for one in found]
    problems = [] if digests[0] == digests[1] else [f"digests {digests}"]
    if not isinstance(value, float) or abs(value - wanted) > 1e-3 * wanted:
        problems.append(f"{pair.metric} {value}, by hand on the CPU {wanted}")
    speed = found[0].samples_per_s
    return {
        "problems": problems,
        "found": f"{pair.metric} {value:.6f}, {digests[0][:8]} twice, {speed:,.0f} pictures/s",
    }


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
            rows = slice(BATCH * step, BATCH * (step + 1))
            logits = model(images[rows].to(device))
            loss = layers.functional.cross_entropy(logits, targets[rows].to(device))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if evaluates and step % 5 == 4:
                data = TensorDataset(images, targets)
                dualeval.evaluate(model=model, data=data, batch_size=BATCH, workers=0)
        weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values())
        held = 0 if device.type == "cpu" else torch.cuda.memory_allocated()
        return hashlib.sha256(weights).hexdigest()[:8], held

    trained(evaluates=False)  # libraries begin
    without, within = trained(evaluates=False), trained(evaluates=True)
    # A constant or two may stay: libraries begin with the first evaluation, too.
    same = without[0] == within[0] and abs(within[1] - without[1]) <= 4096
    said = f"weights {within[0]} and {within[1]} bytes held"
    return {"problems": [] if same else [f"{said}, without {without}"], "found": f"{said} both times"}
