"""What is logged of a result, in the plain values that every tracker takes; and the trackers.

``_write_KIND`` logs an entry once, and says where it is now. Each imports its own library.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from PIL import Image

from dualeval.report.loggers.confusions import (
    MOST_DRAWN,
    Confusion,
    confusions_of,
    draw_confusion,
    figures_of,
    is_confusion,
)
from dualeval.report.loggers.loggers import Target, is_installed
from dualeval.result import Result

# Of more classes than these each figure is in the table alone: a tracker draws a chart of every scalar.
_CHARTED_CLASSES = 100
# Fields of result.json that tell runs apart.
JOB = (
    *("job", "world", "device", "versions", "data", "weights", "part", "fingerprint", "metrics_digest"),
    *("samples_digest", "homogeneous", "deterministic", "folder", "finished_at"),
)
_OF_DATA = ("fingerprint", "contents", "samples")


@dataclass(frozen=True, kw_only=True)
class Table:
    """Figures of each class: names of the columns, and a row a class."""

    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """What is logged of a result."""

    # The same for the same result and step, and no other: what was logged already is found by it.
    key: str
    # Of the result, for people.
    name: str
    # The training step; None outside of a training.
    step: int | None
    # When the run came to its end, seconds since 1970.
    time: float
    # By name: metrics, the ends of their intervals (`top1_low`, `top1_high`), figures of classes
    # (`per_class/f1/3 Dress`) and of the run (`run/samples_per_s`).
    scalars: dict[str, float]
    # Of the scalars that have one.
    units: dict[str, str]
    # Figures of each class, by name.
    tables: dict[str, Table]
    # Confusion matrices, by name.
    confusions: dict[str, Confusion]
    # The job and where it ran, flat, by dotted names.
    params: dict[str, Any]
    # The content of result.json.
    result: dict[str, Any]

    @cached_property
    def pictures(self) -> dict[str, bytes]:
        """The confusion matrices as PNG files, by name; none where matplotlib is not there."""
        if not is_installed("matplotlib"):
            return {}
        model = self.result["description"].get("model")
        behind = "" if model is None else f": {model}"
        return {
            name: draw_confusion(
                confusion, f"{name.removesuffix('_matrix').replace('_', ' ').capitalize()}{behind}"
            )
            for name, confusion in self.confusions.items()
            if confusion.classes <= MOST_DRAWN
        }


def entry_of(result: Result, folder: Path | None, step: int | None) -> LogEntry:
    """Make the entry of a result."""
    names = [*(result.labels.get("classes") or ())]
    confusions = confusions_of(result, folder, names)
    tables = {name: _table(columns, names) for name, columns in figures_of(result, confusions).items()}
    finished = result.finished_at or datetime.now(timezone.utc).isoformat()
    intervals, units = _of_intervals(result)
    content = json.loads(result.to_json())
    job = {name: content[name] for name in JOB}
    job["data"] = {name: result.data.get(name) for name in _OF_DATA}
    return LogEntry(
        key=_key_of(result, step),
        name=result.fingerprint[:8] if folder is None else folder.name,
        step=step,
        time=datetime.fromisoformat(finished).timestamp(),
        scalars={**_metrics(result), **intervals, **_of_run(result), **_of_classes(tables)},
        units={**result.units, **units},
        tables=tables,
        confusions=confusions,
        params=dict(_flat("", job)),
        result=content,
    )


def _key_of(result: Result, step: int | None) -> str:
    # Of two runs of one job that end within a second the seconds that they took differ.
    facts = [result.fingerprint, result.metrics_digest, result.finished_at, result.timing, step]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _metrics(result: Result) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, value in result.metrics.items():
        if is_number(value):
            metrics[name] = value
        elif isinstance(value, dict) and not is_confusion(value):
            metrics |= {f"{name}/{part}": number for part, number in value.items() if is_number(number)}
    return metrics


def _of_intervals(result: Result) -> tuple[dict[str, float], dict[str, str]]:
    """The ends of the intervals, and their units."""
    ends = {
        (name, f"{name}{suffix}_{which}"): end
        for suffix, intervals in (("", result.intervals), ("_whole_set", result.whole_set_intervals))
        for name, pair in intervals.items()
        for which, end in zip(("low", "high"), pair, strict=True)
    }
    units = {key: result.units[name] for name, key in ends if name in result.units}
    return {key: end for (_, key), end in ends.items()}, units


def _of_run(result: Result) -> dict[str, float]:
    figures = {
        "run/samples_evaluated": result.samples["evaluated"],
        "run/samples_failed": result.samples["failed"],
        "run/samples_per_s": result.samples_per_s,
        "run/evaluate_s": result.timing["evaluate_s"],
        "run/total_s": result.timing["total_s"],
        # How far the predictions are from those of another run, where one was named.
        "reference/agreement": result.reference.get("agreement"),
        "reference/largest_loss_difference": (result.reference.get("loss") or {}).get("largest"),
    }
    return {name: value for name, value in figures.items() if value is not None}


def _table(columns: Mapping[str, Sequence[Any]], names: Sequence[str | None]) -> Table:
    count = max(map(len, columns.values()))
    known = [*names, *[None] * (count - len(names))]
    rows = [[index, known[index], *(values[index] for values in columns.values())] for index in range(count)]
    return Table(columns=["class", "name", *columns], rows=rows)


def _of_classes(tables: Mapping[str, Table]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, table in tables.items():
        for index, label, *values in table.rows if len(table.rows) <= _CHARTED_CLASSES else ():
            called = f"{index}" if label is None else f"{index} {label}"
            for column, value in zip(table.columns[2:], values, strict=True):
                if is_number(value):
                    figures[f"{name}/{column}/{called}"] = value
    return figures


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Plain values by dotted names; lists as JSON, and nothing for None."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        elif value is not None:
            is_plain = isinstance(value, bool | int | float | str)
            yield f"{prefix}{name}", value if is_plain else json.dumps(value, ensure_ascii=False)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is one that a chart can show."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def write(entry: LogEntry, target: Target) -> str:
    """Log the entry; returns where."""
    kinds = {
        "jsonl": _write_jsonl,
        "mlflow": _write_mlflow,
        "tensorboard": _write_tensorboard,
        "wandb": _write_wandb,
    }
    return kinds[target.kind](entry, target)


# -- JSON Lines: a line a result, for pandas, jq and scripts ---------------------------------------------


def _write_jsonl(entry: LogEntry, target: Target) -> str:
    """Add a line to the file; one that is there already stays the only one."""
    path = Path(target.where)
    path.parent.mkdir(parents=True, exist_ok=True)
    ends_whole = True
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                ends_whole = line.endswith(b"\n")
                if _key(line) == entry.key:
                    return f"{path} has this result already"
    content = {"key": entry.key, "step": entry.step, "name": entry.name, "scalars": entry.scalars}
    line = json.dumps({**content, **entry.result}, ensure_ascii=False).encode("utf-8", "backslashreplace")
    # In one piece behind what others write at the same time.
    with path.open("ab") as file:
        file.write(line + b"\n" if ends_whole else b"\n" + line + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return f"a line in {path}"


def _key(line: bytes) -> str | None:
    try:
        content = json.loads(line)
    except ValueError:  # half a line, of a process that was killed, or another program's
        return None
    return content.get("key") if isinstance(content, dict) else None


# -- TensorBoard: an event file in a folder, by its own writer; TensorFlow is not needed -------------------


def _write_tensorboard(entry: LogEntry, target: Target) -> str:
    """Write the entry as an event file of its own, in place of an earlier one of the same result."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = Path(target.where)
    folder.mkdir(parents=True, exist_ok=True)
    suffix = f".dualeval-{entry.key}"
    earlier = [*folder.glob(f"events.out.tfevents.*{suffix}")]
    writer = EventFileWriter(str(folder), filename_suffix=suffix)
    for value in _summaries(entry):
        summary = Summary(value=[value])
        writer.add_event(Event(step=entry.step or 0, wall_time=entry.time, summary=summary))
    writer.close()
    for path in earlier:
        path.unlink()
    return f"{folder} (tensorboard --logdir {folder})"


