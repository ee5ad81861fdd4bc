"""The numeric settings that make equal inputs give equal bits: set for a run, checked, and put back after it.

The settings are global to the process, so the model's code can change them, for instance by
``torch.set_float32_matmul_precision`` in a model's file or ``torch.backends.cudnn.benchmark = True`` in a
forward.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
import torch.backends.opt_einsum  # torch 2.8 does not import it itself
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from dualeval.errors import UsageError
from dualeval.options.precision import Precision

# PyTorch 2.9's settings of how float32 is computed, parents before children: a child that is "none" takes its
# parent's value. The older settings (allow_tf32) still exist; reading one raises if it disagrees with these.
_HAS_FP32_PRECISION = hasattr(torch.backends, "fp32_precision")
_PARENTS = tuple(f"torch.backends.{backend}fp32_precision" for backend in ("", "cudnn.", "mkldnn."))
_CHILDREN = tuple(
    f"torch.backends.{kernels}.fp32_precision"
    for kernels in ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
)


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Keep a caller's autocast out of an evaluation, and the evaluation out of the caller's cache of casts.

    That cache is global to the process, and may hold casts of former weights.
    """
    with ExitStack() as stack:
        is_inside = torch.autocast_increment_nesting() > 1
        torch.autocast_decrement_nesting()
        for kind in sorted({"cpu", device.type}) if is_inside else ():
            stack.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
        yield


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """One setting of the process."""

    # The Python expression that reads or sets it.
    name: str
    # Returns its value.
    read: Callable[[], Any]
    write: Callable[[Any], object]
    # Its value in the run.
    wanted: Any
    # Its values in a process that has not set it; None if any value is usual.
    usual: tuple[Any, ...] | None = None


class NumericSettings:
    """The settings of one run, from its start to ``restore``."""

    def __init__(self, precision: Precision, device: torch.device, leave: Collection[str] = ()) -> None:
        older = _older_fp32_settings(precision.tf32)
        others = [setting for setting in _other_settings(device) if setting.name not in leave]
        self._settings = [*(_fp32_settings(precision.tf32) if _HAS_FP32_PRECISION else older), *others]
        # Written first, as writing them also changes some of the newer ones.
        self._also = older if _HAS_FP32_PRECISION else []
        self._before = _read_without_parents(self._settings)
        self._also_before = _read_older() if _HAS_FP32_PRECISION else []
        # Sentences about what was set otherwise before the run.
        self.notes = [
            f"{setting.name} was {before!r} before this run, which sets it to {setting.wanted!r}"
            for setting, before in zip(self._settings, self._before, strict=True)
            if setting.usual is not None and before not in (setting.wanted, *setting.usual)
        ]
        self._write_wanted()

    def check_after_build(self) -> list[str]:
        """Set again what the model's code changed while the model was built."""
        changes = self._set_again()
        if not changes:
            return []
        return [f"the model's code has changed {_joined(changes)}; this run has set it back"]

    def check_after_loop(self, in_threads: Iterable[str] = ()) -> list[str]:
        """Set again what the model's code changed while batches were computed."""
        changes = list(dict.fromkeys([*self._set_again(), *sorted(in_threads)]))
        if not changes:
            return []
        return [
            f"the model's code has changed {_joined(changes)} while batches were computed: the same run may "
            "give another metrics_digest. Remove that from the model's forward"
        ]

    def restore(self) -> None:
        """Restore all settings from before the run, also those that the model's code has changed."""
        self._write(self._before, self._also_before)

    def _set_again(self) -> list[str]:
        changes = [
            _CHANGE.format(setting.name, setting.wanted, now)
            for setting in self._settings
            if (now := setting.read()) != setting.wanted
        ]
        if changes:
            self._write_wanted()
        return changes

    def _write_wanted(self) -> None:
        self._write(
            [setting.wanted for setting in self._settings], [setting.wanted for setting in self._also]
        )

    def _write(self, values: Sequence[Any], also: Sequence[Any]) -> None:
        with warnings.catch_warnings():
            # PyTorch 2.9 warns about the older settings. They are written so that old and new ones agree.
            warnings.simplefilter("ignore", UserWarning)
            for setting, value in zip(self._also, also, strict=True):
                setting.write(value)
        for setting, value in zip(self._settings, values, strict=True):
            # A child's value may be read from its parent, so these are always written.
            if setting.name in _PARENTS or setting.name in _CHILDREN or setting.read() != value:
                setting.write(value)


