"""TensorBoard: an event file in a folder, by its own writer; TensorFlow is not needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dualeval.report.loggers.entry import LogEntry, Table, opened
from dualeval.report.loggers.loggers import Target


def write(entry: LogEntry, target: Target) -> str:
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
        width, height = opened(png).size
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
