"""Whose code a file is: the user's own, an installed distribution's, or Python's."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from functools import cache
from pathlib import Path


@cache
def library_of(file: Path) -> str | None:
    """The installed distribution that owns a file, as NAME-VERSION; "python"; None for the user's own.

    Not by where it lies: a checkout may be on the path, a distribution may be installed anywhere (pip's
    --target, conda, Spack), and the user's own file may lie among the installed ones.
    """
    on_path = {*map(Path, map(os.path.abspath, sys.path))}
    for folder in on_path.intersection(file.parents):
        owner = _owner(folder, file.relative_to(folder).parts[0].partition(".")[0])
        if owner is not None:
            return owner
    for folder in {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}:
        if file.is_relative_to(folder):
            first = file.relative_to(folder).parts[0].partition(".")[0]
            return "python" if first in sys.stdlib_module_names else None
    return None


@cache
def _owner(folder: Path, name: str) -> str | None:
    """Which distribution in a folder has installed a top-level module or package, if any has."""
    distributions = sorted([*folder.glob("*-*.dist-info"), *folder.glob("*-*.egg-info")])
    # Most often it has the module's name; an editable install has no version in the name of its .egg-info.
    distributions.sort(key=lambda path: path.name.partition("-")[0].lower() != name.lower())
    installed = re.compile(rf"^{re.escape(name)}(?:[./]|$)", re.MULTILINE)
    for path in distributions:
        # Debian's have no RECORD.
        listed = next((path / file for file in ("RECORD", "top_level.txt") if (path / file).is_file()), None)
        if listed is not None and installed.search(listed.read_text("utf-8", "replace")):
            return path.stem
    return None