@contextmanager
def settings(
    precision: Precision, device: torch.device, leave: Collection[str] = ()
) -> Iterator[NumericSettings]:
    """Set what equal bits need: no TF32 unless asked for, deterministic kernels, no choice of kernels by
    timing, and on a CPU one thread per kernel, as its last bits may depend on the number of threads.

    If an operation has no deterministic kernel, PyTorch warns and continues.
    """
    held = NumericSettings(precision, device, leave)
    try:
        yield held
    finally:
        held.restore()


def set_thread() -> None:
    """Set the per-thread settings in a thread that computes beside the thread of ``settings``."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)


def check_thread() -> list[str]:
    """Set again what the model's code changed in a thread after ``set_thread``."""
    wanted_and_found = (_THREADS, 1, torch.get_num_threads()), (_FLUSH, False, _flushes_denormals())
    changes = [_CHANGE.format(*each) for each in wanted_and_found if each[1] != each[2]]
    if changes:
        set_thread()
    return changes


# -- the settings, one by one ----------------------------------------------------------------------

_THREADS = "torch.get_num_threads()"
_FLUSH = "torch.set_flush_denormal"
_CHANGE = "{} from {!r} to {!r}"


def _fp32_settings(tf32: bool) -> list[_Setting]:
    """The settings of PyTorch 2.9 and newer."""
    wanted = "tf32" if tf32 else "ieee"
    # PyTorch's default for cuDNN is TF32, unless somebody has set it or its parent.
    usual = {name: ("none", "tf32") if ".cudnn." in name else ("none",) for name in _CHILDREN}
    return [
        _attribute(
            name,
            # oneDNN has TF32 on Intel's GPUs only.
            "ieee" if ".mkldnn." in name else wanted,
            usual=usual.get(name, ("none",)),
        )
        for name in (*_PARENTS, *_CHILDREN)
    ]


def _older_fp32_settings(tf32: bool) -> list[_Setting]:
    """The settings of PyTorch 2.8, which newer versions keep beside their own.

    They are set there, too, so that both agree: the model's code, or the compiler, may read the older ones.
    """
    matmul = "high" if tf32 else "highest"
    return [
        _function("get_float32_matmul_precision", "set_float32_matmul_precision", matmul, usual=("highest",)),
        _attribute("torch.backends.cudnn.allow_tf32", tf32, usual=(True,)),
    ]


def _other_settings(device: torch.device) -> list[_Setting]:
    threads = 1 if device.type == "cpu" else torch.get_num_threads()
    _default_device()  # raises, if at all, before anything is set
    return [
        # 1 is "warn": as use_deterministic_algorithms(True, warn_only=True), which imports the compiler: 1 s.
        _function("get_deterministic_debug_mode", "set_deterministic_debug_mode", 1, usual=(0,)),
        # Filling every new tensor would cost time for nothing: the engine reads no uninitialised memory.
        _attribute("torch.utils.deterministic.fill_uninitialized_memory", False),
        _attribute("torch.backends.cudnn.benchmark", False, usual=(False,)),
        *_kernel_settings(),
        _function("get_num_threads", "set_num_threads", threads),
        _Setting(
            name=_FLUSH, read=_flushes_denormals, write=torch.set_flush_denormal, wanted=False, usual=()
        ),
        _function("get_default_dtype", "set_default_dtype", torch.float32, usual=(torch.float32,)),
        _function("is_grad_enabled", "set_grad_enabled", True),
        _Setting(
            name="torch.set_default_device",
            read=_default_device,
            write=torch.set_default_device,
            wanted=None,
            usual=(None,),
        ),
    ]


