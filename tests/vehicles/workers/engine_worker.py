"""One rank of an engine test: ``engine_worker.py SCENARIO FOLDER BACKEND``; writes FOLDER/rank-N.json."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dualeval.backends.base import Backend
from dualeval.engine.control.plane import ControlPlane
from dualeval.engine.folder import recorder
from dualeval.engine.job import agreement
from dualeval.engine.values.options import RunOptions
from dualeval.errors import DualevalError, PeerError
from dualeval.launch import detect
from dualeval.metrics import Measured, Metric, RowMetric
from dualeval.result import Result
from dualeval.tasks import Task
from dualeval.world import World
from dualeval.world.devices import connect
from tests.vehicles.ragged_task import RaggedTask
from tests.vehicles.sessions import joined, run_task
from tests.vehicles.tiny import EVERY_METRIC, FEATURES, TinyDataset, TinyTask

_PRIMITIVES = ("_all_reduce", "_broadcast", "_gather_headers", "_gather")


def count_collectives(backend: Backend) -> Counter[str]:
    """Count calls of the primitives that every collective goes through."""
    calls: Counter[str] = Counter()
    for name in _PRIMITIVES:
        primitive = getattr(backend, name)

        def counted(*args: Any, _name: str = name, _primitive: Any = primitive, **kwargs: Any) -> Any:
            calls[_name] += 1
            return _primitive(*args, **kwargs)

        setattr(backend, name, counted)
    return calls


class WatchedTask(TinyTask):
    """Calls back before every forward."""

    def __init__(self, count: int, before: Callable[[], None], **options: Any) -> None:
        super().__init__(count, **options)
        self._before = before

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self._before()
        return super().forward(model, batch)


def collectives(backend: Backend, control: ControlPlane, folder: Path) -> dict[str, Any]:
    """Collectives of whole runs, and how many of them fell between the first and the last forward."""
    calls = count_collectives(backend)
    found: dict[str, Any] = {}
    for samples, metrics in ((10, ["loss"]), (10, EVERY_METRIC), (10_000, ["loss"]), (10_000, EVERY_METRIC)):
        calls.clear()
        seen: list[int] = []
        task = WatchedTask(samples, lambda seen=seen: seen.append(calls.total()), metrics=metrics)  # type: ignore[misc]
        out = folder / f"{samples}-{len(metrics)}"
        run_task(task, backend, control, RunOptions(out=out, batch_size=4))
        in_loop = seen[-1] - seen[0] if seen else 0
        found[f"{samples} samples, {len(metrics)} metrics"] = {"in_loop": in_loop, **calls}
    return found


def apart_again(backend: Backend, control: ControlPlane, folder: Path) -> dict[str, Any]:
    """Each rank has a folder of its own, as without a shared disk; a run broke when each had saved 20."""
    out = folder / f"disk-of-{backend.world.rank}" / "out"
    recorder.FLUSH_ROWS = 16
    batches = 0

    def before() -> None:
        nonlocal batches
        batches += 1
        if breaks and batches > 20:
            control.meet()
            raise DualevalError("enough")

    notes: list[str] = []
    breaks = True
    with suppress(DualevalError):
        run_task(WatchedTask(997, before), backend, control, RunOptions(out=out, batch_size=16))
    breaks = False
    # Every rank has met the others in this run as often as they have.
    with joined(backend) as control:
        result = run_task(
            WatchedTask(997, before), backend, control, RunOptions(out=out, batch_size=16), note=notes.append
        )
    return {
        "digest": result.metrics_digest,
        "resumed": result.chunks["resumed"],
        "notes": notes,
        "left": sorted(path.name for path in out.glob("**/*")),
    }


def together(backend: Backend, control: ControlPlane, folder: Path) -> dict[str, Any]:
    """The plain case."""
    result = run_task(TinyTask(997), backend, control, RunOptions(out=folder / "out", batch_size=16))
    return {"digest": result.metrics_digest, "homogeneous": result.homogeneous}


def broken(backend: Backend, control: ControlPlane, folder: Path) -> dict[str, Any]:
    """Samples that fail on some ranks only."""
    task = TinyTask(100, broken=[5, 50, 99])
    result = run_task(task, backend, control, RunOptions(out=folder / "out", batch_size=4, on_error="skip"))
    return {"digest": result.metrics_digest, "failed": result.failed}


def one_fails_in_the_loop(backend: Backend, control: ControlPlane, folder: Path) -> dict[str, Any]:
    """The last rank raises in its second batch; the others have work for long, and must hear of it."""
    batches = 0

    def before() -> None:
        nonlocal batches
        batches += 1
        if backend.world.rank == backend.world.size - 1 and batches > 1:
            raise DualevalError("the last rank broke")

    task = WatchedTask(40_000, before)
    return told(
        lambda: run_task(task, backend, control, RunOptions(out=folder / "out", batch_size=1)), control
    )


def one_fails_before_the_loop(backend: Backend, control: ControlPlane, folder: Path) -> dict[str, Any]:
    """The last rank cannot build its model while the others wait for it at the first meeting."""

    class Unbuildable(TinyTask):
        def build_model(self, device: torch.device) -> nn.Module:
            raise DualevalError("no model here")

    last = backend.world.rank == backend.world.size - 1
    task = Unbuildable(10) if last else TinyTask(10)
    return told(lambda: run_task(task, backend, control, RunOptions(out=folder / "out")), control)


def another_job(backend: Backend, control: ControlPlane, folder: Path) -> dict[str, Any]:
    """The last rank has other data."""
    task = TinyTask(20 + (backend.world.rank == backend.world.size - 1))
    return told(lambda: run_task(task, backend, control, RunOptions(out=folder / "out")), control)


def one_id_on_two_ranks(backend: Backend, control: ControlPlane, folder: Path) -> dict[str, Any]:
    """The ids of two samples, in blocks that two ranks hash, are the same."""
    task = TinyTask(100)
    vars(task.dataset())["id"] = lambda index: f"s{index % 99}"
    return told(lambda: run_task(task, backend, control, RunOptions(out=None)), control)


def rank_in_the_model(backend: Backend, control: ControlPlane, folder: Path) -> dict[str, Any]:
    """The model keeps its rank among its attributes."""

    class Ranked(TinyTask):
        def build_model(self, device: torch.device) -> nn.Module:
            model = super().build_model(device)
            model.drawn = backend.world.rank  # type: ignore[assignment]
            return model

    return told(lambda: run_task(Ranked(10), backend, control, RunOptions(out=folder / "out")), control)


class Reading:
    """Two samples, read by a function."""

    def __init__(self, read: Callable[[int], Any]) -> None:
        self.read = read

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return self.read(index)


class ReadTask(TinyTask):
    """Its samples are a data set of somebody's own."""

    def __init__(self, read: Callable[[int], Any]) -> None:
        super().__init__(2)
        self._data = Reading(read)

    def dataset(self) -> Any:
        return self._data

    def collate(self, samples: Any) -> dict[str, Tensor]:
        return super().collate([(sample[0], 1) for sample in samples])


