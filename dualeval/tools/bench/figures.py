"""Figures of cells: medians and ranges over the rounds, speed-up and efficiency; pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dualeval.tools.bench.plan import DATAPARALLEL, SINGLE, STAGES

MEASURED = "measured"


def with_figures(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add to each cell its ``figures``; None to one that was never measured."""
    return [{**cell, "figures": _figures(cell, baseline_of(cell, cells))} for cell in cells]


def baseline_of(cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The cell that a speed-up is relative to: mode single, or else one process of the same mode.

    Of the same precision and batch size; None where none was measured.
    """
    same = [
        other
        for other in cells
        if other["measurements"]
        and other["processes"] == 1
        and (other["precision"], other["batch_size"]) == (cell["precision"], cell["batch_size"])
    ]
    for mode in (SINGLE, cell["mode"]):
        for other in same:
            if other["mode"] == mode:
                return other
    return None


def _figures(cell: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> dict[str, Any] | None:
    measured = cell["measurements"]
    if not measured:
        return None
    speeds = {one["round"]: one["samples"] / one["seconds"] for one in measured}
    figures: dict[str, Any] = {
        "rounds": len(measured),
        "images_per_s": spread(list(speeds.values())),
        # What one process takes for a batch: several are under way at the same time.
        "seconds_per_batch": spread([one["seconds"] * _at_once(cell) / one["batches"] for one in measured]),
        "speed_up": None,
        "efficiency": None,
        "startup_s": spread([one["startup_s"] for one in measured]),
        "peak_bytes": max(rank["peak_bytes"] for one in measured for rank in one["ranks"]),
        "peak_gpu_bytes": max(
            (rank["peak_gpu_bytes"] or 0 for one in measured for rank in one["ranks"]), default=0
        )
        or None,
        "measured_s": min(one["seconds"] for one in measured),
        **_shares(measured),
    }
    if baseline is not None:
        base = {one["round"]: one["samples"] / one["seconds"] for one in baseline["measurements"]}
        # Of the same round: what slows the machine for a while slows both.
        ratios = [speed / base[number] for number, speed in speeds.items() if number in base]
        if ratios:
            figures["speed_up"] = spread(ratios)
            figures["efficiency"] = figures["speed_up"]["median"] / cell["processes"]
    return figures


def _at_once(cell: Mapping[str, Any]) -> int:
    return 1 if cell["mode"] == DATAPARALLEL else int(cell["processes"])


def _shares(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The share of each stage of a training step; of an evaluation, how long it waited for data."""
    if "forward" in measured[0]["ranks"][0]:
        found = {}
        for stage in STAGES:
            parts = [
                sum(rank[stage] for rank in one["ranks"])
                / sum(rank[each] for rank in one["ranks"] for each in STAGES)
                for one in measured
            ]
            found[stage] = statistics.median(parts)
        return {"stages": found}
    waits = [
        sum(rank["data"] for rank in one["ranks"]) / sum(rank["evaluate"] for rank in one["ranks"])
        for one in measured
    ]
    return {"waits_for_data": statistics.median(waits)}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest of some values."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}
