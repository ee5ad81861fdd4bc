"""Batch shapes diagnosed: the module that depends on the shape is named, its successors are counted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from dualeval import ModelTask
from dualeval.cli import dualeval
from dualeval.engine.values.nests import tensors_in
from dualeval.engine.values.options import RunOptions
from dualeval.errors import LaunchError, UsageError
from dualeval.tasks import Task
from dualeval.tools.invariance.computed import ShapeDiagnosis, batches_of
from dualeval.tools.invariance.diagnosis import (
    AFTER_MODEL,
    IN_BATCH,
    NOT_SEEN,
    ONE_PROGRAM,
    Diagnosis,
    diagnose,
    print_invariance,
    shapes_of,
)
from dualeval.tools.invariance.inspector import hashes_of_rows, row_dimension
from tests.vehicles.tiny import TinyTask

CPU = torch.device("cpu")
COUNT = 20


def moved(x: Tensor) -> Tensor:
    """Other last bits where a batch has fewer than four rows."""
    return x * (1 + 2**-20) if len(x) < 4 else x


class Guilty(nn.Module):
    """Depends on the number of rows on purpose."""

    def forward(self, x: Tensor) -> Tensor:
        return moved(x)


class Made(nn.Module):
    """Computes a function of itself, of the modules that it has, and of its inputs."""

    def __init__(self, compute: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.compute = compute
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *inputs: Any, **more: Any) -> Any:
        return self.compute(self, *inputs, **more)


class Scale(nn.Module):
    """Elementwise: no bit depends on another row."""

    def __init__(self, factor: float = 1.25) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.factor).relu() + x


def inputs(*shape: int) -> Tensor:
    return torch.rand(COUNT, *shape, generator=torch.Generator().manual_seed(0)) + 1


def task_of(model: nn.Module, data: Any = None, **more: Any) -> Task:
    more.setdefault("observe", lambda outputs, batch: {"value": outputs.flatten(1).sum(1)})
    return ModelTask(model=model, data=inputs(6) if data is None else data, metrics=[], **more)


def diagnosed(task: Task, *, batch_size: int = 16, **options: Any) -> Diagnosis:
    return diagnose(task, RunOptions(batch_size=batch_size, **options), CPU)


def shapes(diagnosis: Diagnosis) -> dict[int, ShapeDiagnosis]:
    return {shape.shape: shape for shape in diagnosis.shapes}


def are_equal(diagnosis: Diagnosis) -> bool:
    return not any(shape.rows_differ for shape in diagnosis.shapes)


def names(shape: ShapeDiagnosis) -> list[str]:
    return list(shape.modules)


# -- rows and their hashes -------------------------------------------------------------------------


def test_shapes_are_those_up_to_the_job_s_own() -> None:
    assert shapes_of(64, 64) == [1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 64]
    assert shapes_of(300, 23) == [1, 2, 3, 4, 5, 7, 8, 16, 23, 31, 32, 64, 128, 256, 300]
    assert shapes_of(2, 1) == [1, 2]
    assert batches_of(3, 8) == [range(3), range(3, 6), range(5, 8)]
    assert batches_of(4, 8) == [range(4), range(4, 8)]


@pytest.mark.parametrize(
    ("shape", "other", "dimension"),
    [
        ((8, 3), (2, 3), 0),
        ((5, 8, 3), (5, 2, 3), 1),
        ((32, 8), (8, 8), 0),  # four rows a sample
        ((8, 64), (2, 41), 0),  # padded to another length
        ((11, 4), (3, 4), 0),  # samples have different numbers of rows
        ((3, 3), (3, 3), None),
        ((), (), None),
        ((8,), (2, 1), None),
    ],
)
def test_two_batches_tell_the_dimension_of_the_rows(shape: Any, other: Any, dimension: int | None) -> None:
    assert row_dimension(shape, 8, other, 2) == dimension


def hashed(values: Tensor, dimension: int = 0) -> Any:
    found = hashes_of_rows(values, dimension)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
    + [torch.complex64],
)
def test_a_row_s_hash_has_all_its_bits(dtype: torch.dtype) -> None:
    values = (torch.arange(4 * 3 * 5).reshape(4, 3, 5) % 7).to(dtype)
    hashes = hashed(values)
    other = values.clone()
    other[2, 1, 3] = 1 - other[2, 1, 3] if dtype != torch.bool else ~other[2, 1, 3]
    assert (hashes == hashed(other)).tolist() == [True, True, False, True]
    assert hashed(values.movedim(0, 2)[:, :, [3, 1]], 2).tolist() == hashes[[3, 1]].tolist()


def test_hashes_see_the_sign_of_zero_and_no_rows() -> None:
    assert hashed(torch.tensor([[0.0]])) != hashed(torch.tensor([[-0.0]]))
    assert len(hashed(torch.empty(0, 3))) == 0
    strided = hashed(torch.arange(512).view(1, 512)[:, :1].T, 1)
    assert strided.tolist() == hashed(torch.tensor([[0]])).tolist()
    assert hashes_of_rows(torch.eye(3).to_sparse(), 0) is None


def test_tensors_are_found_in_nests() -> None:
    nest = {"a": torch.zeros(1), "b": [torch.zeros(1), (3, torch.zeros(1))], "c": None}
    assert [path for path, _ in tensors_in(nest)] == [".a", ".b[0]", ".b[1][1]"]


# -- which modules ---------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "fp16"])
def test_elementwise_models_are_equal_everywhere(precision: str) -> None:
    model = nn.Sequential(Scale(), Scale(0.3), nn.Sigmoid())
    diagnosis = diagnosed(task_of(model), precision=precision)
    assert are_equal(diagnosis)
    assert all(shape.cause is None for shape in diagnosis.shapes)
    assert [shape.shape for shape in diagnosis.shapes] == [1, 2, 3, 4, 5, 7, 8, 16]
    assert (diagnosis.rows, diagnosis.last_batch) == (16, 4)


def test_the_guilty_module_is_named_and_its_successors_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(Scale(), nn.Sequential(Scale(), Guilty()), Scale(), nn.ReLU())
    diagnosis = diagnosed(task_of(model))
    found = shapes(diagnosis)
    assert [shape for shape, each in found.items() if each.rows_differ] == [1, 2, 3]
    for shape in (1, 2, 3):
        assert found[shape].modules == {"1.1": "Guilty"}
        assert (found[shape].cause, found[shape].after) == (None, 2)
        assert found[shape].rows_differ == found[shape].rows == 16
        assert list(found[shape].columns) == ["value", "output"]
        assert found[shape].columns["value"]
    print_invariance(diagnosis)
    shown = capsys.readouterr().out
    assert "1.1 (Guilty); 2 after it" in shown
    assert "computed in     fp32, contiguous" in shown
    assert "This is a diagnosis, not a guarantee" in shown
    # What a module does by itself is its own, and so are those of two side by side.
    between = Made(lambda own, x: own.second(moved(own.first(x))), first=Scale(), second=Scale())
    alone = shapes(diagnosed(task_of(nn.Sequential(Scale(), between, Scale()))))[2]
    assert (alone.modules, alone.after) == ({"1": "Made"}, 2)
    sides = {"left": Guilty(), "right": Guilty(), "join": Scale()}
    beside = Made(lambda own, x: own.join(own.left(x) + own.right(x * 2)), **sides)
    assert names(shapes(diagnosed(task_of(beside)))[1]) == ["left", "right"]
    # A compiled model is not looked into.
    monkeypatch.setattr("dualeval.tools.invariance.diagnosis.is_compiled", lambda model: True)
    compiled = shapes(diagnosed(task_of(Guilty())))[1]
    assert (compiled.cause, compiled.modules) == (ONE_PROGRAM, {})


def test_modules_with_dicts_and_rows_elsewhere_are_followed() -> None:
    def in_one_row(own: Made, parts: Mapping[str, Tensor], *, beside: tuple[Tensor]) -> Any:
        x = parts["x"].clone()
        if x.shape[1] < 4:
            x[:, 0] += 2**-20
        return None, {"x": x, "mask": parts["mask"]}

    def several(own: Any, x: Tensor) -> Any:
        """Rows in the second dimension, in dicts and tuples; one module is called three times."""
        turned = own.plain(own.plain(own.plain(x.T)))
        made = own.guilty({"x": turned, "mask": torch.ones(3)}, beside=(turned,))
        return own.last(made[1]["x"].T)

    model = Made(several, plain=Scale(), guilty=Made(in_one_row), last=Scale())
    found = shapes(diagnosed(task_of(model)))
    assert names(found[3]) == ["guilty"]
    assert found[3].rows_differ == 6  # the first of each batch; 0, 3, ..., 12, and 13 of the last
    assert found[3].after == 1
    assert not found[4].rows_differ


def padded(samples: list[Tensor]) -> dict[str, Tensor]:
    return {"x": nn.utils.rnn.pad_sequence(samples, batch_first=True)}


def test_the_length_of_padding_is_named_as_a_cause() -> None:
    def summed(own: Any, x: Tensor) -> Any:
        """Over a dimension that is longer in other batches."""
        return own.inner(x).sum(1) * (1 + 2**-18 * x.shape[1])

    sequences = [torch.arange(1.0, 3 + index % 5) for index in range(COUNT)]
    task = task_of(
        Made(summed, inner=Scale()),
        sequences,
        collate=padded,
        forward=lambda model, batch: model(**batch),
        observe=lambda outputs, batch: {"value": outputs},
    )
    found = shapes(diagnosed(task))
    assert found[1].cause == IN_BATCH
    assert not found[5].rows_differ, "each has one of the longest"


def test_samples_that_collate_reorders_are_compared_by_sample() -> None:
    def turned(samples: list[Tensor]) -> Tensor:
        return torch.stack(samples[::-1])

    def observe(outputs: Tensor, batch: Tensor) -> dict[str, Tensor]:
        return {"value": outputs.sum(1).flip(0)}

    assert are_equal(diagnosed(task_of(Scale(), collate=turned, observe=observe)))
    found = shapes(diagnosed(task_of(Guilty(), collate=turned, observe=observe)))
    assert found[1].rows_differ == 16
    assert 0 < float(found[1].columns["output"] or 0) < 1e-5


def test_a_difference_made_after_the_model_is_named_so() -> None:
    task = task_of(Scale(), observe=lambda outputs, batch: {"value": moved(outputs.sum(1))})
    found = shapes(diagnosed(task))
    assert found[1].cause == AFTER_MODEL
    assert list(found[1].columns) == ["value"]
    assert not found[1].modules


def test_a_model_that_never_gives_the_same_bits_is_named() -> None:
    calls = itertools.count()
    found = diagnosed(task_of(Made(lambda own, x: x + next(calls))))
    assert found.shapes[-1].rows_differ
    assert "does not give the same bits twice" in found.notes[-1]


def test_a_difference_that_hooks_switch_off_is_not_seen_and_said() -> None:
    def fused(own: Any, x: Tensor) -> Any:
        """As torch's encoder layers: another kernel where nobody looks."""
        out = own.inner(x)
        return out if own._forward_hooks else moved(out) * (1 + 2**-18)

    found = diagnosed(task_of(Made(fused, inner=Scale())))
    assert found.shapes[0].cause == NOT_SEEN
    assert any("fused kernel" in note for note in found.notes)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_scripted_model_is_one_program() -> None:
    class Scripted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] < 4:
                return x * 1.000001
            return x

    found = shapes(diagnosed(task_of(torch.jit.script(Scripted()))))
    assert (found[1].cause, found[1].modules) == (ONE_PROGRAM, {})
    inside = nn.Sequential(Scale(), torch.jit.script(Scripted()), Guilty())
    assert names(shapes(diagnosed(task_of(inside)))[1]) == [""]