def _seeded(seed: int) -> Tensor:
    return torch.rand(FEATURES, generator=torch.Generator().manual_seed(seed))


def _unreadable(index: int) -> Any:
    if index == 1:
        raise OSError("gone")
    return (_seeded(0),)


def reads_rank(backend: Backend, control: ControlPlane, folder: Path) -> dict[str, Any]:
    """Samples that are random, seeded each, without bytes, unreadable; at last by rank."""
    readers: list[Callable[[int], Any]] = [
        lambda index: (torch.rand(FEATURES),),
        lambda index: (_seeded(index),),
        lambda index: (_seeded(index), object(), f"/tmp/{os.environ['RANK']}/{index}.png"),
        _unreadable,
    ]
    evaluated: list[int] = []
    for read in readers:
        on_error = "skip" if read is _unreadable else "stop"
        options = RunOptions(out=None, workers=len(evaluated) % 2, on_error=on_error)
        evaluated.append(run_task(ReadTask(read), backend, control, options).samples["evaluated"])
    task = ReadTask(lambda index: (_seeded(2 * index + int(os.environ["RANK"])),))
    return {
        "evaluated": evaluated,
        **told(lambda: run_task(task, backend, control, RunOptions(out=None)), control),
    }


class NumberedTask(WatchedTask):
    """A task that says which of how many processes this is, and a model whose rank is of another kind."""

    fingerprint = Task.fingerprint  # type: ignore[assignment]
    dualeval_identity_ignores = ("_before", "_world")

    def __init__(self, world: World, at: int, before: Callable[[], None]) -> None:
        super().__init__(100, before)
        self.world_size, self.local_rank = world.size, world.local_rank
        self.rank = at  # as in recall at rank

    def build_model(self, device: torch.device) -> nn.Module:
        layer: Any = super().build_model(device)
        layer.rank = 1  # as of a LoRA
        return nn.Sequential(layer)


