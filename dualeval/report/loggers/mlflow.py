"""MLflow: a run of an experiment, by MLflow's own client."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from PIL import Image

from dualeval.report.loggers.record import Record
from dualeval.report.loggers.targets import Target

# What a server takes in one request, and of a value.
_METRICS, _PARAMS = 1000, 100
_PARAM_LENGTH, _TAG_LENGTH = 500, 5000
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
    for each, png in record.pictures().items():
        client.log_image(identity, Image.open(io.BytesIO(png)), artifact_file=f"{folder}{each}.png")
    for each, table in record.tables.items():
        client.log_dict(identity, {"columns": table.columns, "data": table.rows}, f"{folder}{each}.json")
    client.log_dict(identity, record.result, f"{folder}result.json")
    metrics = [
        Metric(key, value, round(1000 * record.time), step) for key, value in _valid(record.scalars).items()
    ]
    params = _valid(record.params)
    known = run.data.params
    new = [Param(key, _short(value, _PARAM_LENGTH)) for key, value in params.items() if key not in known]
    for part in _parts(metrics, _METRICS):
        client.log_batch(identity, metrics=part)
    for part in _parts(new, _PARAMS):
        client.log_batch(identity, params=part)
    for part in _parts([*_tags(record, params, known)], _PARAMS):
        client.log_batch(identity, tags=part)
    # Last: what has this is whole.
    client.set_tag(identity, mark, record.key)
    client.set_terminated(identity, "FINISHED")
    return where


def _experiment(client: MlflowClient, name: str) -> str:
    """The id of an experiment."""
    if (found := client.get_experiment_by_name(name)) is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:
            found = client.get_experiment_by_name(name)
            if found is None:
                raise  # such as of one that was deleted: MLflow says what to do
    return str(found.experiment_id)  # of another process, if it was made meanwhile


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


def _tags(record: Record, params: Mapping[str, Any], known: Mapping[str, str]) -> Iterator[RunTag]:
    """Units, and what has changed since the run's parameters, which MLflow never changes, were set."""
    for name, unit in _valid(record.units).items():
        yield RunTag(f"unit.{name}", unit)
    for name, value in params.items():
        if known.get(name, _short(value, _PARAM_LENGTH)) != _short(value, _PARAM_LENGTH):
            yield RunTag(f"latest.{name}", _short(value, _TAG_LENGTH))


def _parts(values: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


def _valid(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by names that MLflow takes: other letters than its own become "_"."""
    return {_FORBIDDEN.sub("_", name): value for name, value in values.items()}


def _short(value: Any, most: int) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