# -- samples ---------------------------------------------------------------------------------------


def test_samples_of_a_job_are_drawn() -> None:
    found = diagnosed(TinyTask(50), sample=20, seed=3, batch_size=8)
    assert (found.samples, found.rows, found.last_batch) == (20, 8, 4)
    assert {"target", "prediction", "loss"} >= set(shapes(found)[1].columns) - {"output", "confidence"}


def test_samples_that_cannot_be_read_are_refused_or_left_out() -> None:
    with pytest.raises(UsageError, match=r"tiny/3 .* cannot be read"):
        diagnosed(TinyTask(20, [3]))
    found = diagnosed(TinyTask(20, [3]), on_error="skip")
    assert found.rows == 16
    assert shapes(found)[1].rows == 15
    assert shapes(found)[2].rows == 16


def test_a_batch_of_one_has_no_smaller_one() -> None:
    with pytest.raises(UsageError, match="there is no smaller one to compare with"):
        diagnosed(task_of(Scale()), batch_size=1)


def test_a_shape_that_the_model_cannot_take_is_left_out() -> None:
    class Training(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> Training:
            return super().train(True)

    found = diagnosed(task_of(nn.Sequential(Scale(), Training(6))))
    assert list(shapes(found)) == [2, 3, 4, 5, 7, 8, 16]
    assert names(shapes(found)[8]) == ["1"]
    note = found.notes[-1]
    assert note.startswith("batches of 1 cannot be computed: the layer '1', Training(6")


def test_the_layout_is_that_of_a_run() -> None:
    """tests/engine/model/test_preparation.py has what a run makes of a model."""
    convolution = task_of(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(), inputs(3, 6, 6))
    for options in ({"precision": "bf16", "keep_batchnorm_fp32": True}, {"optimize": "fold"}):
        assert diagnosed(convolution, **options).options.layout == "channels-last"
    with pytest.raises(UsageError, match="channels-last: the model has no weight of four dimensions"):
        diagnosed(task_of(Scale()), layout="channels-last")


# -- the command -----------------------------------------------------------------------------------


def typed(*words: str, catch: bool = True) -> Any:
    return CliRunner().invoke(dualeval, ["doctor", *words], catch_exceptions=catch)


def test_the_plain_form_stays_as_it_is() -> None:
    plain, own = typed("--help").output, typed("--invariance", "--help").output
    assert "--limit-s" in plain
    assert "--model" not in plain
    assert "doctor --invariance --help" in " ".join(plain.split())
    for flag in ("--model", "--weights", "--data", "--batch-size", "--config", "--task", "--precision"):
        assert f"\n  {flag} " in own
    assert "--limit-s" not in own
    assert "'dualeval doctor --invariance --task NAME --help'" in " ".join(own.split())
    assert "--null-threshold" in typed("--task", "question-answering", "--invariance", "--help").output


def test_invariance_of_the_embedded_job_is_printed() -> None:
    done = typed("--invariance", "--limit", "40", "--batch-size", "16", "--layout", "contiguous")
    assert done.exit_code == 0, done.output
    assert "16 rows in 8 shapes, 1 to 16" in done.stderr
    assert "batch size      16; the last batch of 40 samples has 8" in done.stdout
    assert "computed in     fp32, contiguous" in done.stdout
    assert "16 (again)" in done.stdout
    assert "fashion-cnn" in done.stdout


def test_wrong_usage_is_refused() -> None:
    with pytest.raises(UsageError, match="smaller"):
        typed("--invariance", "--limit", "1", catch=False)
    assert "No such option" in typed("--invariance", "--out", "x").output


def test_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    with pytest.raises(LaunchError, match="is one process, but openmpi has started 2"):
        typed("--invariance", catch=False)
