"""What each value of ``--precision`` means: for a model, its inputs, a forward, a comparison, a message.

It acts in the engine: ``prepare`` of ``model/preparation.py`` casts the model (a divided one
``sharding/model.py``), ``set_door`` of ``model/layouts.py`` its inputs, ``Compute`` of ``model/compute.py``
enters the context of a forward, ``device/numerics.py`` sets TF32, and ``checks/replay.py`` has the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dualeval.errors import UsageError

if TYPE_CHECKING:  # options are declared without torch
    import torch
    from torch import nn


@dataclass(frozen=True)
class Precision:
    """In which types of numbers a model computes."""

    # As it is typed, and as results and identities have it.
    name: str
    # Relative and absolute, for floats that another machine has computed.
    tolerance: float
    # Torch's name of the type that weights and inputs are cast to; None if they stay as they are.
    cast: str | None = None
    # Torch's name of autocast's type; None without autocast.
    autocast: str | None = None
    # Whether a GPU may round the factors of float32 products to TF32.
    tf32: bool = False
    # Whether batch norms are left out of the cast.
    keeps_batchnorm: bool = False

    @property
    def is_half(self) -> bool:
        """Whether operations compute in 16 bits."""
        return self.cast is not None or self.autocast is not None

    @property
    def flag(self) -> str:
        """The option in a message."""
        return f"--precision {self.name}"

    @property
    def flag_of_autocast(self) -> str:
        """In a message, the option that computes in the type of a cast without casting the model."""
        return f"--precision amp-{self.name}"

    @property
    def dtype(self) -> torch.dtype | None:
        """The type that weights and inputs are cast to; None if they stay as they are."""
        import torch

        return None if self.cast is None else getattr(torch, self.cast)

    def dtype_in(self, module: nn.Module, dtype: torch.dtype) -> torch.dtype:
        """The type in which a module's tensor of some type is computed."""
        from torch.nn.modules.batchnorm import _BatchNorm

        keeps = self.keeps_batchnorm and isinstance(module, _BatchNorm)
        return dtype if keeps or not dtype.is_floating_point else self.dtype or dtype

    def forward_context(self, device: torch.device) -> Callable[[], torch.autocast]:
        """A function that makes a context for each forward, without the caller's autocast.

        A context belongs to one thread.
        """
        import torch

        dtype = None if self.autocast is None else getattr(torch, self.autocast)
        return partial(torch.autocast, device.type, dtype=dtype, enabled=dtype is not None)

    def check(self, device: torch.device) -> None:
        """Check that a device can compute in this precision."""
        if not self.tf32:
            return
        if device.type != "cuda":
            raise UsageError(
                f"{self.flag}: the device is {device}, and TF32 is a format that only some GPUs have. Leave "
                "it out (fp32), or run on a GPU with --device cuda."
            )
        import torch

        with torch.cuda.device(device):
            if torch.cuda.is_tf32_supported():
                return
        raise UsageError(
            f"{self.flag}: {torch.cuda.get_device_name(device)} has no TF32, which NVIDIA's GPUs have from "
            "Ampere on (compute capability 8.0), and AMD's from the MI300 on (gfx94, gfx95). Leave "
            "--precision out (fp32)."
        )


FP32 = Precision("fp32", 1e-3)
_ALL = (
    FP32,
    Precision("tf32", 1e-2, tf32=True),
    Precision("amp-fp16", 2e-2, autocast="float16"),
    Precision("amp-bf16", 1e-1, autocast="bfloat16"),
    Precision("fp16", 2e-2, cast="float16"),
    Precision("bf16", 1e-1, cast="bfloat16"),
)
PRECISIONS = {each.name: each for each in _ALL}
