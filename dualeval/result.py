"""Result: what a run measured, and where it came from; result.json."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dualeval.metrics import Value

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of one run. Field by field in docs/result-files.md.

    Attributes:
        metrics: the metrics by name; plain JSON values, null where a value is not finite.
        intervals: 95 % intervals [low, high] of the metrics that have one.
        nonfinite: for each metric that met NaN or infinities, how many of which.
        samples: total, evaluated and failed samples.
        failed: id and error of every failed sample, in data-set order.
        chunks: total, evaluated_now and resumed chunks.
        job: the job as resolved.
        fingerprint: sha256 of all that decides the metrics.
        data: name and fingerprint of the data set.
        weights: fingerprint of the model's parameters and buffers, and their number.
        versions: of Python and of the libraries that compute.
        world: size, nodes, launcher, backend.
        device: kind and model of the devices.
        homogeneous: whether all ranks have the same device model, CPU capability and versions.
        timing: seconds; total, setup, evaluate, and the split of each rank.
        samples_per_s: evaluated samples over evaluate seconds.
        warnings: what a reader of the numbers should know.
        folder: where rank 0 wrote the files.
    """

    metrics: dict[str, Value]
    intervals: dict[str, tuple[float, float]]
    nonfinite: dict[str, dict[str, int]]
    samples: dict[str, int]
    failed: list[dict[str, str]]
    chunks: dict[str, int]
    job: dict[str, Any]
    fingerprint: str
    data: dict[str, Any]
    weights: dict[str, Any]
    versions: dict[str, str]
    world: dict[str, Any]
    device: dict[str, Any]
    homogeneous: bool
    timing: dict[str, Any]
    samples_per_s: float
    warnings: list[str]
    folder: str

    @property
    def metrics_digest(self) -> str:
        """sha256, in hex, over the metrics, their non-finite counts and the ids of failed samples.

        Equal digests mean: the same numbers to the last bit, from the same samples.
        """
        content = {
            "metrics": self.metrics,
            "nonfinite": self.nonfinite,
            "failed": [entry["id"] for entry in self.failed],
        }
        return sha256_of_json(content)

    def to_json(self) -> str:
        """The text of result.json."""
        content = {"schema_version": SCHEMA_VERSION, "metrics_digest": self.metrics_digest, **asdict(self)}
        return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def sha256_of_json(value: Any) -> str:
    """sha256, in hex, of canonical JSON: sorted keys, shortest round-trip floats, no spaces, UTF-8."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def partial_of(path: Path) -> Path:
    """Where a file is written until it is whole."""
    return path.with_name(path.name + ".partial")


def write_text(path: Path, text: str) -> None:
    """Write a file that is whole under its name, or not there."""
    partial = partial_of(path)
    partial.write_text(text, "utf-8")
    partial.replace(path)


def write_status(
    folder: Path, state: str, *, exit_code: int | None = None, reason: str | None = None
) -> None:
    """Write status.json, the truth for scripts whatever a launcher makes of exit codes.

    Args:
        folder: the run's output folder.
        state: "running", "done" or "failed".
        exit_code: what the ranks end with; None while running.
        reason: the first error's message, where there was one.
    """
    status = {"state": state, "exit_code": exit_code, "reason": reason}
    write_text(folder / "status.json", json.dumps(status, indent=2, ensure_ascii=False) + "\n")
