"""A class map: a JSON file that says which class each folder is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualeval.errors import UsageError

_EXPECTED = 'expected a JSON file, {"FOLDER": INDEX, ...}'


@dataclass(frozen=True, kw_only=True)
class ClassMap:
    """Which class each folder is."""

    path: Path
    # Index of the class by name of the folder; None for a folder that is left out.
    classes: dict[str, int | None]


def read_class_map(path: Path) -> ClassMap:
    """Read a class map: one JSON object, folder to index; null leaves a folder out."""
    where = f"--class-map {path}"
    try:
        # Pairs: of a key that stands there twice, a dict would keep the last value without a word.
        pairs = json.loads(path.read_text("utf-8-sig"), object_pairs_hook=_Pairs)
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}; {_EXPECTED}") from error
    if not isinstance(pairs, _Pairs) or not pairs:
        found = "is empty" if isinstance(pairs, _Pairs) else f"holds a {type(pairs).__name__}"
        raise UsageError(f"{where} {found}: {_EXPECTED}")
    classes: dict[str, int | None] = {}
    for folder, index in pairs:
        if folder in classes:
            raise UsageError(f"{where}: {folder!r} is there twice. Leave one out.")
        if index is not None and (type(index) is not int or index < 0):
            turned = " A map of index to folder has to be turned round." * isinstance(index, str | list)
            raise UsageError(
                f"{where}: {folder!r} is mapped to {json.dumps(index, ensure_ascii=False)}: expected the "
                f"class's index, a whole number from 0, or null to leave the folder out.{turned}"
            )
        classes[folder] = index
    return ClassMap(path=path, classes=classes)


class _Pairs(list[tuple[str, Any]]):
    """The entries of a JSON object."""
