"""A caller's own loop: every sample once, the same bits at every size, resumed, and clear about misuse."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from torch.utils.data import TensorDataset

from dualeval.engine.own_loop import OwnLoop
from dualeval.errors import UsageError
from dualeval.metrics import Mean
from dualeval.result import Result, read_status
from dualeval.world import World
from dualeval.world.devices import connect
from tests.conftest import ROOT, Launch
from tests.vehicles.launchers import start
from tests.vehicles.sessions import joined, watched
from tests.vehicles.workers.own_loop_worker import SAMPLES, make_data, make_model, observed, own_loop

WORKER = ROOT / "tests/vehicles/workers" / "own_loop_worker.py"


@contextmanager
def opened(dataset: Any, out: Path | None = None, **options: Any) -> Iterator[OwnLoop]:
    with (
        connect(None, World.alone(), "cpu") as backend,
        joined(backend) as control,
        watched(control) as watch,
    ):
        loop = own_loop(backend, control, watch, out, dataset, **options)
        with closing(loop):
            yield loop


def run(out: Path | None = None, seed: int = 0, **options: Any) -> Result:
    model = make_model(seed)
    with opened(make_data(), out, **options) as loop, torch.no_grad():
        for inputs, targets in loop.batches():
            loop.add(inputs, **observed(model(inputs), targets))
        return loop.result()


def ranks(launch: Launch, size: int, folder: Path, out: str | Path, *more: str) -> list[dict[str, Any]]:
    done = launch([*start("torchrun", size), sys.executable, WORKER, folder, out, *more])
    if more:
        assert done.returncode != 0
        return []
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def wanted() -> Result:
    return run()


def test_the_numbers_are_those_of_all_samples(wanted: Result) -> None:
    model = make_model()
    losses, hits = [], []
    with torch.no_grad():
        data = make_data()
        for first in range(0, SAMPLES, 16):
            part = data[first : first + 16]
            inputs, targets = torch.stack([x for x, _ in part]), torch.tensor([y for _, y in part])
            columns = observed(model(inputs), targets)
            losses += columns["loss"].tolist()
            hits += columns["correct"].tolist()
    assert wanted.samples == {"total": SAMPLES, "evaluated": SAMPLES, "failed": 0}
    assert wanted.metrics["loss"] == math.fsum(losses) / SAMPLES
    assert wanted.metrics["correct"] == sum(hits) / SAMPLES
    assert wanted.metrics["target"] == sum(y for _, y in make_data()) / SAMPLES
    assert set(wanted.intervals) == {"loss", "correct", "target"}
    assert wanted.folder is None


def test_a_killed_loop_has_the_same_bits_resumed_on_three_ranks(
    launch: Launch, tmp_path: Path, wanted: Result
) -> None:
    ranks(launch, 2, tmp_path, tmp_path / "out", "9")
    reports = ranks(launch, 3, tmp_path, tmp_path / "out")
    assert [report["digest"] for report in reports] == 3 * [wanted.metrics_digest]
    assert reports[0]["resumed"] > 0
    assert reports[0]["replay"] == "same bits"
    table = pyarrow.parquet.read_table(tmp_path / "out/predictions.parquet")
    assert table["index"].to_pylist() == list(range(SAMPLES))
    assert table.column_names == ["id", "index", "loss", "correct", "target"]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_loop_has_the_same_bits_on_several_ranks_without_a_folder(
    launch: Launch, tmp_path: Path, wanted: Result, size: int
) -> None:
    reports = ranks(launch, size, tmp_path, "none")
    assert [report["digest"] for report in reports] == size * [wanted.metrics_digest]
    # No batch is computed twice in a run that begins.
    assert sum(report["batches"] for report in reports) == -(-SAMPLES // 16)


@pytest.mark.parametrize("number", [1, 2])
def test_each_of_two_batches_is_compared(tmp_path: Path, number: int) -> None:
    run(tmp_path)
    model = make_model()
    with (
        pytest.raises(UsageError, match="column 'loss'"),
        opened(make_data(), tmp_path) as loop,
        torch.no_grad(),
    ):
        # The first is that from which the columns are learnt.
        for count, (inputs, targets) in enumerate(loop.batches()):
            columns = observed(model(inputs), targets)
            loop.add(inputs, **{**columns, "loss": columns["loss"] * (1 + (count == number))})
    assert count == 2


def test_a_finished_loop_is_shown_again_after_a_batch_was_compared(tmp_path: Path, wanted: Result) -> None:
    assert run(tmp_path).metrics_digest == wanted.metrics_digest
    again = run(tmp_path)
    assert (again.earlier, again.replay, again.metrics_digest) == (True, "same bits", wanted.metrics_digest)
    assert run(tmp_path, replay=False).replay == "skipped"


def test_another_model_does_not_go_on(tmp_path: Path) -> None:
    run(tmp_path / "named", model=make_model(0))
    with pytest.raises(UsageError, match=r"holds another job \(.*weights"):
        run(tmp_path / "named", seed=1, model=make_model(1))
    # One that is not named shows in the numbers.
    run(tmp_path / "compared")
    with pytest.raises(UsageError, match="holds other numbers than this job gives now"):
        run(tmp_path / "compared", seed=1)


def test_what_a_later_run_cannot_know_is_noted(tmp_path: Path) -> None:
    class Mine:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> float:
            return float(index)

    notes: list[str] = []
    with opened(Mine(), tmp_path, note=notes.append) as loop:
        for batch in loop.batches():
            loop.add(batch, value=batch)
        loop.result()
    for words in ("the loop's own source", "the weights", "the contents of the data set (Mine)"):
        assert words in notes[0]


@pytest.mark.parametrize(
    "dataset",
    [torch.arange(10.0), np.arange(10.0), [float(i) for i in range(10)], TensorDataset(torch.arange(10.0))],
    ids=["tensor", "array", "list", "TensorDataset"],
)
def test_tensors_arrays_and_lists_are_data_sets_with_a_fingerprint(dataset: Any, tmp_path: Path) -> None:
    def fingerprint(data: Any, name: str) -> str:
        with opened(data, tmp_path / name, batch_size=4) as loop:
            for batch in loop.batches():
                loop.add(batch, value=batch[0] if isinstance(batch, list) else batch)
            result = loop.result()
        assert result.metrics["value"] == sum(range(10)) / 10
        return str(result.data["fingerprint"])

    first = fingerprint(dataset, "first")
    assert fingerprint(dataset, "again") == first
    if isinstance(dataset, torch.Tensor):
        moved = dataset.clone()
        moved[[2, 3]] = moved[[3, 2]]
        assert fingerprint(moved, "moved") != first


def test_columns_of_all_kinds_have_a_mean_and_given_metrics_replace_it() -> None:
    data = [float(index) for index in range(20)]
    with opened(data) as loop:
        for batch in loop.batches():
            half = batch.half().requires_grad_()
            loop.add(batch, double=batch.double(), half=half, listed=batch.tolist(), count=batch.int())
        result = loop.result()
    assert result.metrics == dict.fromkeys(("double", "half", "listed", "count"), 9.5)
    with opened(data, metrics=[Mean("value", name="mine")]) as loop:
        for batch in loop.batches():
            loop.add(batch, value=batch.float(), wide=torch.zeros(len(batch), 3))
        assert loop.result().metrics == {"mine": 9.5}


class Breaking(list[float]):
    """Sample 3 cannot be read; sample 5 not at the first attempt."""

    def __init__(self, count: int, flaky: bool = False) -> None:
        super().__init__(map(float, range(count)))
        self.attempts = 0 if flaky else 99

    def __getitem__(self, index: Any) -> Any:
        if index == 5:
            self.attempts += 1
        if index == 3 or (index == 5 and self.attempts <= 1):
            raise OSError("broken")
        return super().__getitem__(index)


def test_samples_that_cannot_be_read_are_left_out_or_refused() -> None:
    def mean(data: Any) -> Result:
        with opened(data, on_error="skip", batch_size=8) as loop:
            for batch in loop.batches():
                loop.add(batch, value=batch + 1)
            return loop.result()

    result = mean(Breaking(20))
    assert result.samples == {"total": 20, "evaluated": 19, "failed": 1}
    assert result.metrics["value"] == (sum(range(21)) - 4) / 19
    # The first batch is read twice: what failed at first and then does not is computed of its own value.
    assert mean(Breaking(20, flaky=True)).metrics == result.metrics
    unreadable = r"sample 3 \(index 3\) cannot be read: OSError: broken"
    with pytest.raises(UsageError, match=unreadable), opened(Breaking(20)) as loop:
        list(loop.batches())


NUMBERS = [float(index) for index in range(40)]


def add_twice(loop: OwnLoop, batch: torch.Tensor, number: int) -> None:
    for _ in range(2):
        loop.add(batch, value=batch)


MISUSES: list[tuple[Callable[[OwnLoop, torch.Tensor, int], object], str]] = [
    (lambda loop, batch, number: None, "samples 0 to 15 was not added"),
    (add_twice, "samples 0 to 15 was added before"),
    (
        lambda loop, batch, number: loop.add(batch.clone(), value=batch),
        "Tensor that is not the current batch",
    ),
    (lambda loop, batch, number: loop.add(batch, value=batch[1:]), "has 15 rows .* expected 16"),
    (lambda loop, batch, number: loop.add(batch, value=batch.mean()), "has one number .* reduction='none'"),
    (lambda loop, batch, number: loop.add(batch), "no column"),
    (lambda loop, batch, number: loop.add(batch, value=[None] * 16), "'value' is a list"),
    (
        lambda loop, batch, number: loop.add(batch, value=np.ma.masked_less(batch.numpy(), 3)),
        "'value' has masked entries",
    ),
    (lambda loop, batch, number: loop.add(batch, wide=batch[:, None]), "'wide' has 2 dimensions"),
    (lambda loop, batch, number: loop.add(batch, id=batch), "the column 'id' has a name that is taken"),
    (
        lambda loop, batch, number: loop.add(batch, value=batch, **({} if number < 2 else {"more": batch})),
        "samples 32 to 39 was added with the columns value, more",
    ),
]


@pytest.mark.parametrize(("use", "said"), MISUSES)
def test_misuse_is_said_at_once(use: Callable[[OwnLoop, torch.Tensor, int], object], said: str) -> None:
    with pytest.raises(UsageError, match=said), opened(NUMBERS) as loop:
        for number, batch in enumerate(loop.batches()):
            use(loop, batch, number)
        loop.result()


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        (iter(NUMBERS), {}, "no length"),
        (torch.tensor(1.0), {}, "a Tensor, which has no length"),
        ([], {}, "the data set is empty"),
        *(
            (NUMBERS, {name: value}, f"{name} {value!r}: expected a")
            for name, value in (("metrics", 5), ("metrics", "a"), ("model", 5), ("collate", 5))
        ),
        (NUMBERS, {"precision": "amp-bf16"}, "in your own loop write autocast yourself"),
        *(
            (NUMBERS, {name: value}, "in your own loop")
            for name, value in (("precision", "fp16"), ("layout", "contiguous"), ("optimize", "fold"))
        ),
    ],
)
def test_wrong_data_and_options_of_a_loop_are_refused(data: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said), opened(data, **options):
        pass


def test_add_and_result_without_a_batch_are_refused() -> None:
    with opened(NUMBERS) as loop:
        with pytest.raises(UsageError, match="without a loop"):
            loop.result()
        with pytest.raises(UsageError, match="without a current batch"):
            loop.add(NUMBERS, value=NUMBERS)


def test_a_batch_may_be_changed_in_place() -> None:
    data = [{"x": torch.tensor([float(index)])} for index in range(40)]
    with opened(data) as loop:
        for batch in loop.batches():
            loop.add(batch, value=batch["x"].add_(1)[:, 0])
            batch["x"].zero_()  # what was added is a copy
        assert loop.result().metrics["value"] == 20.5


def test_a_loop_that_is_left_says_what_is_missing_and_goes_on(tmp_path: Path, wanted: Result) -> None:
    model = make_model()
    missing = "949 of the 997 samples of this rank are missing"
    with pytest.raises(UsageError, match=missing), opened(make_data(), tmp_path) as loop:
        for number, (inputs, targets) in enumerate(loop.batches()):
            loop.add(inputs, **observed(model(inputs), targets))
            if number == 2:
                break
        loop.result()
    status = read_status(tmp_path)
    assert status is not None
    assert status.state == "failed"
    result = run(tmp_path)
    assert (result.chunks["resumed"], result.metrics_digest) == (3, wanted.metrics_digest)


def test_an_error_in_the_loop_leaves_settings_and_saves(tmp_path: Path) -> None:
    threads, model = torch.get_num_threads(), make_model()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError), opened(make_data(), tmp_path) as loop, torch.no_grad():
            for number, (inputs, targets) in enumerate(loop.batches()):
                assert not torch.is_grad_enabled()
                assert torch.get_num_threads() == 1
                loop.add(inputs, **observed(model(inputs), targets))
                if number == 4:
                    raise ZeroDivisionError
        assert torch.get_num_threads() == 2
        assert torch.is_grad_enabled()
    finally:
        torch.set_num_threads(threads)
    assert run(tmp_path).chunks["resumed"] == 5


@pytest.mark.parametrize("launcher", ["none", pytest.param("torchrun", marks=pytest.mark.long)])
def test_the_loop_of_the_docs_runs_as_it_stands(launch: Launch, tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "script.py"
    text = (ROOT / "docs/own-loop.md").read_text().partition("```python\n")[2].partition("```")[0]
    script.write_text(text)
    ways = {"none": [sys.executable], "torchrun": [*start("torchrun", 2), sys.executable]}
    done = launch([*ways[launcher], script], cwd=tmp_path).ok()
    printed = {tuple(line.split()[-3:]) for line in done.stdout.splitlines()}
    assert len(printed) == 1
    alone = printed if launcher == "none" else {tuple(launch([sys.executable, script]).stdout.split())}
    assert printed == alone
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_lazy_layers_are_refused() -> None:
    with pytest.raises(UsageError, match="lazy layers whose weights are not made yet"):
        run(model=torch.nn.LazyLinear(2))
