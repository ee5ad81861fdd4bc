"""What trackers have kept, read back: by their own readers where they have one in Python."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The form of the file of W&B's offline runs: a head, then the records of LevelDB's log in blocks.
_HEAD, _BLOCK = 7, 32768
_WHOLE, _FIRST, _LAST = 1, 2, 4


def tensorboard_run(folder: Path) -> Any:
    """The folder's events, as TensorBoard itself loads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "images": 0, "scalars": 0})
    return events.Reload()


def wandb_run(folder: Path) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
    """Of an offline run its message, its config, and the rows of its history."""
    from wandb.proto import wandb_internal_pb2

    [file] = folder.glob("run-*.wandb")
    run: Any = None
    config: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for data in _wandb_records(file.read_bytes()):
        record = vars(wandb_internal_pb2)["Record"].FromString(data)
        if record.HasField("run"):
            run = record.run
        found = record.run.config if record.HasField("run") else record.config
        config |= {item.key: json.loads(item.value_json) for item in found.update}
        if record.HasField("history"):
            items = record.history.item
            rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            )
    return run, config, rows


def _wandb_records(data: bytes) -> Iterator[bytes]:
    position, parts = _HEAD, b""
    while position + 7 <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        piece = data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (_WHOLE, _FIRST):
            parts = b""
        parts += piece
        if kind in (_WHOLE, _LAST):
            yield parts


def mlflow_runs(address: str, experiment: str = "dualeval") -> list[Any]:
    """All runs of an experiment."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(address)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return list(client.search_runs([found.experiment_id]))


def mlflow_steps(address: str, run: str, metric: str) -> list[int]:
    """The steps at which a run has a metric."""
    from mlflow.tracking import MlflowClient

    return [entry.step for entry in MlflowClient(address).get_metric_history(run, metric)]
