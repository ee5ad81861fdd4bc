"""Result: what a run measured, and where it came from; result.json."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dualeval.errors import DualevalError
from dualeval.metrics import Value

SCHEMA_VERSION = 1
STATUS = "status.json"


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
        data: fingerprints of the data set and of its contents.
        weights: fingerprint of the model's parameters and buffers, and their number.
        versions: of Python and of the libraries that compute.
        world: size, nodes, launcher, backend.
        device: kind and model of the devices.
        homogeneous: whether all ranks have the same device model, CPU capability and versions.
        timing: seconds; total, setup, evaluate, and the split of each rank.
        samples_per_s: evaluated samples over evaluate seconds.
        units: by metric, "percent" for values of 0 to 100.
        work: what the metrics took, as counts, where a task counts something.
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
    units: dict[str, str] = field(default_factory=dict)
    work: dict[str, int] = field(default_factory=dict)

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


def read_result(path: Path) -> Result:
    """Read a result.json and check it against its own digest.

    Raises:
        OSError: there is none, or it cannot be read.
        DualevalError: it is damaged, or of another version.
    """
    try:
        return result_from(json.loads(path.read_text("utf-8")))
    except (ValueError, DualevalError) as error:
        raise DualevalError(f"{path} is damaged: {error}") from error


def result_from(content: Any) -> Result:
    """Make a result of the content of a result.json.

    Raises:
        DualevalError: a field is missing or unknown, or the metrics do not fit the digest.
    """
    try:
        values = dict(content)
        version, digest = values.pop("schema_version"), values.pop("metrics_digest")
        if version != SCHEMA_VERSION:
            raise DualevalError(f"its schema version is {version}, expected {SCHEMA_VERSION}")
        result = Result(**values)
        if result.metrics_digest != digest:
            raise DualevalError("its metrics do not fit its metrics_digest")
    except (ValueError, TypeError, KeyError) as error:
        raise DualevalError(f"{type(error).__name__}: {error}") from error
    return result


def partial_of(path: Path) -> Path:
    """Where a file is written until it is whole."""
    return path.with_name(path.name + ".partial")


def write_text(path: Path, text: str) -> None:
    """Write a file that is whole under its name, or not there."""
    # A name of its own: several processes may write the file, and then the last one's is there.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of a run; status.json, the truth for scripts whatever a launcher makes of exit codes.

    Attributes:
        state: "running", "done", "failed" or "stopped".
        exit_code: what the ranks end with; None while running.
        reason: the first error's message, where there was one.
        signal: the name of the signal that stopped the run.
        chunks_saved: number of chunks that a stopped run has finished and saved since it was started.
        launch_id: of the launcher that may start a stopped run's ranks again.
    """

    state: str
    exit_code: int | None = None
    reason: str | None = None
    signal: str | None = None
    chunks_saved: int | None = None
    launch_id: str | None = None

    def write(self, folder: Path) -> None:
        """Write it into the run's output folder; on a full disk over the one that is there."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"
        try:
            write_text(folder / STATUS, text)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # Its block is there already. Not whole for a moment, but "running" would be wrong for ever.
            with (folder / STATUS).open("r+", encoding="utf-8") as file:
                file.write(text)
                file.truncate()


def read_status(folder: Path) -> Status | None:
    """Read the state of a folder's run; None where there is no readable one."""
    try:
        return Status(**json.loads((folder / STATUS).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
