"""What ``dualeval bench`` and ``dualeval conformance`` share: one command that starts many runs."""

from __future__ import annotations

import os
from pathlib import Path

import click

from dualeval.errors import LaunchError, UsageError
from dualeval.launch import detect
from dualeval.launch.starts import may_start_ranks


def words_of(_context: click.Context, _parameter: click.Parameter, value: str | None) -> list[str] | None:
    """Callback of an option: words with commas between, each once."""
    return None if value is None else list(dict.fromkeys(word.strip() for word in value.split(",")))


def counts_of(context: click.Context, parameter: click.Parameter, value: str | None) -> list[int] | None:
    """Callback of an option: whole numbers with commas between, in order."""
    words = words_of(context, parameter, value)
    if words is None:
        return None
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise click.BadParameter(
            f"{value!r}: expected whole numbers of at least 1 with commas between, as 1,2"
        )
    return sorted(set(map(int, words)))


def check_no_rank(launcher: str | None, why: str) -> None:
    """Refuse to be one of several ranks, each of which would start all runs."""
    world = detect(os.environ, launcher)
    if not may_start_ranks(world):
        raise LaunchError(
            f"{world.launcher} started this process as rank {world.rank} of {world.size}, and {why}"
        )


def check_new_folder(folder: Path) -> None:
    """Refuse a folder for the report that has something in it, or cannot be written; makes none."""
    if folder.is_dir():
        if any(folder.iterdir()):
            raise UsageError(f"--out {folder}: this folder is not empty. Give a new or an empty one.")
        nearest = folder
    elif os.path.lexists(folder):
        raise UsageError(f"--out {folder}: this is no folder. Give a new or an empty one.")
    else:
        nearest = next(parent for parent in folder.parents if os.path.lexists(parent))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        why = "cannot be written" if nearest.is_dir() else "is no folder"
        raise UsageError(f"--out {folder}: {nearest} {why}. Give a folder of your own.")


def make_folders(folder: Path, *names: str) -> None:
    """Make the folders of these names in the report's folder."""
    try:
        for name in names:
            (folder / name).mkdir(parents=True)
    except OSError as error:
        raise UsageError(
            f"--out {folder}: it cannot be made ({error.strerror}). Give a folder of your own."
        ) from error
