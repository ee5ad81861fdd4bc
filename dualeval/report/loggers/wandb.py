"""Weights & Biases: a run of a project; offline where this machine has no key."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import suppress
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import wandb
from PIL import Image

from dualeval.report.loggers.record import JOB, Record
from dualeval.report.loggers.targets import Target

_INIT_WITHIN_S = 30.0
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_OFFLINE = ("offline", "dryrun")


def write(record: Record, target: Target) -> str:
    """Log the record into the run of its name, or one of its own."""
    entity, _, project = target.where.rpartition("/")
    mode = _mode(os.environ)
    identity = target.name or f"dualeval-{record.key}"
    mark = f"dualeval-{record.key}"
    if mode in _OFFLINE and (there := _logged_before(identity, mark)):
        return f"{there} has this result already"
    run = wandb.init(
        entity=entity or None,
        project=project,
        id=identity,
        name=target.name or record.name,
        # An offline run cannot know of others; 'wandb sync' joins those of one id.
        resume=None if mode in _OFFLINE else "allow",
        mode=mode,
        tags=["dualeval"],
        settings=wandb.Settings(
            init_timeout=_INIT_WITHIN_S,
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
        ),
    )
    # The job nested, as in result.json, with what the numbers mean.
    config = {name: record.result[name] for name in (*JOB, "intervals", "units", "directions", "warnings")}
    run.config.update(config, allow_val_change=True)  # type: ignore[no-untyped-call]
    row: dict[str, Any] = dict(record.scalars)
    for name, png in record.pictures.items():
        row[name] = wandb.Image(Image.open(io.BytesIO(png)))
    for name, table in record.tables.items():
        row[name] = wandb.Table(columns=[*table.columns], data=table.rows)
    # A step that is there already is not added again.
    run.log(row, step=record.step or 0)
    run.summary.update(record.scalars)
    folder, address = Path(run.dir).parent, run.url
    run.finish()
    if mode in _OFFLINE:
        (folder / mark).touch()
        return f"{folder} (offline; 'wandb sync {folder}' uploads it)"
    return address or f"the project {target.where}"


def _mode(environ: Mapping[str, str]) -> Any:
    """What the user has set, or else online with a key and offline without."""
    if environ.get("WANDB_MODE"):
        return environ["WANDB_MODE"]
    settings = wandb.setup().settings
    has_key = bool(settings.api_key) or any(environ.get(name) for name in _KEYS)
    # What 'wandb login' has left.
    path = Path(environ.get("NETRC") or Path.home() / ".netrc")
    with suppress(FileNotFoundError, NetrcParseError):  # no such file, or one that wandb cannot read either
        host = urlsplit(settings.base_url).hostname or ""
        has_key = has_key or netrc(str(path)).authenticators(host) is not None
    return settings.mode if has_key else "offline"


def _logged_before(identity: str, mark: str) -> Path | None:
    """The folder of an offline run that has the record."""
    root = Path(os.environ.get("WANDB_DIR") or ".") / "wandb"
    return next((path.parent for path in root.glob(f"offline-run-*-{identity}/{mark}")), None)
