"""Numeric settings: they hold while a model is built and computes, and are put back, whoever changes them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualeval
from dualeval.engine.device import numerics
from dualeval.errors import UsageError
from dualeval.options.precision import FP32, PRECISIONS
from tests.conftest import Launch
from tests.vehicles import sessions
from tests.vehicles.tiny import TinyTask

CPU = torch.device("cpu")
# mypy knows the older settings only.
BACKENDS: Any = torch.backends
KERNELS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")


def fp32_precisions() -> dict[str, str]:
    """How float32 is computed now, by kind of kernel."""
    found = {}
    for kernels in KERNELS:
        owner = BACKENDS
        for name in kernels.split("."):
            owner = getattr(owner, name)
        found[kernels] = owner.fp32_precision
    return found


def state() -> dict[str, Any]:
    """Every setting that a run makes, and what older code reads."""
    return {
        **fp32_precisions(),
        "parent": BACKENDS.fp32_precision,
        "matmul": torch.get_float32_matmul_precision(),
        "cuda": BACKENDS.cuda.matmul.allow_tf32,
        "cudnn": BACKENDS.cudnn.allow_tf32,
        "benchmark": BACKENDS.cudnn.benchmark,
        "deterministic": torch.get_deterministic_debug_mode(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "fast path": BACKENDS.mha.get_fastpath_enabled(),
        "mkldnn": BACKENDS.mkldnn.enabled,
        "nnpack": torch._C._get_nnpack_enabled(),
        "cudnn enabled": BACKENDS.cudnn.enabled,
        "cudnn deterministic": BACKENDS.cudnn.deterministic,
        "flash": BACKENDS.cuda.flash_sdp_enabled(),
        "efficient": BACKENDS.cuda.mem_efficient_sdp_enabled(),
        "math": BACKENDS.cuda.math_sdp_enabled(),
        "cudnn attention": BACKENDS.cuda.cudnn_sdp_enabled(),
        "math reduction": BACKENDS.cuda.fp16_bf16_reduction_math_sdp_allowed(),
        "fp16 reduction": BACKENDS.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "bf16 reduction": BACKENDS.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "fp16 accumulation": BACKENDS.cuda.matmul.allow_fp16_accumulation,
        "einsum": BACKENDS.opt_einsum.enabled,
        "flush": float(torch.tensor(2.0**-1040, dtype=torch.float64, device="cpu") * 1.0) == 0.0,
    }


@pytest.fixture(autouse=True)
def nothing_changed() -> Iterator[None]:
    """Each test starts from PyTorch's own settings, and must leave them."""
    before = state()
    assert before["parent"] == "none"
    yield
    assert state() == before


@pytest.fixture
def scratch() -> Iterator[None]:
    """Puts back what a test sets as a program that has a run inside it would."""
    held = numerics.NumericSettings(FP32, CPU)
    before, also = held._before, held._also_before
    held.restore()
    yield
    held._write(before, also)


def medium_then_older() -> None:
    """Of this PyTorch itself leaves "bf16" for a CPU's matrix products."""
    torch.set_float32_matmul_precision("medium")
    BACKENDS.cuda.matmul.allow_tf32 = False


def allow_tf32() -> None:
    BACKENDS.cuda.matmul.allow_tf32 = BACKENDS.cudnn.allow_tf32 = True


def parents() -> None:
    BACKENDS.fp32_precision = BACKENDS.cudnn.fp32_precision = "tf32"


def newer() -> None:
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    BACKENDS.mkldnn.matmul.fp32_precision = "bf16"


def attention() -> None:
    BACKENDS.cuda.enable_flash_sdp(False)
    BACKENDS.cuda.enable_mem_efficient_sdp(False)
    BACKENDS.cuda.enable_cudnn_sdp(False)
    BACKENDS.cuda.allow_fp16_bf16_reduction_math_sdp(True)


def changing(name: str, before: Any, after: Any) -> tuple[Callable[[], object], str]:
    """Sets an attribute of torch's backends; how the change is said."""
    owner, _, attribute = name.rpartition(".")
    found = functools.reduce(getattr, owner.split("."), BACKENDS)
    said = f"backends.{name} from {before!r} to {after!r}"
    return lambda: setattr(found, attribute, after), said