def _summaries(entry: LogEntry) -> Iterator[Any]:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.text.summary_v2 import text_pb

    for name, number in entry.scalars.items():
        metadata = SummaryMetadata(
            plugin_data=SummaryMetadata.PluginData(plugin_name="scalars"),
            summary_description=f"unit: {entry.units[name]}" if name in entry.units else "",
        )
        yield Summary.Value(tag=name, simple_value=number, metadata=metadata)
    for name, png in entry.pictures.items():
        width, height = _opened(png).size
        image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)  # RGBA
        yield Summary.Value(tag=name, image=image)
    job = Table(columns=["", ""], rows=[[name, value] for name, value in entry.params.items()])
    texts = {name: _markdown(table) for name, table in {**entry.tables, "job": job}.items()}
    texts["result.json"] = f"```json\n{json.dumps(entry.result, indent=1, ensure_ascii=False)}\n```"
    for name, text in texts.items():
        yield from text_pb(name, text.encode("utf-8", "backslashreplace")).value


def _markdown(table: Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: object) -> str:
    text = "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _opened(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png))


# -- MLflow: a run of an experiment, by its own client -----------------------------------------------------

_FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)


def _write_mlflow(entry: LogEntry, target: Target) -> str:
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
        client.log_image(identity, _opened(png), artifact_file=f"{folder}{each}.png")
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
    if runs := client.search_runs(
        [experiment], f"tags.`dualeval.run` = '{tags['dualeval.run']}'", max_results=1
    ):
        return runs[0]
    start = round(1000 * (entry.time - entry.scalars["run/total_s"]))
    return client.create_run(experiment, start_time=start, run_name=run_name or entry.name, tags=tags)