def _kernel_settings() -> list[_Setting]:
    """The kernels that an operation may choose from: each kernel may give other last bits."""
    mha, cuda = "backends.mha.", "backends.cuda."
    einsum: bool = torch.backends.opt_einsum.is_available()
    attention = "fp16_bf16_reduction_math_sdp"
    return [
        _function(f"{mha}get_fastpath_enabled", f"{mha}set_fastpath_enabled", True, usual=(True,)),
        # Not by the public set_flags, which also sets fp32_precision.
        *(
            replace(
                _function(f"_C._get_{library}_enabled", f"_C._set_{library}_enabled", True, usual=(True,)),
                name=f"torch.backends.{library}.enabled",
            )
            for library in ("mkldnn", "nnpack")
        ),
        *(
            _function(f"{cuda}{kernel}_sdp_enabled", f"{cuda}enable_{kernel}_sdp", True, usual=(True,))
            for kernel in ("flash", "mem_efficient", "math", "cudnn")
        ),
        _function(f"{cuda}{attention}_allowed", f"{cuda}allow_{attention}", False, usual=(False,)),
        _attribute("torch.backends.cudnn.enabled", True, usual=(True,)),
        _attribute("torch.backends.cudnn.deterministic", True, usual=(False,)),
        *(
            _attribute(f"torch.{cuda}matmul.allow_{dtype}_reduced_precision_reduction", True, usual=(True,))
            for dtype in ("fp16", "bf16")
        ),
        _attribute(f"torch.{cuda}matmul.allow_fp16_accumulation", False, usual=(False,)),
        _attribute("torch.backends.opt_einsum.enabled", einsum, usual=(einsum,)),
    ]


def _function(read: str, write: str, wanted: Any, usual: tuple[Any, ...] | None = None) -> _Setting:
    """A setting that one function of torch returns, and another one sets."""
    read_it, write_it = attrgetter(read, write)(torch)
    return _Setting(name=f"torch.{read}()", read=read_it, write=write_it, wanted=wanted, usual=usual)


def _attribute(name: str, wanted: Any, usual: tuple[Any, ...] | None = None) -> _Setting:
    """A setting that is an attribute of a module."""
    owner_name, _, attribute = name.removeprefix("torch.").rpartition(".")
    owner = attrgetter(owner_name)(torch)

    def write(value: Any) -> None:
        setattr(owner, attribute, value)

    return _Setting(
        name=name,
        read=lambda: getattr(owner, attribute),
        write=_write_mkldnn_parent if name == _PARENTS[2] else write,
        wanted=wanted,
        usual=usual,
    )


def _write_mkldnn_parent(value: str) -> None:
    # The attribute's own setter sets the parent of all backends instead (PyTorch 2.9 to 2.13).
    torch.backends.mkldnn.set_flags(_fp32_precision=value)  # type: ignore[no-untyped-call]


def _read_without_parents(settings: Sequence[_Setting]) -> list[Any]:
    """The settings' own values, not those of their parents; leaves the parents at "none"."""
    values = []
    for setting in settings:
        values.append(setting.read())
        if setting.name in _PARENTS:
            setting.write("none")
    return values


def _read_older() -> list[Any]:
    """The older settings' own values; leaves the newer ones at "ieee".

    Each can be read only if the newer ones agree with it; the first one also if they are "ieee".
    """
    for name in _CHILDREN:
        _attribute(name, "ieee").write("ieee")
    matmul = torch.get_float32_matmul_precision()
    try:
        cudnn = torch.backends.cudnn.allow_tf32
    except RuntimeError:
        cudnn = True
    return [matmul, cudnn]


def _flushes_denormals() -> bool:
    """Whether this thread treats the smallest numbers as 0; PyTorch has no function that tells."""
    return sys.float_info.min / 2 == 0


def _default_device() -> torch.device | None:
    """The default device if one was set, else None, which torch's fast path of attention requires."""
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes = [mode for mode in stack if isinstance(mode, DeviceContext)]
    if modes and modes != [getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)]:
        raise UsageError(
            "dualeval was called inside 'with torch.device(...)', which changes bits: call it outside of that"
        )
    return modes[0].device if modes else None


def _joined(changes: Sequence[str]) -> str:
    *first, last = changes
    return f"{', '.join(first)} and {last}" if first else last
