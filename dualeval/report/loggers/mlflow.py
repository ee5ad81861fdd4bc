"""MLflow: a run of an experiment, by MLflow's own client."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from typing import Any

from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.tracking import MlflowClient
from PIL import Image

from dualeval.report.loggers.record import Record
from dualeval.report.loggers.targets import Target

# What a server takes in one request, and of a value.
_METRICS, _PARAMS = 1000, 100
_PARAM_LENGTH = 500
_FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)
_EXPERIMENT = "dualeval"
_NAME, _LOGGED = "dualeval.run", "dualeval.logged."


def write(record: Record, target: Target) -> str:
    """Log the record into the run of its name, or one of its own, which is made where it is not there."""
    client = MlflowClient(target.where)
    # MLflow's own variable for it.
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _EXPERIMENT
    experiment = _experiment(client, name)
    run = _run(client, experiment, record, target.name)
    where = f"run {run.info.run_id} of the experiment {name!r} in {target.where}"
    mark = f"{_LOGGED}{record.step or 0}"
    if run.data.tags.get(mark) == record.key:
        return f"{where} has this result already"
    identity = run.info.run_id
    step = record.step or 0
    folder = "" if record.step is None else f"step-{record.step}/"
    for each, png in record.pictures.items():
        client.log_image(identity, Image.open(io.BytesIO(png)), artifact_file=f"{folder}{each}.png")
    for each, table in record.tables.items():
        client.log_dict(identity, {"columns": table.columns, "data": table.rows}, f"{folder}{each}.json")
    client.log_dict(identity, record.result, f"{folder}result.json")
    metrics: list[Any] = [
        Metric(key, value, round(1000 * record.time), step) for key, value in _valid(record.scalars).items()
    ]
    # MLflow never changes a parameter: of a training these are the first step's.
    params = _valid(record.params).items()
    new: list[Any] = [Param(key, _short(value)) for key, value in params if key not in run.data.params]
    tags: list[Any] = [RunTag(f"unit.{key}", unit) for key, unit in _valid(record.units).items()]
    for kind, values, most in (
        ("metrics", metrics, _METRICS),
        ("params", new, _PARAMS),
        ("tags", tags, _PARAMS),
    ):
        for start in range(0, len(values), most):
            part: dict[str, Any] = {kind: values[start : start + most]}
            client.log_batch(identity, **part)
    # Last: what has this is whole.
    client.set_tag(identity, mark, record.key)
    client.set_terminated(identity, "FINISHED")
    return where


def _experiment(client: MlflowClient, name: str) -> str:
    """The id of an experiment."""
    found = client.get_experiment_by_name(name)
    return str(client.create_experiment(name) if found is None else found.experiment_id)


def _run(client: MlflowClient, experiment: str, record: Record, name: str | None) -> Run:
    identity = name or record.key
    found = client.search_runs([experiment], f"tags.`{_NAME}` = '{identity}'", max_results=1)
    if found:
        return found[0]
    return client.create_run(
        experiment,
        start_time=round(1000 * (record.time - record.scalars["run/total_s"])),
        run_name=name or record.name,
        tags={_NAME: identity},
    )


def _valid(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by names that MLflow takes: other letters than its own become "_"."""
    return {_FORBIDDEN.sub("_", name): value for name, value in values.items()}


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _PARAM_LENGTH else f"{text[: _PARAM_LENGTH - 3]}..."
