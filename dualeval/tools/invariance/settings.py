"""The precisions and layouts in which a model is tried: all that the device can do, the job's own first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from dualeval.engine import numerics
from dualeval.engine.compute import copy_sharing_tensors
from dualeval.engine.layouts import layout_of
from dualeval.engine.options import RunOptions
from dualeval.engine.preparation import check_model
from dualeval.errors import UsageError
from dualeval.options.choices import CAST, CHANNELS_LAST, CONTIGUOUS, PRECISIONS


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the model is computed."""

    # One of `choices.PRECISIONS`.
    precision: str
    # "contiguous" or "channels-last".
    layout: str
    # Whether the job computes so.
    of_job: bool
    # Why it cannot be tried; None where it can.
    refused: str | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.precision}, {self.layout}"

    def options(self, options: RunOptions) -> RunOptions:
        """The job's options with this setting in place of its own."""
        return replace(
            options,
            precision=self.precision,
            layout=self.layout,
            keep_batchnorm_fp32=options.keep_batchnorm_fp32 and self.precision in CAST,
        )


def settings_of(
    model: nn.Module,
    options: RunOptions,
    device: torch.device,
    *,
    precisions: Sequence[str] = (),
    layouts: Sequence[str] = (),
) -> list[Setting]:
    """The settings to try, the job's own first."""
    own = options.precision, options.layout
    numerics.check_precision(options.precision, device)
    check_model(model, options)
    found = [Setting(precision=own[0], layout=own[1], of_job=True)]
    can_be_copied = copy_if_possible(model) is not None
    for precision in precisions or PRECISIONS:
        for layout in layouts or (CONTIGUOUS, CHANNELS_LAST):
            if (precision, layout) != own:
                setting = Setting(precision=precision, layout=layout, of_job=False)
                refused: str | None = "the model cannot be copied"
                if can_be_copied:
                    refused = _why_refused(setting, model, options, device)
                found.append(replace(setting, refused=refused))
    return found


def _why_refused(setting: Setting, model: nn.Module, options: RunOptions, device: torch.device) -> str | None:
    """Why a setting cannot be tried; None where it can."""
    try:
        numerics.check_precision(setting.precision, device)
        layout_of(model, setting.layout)
        check_model(model, setting.options(options))
    except UsageError as error:
        return str(error)
    return None


def copy_if_possible(model: nn.Module) -> nn.Module | None:
    """Modules of a setting's own, which share the model's tensors; None where the model cannot be copied."""
    try:
        return copy_sharing_tensors(model)
    except Exception:  # noqa: BLE001 - whatever stands in the way, the job's own setting needs no copy
        return None
