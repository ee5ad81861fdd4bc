"""What one batch has a GPU do, counted without one: operations, copies, bytes and waits, and by which thread.

The CPU plays a device: every operation of torch that computes or copies would be a kernel there, or several.
What one batch adds is counted in the midst of the loop. A bare loop adds four to the forward: argmax,
comparison, sum and addition. With `--beside` another checkout is counted, too.

    python benchmarks/launches.py [--beside FOLDER]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import tasks_text
import torch
from common import ONE_THREAD, ROOT, machine, run_process, table, write_results
from engine import Engine
from made_pictures import write_pictures
from problems import resnet18, small_cnn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dualeval import Task
from dualeval.columns.late import keeps_late
from dualeval.engine.device import accelerator, transfer
from dualeval.engine.loop import forward
from dualeval.metrics import classification
from dualeval.tasks import ImageClassification

# Batches of an evaluation, and those behind which its loop is full.
_BATCHES, _FIRST = 8, 3
# Samples a batch. Eight pictures are more than 1 MiB, which a thread copies; more of them take a CPU long.
_CASES = {"small network": 64, "ResNet-18": 8, "ResNet-18, JPEG files": 8, "BERT of 6 layers": 16}
_PRECISIONS = "fp32", "amp-bf16"
_NO_KERNELS = ("aten.empty", "aten._unsafe_view", "aten.lift", "aten.detach")
_HEAD = (
    *("", "forward", "observe", "to pack", "on the host, by the launching thread"),
    *("copies up", "KB", "by another thread", "copies down", "KB", "waits"),
)


class Launches(TorchDispatchMode):
    """Counts the operations that would be kernels, by what they are for; of the thread that enters it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # What this thread did, and what others did, for which no operation is counted.
        self.counts: dict[str, float] = defaultdict(float)
        self.of_others: dict[str, float] = defaultdict(float)
        self.stage = "else"

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type[Any]],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = f"{func}"
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode it comes whole
                return func.decompose(*args, **(kwargs or {}))
        # The host's logits are cloned before they wait, a GPU's are not.
        is_of_host = self.stage == "observe" and name.startswith("aten.clone")
        if not func.is_view and not is_of_host and not name.startswith(_NO_KERNELS):
            self.counts[self.stage] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def within(self, stage: str) -> Iterator[None]:
        """Count operations under this name."""
        before, self.stage = self.stage, stage
        try:
            yield
        finally:
            self.stage = before


