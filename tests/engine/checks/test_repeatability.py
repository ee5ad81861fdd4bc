"""The first samples, looked at: what keeps something, draws random numbers or races is found before any."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import dualeval
from dualeval.engine.checks import repeatability as looks
from dualeval.metrics import Mean, Measured, Rows
from dualeval.result import Result
from tests.vehicles import sessions
from tests.vehicles.tiny import CLASSES, FEATURES, TinyTask

SAMPLES, BATCH = 320, 16
STORE: dict[str, Tensor] = {}
CALLS = 0


@pytest.fixture(autouse=True)
def _four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(SAMPLES, 8, generator=draw), torch.arange(SAMPLES) % 4)


class Net(nn.Module):
    """A classifier; notes which threads have computed."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first = nn.Linear(8, 32)
            self.second = nn.Linear(32, 4)
        self.eval()

    def forward(self, rows: Tensor) -> Tensor:
        THREADS.add(threading.get_ident())
        out: Tensor = self.second(self.hidden(self.first(rows)))
        return out

    def hidden(self, values: Tensor) -> Tensor:
        return values.relu()


THREADS: set[int] = set()


Evaluate = Callable[..., tuple[Result, str]]


@pytest.fixture
def evaluate(capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """Evaluate a model; gives the result, and what was said."""

    def run(model: nn.Module, **given: Any) -> tuple[Result, str]:
        THREADS.clear()
        given = {"data": data(), "metrics": ["loss"], **given}
        result = dualeval.evaluate(model=model, batch_size=BATCH, **given)
        return result, capsys.readouterr().err

    return run


class Keeps(Net):
    def hidden(self, values: Tensor) -> Tensor:
        self.feature = values.relu()
        return self.feature


def of_attribute() -> tuple[nn.Module, dict[str, Any], str]:
    model = Keeps()
    return model, {"observe": lambda outputs, batch: {"f": model.feature.mean(1)}}, "Keeps.feature"


def of_hook() -> tuple[nn.Module, dict[str, Any], str]:
    model = Net()
    model.first.register_forward_hook(lambda module, inputs, out: STORE.__setitem__("f", out.relu()))
    observe = lambda outputs, batch: {"f": STORE["f"].mean(1)}  # noqa: E731
    return model, {"observe": observe}, "STORE of the module"


def of_global() -> tuple[nn.Module, dict[str, Any], str]:
    def forward(model: nn.Module, batch: Any) -> Tensor:
        global CALLS
        CALLS += 1
        out: Tensor = model(batch[0])
        return out

    observe = lambda outputs, batch: {"f": outputs.mean(1)}  # noqa: E731
    return Net(), {"forward": forward, "observe": observe}, "CALLS of the module"


@pytest.mark.parametrize("made", [of_attribute, of_hook, of_global])
def test_what_a_forward_keeps_is_named_and_its_batches_run_alone(
    evaluate: Evaluate, made: Callable[[], tuple[nn.Module, dict[str, Any], str]]
) -> None:
    model, given, place = made()
    result, said = evaluate(model, metrics=["f"], **given)
    [note] = [line for line in said.splitlines() if "one at a time" in line]
    assert place in note
    model, given, _ = made()
    alone, said = evaluate(model, metrics=["f"], thread_safe=False, **given)
    assert result.metrics == alone.metrics and result.deterministic is True
    assert "one at a time" not in said


class Table(Net):
    """Builds a table when it is first called."""

    def hidden(self, values: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.table = torch.ones(32)
        return values.relu() * self.table


def with_hook() -> nn.Module:
    model = Net()
    model.first.register_forward_hook(lambda module, inputs, out: out + 1)
    return model


@pytest.mark.parametrize("made", [Net, Table, with_hook])
def test_a_model_that_keeps_nothing_has_its_threads(
    evaluate: Evaluate, made: Callable[[], nn.Module]
) -> None:
    result, said = evaluate(made())
    assert len(THREADS) > 1 and said == ""
    assert result.deterministic is True and result.warnings == []


class Shared(Net):
    """Keeps what one module gives in what all copies of the model share, for a later one."""

    def __init__(self, store: dict[str, Tensor]) -> None:
        super().__init__()
        self.first.register_forward_hook(lambda module, inputs, out: store.__setitem__("f", out))
        self.second.register_forward_pre_hook(lambda module, inputs: (store["f"].relu(),))


def test_a_race_between_modules_is_found(evaluate: Evaluate) -> None:
    result, said = evaluate(Shared({}))
    assert "different numbers when two are computed at the same time (loss, " in said
    alone, _ = evaluate(Shared({}), thread_safe=False)
    assert result.metrics == alone.metrics


def test_thread_safe_overrides_the_look(evaluate: Evaluate) -> None:
    _, said = evaluate(Keeps(), thread_safe=True)
    assert len(THREADS) > 1 and "one at a time" not in said
    evaluate(Net(), thread_safe=False)
    assert {threading.get_ident()} == THREADS


class Dropout(Net):
    def hidden(self, values: Tensor) -> Tensor:
        return nn.functional.dropout(values, 0.5)


class Counting(Net):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def hidden(self, values: Tensor) -> Tensor:
        self.calls += 1
        scaled: Tensor = values * self.calls
        return scaled


class Recurrent(Net):
    state: Any = 0.0

    def hidden(self, values: Tensor) -> Tensor:
        self.state = self.state + values.mean(0)
        carried: Tensor = values + self.state
        return carried


@pytest.mark.parametrize(
    ("made", "cause"),
    [
        (
            Dropout,
            "gives different values for the same input, as dropout does without training=self.training",
        ),
        (Counting, "from one batch to the next Counting.calls changes"),
        (Recurrent, "from one batch to the next Recurrent.state changes"),
    ],
)
def test_a_forward_that_gives_other_numbers_again_is_a_warning(
    evaluate: Evaluate, tmp_path: Path, made: Callable[[], nn.Module], cause: str
) -> None:
    result, _ = evaluate(made(), out=tmp_path / "out")
    [warning] = result.warnings
    assert "the same samples give different numbers" in warning and "(loss, " in warning and cause in warning
    written = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result.deterministic is False and written["deterministic"] is False
    assert {threading.get_ident()} == THREADS


class FromFirst(Net):
    """Takes mean and deviation from the first batch that it sees, as ActNorm does."""

    def hidden(self, values: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.mean, self.std = values.mean(0), values.std(0)
        return (values - self.mean) / self.std


def test_what_the_first_batch_makes_and_others_read_is_a_warning(evaluate: Evaluate) -> None:
    result, said = evaluate(FromFirst(), thread_safe=False)
    [warning] = result.warnings
    assert "something from its first batch" in warning
    assert warning in said
    model, rows = FromFirst(), data()[:BATCH][0]
    with torch.no_grad():
        model(rows)  # the first batch of the loop is the first that the model sees
        wanted = nn.functional.cross_entropy(model(data()[:][0]), data()[:][1]).item()
    assert result.metrics["loss"] == pytest.approx(wanted, abs=1e-6)


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(8), index % 4


def test_a_data_set_that_gives_other_samples_again_is_a_warning(evaluate: Evaluate) -> None:
    result, _ = evaluate(Net(), data=Augmented(), workers=0)
    [warning] = result.warnings
    assert "the data set gives different values each time it is read" in warning
    assert result.deterministic is False


class Crops(Augmented):
    """Other inputs each time, which a model that is sure of them does not show."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(8), 0


class Sure(Net):
    def forward(self, rows: Tensor) -> Tensor:
        return torch.tensor([100.0, 0, 0, 0]) + 0 * rows[:, :4]


@pytest.mark.parametrize("workers", [0, 1])
def test_other_samples_that_change_no_column_are_a_warning(evaluate: Evaluate, workers: int) -> None:
    result, _ = evaluate(Sure(), data=Crops(), workers=workers)
    assert result.warnings[0].startswith("the data set gives different values each time it is read")
    assert result.deterministic is False


class Draws(Net):
    def hidden(self, values: Tensor) -> Tensor:
        return values.relu() + 0 * torch.rand(())


def test_a_draw_that_changes_no_column_of_the_first_samples_is_a_warning(evaluate: Evaluate) -> None:
    result, said = evaluate(Draws())
    [warning] = result.warnings
    assert "draws random numbers" in warning and "thread_safe" not in said
    assert result.deterministic is None and {threading.get_ident()} == THREADS


class ByBatch(Net):
    """Takes off what all samples of a batch have in common."""

    def hidden(self, values: Tensor) -> Tensor:
        return values - values.mean(0)


def padded(samples: Any) -> Any:
    rows = [row[: 2 + int(abs(row[0]) * 9) % 6] for row, _ in samples]
    return torch.nn.utils.rnn.pad_sequence(rows, True), torch.tensor([label for _, label in samples])


class ReadsPadding(Net):
    def forward(self, rows: Tensor) -> Tensor:
        return rows.mean(1, keepdim=True) * torch.arange(4)


@pytest.mark.parametrize(
    ("made", "given", "warned"),
    [
        (ByBatch, {}, True),
        (ByBatch, {"observe": lambda out, batch: {"best": out.argmax(1)}, "metrics": ["best"]}, True),
        (ReadsPadding, {"collate": padded}, True),
        (Net, {"precision": "amp-bf16"}, False),
        (Net, {"observe": lambda out, batch: {"f": out[:, 0] / 0}, "metrics": ["f"]}, False),
    ],
)
def test_numbers_that_depend_on_the_batch_are_a_warning(
    evaluate: Evaluate, made: Callable[[], nn.Module], given: dict[str, Any], warned: bool
) -> None:
    result, _ = evaluate(made(), **given)
    assert any("depend on the batch size" in each for each in result.warnings) == warned
    assert result.deterministic is True


class ByLargest(Net):
    """Scales by whether a value of the batch is large, as dynamic quantization."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) * (2 if (rows == 9).any() else 1)


class ByLongest(Net):
    """Computes by the length of the batch's longest row, as longrope."""

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = super().forward(nn.functional.pad(rows, (0, 8 - rows.shape[1])))
        return out * (2 if rows.shape[1] > 6 else 1)


def padded_to_6(samples: Any) -> Any:
    rows = [row if row[0] == 9 else row[: 5 + int(abs(row[1]) * 9) % 2] for row, _ in samples]
    return torch.nn.utils.rnn.pad_sequence(rows, True), torch.tensor([label for _, label in samples])


@pytest.mark.parametrize(
    ("made", "given"),
    [(ByLargest, {}), (ByLargest, {"precision": "bf16"}), (ByLongest, {"collate": padded_to_6})],
)
def test_numbers_that_a_later_batch_shows_to_depend_on_it_are_a_warning(
    evaluate: Evaluate, made: Callable[[], nn.Module], given: dict[str, Any]
) -> None:
    result, _ = evaluate(made(), **given)
    assert result.warnings == []
    result, _ = evaluate(made(), data=with_switch(SAMPLES - 1), **given)
    [warning] = result.warnings
    assert "depend on the batch size" in warning and result.deterministic is True


def test_numbers_that_are_others_in_a_later_batch_alone_are_a_warning(evaluate: Evaluate) -> None:
    class Erases(Dataset[Any]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> Any:
            row, label = data()[index]
            return row * (1 + (index > 200) * torch.rand(1)), label

    result, _ = evaluate(Net(), data=Erases())
    [warning] = result.warnings
    assert "of a later batch give different numbers" in warning and result.deterministic is False


class WritesInput(Net):
    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows.mul_(2))


def test_a_forward_that_writes_into_its_input_is_given_it_unchanged(evaluate: Evaluate) -> None:
    result, said = evaluate(WritesInput())
    assert result.deterministic is True and said == "" and len(THREADS) > 1


def test_what_collate_leaves_for_observe_is_a_warning(evaluate: Evaluate) -> None:
    last: dict[str, Tensor] = {}

    def collate(samples: Any) -> Any:
        rows, labels = torch.utils.data.default_collate(samples)
        last["rows"] = rows
        return rows, labels

    observe = lambda outputs, batch: {"f": last["rows"][: len(outputs), 0]}  # noqa: E731
    result, _ = evaluate(Net(), metrics=["f"], collate=collate, observe=observe)
    [warning] = result.warnings
    assert "what is kept when a batch is read, and batches are read ahead" in warning
    assert result.deterministic is False


class Both(Counting):
    def hidden(self, values: Tensor) -> Tensor:
        return nn.functional.dropout(super().hidden(values), 0.5)


def test_buffers_and_random_numbers_are_put_back(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    looked, _ = evaluate(Both())
    monkeypatch.setattr("dualeval.engine.loop.forward.look", lambda *_: looks.Looked(threads=1))
    torch.manual_seed(0)
    unlooked, _ = evaluate(Both())
    assert looked.deterministic is False and looked.metrics == unlooked.metrics


class OneSize(Net):
    def forward(self, rows: Tensor) -> Tensor:
        assert len(rows) == BATCH or len(rows) == 2, len(rows)  # 2: the first columns
        return super().forward(rows.view(len(rows), 8))


def test_a_model_for_whole_batches_is_looked_at_in_whole_batches(
    evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "_FEWEST", 3)
    result, said = evaluate(OneSize())
    assert result.deterministic is True and said == ""


def test_a_look_that_takes_too_long_is_left_out_and_said(
    evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "_ALWAYS_S", 0.0)
    few = TensorDataset(*(tensor[:40] for tensor in data().tensors))
    result, said = evaluate(Dropout(), data=few)
    assert result.deterministic is None
    assert "was not tested" in said and {threading.get_ident()} == THREADS


class Adding:
    """A metric with one slot."""

    name, columns, size = "adding", ("loss",), 1

    def update(self, slots: Tensor, columns: Any) -> None:
        slots[0] += len(columns["loss"])

    def compute(self, slots: Tensor) -> dualeval.metrics.Measured:
        return dualeval.metrics.Measured(values={"adding": int(slots[0])})


class Writing(Adding):
    def update(self, slots: Tensor, columns: Any) -> None:
        columns["loss"].abs_()  # changes no number here, and its tensor


class Stateful(Adding):
    def __init__(self) -> None:
        self.seen = {"samples": 0}

    def update(self, slots: Tensor, columns: Any) -> None:
        self.seen["samples"] += len(columns["loss"])


class FirstEdges(Adding):
    """Takes from its first batch what decides the others."""

    def update(self, slots: Tensor, columns: Any) -> None:
        if not hasattr(self, "edge"):
            self.edge = float(columns["loss"].mean())
        slots[0] += (columns["loss"] > self.edge).sum()


SEEN: list[int] = []


class Global(Adding):
    def update(self, slots: Tensor, columns: Any) -> None:
        SEEN.append(len(columns["loss"]))

    def compute(self, slots: Tensor) -> Measured:
        return Measured(values={"adding": sum(SEEN)})


class Assigning(Adding):
    def update(self, slots: Tensor, columns: Any) -> None:
        slots[0] = len(columns["loss"])


class Drawing(Adding):
    def update(self, slots: Tensor, columns: Any) -> None:
        slots[0] += torch.randint(1 << 30, ())


class Memo(Adding):
    """Keeps what follows from a sample alone."""

    def __init__(self) -> None:
        self.memo: dict[float, int] = {}

    def update(self, slots: Tensor, columns: Any) -> None:
        slots[0] += sum(self.memo.setdefault(loss, 1) for loss in columns["loss"].tolist())


class Lazy(Adding):
    def update(self, slots: Tensor, columns: Any) -> None:
        if not hasattr(self, "table"):
            self.table = torch.ones(3)
        super().update(slots, columns)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (Writing(), "metric 'adding' writes into its column 'loss'"),
        (Stateful(), "metric 'adding' keeps Stateful.seen from one batch to the next"),
        (FirstEdges(), "metric 'adding' keeps FirstEdges.edge from one batch to the next"),
        (Global(), "metric 'adding' keeps SEEN of the module"),
        (Assigning(), "metric 'adding' does not add to its ledger"),
        (Drawing(), "metric 'adding' gives different values for the same samples"),
        (
            Rows(lambda loss: float(np.random.rand()), ["loss"], name="drawn"),
            "'drawn' gives different values",
        ),
    ],
)
def test_a_metric_that_writes_elsewhere_than_into_its_ledger_is_refused(metric: Any, words: str) -> None:
    with pytest.raises(dualeval.UsageError, match=words.replace("[", r"\[")):
        dualeval.evaluate(model=Net(), data=data(), metrics=["loss", metric], batch_size=BATCH)


@pytest.mark.parametrize("made", [Lazy, Memo])
def test_a_metric_may_keep_what_follows_from_a_sample_alone(made: Callable[[], Any]) -> None:
    """A table that it builds once, and what follows from a sample alone."""
    result = dualeval.evaluate(model=Net(), data=data(), metrics=[Mean("loss"), made()], batch_size=BATCH)
    assert result.metrics["adding"] == SAMPLES


def test_a_look_that_fails_ends_no_run(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, _ = evaluate(Net())

    def fails(*_: Any, **__: Any) -> Any:
        raise BlockingIOError("there is one already")

    monkeypatch.setattr(looks, "differences", fails)
    result, said = evaluate(Net())
    assert "could not be computed twice (BlockingIOError: there is one already)" in said
    assert result.deterministic is None and result.metrics == wanted.metrics


class Config:
    """Values that several modules share, as transformers' configs."""

    def __init__(self) -> None:
        self.kind, self.names = "sparse", ["first"]


class Switches(Net):
    """Changes itself at a sample whose first feature is 9; ``of`` says what."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of, self.config, self.calls, self.scale, self.mode = of, Config(), 0, 1, ("auto", 1)
        self.cache: Any = None

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1  # a counter decides nothing
        self.cache = str(len(rows))  # nor does what was not there
        if (rows[:, 0] == 9).any():
            self.config.names.append("last")
            if self.of == "config":
                self.config.kind = "full"
            elif self.of == "tuple":
                self.mode = ("full", 2)
            elif self.of == "number":
                self.scale = 3
        out: Tensor = (
            super().forward(rows) * self.scale + (self.config.kind == "full") + (self.mode[0] == "full")
        )
        return out


def with_switch(at: int) -> TensorDataset:
    rows, targets = data()[:]
    rows[at, 0] = 9
    return TensorDataset(rows, targets)


@pytest.mark.parametrize(
    ("of", "at", "named"),
    [
        ("config", 200, "config.kind: 'sparse' before, 'full' now"),
        ("tuple", 319, "mode: ('auto', 1) before, ('full', 2) now"),
        ("number", 200, "scale: 1 before, 3 now"),
        ("number", 14, "scale: 1 before, 3 now"),  # in the first batch, behind the samples of the look
        ("nothing", 200, ""),
    ],
)
@pytest.mark.parametrize("threads", [1, 4])
def test_what_the_loop_changes_for_good_is_a_warning(
    evaluate: Evaluate, of: str, at: int, named: str, threads: int
) -> None:
    torch.set_num_threads(threads)
    result, _ = evaluate(Switches(of), data=with_switch(at))
    assert result.deterministic is (not named)
    assert [named in warning for warning in result.warnings] == ([True] if named else [])
    assert not any("names" in warning for warning in result.warnings)


def test_a_trial_puts_back_what_configs_hold(evaluate: Evaluate) -> None:
    kept: list[Any] = []

    class Shows(Switches):
        def forward(self, rows: Tensor) -> Tensor:
            kept.append((self.config.kind, list(self.config.names), self.calls))
            return super().forward(rows)

    model = Shows("config")
    evaluate(
        model,
        data=with_switch(0),
        observe=lambda out, batch: {"f": out[:, 0]},
        metrics=["f"],
        thread_safe=False,
    )
    assert kept[-(SAMPLES // BATCH)] == ("sparse", ["first"], 0)
    assert (model.config.kind, model.config.names) == ("sparse", ["first"])  # of a guest all is as before


class Rescales(nn.Linear):
    """Halves its weights at its first forward, for good, as RWKV does."""

    is_done = False

    def forward(self, rows: Tensor) -> Tensor:
        if not self.is_done:
            with torch.no_grad():
                self.weight.mul_(0.5)
            self.is_done = True
        return super().forward(rows)


class RescalesTask(TinyTask):
    thread_safe = None  # type: ignore[assignment]

    def build_model(self, device: torch.device) -> nn.Module:
        torch.manual_seed(0)
        model = Rescales(FEATURES, CLASSES)
        if self._seed:
            model(torch.ones(1, FEATURES))
        return model


def test_a_forward_that_writes_weights_once_is_not_undone_by_halves() -> None:
    found = [
        sessions.evaluate(RescalesTask(100, seed=seed), batch_size=10).metrics["loss"] for seed in (0, 1)
    ]
    assert found[0] == found[1]