# What may be changed, and how the change is said, but for "torch." before it.
CHANGES: dict[str, tuple[Callable[[], object], str]] = {
    "medium": (
        lambda: torch.set_float32_matmul_precision("medium"),
        "backends.mkldnn.matmul.fp32_precision from 'ieee' to 'bf16'",
    ),
    "medium_then_older": (medium_then_older, "backends.mkldnn.matmul.fp32_precision from 'ieee' to 'bf16'"),
    "allow_tf32": (allow_tf32, "backends.cudnn.conv.fp32_precision from 'ieee' to 'tf32'"),
    "newer": (newer, "backends.cuda.matmul.fp32_precision from 'ieee' to 'tf32'"),
    "parents": (parents, "backends.fp32_precision from 'ieee' to 'tf32'"),
    "benchmark": changing("cudnn.benchmark", False, True),
    "threads": (lambda: torch.set_num_threads(4), "get_num_threads() from 1 to 4"),
    # What use_deterministic_algorithms(False) does; that imports the compiler.
    "nondeterministic": (
        lambda: torch.set_deterministic_debug_mode("default"),
        "get_deterministic_debug_mode() from 1 to 0",
    ),
    "flush_denormal": (lambda: torch.set_flush_denormal(True), "set_flush_denormal from False to True"),
    "default_dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        "get_default_dtype() from torch.float32 to torch.float64",
    ),
    "default_device": (
        lambda: torch.set_default_device("meta"),
        "set_default_device from None to device(type='meta')",
    ),
    "grad_off": (lambda: torch.set_grad_enabled(False), "is_grad_enabled() from True to False"),
    "no_fast_path": (
        lambda: BACKENDS.mha.set_fastpath_enabled(False),
        "backends.mha.get_fastpath_enabled() from True to False",
    ),
    "no_mkldnn": changing("mkldnn.enabled", True, False),
    "no_nnpack": (lambda: torch._C._set_nnpack_enabled(False), "backends.nnpack.enabled from True to False"),
    "no_cudnn": changing("cudnn.enabled", True, False),
    "no_cudnn_determinism": changing("cudnn.deterministic", True, False),
    "attention": (attention, "backends.cuda.flash_sdp_enabled() from True to False"),
    "only_flash": (
        lambda: BACKENDS.cuda.enable_math_sdp(False),
        "backends.cuda.math_sdp_enabled() from True to False",
    ),
    "full_fp16_reductions": changing("cuda.matmul.allow_fp16_reduced_precision_reduction", True, False),
    "full_bf16_reductions": changing("cuda.matmul.allow_bf16_reduced_precision_reduction", True, False),
    "half_sums": changing("cuda.matmul.allow_fp16_accumulation", False, True),
}
# Grad mode is inference mode's in a forward; with another type or device the data do not fit the model.
IN_FORWARD = [name for name in CHANGES if name not in ("default_dtype", "default_device", "grad_off")]
BEFORE = [
    *("default_dtype", "default_device", "no_fast_path", "no_mkldnn", "no_nnpack", "no_cudnn"),
    *("attention", "only_flash", "full_fp16_reductions", "full_bf16_reductions", "benchmark"),
]


class Changing(TinyTask):
    """A tiny task whose model's code changes settings; notes those that its forwards meet."""

    def __init__(
        self, *, at_build: Callable[[], object] = lambda: None, in_forward: Callable[[], object] | None = None
    ) -> None:
        super().__init__(64)
        self._at_build = at_build
        self._in_forward = in_forward
        self.met: list[dict[str, Any]] = []

    def build_model(self, device: torch.device) -> nn.Module:
        model = super().build_model(device)
        self._at_build()
        return model

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = super().forward(model, batch)
        if self._in_forward is None:
            self.met.append(state())
        else:
            self._in_forward()
        return logits


noted = functools.partial(sessions.noted, batch_size=16)


@pytest.fixture(scope="module")
def plain() -> tuple[list[dict[str, Any]], str]:
    """What the forwards of a run meet where nobody changes anything, and its digest."""
    task = Changing()
    result, notes = noted(task)
    assert notes == [] and len(task.met) > 1
    assert all(set(fp32_precisions()) <= met.keys() for met in task.met)
    assert {met[kernels] for met in task.met for kernels in KERNELS} == {"ieee"}
    assert {met["threads"] for met in task.met} == {1}
    return task.met, result.metrics_digest


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_model_changes_when_it_is_built_is_set_back_and_noted(plain: Any, name: str) -> None:
    change, said = CHANGES[name]
    before = state()
    task = Changing(at_build=change)
    result, [note] = noted(task)
    assert state() == before
    assert (task.met, result.metrics_digest) == plain
    assert note.startswith("the model's code has changed ") and f"torch.{said}" in note
    assert note in result.warnings


@pytest.mark.parametrize(("name", "pool"), [*((name, False) for name in IN_FORWARD), ("allow_tf32", True)])
def test_what_the_model_changes_in_its_forward_is_a_warning(scratch: None, name: str, pool: bool) -> None:
    change, said = CHANGES[name]
    torch.set_num_threads(2 if pool else 1)
    before = state()
    result, notes = noted(Changing(in_forward=change))
    assert state() == before
    assert notes == []
    [warning] = [warning for warning in result.warnings if f"torch.{said}" in warning]
    assert "while batches were computed" in warning and "metrics_digest" in warning


@pytest.mark.parametrize("name", BEFORE)
def test_what_the_program_set_before_does_not_reach_the_run(plain: Any, scratch: None, name: str) -> None:
    change, said = CHANGES[name]
    change()
    before = state()
    task = Changing()
    result, notes = noted(task)
    assert state() == before
    assert (task.met, result.metrics_digest) == plain
    setting_, _, values = said.partition(" from ")
    standard, _, found = values.partition(" to ")
    assert any(
        f"torch.{setting_} was {found} before this run, which sets it to {standard}" in note for note in notes
    )
    assert set(notes) <= set(result.warnings)


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()


