"""The keywords of sessions and evaluations, for editors and type checkers.

Written by docs/option_types.py (``make tables``) from the dataclasses of the options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Literal

    import torch

    from dualeval.engine.values.options import NewFolder


class RunKeywords(TypedDict, total=False):
    """Of an evaluation."""

    metric: Sequence[str]
    limit: int | None
    sample: int | None
    seed: int | None
    cluster: str | None
    keep: Sequence[str]
    by: Sequence[str]
    bins: Sequence[float]
    batch_size: int
    precision: Literal["fp32", "tf32", "amp-fp16", "amp-bf16", "fp16", "bf16"]
    keep_batchnorm_fp32: bool
    layout: Literal["auto", "contiguous", "channels-last"]
    optimize: Literal["fold", "compile"] | None
    shard: Literal["fsdp"] | None
    offload: bool
    on_error: Literal["stop", "skip"]
    workers: int | None
    out: str | os.PathLike[str] | NewFolder | None
    schedule: Literal["static", "dynamic", "lockstep"]
    fresh: bool
    replay: bool
    mix_machines: bool
    reference: str | Path | None


class SessionKeywords(TypedDict, total=False):
    """Of a session."""

    backend: str | None
    device: str | torch.device | None
    launcher: str | None
    allow_shared_gpu: bool
    mix_machines: bool
    heartbeat_timeout: float
    forward_timeout: float
    stop_signals: Sequence[str]
    on_stall: str | None
    debug: bool
    stop: Callable[[], bool | str] | None
    note: Callable[[str], None] | None