def numbered(backend: Backend, control: ControlPlane, folder: Path) -> dict[str, Any]:
    """A run that breaks off on one rank and goes on on any number; then a job with another rank in it."""
    world, batches = backend.world, 0

    def before() -> None:
        nonlocal batches
        batches += 1
        if world.size == 1 and batches > 10:
            raise DualevalError("enough")

    def run(at: int = 1) -> Result:
        options = RunOptions(out=folder / "out", batch_size=4)
        return run_task(NumberedTask(world, at, before), backend, control, options)

    recorder.FLUSH_ROWS = 16
    if world.size == 1:
        return told(run, control)
    result = run()
    attributes = json.loads((folder / "out/job.json").read_text())["job"]["task_attributes"]
    return {
        "replay": result.replay,
        "resumed": result.chunks["resumed"],
        "attributes": {name: attributes[name] for name in ("rank", "local_rank", "world_size")},
        "refused": told(lambda: run(at=5), control)["message"],
    }


def two_machines(backend: Backend, control: ControlPlane, folder: Path) -> dict[str, Any]:
    """The last rank has other bits; then other versions, with and without leave to mix them."""
    real = vars(agreement)["machine_facts"]
    found: dict[str, Any] = {}

    def run(name: str, **options: Any) -> dict[str, Any]:
        result = run_task(
            TinyTask(100), backend, control, RunOptions(out=folder / name, batch_size=10, **options)
        )
        return {"homogeneous": result.homogeneous, "chunks": [kind["chunks"] for kind in result.machines]}

    def play(**changes: Any) -> None:
        if backend.world.rank == backend.world.size - 1:
            vars(agreement)["machine_facts"] = lambda *words: {**real(*words), **changes}

    play(bits="other")
    found["bits"] = run("bits")
    play(versions={"torch": "1.13"})
    found["mixed"] = run("mixed", mix_machines=True)
    found["refused"] = told(lambda: run("refused"), control)
    return found


class Contents(TinyDataset):
    """Has contents; those of one sample can be others."""

    def __init__(self, count: int, other: int | None = None) -> None:
        super().__init__(count)
        self._other = other
        self.asked: list[list[int]] = []

    def content_fingerprint(self, samples: range) -> str:
        self.asked.append([samples.start, samples.stop])
        return f"{samples} {self._other if self._other in samples else None}"


class ContentsTask(TinyTask):
    """A TinyTask on such a data set."""

    def __init__(self, count: int, other: int | None = None) -> None:
        super().__init__(count)
        self.contents = self._dataset = Contents(count, other)


def contents(backend: Backend, control: ControlPlane, folder: Path) -> dict[str, Any]:
    """Contents are read once by the ranks together; then by each, as if each were a node; then others."""
    task = ContentsTask(300)
    shared = run_task(task, backend, control, RunOptions(out=folder / "shared"))
    last = backend.world.rank == backend.world.size - 1
    backend.world = replace(backend.world, local_rank=0, local_size=1)
    alone = ContentsTask(300)
    each = run_task(alone, backend, control, RunOptions(out=folder / "each"))
    other = ContentsTask(300, 200 if last else None)
    refused = told(lambda: run_task(other, backend, control, RunOptions(out=folder / "other")), control)
    return {
        "asked": task.contents.asked,
        "asked_alone": alone.contents.asked,
        "contents": [shared.data["contents"], each.data["contents"]],
        **refused,
    }


class Median:
    """The median loss, and which sample comes first: needs all rows, in order."""

    name = "median"
    columns = ("loss", "top")

    def compute(self, columns: Mapping[str, npt.NDArray[Any]]) -> Measured:
        losses = columns["loss"]
        return Measured(
            values={
                "median": float(np.median(losses)),
                "rows": len(losses),
                "in_order": hashlib.sha256(losses.tobytes() + columns["top"].tobytes()).hexdigest(),
            }
        )


class MedianTask(TinyTask):
    """A TinyTask with a metric of all rows."""

    def metrics(self) -> list[Metric | RowMetric]:
        return [*super().metrics(), Median()]


