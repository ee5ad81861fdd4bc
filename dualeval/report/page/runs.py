"""The runs of a page: the one that it is of, those that it is compared with, and their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dualeval.comparison.worst import JudgedRows
from dualeval.result import RESULT, Result, read_result


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The rows of a finished run, and by name those of the runs that it is compared with."""

    name: str
    rows: JudgedRows
    others: Mapping[str, JudgedRows]

    @classmethod
    def open(cls, folder: Path, against: Sequence[Path] = (), shown: Result | None = None) -> Runs:
        """Those in these folders.

        ``shown`` is the run's result as it was shown, where its groups may be others than those in its file.
        """
        result, against = read_result(folder / RESULT), [*dict.fromkeys(against)]
        if shown is not None:
            result = replace(result, slices=shown.slices, warnings=shown.warnings)
        name, *names = _names_of([folder, *against])
        others = {of: JudgedRows.open(other) for of, other in zip(names, against, strict=True)}
        return cls(name=name, rows=JudgedRows(folder, result), others=others)


def _names_of(folders: Sequence[Path]) -> list[str]:
    """What runs are called: their folders, with as much before them as tells them apart."""
    parts = [folder.absolute().parts for folder in folders]
    for count in range(1, max(map(len, parts))):
        names = ["/".join(each[-count:]) for each in parts]
        if len({*names}) == len({*parts}):
            break
    return names
