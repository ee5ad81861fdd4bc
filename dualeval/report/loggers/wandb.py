"""Weights & Biases: a run of a project; offline where this machine has no key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dualeval.report.loggers.entry import JOB, LogEntry, opened
from dualeval.report.loggers.loggers import Target

_OFFLINE = ("offline", "dryrun")


def write(entry: LogEntry, target: Target) -> str:
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
    row |= {name: wandb.Image(opened(png)) for name, png in entry.pictures.items()}
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
