"""JSON Lines: a line a result, for pandas, jq and scripts."""

from __future__ import annotations

import json
import os
from pathlib import Path

from dualeval.report.loggers.entry import LogEntry
from dualeval.report.loggers.loggers import Target


def write(entry: LogEntry, target: Target) -> str:
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