class _Stream:
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class Counted(accelerator.Host):
    """A device whose copies and waits are counted."""

    is_host = False
    batches_ahead = 2

    def __init__(self, launches: Launches) -> None:
        super().__init__(torch.device("cpu"))
        self._launches, self._fresh = launches, set[int]()

    def new_stream(self) -> Any:
        return _Stream()

    current_stream = new_stream

    def record_event(self) -> Any:
        return self

    def synchronize(self) -> None:
        self._launches.counts["waits"] += 1

    def pinned(self, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    def empty(self, like: Tensor) -> Tensor:
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        self._fresh.add(made.data_ptr())
        return made

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        with self._launches.within("pack"):
            return super().joined(parts)  # type: ignore[misc,no-any-return,unused-ignore]

    def start_copy(self, source: Tensor, target: Tensor) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        counts = self._launches.counts if is_main else self._launches.of_others
        way = "up" if target.data_ptr() in self._fresh else "down"
        self._fresh.discard(target.data_ptr())
        counts[way] += 1
        counts[f"{way} KB"] += source.nbytes / 1000
        with self._launches.within("copies") if is_main else nullcontext():
            target.copy_(source)

    def keep_for(self, tensor: Tensor, stream: Any) -> None: ...


def task_of(case: str, folder: Path, count: int) -> Task:
    """A task of so many samples."""
    if case == "small network":
        return small_cnn().first(count).task()
    if case == "ResNet-18":
        return resnet18(count, _CASES[case]).task()
    if case.startswith("BERT"):
        tasks_text.TEXTS = count
        made: Callable[[], Task] = tasks_text.text_classification(folder)["task"]
        return made()
    write_pictures(folder, count, 256, 8)
    for number in range(992):
        (folder / f"none{number}").mkdir()
    options: dict[str, Any] = {"weights": "random:0", "preprocessing": "imagenet"}
    return ImageClassification(model="resnet18", data=folder, **options)


def counted_in(case: str, precision: str) -> dict[str, float]:
    """What a batch adds, by name, in this process."""
    launches = Launches()
    # As if the logits were a GPU's.
    few = vars(classification).get("_FEW_OF_GPU", classification._FEW_CLASSES)
    classification._FEW_CLASSES = few
    accelerator.ACCELERATORS["cpu"] = lambda device: Counted(launches)

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def within(*arguments: Any) -> Any:
            with launches.within(name):
                return method(*arguments)

        return keeps_late(within) if name == "observe" else within

    # What there was when each batch of the loop was launched.
    there: list[dict[str, float]] = []
    under_way: Any = forward.UnderWay
    uploads: Any = transfer.Uploads
    start, begin = under_way.start, getattr(uploads, "begin", None)

    def started(*arguments: Any) -> None:
        there.append(dict(launches.counts))
        start(*arguments)

    def begun(*arguments: Any) -> Any:
        assert begin is not None
        if threading.current_thread() is not threading.main_thread():
            launches.of_others["batches"] += 1
        return begin(*arguments)

    under_way.start, uploads.begin = started, begun
    with tempfile.TemporaryDirectory() as folder:
        task = task_of(case, Path(folder), _BATCHES * _CASES[case])
        for name in ("forward", "observe"):
            setattr(type(task), name, watched(name, getattr(type(task), name)))
        workers = 2 if case.endswith("files") else 0
        with launches:
            Engine().evaluate(task, batch_size=_CASES[case], precision=precision, workers=workers)
    first, last = there[_FIRST], there[_BATCHES - 1]
    of_batch = {name: (last[name] - first[name]) / (_BATCHES - 1 - _FIRST) for name in first}
    written = launches.of_others["batches"] or 1
    return of_batch | {f"{name}, by another thread": n / written for name, n in launches.of_others.items()}


def counted(checkout: Path, case: str, precision: str) -> dict[str, float]:
    """What a batch adds with a checkout's package, by name."""
    command = [sys.executable, __file__, "--count", case, precision]
    done = run_process(command, timeout_s=600, environ={**ONE_THREAD, "PYTHONPATH": str(checkout)})
    of_batch: dict[str, float] = json.loads(done.output.splitlines()[-1])
    return of_batch


def row_of(name: str, of: dict[str, float]) -> list[str]:
    """A row of the table."""
    others = {way: of.get(f"{way}, by another thread", 0) for way in ("up", "up KB", "down", "down KB")}
    both = {way: of.get(way, 0) + count for way, count in others.items()}
    stages = [of.get(stage, 0) for stage in ("forward", "observe", "pack", "else")]
    figures = [*stages, both["up"], both["up KB"], others["up"], both["down"], both["down KB"]]
    return [name, *(f"{figure:.4g}" for figure in [*figures, of.get("waits", 0)])]


def main() -> None:
    """Read the command line, count, and write."""
    parser = argparse.ArgumentParser(description="Count what a batch has a GPU do.")
    parser.add_argument("--beside", metavar="FOLDER", type=Path, help="another checkout of dualeval")
    parser.add_argument("--count", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.count:
        print("\n" + json.dumps(counted_in(*asked.count)), flush=True)
        return
    rows, figures = [], []
    checkouts = {"here": ROOT, **({} if asked.beside is None else {"beside": asked.beside.resolve()})}
    for case, samples in _CASES.items():
        for precision in _PRECISIONS:
            # Another precision adds casts to the forward, and nothing else.
            for where, checkout in [*checkouts.items()][: 1 if precision != _PRECISIONS[0] else 2]:
                of = counted(checkout, case, precision)
                rows.append(row_of(f"{case}, {precision}, {samples} a batch, {where}", of))
                figures.append({"case": case, "precision": precision, "where": where, **of})
    body = (
        "**Counted on a CPU that plays a device; nothing here was run on a GPU.** Operations of torch that "
        "compute or copy, and copies with their KB, that a batch adds. An operation may be several kernels "
        "of a GPU. On the host are collate, pinned memory and clones out of it. What another thread than the "
        "launching one has copied is among the copies up. Waits are the host's, for an event.\n\n"
        f"{table(_HEAD, rows)}"
    )
    write_results("launches", "What a batch has a GPU do", body, {"rows": figures}, machine())


if __name__ == "__main__":
    main()