def nothing_written(backend: Backend, control: ControlPlane, folder: Path) -> dict[str, Any]:
    """With failed samples and a metric of all rows: an evaluation that writes nothing, and one that does."""
    recorder.FLUSH_ROWS = 64
    task = MedianTask(997, broken=[3, 500, 996])
    files: list[str] = []
    sys.addaudithook(lambda event, args: files.append(str(args)) if _writes(event, args) else None)
    options: dict[str, Any] = {"batch_size": 16, "on_error": "skip"}
    result = run_task(task, backend, control, RunOptions(**options))
    written = list(files)
    kept = run_task(task, backend, control, RunOptions(out=folder / "out", **options))
    return {
        "digests": [result.metrics_digest, kept.metrics_digest],
        "fingerprints": [result.fingerprint, kept.fingerprint],
        "metrics": result.metrics,
        "failed": result.failed == kept.failed and len(result.failed),
        "folder": result.folder,
        "written": written,
        "written_with_out": len(files) > len(written),
    }


def _writes(event: str, args: tuple[Any, ...]) -> bool:
    if event == "open":
        path, _, flags = args
        return isinstance(path, str) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return event in ("os.mkdir", "os.rename", "os.link", "os.symlink")


RAGGED_SAMPLES = 203
# One alone, a whole batch, and the last one.
BROKEN_ROWS = [3, *range(40, 48), 202]


def ragged(backend: Backend, control: ControlPlane, folder: Path) -> dict[str, Any]:
    """Ragged columns and text: two ranks share a folder, of three rank 0 has its own; and without one."""
    out = folder / f"disk-of-{min(backend.world.rank, backend.world.size - 2)}" / "out"
    recorder.FLUSH_ROWS = 24

    def run(out: Path | None) -> Result:
        task = RaggedTask(RAGGED_SAMPLES, BROKEN_ROWS)
        options = RunOptions(out=out, batch_size=8, on_error="skip")
        return run_task(task, backend, control, options)

    results = [run(out), run(None)]
    return {
        "digests": [result.metrics_digest for result in results],
        "resumed": results[0].chunks["resumed"],
        "out": str(out),
        "left": sorted(path.name for path in out.glob("**/*")),
    }


def told(run: Callable[[], Any], control: ControlPlane) -> dict[str, Any]:
    """What this rank raised, and which failure it would report."""
    try:
        run()
    except DualevalError as error:
        first = error if isinstance(error, PeerError) else control.fail(error)
        return {
            "raised": type(error).__name__,
            "message": str(first),
            "rank": first.rank,
            "code": first.exit_code,
        }
    return {"raised": None}


def torchmetrics(backend: Backend, control: ControlPlane, folder: Path) -> dict[str, Any]:
    """Metrics of TorchMetrics, with failed samples."""
    from tests.vehicles.torchmetrics_task import BATCH, ManyMetricsTask  # TorchMetrics: seconds

    recorder.FLUSH_ROWS = 24
    options = RunOptions(out=folder / "out", batch_size=BATCH, on_error="skip")
    result = run_task(ManyMetricsTask(), backend, control, options)
    return {"digest": result.metrics_digest, "failed": result.samples["failed"]}


def scores(backend: Backend, control: ControlPlane, folder: Path) -> dict[str, Any]:
    """Metrics of a classifier that read its scores."""
    from dualeval.tasks.image_classification import ImageClassification

    metric = ("auroc", "torchmetrics:MulticlassAUROC(num_classes=10)")
    options = RunOptions(out=folder / "out", limit=300, metric=metric)
    result = run_task(ImageClassification(metrics=["auroc"]), backend, control, options)
    return {"digest": result.metrics_digest, "metrics": result.metrics}


def manners(backend: Backend, control: ControlPlane, folder: Path) -> list[dict[str, Any]]:
    """The embedded job, anew for each [limit, workers, threads] of FOLDER/manners.json."""
    from dualeval.tasks.image_classification import ImageClassification

    found = []
    for number, (limit, workers, threads) in enumerate(json.loads((folder / "manners.json").read_text())):
        torch.set_num_threads(threads)
        options = RunOptions(out=folder / str(number), limit=limit, workers=workers)
        result = run_task(ImageClassification(), backend, control, options)
        names = {"digest": result.metrics_digest, "samples": result.samples_digest}
        found.append({**names, "resumed": result.chunks["resumed"], "total": result.samples["total"]})
    return found


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        *(collectives, apart_again, together, broken, one_fails_in_the_loop),
        *(one_fails_before_the_loop, another_job, one_id_on_two_ranks, two_machines, rank_in_the_model),
        reads_rank,
        *(numbered, contents, nothing_written, ragged, torchmetrics, scores, manners),
    )
}


def main() -> None:
    torch.set_num_threads(1)
    scenario, folder, name = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    with connect(name, detect(os.environ), "cpu") as backend, joined(backend) as control:
        report = SCENARIOS[scenario](backend, control, folder)
        (folder / f"rank-{backend.world.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