DATA = [(torch.arange(40.0).reshape(5, 8) * number % 7,) for number in range(12)]


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_script_with_a_default_device_has_the_same_bits(scratch: None, device: str, workers: int) -> None:
    """Torch's fast path of attention has other bits, and is left alone where any default device is set."""

    def evaluated() -> str:
        return dualeval.evaluate(
            model=encoder,
            data=DATA,
            metrics=["sum"],
            observe=lambda outputs, batch: {"sum": outputs.double().sum((1, 2))},
            batch_size=4,
            workers=workers,
            device="cpu",
        ).metrics_digest

    wanted = evaluated()
    torch.set_default_device(device)
    assert evaluated() == wanted
    assert torch.get_default_device() == torch.device(device)


def test_a_run_inside_of_a_devices_context_is_refused() -> None:
    before = state()
    with torch.device("cpu"), pytest.raises(UsageError, match=r"inside 'with torch\.device.*call it out"):
        noted(Changing())
    assert state() == before


def test_grad_mode_is_the_callers(no_look: None) -> None:
    met = []

    def see() -> None:
        met.append(torch.is_grad_enabled())

    with torch.no_grad():
        _, notes = noted(Changing(at_build=see, in_forward=see))
        assert not torch.is_grad_enabled()
    assert notes == []
    assert met == [True, False, False, False, False]


def test_the_newer_settings_of_a_program_are_set_and_put_back(scratch: None) -> None:
    newer()
    BACKENDS.cudnn.rnn.fp32_precision = "ieee"
    with pytest.raises(RuntimeError):
        _ = BACKENDS.cuda.matmul.allow_tf32
    before = fp32_precisions()
    task = Changing()
    _, notes = noted(task)
    assert {met[kernels] for met in task.met for kernels in KERNELS} == {"ieee"}
    assert fp32_precisions() == before
    assert notes == [
        "torch.backends.cuda.matmul.fp32_precision was 'tf32' before this run, which sets it to 'ieee'",
        "torch.backends.mkldnn.matmul.fp32_precision was 'bf16' before this run, which sets it to 'ieee'",
    ]


def test_settings_are_put_back_where_a_run_fails() -> None:
    def fail() -> None:
        medium_then_older()
        BACKENDS.cudnn.benchmark = True
        raise UsageError("no model")

    before = state()
    with pytest.raises(UsageError, match="no model"):
        noted(Changing(at_build=fail))
    assert state() == before


def test_tf32_is_for_gpus() -> None:
    with pytest.raises(UsageError, match=r"--precision tf32: the device is cpu, .*Leave it out"):
        noted(Changing(), precision="tf32")
    for precision in ("fp32", "amp-bf16", "amp-fp16"):
        PRECISIONS[precision].check(CPU)


@pytest.mark.parametrize(
    ("major", "arch", "has_it"),
    [
        (7, None, False),
        (8, None, True),
        # An MI200 has compute capability 9.0, and no TF32.
        (9, "gfx90a:sramecc+:xnack-", False),
        (9, "gfx942", True),
    ],
)
def test_tf32_is_for_gpus_that_have_it(
    monkeypatch: pytest.MonkeyPatch, major: int, arch: str | None, has_it: bool
) -> None:
    """No GPU is needed to ask for what it is."""
    monkeypatch.setattr(torch.version, "hip", "6.4" if arch else None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    found = SimpleNamespace(gcnArchName=arch, major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: found)
    expected = nullcontext() if has_it else pytest.raises(UsageError, match=r"tf32: a GPU has no TF32, which")
    with expected:
        PRECISIONS["tf32"].check(torch.device("cuda", 0))


def test_tf32_is_what_a_gpu_gets(scratch: None) -> None:
    with numerics.settings(PRECISIONS["tf32"], torch.device("cuda", 0)) as settings:
        found = fp32_precisions()
        assert BACKENDS.cuda.matmul.allow_tf32 and BACKENDS.cudnn.allow_tf32
        torch.set_float32_matmul_precision("highest")
        [sentence] = settings.check_after_build()
    assert found == {name: "ieee" if name.startswith("mkldnn") else "tf32" for name in KERNELS}
    assert "torch.backends.cuda.matmul.fp32_precision from 'tf32' to 'ieee'" in sentence


OLDER = """
import torch
from dualeval.engine.device import numerics
from dualeval.options.precision import FP32

numerics._HAS_FP32_PRECISION = False
cpu = torch.device("cpu")
before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
with numerics.settings(FP32, cpu) as settings:
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("highest", False)
    assert settings.notes == []
    torch.set_float32_matmul_precision("medium")
    [sentence] = settings.check_after_build()
    assert "torch.get_float32_matmul_precision() from 'highest' to 'medium'" in sentence
    assert torch.get_float32_matmul_precision() == "highest"
    torch.backends.cudnn.allow_tf32 = True
    [sentence] = settings.check_after_loop()
    assert "torch.backends.cudnn.allow_tf32 from False to True" in sentence
assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
"""


def test_a_pytorch_without_the_newer_settings_has_the_older_ones(launch: Launch) -> None:
    """In a process of its own, where nobody uses the newer ones."""
    launch([sys.executable, "-W", "error", "-c", OLDER]).ok()
