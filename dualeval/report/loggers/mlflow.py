"""MLflow: a run of an experiment, by its own client."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from dualeval.report.loggers.entry import LogEntry, opened
from dualeval.report.loggers.loggers import Target

_FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)


def write(entry: LogEntry, target: Target) -> str:
    """Log the entry into the run of its name, or one of its own, which is made where it is not there."""
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.tracking import MlflowClient

    client = MlflowClient(target.where)
    # MLflow's own variable for it.
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "dualeval"
    run = _run(client, name, entry, target.name)
    identity, step = run.info.run_id, entry.step or 0
    where = f"run {identity} of the experiment {name!r} in {target.where}"
    mark = f"dualeval.logged.{step}"
    if run.data.tags.get(mark) == entry.key:
        return f"{where} has this result already"
    folder = "" if entry.step is None else f"step-{entry.step}/"
    for each, png in entry.pictures.items():
        client.log_image(identity, opened(png), artifact_file=f"{folder}{each}.png")
    for each, table in entry.tables.items():
        client.log_dict(identity, {"columns": table.columns, "data": table.rows}, f"{folder}{each}.json")
    client.log_dict(identity, entry.result, f"{folder}result.json")
    at = round(1000 * entry.time)
    params = _valid(entry.params).items()
    client.log_batch(
        identity,
        metrics=[Metric(key, value, at, step) for key, value in _valid(entry.scalars).items()],
        # MLflow never changes a parameter: of a training these are the first step's.
        params=[Param(key, str(value)) for key, value in params if key not in run.data.params],
        tags=[RunTag(f"unit.{key}", unit) for key, unit in _valid(entry.units).items()],
    )
    # Last: what has this is whole.
    client.set_tag(identity, mark, entry.key)
    client.set_terminated(identity, "FINISHED")
    return where


def _run(client: Any, name: str, entry: LogEntry, run_name: str | None) -> Any:
    """The tracker's run, found by a tag, or made."""
    known = client.get_experiment_by_name(name)
    experiment = str(client.create_experiment(name) if known is None else known.experiment_id)
    tags = {"dualeval.run": run_name or entry.key}
    if found := client.search_runs(
        [experiment], f"tags.`dualeval.run` = '{tags['dualeval.run']}'", max_results=1
    ):
        return found[0]
    start = round(1000 * (entry.time - entry.scalars["run/total_s"]))
    return client.create_run(experiment, start_time=start, run_name=run_name or entry.name, tags=tags)


def _valid(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by names that MLflow takes: other letters than its own become "_"."""
    return {_FORBIDDEN.sub("_", name): value for name, value in values.items()}
