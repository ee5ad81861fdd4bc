"""The precisions and layouts in which a model is tried: all that the device can do, the job's own first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dualeval.choices import PRECISIONS
from dualeval.engine import numerics
from dualeval.engine.options import RunOptions
from dualeval.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the model is computed.

    Attributes:
        precision: one of ``choices.PRECISIONS``.
        of_job: whether the job computes so.
        refused: why the device cannot; None where it can.
    """

    precision: str
    of_job: bool
    refused: str | None = None

    @property
    def name(self) -> str:
        """For people."""
        return self.precision

    def options(self, options: RunOptions) -> RunOptions:
        """The job's options with this setting in place of its own."""
        return replace(options, precision=self.precision)


def settings_of(
    options: RunOptions, device: torch.device, *, precisions: Sequence[str] = PRECISIONS
) -> list[Setting]:
    """The settings to try, the job's own first.

    Args:
        options: the job's.
        device: what computes.
        precisions: which; the job's own is always among them.
    """
    found = []
    for precision in dict.fromkeys((options.precision, *precisions)):
        refused = None
        try:
            numerics.check_precision(precision, device)
        except UsageError as error:
            if precision == options.precision:
                raise
            refused = str(error)
        found.append(Setting(precision=precision, of_job=precision == options.precision, refused=refused))
    return found