def _valid(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by names that MLflow takes: other letters than its own become "_"."""
    return {_FORBIDDEN.sub("_", name): value for name, value in values.items()}


# -- Weights & Biases: a run of a project; offline where this machine has no key ---------------------------

_OFFLINE = ("offline", "dryrun")


def _write_wandb(entry: LogEntry, target: Target) -> str:
    """Log the entry in the mode that the user has set, or else online with a key and offline without."""
    import wandb

    set_mode = os.environ.get("WANDB_MODE")
    try:
        return _write_in_mode(set_mode or wandb.setup().settings.mode, entry, target)
    except wandb.errors.UsageError:  # no key, and no terminal to ask for one
        if set_mode:
            raise
        return _write_in_mode("offline", entry, target)


def _write_in_mode(mode: Any, entry: LogEntry, target: Target) -> str:
    """Log the entry into the run of its name, or one of its own."""
    import wandb

    entity, _, project = target.where.rpartition("/")
    mark = f"dualeval-{entry.key}"
    identity = target.name or mark
    if mode in _OFFLINE:
        root = Path(os.environ.get("WANDB_DIR") or ".") / "wandb"
        for there in root.glob(f"offline-run-*-{identity}/{mark}"):
            return f"{there.parent} has this result already"
    run = wandb.init(
        entity=entity or None,
        project=project,
        id=identity,
        name=target.name or entry.name,
        # An offline run cannot know of others; 'wandb sync' joins those of one id.
        resume=None if mode in _OFFLINE else "allow",
        mode=mode,
        tags=["dualeval"],
        settings=wandb.Settings(
            init_timeout=30.0,
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
        ),
    )
    # The job nested, as in result.json, with what the numbers mean.
    config = {name: entry.result[name] for name in (*JOB, "intervals", "units", "directions", "warnings")}
    run.config.update(config, allow_val_change=True)  # type: ignore[no-untyped-call]
    row: dict[str, Any] = dict(entry.scalars)
    row |= {name: wandb.Image(_opened(png)) for name, png in entry.pictures.items()}
    for name, table in entry.tables.items():
        row[name] = wandb.Table(columns=[*table.columns], data=table.rows)
    # A step that is there already is not added again.
    run.log(row, step=entry.step or 0)
    run.summary.update(entry.scalars)
    folder, address = Path(run.dir).parent, run.url
    run.finish()
    if mode in _OFFLINE:
        (folder / mark).touch()
        return f"{folder} (offline; 'wandb sync {folder}' uploads it)"
    return address or f"the project {target.where}"
